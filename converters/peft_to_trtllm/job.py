"""One conversion, step by step: open, judge, plan, check. What is left then is a `Conversion`, ready to compute.

The steps add problems to the report and go on as far as they can, so that a person sees every reason at once.
`api.py` holds the public calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from peft_to_trtllm.adapter import CONFIG, Adapter, open_adapter
from peft_to_trtllm.base import Base, read_base
from peft_to_trtllm.errors import InputError
from peft_to_trtllm.fields import Settings, read_settings
from peft_to_trtllm.fuse import PARTS, fuse
from peft_to_trtllm.load import Loader
from peft_to_trtllm.modules import Adapted, collect_modules
from peft_to_trtllm.numbers import convert_rows
from peft_to_trtllm.plan import Planner
from peft_to_trtllm.preflight import base_of_engine, check_base, check_engine, check_without_engine
from peft_to_trtllm.report import Report
from peft_to_trtllm.rounding import Array, values_of
from peft_to_trtllm.rows import Plan
from peft_to_trtllm.targeting import Targeting
from peft_to_trtllm.tensor_file import FileProblem
from trtllm_lora import BundleFacts, EngineShape, ShapeError
from trtllm_lora.shape import DTYPES, read_json

if TYPE_CHECKING:
    from peft_to_trtllm.dora import BaseWeights

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""

TOOL = "lora-slots/peft_to_trtllm 3"
"""Written into bundles. The number rises when the same adapter would give other bytes."""


class Request(NamedTuple):
    """What the caller asks for; see `api.convert` for the meaning of each."""

    adapter: str
    base: Path | None = None
    engine: Path | None = None
    dtype: str | None = None
    name: str | None = None
    base_weights: Path | None = None
    fused: Sequence[str] = ()
    tp_size: int | None = None


class Conversion(NamedTuple):
    """An adapter that nothing but its values can still speak against."""

    adapter: Adapter
    plan: Plan
    settings: Settings
    dtype: str
    tp_size: int
    num_layers: int | None
    name: str
    report: Report
    weights: BaseWeights | None
    """The base's weights, which DoRA needs."""

    def rows(self, progress: Progress | None = None) -> Iterator[tuple[int, Array]]:
        """(row number, values) of every row; see `numbers.convert_rows`."""
        file, problems, weights = self.adapter.file, self.report.problems, self.weights
        loader = Loader(file)
        magnitude = (lambda row: weights.normalised(row, loader, self.dtype)) if weights else None
        try:
            for number, values in convert_rows(self.plan, loader, self.dtype, problems, magnitude):
                yield number, values
                if progress:
                    progress(number + 1, len(self.plan.rows))
        except FileProblem as problem:
            problems.add(problem.rule, str(file.path), str(problem), "the file as it was saved")

    def facts(self, source_sha256: str) -> BundleFacts:
        """What the manifest says beside the arrays; `source_sha256` is the hash of the tensors' file."""
        return BundleFacts(
            adapter=self.name,
            dtype=self.dtype,
            base_model=self.settings.base_model,
            base_revision=self.settings.base_revision,
            modules={row.module: (row.d_in * row.num_experts, row.d_out * row.num_experts) for row in self.plan.rows},
            num_layers=self.num_layers,
            tp_size=self.tp_size,
            scales=dict(sorted(self.plan.scales.items())),
            source_sha256={CONFIG: self.adapter.config_sha256, self.adapter.file.path.name: source_sha256},
            tool=TOOL,
        )


