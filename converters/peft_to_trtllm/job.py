"""One conversion, step by step: open, judge, plan, check, compute. `api.py` holds the public calls.

A `Job` keeps what the steps share. Its steps add problems to the report and go on as far as they can, so that a person
sees every reason at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trtllm_lora import BundleFacts, EngineShape, ShapeError
from trtllm_lora.shape import DTYPES, read_json

from peft_to_trtllm.adapter import CONFIG, Adapter, open_adapter
from peft_to_trtllm.base import Base, read_base
from peft_to_trtllm.convert import convert_rows
from peft_to_trtllm.errors import InputError
from peft_to_trtllm.fetch import fetched
from peft_to_trtllm.fields import Settings, read_settings
from peft_to_trtllm.fuse import PARTS, fuse
from peft_to_trtllm.modules import Adapted, collect_modules
from peft_to_trtllm.plan import Planner
from peft_to_trtllm.preflight import base_of_engine, check_engine, check_without_engine
from peft_to_trtllm.report import Report
from peft_to_trtllm.rounding import Array
from peft_to_trtllm.rows import Plan
from peft_to_trtllm.tensor_file import FileProblem

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""

TOOL = "lora-slots/peft_to_trtllm 1"
"""Written into bundles. The number rises when the same adapter would give other bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller asks for; see `api.convert` for the meaning of each."""

    adapter: str
    base: Path | None = None
    engine: Path | None = None
    dtype: str | None = None
    name: str | None = None
    base_weights: Path | None = None
    fused: Sequence[str] = ()
    tp_size: int | None = None


class Job:
    """Judges and computes one adapter; a context manager that holds its files open."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.report = Report(request.adapter)
        self.settings = Settings()
        self.adapter: Adapter | None = None
        self.plan: Plan | None = None
        self._resources = ExitStack()

    def __enter__(self) -> Job:
        try:
            self._open()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def _open(self) -> None:
        request = self.request
        self.shape, engine_config = _engine(request.engine)
        self.base = read_base(request.base) if request.base else None
        if self.base is None and self.shape and request.engine:
            self.base = base_of_engine(self.shape, engine_config, str(request.engine))
        self.dtype = self._dtype()
        self.report.dtype = self.dtype
        self.tp_size = self._tp_size()
        path = self._resources.enter_context(fetched(request.adapter))
        self.adapter = open_adapter(path, self.report.problems)
        if self.adapter:
            self._resources.callback(self.adapter.file.close)
            self._judge(self.adapter)

    def _judge(self, adapter: Adapter) -> None:
        report = self.report
        has_weights = self.request.base_weights is not None
        self.settings = read_settings(adapter.config, has_base_weights=has_weights, problems=report.problems)
        if report.problems.counts["peft-type"]:
            return  # the tensors of another method would only repeat it
        modules = collect_modules(adapter.file.tensors, report)
        self._judge_extras(modules)
        planner = Planner(self.settings, self.base, report)
        plan = planner.plan(modules)
        if plan and self.request.fused:
            plan = fuse(plan, self.request.fused, self.tp_size, planner.dims, report.problems)
        if plan:
            self._check(plan)
        self.plan = plan if report.ok else None

    def _judge_extras(self, modules: Sequence[Adapted]) -> None:
        problems = self.report.problems
        biased = [adapted for adapted in modules if adapted.bias]
        assert self.adapter
        for adapted in biased:
            assert adapted.bias
            if self.adapter.file.read(adapted.bias, "bias").any():
                wanted = "train with lora_bias=False; lora_weights has no place for a bias"
                problems.add("bias", adapted.bias.name, "a bias on lora_B (lora_bias) that is not zero", wanted)
        if self.settings.lora_bias and len(biased) < len(modules):
            problems.add("bias", "adapter_config.json lora_bias", "lora_bias is on, and a bias is missing in the file", "every lora_B.bias, all zero")
        for adapted in modules:
            if adapted.magnitude is None and self.settings.use_dora:
                found = "use_dora is on, and this module has no lora_magnitude_vector"
                problems.add("dora", adapted.path, found, "a file with every magnitude")
            if adapted.magnitude is not None and not self.settings.use_dora:
                found = "a DoRA magnitude in a file whose config has use_dora off"
                problems.add("dora", adapted.magnitude.name, found, "use_dora as it was in training")

    def _check(self, plan: Plan) -> None:
        if self.shape and self.request.engine:
            check_engine(plan, self.shape, self.dtype, self.tp_size, str(self.request.engine), self.report)
        else:
            check_without_engine(plan, self.report)
        if plan.columns == 4 and self.request.base_weights:
            from peft_to_trtllm.dora import BaseWeights

            self.weights = self._resources.enter_context(BaseWeights(self.request.base_weights, self.base))
            self.weights.check(plan, self.report.problems)

    def rows(self, progress: Progress | None = None) -> Iterator[tuple[int, Array]]:
        """(row number, values) of every row; see `convert.convert_rows`."""
        assert self.adapter and self.plan
        file = self.adapter.file
        dora = (lambda row: self.weights.normalised(row, file)) if self.plan.columns == 4 else None
        try:
            for number, values in convert_rows(self.plan, file, self.dtype, self.report.problems, dora):
                yield number, values
                if progress:
                    progress(number + 1, len(self.plan.rows))
        except FileProblem as problem:
            self.report.problems.add(problem.rule, str(file.path), str(problem), "the file as it was saved")

    def facts(self, source_sha256: str) -> BundleFacts:
        """What the manifest says beside the arrays; `source_sha256` is the hash of the tensors' file."""
        assert self.adapter and self.plan
        settings, adapter = self.settings, self.adapter
        return BundleFacts(
            adapter=self.request.name or adapter.name,
            dtype=self.dtype,
            base_model=settings.base_model,
            base_revision=settings.base_revision,
            modules={row.module: (row.d_in, row.d_out) for row in self.plan.rows},
            num_layers=self.base.layers if self.base else None,
            tp_size=self.tp_size,
            scales=dict(sorted(self.plan.scales.items())),
            source_sha256={CONFIG: adapter.config_sha256, adapter.file.path.name: source_sha256},
            tool=TOOL,
        )

    def _dtype(self) -> str:
        asked = self.request.dtype or (self.shape.dtype if self.shape else None) or (self.base.dtype if self.base else None)
        if asked in DTYPES:
            return str(asked)
        if asked is None:
            raise InputError("no dtype: say --dtype, or give --engine or a --base that states one")
        raise InputError(f"dtype {asked!r} is none of {', '.join(DTYPES)}")

    def _tp_size(self) -> int:
        unknown = [module for module in self.request.fused if module not in PARTS]
        if unknown:
            raise InputError(f"fused module {unknown[0]!r} is none of {', '.join(PARTS)}")
        if not self.request.fused:
            return 1
        if self.request.tp_size is not None and self.request.tp_size < 1:
            raise InputError(f"tp size {self.request.tp_size} must be 1 or more")
        return self.request.tp_size or (self.shape.tp_size if self.shape else 1)


def _engine(path: Path | None) -> tuple[EngineShape | None, dict[str, object]]:
    if path is None:
        return None, {}
    try:
        shape = EngineShape.from_engine_config(path)
        return shape, read_json(path / "config.json" if path.is_dir() else path)
    except ShapeError as error:
        raise InputError(str(error)) from None
