"""NIM 1.x's environment and its folder of adapters: what is taken from where, and what is refused by which name."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import seaweed
from fakes.seaweed import Seaweed
from hypothesis import given
from hypothesis import strategies as st

from adapter_slots.registry import Registry
from adapter_slots.registry_home import home_of
from adapter_slots.registry_writing import change
from adapter_slots.settings import Settings, SettingsError
from adapter_slots.store import source_digest
from lora_slots import cli, examples, nim
from lora_slots.base_model import ensure_base_model
from lora_slots.errors import UsageError
from lora_slots.peft_source import MEMORY, PeftSource
from peft_to_trtllm import convert
from trtllm_lora import EngineShape
from trtllm_lora.bundle import file_sha256
from trtllm_lora.tensors import Row, pack

NIM = {
    "NIM_PEFT_SOURCE": "/loras",
    "NIM_PEFT_REFRESH_INTERVAL": "30",
    "NIM_MAX_GPU_LORAS": "4",
    "NIM_MAX_CPU_LORAS": "16",
    "NIM_MAX_LORA_RANK": "32",
}
CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "intermediate_size": 128,
}  # fmt: skip
SHAPE = EngineShape.from_hf_config(CONFIG, dtype="float16", max_lora_rank=64)
GIVEN = {"engine_dir": "/engine", "registry": "r.yaml", "engine_url": "x:1", "num_slots": "", "host_bytes": " "}


def completed(environ: Mapping[str, str], **given: str) -> dict[str, str]:
    """lora_router's parameters with an environment; blank ones are not given."""
    return nim.read(environ).completed({**GIVEN, **given}, lambda _: SHAPE)


def test_nims_names_are_aliases() -> None:
    """Source, interval, slots, room in host memory, rank."""
    read = nim.read(NIM)
    assert (read.peft_source, read.peft_refresh_s, read.host_adapters, read.max_lora_rank) == ("/loras", 30.0, 16, 32)
    assert completed(NIM)["num_slots"] == "4"
    assert nim.read({}) == nim.Environment()
    assert nim.read(dict.fromkeys(NIM, "")) == nim.Environment(), "an empty variable is none"


def test_an_option_goes_before_ours_and_ours_before_nims() -> None:
    """For every setting."""
    ours = {"LORA_SLOTS_NUM_SLOTS": "6", "LORA_SLOTS_PEFT_SOURCE": "s3://b/p", "LORA_SLOTS_IDLE_S": "7"}
    merged = completed(NIM | ours)
    assert (merged["num_slots"], merged["idle_s"]) == ("6", "7")
    assert nim.read(NIM | ours).peft_source == "s3://b/p"
    assert completed(NIM | ours, num_slots="9")["num_slots"] == "9"
    assert completed(NIM | {"LORA_SLOTS_HOST_BYTES": "5"})["host_bytes"] == "5"
    assert Settings.parse(merged).num_slots == 6


@given(st.sets(st.sampled_from(["option", "ours", "nims"]), min_size=1))
def test_precedence_holds_for_any_combination(said: set[str]) -> None:
    """The first of option, ours, NIM's that says something."""
    environ = {"LORA_SLOTS_NUM_SLOTS": "2"} if "ours" in said else {}
    environ |= {"NIM_MAX_GPU_LORAS": "3"} if "nims" in said else {}
    given_ = {"num_slots": "1"} if "option" in said else {}
    first = next(number for name, number in (("option", "1"), ("ours", "2"), ("nims", "3")) if name in said)
    assert completed(environ, **given_)["num_slots"] == first


def test_room_in_host_memory_is_for_the_largest_adapters() -> None:
    """So many adapters of the highest rank there may be fit, as bundles are laid out, and not one more."""
    room = int(completed({"NIM_MAX_CPU_LORAS": "3", "NIM_MAX_LORA_RANK": "8"})["host_bytes"])
    largest = bundle_bytes(8)
    assert 3 * largest <= room < 4 * largest
    room = int(completed({"NIM_MAX_CPU_LORAS": "3"})["host_bytes"])
    assert 3 * bundle_bytes(64) <= room < 4 * bundle_bytes(64)


