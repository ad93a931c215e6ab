"""From a profile to an engine directory: steps with content-addressed results, run as commands.

Beside the contract parts of the package: this one starts programs and writes folders. It reads no clock (time comes as
an argument) and no network (a remote store is a port that the caller fills).
"""

from trtllm_lora.pipeline.results import is_whole
from trtllm_lora.pipeline.runner import BuildFailed, Built, RemoteStore, Runner
from trtllm_lora.pipeline.steps import BuildError, BuildPlan, Step, base_problems, fingerprint, plan_tensorrt_llm

__all__ = [
    "BuildError",
    "BuildFailed",
    "BuildPlan",
    "Built",
    "RemoteStore",
    "Runner",
    "Step",
    "base_problems",
    "fingerprint",
    "is_whole",
    "plan_tensorrt_llm",
]
