"""The engine profile: shipped ones are good, and every rule refuses the wrong input with line, reason and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_lora import EngineShape
from trtllm_lora.profile import ProfileError, check_profile, load_profile, schema
from trtllm_lora.yaml_lines import Problem

PROFILES = Path(__file__).parents[2] / "engines" / "profiles"
GOOD = PROFILES / "llama-3.1-8b.yaml"


def changed(tmp_path: Path, *changes: tuple[str, Any]) -> list[Problem]:
    """What is said of the Llama-3.1-8B profile with some values changed (None: taken out)."""
    data = yaml.safe_load(GOOD.read_text())
    for place, value in changes:
        *way, last = place.split(".")
        section = data
        for step in way:
            section = section[step]
        if value is None:
            del section[last]
        else:
            section[last] = value
    file = tmp_path / "profile.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    return check_profile(file)[1]


@pytest.mark.parametrize("file", sorted(PROFILES.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_profiles_are_good(file: Path) -> None:
    """Each profile of the repository is without an error or a warning, and named like its file."""
    profile, problems = check_profile(file)
    assert profile is not None
    assert not problems
    assert profile.name == file.stem
    assert profile.geometry().num_pages(profile.serving.lora_host_memory) > 0


def test_the_published_schema_is_current() -> None:
    """engines/profiles/profile.schema.json is what the program says (`lora-slots engine schema`)."""
    assert json.loads((PROFILES / "profile.schema.json").read_text()) == schema()


def test_a_profile_says_the_shape_of_its_engine() -> None:
    """Sizes, modules and ranks of the profile are those of an engine's config.json."""
    shape = load_profile(GOOD).shape()
    assert (shape.hidden_size, shape.num_kv_heads, shape.max_lora_rank, shape.dtype) == (4096, 8, 64, "bfloat16")
    assert shape.lora_enabled
    assert isinstance(shape, EngineShape)


@pytest.mark.parametrize(
    ("change", "where", "says", "write"),
    [
        (("lora.modules", ["attn_q", "attn_v"]), "lora.modules", "all enabled or all disabled", "add attn_k"),
        (("lora.modules", ["attn_q", "attn_k", "v_proj"]), "lora.modules.2", "Hugging Face's name", "write attn_v"),
        (("lora.modules", ["atn_qkv"]), "lora.modules.0", "no LoRA module atn_qkv", "write attn_qkv"),
        (("lora.modules", ["mamba_in_proj"]), "lora.modules.0", "only in runtimes without engines", "leave it out"),
        (("lora.modules", ["mlp_gate", "mlp_gate"]), "lora.modules.1", "listed twice", "leave one"),
        (("lora.modules", ["moe_router"]), "lora.modules.0", "a model without experts", "leave it out"),
        (
            ("lora.modules", ["mlp_gate", "mlp_gate_up"]),
            "lora.modules.1",
            "beside its own parts",
            "leave mlp_gate_up out",
        ),
        (("lora.modules", ["cross_attn_qkv"]), "lora.modules.0", "encoder-decoder", "leave it out"),
        (("model.head_size", 160), "lora.modules.3", "attn_dense takes 32 heads x 160 = 5120", "leave attn_dense out"),
        (("lora.plugin_dtype", "float16"), "lora.plugin_dtype", "tensorrtllm_backend#791", "write auto"),
        (("engine.quantization", "fp8_rowwise"), "engine.quantization", "#2603", "write fp8, int4_awq or none"),
        (("engine.quantization", "smoothquant"), "engine.quantization", "#2604", "write fp8, int4_awq or none"),
        (("engine.kv_cache_type", "disabled"), "engine.kv_cache_type", "#2543", "write paged"),
        (("engine.kv_cache_type", "continuous"), "engine.kv_cache_type", "tensorrtllm_backend#511", "write paged"),
        (("engine.tensorrt_llm", "1.3.0"), "engine.tensorrt_llm", "removed after 1.2", "write 1.2.1"),
        (("engine.tensorrt_llm", "0.20.0"), "engine.tensorrt_llm", "min_length", "write 1.2.1"),
        (("engine.tensorrt_llm", 1.2), "engine.tensorrt_llm", "read as a number", ""),
        (("engine.container", "tritonserver:26.08-trtllm-python-py3"), "engine.container", "26.08 has no", "26.07"),
        (
            ("engine.container", "tritonserver:26.01-trtllm-python-py3"),
            "engine.container",
            "carries TensorRT-LLM 1.1.0",
            "",
        ),
        (
            ("engine.container", "tritonserver:26.07-py3"),
            "engine.container",
            "is not an image",
            "write tritonserver:26.07",
        ),
        (("engine.container", None), "engine", "container is missing", ""),
        (("model.revision", "main"), "model.revision", "is not a commit", "40 hexadecimal digits"),
        (("model.num_kv_heads", 5), "model.num_kv_heads", "cannot share 5", "a divisor of 32"),
        (("engine.tensor_parallel", 16), "engine.tensor_parallel", "heads are doubled", "at most 8"),
        (("engine.tensor_parallel", 3), "engine.tensor_parallel", "3 does not divide num_heads", "a divisor"),
        (("engine.pipeline_parallel", 3), "engine.pipeline_parallel", "3 does not divide num_layers 32", "a divisor"),
        (("engine.max_seq_len", 200000), "engine.max_seq_len", "exceeds the model's max_positions", "at most 131072"),
        (("engine.max_input_len", 8192), "engine.max_input_len", "leaves no token", "write less"),
        (("engine.max_num_tokens", 8), "engine.max_num_tokens", "less than one token for each", "at least 64"),
        (("serving.lora_max_rank", 8), "serving.lora_max_rank", "is below lora.max_rank 64", "write 64"),
        (("serving.lora_host_memory", 1000), "serving.lora_host_memory", "Not enough space allocated to host", "MiB"),
        (("serving.lora_host_memory", "4 apples"), "serving.lora_host_memory", "is not a size: write 4GiB", ""),
        (("serving.slot", 3), "serving.slot", "no such key", "write slots"),
        (("model.hidden_size", "big"), "model.hidden_size", "valid integer", ""),
        (("model.vocab_size", None), "model.vocab_size", "is missing", ""),
        (("name", "A B"), "name", "lower-case letters", ""),
        (("schema", 2), "schema", "found 2", ""),
    ],
)
def test_each_rule_says_where_why_and_what_instead(
    tmp_path: Path, change: tuple[str, Any], where: str, says: str, write: str
) -> None:
    """One wrong value gives one complaint about it, with the reason and the remedy, and no profile."""
    problems = [problem for problem in changed(tmp_path, change) if problem.where == where]
    assert problems, changed(tmp_path, change)
    assert any(says in problem.what and write in problem.write for problem in problems), problems


