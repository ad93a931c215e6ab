"""The real base model with the example adapters: every golden answer, all streams in one mixed batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_slots.base_model import ensure_base_model
from peft_to_trtllm.api import convert
from reference_engine import build_engine

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "answers.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded stack's engine."""
    return build_engine(ensure_base_model(), tmp_path_factory.mktemp("engine") / "smollm2")


def test_golden_answers_in_mixed_batches(engine: Path, tmp_path: Path, serve: Any) -> None:
    """Greedy tokens of transformers and peft, base and adapters side by side, sixteen at a time."""
    client = serve(engine)
    adapters = {}
    for name in sorted({a["adapter"] for a in GOLDEN["answers"] if a["adapter"]}):
        bundle = convert(ROOT / "examples" / "adapters" / name, out=tmp_path / name, engine=engine)
        adapters[name] = bundle.task_id
        pushed = (np.array(bundle.weights()), np.array(bundle.config()))
        client.tokens([1, 2, 3], 1, task=bundle.task_id, adapter=pushed)
    asked = [
        client.ask(a["prompt_ids"], GOLDEN["max_tokens"], task=adapters.get(a["adapter"]), end_id=GOLDEN["eos_ids"][0])
        for a in GOLDEN["answers"]
    ]
    for answer, request in zip(GOLDEN["answers"], asked, strict=True):
        expected = [token for token in answer["tokens"] if token not in GOLDEN["eos_ids"]]
        assert expected == request.answer().tokens, (answer["adapter"], answer["prompt"])
