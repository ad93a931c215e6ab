"""Stop strings: a stream of text is cut exactly where the first of them begins, however it was cut into tokens.

Rules:
1. The stop string that is complete first wins; of two that end at the same character the longer one.
2. What may still become a stop string is held back; nothing that was given is ever taken back.
3. The text given does not depend on how the text came in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Cuts one stream of text."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty texts."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """A stop string has come; nothing more is given."""

    def push(self, text: str) -> str:
        """What of the text so far is certain to come before any stop string, and was not given yet."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        cut = min(
            ((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[: cut[1]]
        kept = self._possible(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """What was held back: the stream is over."""
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        return max(
            next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
            for stop in self._stops
        )
