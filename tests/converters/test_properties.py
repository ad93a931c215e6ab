"""Random adapters convert to PEFT's ΔW; a damaged file is refused or gives the same ΔW, never a third thing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from fakes.peft_files import (
    PREFIX,
    Deltas,
    Tensors,
    assert_same,
    bfloat16,
    bundle_deltas,
    llama_deltas,
    llama_tensors,
    pair,
    safetensors_bytes,
    values,
    write_adapter,
    write_base,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peft_to_trtllm import AdapterRefused, convert

DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])
SPELLINGS = st.sampled_from(
    [
        PREFIX,
        "base_model.model.base_model.model.model.layers.",
        "model.layers.",
        "base_model.model._orig_mod.model.layers.",
    ]
)
INFIXES = st.sampled_from([".weight", ".default.weight", ".a name with blanks.weight"])
LEAVES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@st.composite
def adapters(
    draw: Any,
) -> tuple[Tensors, dict[str, Any], dict[str, Any], tuple[Deltas, Deltas], dict[str, tuple[int, int]]]:
    """(tensors, config, base config, (ΔW, |s|·|B|·|A|), dims) of a random Llama-like base and an adapter of it."""
    heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    hidden, inter, layers = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    q, kv = heads * head_dim, kv_heads * head_dim
    sizes = ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inter), (hidden, inter), (inter, hidden))
    base = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    config = {
        "r": draw(st.integers(1, 20)),
        "lora_alpha": draw(st.floats(0.1, 64) | st.integers(1, 64)),
        "use_rslora": draw(st.booleans()),
        "rank_pattern": draw(st.dictionaries(_patterns(layers), st.integers(1, 20), max_size=3)),
        "alpha_pattern": draw(st.dictionaries(_patterns(layers), st.floats(0.1, 64), max_size=3)),
    }
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spelled, infix = draw(SPELLINGS), draw(INFIXES)
    chosen = draw(st.sets(st.tuples(st.integers(0, layers - 1), st.sampled_from(LEAVES)), min_size=1))
    plain: Tensors = {}
    for layer, leaf in sorted(chosen):
        path = f"{PREFIX}{layer}.{leaf}"
        a, b = pair(rng, _rank(path, config), *sizes[LEAVES.index(leaf)])
        form = draw(
            st.sampled_from([lambda x: x, lambda x: x.astype(np.float16), bfloat16, lambda x: x.astype(np.float64)])
        )
        plain |= {f"{path}.lora_A.weight": form(a), f"{path}.lora_B.weight": form(b)}
    wanted = llama_deltas(plain, config)
    magnitudes = {key: np.abs(values(array)) for key, array in plain.items()}
    sizes_of = llama_deltas(magnitudes, config)
    keys = draw(st.permutations(list(plain)))
    tensors = {key.replace(PREFIX, spelled).replace(".weight", infix): plain[key] for key in keys}
    names = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")
    return tensors, config, base, (wanted, sizes_of), dict(zip(names, sizes, strict=True))


def _patterns(layers: int) -> Any:
    leaf = st.sampled_from(["q_proj", "v_proj", "down_proj", "self_attn.q_proj", ".*_proj", "mlp.*"])
    return leaf | st.tuples(st.integers(0, layers - 1), leaf).map(lambda pair: rf"layers\.{pair[0]}\..*{pair[1]}")


def _rank(path: str, config: dict[str, Any]) -> int:
    import re

    path = path.removeprefix("base_model.model.")
    patterns: dict[str, int] = config["rank_pattern"]
    default: int = config["r"]
    return next((rank for key, rank in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(adapters(), DTYPES)
def test_any_adapter_is_pefts_formula(made: Any, dtype: str) -> None:
    """Any shapes, ranks, patterns, types and key spellings: ΔW within the type's rounding."""
    tensors, config, base, (wanted, sizes), dims = made
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bundle = convert(
            write_adapter(root / "a", tensors, config), base=write_base(root / "b", base), out=root / "o", dtype=dtype
        )
        assert_same(bundle_deltas(bundle, dims), wanted, dtype, sizes)
        bundle.verify()


GOOD = safetensors_bytes(llama_tensors())
DATA_AT = 8 + int.from_bytes(GOOD[:8], "little")


@st.composite
def damaged(draw: Any) -> bytes:
    """The plain adapter's file with bytes changed in the header, cut off, repeated or put in."""
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, min(DATA_AT, len(data)) - 1))
        how = draw(st.sampled_from(["flip", "set", "cut", "insert", "delete", "move"]))
        if how == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "set":
            data[at] = draw(st.sampled_from(b'0123456789{}[]",:. aAbBlvqw'))
        elif how == "cut":
            del data[draw(st.integers(0, len(data))) :]
            data += bytes(8)  # never empty: the other damages want a byte
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=9))
        elif how == "delete":
            del data[at : at + draw(st.integers(1, 9))]
        else:
            data[at : at + 4], data[8:12] = data[8:12], data[at : at + 4]
    return bytes(data)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged())
def test_a_damaged_header_is_refused_or_harmless(data: bytes) -> None:
    """Whatever happens to the header: a refusal, or the adapter that the file still plainly says."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        adapter = write_adapter(root / "a", {})
        (adapter / "adapter_model.safetensors").write_bytes(data)
        try:
            bundle = convert(adapter, base=write_base(root / "b"), out=root / "o", dtype="float32")
        except AdapterRefused:
            assert not (root / "o").exists()
            return
        said = _read(data)
        wanted = llama_deltas({key.replace("model.language_model.", "model."): value for key, value in said.items()})
        dims = {"attn_q": (16, 16), "attn_k": (16, 8), "attn_v": (16, 8), "attn_dense": (16, 16)}
        dims |= {"mlp_h_to_4h": (16, 24), "mlp_gate": (16, 24), "mlp_4h_to_h": (24, 16)}
        assert_same(bundle_deltas(bundle, dims), wanted, "float32")


def _read(data: bytes) -> Tensors:
    """What the reference reader of the format makes of the file; it must agree that it is one."""
    from safetensors.numpy import load

    return dict(load(data))
