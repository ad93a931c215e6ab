"""The capacity plan, held to the runtime's own numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lora import CacheGeometry, GeometryError
from trtllm_lora.fleet import Fleet, FleetError, group_of_rows, parse_fleet
from trtllm_lora.plan import PlanError, Wish, make_plan
from trtllm_lora.profile import EngineProfile, load_profile
from trtllm_lora.whatif import apply

PROFILES = Path(__file__).parents[2] / "engines" / "profiles"
GIB = 2**30


def profile(name: str = "llama-3.1-8b") -> EngineProfile:
    """A shipped profile."""
    return load_profile(PROFILES / f"{name}.yaml")


def qwen_of_issue_559(host_bytes: int) -> EngineProfile:
    """Qwen1.5-7B with rank-8 adapters on all seven modules, as in tensorrtllm_backend#559."""
    base = profile("mistral-7b")
    model = base.model.model_copy(
        update={
            "intermediate_size": 11008,
            "num_kv_heads": 32,
            "vocab_size": 151936,
            "architecture": "Qwen2ForCausalLM",
        }
    )
    serving = base.serving.model_copy(update={"lora_host_memory": host_bytes, "lora_optimal_rank": 8})
    engine = base.engine.model_copy(update={"dtype": "float16"})
    lora = base.lora.model_copy(update={"max_rank": 8})
    return base.model_copy(update={"model": model, "serving": serving, "lora": lora, "engine": engine})


def wish(of: EngineProfile, fleet: str, slots: int = 8, gpu: int = 80 * GIB) -> Wish:
    """A wish for a fleet in words."""
    return Wish(of, parse_fleet(fleet, of.shape()), gpu, slots)


def test_issue_559_golden_numbers() -> None:
    """19,988,480 elements, 39,976,960 bytes: that host cache starts, holds one adapter, and the plan says so."""
    of = qwen_of_issue_559(39_976_960)
    assert of.geometry().max_lora_elements == 19_988_480
    assert parse_fleet("1x8", of.shape()).num_bytes == 39_976_960
    plan = make_plan(wish(of, "2x8", slots=2))
    assert plan.configured_pages == 1
    told = [text for text in plan.warnings if "#559" in text]
    assert len(told) == 1
    assert "holds 1 of the largest adapters, the 2 slots need 2" in told[0]
    assert "There are no done tasks to evict" in told[0]
    assert plan.host_pages >= 2


def test_what_is_configured_and_enough_is_not_warned_of() -> None:
    """92 pages hold 20 adapters of rank 64 and 12 of rank 16, though not 32 of rank 64: only the latter is told."""
    assert not [text for text in make_plan(wish(profile(), "200x16,20x64", slots=32)).warnings if "#559" in text]
    assert [text for text in make_plan(wish(profile(), "200x16,21x64", slots=32)).warnings if "#559" in text]


def test_issue_559_one_byte_less_does_not_start() -> None:
    """With 39,976,959 bytes the runtime refuses to start: 2439 < 2440."""
    of = qwen_of_issue_559(39_976_959)
    with pytest.raises(GeometryError, match="hold 1 max sized LoRA 2439 < 2440"):
        of.geometry().num_pages(of.serving.lora_host_memory)
    assert "would not start" in make_plan(wish(of, "2x8", slots=2)).warnings[-1]


def test_llama_pages_by_rank() -> None:
    """Pages of adapters of Llama-3.1-8B with optimal rank 8: rank 4/8 one, 9/16 two, 32 four, 64 eight."""
    of = profile()
    geometry = of.model_copy(update={"serving": of.serving.model_copy(update={"lora_optimal_rank": 8})}).geometry()
    pages = {rank: parse_fleet(f"1x{rank}", of.shape()).pages(geometry)[0][0] for rank in (4, 8, 9, 16, 32, 64)}
    assert pages == {4: 1, 8: 1, 9: 2, 16: 2, 32: 4, 64: 8}
    assert geometry.num_pages(GIB) == 23


def test_the_recommendation_holds_the_working_set() -> None:
    """Host and device pages of the recommended parameters hold the largest adapters in all slots, on every profile."""
    for file in sorted(PROFILES.glob("*.yaml")):
        of = load_profile(file)
        plan = make_plan(wish(of, "100x16,10x64", of.serving.slots, of.serving.gpu_memory or 0))
        assert plan.host_pages >= plan.pages_needed
        assert plan.device_pages >= plan.pages_needed
        assert plan.memory.fixed + plan.kv_bytes + plan.device_bytes + plan.headroom_bytes == plan.gpu_bytes
        assert plan.headroom_bytes > 0
        assert plan.kv_tokens * plan.memory.kv_bytes_per_token <= plan.kv_bytes


def test_parameters_as_written_give_the_plans_pages() -> None:
    """The rounded texts of the parameters, read back as the runtime reads them, give at least the pages planned."""
    plan = make_plan(wish(profile(), "100x16", 32))
    text = plan.parameters
    free = plan.gpu_bytes - plan.memory.fixed
    device = int(
        (free - int(free * float(text["kv_cache_free_gpu_mem_fraction"])))
        * float(text["lora_cache_gpu_memory_fraction"])
    )
    assert plan.geometry.num_pages(device, "device") >= plan.pages_needed
    assert plan.geometry.num_pages(int(text["lora_cache_host_memory_bytes"])) == plan.host_pages


