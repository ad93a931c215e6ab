"""The engine profile: shipped ones are good, and every rule refuses the wrong input with line, reason and remedy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_lora import EngineShape
from trtllm_lora.profile import ProfileError, check_profile, load_profile, schema
from trtllm_lora.profile_rules import RULES
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
            section = section.setdefault(step, {})
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


FEW = ["attn_q", "attn_k", "attn_v"]
MOE = ("model.num_experts", 8)
ON_A_CPU = ("runtime", "reference")
Changes = tuple[tuple[str, Any], ...]
CASES: list[tuple[str, Changes, str, str, str]] = [
    # (rule, changes of a good profile, where, what is said, what to write)
    ("module-name", (("lora.modules", [*FEW, "v_proj"]),), "lora.modules.3", "Hugging Face's name", "write attn_v"),
    ("module-name", (("lora.modules", ["gate_proj"]),), "lora.modules.0", "Hugging Face's name", "write mlp_h_to_4h"),
    ("module-name", (("lora.modules", ["atn_qkv"]),), "lora.modules.0", "no LoRA module atn_qkv", "write attn_qkv"),
    ("module-name", (("lora.modules", ["zz"]),), "lora.modules.0", "no LoRA module zz", "write one of attn_q, attn_k"),
    ("module-later", (("lora.modules", ["mamba_in_proj"]),), "lora.modules.0", "without engines", "leave it out"),
    ("module-twice", (("lora.modules", ["mlp_gate", "mlp_gate"]),), "lora.modules.1", "listed twice", "leave one"),
    ("qkv-together", (("lora.modules", ["attn_q", "attn_v"]),), "lora.modules", "all enabled or all", "add attn_k"),
    ("dense-input", (("model.head_size", 160),), "lora.modules.3", "32 heads x 160 = 5120", "leave attn_dense out"),
    (
        "fused-tp",
        (("lora.modules", ["attn_qkv"]), ("engine.tensor_parallel", 2)),
        "lora.modules.0",
        "attn_qkv with tensor_parallel 2",
        "write attn_q, attn_k, attn_v",
    ),
    (
        "fused-parts",
        (("lora.modules", ["mlp_gate", "mlp_gate_up"]),),
        "lora.modules.1",
        "beside its own parts",
        "leave mlp_gate_up out",
    ),
    ("moe-modules", (("lora.modules", ["moe_router"]),), "lora.modules.0", "a model without experts", "leave it out"),
    ("moe-unfinished", (("lora.modules", ["moe_router"]), MOE), "lora.modules.0", "TRTLLM-379", "try it first"),
    ("cross-attention", (("lora.modules", ["cross_attn_qkv"]),), "lora.modules.0", "encoder-decoder", "leave it out"),
    ("plugin-dtype", (("lora.plugin_dtype", "float16"),), "lora.plugin_dtype", "tensorrtllm_backend#791", "write auto"),
    ("rank-multiple", (("lora.max_rank", 60),), "lora.max_rank", "no multiple of 8", "write 64"),
    ("cache-rank", (("serving.lora_max_rank", 8),), "serving.lora_max_rank", "below lora.max_rank 64", "write 64"),
    (
        "cache-rank",
        (
            ("lora.modules", FEW),
            ("model.num_layers", 1),
            ("serving.lora_max_rank", 8),
            ("serving.lora_optimal_rank", 8),
        ),
        "serving.lora_max_rank",
        "takes 103 slots of 5120 values while a page has 32, and is written past its page",
        "write 64",
    ),
    (
        "cache-memory",
        (("serving.lora_host_memory", "1MiB"),),
        "serving.lora_host_memory",
        "would not start: Not enough space allocated to host LoRA cache to hold 1 max sized LoRA 102 < 32768",
        "write at least 320MiB",
    ),
    (
        "cache-shares",
        (("serving.kv_cache_fraction", 0.9), ("serving.lora_gpu_fraction", 0.9)),
        "serving.lora_gpu_fraction",
        "0.9 of what kv_cache_fraction 0.9 leaves: 1.0% of the free memory",
        "write at most 0.8",
    ),
    (
        "cache-shares",
        (("serving.kv_cache_fraction", 0.99), ("serving.lora_gpu_fraction", 0.1)),
        "serving.lora_gpu_fraction",
        "0.9% of the free memory are left",
        "a kv_cache_fraction of at most 0.96",
    ),
    ("tokenizer", (("model.tokenizer", "./nowhere"),), "model.tokenizer", "./nowhere is no directory", "leave it out"),
    ("tokenizer", (("model.tokenizer", "."),), "model.tokenizer", "has no tokenizer.json", "leave it out"),
    (
        "architecture",
        (("model.architecture", "LlamaForCasualLM"),),
        "model.architecture",
        "'LlamaForCasualLM' is no architecture of TensorRT-LLM's engines",
        "write LlamaForCausalLM",
    ),
    (
        "architecture",
        (ON_A_CPU, ("model.architecture", "GPTJForCausalLM")),
        "model.architecture",
        "is no architecture of the reference engine",
        "write one of LlamaForCausalLM, Mistral",
    ),
    (
        "architecture-unknown",
        (("model.architecture", "NobodysForConditionalGeneration"),),
        "model.architecture",
        "is not among the architectures known here",
        "ask `MODEL_MAP` of the image",
    ),
    ("version", (("engine.tensorrt_llm", "1.2.1garbage$(id)"),), "engine.tensorrt_llm", "is not a version", "1.2.1"),
    ("version", (("engine.tensorrt_llm", "1.3.0"),), "engine.tensorrt_llm", "removed after 1.2", "write 1.2.1"),
    ("version", (("engine.tensorrt_llm", "0.20.0"),), "engine.tensorrt_llm", "min_length", "write 1.2.1"),
    ("version", (("engine.tensorrt_llm", "newest"),), "engine.tensorrt_llm", "is not a version", "write 1.2.1"),
    (
        "container",
        (("engine.container", "tritonserver:26.08-trtllm-python-py3"),),
        "engine.container",
        "26.08 has no",
        "26.07",
    ),
    (
        "container",
        (("engine.container", "tritonserver:26.01-trtllm-python-py3"),),
        "engine.container",
        "carries TensorRT-LLM 1.1.0",
        "26.07",
    ),
    (
        "container",
        (("engine.container", "tritonserver:24.10-trtllm-python-py3"),),
        "engine.container",
        "is older than",
        "26.07",
    ),
    (
        "container",
        (("engine.container", "tritonserver:26.07-py3"),),
        "engine.container",
        "is not an image",
        "write tritonserver:26.07",
    ),
    (
        "container",
        (("engine.tensorrt_llm", "1.2.7"),),
        "engine.tensorrt_llm",
        "no NGC image that this program knows carries TensorRT-LLM 1.2.7",
        "write 1.2.1",
    ),
    (
        "container",
        (("engine.tensorrt_llm", "1.2.1rc3"), ("engine.container", "tritonserver:26.03-trtllm-python-py3")),
        "engine.tensorrt_llm",
        "carries TensorRT-LLM 1.2.1rc3",
        "write 1.2.0",
    ),
    (
        "container",
        (("engine.tensorrt_llm", "1.2.0"),),
        "engine.container",
        "carries TensorRT-LLM 1.2.1, the profile says 1.2.0",
        "write tritonserver:26.03-trtllm-python-py3, or tensorrt_llm: 1.2.1",
    ),
    (
        "container-missing",
        (("engine.container", None),),
        "engine",
        "container is missing",
        "write container: tritonserver:26.07-trtllm-python-py3",
    ),
    (
        "container-missing",
        (("engine.container", None), ("engine.tensorrt_llm", "1.1.0")),
        "engine",
        "container is missing",
        "write container: tritonserver:26.02-trtllm-python-py3",
    ),
    ("revision", (("model.revision", "main"),), "model.revision", "'main' is not a commit", "40 hexadecimal digits"),
    ("quantisation", (("engine.quantization", "fp8_rowwise"),), "engine.quantization", "#2603", "write fp8, int4_awq"),
    ("quantisation", (("engine.quantization", "smoothquant"),), "engine.quantization", "#2604", "write fp8, int4_awq"),
    (
        "quantised-float32",
        (("engine.quantization", "fp8"), ("engine.dtype", "float32")),
        "engine.dtype",
        "fp8 with float32 activations has no kernels",
        "write float16 or bfloat16",
    ),
    (
        "quantised-float32",
        (("engine.kv_cache_dtype", "fp8"), ("engine.dtype", "float32")),
        "engine.dtype",
        "fp8 in the KV cache with float32 activations has no kernels",
        "write float16 or bfloat16",
    ),
    ("kv-cache-type", (("engine.kv_cache_type", "disabled"),), "engine.kv_cache_type", "#2543", "write paged"),
    ("kv-cache-type", (("engine.kv_cache_type", "continuous"),), "engine.kv_cache_type", "#511", "write paged"),
    ("kv-heads", (("model.num_kv_heads", 5),), "model.num_kv_heads", "cannot share 5", "a divisor of 32"),
    (
        "head-size",
        (("model.head_size", None), ("model.hidden_size", 4100)),
        "model.head_size",
        "no multiple of 32 heads",
        "write head_size",
    ),
    (
        "tp-divides",
        (("engine.tensor_parallel", 3),),
        "engine.tensor_parallel",
        "does not divide num_heads 32",
        "a divisor",
    ),
    (
        "tp-divides",
        (("engine.tensor_parallel", 3),),
        "engine.tensor_parallel",
        "does not divide num_kv_heads 8",
        "a divisor",
    ),
    (
        "tp-divides",
        (("model.intermediate_size", 14337), ("engine.tensor_parallel", 2)),
        "engine.tensor_parallel",
        "does not divide intermediate_size",
        "a divisor",
    ),
    ("tp-kv-heads", (("engine.tensor_parallel", 16),), "engine.tensor_parallel", "heads are doubled", "at most 8"),
    (
        "pp-divides",
        (("engine.pipeline_parallel", 3),),
        "engine.pipeline_parallel",
        "3 does not divide num_layers 32",
        "a divisor",
    ),
    (
        "max-positions",
        (("engine.max_seq_len", 200000),),
        "engine.max_seq_len",
        "exceeds the model's max_positions",
        "at most 131072",
    ),
    (
        "max-input",
        (("engine.max_input_len", 8192),),
        "engine.max_input_len",
        "leaves no token of 8192",
        "write at most 8191",
    ),
    (
        "max-tokens",
        (("engine.max_num_tokens", 8),),
        "engine.max_num_tokens",
        "less than one token for each of 64",
        "at least 64",
    ),
    ("reference-ranks", (ON_A_CPU, ("engine.tensor_parallel", 2)), "engine.tensor_parallel", "is one rank", "write 1"),
    (
        "reference-quantisation",
        (ON_A_CPU, ("engine.quantization", "fp8")),
        "engine.quantization",
        "does not quantise",
        "write none",
    ),
    (
        "reference-quantisation",
        (ON_A_CPU, ("engine.kv_cache_dtype", "int8")),
        "engine.kv_cache_dtype",
        "does not quantise",
        "write auto",
    ),
    # no rule: one field alone is wrong
    ("", (("engine.tensorrt_llm", 1.2),), "engine.tensorrt_llm", "read as a number", ""),
    ("", (("serving.lora_host_memory", "4 apples"),), "serving.lora_host_memory", "is not a size", "write 4GiB"),
    ("", (("serving.lora_host_memory", "1" * 400),), "serving.lora_host_memory", "is not a size", "write 4GiB"),
    ("", (("serving.slot", 3),), "serving.slot", "no such key", "write slots"),
    ("", (("colour", 3),), "colour", "no such key", "known are schema, name, runtime"),
    (
        "",
        (("engine.lora_plugin_dtype", "auto"),),
        "engine.lora_plugin_dtype",
        "no such key",
        "plugin_dtype under lora:",
    ),
    ("", (("engine.max_rank", 8),), "engine.max_rank", "no such key", "write max_rank under lora:"),
    (
        "",
        (("model.revision", int("12" * 20)),),
        "model.revision",
        "1212 was read as int, not as text",
        "write it in quotes",
    ),
    ("", (("runtime", "tensorrtllm"),), "runtime", "'tensorrtllm' is none of tensorrt_llm, ref", "write tensorrt_llm"),
    ("", (("engine.dtype", "int"),), "engine.dtype", "is none of float32", "write float32, float16 or bfloat16"),
    ("", (("model.hidden_size", "big"),), "model.hidden_size", "'big' is not a whole number", "write a whole number"),
    ("", (("serving.slots", True),), "serving.slots", "true is no number", "write one"),
    ("", (("serving.gpu_memory", True),), "serving.gpu_memory", "true is no number", "write one"),
    ("", (("schema", True),), "schema", "true is no number", "write one"),
    ("", (("serving.slots", 0),), "serving.slots", "0 is not a whole number of at least 1", "at least 1"),
    ("", (("serving.slots", 2.5),), "serving.slots", "2.5 is not a whole number", "write a whole number"),
    ("", (("serving.gpu_memory", "many"),), "serving.gpu_memory", "'many' is not a size", "write 4GiB"),
    ("", (("serving.kv_cache_fraction", 2),), "serving.kv_cache_fraction", "2 is not a number above 0", "below 1"),
    ("", (("serving.kv_cache_fraction", "x"),), "serving.kv_cache_fraction", "'x' is not a number", "write a number"),
    ("", (("model.tied_embeddings", "maybe"),), "model.tied_embeddings", "'maybe' is not true", "write true or false"),
    ("", (("lora.modules", []),), "lora.modules", "[] is not at least one", "such as [attn_q"),
    ("", (("lora.modules", "attn_q"),), "lora.modules", "'attn_q' is not a list", "write a list, such as [attn_q"),
    ("", (("text", 3),), "text", "3 is not a section", "keys below text:, such as add_special_tokens"),
    ("", (("model.id", ""),), "model.id", "'' is not a text", "write a text that is not empty"),
    (
        "",
        (("model.vocab_size", None),),
        "model.vocab_size",
        "is missing",
        "write vocab_size: a whole number, as config",
    ),
    ("", (("model.revision", None),), "model.revision", "is missing", "write revision: commit of the model's"),
    ("", (("lora", None),), "lora", "is missing", "write lora: with modules below it"),
    ("", (("lora.modules", None),), "lora.modules", "is missing", "write modules: [attn_q"),
    ("", (("schema", None),), "schema", "is missing", "write schema: 1"),
    ("", (("name", "A B"),), "name", "'A B' is not lower-case letters", "write lower-case letters"),
    ("", (("schema", 2),), "schema", "2 is unknown", "write 1"),
    (
        "container",
        (("engine.container", "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"),),
        "engine.container",
        "has a registry in front",
        "write tritonserver:26.07-trtllm-python-py3",
    ),
    (
        "container",
        (("engine.container", "26.07-trtllm-python-py3"),),
        "engine.container",
        "is not an image",
        "write tritonserver:26.07-trtllm-python-py3",
    ),
]


@pytest.mark.parametrize(("rule", "changes", "where", "says", "write"), CASES)
def test_each_rule_says_where_why_and_what_instead(
    tmp_path: Path, rule: str, changes: Changes, where: str, says: str, write: str
) -> None:
    """A wrong value is told by its rule, at its place, with the reason and the remedy; without it nothing is said."""
    problems = changed(tmp_path, *changes)
    hits = [p for p in problems if (p.rule, p.where) == (rule, where) and says in p.what and write in p.write]
    assert len(hits) == 1, problems
    assert str(hits[0]).startswith(f"{tmp_path / 'profile.yaml'}:{hits[0].line}: {where}: ")
    refused = check_profile(tmp_path / "profile.yaml")[0] is None
    assert refused == any(not problem.warning for problem in problems)


@pytest.mark.parametrize(
    "change",
    [
        ("runtime", "tensorrtllm"),
        ("engine.tensorrt_llm", "1.3.0"),
        ("engine.tensorrt_llm", "1.2.7"),
        ("engine.tensorrt_llm", "newest"),
        ("model.revision", 5),
        ("engine.lora_plugin_dtype", "auto"),
    ],
)
def test_one_mistake_is_told_once(tmp_path: Path, change: tuple[str, Any]) -> None:
    """Of a wrong runtime or version nothing else follows: the cause is told, and no guess at its consequences."""
    tp4 = ("engine.tensor_parallel", 4), ("engine.quantization", "fp8")
    assert [problem.where for problem in changed(tmp_path, change, *tp4)] == [change[0]]


def test_every_documented_rule_is_tried() -> None:
    """The table in docs/engines.md has the program's rules, and each has its wrong input above."""
    page = (PROFILES.parents[1] / "docs" / "engines.md").read_text()
    table = page.partition("<!-- generated: profile rules -->")[2].partition("<!-- end: profile rules -->")[0]
    documented = re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE)
    assert documented == [rule.name for rule in RULES]
    assert len(documented) == len(set(documented))
    assert {rule for rule, *_ in CASES if rule} == set(documented)


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
        (
            lambda file: file.write_text("a: &a 1\nb: *a\n"),
            r"yaml:2: \*a stands for another value; write",
        ),
        (lambda file: file.write_text("a: &a [*a]"), "stands for another value"),
        (lambda file: file.write_text("a: !!timestamp foo"), "not YAML"),
        (lambda file: file.write_text("a: !!int ''"), "not YAML"),
        (lambda file: file.write_text("[" * 5000), "not YAML"),
        (lambda file: file.mkdir(), "is no file"),
        (os.mkfifo, "is no file"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, write: Callable[[Path], object], says: str) -> None:
    """Missing, empty and broken files are one line each, never a traceback."""
    file = tmp_path / "profile.yaml"
    write(file)
    with pytest.raises(ProfileError, match=says):
        load_profile(file)
