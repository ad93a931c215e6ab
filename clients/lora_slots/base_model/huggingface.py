"""Writes a Llama GGUF file as the Hugging Face directory that transformers, PEFT and both engines read.

Rules:
1. Names and shapes are transformers' LlamaForCausalLM; weights are float32.
2. llama.cpp interleaves the two rotary halves inside each q and k head (convert_hf_to_gguf.py, `permute`); undone here.
3. Without `output.weight` the embedding is tied.
4. float32 metadata is written by its shortest decimal (1e-05, not 9.999999747378752e-06): the same float32.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_slots.base_model.errors import GgufError
from lora_slots.base_model.gguf import Gguf
from lora_slots.base_model.safetensors_file import write_safetensors
from lora_slots.base_model.tokenizer_json import tokenizer_files

_LAYER = {
    "input_layernorm": "attn_norm",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q",
    "self_attn.v_proj": "attn_v",
}


def write_huggingface(gguf: Gguf, out: Path, wrote: Callable[[int, int], object]) -> None:
    """Write config, weights, tokenizer and generation config into the existing folder `out`.

    `wrote(done, total)` counts bytes of weights. Raises GgufError if the file is not a Llama that fits here.
    """
    config = llama_config(gguf)
    files: dict[str, object] = {
        "config.json": config,
        "generation_config.json": {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
        },
        **tokenizer_files(gguf.metadata, max_length=config["max_position_embeddings"]),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    names = _weight_names(config)
    missing = set(names.values()) - gguf.tensors.keys()
    unknown = gguf.tensors.keys() - set(names.values())
    if missing or unknown:
        raise GgufError(f"not a plain Llama: tensors missing {sorted(missing)[:5]}, not known {sorted(unknown)[:5]}")
    shapes = {name: gguf.tensors[source].shape for name, source in names.items()}
    write_safetensors(out / "model.safetensors", shapes, _weights(gguf, names, config), wrote)


def llama_config(gguf: Gguf) -> dict[str, Any]:
    """transformers' config.json for the Llama in `gguf`; GgufError if a needed key is absent or it is no Llama."""
    meta = gguf.metadata
    if meta.get("general.architecture") != "llama":
        raise GgufError(f"architecture {meta.get('general.architecture')!r} is not llama")
    try:
        heads = meta["llama.attention.head_count"]
        hidden = meta["llama.embedding_length"]
        tokens = {
            key: meta[f"tokenizer.ggml.{source}_token_id"]
            for key, source in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
            if f"tokenizer.ggml.{source}_token_id" in meta
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            **tokens,
            "head_dim": meta.get("llama.attention.key_length", hidden // heads),
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": meta["llama.feed_forward_length"],
            "max_position_embeddings": meta["llama.context_length"],
            "num_attention_heads": heads,
            "num_hidden_layers": meta["llama.block_count"],
            "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
            "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _shortest(meta.get("llama.rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "torch_dtype": "float32",
            "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        }
    except KeyError as error:
        raise GgufError(f"metadata {error} is missing") from error


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _weight_names(config: dict[str, Any]) -> dict[str, str]:
    """Hugging Face name → GGUF name, sorted as the file lists them."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = "output.weight"
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in _LAYER.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    return dict(sorted(names.items()))


def _weights(gguf: Gguf, names: dict[str, str], config: dict[str, Any]) -> Iterator[NDArray[np.float32]]:
    heads_of = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for source in names.values():
        weight = gguf.read(source)
        heads = heads_of.get(source.split(".")[-2])
        yield weight if heads is None else split_rotary(weight, heads)


def split_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order in a q or k weight [heads * head_size, hidden]: pairs back into two halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
