"""A model repository as it lies on disk, anybody's: parsed as far as it can be, with the line of every tensor.

A template that was not filled does not parse. What stands in the way is told as a finding and replaced by a harmless
value, so that everything else in the file is still looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_slots.refusals import Refused
from trtllm_lora import ContractError, EngineShape

WIRE = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
OPEN_DIM = -404
"""Stands for a dimension that was not filled; no rule looks at it."""
_STAND_INS = (
    (re.compile(r"decoupled|mode$"), "true"),
    (re.compile(r"delay|queue"), "0"),
)
_PLACES = ((re.compile(r"\bdata_type\s*:\s*$"), "TYPE_INVALID"), (re.compile(r"\bdims\s*:\s*\[[^\]]*$"), str(OPEN_DIM)))
"""What stands before a placeholder in its line -> its stand-in, whatever its name is."""
_OPEN_TYPE = re.compile(r"\bdata_type\s*:\s*\$\{")
_NAMED = re.compile(r'\bname\s*:\s*"(\w+)"')
_BARE = re.compile(r"\$\{(\w+)\}")
_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong in a repository, and how to mend it."""

    file: str
    line: int
    rule: str
    """Its name in `repo_rules.RULES`."""
    what: str
    fix: str
    warning: bool = False

    def __str__(self) -> str:
        kind = "warning: " if self.warning else ""
        return f"{self.file}:{self.line}: {kind}{self.what}; {self.fix} [{self.rule}]"


@dataclass(slots=True)
class ModelFiles:
    """One model of the repository."""

    name: str
    """Its folder's name."""
    folder: Path
    text: str
    config: Any
    """Triton's ModelConfig."""

    @property
    def file(self) -> str:
        """Its config.pbtxt."""
        return str(self.folder / "config.pbtxt")

    def line(self, word: str) -> int:
        """First line in which a tensor or parameter of this name is declared; 1 if none."""
        pattern = re.compile(rf'(?:name|key)\s*:\s*"{re.escape(word)}"')
        return next((i for i, line in enumerate(self.text.splitlines(), 1) if pattern.search(line)), 1)

    def line_of(self, text: str) -> int:
        """First line that contains this text outside of a comment; 1 if none."""
        lines = (line.partition("#")[0] for line in self.text.splitlines())
        return next((i for i, line in enumerate(lines, 1) if text in line), 1)

    def tensor(self, name: str) -> Any | None:
        """An input of this name."""
        return next((tensor for tensor in self.config.input if tensor.name == name), None)

    def output(self, name: str) -> Any | None:
        """An output of this name."""
        return next((tensor for tensor in self.config.output if tensor.name == name), None)

    def parameter(self, key: str) -> str | None:
        """A parameter's text; None if it is absent, empty or an unfilled placeholder."""
        if key not in self.config.parameters:
            return None
        value = str(self.config.parameters[key].string_value)
        return value if value and not value.startswith("${") else None

    def is_open(self, tensor: Any) -> bool:
        """Whether a tensor's type is a placeholder: nothing can be said of it but that."""
        return tensor.data_type == 0 and _OPEN_TYPE.search(self.text) is not None

    @property
    def is_python(self) -> bool:
        """Whether it runs in Triton's Python backend."""
        return str(self.config.backend) == "python"

    @property
    def code(self) -> str:
        """Its Python files, one after the other."""
        files = sorted(self.folder.glob("[0-9]*/**/*.py"))
        return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


@dataclass(slots=True)
class Repository:
    """All models, the engine they serve, and what was found while reading."""

    root: Path
    models: dict[str, ModelFiles] = field(default_factory=dict)
    engine: EngineShape | None = None
    engine_dir: Path | None = None
    bundles: Path | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def tensorrt_llm(self) -> ModelFiles | None:
        """The model with the engine."""
        return self.models.get("tensorrt_llm")

    def is_open(self, *types: int) -> bool:
        """Whether one of the types may be a placeholder's: nothing can be said of it."""
        return 0 in types and any(_OPEN_TYPE.search(model.text) for model in self.models.values())

    def wire_type(self, tensor: Any) -> str:
        """The type that a tensor of the stock configuration has here; that of adapters is the engine's dtype."""
        from tritonclient.grpc import model_config_pb2

        if tensor.name != "lora_weights":
            return str(model_config_pb2.DataType.Name(tensor.data_type))
        return WIRE[self.engine.dtype] if self.engine else "of the engine's dtype (TYPE_FP16, TYPE_BF16 or TYPE_FP32)"

    def on_the_path(self) -> Iterator[ModelFiles]:
        """Models that carry LoRA tensors."""
        for model in self.models.values():
            if model.tensor("lora_config") is not None or model.tensor("lora_weights") is not None:
                yield model