class Job:
    """Judges one adapter; a context manager that holds its files open.

    Inside, `report` is the judgement, and `conversion` is there if nothing stands against it so far.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.report = Report(request.adapter)
        self.conversion: Conversion | None = None
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
        self._shape, self._engine_config = _engine(request.engine)
        self._base = read_base(request.base) if request.base else None
        if self._base is None and self._shape:
            self._base = base_of_engine(self._shape, self._engine_config, str(request.engine))
        self._dtype = self.report.dtype = _dtype(request, self._shape, self._base)
        self._tp_size = _tp_size(request, self._shape)
        adapter = open_adapter(self._local(request.adapter), self.report.problems)
        if adapter:
            self._resources.callback(adapter.file.close)
            self._name = _name(request.name or adapter.name)
            self._judge(adapter)

    def _local(self, adapter: str) -> Path:
        if "://" not in adapter:
            return Path(adapter)
        from peft_to_trtllm.fetch import fetched

        return self._resources.enter_context(fetched(adapter))

    def _judge(self, adapter: Adapter) -> None:
        report, has_weights = self.report, self.request.base_weights is not None
        settings = read_settings(adapter.config, has_base_weights=has_weights, problems=report.problems)
        if report.problems.counts["peft-type"]:
            return  # the tensors of another method would only repeat it
        modules = collect_modules(adapter.file.tensors, report)
        self._judge_biases(adapter, settings, modules)
        self._judge_magnitudes(settings, modules)
        planner = Planner(settings, Targeting(adapter.config, report), self._base, report)
        plan = planner.plan(modules)
        if plan and self.request.fused:
            plan = fuse(plan, self.request.fused, self._tp_size, planner.dims, report.problems)
        if plan is None or not report.ok:
            self._check_base()
            return
        base_weights = self._check(plan)
        if report.ok:
            layers = self._base.layers if self._base else None
            self.conversion = Conversion(
                adapter, plan, settings, self._dtype, self._tp_size, layers, self._name, report, base_weights
            )

    def _judge_biases(self, adapter: Adapter, settings: Settings, modules: Sequence[Adapted]) -> None:
        problems = self.report.problems
        for bias in (adapted.bias for adapted in modules):
            if bias and values_of(adapter.file.read(bias), bias.dtype).any():  # -0.0 is zero
                wanted = "train with lora_bias=False; lora_weights has no place for a bias"
                problems.add("bias", bias.name, "a bias on lora_B (lora_bias) that is not zero", wanted)
            if bias is None and settings.lora_bias:
                found = "lora_bias is on, and a lora_B.bias is missing in the file"
                problems.add("bias", "adapter_config.json lora_bias", found, "every lora_B.bias, all zero")

    def _judge_magnitudes(self, settings: Settings, modules: Sequence[Adapted]) -> None:
        problems = self.report.problems
        for adapted in modules:
            if adapted.magnitude is None and settings.use_dora:
                found = "use_dora is on, and this module has no lora_magnitude_vector"
                problems.add("dora", adapted.path, found, "a file with every magnitude")
            if adapted.magnitude is not None and not settings.use_dora:
                found = "a DoRA magnitude in a file whose config has use_dora off"
                problems.add("dora", adapted.magnitude.name, found, "use_dora as it was in training")

    def _check_base(self) -> None:
        if self.request.base and self._base and self._shape:
            engine = str(self.request.engine)
            check_base(self._base, self._shape, self._engine_config, engine, self.report.problems)

    def _check(self, plan: Plan) -> BaseWeights | None:
        self._check_base()
        if self._shape:
            check_engine(plan, self._shape, self._dtype, self._tp_size, str(self.request.engine), self.report)
        else:
            check_without_engine(plan, self.report)
        if plan.columns == 3 or self.request.base_weights is None:
            return None
        from peft_to_trtllm.dora import BaseWeights

        self.report.warnings.add(
            "dora",
            "lora_config",
            "it has four columns, the fourth for DoRA; the stock Triton configs declare three",
            "dims [-1, 4] for lora_config in every model on the path",
        )
        weights = self._resources.enter_context(BaseWeights(self.request.base_weights, self._base))
        weights.check(plan, self.report.problems)
        return weights


def _name(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"the adapter's name {name!r} is no Unicode; give it another with --name") from None
    return name


def _dtype(request: Request, shape: EngineShape | None, base: Base | None) -> str:
    asked = request.dtype or (shape.dtype if shape else None) or (base.dtype if base else None)
    if asked is None:
        raise InputError("no dtype: say --dtype, or give --engine or a --base that states one")
    if asked not in DTYPES:
        raise InputError(f"dtype {asked!r} is none of {', '.join(DTYPES)}")
    return asked


def _tp_size(request: Request, shape: EngineShape | None) -> int:
    unknown = [module for module in request.fused if module not in PARTS]
    if unknown:
        raise InputError(f"fused module {unknown[0]!r} is none of {', '.join(PARTS)}")
    if not request.fused:
        return 1
    if request.tp_size is not None and request.tp_size < 1:
        raise InputError(f"tp size {request.tp_size} must be 1 or more")
    return request.tp_size or (shape.tp_size if shape else 1)


def _engine(path: Path | None) -> tuple[EngineShape | None, Mapping[str, Any]]:
    if path is None:
        return None, {}
    try:
        shape = EngineShape.from_engine_config(path)
        return shape, read_json(path / "config.json" if path.is_dir() else path)
    except ShapeError as error:
        raise InputError(str(error)) from None
