"""The public door: `convert` an adapter to a bundle, or `inspect` it and get the judgement."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from trtllm_lora import Bundle, BundleError, BundleFacts, write_bundle
from trtllm_lora.tensors import STORAGE

from peft_to_trtllm.adapter import Adapter, open_adapter
from peft_to_trtllm.base import Base, read_base
from peft_to_trtllm.convert import convert_rows
from peft_to_trtllm.errors import AdapterRefused, InputError
from peft_to_trtllm.fields import read_settings
from peft_to_trtllm.modules import collect_modules
from peft_to_trtllm.plan import Planner
from peft_to_trtllm.report import Report
from peft_to_trtllm.rows import Plan

PathLike = str | os.PathLike[str]


def convert(adapter: PathLike, *, base: PathLike | None = None, out: PathLike, dtype: str | None = None) -> Bundle:
    report = Report(str(adapter))
    facts = read_base(Path(base)) if base else None
    opened = open_adapter(Path(adapter), report.problems)
    if opened is None:
        raise AdapterRefused(report)
    with opened.file:
        settings = read_settings(opened.config, has_base_weights=False, problems=report.problems)
        modules = collect_modules(opened.file.tensors, report)
        plan = Planner(settings, facts, report).plan(modules)
        if plan is None:
            raise AdapterRefused(report)
        weights = np.zeros((1, len(plan.rows), plan.width), STORAGE[dtype])
        for i, values in convert_rows(plan, opened.file, dtype, report.problems):
            weights[0, i, : values.size] = values
        if report.problems:
            raise AdapterRefused(report)
    f = BundleFacts(adapter=opened.name, dtype=dtype, base_model=settings.base_model)
    return write_bundle(Path(out), weights, plan.config(), f)
