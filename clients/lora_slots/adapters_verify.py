"""Is every version of a registry what it says, and would a server take it? Hashes, signatures, bases, engine fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.admission import Terms, admit, claims_of
from adapter_slots.errors import NotAdmitted
from adapter_slots.registry import Entry
from adapter_slots.registry_history import Record
from lora_slots.adapters_source import Found, examined
from lora_slots.errors import UsageError
from lora_slots.refusals import Refused
from trtllm_lora import EngineShape
from trtllm_lora.errors import SignatureError
from trtllm_lora.fit import fit_problems
from trtllm_lora.signing import check_signature


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of one version."""

    entry: Entry
    kind: str
    signed_by: str | None
    """Id of the trusted key; None: not signed, or nobody to trust."""
    problems: Sequence[str]


def verify(
    entries: Iterable[Entry],
    terms: Terms,
    history: Sequence[Record],
    *,
    engine: Path | None = None,
    endpoint_url: str | None = None,
) -> Iterator[Verdict]:
    """Check versions one by one; remote ones are fetched whole.

    Raises:
        ContractError: the engine's config.json.
    """
    shape = EngineShape.from_engine_config(engine) if engine else None
    recorded = _recorded(history)
    for entry in entries:
        problems = [
            f"the history says that it had digest {digest[:12]} in {at}: a version is never changed in place"
            for digest, at in recorded.get((entry.name, entry.version), ())
            if digest != entry.digest
        ]
        signed_by, kind = None, "?"
        try:
            with examined(entry.path, endpoint_url, whole=True) as found:
                kind = found.kind
                problems += _of_content(entry, found)
                signed_by, wrong = _of_terms(entry, found, terms)
                problems += wrong
                if shape is not None and engine is not None:
                    problems += _of_engine(found, shape, engine)
        except (Refused, UsageError) as error:
            problems.append(str(error))
        yield Verdict(entry, kind, signed_by, problems)


def _of_content(entry: Entry, found: Found) -> Iterator[str]:
    if found.digest != entry.digest:
        yield f"the registry says digest {entry.digest[:12]}, what lies there has {found.digest[:12]}"
        return
    says = found.facts.get("rank")
    if entry.rank is not None and says is not None and entry.rank != says:
        yield f"the registry says rank {entry.rank}, the {found.kind} says {says}"


def _of_terms(entry: Entry, found: Found, terms: Terms) -> tuple[str | None, list[str]]:
    claims = claims_of(found.bundle.manifest if found.bundle is not None else None, entry.digest)
    signature = entry.signature or claims.signature
    problems, signed_by = [], None
    try:
        admit(entry, claims, terms)
    except NotAdmitted as error:
        problems.append(str(error).removeprefix(f"adapter {entry.ref!r}: "))
    if signature is not None and terms.keys:
        try:
            check_signature(entry.digest, signature, terms.keys)
            signed_by = str(signature).split(":")[1]
        except SignatureError as error:
            if not terms.require_signatures:  # else it is told already
                problems.append(str(error))
    return signed_by, problems


def _of_engine(found: Found, shape: EngineShape, engine: Path) -> Iterator[str]:
    if found.bundle is not None:
        yield from fit_problems(found.bundle, shape)
        return
    from peft_to_trtllm import inspect

    if found.folder is not None:
        report = inspect(found.folder, engine=engine)
        yield from (line.strip() for line in report.text().splitlines() if not report.ok)


def _recorded(history: Sequence[Record]) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """(adapter, version) -> digests that the history gives it, each with the time it came."""
    found: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for record in history:
        for change in record.changes:
            if change.where[0] == "adapters" and isinstance(change.after, dict):
                for version in change.after.get("versions", ()):
                    known = found.setdefault((change.name, version.get("version")), [])
                    if version.get("digest") not in [digest for digest, _ in known]:
                        known.append((version.get("digest"), record.at))
    return found
