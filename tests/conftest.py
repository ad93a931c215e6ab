"""What every test run needs: signals as in a terminal, no clock in property tests, and the long ones first."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# how long an example takes is the machine's business
settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")

# a run started in the background by a shell has SIGINT ignored, and so would every program that a test interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start servers come first: the short ones then fill what is left of the time of several workers."""
    long = {item.path for item in items if item.get_closest_marker("triton")}
    items.sort(key=lambda item: item.path not in long)
