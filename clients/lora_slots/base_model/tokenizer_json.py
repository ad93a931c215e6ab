"""The Hugging Face tokenizer files of a byte-level BPE vocabulary kept in GGUF metadata.

`tokenizer.ggml.pre` names the split before BPE. SmolLM's is: every digit alone, then GPT-2's expression. Another name
is refused: a wrong split gives other tokens and no error.
"""

from typing import Any

from lora_slots.base_model.errors import GgufError

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched before the split


def tokenizer_files(meta: dict[str, Any], *, max_length: int) -> dict[str, object]:
    """File name → JSON content of tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    if (meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        raise GgufError(
            f"tokenizer {meta.get('tokenizer.ggml.model')!r} with split {meta.get('tokenizer.ggml.pre')!r} "
            "is not known here (gpt2 with smollm is)"
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(meta["tokenizer.ggml.token_type"])
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    names = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{source}_token_id"]]
        for name, source in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{source}_token_id" in meta
    }
    return {
        "tokenizer.json": _tokenizer(tokens, meta["tokenizer.ggml.merges"], added),
        "tokenizer_config.json": {
            # the fast class by its own name: a model's own class would rebuild the tokenizer and lose the digit split
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            **names,
            "added_tokens_decoder": {
                str(token["id"]): {key: token[key] for key in token if key != "id"} for token in added
            },
            "chat_template": meta["tokenizer.chat_template"],
        },
        "special_tokens_map.json": names,
    }


def _tokenizer(tokens: list[str], merges: list[str], added: list[dict[str, Any]]) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }
