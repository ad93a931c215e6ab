"""A Llama of random weights, small enough to make on the spot: what the unit tests run instead of the real one.

It has the real one's structure (grouped heads, tied embedding, byte-level tokenizer with the chat template), so that
whatever loads the base model loads this. The bytes 0xF5 to 0xFF occur in no UTF-8 text; a small vocabulary does
without them.
"""

import json
from pathlib import Path

import numpy as np

from lora_slots.base_model.safetensors_file import write_safetensors
from lora_slots.base_model.tokenizer_json import tokenizer_files
from lora_slots.text import byte_spelling

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_UTF8_BYTES = 0xF5
_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_llama(
    path: Path,
    *,
    seed: int,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    vocab: int = 256,
    tied: bool = True,
) -> Path:
    """Write a Hugging Face directory of a random float32 Llama to `path` (made if absent) and give `path` back.

    The same arguments give the same bytes. `vocab` is at least 248: three special tokens and UTF-8's 245 bytes.
    """
    path.mkdir(parents=True, exist_ok=True)
    shapes = _shapes(
        num_layers,
        hidden=hidden,
        q=heads * head_dim,
        kv=kv_heads * head_dim,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
    )
    rng = np.random.default_rng(seed)
    weights = (
        np.ones(shape, np.float32)
        if len(shape) == 1
        # spread so that logits differ clearly and greedy choices do not hang on the last bit
        else rng.standard_normal(shape, np.float32) * np.float32(1.5 / np.sqrt(shape[1]))
        for shape in shapes.values()
    )
    write_safetensors(path / "model.safetensors", shapes, weights)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": vocab,
    }
    files: dict[str, object] = {"config.json": config, **_tokenizer(vocab)}
    files["generation_config.json"] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _shapes(
    num_layers: int, *, hidden: int, q: int, kv: int, intermediate: int, vocab: int, tied: bool
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "mlp.down_proj.weight": (hidden, intermediate),
            at + "mlp.gate_proj.weight": (intermediate, hidden),
            at + "mlp.up_proj.weight": (intermediate, hidden),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
        }
    return shapes


def _tokenizer(vocab: int) -> dict[str, object]:
    """Special tokens, the bytes in GPT-2's spelling, then merges of two lower-case letters up to `vocab` tokens."""
    letters = [chr(value) for value in range(ord("a"), ord("z") + 1)]
    spelled = byte_spelling()[: vocab - len(_SPECIAL)]
    num_merges = vocab - len(_SPECIAL) - len(spelled)
    if len(spelled) < _UTF8_BYTES or num_merges > len(letters) ** 2:
        most = len(_SPECIAL) + 256 + len(letters) ** 2
        raise ValueError(f"vocab {vocab} is outside {len(_SPECIAL) + _UTF8_BYTES} to {most}")
    merges = [f"{first} {second}" for first in letters for second in letters][:num_merges]
    tokens = [*_SPECIAL, *spelled, *(merge.replace(" ", "") for merge in merges)]
    return tokenizer_files(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (vocab - len(_SPECIAL)),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.chat_template": _CHAT,
        },
        max_length=512,
    )
