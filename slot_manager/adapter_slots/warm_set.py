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


class WarmSetFile:
    """The file that keeps the warm set; without a file nothing is kept."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._saved = WarmSet()

    def is_new(self, warm: WarmSet) -> bool:
        """Whether `warm` differs from what was asked about last, and is to be saved."""
        if self._file is None or warm == self._saved:
            return False
        self._saved = warm
        return True

    def load(self) -> WarmSet:
        """The saved warm set; an empty one if there is none, or it cannot be read (which is logged)."""
        if self._file is None:
            return WarmSet()
        try:
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            return WarmSet(tuple(map(str, saved["pinned"])), tuple(map(str, saved["recent"])))
        except FileNotFoundError:
            return WarmSet()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the warm set cannot be read, starting cold", file=str(self._file), why=str(error))
            return WarmSet()

    def save(self, warm: WarmSet) -> None:
        """Write the warm set in one step. A disk that refuses is logged: it costs a warm start, nothing else."""
        if self._file is None:
            return
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"pinned": warm.pinned, "recent": warm.recent}), encoding="utf-8")
            temporary.replace(self._file)
        except OSError as error:
            log.warning("the warm set cannot be written", file=str(self._file), why=str(error))
