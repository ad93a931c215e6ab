"""Where a plan's adapters come from: words (`200x16`), a registry, or a folder of bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lora_slots.refusals import Refused
from trtllm_lora import EngineShape
from trtllm_lora.bundle import CONFIG_FILE
from trtllm_lora.fleet import ConfigRows, Fleet, Group, bytes_of_rows
from trtllm_lora.modules import MODULE_BY_ID


def from_bundles(folder: Path, shape: EngineShape) -> Fleet:
    """All bundles below a folder.

    Raises:
        Refused: no bundle there, or bundles that this engine does not take, each with its reason.
    """
    files = sorted(folder.glob(f"*/{CONFIG_FILE}"))
    if not files:
        raise Refused(f"{folder}: no bundle here (a folder with {CONFIG_FILE} for each adapter)")
    return _fleet(files, shape)


def from_registry(file: Path, shape: EngineShape) -> Fleet:
    """The versions in `adapters.yaml` that are served: current ones, and targets of aliases.

    Raises:
        Refused: bundles that are missing or do not fit. RegistryError: the file is broken.
    """
    from adapter_slots.registry import Registry

    entries = Registry(file).content.serving.values()
    if not entries:
        raise Refused(f"{file}: no adapters in it")
    return _fleet([Path(entry.path) / CONFIG_FILE for entry in entries], shape)


def _fleet(files: Iterable[Path], shape: EngineShape) -> Fleet:
    """Groups by equal rows: only `lora_config` is read, which is small."""
    kinds: Counter[tuple[bytes, int]] = Counter()
    first: dict[tuple[bytes, int], Path] = {}
    problems = []
    for file in files:
        try:
            table = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            problems.append(f"{file}: {error}")
            continue
        if table.ndim != 3 or table.shape[2] not in (3, 4) or not table.size:
            problems.append(f"{file}: lora_config is [1, rows, 3 or 4], found {list(table.shape)}")
            continue
        key = (table.astype("<i4").tobytes(), int(table.shape[2]))
        kinds[key] += 1
        first.setdefault(key, file)
    groups = []
    for (data, columns), count in kinds.items():
        rows: ConfigRows = tuple(map(tuple, np.frombuffer(data, "<i4").reshape(-1, columns).tolist()))
        wrong = _wrong(rows, shape)
        if wrong:
            problems.append(f"{first[data, columns].parent}: {wrong}" + (f" ({count} like it)" if count > 1 else ""))
        else:
            groups.append(Group(count, rows, bytes_of_rows(rows, shape)))
    if problems:
        raise Refused("\n".join(problems))
    return Fleet(tuple(groups))


def _wrong(rows: ConfigRows, shape: EngineShape) -> str:
    for module_id, layer, rank, *_ in rows:
        module = MODULE_BY_ID.get(module_id)
        if module is None or module.name not in shape.lora_modules:
            return f"module id {module_id} is not enabled in the profile (lora.modules)"
        if not 0 <= layer < shape.num_layers:
            return f"layer {layer}: the profile has {shape.num_layers}"
        if not 0 < rank <= shape.max_lora_rank:
            return f"rank {rank}: the profile has lora.max_rank {shape.max_lora_rank}"
    return ""
