"""Everything that can stop a conversion.

ConversionError
├── AdapterRefused   the adapter cannot be converted right; `report` holds every reason
└── InputError       a path that is not there, a disk that refuses, a wrong argument: nothing was judged

`AdapterRefused` ends the CLI with exit status 2, `InputError` with 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft_to_trtllm.report import Report


class ConversionError(Exception):
    """Base of this package's errors; `str()` is made for a person."""


class AdapterRefused(ConversionError):
    """The adapter is refused. Nothing was written."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.text())
        self.report = report


class InputError(ConversionError):
    """An argument, a path or the disk is wrong; the adapter itself was not judged."""