def test_weights_are_those_of_the_models() -> None:
    """Weights in GiB as published: 8.03 billion and 70.6 billion parameters in two bytes (70B over four GPUs)."""
    eight = make_plan(wish(profile(), "1x16")).memory.weights
    assert abs(eight - 8.03e9 * 2) / (8.03e9 * 2) < 0.01
    seventy = make_plan(wish(profile("llama-3.1-70b-tp4"), "1x16")).memory.weights
    embedding = 128256 * 8192 * 2
    assert abs(seventy - (70.55e9 * 2 - embedding) / 4 - embedding) / seventy < 0.01


def test_kv_bytes_per_token() -> None:
    """Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB for each token."""
    assert make_plan(wish(profile(), "1x16")).memory.kv_bytes_per_token == 128 * 1024


def test_adapters_that_starve_the_kv_cache_are_told() -> None:
    """Rank-64 adapters in 64 slots take most of a 40 GB GPU, and the plan says it."""
    plan = make_plan(wish(profile(), "200x64", 40, 48 * GIB))
    assert any("starve the KV cache" in text for text in plan.warnings)


@pytest.mark.parametrize(
    ("fleet", "slots", "gpu", "says"),
    [("1x16", 1, 12 * GIB, "takes 16.7"), ("500x64", 200, 48 * GIB, "leaves nothing")],
)
def test_no_plan_says_why(fleet: str, slots: int, gpu: int, says: str) -> None:
    """A GPU too small for the weights, and slots too many for the memory, are refused in words."""
    with pytest.raises(PlanError, match=says):
        make_plan(wish(profile(), fleet, slots, gpu))


@pytest.mark.parametrize("pp", [1, 2])
@given(data=st.data())
def test_pages_are_the_engines_walk(pp: int, data: st.DataObject) -> None:
    """All adapters at a time give what geometry.pages_for gives for each: any rows, DoRA, two pipeline ranks."""
    of = profile("smollm2-135m-gpu")
    of = of.model_copy(update={"engine": of.engine.model_copy(update={"pipeline_parallel": pp})})
    shape, geometry = of.shape(), of.geometry()
    row = st.tuples(st.integers(1, 7), st.integers(0, shape.num_layers - 1), st.integers(1, 64), st.integers(0, 1))
    adapters = data.draw(st.lists(st.lists(row, min_size=1, max_size=40), min_size=1, max_size=6))
    fleet = Fleet(tuple(group_of_rows(1 + i, rows, shape) for i, rows in enumerate(adapters)))
    walked = [(geometry.max_pages_for(rows), 1 + i) for i, rows in enumerate(adapters)]
    assert fleet.pages(geometry) == walked
    assert fleet.pages(geometry) == walked  # out of what was kept


def test_a_row_larger_than_a_page_is_told() -> None:
    """As the engine's own walk would tell it, wherever in the fleet it is."""
    of = profile("smollm2-135m-gpu")
    shape = of.shape()
    small = CacheGeometry.of(replace(shape, num_layers=1), optimal_rank=1, max_rank=1)
    fleet = Fleet(tuple(group_of_rows(1, [(5, 0, rank)], shape) for rank in (1, 2, 64)))
    with pytest.raises(GeometryError, match=r"mlp_h_to_4h of rank 64 needs \d+ slots, a page has"):
        fleet.pages(small)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no adapters given"),
        ("12", "is not COUNTxRANK"),
        ("3x128", "from 1 to 64"),
        ("3x8:attn_qkv", "not enabled"),
        ("3x8,ax", "is not COUNTxRANK"),
    ],
)
def test_fleets_that_cannot_be_read(text: str, says: str) -> None:
    """Each wrong part of a fleet is named."""
    with pytest.raises(FleetError, match=says):
        parse_fleet(text, profile().shape())


def test_what_if() -> None:
    """Pins, ranks, tenants, slots and GPUs change what they say and nothing else."""
    asked = wish(profile(), "100x16", 16)
    base = make_plan(asked)
    assert apply(asked, "pin=3").pinned == 3
    assert apply(asked, "tenants=+50").fleet.count == 150
    assert apply(asked, "tenants=+50x64").fleet.ranks == (16, 64)
    assert make_plan(apply(asked, "ranks=64")).device_bytes > base.device_bytes
    assert make_plan(apply(asked, "max-rank=128")).max_rank == 128
    assert make_plan(apply(asked, "gpu=48GiB")).kv_tokens < base.kv_tokens
    assert make_plan(apply(asked, "slots=32")).pages_needed == 2 * base.pages_needed
    for wrong in ("pin", "pin=x", "pins=3", "slots=0", "gpu=big"):
        with pytest.raises(FleetError, match="write one of pin=N"):
            apply(asked, wrong)
