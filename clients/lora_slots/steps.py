"""What the ensemble's two text steps do: a request's text -> engine inputs, engine outputs -> text.

Tensor names and rules are tensorrtllm_backend's preprocessing and postprocessing; the Triton models translate only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_slots.text import IncrementalDecoder, Tokenizer

Arrays = dict[str, npt.NDArray[Any]]
MAX_STREAMS = 4096
"""Streams kept; one whose end was never seen (the engine failed) is forgotten after that many others."""
_TRUE = {"true", "1", "yes", "t"}


class PromptEncoder:
    """preprocessing: QUERY and its options -> ids, lengths, word lists, embedding bias, end and pad ids."""

    def __init__(self, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> PromptEncoder:
        """From the model's parameters `tokenizer_dir` and `add_special_tokens` (default true)."""
        special = parameters.get("add_special_tokens", "true").strip().lower() in _TRUE
        return cls(Tokenizer(Path(parameters["tokenizer_dir"])), add_special_tokens=special)

    def encode_request(self, given: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Engine inputs of one request; arrays have the leading batch dimension of 1.

        Raises:
            ValueError: an empty prompt, more than one prompt, text that is not UTF-8, or a bias list of two lengths.
        """
        prompt = _texts(given["QUERY"], "text_input")
        if len(prompt) != 1:
            raise ValueError(f"text_input: one prompt per request, found {len(prompt)}")
        ids = self._tokenizer.encode(prompt[0], add_special_tokens=self._add_special_tokens)
        if not ids:
            raise ValueError("text_input is empty: the engine needs at least one token")
        end_id = _scalar(given.get("END_ID"), self._tokenizer.eos_ids[0])
        made: Arrays = {
            "INPUT_ID": np.array([ids], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)]], np.int32),
            "REQUEST_OUTPUT_LEN": given["REQUEST_OUTPUT_LEN"].reshape(1, 1).astype(np.int32),
            "OUT_END_ID": np.array([[end_id]], np.int32),
            "OUT_PAD_ID": np.array([[_scalar(given.get("PAD_ID"), end_id)]], np.int32),
        }
        for name, source in (("STOP_WORDS_IDS", "STOP_WORDS_DICT"), ("BAD_WORDS_IDS", "BAD_WORDS_DICT")):
            if source in given:
                made[name] = self._tokenizer.word_list(_texts(given[source], source.removesuffix("_DICT").lower()))[
                    np.newaxis
                ]
        if "EMBEDDING_BIAS_WORDS" in given:
            made["EMBEDDING_BIAS"] = self._bias(given)
        if "DECODER_QUERY" in given:
            decoder_ids = self._tokenizer.encode(_texts(given["DECODER_QUERY"], "decoder_text_input")[0])
            made["DECODER_INPUT_ID"] = np.array([decoder_ids], np.int32)
            made["REQUEST_DECODER_INPUT_LEN"] = np.array([[len(decoder_ids)]], np.int32)
        if "PROMPT_TABLE_EXTRA_ID" in given:
            made["OUT_PROMPT_TABLE_EXTRA_IDS"] = given["PROMPT_TABLE_EXTRA_ID"].reshape(1, -1)
        return made

    def _bias(self, given: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        words = _texts(given["EMBEDDING_BIAS_WORDS"], "embedding_bias_words")
        weights = given.get("EMBEDDING_BIAS_WEIGHTS", np.zeros(0, np.float32)).reshape(-1)
        if len(words) != len(weights):
            raise ValueError(f"embedding_bias: {len(words)} words, {len(weights)} weights")
        bias = np.zeros((1, self._tokenizer.vocab_size), np.float32)
        for word, weight in zip(words, weights, strict=True):
            for number in self._tokenizer.encode(word, add_special_tokens=False):
                bias[0, number] += weight
        return bias


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one response."""

    texts: list[str]
    """One per beam."""
    final: bool
    """The stream is over."""
    num_tokens: int
    """Tokens of the stream so far, of the first beam."""


class StreamDecoders:
    """postprocessing: ids -> text, with a decoder for each stream that runs.

    A stream is known by the engine's own `arrival_time_ns`, not by the client's request id, which need not be there
    and need not be one of a kind; the sequences of one request (`num_return_sequences`) are streams of their own.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._streams: OrderedDict[tuple[int, int], _Stream] = OrderedDict()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> StreamDecoders:
        """From the model's parameters `tokenizer_dir` and `skip_special_tokens` (default true)."""
        skip = parameters.get("skip_special_tokens", "true").strip().lower() in _TRUE
        return cls(Tokenizer(Path(parameters["tokenizer_dir"])), skip_special_tokens=skip)

    def decode(self, given: Mapping[str, npt.NDArray[Any]]) -> Piece:
        """One response's text; a character that is not whole yet waits for the next response.

        Args:
            given: TOKENS_BATCH [1, beams, n] int32; SEQUENCE_LENGTH [1, beams] int32, tokens that count; and, [1, 1],
                ARRIVAL_TIME, LAST_TOKEN_TIME (nanoseconds, 0 until the stream is over) and SEQUENCE_INDEX. Without
                an arrival time the response is a whole answer.
        """
        counts = given["SEQUENCE_LENGTH"].reshape(-1)
        tokens = given["TOKENS_BATCH"].reshape(len(counts), -1)
        pieces = [ids[: max(0, int(count))].tolist() for ids, count in zip(tokens, counts, strict=True)]
        arrival, final = _scalar(given.get("ARRIVAL_TIME"), 0), _scalar(given.get("LAST_TOKEN_TIME"), 0) != 0
        key = (arrival, _scalar(given.get("SEQUENCE_INDEX"), 0))
        stream = self._streams.get(key) if arrival else None
        if stream is None:
            stream = _Stream([self._decoder() for _ in pieces])
        stream.num_tokens += len(pieces[0]) if pieces else 0
        over = final or not arrival
        texts = [
            decoder.push(ids) + (decoder.flush() if over else "")
            for decoder, ids in zip(stream.decoders, pieces, strict=True)
        ]
        if over:
            self._streams.pop(key, None)
        else:
            self._streams[key] = stream
            self._streams.move_to_end(key)
            if len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
        return Piece(texts, final, stream.num_tokens)

    def _decoder(self) -> IncrementalDecoder:
        return self._tokenizer.incremental_decoder(skip_special_tokens=self._skip_special_tokens)


@dataclass(slots=True)
class _Stream:
    """A running stream."""

    decoders: list[IncrementalDecoder]
    num_tokens: int = 0


def _texts(array: npt.NDArray[Any], name: str) -> list[str]:
    """Texts of a tensor of bytes; `name` is the ensemble's input. Raises ValueError: not UTF-8, never replaced."""
    try:
        return [item.decode() for item in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from None


def _scalar(array: npt.NDArray[Any] | None, default: int) -> int:
    return default if array is None else int(array.reshape(-1)[0])
