"""The public door: `convert` an adapter to a bundle, or `inspect` it and get the judgement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from peft_to_trtllm.errors import AdapterRefused, InputError
from peft_to_trtllm.file_hash import FileHash, stamp_of
from peft_to_trtllm.job import Job, Progress, Request
from peft_to_trtllm.report import Report
from peft_to_trtllm.stream import BundleStream
from trtllm_lora import Bundle, BundleError

PathLike = str | os.PathLike[str]


def convert(
    adapter: PathLike,
    *,
    out: PathLike,
    base: PathLike | None = None,
    engine: PathLike | None = None,
    dtype: str | None = None,
    name: str | None = None,
    base_weights: PathLike | None = None,
    fused: Sequence[str] = (),
    tp_size: int | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Convert one PEFT LoRA adapter to a bundle below `out`.

    Args:
        adapter: directory with adapter_config.json and adapter_model.safetensors (or .bin), or an s3:// URL.
        out: directory the bundle is written to, under its digest.
        base: the base model's config.json, or its directory. Without it (and without `engine`) only families whose
            module names are unambiguous can be converted.
        engine: a TensorRT-LLM engine directory or its config.json: the adapter is checked against it.
        dtype: float32, float16 or bfloat16; by default the engine's, else the base's own.
        name: the adapter's name in the manifest; by default its directory's.
        base_weights: directory with the base's .safetensors files, which DoRA needs.
        fused: of attn_qkv and mlp_gate_up: write these ids instead of the separate ones.
        tp_size: ranks to deal fused rows out for; by default the engine's, else 1.
        progress: called with (rows done, rows in all).

    Returns:
        The bundle: lora_weights [1, rows, width] of `dtype`, lora_config [1, rows, 3] int32 (4 columns with DoRA).

    Raises:
        AdapterRefused: the adapter cannot be converted right; its report holds every reason. Nothing is written.
        InputError: a path that is not there, a disk that refuses, a wrong argument.
    """
    with Job(_request(adapter, base, engine, dtype, name, base_weights, fused, tp_size)) as job:
        return convert_job(job, Path(out), progress)


def inspect(
    adapter: PathLike,
    *,
    base: PathLike | None = None,
    engine: PathLike | None = None,
    dtype: str | None = None,
    base_weights: PathLike | None = None,
    fused: Sequence[str] = (),
    tp_size: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Judge an adapter as `convert` would, every value included, and write nothing.

    Arguments as for `convert`.

    Returns:
        The report: problems, warnings, and the match table of what would become what.

    Raises:
        InputError: a path that is not there, or a wrong argument.
    """
    with Job(_request(adapter, base, engine, dtype, None, base_weights, fused, tp_size)) as job:
        if job.conversion:
            for _ in job.conversion.rows(progress):
                pass
        return job.report


def convert_job(job: Job, out: Path, progress: Progress | None = None, hashing: FileHash | None = None) -> Bundle:
    """Write the bundle of a job that was judged; errors as for `convert`.

    `hashing` is the hash of the adapter's tensors, if it was begun before; it is used only if it is of the same file.
    """
    ready = job.conversion
    if ready is None:
        raise AdapterRefused(job.report)
    source = ready.adapter.file.path
    if hashing is None or hashing.path != source:
        hashing = FileHash(source)
    try:
        with BundleStream(out, ready.plan.config(), ready.plan.width, ready.dtype) as stream:
            stream.begin()
            for _, values in ready.rows(progress):
                stream.put(values)
            if job.report.problems:
                raise AdapterRefused(job.report)
            digest = hashing.result()
            if hashing.stamp != ready.adapter.file.stamp or hashing.stamp != stamp_of(source.stat()):
                raise InputError(f"{source}: changed while it was read")
            return stream.finish(ready.facts(digest))
    except BundleError as error:
        raise InputError(str(error)) from None
    finally:
        hashing.cancel()


def _request(
    adapter: PathLike,
    base: PathLike | None,
    engine: PathLike | None,
    dtype: str | None,
    name: str | None,
    base_weights: PathLike | None,
    fused: Sequence[str],
    tp_size: int | None,
) -> Request:
    return Request(
        adapter=os.fspath(adapter),
        base=Path(base) if base else None,
        engine=Path(engine) if engine else None,
        dtype=dtype,
        name=name,
        base_weights=Path(base_weights) if base_weights else None,
        fused=tuple(fused),
        tp_size=tp_size,
    )
