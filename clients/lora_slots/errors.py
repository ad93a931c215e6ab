"""What the command line can tell its user, and the exit codes it ends with.

0  done
1  usage, environment or I/O: a port is taken, the server is not reachable, the disk is full
2  refused: unknown adapter, an adapter that cannot be converted or does not fit, no room
3  the check failed: an answer is not what it must be
130  interrupted
"""

from __future__ import annotations

EXIT_ENVIRONMENT = 1
EXIT_REFUSED = 2
EXIT_CHECK_FAILED = 3
EXIT_INTERRUPTED = 130

_REFUSALS = {"NOT_FOUND", "INVALID_ARGUMENT", "ALREADY_EXISTS", "FAILED_PRECONDITION"}


class ServerError(Exception):
    """The server answered with an error, or could not be reached. `code` is the gRPC status name."""

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        """When the server thinks that it can, if it said so."""

    @property
    def exit_code(self) -> int:
        """2 if the server refused the request for good, else 1."""
        return EXIT_REFUSED if self.code in _REFUSALS else EXIT_ENVIRONMENT


class Unreachable(ServerError):
    """Nobody answers at the address, or the connection broke off."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="UNAVAILABLE")


class CheckFailed(Exception):
    """`--check` found a wrong answer."""


class UsageError(Exception):
    """What the user asked for cannot be meant."""
