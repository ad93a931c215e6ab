"""A real Triton with a little Llama and three adapters; smollm2/ has the real one."""

from fakes.any_stack import prepared, server, tokenizer
from fakes.little_stack import adapters, all_adapters, base, engine, golden, variants

__all__ = ["adapters", "all_adapters", "base", "engine", "golden", "prepared", "server", "tokenizer", "variants"]