def bundle_bytes(rank: int) -> int:
    """Weights and rows of an adapter of one rank on everything, as the converter packs them."""
    import numpy as np

    from trtllm_lora.modules import MODULES, dims

    rows = []
    for layer, name in itertools.product(range(SHAPE.num_layers), SHAPE.lora_modules):
        d_in, d_out = dims(name, SHAPE)
        a, b = np.zeros((rank, d_in), np.float16), np.zeros((d_out, rank), np.float16)
        rows.append(Row(MODULES[name].id, layer, a, b))
    weights, config = pack(rows, "float16")
    return weights.nbytes + config.nbytes


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NIM_MAX_GPU_LORAS": "many"}, "NIM_MAX_GPU_LORAS=many: a whole number, 1 or more"),
        ({"NIM_MAX_GPU_LORAS": "0"}, "NIM_MAX_GPU_LORAS=0: a whole number"),
        ({"NIM_MAX_CPU_LORAS": "1.5"}, r"NIM_MAX_CPU_LORAS=1\.5: a whole number"),
        (
            {"NIM_MAX_GPU_LORAS": "8", "NIM_MAX_CPU_LORAS": "4"},
            "NIM_MAX_CPU_LORAS=4: must not be below NIM_MAX_GPU_LORAS=8",
        ),
        ({"NIM_PEFT_REFRESH_INTERVAL": "-1"}, "NIM_PEFT_REFRESH_INTERVAL=-1: a number of seconds above 0"),
        ({"NIM_PEFT_REFRESH_INTERVAL": "inf"}, "NIM_PEFT_REFRESH_INTERVAL=inf: a number of seconds"),
        ({"NIM_PEFT_SOURCE": "http://store:8000"}, "NIM_PEFT_SOURCE=http://store:8000: an entity store cannot be read"),
        ({"NIM_PEFT_SOURCE": "gs://bucket/x"}, "NIM_PEFT_SOURCE=gs://bucket/x: a directory, or s3://"),
        ({"NIM_PEFT_SOURCE": "s3://"}, "NIM_PEFT_SOURCE=s3://: a directory, or s3://"),
        ({"NIM_MAX_LORA_RANK": "r"}, "NIM_MAX_LORA_RANK=r: a whole number"),
        ({"LORA_SLOTS_NUM_SLOTS": "x", "NIM_MAX_GPU_LORAS": "3"}, "LORA_SLOTS_NUM_SLOTS=x"),
        ({"LORA_SLOTS_POLICY": "fifo"}, "LORA_SLOTS_POLICY=fifo: 'fifo' is none of lru, gdsf"),
        ({"LORA_SLOTS_TICK_S": "nan"}, "LORA_SLOTS_TICK_S=nan: a finite number"),
        ({"LORA_SLOTS_DISK_BYTES": "-4"}, "LORA_SLOTS_DISK_BYTES=-4: at least 1 is expected"),
        ({"LORA_SLOTS_TICK_S": "soon"}, "LORA_SLOTS_TICK_S=soon: a number is expected"),
        ({"LORA_SLOTS_REGISTRY": "a", "LORA_SLOTS_PEFT_SOURCE": "b"}, "both say where adapters come from"),
        ({"LORA_SLOTS_HOST_BYTES": "1", "LORA_SLOTS_HOST_ADAPTERS": "1"}, "say the same"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(environ: dict[str, str], words: str) -> None:
    """What it was, and what would be right."""
    with pytest.raises(SettingsError, match=words):
        nim.read(environ)


def test_all_wrong_values_are_named_at_once() -> None:
    """A line each."""
    with pytest.raises(SettingsError) as refused:
        nim.read({"NIM_MAX_GPU_LORAS": "x", "NIM_MAX_LORA_RANK": "y", "LORA_SLOTS_WAIT_S": "z"})
    assert str(refused.value).count("\n") == 2


@given(st.dictionaries(st.sampled_from([*NIM, "LORA_SLOTS_IDLE_S", "LORA_SLOTS_COLD"]), st.text(max_size=8)))
def test_any_value_is_read_or_refused(environ: dict[str, str]) -> None:
    """And every refusal begins with a variable that was set."""
    try:
        nim.read(environ)
    except SettingsError as error:
        assert str(error).partition("=")[0] in environ


def test_what_kubernetes_sets_for_a_service_is_left_alone() -> None:
    """A Service called lora-slots gives every pod such variables."""
    assert nim.read({"LORA_SLOTS_SERVICE_HOST": "10.0.0.1", "LORA_SLOTS_PORT": "tcp://10.0.0.1:8001"}).parameters == {}


def test_a_higher_rank_than_the_engines_is_refused() -> None:
    """With both ranks."""
    with pytest.raises(SettingsError, match="NIM_MAX_LORA_RANK=128: the engine was built for ranks up to 64"):
        completed({"NIM_MAX_LORA_RANK": "128"})


def test_an_error_of_the_manager_tells_the_variable() -> None:
    """What only the slot manager can refuse."""
    read = nim.read({"LORA_SLOTS_NUM_SLOTS": "4", "LORA_SLOTS_TICK_S": "0.5"})
    told = read.told(SettingsError("lora_router: tick_s must be at least 0.001, found 0.0"))
    assert str(told).endswith("(tick_s is from LORA_SLOTS_TICK_S)")


def test_up_names_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and one line, before anything is made; the embedded engine's rank is known."""
    for variable, value, words in (
        ("NIM_MAX_GPU_LORAS", "many", "NIM_MAX_GPU_LORAS=many: a whole number"),
        ("NIM_MAX_LORA_RANK", "128", "NIM_MAX_LORA_RANK=128: the engine was built for ranks up to 64"),
        ("NIM_PEFT_SOURCE", "/no/such/folder", "/no/such/folder: No such file or directory"),
        ("LORA_SLOTS_REGISTRY", "/no/such/file", "LORA_SLOTS_REGISTRY: /no/such/file"),
        ("LORA_SLOTS_REGISTRY", "gs://b/k", "LORA_SLOTS_REGISTRY: gs://b/k: a registry is a file, or s3://bucket/key"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            patch.setattr(sys, "argv", ["lora-slots", "up", "--check"])
            with pytest.raises(SystemExit) as left:
                cli.main()
        said = capsys.readouterr().err
        assert left.value.code == 1
        assert words in said
        assert said.count("\n") == 1


# --- the folder


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    """A folder as NIM has it: two PEFT adapters, and what is none."""
    folder = tmp_path / "loras"
    for name in ("pirate", "robot"):
        shutil.copytree(examples.adapters()[name], folder / name)
    (folder / ".hidden").mkdir()
    (folder / "README.md").write_text("not a folder")
    return folder


@pytest.fixture
def source(loras: Path, tmp_path: Path) -> PeftSource:
    """It as a source."""
    return PeftSource(str(loras), cache=tmp_path / "cache")


def served(source: PeftSource) -> dict[str, tuple[int, str]]:
    """Adapter -> version and digest."""
    return {name: (entry.version, entry.digest) for name, entry in Registry(source.registry).entries.items()}


def digest(folder: Path) -> str:
    """The source digest of a PEFT adapter."""
    return source_digest({path.name: file_sha256(path) for path in folder.glob("adapter_*")})


def test_each_folder_is_an_adapter(source: PeftSource, loras: Path) -> None:
    """Named as it is, with the digest of its bytes, at its place; a second look changes nothing."""
    scan = source.scan()
    assert (list(scan.added), scan.removed, scan.refused) == (["pirate", "robot"], [], {})
    assert served(source) == {name: (1, digest(loras / name)) for name in ("pirate", "robot")}
    entry = Registry(source.registry).entries["pirate"]
    assert Path(entry.path) == loras / "pirate"
    assert entry.rank
    before = source.registry.read_bytes()
    assert source.scan().lines() == []
    assert source.registry.read_bytes() == before


def test_folders_come_change_and_go(source: PeftSource, loras: Path) -> None:
    """A new one is new; other bytes are the next version, and the only one; a folder that is gone takes its adapter."""
    source.scan()
    shutil.copytree(examples.adapters()["json"], loras / "json")
    file = loras / "robot" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] + 1}))
    shutil.rmtree(loras / "pirate")
    scan = source.scan()
    assert (scan.added, scan.renewed, scan.removed) == (["json"], ["robot"], ["pirate"])
    assert served(source) == {"json": (1, digest(loras / "json")), "robot": (2, digest(loras / "robot"))}
    assert len(Registry(source.registry).content.all_entries()) == 2
    shutil.copytree(examples.adapters()["pirate"], loras / "pirate")
    source.scan()
    assert served(source)["pirate"][0] == 2, "a number is never given twice"


