"""A real Triton with SmolLM2 and the example adapters, started once for all tests here."""

from fakes.any_stack import prepared, server, tokenizer
from fakes.smollm2_stack import adapters, base, engine, golden, variants

__all__ = ["adapters", "base", "engine", "golden", "prepared", "server", "tokenizer", "variants"]
