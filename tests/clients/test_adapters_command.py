"""`lora-slots adapters …` as a person and a pipeline use it: words, JSON, exit codes; and `convert --sign`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes import seaweed
from fakes.bundles import SHAPE, small_bundle
from fakes.seaweed import Seaweed
from typer.testing import CliRunner, Result

from adapter_slots.errors import RegistryError
from adapter_slots.registry import Registry
from lora_slots import adapters_command
from lora_slots.errors import UsageError
from lora_slots.examples import adapters as example_adapters
from trtllm_lora import Bundle, open_bundle
from trtllm_lora.errors import SignatureError
from trtllm_lora.signing import read_private_key, read_public_key

NAMES = ("ant", "bee", "cat")


class Shell:
    """The command over one registry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "adapters.yaml"
        self.app = typer.Typer()
        adapters_command.register(self.app)

    def run(self, *words: object, code: int = 0, registry: str | None = None) -> Result:
        """Run `adapters …`; the exit code must be this one."""
        place = {"LORA_SLOTS_REGISTRY": registry or str(self.file)}
        result = CliRunner().invoke(self.app, ["adapters", *map(str, words)], env=place)
        assert result.exit_code == code, result.output
        return result

    def json(self, *words: object, code: int = 0) -> Any:
        """What it prints as JSON."""
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def registry(self) -> Registry:
        """As a server reads it."""
        return Registry(self.file)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """An empty registry."""
    return Shell(tmp_path)


@pytest.fixture
def bundles(tmp_path: Path) -> list[Bundle]:
    """Three bundles of small adapters."""
    return [small_bundle(tmp_path / "bundles", name, seed) for seed, name in enumerate(NAMES)]


def test_the_life_of_an_adapter(shell: Shell, bundles: list[Bundle]) -> None:
    """First version, canary, more, all, back, and back again; what is shown is what a server reads."""
    assert "ant@1: bundle" in shell.run("add", "ant", bundles[0].path).stdout
    shell.run("alias", "set", "support", "ant")
    shell.run("add", "ant", bundles[1].path, "--canary", 5)
    entry = shell.registry().entries["ant"]
    assert (entry.version, entry.digest, entry.path) == (1, bundles[0].digest, str(bundles[0].path))
    assert (entry.rank, entry.target_modules, entry.pinned) == (4, ("attn_q",), False)
    assert shell.registry().aliases["support"].targets == {"ant": 95, "ant@2": 5}
    assert "ant 80 %, ant@2 20 %" in shell.run("promote", "ant@2", "--alias", "support", "--weight", 20).stdout
    shell.run("promote", "ant@2", "--alias", "support")
    assert shell.registry().resolve("support").digest == bundles[1].digest
    assert "taken back: promote ant@2 --alias support of" in shell.run("rollback", "support").stdout
    assert shell.registry().aliases["support"].targets == {"ant": 80, "ant@2": 20}
    shell.run("promote", "ant@2")
    assert shell.registry().entries["ant"].version == 2
    refused = shell.run("remove", "ant@2", code=2)
    assert "ant@2 is the current version: promote another one first" in refused.stderr
    assert (
        "ant is a target of alias support (ant, 80 %), support (ant@2, 20 %)"
        in shell.run("remove", "ant", code=2).stderr
    )
    shell.run("alias", "remove", "support")
    shell.run("remove", "ant")
    assert shell.registry().entries == {}
    whats = [record["what"] for record in shell.json("history")]
    assert whats[:3] == ["add ant", "alias set support ant", "add ant --canary 5"]
    assert whats[-2:] == ["alias remove support", "remove ant"]
    assert len(shell.json("history", "support", "--last", 2)) == 2