def test_a_folder_that_is_being_copied_waits(source: PeftSource, loras: Path) -> None:
    """Without its weights, with half of them, then whole; one that is overwritten keeps serving what it had."""
    whole = examples.adapters()["json"]
    (loras / "json").mkdir()
    shutil.copy(whole / "adapter_config.json", loras / "json")
    assert "no adapter_model.safetensors" in source.scan().refused["json"]
    weights = (whole / "adapter_model.safetensors").read_bytes()
    for cut in (0, 4, 100, len(weights) // 2, len(weights) - 1):
        (loras / "json" / "adapter_model.safetensors").write_bytes(weights[:cut])
        source.scan()
        assert "json" not in served(source)
    assert "not whole" in PeftSource(str(loras), cache=source.home.parents[1]).scan().refused["json"]
    (loras / "json" / "adapter_model.safetensors").write_bytes(weights)
    assert list(source.scan().added) == ["json"]
    (loras / "json" / "adapter_model.safetensors").write_bytes(weights[:-1])
    scan = source.scan()
    assert "not whole" in scan.refused["json"]
    assert served(source)["json"] == (1, digest(whole))


def test_what_cannot_be_served_is_told_once_with_the_reason(source: PeftSource, loras: Path) -> None:
    """A NeMo file, a bare engine's weights, an impossible name, a broken configuration; the others are served."""
    for name, file in (("nemo", "math.nemo"), ("npy", "model.lora_weights.npy"), ("ba se", "adapter_config.json")):
        (loras / name).mkdir()
        (loras / name / file).write_bytes(b"x")
    shutil.copytree(examples.adapters()["json"], loras / "broken")
    (loras / "broken" / "adapter_config.json").write_text("{")
    refused = source.scan().refused
    assert "a NeMo file: export it" in refused["nemo"]
    assert "what `lora-slots convert` makes" in refused["npy"]
    assert "no adapter name" in refused["ba se"]
    assert "broken" in refused
    assert set(served(source)) == {"pirate", "robot"}
    assert source.scan().refused == {}, "told already"


def test_a_rank_above_the_limit_is_refused_and_the_limit_may_change(loras: Path, tmp_path: Path) -> None:
    """NIM_MAX_LORA_RANK; what was found out about the bytes stays known, the verdict does not."""
    rank = json.loads((loras / "pirate" / "adapter_config.json").read_text())["r"]
    low = PeftSource(str(loras), max_rank=rank - 1, cache=tmp_path / "cache").scan()
    assert low.refused["pirate"] == f"rank {rank} is above the {rank - 1} that are allowed"
    high = PeftSource(str(loras), max_rank=rank, cache=tmp_path / "cache").scan()
    assert "pirate" in high.added


def test_a_bundle_in_a_folder_is_served_too(source: PeftSource, loras: Path) -> None:
    """As `lora-slots convert --out FOLDER` leaves it: below its digest."""
    bundle = convert(
        examples.adapters()["json"], base=ensure_base_model(), out=loras / "json", dtype="float32", name="json"
    )
    source.scan()
    assert served(source)["json"] == (1, bundle.digest)


def test_a_source_that_is_empty_all_of_a_sudden_is_not_believed(source: PeftSource, loras: Path) -> None:
    """A volume that is not mounted looks so: what was served stays. One that is gone altogether is an error."""
    source.scan()
    loras.rename(loras.with_name("elsewhere"))
    with pytest.raises(UsageError, match="loras: No such file or directory"):
        source.scan()
    loras.mkdir()
    assert "is empty all of a sudden" in str(source.scan().kept)
    assert set(served(source)) == {"pirate", "robot"}
    loras.rmdir()
    loras.with_name("elsewhere").rename(loras)
    assert source.scan().lines() == []


def test_bytes_are_read_once(source: PeftSource, loras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over restarts too, as long as size, time and number are the same; a memory that was cut costs a look."""
    source.scan()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr("lora_slots.peft_source.examined", refuse)
        again = PeftSource(str(loras), cache=tmp_path / "cache")
        assert again.scan().lines() == []
        file = loras / "robot" / "adapter_config.json"
        os.utime(file, ns=(1, 1))
        with pytest.raises(AssertionError, match="read again"):
            again.scan()
    (source.home / MEMORY).write_text('{"pirate": ')
    assert PeftSource(str(loras), cache=tmp_path / "cache").scan().lines() == []


def test_an_adapter_that_an_alias_needs_stays(source: PeftSource, loras: Path) -> None:
    """An operator's alias in the registry is not broken by a folder that goes."""
    source.scan()
    alias = {"aliases": {"support": {"targets": {"robot": 100}}}}
    change(home_of(source.registry), "alias", lambda doc: {**doc, **alias})
    shutil.rmtree(loras / "robot")
    assert "alias support" in source.scan().refused["robot"]
    assert set(served(source)) == {"pirate", "robot"}


def test_following_tells_changes_and_outlives_trouble(source: PeftSource, loras: Path) -> None:
    """A thread that looks again and again: new adapters, a source that is away (told once), and back."""
    source.scan()
    stop, told = threading.Event(), threading.Condition()
    lines: list[str] = []

    def tell(new: Any) -> None:
        with told:
            lines.extend(new)
            told.notify_all()

    def until(words: str) -> None:
        with told:
            assert told.wait_for(lambda: any(words in line for line in lines), 60), lines

    thread = threading.Thread(target=source.follow, args=(0.01, stop, tell))
    thread.start()
    try:
        loras.rename(loras.with_name("away"))
        until("cannot be read, what was served stays")
        shutil.copytree(examples.adapters()["json"], loras.with_name("away") / "json")
        loras.with_name("away").rename(loras)
        until("new: json")
    finally:
        stop.set()
        thread.join()
    assert sum("cannot be read" in line for line in lines) == 1


# --- in an object store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real one."""
    with seaweed.for_tests(tmp_path_factory.mktemp("seaweed"), "adapters") as server:
        yield server


def test_a_prefix_in_an_object_store_is_a_folder(
    store: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters come, change and go there; their bytes are fetched once for each ETag."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    client = store.client()

    def put(adapter: str, name: str) -> None:
        for file in examples.adapters()[adapter].iterdir():
            client.put_object(Bucket="adapters", Key=f"team/loras/{name}/{file.name}", Body=file.read_bytes())

    put("pirate", "pirate")
    put("robot", "robot")
    source = PeftSource("s3://adapters/team/loras/", endpoint_url=store.url, cache=tmp_path / "cache")
    assert list(source.scan().added) == ["pirate", "robot"]
    assert served(source)["pirate"] == (1, digest(examples.adapters()["pirate"]))
    assert Registry(source.registry).entries["pirate"].path == "s3://adapters/team/loras/pirate"
    put("json", "robot")
    put("json", "json")
    for file in examples.adapters()["pirate"].iterdir():
        client.delete_object(Bucket="adapters", Key=f"team/loras/pirate/{file.name}")
    scan = source.scan()
    assert (scan.added, scan.renewed, scan.removed) == (["json"], ["robot"], ["pirate"])
    with monkeypatch.context() as patch:
        patch.setattr("lora_slots.peft_source.examined", None)
        assert source.scan().lines() == []
    with pytest.raises(UsageError, match="s3://nowhere: the store answered NoSuchBucket"):
        PeftSource("s3://nowhere", endpoint_url=store.url, cache=tmp_path / "cache").scan()


def test_no_error_of_a_store_has_a_credential(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody listens there: the place and the kind of trouble."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        PeftSource("s3://adapters/x", endpoint_url="http://127.0.0.1:1", cache=tmp_path / "cache").scan()
    assert str(refused.value) == "s3://adapters/x: EndpointConnectionError"
    assert seaweed.SECRET not in str(refused.value)
