"""Adapters come and go while the server runs: vLLM's load and unload, carried out on the registry.

Rules:
1. A load ends with the adapter in a slot, or changes nothing: what the server refuses leaves the registry again.
2. Without `new_version` a name that is taken is refused; with it what is there becomes the name's next version.
3. An unload ends when the server knows the name no more; requests that run are answered to their end.
"""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adapter_slots.errors import ChangeRefused, RegistryError
from adapter_slots.registry_changes import Doc, add_version, make_current, remove
from adapter_slots.registry_entries import Entry
from adapter_slots.registry_writing import change
from lora_slots.adapters_source import examined, path_for
from lora_slots.errors import ServerError, UsageError
from lora_slots.gateway.core import Gateway
from lora_slots.gateway.errors import ApiError, from_operation, unavailable
from lora_slots.gateway.names import reads_as_base
from lora_slots.refusals import Refused
from peft_to_trtllm import convert
from peft_to_trtllm.errors import AdapterRefused, InputError
from trtllm_lora import EngineShape

NOTICED_S = 10.0
"""How long the server may take to see a change of the registry."""
_LOOK_AGAIN_S = 0.1


class Publisher:
    """Changes of one gateway's registry, one at a time."""

    def __init__(self, gateway: Gateway, endpoint_url: str | None = None) -> None:
        """`endpoint_url` is of S3 that is not AWS."""
        self._gateway, self._endpoint_url = gateway, endpoint_url
        self._turn = asyncio.Lock()

    async def load(self, name: str, place: str, *, new_version: bool) -> None:
        """Publish what lies at `place` and bring it into a slot. Raises ApiError."""
        async with self._turn:
            await self._refresh()
            if reads_as_base(name, self._gateway.base):
                text = f"lora_name {name!r} reads as the base model {self._gateway.base!r}: choose another name"
                raise ApiError(400, text, code="invalid_value", param="lora_name")
            before = self._gateway.registry.entries.get(name)
            if before is not None and not new_version:
                text = f"The lora adapter '{name}' has already been loaded; load_inplace makes a new version of it."
                raise ApiError(400, text, code="adapter_exists", param="lora_name")
            number = await self._changing(self._add, name, place)
            await self._refresh()
            try:
                await self._when_noticed(name, number)
            except ServerError as error:
                await self._changing(self._take_back, name, number, before)
                await self._refresh()
                if error.code in ("INVALID_ARGUMENT", "INVALID_ARG"):
                    raise ApiError(422, str(error), code="adapter_rejected", param="lora_path") from None
                raise from_operation(error) from None

    async def unload(self, name: str) -> None:
        """Take an adapter out of the registry and out of its slot. Raises ApiError."""
        async with self._turn:
            await self._refresh()
            if name not in self._gateway.registry.entries:
                text = f"The lora adapter '{name}' cannot be found."
                raise ApiError(404, text, code="model_not_found", param="lora_name")
            await self._changing(self._remove, name)
            await self._refresh()
            await self._when_gone(name)

    async def _refresh(self) -> None:
        await asyncio.to_thread(self._gateway.registry.refresh)

    async def _changing(self, work: Any, *arguments: Any) -> Any:
        """Do blocking work on the registry in a thread; what it raises becomes an ApiError."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except Refused as error:
            raise ApiError(422, str(error), code="adapter_rejected", param="lora_path") from None
        except ChangeRefused as error:
            raise ApiError(400, str(error), code="change_refused", param="lora_name") from None
        except UsageError as error:
            raise ApiError(400, str(error), code="invalid_value", param="lora_path") from None
        except RegistryError as error:
            raise ApiError(500, str(error), kind="server_error", code="registry_error") from None

    def _add(self, name: str, place: str) -> int:
        home, numbers = self._gateway.registry.home, []
        with examined(place, self._endpoint_url) as found:
            version = {"digest": found.digest, "path": path_for(place, home), **found.facts}
            if found.kind == "peft" and found.folder is not None and home.folder is not None:
                version |= self._as_bundle(name, found.folder, home.folder)
        version["created"] = datetime.now(UTC).isoformat(timespec="seconds")

        def edit(doc: Doc) -> Doc:
            changed, number = add_version(doc, name, version)
            numbers.append(number)
            return changed

        change(home, f"load {name}", edit)
        return numbers[-1]

    def _as_bundle(self, name: str, adapter: Path, folder: Path) -> dict[str, str]:
        """Digest and path of an adapter's bundle, beside the registry, where the server cannot make it itself."""
        conversion = self._gateway.conversion
        if conversion is None:
            return {}
        dtype = EngineShape.from_engine_config(conversion.engine).dtype
        try:
            bundle = convert(
                adapter, base=conversion.base, engine=conversion.engine, out=folder / "bundles", dtype=dtype, name=name
            )
        except (AdapterRefused, InputError) as error:
            raise Refused(str(error)) from None
        return {"digest": bundle.digest, "path": os.path.relpath(bundle.path, folder)}

    def _take_back(self, name: str, number: int, before: Entry | None) -> None:
        def edit(doc: Doc) -> Doc:
            return remove(doc if before is None else make_current(doc, name, before.version), name, number)

        change(self._gateway.registry.home, f"take back {name}@{number}, which the server refuses", edit)

    def _remove(self, name: str) -> None:
        change(self._gateway.registry.home, f"unload {name}", lambda doc: remove(doc, name))

    async def _when_noticed(self, name: str, number: int) -> None:
        """Warm a version as soon as the server knows it. Raises ServerError."""
        until = asyncio.get_running_loop().time() + NOTICED_S
        while True:
            try:
                await self._gateway.door.operate("warm", adapter=f"{name}@{number}")
            except ServerError as error:
                if error.code != "NOT_FOUND" or asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                return

    async def _when_gone(self, name: str) -> None:
        until = asyncio.get_running_loop().time() + NOTICED_S
        while asyncio.get_running_loop().time() < until:
            try:
                await self._gateway.door.operate("explain", adapter=name)
            except ServerError as error:
                if error.code == "NOT_FOUND":
                    return
                raise from_operation(error) from None
            await asyncio.sleep(_LOOK_AGAIN_S)
        raise unavailable(f"{name} has left the registry, and the server has not noticed it yet.", "server_behind")
