"""Cache geometry against the numbers the real runtime printed."""

from __future__ import annotations

import pytest

from trtllm_lora import LLAMA_MODULES, MODULES, CacheGeometry, EngineShape, GeometryError

HF_ORDER = ("mlp_4h_to_h", "mlp_h_to_4h", "mlp_gate", "attn_k", "attn_dense", "attn_q", "attn_v")
"""The order in which hf_lora_convert.py writes a layer's rows: safetensors key order."""


def shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, max_rank: int = 64) -> EngineShape:
    """A float16 engine with all seven Llama modules."""
    config = {
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return EngineShape.from_hf_config(config, dtype="float16", lora_modules=LLAMA_MODULES, max_lora_rank=max_rank)


def rows(rank: int, layers: int) -> list[tuple[int, int, int]]:
    """Config rows of an adapter on all seven modules."""
    return [(MODULES[name].id, layer, rank) for layer in range(layers) for name in HF_ORDER]


def test_qwen_7b_numbers_of_issues_559_and_560() -> None:
    """19,988,480 elements; 39,976,960 bytes hold exactly one adapter, one byte less refuses to start."""
    geometry = CacheGeometry.of(shape(4096, 11_008, 32, 32, 32, max_rank=8), optimal_rank=8, max_rank=8)
    assert geometry.max_lora_elements == 19_988_480
    assert (geometry.page_width, geometry.slots_per_page, geometry.min_slots) == (8192, 2560, 2440)
    assert geometry.num_pages(39_976_960) == 1
    assert geometry.num_pages(79_953_920) == 2
    assert geometry.num_pages(2**30) == 26
    text = "Not enough space allocated to host LoRA cache to hold 1 max sized LoRA 2439 < 2440"
    with pytest.raises(GeometryError, match=text):
        geometry.num_pages(39_976_959)


def test_llama_8b_page_table() -> None:
    """Pages of adapters of rank 4 to 64 on Llama-3.1-8B with the default parameters."""
    geometry = CacheGeometry.of(shape(4096, 14_336, 32, 32, 8))
    assert (geometry.page_width, geometry.slots_per_page, geometry.page_bytes) == (5120, 4608, 45 * 2**20)
    assert (geometry.min_slots, geometry.num_pages(2**30)) == (32_768, 23)
    pages = {rank: geometry.pages_for(rows(rank, 32)) for rank in (4, 8, 9, 16, 32, 64)}
    assert pages == {4: 1, 8: 1, 9: 2, 16: 2, 32: 4, 64: 8}


def test_tiny_llama_numbers() -> None:
    """The numbers run on the real code: page width 80, 240 slots a page, 28 pages in 1 MiB."""
    geometry = CacheGeometry.of(shape(64, 160, 2, 8, 2))
    assert (geometry.page_width, geometry.slots_per_page, geometry.min_slots) == (80, 240, 1741)
    assert geometry.num_pages(2**20) == 28
    assert [geometry.pages_for(rows(rank, 2)) for rank in (4, 8, 9, 16, 64)] == [1, 1, 2, 2, 10]


def test_a_row_larger_than_a_page_is_refused() -> None:
    """With lora_cache_max_adapter_size below the adapter's rank the runtime would write past the page."""
    geometry = CacheGeometry.of(shape(64, 160, 1, 8, 2), optimal_rank=1, max_rank=1)
    with pytest.raises(GeometryError, match="raise lora_cache_max_adapter_size"):
        geometry.pages_for([(MODULES["mlp_h_to_4h"].id, 0, 64)])


def test_a_module_the_engine_lacks_is_refused() -> None:
    """The runtime would throw a bare unordered_map::at."""
    with pytest.raises(GeometryError, match="module id 0 is not enabled"):
        CacheGeometry.of(shape(64, 160, 2, 8, 2)).pages_for([(0, 0, 8)])
