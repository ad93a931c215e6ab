"""The little model's golden answers belong to what fakes.little makes, and transformers with peft still gives them."""

from pathlib import Path
from typing import Any

import pytest
from fakes import little

from lora_slots.text import Tokenizer
from trtllm_lora.files import sha256_of

GOLDEN = little.golden()


def test_they_were_made_from_these_weights(tmp_path: Path) -> None:
    """Base and every adapter have the bytes they had then."""
    found = {
        name: sha256_of(path / "adapter_model.safetensors")
        for name, path in little.make_adapters(tmp_path, GOLDEN["seeds"]).items()
    }
    assert {"base": sha256_of(little.make_base(tmp_path) / "model.safetensors"), **found} == GOLDEN["sha256"]


@pytest.mark.parametrize("entries", ["answers", "variants"])
def test_no_two_begin_alike(entries: str) -> None:
    """Answers of base and adapters to one prompt differ within twelve tokens: a mixed-up adapter cannot pass."""
    begun = [(entry["prompt"], tuple(entry["tokens"][:12])) for entry in GOLDEN[entries]]
    assert len(set(begun)) == len(begun)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_transformers_and_peft_still_say_so(tmp_path: Path) -> None:
    """Base and every adapter, given each recorded answer up to a token, like that token best."""
    torch = pytest.importorskip("torch")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    base = little.make_base(tmp_path)
    paths = little.make_adapters(tmp_path, GOLDEN["seeds"])
    tokenizer = Tokenizer(base)
    for adapter in (None, *paths):
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, paths[adapter])
        entries = [one for one in GOLDEN["answers"] + GOLDEN["variants"] if one["adapter"] == adapter]
        assert entries
        for entry in little.with_texts(entries, tokenizer):
            ids = tokenizer.encode(entry["text_input"], add_special_tokens=False)
            with torch.inference_mode():
                logits = model.eval()(input_ids=torch.tensor([ids + entry["tokens"][:-1]])).logits
            assert logits[0, len(ids) - 1 :].argmax(-1).tolist() == entry["tokens"]
