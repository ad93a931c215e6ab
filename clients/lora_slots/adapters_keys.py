"""`lora-slots adapters keygen|sign|trust`: who releases adapters, and whom a registry believes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_slots.adapters_place import Endpoint, Json, Place, changed, home_at, refusals, split_ref
from lora_slots.errors import UsageError

if TYPE_CHECKING:
    from adapter_slots.registry_changes import Doc
    from trtllm_lora.signing import PrivateKey


def register(adapters: typer.Typer) -> None:
    """Add the commands to the group."""
    for command in (keygen, sign, trust):
        adapters.command()(command)


def keygen(
    file: Annotated[Path, typer.Argument(help="Where the private key goes; the public one goes beside it, as .pub.")],
    as_json: Json = False,
) -> None:
    """Make an ed25519 key pair: the private key signs adapters (mode 0600), the public one goes into registries.

    Example: lora-slots adapters keygen release.key
    """
    from trtllm_lora.signing import new_key, public_file

    public = new_key(file).public
    if as_json:
        typer.echo(json.dumps({"id": public.id, "public": public.text, "files": [str(file), str(public_file(file))]}))
        return
    typer.echo(f"key {public.id}: {file} (private, mode 0600), {public_file(file)}")
    typer.echo(f"in adapters.yaml: trusted_keys: [{public.text}]")


def sign(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Bundle directory, PEFT directory, or NAME@VERSION of the registry.")
    ],
    key_file: Annotated[Path, typer.Option("--key", help="Private key (`adapters keygen`).")],
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Sign a bundle (in its bundle.json) or a version of the registry; of a PEFT directory the signature is printed.

    Examples:

        lora-slots adapters sign ./bundles/0a4c… --key release.key

        lora-slots adapters sign pirate@2 --key release.key --registry s3://models/adapters.yaml
    """
    from trtllm_lora.signing import read_private_key

    key = read_private_key(key_file)
    if Path(target).is_dir():
        _sign_folder(Path(target), key, as_json)
        return
    name, number = split_ref(target)
    if number is None:
        raise UsageError(f"{target}: neither a directory nor NAME@VERSION")
    _sign_version(target, name, number, key, place, endpoint, as_json)


def trust(
    key: Annotated[str | None, typer.Argument(help="Public key: a .pub file, or its base64.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Trust it no more.")] = False,
    require: Annotated[
        bool | None, typer.Option("--require/--no-require", help="Serve only adapters that a trusted key has signed.")
    ] = None,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Say whose signatures a registry believes, and whether it insists on them.

    Examples:

        lora-slots adapters trust release.key.pub --require

        lora-slots adapters trust release.key.pub --remove
    """
    from trtllm_lora.signing import read_public_key

    if key is None and require is None:
        raise UsageError("give a public key, --require or --no-require; see --help")
    public = read_public_key(key, Path()) if key else None
    home = home_at(place, endpoint)

    def edit(doc: Doc) -> Doc:
        from adapter_slots.errors import ChangeRefused

        new = dict(doc)
        if public is not None:
            texts = [text for text in doc.get("trusted_keys", ()) if read_public_key(text, home.folder).id != public.id]
            if remove and len(texts) == len(doc.get("trusted_keys", ())):
                raise ChangeRefused(f"key {public.id} is not trusted here")
            new["trusted_keys"] = texts if remove else [*texts, public.text]
        if require is not None:
            new["require_signatures"] = require
        return {
            name: value for name, value in new.items() if value or name not in ("trusted_keys", "require_signatures")
        }

    words = [f"trust {public.id}" + (" --remove" if remove else "")] if public else ["trust"]
    words += ["--require" if require else "--no-require"] if require is not None else []
    made = changed(home, " ".join(words), edit, as_json)
    if made.record and not as_json:
        count = len(made.doc.get("trusted_keys", ()))
        typer.echo(
            f"trusted keys: {count}; signatures {'required' if made.doc.get('require_signatures') else 'not required'}"
        )


def _sign_folder(folder: Path, key: PrivateKey, as_json: bool) -> None:
    from lora_slots.adapters_source import examined
    from trtllm_lora.bundle_writing import set_signature

    with refusals(), examined(str(folder)) as found:
        signature = key.sign(found.digest)
        if found.bundle is not None:
            set_signature(found.bundle, signature)
    if as_json:
        facts = {"kind": found.kind, "digest": found.digest, "key": key.public.id, "signature": signature}
        typer.echo(json.dumps({**facts, "written": found.bundle is not None}))
    elif found.bundle is not None:
        typer.echo(f"{found.bundle.path}: signed by {key.public.id}")
    else:
        typer.echo(signature)
        sys.stderr.write("a PEFT adapter has no place for it: `adapters add … --signature` puts it into a registry\n")


def _sign_version(
    target: str, name: str, number: int, key: PrivateKey, place: str | None, endpoint: str | None, as_json: bool
) -> None:
    from adapter_slots.registry_changes import check_version, set_signature

    def edit(doc: Doc) -> Doc:
        check_version(doc, name, number)
        digest = next(v["digest"] for v in doc["adapters"][name]["versions"] if v["version"] == number)
        return set_signature(doc, name, number, key.sign(digest))

    made = changed(home_at(place, endpoint), f"sign {target}", edit, as_json)
    if made.record and not as_json:
        typer.echo(f"{target}: signed by {key.public.id}")
