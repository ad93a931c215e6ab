"""Adapters made and saved by PEFT itself, and ΔW as PEFT computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import LLAMA, LLAMA_MODULES, LLAMA_ROW_DIMS, Deltas, bundle_deltas
from fakes.peft_trained import model_of, trained

from peft_to_trtllm import AdapterRefused, convert, inspect
from peft_to_trtllm.fields import KNOWN

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # peft and transformers about each other

MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
EXPERT_DIMS = {"moe_h_to_4h": (16, 24), "moe_gate": (16, 24), "moe_4h_to_h": (24, 16), **LLAMA_ROW_DIMS}


def linear_deltas(peft: Any) -> Deltas:
    """ΔW of every adapted linear layer: what merging changes (BD-LoRA has no other way to say it)."""
    found: Deltas = {}
    for name, module in peft.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight") and name.rpartition(".")[2] in LLAMA_MODULES:
            layer = int(name.split("layers.")[1].partition(".")[0])
            before = module.base_layer.weight.detach().double().numpy().copy()
            module.merge()
            delta = module.base_layer.weight.detach().double().numpy() - before
            found[layer, LLAMA_MODULES[name.rpartition(".")[2]]] = delta
    return found


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "all linear, rsLoRA": {"r": 4, "lora_alpha": 11, "use_rslora": True, "target_modules": "all-linear"},
    "patterns that saving sorts": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj", "k_proj"],
        "rank_pattern": {"down_proj": 2, "layers.1.self_attn.k_proj": 6},
        "alpha_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 32, r"layers\.\d+\.mlp\..*": 3.5},
    },
    "one layer": {"r": 2, "target_modules": r".*\.layers\.1\..*(o|up)_proj"},
    "block-diagonal": {
        "r": 4,
        "target_modules": ["q_proj", "o_proj"],
        "use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["o_proj"], "nblocks": 2},
    },
    "orthogonal start": {"r": 4, "init_lora_weights": "orthogonal", "target_modules": ["gate_proj", "up_proj"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_linear_layers(tmp_path: Path, kind: str) -> None:
    """What PEFT saved converts to what PEFT loads."""
    lora = dict(KINDS[kind])
    if "use_bdlora" in lora:
        from peft.tuners.lora.config import BdLoraConfig

        lora["use_bdlora"] = BdLoraConfig(**lora["use_bdlora"])
    wanted = linear_deltas(trained(tmp_path, LLAMA, **lora))
    bundle = convert(tmp_path / "adapter", base=tmp_path / "base", out=tmp_path / "o", dtype="float32")
    assert wanted
    found = bundle_deltas(bundle, LLAMA_ROW_DIMS)
    assert found.keys() == wanted.keys()
    for key, delta in wanted.items():  # PEFT computed in float32
        np.testing.assert_allclose(found[key], delta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ["mlp.experts.down_proj"],
        ["mlp.experts.gate_up_proj"],
    ],
)
def test_target_parameters(tmp_path: Path, parameters: list[str]) -> None:
    """LoRA on the fused parameters of all experts: the shapes say which parameter each wrapper holds."""
    patterns = {"alpha_pattern": {"down_proj": 5}, "rank_pattern": {r".*experts\.down_proj": 2}}
    peft = trained(tmp_path, MIXTRAL, r=4, target_modules=["q_proj"], target_parameters=parameters, **patterns)
    wanted = linear_deltas(peft)
    for name, module in peft.base_model.model.named_modules():
        if type(module).__name__ != "ParamWrapper":
            continue
        layer = int(name.split("layers.")[1].partition(".")[0])
        delta = module.get_delta_weight("default").detach().double().numpy()
        if module.parameter_name == "down_proj":
            wanted[layer, "moe_4h_to_h"] = delta
        else:
            wanted[layer, "moe_h_to_4h"], wanted[layer, "moe_gate"] = np.split(delta, 2, axis=1)
    bundle = convert(tmp_path / "adapter", base=tmp_path / "base", out=tmp_path / "o", dtype="float32")
    found = bundle_deltas(bundle, EXPERT_DIMS, experts=3)
    assert found.keys() == wanted.keys()
    for key, delta in wanted.items():
        np.testing.assert_allclose(found[key], delta, rtol=1e-4, atol=1e-6)


def test_pissa_saved_as_it_is_is_refused_and_converted_is_not(tmp_path: Path) -> None:
    """Raw PiSSA belongs to another base; saved with the conversion of PEFT it is plain LoRA."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(**LLAMA)
    config.save_pretrained(tmp_path / "base")
    peft: Any = get_peft_model(model_of(config), LoraConfig(r=4, init_lora_weights="pissa", target_modules=["q_proj"]))
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(str(tmp_path / "start"))
    peft.peft_config["default"].init_lora_weights = "pissa"
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    peft.save_pretrained(str(tmp_path / "raw"))
    peft.save_pretrained(str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    with pytest.raises(AdapterRefused, match="pissa"):
        convert(tmp_path / "raw", base=tmp_path / "base", out=tmp_path / "o", dtype="float32")
    report = inspect(tmp_path / "plain", base=tmp_path / "base", dtype="float32")
    assert report.ok
    assert {match.rank for match in report.matches} == {8}


def test_what_only_training_used_is_ignored(tmp_path: Path) -> None:
    """VeLoRA and MonteCLoRA leave tensors of theirs in the file; each is known by name, and ΔW is plain LoRA's."""
    from peft.tuners.lora.config import MontecloraConfig, VeloraConfig

    for name, variant in (("velora_config", VeloraConfig()), ("monteclora_config", MontecloraConfig())):
        folder = tmp_path / name
        peft = trained(folder, LLAMA, r=4, target_modules=["q_proj"], **{name: variant})
        wanted = {
            (int(path.split("layers.")[1].partition(".")[0]), "attn_q"): module
            for path, module in peft.base_model.model.named_modules()
            if path.endswith("q_proj")
        }
        report = inspect(folder / "adapter", base=folder / "base", dtype="float32")
        assert report.ignored
        found = bundle_deltas(
            convert(folder / "adapter", base=folder / "base", out=folder / "o", dtype="float32"), LLAMA_ROW_DIMS
        )
        for key, module in wanted.items():
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            delta = (b.double() @ a.double() * module.scaling["default"]).detach().numpy()
            np.testing.assert_allclose(found[key], delta, rtol=1e-4, atol=1e-6)


def test_every_field_of_pefts_config_has_a_verdict() -> None:
    """The table knows every field of the installed PEFT: a new one fails here before it is refused there."""
    from peft import LoraConfig

    fields = LoraConfig().to_dict()  # type: ignore[no-untyped-call]
    assert set(fields) <= KNOWN


def test_every_default_is_off(tmp_path: Path) -> None:
    """A config as PEFT writes it, with nothing chosen, has nothing against it."""
    trained(tmp_path, LLAMA, r=4, target_modules=["q_proj"])
    report = inspect(tmp_path / "adapter", base=tmp_path / "base", dtype="bfloat16")
    assert report.ok
    assert not report.warnings
