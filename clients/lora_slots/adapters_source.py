"""What lies at a path or URL that is to become a version: a bundle or a raw PEFT adapter, and what it says."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapter_slots.admission import base_of
from adapter_slots.errors import TierError
from adapter_slots.registry_home import Home
from adapter_slots.store import ADAPTER_CONFIG, Content, Source, Stores, StoreSettings, Transfer, source_digest
from lora_slots.errors import UsageError
from lora_slots.refusals import Refused
from trtllm_lora import Bundle, BundleError, find_bundle, open_bundle
from trtllm_lora.bundle import MANIFEST_FILE, file_sha256


@dataclass(frozen=True, slots=True)
class Found:
    """One adapter as it lies there, its bytes checked as far as they were read."""

    digest: str
    """Of the bundle; of a raw adapter its source digest."""
    kind: str
    """`bundle` or `peft`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """base_model, rank, target_modules and signature, as far as it says."""
    folder: Path | None = None
    """Where its files are while it is examined; None: nothing but its manifest was read."""
    place: str = ""
    """Where it is: the URL, or the directory of the bundle or adapter itself."""
    bundle: Bundle | None = None


@contextmanager
def examined(place: str, endpoint_url: str | None = None, *, whole: bool = False) -> Iterator[Found]:
    """Look at an adapter; every byte of what is on this machine is checked, of a remote one only if `whole`.

    What has to be fetched is gone when the block ends.

    Raises:
        Refused: neither a bundle nor a PEFT adapter, or a damaged one. UsageError: the store.
    """
    stores = Stores(StoreSettings(endpoint_url=endpoint_url))
    try:
        if "://" not in place:
            yield _local(Path(place))
            return
        source = stores.source(place)
        content = source.look(Transfer())
        if content.manifest is not None and not whole:
            manifest = json.loads(content.manifest)
            yield Found(str(content.digest), "bundle", facts_of_bundle(manifest), place=place)
            return
        with tempfile.TemporaryDirectory(prefix="lora-slots-adapter-") as folder:
            yield replace(_fetched(source, content, Path(folder)), place=place)
    except TierError as error:
        raise (UsageError if error.transient else Refused)(str(error)) from None
    except (BundleError, ValueError) as error:
        raise Refused(f"{place}: {error}" if isinstance(error, ValueError) else str(error)) from None
    finally:
        stores.close()


def path_for(place: str, home: Home) -> str:
    """How the registry names a place: a URL as it is, a path relative to the registry's folder.

    Raises:
        UsageError: a relative path, for a registry that is not on this machine.
    """
    if "://" in place:
        return place.rstrip("/")
    if home.folder is not None:
        return os.path.relpath(place, home.folder)
    if Path(place).is_absolute():
        return place
    raise UsageError(f"{place}: {home.name} is no file here: give an s3:// URL, or a path that every server has")


def facts_of_bundle(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says, under the registry's names."""
    paths = manifest.get("scales") or manifest.get("modules") or {}
    return _given(
        base_model=base_of(manifest.get("base_model"), manifest.get("base_revision")),
        rank=max(manifest.get("ranks") or [0]),
        target_modules=sorted({str(path).rpartition(".")[2] for path in paths}),
        signature=manifest.get("signature"),
    )


def facts_of_peft(config: Mapping[str, Any]) -> dict[str, Any]:
    """What an adapter_config.json says, under the registry's names."""
    targets = config.get("target_modules")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    return _given(
        base_model=base_of(config.get("base_model_name_or_path"), config.get("revision")),
        rank=max((rank for rank in ranks if isinstance(rank, int)), default=0),
        target_modules=sorted(map(str, targets)) if isinstance(targets, list) else [targets] if targets else [],
    )


def _local(path: Path) -> Found:
    if (path / ADAPTER_CONFIG).is_file() and not (path / MANIFEST_FILE).is_file():
        source = Stores().source(str(path.resolve()))
        files = source.look(Transfer()).files
        digest = source_digest({file.name: file_sha256(path / file.name) for file in files})
        return Found(digest, "peft", facts_of_peft(_config(path)), path, str(path))
    bundle = find_bundle(path)
    bundle.verify()
    return Found(bundle.digest, "bundle", facts_of_bundle(bundle.manifest), bundle.path, str(bundle.path), bundle)


def _fetched(source: Source, content: Content, folder: Path) -> Found:
    digest = source.fetch(content, folder, Transfer())
    if content.manifest is None:
        return Found(digest, "peft", facts_of_peft(_config(folder)), folder)
    bundle = open_bundle(folder)
    return Found(digest, "bundle", facts_of_bundle(bundle.manifest), folder, bundle=bundle)


def _config(folder: Path) -> Mapping[str, Any]:
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{ADAPTER_CONFIG} is not a JSON object")
    return config


def _given(**facts: Any) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value}
