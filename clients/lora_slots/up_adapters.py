"""Which adapters `lora-slots up` serves: the examples and the user's own, a registry, or a folder of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from adapter_slots.errors import RegistryError
from adapter_slots.registry import NAME_RULE, Registry, is_name
from adapter_slots.settings import SettingsError
from lora_slots import embedded, examples, nim
from lora_slots.errors import UsageError
from lora_slots.peft_source import PeftSource

Say = Callable[[str], object]


def examples_and(wished: Sequence[str]) -> dict[str, Path]:
    """The example adapters and those of `--adapter NAME=DIR`. Raises UsageError."""
    adapters = examples.adapters()
    for text in wished:
        name, separator, folder = text.partition("=")
        if not separator or not folder:
            raise UsageError(f"--adapter takes NAME=DIR, found {text!r}")
        if not is_name(name):
            raise UsageError(f"--adapter {text}: a name is {NAME_RULE}")
        if name in adapters:
            raise UsageError(f"--adapter {text}: there is an adapter {name!r} already; choose another name")
        adapters[name] = Path(folder).expanduser()
    return adapters


def place_of(registry: str) -> Path | str:
    """Where a registry is, for whoever works in another folder."""
    return registry if "://" in registry else Path(registry).absolute()


def published(registry: Path | str, named_by: str, endpoint_url: str | None) -> list[str]:
    """The names in a registry that an option or variable named. Raises UsageError."""
    try:
        return sorted(Registry(registry, endpoint_url=endpoint_url).entries)
    except RegistryError as error:
        raise UsageError(f"{named_by}: {error}") from None


def environment() -> nim.Environment:
    """What the environment says. Raises UsageError: what of it cannot be used."""
    try:
        said = nim.read(os.environ)
        said.check_rank(embedded.MAX_LORA_RANK)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    return said


def from_environment(
    said: nim.Environment, peft_source: str | None, say: Say
) -> tuple[Path | str | None, PeftSource | None]:
    """The registry to serve where no option names one, and the folder of adapters that it is made of."""
    place = said.parameters.get("registry")
    if peft_source is None and place is not None:
        return place_of(place), None
    wanted = peft_source or said.peft_source
    if wanted is None:
        return None, None
    endpoint = said.parameters.get("s3_endpoint_url")
    source = PeftSource(wanted, max_rank=said.max_lora_rank, endpoint_url=endpoint)
    say(f"adapters of {source.place}")
    for line in source.scan().lines():
        say(f"  {line}")
    return source.registry, source


@contextmanager
def following(source: PeftSource | None, refresh_s: float | None, say: Say) -> Iterator[None]:
    """Look at the folder of adapters now and then, while the block runs."""
    stop = threading.Event()

    def told(lines: Sequence[str]) -> None:
        for line in lines:
            say(f"adapters: {line}")

    if source is not None and refresh_s:
        follow = (refresh_s, stop, told)
        threading.Thread(target=source.follow, args=follow, name="peft-source", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
