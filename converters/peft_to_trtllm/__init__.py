"""PEFT LoRA adapter -> TensorRT-LLM bundle, or a report of every reason why not.

`convert` writes a bundle, `inspect` only judges. Rules: docs/conversion-rules.md. torch is never imported here.
"""

from peft_to_trtllm.api import convert, inspect
from peft_to_trtllm.errors import AdapterRefused, ConversionError, InputError
from peft_to_trtllm.report import Problem, Report

__all__ = ["AdapterRefused", "ConversionError", "InputError", "Problem", "Report", "convert", "inspect"]
