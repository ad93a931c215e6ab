"""The embedded stack: base model, reference engine, bundles and registry prepared, then a Triton that serves them.

What every stack of a user shares lies in the cache under its content's name (`base/`, `engines/`, `adapters/bundles/`),
and each step is skipped if its result stands; the registry is a stack's own. The model repository is rendered anew for
every start, into a temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.registry import FILE_NAME, publish
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.errors import disk_errors
from lora_slots.base_model.store import cache_folder, locked, require_space, require_writable
from lora_slots.errors import UsageError
from lora_slots.repository import RepositoryConfig, render
from lora_slots.stack import Ports, StackConfig, TritonServer
from lora_slots.stack.config import ANY, LOOPBACK
from lora_slots.stack.errors import temporary_errors
from peft_to_trtllm import convert
from reference_engine.engine_dir import build_engine, open_engine
from reference_engine.errors import EngineDirectoryError

Progress = Callable[[str, int, int], object]
ENGINE_DTYPE = "float32"
"""The reference engine computes in float32, so that its answers are those of transformers and PEFT."""
MAX_LORA_RANK = 64
BUNDLE_GROWTH = 2
"""A bundle of float32 out of an adapter in bfloat16 is twice as large."""
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
    registry: Path | str
    """`adapters.yaml`, a file or s3://bucket/key."""


def prepare(
    adapters: Mapping[str, Path] | None, registry: Path | str, *, cache: Path | None = None, progress: Progress
) -> Prepared:
    """Bring the base model, build the reference engine, convert `adapters` (name -> PEFT directory) and publish them in
    `registry`. None: the registry is somebody's own and stays as it is.

    Raises the typed errors of the parts; what was finished before stays usable.
    """
    missing = [f"{name}: {path}" for name, path in (adapters or {}).items() if not path.is_dir()]
    if missing:
        raise UsageError(f"no such adapter folder: {', '.join(missing)}")
    base = ensure_base_model(cache, progress)
    engine = ensure_engine(base, cache_folder(cache) / "engines", progress)
    if adapters is not None:
        bundles = cache_folder(cache) / "adapters" / "bundles"
        registry = publish_adapters(adapters, base, Path(registry).parent, progress, bundles=bundles)
    return Prepared(base, engine, registry)


def publish_adapters(
    adapters: Mapping[str, Path], base: Path, home: Path, progress: Progress, *, bundles: Path | None = None
) -> Path:
    """Convert adapters into `bundles` (`home`/bundles if not given) and make them current in `home`/adapters.yaml;
    returns that file.

    Raises:
        AdapterRefused: an adapter cannot be converted, with every reason. InputError, RegistryError, BaseModelError:
        the disk.
    """
    bundles = bundles or home / "bundles"
    with disk_errors(bundles):
        bundles.mkdir(parents=True, exist_ok=True)
    require_writable(bundles)
    with locked(bundles.parent, waiting=lambda: progress("wait", 0, 0)):
        for done, (name, path) in enumerate(adapters.items()):
            progress("convert", done, len(adapters))
            require_space(bundles, BUNDLE_GROWTH * sum(file.stat().st_size for file in path.glob("adapter_model.*")))
            publish(home / FILE_NAME, convert(path, base=base, out=bundles, dtype=ENGINE_DTYPE, name=name), name)
    progress("convert", len(adapters), len(adapters))
    return home / FILE_NAME


@contextmanager
def running(
    prepared: Prepared,
    *,
    ports: Ports = ANY,
    usual_ports: Ports = ANY,
    router: Mapping[str, str] | None = None,
    engine: Mapping[str, str] | None = None,
    with_router: bool = True,
    log_path: Path | None = None,
) -> Iterator[TritonServer]:
    """A Triton that serves the prepared stack, ready inside the block and stopped after it.

    Args:
        ports: each is used or refused; 0 has the usual one chosen, or any where that is taken.
        router, engine: parameters of `lora_router` and `tensorrt_llm` beside those the stack sets itself.

    Raises:
        StackError, RepositoryError: with the reason; nothing is left running.
    """
    with ExitStack() as end:
        with temporary_errors():
            folder = Path(end.enter_context(tempfile.TemporaryDirectory(prefix="lora-slots-")))

        def repository(chosen: Ports) -> Path:
            config = RepositoryConfig(
                engine_dir=prepared.engine,
                tokenizer_dir=prepared.base,
                registry=prepared.registry,
                engine_url=f"{LOOPBACK}:{chosen.grpc}",
                router={"base_dir": str(prepared.base), **(router or {})},
                engine={**ENGINE_PARAMETERS, **(engine or {})},
                with_router=with_router,
            )
            with temporary_errors():
                return render(config, folder / "models")

        stack = StackConfig(
            repository,
            http_port=ports.http,
            grpc_port=ports.grpc,
            metrics_port=ports.metrics,
            usual_ports=usual_ports,
            log_path=log_path,
            exit_timeout_s=EXIT_TIMEOUT_S,
            control_models=True,
            temporary=(folder,),
        )
        yield end.enter_context(TritonServer(stack))


def ensure_engine(base: Path, engines: Path, progress: Progress) -> Path:
    """The reference engine of a base model, built if it is missing or broken; several processes build it once.

    `progress(stage, done, total)`: "wait" (for another process; 0, 0) and "engine" (tensors).
    Raises ReferenceEngineError, BaseModelError (the disk).
    """
    stat = (base / "model.safetensors").stat()
    stamp = [str(base.resolve()), stat.st_size, stat.st_mtime_ns]
    facts = {"dtype": ENGINE_DTYPE, "max_lora_rank": MAX_LORA_RANK, "base": stamp}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    engine = engines / f"{base.name}-{ENGINE_DTYPE}-{key}"
    if _opens(engine):
        return engine
    with disk_errors(engines):
        engines.mkdir(parents=True, exist_ok=True)
    require_writable(engines)
    with locked(engines, waiting=lambda: progress("wait", 0, 0)):
        if not _opens(engine):
            for half in engines.glob(f".{base.name}-*"):  # of a process that was killed: builders have the lock
                shutil.rmtree(half, ignore_errors=True)
            require_space(engines, stat.st_size)  # float32 as the base
            build_engine(
                base,
                engine,
                dtype=ENGINE_DTYPE,
                max_lora_rank=MAX_LORA_RANK,
                wrote=lambda done, total: progress("engine", done, total),
            )
    return engine


def _opens(engine: Path) -> bool:
    try:
        open_engine(engine)
    except EngineDirectoryError:
        return False
    return True
