"""A real Triton with SmolLM2 and the example adapters, started once for all tests here."""

from fakes.smollm2_stack import adapters, base, engine, golden, prepared, server, tokenizer, variants

__all__ = ["adapters", "base", "engine", "golden", "prepared", "server", "tokenizer", "variants"]
