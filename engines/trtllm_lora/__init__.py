"""What a compiled TensorRT-LLM engine accepts: shapes, modules, tensors, bundles, cache geometry and cache rules.

A leaf: it imports nothing of ours, has no clock and no network. Names here are the public door.
"""

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
