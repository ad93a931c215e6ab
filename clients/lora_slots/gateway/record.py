"""What is known of one request: the headers of its answer, its line in the log, its share of the metrics."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote

from lora_slots.gateway.tenants import Caller

REQUEST_ID = "x-request-id"
PREFIX = "x-lora-slots-"
COLD_HEADER = f"{PREFIX}cold"
BASE_FOUND_IN = "base"
NO_DIGEST = "none"
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Record:
    """One request, as far as it has come."""

    request_id: str
    began: float
    """Seconds of the monotonic clock."""
    caller: Caller | None = None
    model: str | None = None
    """As asked for; set once the tenant may use it."""
    status: int = 0
    """Of the answer; 0: it has not begun."""
    adapter: str | None = None
    """`name@version`, or the base's name."""
    digest: str | None = None
    found_in: str | None = None
    """Tier it was in when it was asked for; `base`: the base answers."""
    waited_s: float | None = None
    prompt_hash: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """Seconds from the request to its first token."""
    outcome: str | None = None
    """An error's code, or `client_gone`; None: answered."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer carries, as far as it is known."""
        found = {
            REQUEST_ID: self.request_id,
            f"{PREFIX}adapter": self.adapter,
            f"{PREFIX}digest": NO_DIGEST if self.found_in == BASE_FOUND_IN else self.digest,
            f"{PREFIX}found-in": self.found_in,
            f"{PREFIX}wait-ms": None if self.waited_s is None else f"{self.waited_s * 1e3:.1f}",
        }
        return [(name.encode(), header_value(value)) for name, value in found.items() if value is not None]


def header_value(value: str) -> bytes:
    """A value as it may stand in a header: as it is, or percent-encoded if it is not printable ASCII."""
    if not (value.isascii() and value.isprintable()):
        value = quote(value, safe="!#$&'()*+,/:;=?@[]^`{|}~")
    return value.encode("ascii")


def request_id_of(given: str | None) -> str | None:
    """The client's id if it can be one, a new one if there is none; None: it is not visible ASCII of 128 at most."""
    if given is None:
        return f"req-{secrets.token_hex(12)}"
    return given if _GOOD_ID.fullmatch(given) else None
