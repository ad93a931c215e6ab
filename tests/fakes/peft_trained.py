"""Adapters trained, or rather filled with random numbers, by PEFT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def model_of(config: Any) -> Any:
    """A random model of a transformers config."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def trained(folder: Path, base: dict[str, Any], **lora: Any) -> Any:
    """A PEFT model with random factors, saved with its base's config; returned as PEFT loads it again."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(**base)
    config.save_pretrained(folder / "base")
    peft: Any = get_peft_model(model_of(config), LoraConfig(**lora))
    for name, parameter in peft.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    peft.save_pretrained(str(folder / "adapter"))
    return PeftModel.from_pretrained(model_of(config), str(folder / "adapter"))
