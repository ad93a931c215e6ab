"""The embedded stack: base model, reference engine, bundles and registry prepared, then a Triton that serves them.

What is prepared lives in the cache (`base/`, `engines/`, `adapters/`); each step is skipped if its result stands.
The model repository is rendered anew for every start, into a temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.registry import FILE_NAME, publish
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.store import cache_folder
from lora_slots.errors import UsageError
from lora_slots.repository import RepositoryConfig, render
from lora_slots.stack import Ports, StackConfig, TritonServer
from lora_slots.stack.ports import choose_ports
from peft_to_trtllm import convert
from reference_engine.engine_dir import build_engine, open_engine
from reference_engine.errors import EngineDirectoryError
from trtllm_lora import BundleError

Progress = Callable[[str, int, int], object]
ENGINE_DTYPE = "float32"
"""The reference engine computes in float32, so that its answers are those of transformers and PEFT."""
MAX_LORA_RANK = 64
EXIT_TIMEOUT_S = 2
"""Seconds a stop waits for answers that still stream."""
ENGINE_PARAMETERS = {
    "exclude_input_in_output": "true",
    # the runtime's 0.02 of what is free would not hold one adapter of rank 64 on a machine with 3 GB free; the
    # reference engine takes memory only for the adapters it holds
    "lora_cache_gpu_memory_fraction": "0.25",
}
"""Parameters of `tensorrt_llm` in the embedded stack."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where the parts of the embedded stack are."""

    base: Path
    engine: Path
    registry: Path
    """`adapters.yaml`."""


def prepare(adapters: Mapping[str, Path], *, cache: Path | None = None, progress: Progress) -> Prepared:
    """Bring the base model, build the reference engine, convert `adapters` (name -> PEFT directory) and publish them.

    Raises the typed errors of the parts; what was finished before stays usable.
    """
    missing = [f"{name}: {path}" for name, path in adapters.items() if not path.is_dir()]
    if missing:
        raise UsageError(f"no such adapter folder: {', '.join(missing)}")
    base = ensure_base_model(cache, progress)
    engine = ensure_engine(base, cache_folder(cache) / "engines", progress)
    registry = publish_adapters(adapters, base, cache_folder(cache) / "adapters", progress)
    return Prepared(base, engine, registry)


def publish_adapters(adapters: Mapping[str, Path], base: Path, home: Path, progress: Progress) -> Path:
    """Convert adapters into `home`/bundles and make them current in `home`/adapters.yaml; returns that file.

    Raises:
        AdapterRefused: an adapter cannot be converted, with every reason. RegistryError, BundleError: the disk.
    """
    for done, (name, path) in enumerate(adapters.items()):
        progress("convert", done, len(adapters))
        bundle = convert(path, base=base, out=home / "bundles", dtype=ENGINE_DTYPE, name=name)
        try:
            bundle.verify()
        except BundleError:  # the cache was damaged since: convert anew
            shutil.rmtree(bundle.path)
            bundle = convert(path, base=base, out=home / "bundles", dtype=ENGINE_DTYPE, name=name)
        publish(home / FILE_NAME, bundle, name)
    progress("convert", len(adapters), len(adapters))
    return home / FILE_NAME


@contextmanager
def running(
    prepared: Prepared,
    *,
    ports: Ports | None = None,
    router: Mapping[str, str] | None = None,
    engine: Mapping[str, str] | None = None,
    with_router: bool = True,
    log_path: Path | None = None,
) -> Iterator[TritonServer]:
    """A Triton that serves the prepared stack, ready inside the block and stopped after it.

    Args:
        ports: free ones are chosen if not given.
        router, engine: parameters of `lora_router` and `tensorrt_llm` beside those the stack sets itself.

    Raises:
        StackError, RepositoryError: with the reason; nothing is left running.
    """
    ports = ports or choose_ports(0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="lora-slots-") as folder:
        config = RepositoryConfig(
            engine_dir=prepared.engine,
            tokenizer_dir=prepared.base,
            registry=prepared.registry,
            engine_url=f"127.0.0.1:{ports.grpc}",
            router={"base_dir": str(prepared.base), **(router or {})},
            engine={**ENGINE_PARAMETERS, **(engine or {})},
            with_router=with_router,
        )
        repository = render(config, Path(folder) / "models")
        stack = StackConfig(
            repository,
            http_port=ports.http,
            grpc_port=ports.grpc,
            metrics_port=ports.metrics,
            log_path=log_path,
            exit_timeout_s=EXIT_TIMEOUT_S,
            control_models=True,
            temporary=(Path(folder),),
        )
        with TritonServer(stack) as server:
            yield server


def ensure_engine(base: Path, engines: Path, progress: Progress) -> Path:
    """The reference engine of a base model, built if it is missing or broken."""
    facts = {"dtype": ENGINE_DTYPE, "max_lora_rank": MAX_LORA_RANK, "base": _stamp(base)}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    engine = engines / f"{base.name}-{ENGINE_DTYPE}-{key}"
    try:
        open_engine(engine)
    except EngineDirectoryError:
        build_engine(
            base,
            engine,
            dtype=ENGINE_DTYPE,
            max_lora_rank=MAX_LORA_RANK,
            wrote=lambda done, total: progress("engine", done, total),
        )
    return engine


def _stamp(base: Path) -> list[object]:
    file = base / "model.safetensors"
    stat = file.stat()
    return [str(base.resolve()), stat.st_size, stat.st_mtime_ns]
