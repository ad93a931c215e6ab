"""What a compiled TensorRT-LLM engine accepts: shapes, modules, tensors, bundles, cache geometry and cache rules.

A leaf: it imports nothing of ours, has no clock and no network. Names here are the public door; each brings its
module when it is first named, because half of the commands need no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_lora.bundle import Bundle, BundleFacts, digest_of, find_bundle, open_bundle
    from trtllm_lora.bundle_writing import write_bundle
    from trtllm_lora.engine_cache import EngineCache, TaskState
    from trtllm_lora.errors import BundleError, CacheError, ContractError, GeometryError, ShapeError, TensorError
    from trtllm_lora.geometry import CacheGeometry
    from trtllm_lora.modules import LLAMA_MODULES, MODULE_BY_ID, MODULES, Module, dims, module_name
    from trtllm_lora.shape import EngineShape
    from trtllm_lora.task_id import MAX_TASK_ID, task_id_for
    from trtllm_lora.tensors import Row, pack, unpack

__all__ = [
    "LLAMA_MODULES",
    "MAX_TASK_ID",
    "MODULES",
    "MODULE_BY_ID",
    "Bundle",
    "BundleError",
    "BundleFacts",
    "CacheError",
    "CacheGeometry",
    "ContractError",
    "EngineCache",
    "EngineShape",
    "GeometryError",
    "Module",
    "Row",
    "ShapeError",
    "TaskState",
    "TensorError",
    "digest_of",
    "dims",
    "find_bundle",
    "module_name",
    "open_bundle",
    "pack",
    "task_id_for",
    "unpack",
    "write_bundle",
]

_HOMES = {
    **dict.fromkeys(("Bundle", "BundleFacts", "digest_of", "find_bundle", "open_bundle"), "bundle"),
    **dict.fromkeys(("write_bundle",), "bundle_writing"),
    **dict.fromkeys(("EngineCache", "TaskState"), "engine_cache"),
    **dict.fromkeys(
        ("BundleError", "CacheError", "ContractError", "GeometryError", "ShapeError", "TensorError"), "errors"
    ),
    **dict.fromkeys(("CacheGeometry",), "geometry"),
    **dict.fromkeys(("LLAMA_MODULES", "MODULE_BY_ID", "MODULES", "Module", "dims", "module_name"), "modules"),
    **dict.fromkeys(("EngineShape",), "shape"),
    **dict.fromkeys(("MAX_TASK_ID", "task_id_for"), "task_id"),
    **dict.fromkeys(("Row", "pack", "unpack"), "tensors"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"trtllm_lora.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'trtllm_lora' has no attribute {name!r}")