def read_repository(root: Path, engine: Path | None = None, bundles: Path | None = None) -> Repository:
    """Read every model of a repository.

    Raises:
        Refused: no model repository there.
    """
    folders = sorted(file.parent for file in root.glob("*/config.pbtxt"))
    if not folders:
        raise Refused(f"{root}: no model repository here (no */config.pbtxt)")
    repository = Repository(root, bundles=bundles)
    open_places = [place for folder in folders for place in _read_model(folder, repository)]
    _find_engine(repository, engine)
    for place in open_places:  # what to write for it is the engine's to say
        what = f"${{{place.name}}} is not filled, and Triton cannot parse the file"
        fix = _instead(place, repository)
        repository.findings.append(Finding(place.file, place.line, "placeholder", what, fix))
    return repository


def _read_model(folder: Path, repository: Repository) -> list[_Open]:
    """Read one model into the repository; returns the placeholders in its text."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    file = folder / "config.pbtxt"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        repository.findings.append(Finding(str(file), 1, "not-a-config", what, "make it a file that can be read"))
        return []
    filled, open_places = _fill_bare(text, str(file))
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(filled, config)
    except text_format.ParseError as error:
        line = error.GetLine() or 1
        what = str(error).split(" : ", 1)[-1]
        fix = "correct it: Triton cannot load the model"
        repository.findings.append(Finding(str(file), line, "not-a-config", f"not a model configuration: {what}", fix))
    else:
        repository.models[folder.name] = ModelFiles(folder.name, folder, text, config)
    return open_places


@dataclass(frozen=True, slots=True)
class _Open:
    """A placeholder outside of strings."""

    file: str
    line: int
    name: str
    tensor: str
    """The tensor, or whatever was named last before it."""
    stand_in: str


def _fill_bare(text: str, file: str) -> tuple[str, list[_Open]]:
    """The text with a stand-in for each `${…}` that is not inside a string, and these places."""
    lines, places, named = [], list[_Open](), ""
    for number, line in enumerate(text.splitlines(), 1):
        named = next(iter(_NAMED.findall(line.partition("#")[0])), named)
        parts = _STRINGS.split(line)
        before = ""
        for i, part in enumerate(parts):
            if i % 2 == 0:  # strings stand at the odd places
                code, hash_, rest = part.partition("#")
                while found := _BARE.search(code):
                    value = _stand_in(found[1], before + code[: found.start()])
                    places.append(_Open(file, number, found[1], named, value))
                    code = code[: found.start()] + value + code[found.end() :]
                parts[i] = code + hash_ + rest
            before += parts[i]
        lines.append("".join(parts))
    return "\n".join(lines), places


def _stand_in(name: str, before: str) -> str:
    of_place = next((value for pattern, value in _PLACES if pattern.search(before)), None)
    return of_place or next((value for pattern, value in _STAND_INS if pattern.search(name)), "1")


def _instead(place: _Open, repository: Repository) -> str:
    """What to write for a placeholder."""
    if place.stand_in == str(OPEN_DIM):
        return "fill it with the dimension, as the stock configuration has it"
    if place.stand_in != "TYPE_INVALID":
        return f"fill it, such as with {place.stand_in}"
    if place.tensor == "lora_weights":
        dtype = repository.engine.dtype if repository.engine else None
        return f"write {WIRE[dtype]}, the engine's dtype" if dtype else "write the engine's dtype, such as TYPE_BF16"
    return f"fill it, such as with {'TYPE_FP32' if 'logits' in place.tensor + place.name else 'TYPE_FP16'}"


def _find_engine(repository: Repository, given: Path | None) -> None:
    model = repository.tensorrt_llm
    named = model.parameter("gpt_model_path") if model else None
    folder = given or (Path(named) if named else None)
    if given is None and model is not None and not (folder and folder.exists()):
        folder = next(iter(sorted(file.parent for file in model.folder.glob("[0-9]*/config.json"))), folder)
    if folder is None:
        return
    try:
        repository.engine = EngineShape.from_engine_config(folder)
        repository.engine_dir = folder
    except ContractError as error:
        if given is not None:
            raise
        if model is not None:
            what = f"the engine cannot be read from here, so its dtype, ranks and versions go unchecked ({error})"
            line, fix = model.line("gpt_model_path"), "run this where the engine is, or give --engine DIR"
            repository.findings.append(Finding(model.file, line, "engine-unread", what, fix, warning=True))
