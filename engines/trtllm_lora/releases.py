"""Which releases have engines: TensorRT-LLM versions and the NGC images that carry them.

Sources: Triton's compatibility table (docs/introduction/compatibility.md) and the removal of the TensorRT backend from
TensorRT-LLM (#15907, #15918, 2026-07). The last line with engines is 1.2.1, in NGC 26.04 to 26.07.
"""

from __future__ import annotations

import re

LAST_WITH_ENGINES = (1, 2)
FIRST_SUPPORTED = (1, 0)
"""Older backends name inputs otherwise (`min_length`, `random_seed`), so the templates here would not fit them."""

IMAGES: dict[str, str] = {
    "26.07": "1.2.1",
    "26.06": "1.2.1",
    "26.05": "1.2.1",
    "26.04": "1.2.1",
    "26.03": "1.2.0",
    "26.02": "1.1.0",
    "26.01": "1.1.0",
    "25.12": "1.1.0",
    "25.11": "1.0.3",
    "25.10": "1.0.0",
    "25.09": "1.0.0",
}
"""NGC release -> TensorRT-LLM version in `tritonserver:<release>-trtllm-python-py3`."""

FIRST_IMAGE_WITHOUT_ENGINES = (26, 8)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(\.\d{1,4})?((\.?(a|b|rc|post|dev))\d{1,9}){0,3}(\+[A-Za-z0-9.]{1,40})?")
_IMAGE = re.compile(r"tritonserver:(\d\d)\.(\d\d)-trtllm-python-py3")
_WITH_REGISTRY = re.compile(r".*/(tritonserver:\d\d\.\d\d-trtllm-python-py3)")


def version_problem(version: str) -> tuple[str, str] | None:
    """(what is wrong, what to write) about an engine version; None if it has engines and fits the templates."""
    numbers = _VERSION.fullmatch(version)
    if not numbers:
        return f"{version!r:.60} is not a version", "write 1.2.1"
    line = (int(numbers[1]), int(numbers[2]))
    if line > LAST_WITH_ENGINES:
        return (
            f"TensorRT-LLM {version} cannot build or run engines: the TensorRT backend, trtllm-build and the C++ "
            "Triton backend were removed after 1.2 (TensorRT-LLM #15907, #15918)",
            "write 1.2.1, the last line with engines",
        )
    if line < FIRST_SUPPORTED:
        return (
            f"TensorRT-LLM {version} names Triton inputs otherwise (min_length, random_seed); the model repository "
            "here is that of 1.0 to 1.2",
            "write 1.2.1",
        )
    return None


def image_of(version: str) -> str:
    """The newest NGC image that carries a TensorRT-LLM version; the last one with engines where none does."""
    release = next((image for image, has in IMAGES.items() if has == version), next(iter(IMAGES)))
    return f"tritonserver:{release}-trtllm-python-py3"


def container_problem(container: str, version: str) -> tuple[str, str] | None:
    """(what is wrong, what to write) about an NGC image for an engine version; None if they belong together.

    Of a version that is itself wrong, or that no image carries, nothing is said here (`no_image_problem`).
    """
    tag = _IMAGE.fullmatch(container)
    instead = f"write {image_of(version)}"
    if named := _WITH_REGISTRY.fullmatch(container):
        return f"{container!r:.200} has a registry in front, where each place has its own", f"write {named[1]}"
    if not tag:
        return f"{container!r} is not an image tritonserver:<yy.mm>-trtllm-python-py3", instead
    if (int(tag[1]), int(tag[2])) >= FIRST_IMAGE_WITHOUT_ENGINES:
        return (
            f"NGC {tag[1]}.{tag[2]} has no TensorRT-LLM with engines (the last one is 26.07, with 1.2.1)",
            f"write {image_of('')}",
        )
    has = IMAGES.get(f"{tag[1]}.{tag[2]}")
    if has is None:
        return f"NGC {tag[1]}.{tag[2]} is older than the releases this program knows", instead
    if has != version and version in IMAGES.values():
        return (
            f"NGC {tag[1]}.{tag[2]} carries TensorRT-LLM {has}, the profile says {version}; an engine loads only in "
            "the version that built it",
            f"{instead}, or tensorrt_llm: {has}",
        )
    return None


def no_image_problem(version: str, container: str) -> tuple[str, str] | None:
    """(what is wrong, what to write) about a version of the right line that no NGC image carries."""
    if version_problem(version) or version in IMAGES.values():
        return None
    tag = _IMAGE.fullmatch(container)
    has = IMAGES.get(f"{tag[1]}.{tag[2]}" if tag else "", next(iter(IMAGES.values())))
    return f"no NGC image that this program knows carries TensorRT-LLM {version}", f"write {has}"