def test_lists_and_details_say_the_same_as_json(shell: Shell, bundles: list[Bundle]) -> None:
    """Every rule of an adapter, its aliases, its versions."""
    shell.run("add", "ant", bundles[0].path, "--pinned", "--cold", "fail", "--tenant", "acme", "--base-model", "m@r")
    shell.run("alias", "set", "a", "ant@1=100")
    (ant,) = shell.json("list")["adapters"]
    assert {key: ant[key] for key in ("name", "current", "pinned", "cold", "tenants")} == {
        "name": "ant", "current": 1, "pinned": True, "cold": "fail", "tenants": ["acme"],
    }  # fmt: skip
    assert shell.json("show", "ant") == ant
    assert ant["versions"][0]["base_model"] == "m@r"
    text = shell.run("show", "ant").stdout
    for words in ("current 1, pinned, cold fail, tenants acme", bundles[0].digest, "m@r", "alias a: ant@1 100 %"):
        assert words in text
    assert shell.json("show", "a") == {"alias": "a", "targets": {"ant@1": 100}}
    assert "near names: ant" in shell.run("show", "antt", code=2).stderr
    shell.run("set", "ant", "--everybody", "--no-cold")
    shell.run("pin", "ant", "--off")
    assert "pinned" not in shell.run("show", "ant").stdout
    entry = shell.registry().entries["ant"]
    assert (entry.tenants, entry.cold, entry.pinned) == (None, None, False)


def test_a_pipeline_that_runs_twice_changes_once(shell: Shell, bundles: list[Bundle]) -> None:
    """The same content is no new version; rules and signatures that are new are taken."""
    first = shell.json("add", "ant", bundles[0].path)
    assert first["changes"][0]["to"]["versions"][0]["digest"] == bundles[0].digest
    assert shell.json("add", "ant", bundles[0].path) == {"id": None, "what": "add ant", "changes": []}
    shell.run("keygen", shell.folder / "k")
    shell.run("add", "ant", bundles[0].path, "--sign", shell.folder / "k", "--pinned")
    shell.run("add", "ant", bundles[1].path)
    shell.run("add", "ant", bundles[0].path)
    versions = shell.json("show", "ant")["versions"]
    assert [v["digest"] for v in versions] == [bundles[0].digest, bundles[1].digest]
    assert versions[0]["signature"].startswith("ed25519:")
    assert shell.registry().entries["ant"].version == 1, "adding what is there makes it current"


def test_a_raw_adapter_is_named_by_its_source_digest(shell: Shell) -> None:
    """A PEFT directory as a trainer leaves it; its facts come from adapter_config.json."""
    shell.run("add", "robot", example_adapters()["robot"])
    entry = shell.registry().entries["robot"]
    assert entry.digest == "8d0751ecc13b8542871651a49c6797200510c50257c04e1922db880ec25d4715"
    assert (entry.base_model, entry.rank) == ("HuggingFaceTB/SmolLM2-135M-Instruct", 12)
    assert shell.json("verify")[0]["kind"] == "peft"


