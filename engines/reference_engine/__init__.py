"""The CPU stand-in for NVIDIA's `tensorrt_llm` Triton model: same tensors, same checks, same LoRA cache, real tokens.

`build_engine` writes an engine directory from a Hugging Face base; `Backend` serves one. The computing library
(OpenVINO) is known to `decoder` and `graph` alone.
"""

import sys

from reference_engine.engine_dir import EngineDirectory, build_engine, open_engine
from reference_engine.errors import (
    EngineDirectoryError,
    ReferenceEngineError,
    RequestRefused,
    StartupRefused,
    UnsupportedModel,
)

# openvino's tools report their own import to a server if this package can be imported; here it cannot
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

__all__ = [
    "EngineDirectory",
    "EngineDirectoryError",
    "ReferenceEngineError",
    "RequestRefused",
    "StartupRefused",
    "UnsupportedModel",
    "build_engine",
    "open_engine",
]
