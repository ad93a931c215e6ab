"""Which adapters were in slots, kept over restarts: names in order of last use, and pins. One small JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from adapter_slots.events import Tier
from adapter_slots.records import Adapter

log = structlog.get_logger("adapter_slots")


@dataclass(frozen=True, slots=True)
class WarmSet:
    """Adapter names; `recent` most recently used first, pinned ones included; `pinned` those that operators pinned."""

    pinned: tuple[str, ...] = ()
    recent: tuple[str, ...] = ()

    @classmethod
    def of(cls, adapters: Iterable[Adapter], pinned: Iterable[str]) -> WarmSet:
        """The warm set of a machine as it is now, and operators' pins; the registry has its own."""
        here = [a for a in adapters if a.pinned or a.tier is Tier.SLOT]
        here.sort(key=lambda a: -a.last_used)
        return cls(tuple(sorted(pinned)), tuple(a.name for a in here))


def load(file: Path) -> WarmSet:
    """The saved warm set; an empty one if there is none, or it cannot be read (which is logged)."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return WarmSet(tuple(map(str, saved["pinned"])), tuple(map(str, saved["recent"])))
    except FileNotFoundError:
        return WarmSet()
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the warm set cannot be read, starting cold", file=str(file), why=str(error))
        return WarmSet()


def save(file: Path, warm: WarmSet) -> None:
    """Write the warm set in one step. A disk that refuses is logged: it costs a warm start, nothing else."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"pinned": warm.pinned, "recent": warm.recent}), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        log.warning("the warm set cannot be written", file=str(file), why=str(error))
