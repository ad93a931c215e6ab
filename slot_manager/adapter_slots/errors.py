"""Errors of the slot manager, with what the edge needs to answer: a gRPC code name, an HTTP status, retryable or not.

Triton's Python backend can send only a few codes; `grpc_code` names one of them (`pb_utils.TritonError`).

SlotError
├── UnknownAdapter       NOT_FOUND 404            no adapter of that name; near names given
├── AdapterRejected      FAILED_PRECONDITION 422  what is published does not fit this engine, or is broken
│   └── NotAdmitted                               trained on another base, or no good signature by a trusted key
├── LeaseRunning         ALREADY_EXISTS 409       a request of that id is still running
├── BadRequest           INVALID_ARGUMENT 400     the request contradicts itself, or the engine would refuse it
├── NoRoom               UNAVAILABLE 429          no slot within the deadline
├── NoSlotEver           RESOURCE_EXHAUSTED 429   pins and pools leave it no slot, whatever else ends
├── AdapterCold          UNAVAILABLE 503          it is not in a slot, and the request does not wait
├── AdapterFailed        UNAVAILABLE 503          its last move failed; the reason is kept, back-off runs
├── Draining             UNAVAILABLE 503          nothing new is granted any more
└── RegistryError        INTERNAL 500             adapters.yaml cannot be read or written; the last good one stays
    ├── RegistryAbsent                            there is none
    ├── RegistryMoved                             somebody else changed it since it was read
    └── ChangeRefused    FAILED_PRECONDITION 409  a change that cannot be made to it as it is

TierError                inside the manager       a move failed (store, disk, host memory, engine)
├── MoveCancelled        nobody wants it any more, or its time is over
├── StoreUnavailable     the object store cannot be reached, is too slow, or sends errors that pass
├── StoreDenied          it refuses our credentials: permanent
├── StoreMissing         it has no such adapter: permanent
├── StoreCorrupt         what it sends is not what the manifest says: permanent
├── DiskFull             no room on DISK, by its own bound or the file system's
├── DiskFailed           DISK cannot be written or read
│   └── DiskReadOnly     permanent until an operator acts
├── ConversionFailed     a raw adapter cannot be converted: permanent
├── HostFull
├── EngineUnavailable    the engine cannot be reached or timed out
├── EngineMiss           the engine does not hold the task id
├── EngineFull           its LoRA cache has no room (`lost_idle`: every idle adapter is gone)
├── EngineRefused        a validation error: permanent for this adapter
├── MoveRejected         what arrived on DISK does not fit the engine: permanent
├── BundleGone           the bundle left the disk: it is fetched again
└── BundleBroken         the bundle on DISK is not what its manifest says

EventRefused             a programmer's mistake   the machine was told something impossible
"""

from __future__ import annotations

import copy
import re
from typing import Self

_ADAPTER = re.compile(r"^adapter '[^']*': ")
_FOLDERS = re.compile(r"(?<![\w/.:])/(?:[^\s/:;,'\"]+/)+")
"""The folders of an absolute path; no part of a URL."""


class SlotError(Exception):
    """Base of what a client can be told. `grpc_code` and `http_status` are the edge's answer."""

    grpc_code = "INTERNAL"
    http_status = 500
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        adapter: str | None = None,
        retry_after_s: float | None = None,
        story: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.adapter = adapter
        self.retry_after_s = retry_after_s
        self.story = story
        """The last lines of the adapter's story, for logs and for `slots explain`."""

    def about(self, name: str, version: int) -> Self:
        """The same error for who asked for the content by another name: it must not tell the one it was found by."""
        told = copy.copy(self)
        said = _ADAPTER.match(str(self))
        if said is not None:
            asked = f"{name}@{version}" if "@" in said[0] else name
            told.args = (f"adapter {asked!r}: {str(self)[said.end() :]}",)
        told.adapter = name
        return told

    @property
    def wire_text(self) -> str:
        """The text clients see: it begins with the code, since Triton's streams carry no status.

        Of this machine's paths only the last part is left; logs and `slots explain` have them whole.
        """
        return f"[{self.grpc_code}] {_FOLDERS.sub('…/', str(self))}"


