"""Rules of a profile about the engine itself: release, types, sizes and ranks.

Issue numbers are TensorRT-LLM's where no other project is named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from trtllm_lora.architectures import COMPILED, REFERENCE
from trtllm_lora.profile_rule import Found, RuleTable, Values, on_gpu
from trtllm_lora.releases import container_problem, image_of, no_image_problem, version_problem

TABLE = RuleTable()
_REFUSED = {
    "fp8_rowwise": "LoRA is not supported on fp8_rowwise (#2603, #10320)",
    "smoothquant": "`lora is not supported on SmoothQuantAttention now` (#2604, #12703)",
}


@TABLE.rule(
    "architecture",
    "runtime",
    "model.architecture",
    says="an architecture that its runtime has",
    why="the checkpoint conversion knows no other (`MODEL_MAP`)",
)
def _architecture(v: Values) -> Iterator[Found]:
    found, known = v["model.architecture"], COMPILED if on_gpu(v) else REFERENCE
    if found in known or (on_gpu(v) and not _misspelt(found, known)):
        return
    engine = "TensorRT-LLM's engines" if on_gpu(v) else "the reference engine"
    instead = _misspelt(found, known) or f"one of {', '.join(known)}"
    yield "model.architecture", f"{found[:80]!r} is no architecture of {engine}", f"write {instead}"


@TABLE.rule(
    "architecture-unknown",
    "runtime",
    "model.architecture",
    says="an architecture that is known here to be in TensorRT-LLM",
    why="the list here is not the image's own: the checkpoint conversion will tell",
    warning=True,
)
def _architecture_unknown(v: Values) -> Iterator[Found]:
    found = v["model.architecture"]
    if on_gpu(v) and found not in COMPILED and not _misspelt(found, COMPILED):
        what = f"{found[:80]!r} is not among the architectures known here to be compiled"
        yield "model.architecture", what, "ask `MODEL_MAP` of the image, or try `lora-slots engine build`"


def _misspelt(found: str, known: Sequence[str]) -> str:
    """The name that was meant, if it is nearly this one; else ""."""
    return next(iter(difflib.get_close_matches(found, known, n=1, cutoff=0.9)), "")


@TABLE.rule(
    "version",
    "engine.tensorrt_llm",
    says="TensorRT-LLM 1.0 to 1.2",
    why="later ones have no engine backend (#15907, #15918), earlier ones name Triton's inputs otherwise",
)
def _version(v: Values) -> Iterator[Found]:
    problem = version_problem(v["engine.tensorrt_llm"])
    if problem:
        yield "engine.tensorrt_llm", *problem


@TABLE.rule(
    "container",
    "engine.tensorrt_llm",
    "engine.container",
    says="the NGC image that carries this TensorRT-LLM, of 26.07 at most",
    why="an engine loads only in the version that built it, and from 26.08 on there is no engine backend",
)
def _container(v: Values) -> Iterator[Found]:
    container, version = v["engine.container"], v["engine.tensorrt_llm"]
    if not container:
        return
    if found := container_problem(container, version):
        yield "engine.container", *found
    if found := no_image_problem(version, container):
        yield "engine.tensorrt_llm", *found


@TABLE.rule(
    "container-missing",
    "runtime",
    "engine.container",
    "engine.tensorrt_llm",
    says="a container, for a compiled engine",
    why="an engine loads only in the version that built it",
)
def _container_missing(v: Values) -> Iterator[Found]:
    if on_gpu(v) and v["engine.container"] is None:
        what = "container is missing: an engine loads only in the image that built it"
        yield "engine", what, f"write container: {image_of(v['engine.tensorrt_llm'])}"


@TABLE.rule(
    "revision",
    "runtime",
    "model.revision",
    says="a commit as `revision`, for a compiled engine",
    why="branches and tags move, and adapters silently stop fitting",
)
def _revision(v: Values) -> Iterator[Found]:
    if on_gpu(v) and not re.fullmatch(r"[0-9a-f]{40}", v["model.revision"]):
        yield (
            "model.revision",
            f"{v['model.revision']!r} is not a commit: branches and tags move, and adapters silently stop fitting",
            "write the commit's 40 hexadecimal digits",
        )


@TABLE.rule(
    "quantisation",
    "engine.quantization",
    says="no fp8_rowwise, no SmoothQuant",
    why="LoRA fails with them (#2603, #2604)",
)
def _quantisation(v: Values) -> Iterator[Found]:
    if v["engine.quantization"] in _REFUSED:
        yield "engine.quantization", _REFUSED[v["engine.quantization"]], "write fp8, int4_awq or none"


@TABLE.rule(
    "quantised-float32",
    "runtime",
    "engine.quantization",
    "engine.kv_cache_dtype",
    "engine.dtype",
    says="no quantised weights and no quantised KV cache with float32",
    why="there are no kernels for it",
)
def _quantised_float32(v: Values) -> Iterator[Found]:
    if v["engine.dtype"] != "float32" or not on_gpu(v):
        return
    for name, plain, of in (("quantization", "none", ""), ("kv_cache_dtype", "auto", " in the KV cache")):
        if v[f"engine.{name}"] != plain:
            what = f"{v[f'engine.{name}']}{of} with float32 activations has no kernels"
            yield "engine.dtype", what, "write float16 or bfloat16"


@TABLE.rule(
    "kv-cache-type",
    "engine.kv_cache_type",
    says="a paged KV cache",
    why="LoRA without a KV cache crashes (#2543); LoRA tensors are fed by in-flight batching alone "
    "(tensorrtllm_backend#511), which needs pages",
)
def _kv_cache_type(v: Values) -> Iterator[Found]:
    if v["engine.kv_cache_type"] == "disabled":
        yield "engine.kv_cache_type", "LoRA without a KV cache crashes the engine (#2543)", "write paged"
    elif v["engine.kv_cache_type"] == "continuous":
        yield (
            "engine.kv_cache_type",
            "in-flight batching, without which LoRA tensors are not fed (tensorrtllm_backend#511), needs a paged cache",
            "write paged",
        )


@TABLE.rule(
    "kv-heads",
    "model.num_heads",
    "model.num_kv_heads",
    says="`num_kv_heads` divides `num_heads`",
    why="each key/value head serves as many heads",
)
def _kv_heads(v: Values) -> Iterator[Found]:
    heads, kv_heads = v["model.num_heads"], v["model.num_kv_heads"]
    if heads % kv_heads:
        what = f"{heads} heads cannot share {kv_heads} key/value heads"
        yield "model.num_kv_heads", what, f"write a divisor of {heads}"


@TABLE.rule(
    "head-size",
    "model.num_heads",
    "model.hidden_size",
    "model.head_size",
    says="`head_size`, where `num_heads` does not divide `hidden_size`",
    why="it cannot be told from them",
)
def _head_size(v: Values) -> Iterator[Found]:
    heads, hidden = v["model.num_heads"], v["model.hidden_size"]
    if v["model.head_size"] is None and hidden % heads:
        yield "model.head_size", f"hidden_size {hidden} is no multiple of {heads} heads", "write head_size"


@TABLE.rule(
    "tp-divides",
    "engine.tensor_parallel",
    "model.num_heads",
    "model.num_kv_heads",
    "model.intermediate_size",
    says="`tensor_parallel` divides heads, key/value heads and the MLP",
    why="rows are cut by it",
)
def _tp_divides(v: Values) -> Iterator[Found]:
    tp, kv_heads = v["engine.tensor_parallel"], v["model.num_kv_heads"]
    for name in ("num_heads", "intermediate_size"):
        if v[f"model.{name}"] % tp:
            yield "engine.tensor_parallel", f"{tp} does not divide {name} {v[f'model.{name}']}", "write a divisor"
    if kv_heads % tp and kv_heads > tp:
        yield "engine.tensor_parallel", f"{tp} does not divide num_kv_heads {kv_heads}", "write a divisor"


@TABLE.rule(
    "tp-kv-heads",
    "engine.tensor_parallel",
    "model.num_kv_heads",
    says="no more ranks than key/value heads",
    why="the heads would be doubled, and the LoRA rows of k and v are cut by the undoubled size",
)
def _tp_kv_heads(v: Values) -> Iterator[Found]:
    tp, kv_heads = v["engine.tensor_parallel"], v["model.num_kv_heads"]
    if kv_heads < tp:
        yield (
            "engine.tensor_parallel",
            f"{tp} ranks for {kv_heads} key/value heads: heads are doubled, and the LoRA rows of attn_k and attn_v are "
            "cut by the undoubled size",
            f"write at most {kv_heads}",
        )


@TABLE.rule(
    "pp-divides",
    "engine.pipeline_parallel",
    "model.num_layers",
    says="`pipeline_parallel` divides the layers",
    why="the LoRA cache counts a rank's first layer as rank × layers (`peftCacheManager.cpp`)",
)
def _pp_divides(v: Values) -> Iterator[Found]:
    layers, pp = v["model.num_layers"], v["engine.pipeline_parallel"]
    if layers % pp:
        yield (
            "engine.pipeline_parallel",
            f"{pp} does not divide num_layers {layers}; the LoRA cache counts a rank's first layer as rank x layers, "
            "which is then wrong (peftCacheManager.cpp)",
            "write a divisor",
        )


@TABLE.rule(
    "max-positions",
    "engine.max_seq_len",
    "model.max_positions",
    says="`max_seq_len` ≤ the model's `max_positions`",
    why="the base knows no positions beyond them",
)
def _max_positions(v: Values) -> Iterator[Found]:
    seq, positions = v["engine.max_seq_len"], v["model.max_positions"]
    if seq > positions:
        yield "engine.max_seq_len", f"{seq} exceeds the model's max_positions {positions}", f"write at most {positions}"


@TABLE.rule(
    "max-input",
    "engine.max_seq_len",
    "engine.max_input_len",
    says="`max_input_len` < `max_seq_len`",
    why="a prompt that fills it leaves no token to answer",
)
def _max_input(v: Values) -> Iterator[Found]:
    seq, given = v["engine.max_seq_len"], v["engine.max_input_len"]
    if given and given >= seq:
        yield "engine.max_input_len", f"{given} leaves no token of {seq} to answer", f"write at most {seq - 1}"


@TABLE.rule(
    "max-tokens",
    "engine.max_num_tokens",
    "engine.max_batch_size",
    says="`max_num_tokens` ≥ `max_batch_size`",
    why="every running request needs a token of each step",
)
def _max_tokens(v: Values) -> Iterator[Found]:
    tokens, batch = v["engine.max_num_tokens"], v["engine.max_batch_size"]
    if tokens < batch:
        what = f"{tokens} is less than one token for each of {batch} requests"
        yield "engine.max_num_tokens", what, f"write at least {batch}"


@TABLE.rule(
    "reference-ranks",
    "runtime",
    "engine.tensor_parallel",
    "engine.pipeline_parallel",
    says="one rank, for the reference engine",
    why="it is one process",
)
def _reference_ranks(v: Values) -> Iterator[Found]:
    for name in ("tensor_parallel", "pipeline_parallel"):
        if not on_gpu(v) and v[f"engine.{name}"] != 1:
            yield f"engine.{name}", "the reference engine is one rank", "write 1"


@TABLE.rule(
    "reference-quantisation",
    "runtime",
    "engine.quantization",
    "engine.kv_cache_dtype",
    says="no quantisation, for the reference engine",
    why="it does not quantise",
)
def _reference_quantisation(v: Values) -> Iterator[Found]:
    for name, plain in (("quantization", "none"), ("kv_cache_dtype", "auto")):
        if not on_gpu(v) and v[f"engine.{name}"] != plain:
            yield f"engine.{name}", "the reference engine does not quantise", f"write {plain}"