def test_what_would_not_convert_is_told(shell: Shell) -> None:
    """It is published all the same, since its base is not known here; verify says what it did not judge."""
    broken = shell.folder / "broken"
    shutil.copytree(example_adapters()["robot"], broken)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "bias": "all"}))
    done = shell.run("add", "robot", broken)
    assert "warning: without its base it would not convert:" in done.stderr
    assert "bias" in done.stderr
    assert "good peft (bytes; --engine judges the conversion)" in shell.run("verify").output


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("add", "ant", "nowhere"), 2, "nowhere: no such directory"),
        (("add", "base", "BUNDLE"), 2, "no adapter name"),
        (("add", "new", "BUNDLE", "--canary", "5", "--alias", "x"), 2, "new@1 is the only version of new"),
        (("add", "new", "BUNDLE", "--canary", "5"), 2, "which --alias? new is in none"),
        (("add", "ant", "BUNDLE", "--canary", "500", "--alias", "x"), 2, "0 to 100 percent"),
        (("add", "new", "BUNDLE", "--cold", "hot"), 2, "cold: must be one of wait, fail, base"),
        (("add", "new", "BUNDLE", "--pool", "g"), 2, "there is no pool 'g'"),
        (("promote", "ant@9"), 2, "adapter 'ant' has no version 9; there are 1"),
        (("promote", "ant@1", "--alias", "nobody"), 2, "there is no alias 'nobody'"),
        (("alias", "set", "a", "ant=50"), 2, "the weights sum to 50"),
        (("alias", "set", "a", "ant=50", "nat=50"), 2, "no adapter 'nat'; did you mean 'ant'?"),
        (("alias", "set", "ant", "ant"), 2, "'ant' is an adapter too"),
        (("rollback", "nobody"), 2, "no change of 'nobody'"),
        (("remove", "nat"), 2, "no adapter 'nat'; near names: ant"),
        (("pin", "nat"), 2, "no adapter 'nat'"),
        (("verify", "nat"), 2, "no adapter 'nat'"),
        (("sign", "ant@4", "--key", "KEY"), 2, "no version 4"),
    ],
)
def test_what_is_refused_exits_2_and_changes_nothing(
    shell: Shell, bundles: list[Bundle], words: tuple[str, ...], code: int, told: str
) -> None:
    """One message that says what would be right."""
    shell.run("add", "ant", bundles[0].path)
    shell.run("keygen", shell.folder / "k")
    before = shell.file.read_bytes()
    places = {"BUNDLE": str(bundles[2].path), "KEY": str(shell.folder / "k")}
    assert told in shell.run(*(places.get(word, word) for word in words), code=code).stderr
    assert shell.file.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("promote", "ant"), "say which version, NAME@N"),
        (("promote", "ant@1", "--weight", "5"), "--weight goes with --alias"),
        (("add", "ant", "x", "--alias", "a"), "--alias goes with --canary"),
        (("add", "ant", "x", "--sign", "k", "--signature", "s"), "give one of the two"),
        (("alias", "set", "a", "ant", "bee"), "each needs its share"),
        (("alias", "set", "a", "ant=x"), "a percentage is a number"),
        (("alias", "set", "a", "ant=50", "ant=50"), "there twice"),
        (("set", "ant"), "nothing to set"),
        (("set", "ant", "--cold", "fail", "--no-cold"), "contradict"),
        (("sign", "ant", "--key", "k"), "neither a directory nor NAME@VERSION"),
        (("trust",), "give a public key"),
        (("list", "--registry", "/nowhere/adapters.yaml"), "No such file"),
        (("list", "--registry", "ftp://x/y"), "a registry is a file, or s3://bucket/key"),
        (("keygen", "taken/x"), "cannot be written"),
        (("keygen", "k"), "is there already"),
        (("sign", "taken", "--key", "k.pub"), "others may read this private key"),
    ],
)
def test_a_wrong_usage_is_told(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    """What would be right; nothing is written."""
    monkeypatch.chdir(shell.folder)
    (shell.folder / "taken").write_text("")
    shell.run("keygen", "k")
    result = CliRunner().invoke(shell.app, ["adapters", *words])
    assert isinstance(result.exception, UsageError | RegistryError | SignatureError)
    assert told in str(result.exception)
    assert not shell.file.exists()


def test_the_program_ends_with_one_line_and_1(tmp_path: Path) -> None:
    """No traceback, whatever is wrong with the place."""
    command = [str(Path(sys.executable).with_name("lora-slots")), "adapters", "list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    hint = "the first `lora-slots adapters add` makes it"
    assert done.stderr == f"lora-slots: adapters.yaml: No such file or directory; {hint}\n"


# --- signatures and verification


def test_from_key_to_a_registry_that_insists(shell: Shell, bundles: list[Bundle]) -> None:
    """keygen, sign, trust --require: what is not signed is refused at the door, and found by verify."""
    made = shell.json("keygen", shell.folder / "k")
    assert (shell.folder / "k").stat().st_mode & 0o777 == 0o600
    assert read_public_key(made["public"]).id == made["id"] == read_private_key(shell.folder / "k").public.id
    shell.run("add", "ant", bundles[0].path)
    shell.run("trust", shell.folder / "k.pub", "--require")
    assert shell.registry().terms.require_signatures
    assert (
        f"adapter 'bee@1': not signed; trusted keys: {made['id']}"
        in shell.run("add", "bee", bundles[1].path, code=2).stderr
    )
    bad = shell.json("verify", code=2)
    assert [(v["name"], v["signed_by"], v["problems"]) for v in bad] == [
        ("ant", None, [f"not signed; trusted keys: {made['id']}"])
    ]
    assert f"signed by {made['id']}" in shell.run("sign", bundles[0].path, "--key", shell.folder / "k").stdout
    assert open_bundle(bundles[0].path).signature is not None
    shell.run("add", "bee", bundles[1].path, "--sign", shell.folder / "k")
    assert [v["signed_by"] for v in shell.json("verify")] == [made["id"]] * 2
    shell.run("trust", shell.folder / "k.pub", "--remove", "--no-require")
    document = shell.file.read_text()
    assert "trusted_keys" not in document
    assert "require" not in document
    assert "is not trusted here" in shell.run("trust", shell.folder / "k.pub", "--remove", code=2).stderr


def test_a_version_is_signed_in_the_registry(shell: Shell) -> None:
    """A raw adapter has no manifest for a signature; a signature made elsewhere can be brought too."""
    shell.run("keygen", shell.folder / "k")
    raw = example_adapters()["pirate"]
    shell.run("add", "pirate", raw)
    shell.run("sign", "pirate@1", "--key", shell.folder / "k")
    printed = shell.json("sign", raw, "--key", shell.folder / "k")
    assert (printed["kind"], printed["written"]) == ("peft", False)
    entry = shell.registry().entries["pirate"]
    assert (entry.digest, entry.signature) == (printed["digest"], printed["signature"])
    shell.run("add", "again", raw, "--signature", printed["signature"])
    assert shell.registry().entries["again"].signature == printed["signature"]


def test_verify_finds_everything_at_once(shell: Shell, bundles: list[Bundle]) -> None:
    """A flipped byte, another base, another rank, a missing folder, one that does not fit; what is good stays good."""
    for name, bundle in zip(NAMES, bundles, strict=True):
        shell.run("add", name, bundle.path, "--base-model", "m@other" if name == "bee" else "m@r")
    wide = small_bundle(shell.folder / "bundles", "wide", seed=9, rank=16)
    shell.run("add", "wide", wide.path)
    weights = bundles[0].path / "model.lora_weights.npy"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    shell.file.write_text(shell.file.read_text().replace("rank: 16", "rank: 32"))
    bundles[2].path.rename(shell.folder / "moved")
    engine = shell.folder / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(json.dumps(engine_config()))
    found = {v["name"]: v["problems"] for v in shell.json("verify", "--engine", engine, "--base-model", "m@r", code=2)}
    assert "differ from the manifest's sha256" in found["ant"][0]
    assert found["bee"] == ["it was trained on m@other, this server's base is m@r"]
    assert "no such directory" in found["cat"][0]
    assert "the registry says rank 32, the bundle says 16" in found["wide"]
    assert any("max_lora_rank is 8" in problem for problem in found["wide"])
    assert shell.run("verify", "bee").stdout == "bee@1: good bundle\n"


def engine_config() -> dict[str, Any]:
    """config.json of an engine of SHAPE."""
    return {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "float32",
            "vocab_size": 96,
            "hidden_size": SHAPE.hidden_size,
            "intermediate_size": 128,
            "num_hidden_layers": SHAPE.num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mapping": {"tp_size": 1, "pp_size": 1},
        },
        "build_config": {
            "max_seq_len": 128,
            "max_batch_size": 8,
            "lora_config": {"lora_target_modules": ["attn_q"], "max_lora_rank": 8},
            "plugin_config": {"lora_plugin": "float32", "gemm_plugin": None},
        },
    }


def test_verify_sees_a_version_that_was_changed_while_nobody_looked(shell: Shell, bundles: list[Bundle]) -> None:
    """By hand, all servers down: the history knows what the number meant."""
    shell.run("add", "ant", bundles[0].path)
    text = shell.file.read_text().replace(bundles[0].digest, bundles[1].digest)
    shell.file.write_text(text)
    (verdict,) = shell.json("verify", code=2)
    assert f"the history says that it had digest {bundles[0].digest[:12]}" in verdict["problems"][0]


def test_old_versions_are_verified_when_asked(shell: Shell, bundles: list[Bundle]) -> None:
    """Else only what names lead to: current versions and targets of aliases."""
    shell.run("add", "ant", bundles[0].path)
    shell.run("add", "ant", bundles[1].path)
    assert [v["version"] for v in shell.json("verify")] == [2]
    assert [v["version"] for v in shell.json("verify", "--all-versions")] == [1, 2]
    assert [v["version"] for v in shell.json("verify", "ant@1")] == [1]
    shell.run("alias", "set", "a", "ant=50", "ant@1=50")
    assert sorted(v["version"] for v in shell.json("verify", "a")) == [1, 2]


def test_schema_is_printed(shell: Shell) -> None:
    """For editors."""
    assert json.loads(shell.run("schema").stdout)["title"] == "adapters.yaml"


@pytest.mark.parametrize(
    "command", ["list", "show", "add", "promote", "rollback", "remove", "pin", "set", "verify", "sign"]
)
def test_help_has_an_example(shell: Shell, command: str) -> None:
    """Each command shows how it is used."""
    assert f"lora-slots adapters {command}" in " ".join(shell.run(command, "--help").stdout.split())


# --- an object store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS with a bucket."""
    with seaweed.for_tests(tmp_path_factory.mktemp("seaweed"), "models") as server:
        yield server


def test_everything_in_an_object_store(
    shell: Shell, bundles: list[Bundle], store: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registry, bundles and raw adapters: added by URL, verified byte by byte, rolled back from the history there."""
    for name, value in {**seaweed.environment(), "AWS_ENDPOINT_URL": store.url}.items():
        monkeypatch.setenv(name, value)
    root = f"s3://models/{uuid.uuid4().hex[:8]}"
    for name, folder in (("bundle", bundles[0].path), ("raw", example_adapters()["robot"])):
        for file in folder.iterdir():
            key = f"{root.removeprefix('s3://models/')}/{name}/{file.name}"
            store.client().put_object(Bucket="models", Key=key, Body=file.read_bytes())
    registry = f"{root}/adapters.yaml"
    shell.run("add", "ant", f"{root}/bundle", registry=registry)
    shell.run("add", "robot", f"{root}/raw/", registry=registry)
    shell.run("pin", "ant", registry=registry)
    found = json.loads(shell.run("verify", "--json", registry=registry).stdout)
    assert [(v["name"], v["kind"], v["problems"]) for v in found] == [("ant", "bundle", []), ("robot", "peft", [])]
    shell.run("rollback", registry=registry)
    entries = Registry(registry).entries
    assert (entries["ant"].pinned, entries["ant"].path) == (False, f"{root}/bundle")
    assert entries["robot"].digest == "8d0751ecc13b8542871651a49c6797200510c50257c04e1922db880ec25d4715"
    monkeypatch.chdir(shell.folder)
    here = bundles[1].path.relative_to(shell.folder)
    result = CliRunner().invoke(shell.app, ["adapters", "add", "x", str(here), "--registry", registry])
    assert isinstance(result.exception, UsageError)
    assert "give an s3:// URL, or a path that every server has" in str(result.exception)
