"""Text to token ids and back: what stands on both sides of the engine, without transformers and without torch.

Read from a Hugging Face directory: tokenizer.json, tokenizer_config.json, generation_config.json or config.json, and
chat_template.jinja if there is one. Rules:

1. `encode`, `decode` and `apply_chat_template` give what transformers gives for the same directory.
2. Whatever pieces a stream of ids is cut into, the pieces' texts joined are the text of all ids (IncrementalDecoder).
3. Stop and bad words take TensorRT-LLM's form [2, n] (`word_list`).

tokenizers and jinja2 are imported when first needed.
"""

import codecs
import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lora_slots.text_bound import TokenBound, token_bound

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(Exception):
    """The directory holds no usable tokenizer, or the chat template refuses the messages; the message says which."""


class Tokenizer:
    """The tokenizer of one Hugging Face directory. Not changed after it is made; safe to share between threads."""

    def __init__(self, path: Path) -> None:
        """Read the directory `path`. Raises TokenizerError if tokenizer.json is absent or broken."""
        import tokenizers

        self.path = path
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"no usable tokenizer in {path}: {error}") from error
        self._config = _read_json(path / "tokenizer_config.json")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; pass add_special_tokens=False for text that a chat template made."""
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """What `encode` gives for each of `texts`, without holding the interpreter's lock: other threads go on."""
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [one.ids for one in found]

    def least_tokens(self, text: str) -> int:
        """So many tokens `text` has at least, found without tokenising it; 0: nothing is known."""
        return self._bound.least_tokens(text) if self._bound else 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary give nothing."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return token_bound(json.loads(self._inner.to_str()), byte_spelling())

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, the main one first: generation_config.json's, else config.json's."""
        for name in ("generation_config.json", "config.json"):
            found = _read_json(self.path / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        token = self.special_tokens.get("eos_token", "")
        number = self._inner.token_to_id(token)
        if number is None:
            raise TokenizerError(f"{self.path} names no end-of-sequence token")
        return (number,)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Names such as "eos_token" and their spelling, as tokenizer_config.json has them."""
        found = {name: self._config.get(name) for name in _SPECIAL_TOKENS}
        return {
            name: token["content"] if isinstance(token, dict) else str(token)
            for name, token in found.items()
            if token is not None
        }

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages` ([{"role": …, "content": …}, …]), as the model's own template renders it.

        Raises TokenizerError if there is no template, or if it refuses the messages.
        """
        import jinja2

        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    **{"tools": None, "documents": None, **self.special_tokens, **variables},
                )
            )
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template of {self.path} refuses these messages: {error}") from error

    def word_list(self, words: Sequence[str]) -> NDArray[np.int32]:
        """`words` as TensorRT-LLM's stop_words_list or bad_words_list, int32 [2, n].

        Row 0: the words' ids one after the other, padded with 0. Row 1: where each word ends, padded with -1. Every
        word is tokenised alone; one without tokens is left out. No words: [2, 1] of 0 and -1
        (tensorrtllm_backend, preprocessing model, pads both rows to one width of at least 1).
        """
        ids = [found for word in words if (found := self.encode(word, add_special_tokens=False))]
        ends = np.cumsum([len(word) for word in ids], dtype=np.int32)
        flat = [number for word in ids for number in word]
        rows = np.empty((2, max(1, len(flat))), np.int32)
        rows[0], rows[1] = 0, -1
        rows[0, : len(flat)] = flat
        rows[1, : len(ends)] = ends
        return rows

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> "IncrementalDecoder":
        """A fresh decoder for one stream."""
        return IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _template(self) -> Any:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # the environment transformers documents for chat templates
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._template_text())

    def _template_text(self) -> str:
        beside = self.path / "chat_template.jinja"
        if beside.exists():
            return beside.read_text(encoding="utf-8")
        found = self._config.get("chat_template")
        if isinstance(found, list):
            found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
        if not found:
            raise TokenizerError(f"{self.path} has no chat template; send a plain prompt instead of messages")
        return str(found)

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """Bytes of every token, special ones empty, for a byte-level tokenizer; None for any other kind."""
        decoder = json.loads(self._inner.to_str())["decoder"] or {}
        if decoder.get("type") != "ByteLevel":
            return None
        value_of = {char: value for value, char in enumerate(byte_spelling())}
        table = [b""] * self._inner.get_vocab_size(with_added_tokens=True)
        for token, number in self._inner.get_vocab(with_added_tokens=True).items():
            if number >= len(table):
                table.extend([b""] * (number + 1 - len(table)))
            spelled = all(char in value_of for char in token)
            table[number] = bytes(value_of[char] for char in token) if spelled else token.encode()
        for number, added in self._inner.get_added_tokens_decoder().items():
            if added.special:
                table[number] = b""
        return table

    @cached_property
    def all_token_bytes(self) -> list[bytes] | None:
        """As `token_bytes`, with special tokens spelled out."""
        if self.token_bytes is None:
            return None
        table = list(self.token_bytes)
        for number, added in self._inner.get_added_tokens_decoder().items():
            table[number] = added.content.encode()
        return table


class IncrementalDecoder:
    """Text of one stream as its ids come in; a character split over tokens is held back until it is whole.

    The results of all `push` calls and of `flush`, joined, equal `Tokenizer.decode` of all ids. With a tokenizer that
    is not byte-level this holds as long as the ids spell valid UTF-8: a broken byte late in a run of single bytes
    changes the characters before it, and what was given is not taken back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._table = tokenizer.token_bytes if skip_special_tokens else tokenizer.all_token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after `ids`; "" while a character is incomplete."""
        if self._table is None:
            return self._by_decoding_again(ids, final=False)
        known = len(self._table)
        return self._utf8.decode(b"".join([self._table[number] for number in ids if number < known]))

    def flush(self) -> str:
        """What was held back, broken bytes as U+FFFD; the stream is over."""
        if self._table is None:
            return self._by_decoding_again([], final=True)
        return self._utf8.decode(b"", final=True)

    def _by_decoding_again(self, ids: Sequence[int], *, final: bool) -> str:
        # SentencePiece-like decoders treat the first token differently and have no bytes per token, so everything is
        # decoded again at each step: about 0.1 ms for an answer of 1,000 tokens
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        whole = len(text) if final else len(text.rstrip("\ufffd"))
        fresh = text[self._given : whole]
        self._given = max(self._given, whole)
        return fresh


def byte_spelling() -> list[str]:
    """The character that stands for each byte 0 to 255 in a byte-level vocabulary (GPT-2's).

    Printable Latin-1 characters stand for themselves; the others, in order, take the code points from 256 on.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(value if value in itself else next(others)) for value in range(256)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return found


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    # unlike jinja2's own filter, without escaping for HTML
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