class UnknownAdapter(SlotError):
    """No adapter of that name or task id. Never answered by the base model."""

    grpc_code, http_status = "NOT_FOUND", 404


class AdapterRejected(SlotError):
    """What is published does not fit this engine, or is broken: no client can mend it."""

    grpc_code, http_status = "FAILED_PRECONDITION", 422


class NotAdmitted(AdapterRejected):
    """The adapter was trained on another base, or no key that is trusted has signed it."""


class BadRequest(SlotError):
    """The request contradicts itself or uses what this door does not offer."""

    grpc_code, http_status = "INVALID_ARGUMENT", 400


class LeaseRunning(SlotError):
    """A request of that id holds a lease: ids must be unique among running requests."""

    grpc_code, http_status = "ALREADY_EXISTS", 409


class NoRoom(SlotError):
    """No slot fell free in time."""

    grpc_code, http_status, retryable = "UNAVAILABLE", 429, True


class NoSlotEver(SlotError):
    """Pins and pools leave the adapter no slot: waiting is in vain until an operator changes them."""

    grpc_code, http_status = "RESOURCE_EXHAUSTED", 429


class AdapterCold(SlotError):
    """The adapter is not in a slot and the request does not wait; it is being warmed meanwhile."""

    grpc_code, http_status, retryable = "UNAVAILABLE", 503, True


class AdapterFailed(SlotError):
    """The adapter's last move failed; the reason is in the text."""

    grpc_code, http_status, retryable = "UNAVAILABLE", 503, True


class Draining(SlotError):
    """The manager is stopping: running leases end, new ones are refused."""

    grpc_code, http_status, retryable = "UNAVAILABLE", 503, True


class RegistryError(SlotError):
    """adapters.yaml is missing or broken, or cannot be written."""

    grpc_code, http_status = "INTERNAL", 500


class RegistryAbsent(RegistryError):
    """There is no registry there."""


class RegistryMoved(RegistryError):
    """Somebody else changed the registry since it was read: read it again."""


class ChangeRefused(RegistryError):
    """A change cannot be made to the registry as it is: every reason."""

    grpc_code, http_status = "FAILED_PRECONDITION", 409


class TierError(Exception):
    """A move between tiers failed. `transient`: the same move may work a moment later."""

    transient = True


class HostFull(TierError):
    """Shared memory has no room for the adapter: so many bytes would have to be given back first."""

    def __init__(self, message: str, short_bytes: int) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class EngineUnavailable(TierError):
    """The engine cannot be reached, or did not answer in time."""


class EngineMiss(TierError):
    """`LoRA task N not found in cache`."""


class EngineFull(TierError):
    """The engine's LoRA cache had no room."""

    def __init__(self, message: str, *, lost_idle: bool) -> None:
        super().__init__(message)
        self.lost_idle = lost_idle


class EngineRefused(TierError):
    """The engine's validation refused the adapter."""

    transient = False


class BundleBroken(TierError):
    """The bundle on DISK is not what its manifest says."""

    transient = False


class MoveCancelled(TierError):
    """The move was given up on request; what arrived so far may be kept for the next try."""


class StoreUnavailable(TierError):
    """The object store refused the connection, timed out, sent too slowly, broke off, or answered 5xx."""


class StoreDenied(TierError):
    """The object store refused our credentials, or there are none."""

    transient = False


class StoreMissing(TierError):
    """The object store has no adapter there."""

    transient = False


class StoreCorrupt(TierError):
    """The bytes of the object store are not those of the manifest, or the manifest is not the registry's."""

    transient = False


class DiskFull(TierError):
    """DISK has no room: everything in it is in use, or the file system is full."""


class DiskFailed(TierError):
    """DISK cannot be read or written."""


class DiskReadOnly(DiskFailed):
    """DISK is on a read-only file system, or we may not write there."""

    transient = False


class ConversionFailed(TierError):
    """A raw adapter could not be converted to a bundle; the message has every reason."""

    transient = False


class MoveRejected(TierError):
    """What arrived on DISK does not fit the engine, or is broken: every reason."""

    transient = False


class BundleGone(TierError):
    """The bundle left the disk after it was opened."""


class EventRefused(Exception):
    """The machine was told something impossible; nothing was changed."""
