"""Shared by the converter's tests: one call from hand-made files to ΔW."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.peft_files import Tensors, write_adapter, write_base

from peft_to_trtllm import AdapterRefused, convert
from trtllm_lora import Bundle

Convert = Callable[..., Bundle]
Refuse = Callable[..., set[str]]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """Write the files and convert them; more arguments go to `convert`."""

    def run(tensors: Tensors, config: Mapping[str, Any] | None = None, **more: Any) -> Bundle:
        base = write_base(tmp_path / "base", more.pop("base_config", None))
        adapter = write_adapter(tmp_path / "adapter", tensors, config)
        more.setdefault("dtype", "float32")
        return convert(adapter, base=base, out=tmp_path / "out", **more)

    return run


@pytest.fixture
def refused(tmp_path: Path) -> Refuse:
    """Write the files and return the rules that refuse them; nothing may be left behind."""

    def run(tensors: Tensors, config: Mapping[str, Any] | None = None, **more: Any) -> set[str]:
        base = write_base(tmp_path / "base", more.pop("base_config", None))
        adapter = write_adapter(tmp_path / "adapter", tensors, config)
        more.setdefault("dtype", "float32")
        more.setdefault("base", base)
        with pytest.raises(AdapterRefused) as caught:
            convert(adapter, out=tmp_path / "out", **more)
        assert not (tmp_path / "out").exists()
        return set(caught.value.report.problems.counts)

    return run
