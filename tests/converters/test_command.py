"""`lora-slots convert` from outside: exit status, streams, JSON, and what it does not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import CONFIG, LLAMA, PREFIX, llama_tensors, write_adapter, write_base

from lora_slots.convert_command import main
from trtllm_lora import find_bundle
from trtllm_lora.signing import check_signature, new_key

COMMAND = [str(Path(sys.executable).parent / "lora-slots"), "convert"]


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The small Llama's config.json."""
    return write_base(tmp_path / "base")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A plain adapter."""
    return write_adapter(tmp_path / "pirate", llama_tensors())


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """An adapter with three things against it."""
    tensors = {**llama_tensors(), "base_model.model.lm_head.weight": np.ones((32, 16), np.float32)}
    return write_adapter(tmp_path / "bad", tensors, {"bias": "all", "use_warp": True})


def test_converted(good: Path, base: Path, tmp_path: Path) -> None:
    """Exit 0, one line on stdout, silence on stderr, one bundle."""
    done = run(good, "--base", base, "--out", tmp_path / "o", "--dtype", "float16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    bundle = find_bundle(tmp_path / "o")
    assert done.stdout.startswith("pirate: 4 rows, rank 4, float16")
    assert str(bundle.task_id) in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--json", "--explain"]])
def test_a_report_nobody_can_take(good: Path, base: Path, tmp_path: Path, arguments: list[str]) -> None:
    """Where stdout is full or closed, one line on stderr and exit 1: no traceback, and the bundle is whole."""
    common = [good, "--base", base, "--out", tmp_path / "o", "--dtype", "float16", *arguments]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *map(str, common)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("lora-slots convert: the report could not be written: No space left")
    assert done.stderr.count("\n") == 1
    find_bundle(tmp_path / "o").verify()


def test_refused(bad: Path, base: Path, tmp_path: Path) -> None:
    """Exit 2, every reason on stderr with its rule, nothing on stdout, no files."""
    done = run(bad, "--base", base, "--out", tmp_path / "o", "--dtype", "float16")
    assert (done.returncode, done.stdout) == (2, "")
    for rule in ("bias", "unknown-field", "modules-to-save"):
        assert f"docs/conversion-rules.md#{rule}]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--bogus"],
        ["nowhere", "--out", "o", "--dtype", "float16"],
        ["{good}"],
        ["{good}", "--out", "o"],
        ["{good}", "--out", "o", "--dtype", "int8"],
        ["{good}", "--out", "o", "--dtype", "float16", "--base", "nowhere"],
        ["{good}", "--out", "o", "--dtype", "float16", "--engine", "nowhere"],
        ["{good}", "--check", "--verify", "b", "--dtype", "float16"],
        ["{good}", "--out", "o", "--dtype", "float16", "--fused", "everything"],
        ["{good}", "--out", "o", "--dtype", "float16", "--fused", "attn_qkv", "--tp", "0"],
        ["{good}", "--out", "o", "--dtype", "float16", "--name", "\udcff"],
    ],
)
def test_wrong_usage_exits_1(arguments: list[str], good: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A wrong argument is not a judgement on the adapter: exit 1, one message, no files."""
    monkeypatch.chdir(tmp_path)
    try:
        status = main([argument.replace("{good}", str(good)) for argument in arguments])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 1
    assert "lora-slots convert: " in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: ADAPTER"),
        (["a", "--bogus"], "unrecognized arguments: --bogus"),
        (["a", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(arguments: list[str], says: str, capsys: Any) -> None:
    """What is wrong and where to read on, not the whole usage."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 1
    assert said.startswith("lora-slots convert: ")
    assert says in said
    assert said.endswith("see `lora-slots convert --help`\n")
    assert said.count("\n") == 1


def test_check_writes_nothing(good: Path, bad: Path, base: Path, tmp_path: Path, capsys: Any) -> None:
    """--check judges every value as a conversion would, and leaves no file."""
    before = sorted(tmp_path.rglob("*"))
    assert main([str(good), "--base", str(base), "--dtype", "float16", "--check", "--out", str(tmp_path / "o")]) == 0
    assert "can be converted: 4 rows" in capsys.readouterr().out
    assert main([str(bad), "--base", str(base), "--dtype", "float16", "--check"]) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_explain_prints_the_match_table(good: Path, base: Path, capsys: Any) -> None:
    """Module, layers, rank, scale, target row: one line for all layers alike."""
    assert main([str(good), "--base", str(base), "--dtype", "float16", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["module", "layers", "rank", "scale", "row"]
    assert lines[1].split() == ["self_attn.q_proj", "0-1", "4", "2", "attn_q"]


def test_json(good: Path, bad: Path, base: Path, tmp_path: Path, capsys: Any) -> None:
    """--json gives one object on stdout, refused or not."""
    common = ["--base", str(base), "--dtype", "float16", "--out", str(tmp_path / "o"), "--json"]
    assert main([str(good), *common]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert said["bundle"]["digest"] == find_bundle(tmp_path / "o").digest
    assert main([str(bad), *common]) == 2
    streams = capsys.readouterr()
    said = json.loads(streams.out)
    assert {problem["rule"] for problem in said["refusals"]["problems"]} == {"bias", "unknown-field", "modules-to-save"}
    assert "refused, 3 problems" in streams.err


def test_warnings_do_not_refuse(tmp_path: Path, base: Path, capsys: Any) -> None:
    """What is only to know goes to stderr and leaves the exit status alone."""
    adapter = write_adapter(tmp_path / "a", llama_tensors(), {"alpha_pattern": {"z_proj": 3}})
    assert main([str(adapter), "--base", str(base), "--dtype", "float16", "--check"]) == 0
    assert "z_proj" in capsys.readouterr().err


def test_no_torch_and_no_typer(good: Path, base: Path, tmp_path: Path) -> None:
    """A conversion imports neither torch nor what takes as long."""
    code = (
        "import sys; from lora_slots.convert_command import main; status = main(sys.argv[1:]);"
        "heavy = set('torch transformers peft typer pydantic rich boto3 ml_dtypes'.split()) & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else status)"
    )
    arguments = [str(good), "--base", str(base), "--out", str(tmp_path / "o"), "--dtype", "bfloat16"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_next_to_nothing() -> None:
    """--help answers from argparse and the standard library: no numpy, no typer, and nothing of the conversion."""
    code = (
        "import sys, atexit; from lora_slots import cli; sys.argv[1:] = ['convert', '--help'];"
        "atexit.register(lambda: sys.stderr.write(' '.join(sys.modules))); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    imported = set(done.stderr.split())
    assert done.returncode == 0
    assert "--base-weights" in done.stdout
    assert "argparse" in imported
    heavy = {
        "numpy",
        "torch",
        "transformers",
        "peft",
        "typer",
        "pydantic",
        "rich",
        "yaml",
        "boto3",
        "asyncio",
        "hashlib",
    }
    assert not heavy & imported
    ours = {name for name in imported if name.partition(".")[0] in ("peft_to_trtllm", "trtllm_lora", "adapter_slots")}
    assert not ours


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals, again: bool) -> None:
    """Ctrl-C, SIGTERM and SIGHUP in the middle of writing, once or many times, leave no traceback and no file."""
    size = 2048
    config = {
        **LLAMA,
        "hidden_size": size,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 40,
    }
    tensors = {
        f"{PREFIX}{layer}.self_attn.q_proj.lora_{letter}.weight": np.ones(shape, np.float32)
        for layer in range(40)
        for letter, shape in (("A", (256, size)), ("B", (size, 256)))
    }
    adapter = write_adapter(tmp_path / "a", tensors, {**CONFIG, "r": 256})
    out = tmp_path / "o"
    arguments = [*COMMAND, str(adapter), "--base", str(write_base(tmp_path / "b", config)), "--out", str(out)]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a child inherits what nohup around the tests ignores
    child = subprocess.Popen(
        [*arguments, "--dtype", "float32"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGHUP, before)
    while not (out.exists() and any(out.iterdir())) and child.poll() is None:
        os.sched_yield()
    child.send_signal(number)
    while again and child.poll() is None:
        child.send_signal(signal.SIGINT)
        os.sched_yield()
    _, errors = child.communicate(timeout=60)
    expected = {128 + number, 130, -signal.SIGINT} if again else {128 + number}  # -2: Python itself was ending
    assert child.returncode in expected, errors
    assert "Traceback" not in errors
    assert not out.exists()


@pytest.mark.oracle
def test_verify(tmp_path: Path) -> None:
    """--verify runs PEFT beside the bundle: right scales pass, a wrong one does not."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", llama_tensors(), {"target_modules": ["q_proj", "v_proj"]})
    arguments = ["--base", str(tmp_path / "base"), "--dtype", "float16", "--out", str(tmp_path / "o")]
    done = run(adapter, *arguments, "--verify", tmp_path / "base")
    assert done.returncode == 0, done.stderr
    assert "as PEFT: largest logit difference" in done.stdout

    from peft_to_trtllm.job import Job, Request
    from peft_to_trtllm.verify import verify

    with Job(Request(str(adapter), base=tmp_path / "base", dtype="float16")) as job:
        assert job.conversion
        other = write_adapter(tmp_path / "other", llama_tensors(seed=1), {"target_modules": ["q_proj", "v_proj"]})
        verdict = verify(find_bundle(tmp_path / "o"), job.conversion.plan, other, tmp_path / "base")
    assert not verdict.ok


def test_a_bar_where_a_person_looks(good: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work on a terminal shows its progress, and the rest of the output is as ever."""
    from lora_slots import convert_command

    monkeypatch.setattr(convert_command, "_LONG_WORK_BYTES", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([str(good), "--base", str(base), "--dtype", "float16", "--out", str(tmp_path / "o")]) == 0
    assert find_bundle(tmp_path / "o").dtype == "float16"


def test_verify_looks_before_it_writes(good: Path, base: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Without peft there is nothing to verify with, and so no bundle either."""
    from peft_to_trtllm import verify

    monkeypatch.setattr(verify, "find_spec", lambda name: None if name == "peft" else name)
    arguments = [str(good), "--base", str(base), "--dtype", "float16", "--out", str(tmp_path / "o")]
    assert main([*arguments, "--verify", str(base)]) == 1
    assert "not installed: peft" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_names_cannot_steer_the_terminal(base: Path, tmp_path: Path, capsys: Any) -> None:
    """Control characters in names are printed as escapes, in success, refusal and error."""
    arguments = ["--base", str(base), "--dtype", "float16", "--out", str(tmp_path / "o")]
    adapter = write_adapter(tmp_path / "a\x1b[31m", llama_tensors())
    assert main([str(adapter), *arguments]) == 0
    assert main([str(adapter), *arguments, "--name", "x\n\x1b[2J"]) == 0
    odd = write_adapter(tmp_path / "b\x07", llama_tensors(), {"bias": "all"})
    assert main([str(odd), *arguments]) == 2
    assert main([str(tmp_path / "c\x1b"), *arguments]) == 1
    streams = capsys.readouterr()
    said = streams.out.replace(str(tmp_path), "") + streams.err
    assert "\\x1b[31m" in said
    assert all(c.isprintable() or c == "\n" for c in said)


def test_sign(good: Path, base: Path, tmp_path: Path, capsys: Any) -> None:
    """The bundle is signed, one that was there unsigned too; a key that cannot be used is told before the work."""
    key = new_key(tmp_path / "k")
    words = [str(good), "--base", str(base), "--out", str(tmp_path / "o"), "--dtype", "float16"]
    assert main(words) == 0
    assert find_bundle(tmp_path / "o").signature is None
    assert main([*words, "--sign", str(tmp_path / "k"), "--json"]) == 0
    bundle = find_bundle(tmp_path / "o")
    bundle.verify()
    check_signature(bundle.digest, bundle.signature, {key.public.id: key.public})
    told = capsys.readouterr().out
    assert json.loads(told[told.index("{") :])["bundle"]["signature"] == bundle.signature
    (tmp_path / "k").chmod(0o644)
    assert main([*words[:-3], str(tmp_path / "p"), "--sign", str(tmp_path / "k")]) == 1
    assert "others may read this private key" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
    assert main([*words, "--check", "--sign", str(tmp_path / "k")]) == 1
    assert "--sign signs a bundle that was written" in capsys.readouterr().err