def test_fused_ids_with_tensor_parallelism_are_refused(tmp_path: Path) -> None:
    """#8063: a rank takes a contiguous block of the fused rows."""
    problems = changed(tmp_path, ("lora.modules", ["attn_qkv"]), ("engine.tensor_parallel", 2))
    assert [(each.where, each.write) for each in problems] == [("lora.modules.0", "write attn_q, attn_k, attn_v")]


def test_a_row_larger_than_its_page_is_told(tmp_path: Path) -> None:
    """A rank the requests may have but the cache was not sized for is written past its page."""
    few = ["attn_q", "attn_k", "attn_v"]
    problems = changed(
        tmp_path,
        ("lora.modules", few),
        ("model.num_layers", 1),
        ("serving.lora_max_rank", 8),
        ("serving.lora_optimal_rank", 8),
    )
    assert any("written past its page" in problem.what for problem in problems)


def test_warnings_do_not_refuse(tmp_path: Path) -> None:
    """A rank that is no multiple of 8 is told (#3684), and the profile is still good."""
    problems = changed(tmp_path, ("lora.max_rank", 60))
    assert [problem.warning for problem in problems] == [True]
    assert load_profile(tmp_path / "profile.yaml").lora.max_rank == 60


def test_every_problem_at_once_with_its_line(tmp_path: Path) -> None:
    """Misspelt keys, wrong types and broken rules come together, each with file and line, in order."""
    text = (
        GOOD.read_text()
        .replace("max_rank: 64", "max_rank: none")
        .replace("dtype: bfloat16", "dtype: bfloat\n  dtype: float16")
    )
    text = text.replace("1.2.1", "1.4.0").replace("slots:", "slot:")
    file = tmp_path / "profile.yaml"
    file.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load_profile(file)
    lines = text.splitlines()
    found = {problem.where: problem for problem in caught.value.problems}
    assert {"engine.tensorrt_llm", "engine.dtype", "lora.max_rank", "serving.slot"} <= set(found)
    for where, problem in found.items():
        assert where.rpartition(".")[2] in lines[problem.line - 1]
    assert str(caught.value).splitlines()[0].startswith(f"{file}:")
    assert [each.line for each in caught.value.problems] == sorted(each.line for each in caught.value.problems)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda _file: None, "No such file"),
        (lambda file: file.write_text("a: [1\nb: 2"), "not YAML"),
        (lambda file: file.write_text("- a\n"), "a mapping of keys is expected"),
        (lambda file: file.write_text(""), "a mapping of keys is expected"),
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), "not UTF-8"),
        (lambda file: file.write_text("model: 3\nengine: []\n"), "schema: is missing"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, write: Callable[[Path], object], says: str) -> None:
    """Missing, empty and broken files are one line each, never a traceback."""
    file = tmp_path / "profile.yaml"
    write(file)
    with pytest.raises(ProfileError, match=says):
        load_profile(file)
