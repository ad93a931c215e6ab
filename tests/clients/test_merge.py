"""`lora-slots merge`: PEFT's own merge, written as a Hugging Face directory that answers like base plus adapter."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lora_slots.base_model.tiny import make_tiny_llama
from lora_slots.cli import application
from lora_slots.merge import NOTE_FILE, merge_adapter
from lora_slots.refusals import Refused

WEIGHTS = "adapter_model.safetensors"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers and peft about each other


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base."""
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", seed=3)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter of it with weights that change answers."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(base))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter") / "mine"
    peft.get_peft_model(model, config).save_pretrained(str(folder))
    return folder


def logits(folder: Path, adapter: Path | None = None) -> Any:
    """Logits of a fixed prompt."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


@pytest.mark.oracle
def test_merged_equals_base_with_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    """The merged model's logits are those of base and adapter together, and not those of the base."""
    import torch

    out = merge_adapter(base, adapter, tmp_path / "merged")
    together = logits(base, adapter)
    assert torch.allclose(logits(out), together, atol=1e-5)
    assert not torch.allclose(logits(base), together, atol=1e-2)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (out / NOTE_FILE).is_file()


@pytest.mark.oracle
def test_the_command_prints_json(base: Path, adapter: Path, tmp_path: Path) -> None:
    """One document on stdout, whatever PEFT says beside it."""
    out = tmp_path / "merged"
    done = CliRunner().invoke(application(), ["merge", str(adapter), "--base", str(base), "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"path": str(out), "base": str(base), "adapter": str(adapter)}
    assert (out / NOTE_FILE).is_file()


@pytest.mark.oracle
def test_nothing_is_left_of_a_merge_that_failed(base: Path, adapter: Path, tmp_path: Path) -> None:
    """An adapter of another base is refused in one line, and no folder appears."""
    other = make_tiny_llama(tmp_path / "other", seed=4, hidden=32, heads=2, kv_heads=1)
    with pytest.raises(Refused, match=r"q_proj.*\[docs/conversion-rules.md#shape\]"):
        merge_adapter(other, adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_every_reason_at_once(tmp_path: Path) -> None:
    """No base, no adapter, and a place that is taken: three lines, before torch is imported."""
    with pytest.raises(Refused) as caught:
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path)
    assert len(str(caught.value).splitlines()) == 3


def changed(adapter: Path, folder: Path, tensors: Any = None, **fields: Any) -> Path:
    """A copy of an adapter: `tensors` is called with its tensors and gives others, `fields` are of its config."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return folder


def renamed(old: str, new: str) -> Any:
    """Keys with `new` for `old`."""
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


def nothing_trained(tensors: dict[str, Any]) -> dict[str, Any]:
    """lora_B as training begins."""
    return {key: value * (0 if "lora_B" in key else 1) for key, value in tensors.items()}


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("tensors", "fields", "says"),
    [
        (renamed("base_model.model.", ""), {}, "tensors have no place in the model.*begin with base_model.model."),
        (renamed("layers.1.", "layers.7."), {}, "layer 7.*#layer-range"),
        (nothing_trained, {}, "changes no weight"),
        (None, {"peft_type": "IA3", "feedforward_modules": ["down_proj"]}, r"IA3Config of .* has no .*lora_alpha"),
        (None, {"peft_type": "MAGIC"}, "peft_type is 'MAGIC'"),
        (None, {"r": "x"}, "#field-type"),
        (None, {"target_modules": ["q_proj"]}, "down_proj.*a module that the config targets"),
        (None, {"target_modules": ["q_proj", "k_proj", "down_proj"]}, "no tensors for 4 places.*k_proj"),
    ],
)
def test_what_would_be_merged_in_part_or_not_at_all_is_refused(
    base: Path, adapter: Path, tmp_path: Path, tensors: Any, fields: dict[str, Any], says: str
) -> None:
    """PEFT passes over what does not fit; here it is said, with 2, and nothing is written."""
    bad, out = changed(adapter, tmp_path / "bad", tensors, **fields), tmp_path / "merged"
    done = CliRunner().invoke(application(), ["merge", str(bad), "--base", str(base), "-o", str(out)])
    assert done.exit_code == 2, done.output
    assert re.search(says, done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


@pytest.mark.oracle
@pytest.mark.parametrize("broken", ["adapter", "base", "shard"])
def test_a_file_cut_short_is_one_line(base: Path, adapter: Path, tmp_path: Path, broken: str) -> None:
    """The adapter's tensors, the base's, or a base without some of them: no traceback, exit code 2, nothing written."""
    from safetensors.numpy import load_file, save_file

    mine, other = changed(adapter, tmp_path / "mine"), tmp_path / "other"
    shutil.copytree(base, other)
    file = mine / WEIGHTS if broken == "adapter" else other / "model.safetensors"
    if broken == "shard":
        weights = load_file(file)
        save_file({name: weights[name] for name in weights if "layers.1." not in name}, file, {"format": "pt"})
    else:
        file.write_bytes(file.read_bytes()[:-100])
    words = ["merge", str(mine), "--base", str(other), "-o", str(tmp_path / "merged")]
    done = CliRunner().invoke(application(), words)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
    told = [line for line in done.stderr.splitlines() if line.startswith(str(tmp_path))]
    assert len(told) == 1, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other"]


@pytest.mark.oracle
def test_the_bases_own_files_stay_as_they_are(base: Path, adapter: Path, tmp_path: Path) -> None:
    """config.json with rope_theta and all, byte for byte; another type changes that key alone."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    own = tmp_path / "own"
    shutil.copytree(base, own)
    config = json.loads((own / "config.json").read_text())
    config |= {"rope_theta": 500000.0, "rope_scaling": {**llama3, "original_max_position_embeddings": 512}}
    (own / "config.json").write_text(json.dumps(config))
    (own / "generation_config.json").unlink(missing_ok=True)
    out = merge_adapter(own, adapter, tmp_path / "merged")
    assert (out / "config.json").read_bytes() == (own / "config.json").read_bytes()
    weights = {"model.safetensors", NOTE_FILE}
    assert {path.name for path in out.iterdir()} == {path.name for path in own.iterdir()} | weights
    half = merge_adapter(own, adapter, tmp_path / "half", dtype="bfloat16")
    assert json.loads((half / "config.json").read_text()) == config | {"torch_dtype": "bfloat16"}


@pytest.mark.oracle
def test_a_field_of_a_later_peft_that_is_off_does_no_harm(base: Path, adapter: Path, tmp_path: Path) -> None:
    """As in a conversion; one that is on is refused by the converter's rule."""
    later = changed(adapter, tmp_path / "later", use_something_new=False, new_config=None)
    assert merge_adapter(base, later, tmp_path / "merged").is_dir()
    with pytest.raises(Refused, match="#unknown-field"):
        merge_adapter(base, changed(adapter, tmp_path / "on", use_something_new=True), tmp_path / "more")


@pytest.mark.oracle
def test_an_adapter_of_a_base_with_another_name_is_told(base: Path, adapter: Path, tmp_path: Path) -> None:
    """On stderr, and the merge goes on; of the base that it was trained on nothing is said."""
    names = (("meta-llama/Llama-3.1-8B", True), (f"someone/{base.name}", False), (str(base), False))
    for number, (name, told) in enumerate(names):
        mine = changed(adapter, tmp_path / f"adapter{number}", base_model_name_or_path=name)
        out = tmp_path / f"merged{number}"
        done = CliRunner().invoke(application(), ["merge", str(mine), "--base", str(base), "-o", str(out)])
        assert done.exit_code == 0, done.output
        assert ("was trained on 'meta-llama/Llama-3.1-8B'" in done.stderr) is told


@pytest.mark.oracle
def test_what_a_bundle_cannot_carry_is_merged(base: Path, adapter: Path, tmp_path: Path) -> None:
    """A whole trained matrix is refused by `convert`, which advises to merge it: that works."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(str(base))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False)
    wrapped: Any = peft.get_peft_model(model, config)
    with torch.no_grad():
        wrapped.base_model.model.model.norm.modules_to_save["default"].weight.mul_(3)
    wrapped.save_pretrained(str(tmp_path / "mine"))
    out = merge_adapter(base, tmp_path / "mine", tmp_path / "merged")
    assert torch.allclose(logits(out), logits(base, tmp_path / "mine"), atol=1e-4)
