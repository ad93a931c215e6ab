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

_STAND_INS = (
    (re.compile(r"^logits"), "TYPE_FP32"),
    (re.compile(r"data_?type"), "TYPE_FP16"),
    (re.compile(r"decoupled|mode$"), "true"),
    (re.compile(r"delay|queue"), "0"),
)
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
    for folder in folders:
        _read_model(folder, repository)
    _find_engine(repository, engine)
    return repository


def _read_model(folder: Path, repository: Repository) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    file = folder / "config.pbtxt"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        repository.findings.append(Finding(str(file), 1, "not-a-config", what, "make it a file that can be read"))
        return
    filled = _fill_bare(text, str(file), repository.findings)
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(filled, config)
    except text_format.ParseError as error:
        line = error.GetLine() or 1
        what = str(error).split(" : ", 1)[-1]
        fix = "correct it: Triton cannot load the model"
        repository.findings.append(Finding(str(file), line, "not-a-config", f"not a model configuration: {what}", fix))
        return
    repository.models[folder.name] = ModelFiles(folder.name, folder, text, config)


def _fill_bare(text: str, file: str, findings: list[Finding]) -> str:
    """The text with a stand-in for each `${…}` that is not inside a string; each is a finding."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = _STRINGS.split(line)
        for i in range(0, len(parts), 2):  # strings stand at the odd places
            for name in _BARE.findall(parts[i].partition("#")[0]):
                what = f"${{{name}}} is not filled, and Triton cannot parse the file"
                findings.append(Finding(file, number, "placeholder", what, f"fill it, such as with {_stand_in(name)}"))
            parts[i] = _BARE.sub(lambda found: _stand_in(found[1]), parts[i])
        lines.append("".join(parts))
    return "\n".join(lines)


def _stand_in(name: str) -> str:
    return next((value for pattern, value in _STAND_INS if pattern.search(name)), "1")


def _find_engine(repository: Repository, given: Path | None) -> None:
    model = repository.tensorrt_llm
    named = model.parameter("gpt_model_path") if model else None
    folder = given or (Path(named) if named else None)
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
