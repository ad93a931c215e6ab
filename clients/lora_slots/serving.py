"""Composition root of `lora_router`: the slot manager, with the converter for raw PEFT adapters and JSON logs.

What the model's parameters leave out is taken from the environment (nim.py), also a folder of adapters in place of a
registry. `adapter_slots` never imports `peft_to_trtllm`: what turns a raw adapter into a bundle is handed in here.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from adapter_slots import Service, Settings
from adapter_slots import open_service as open_slots
from adapter_slots.disk import Converter
from adapter_slots.errors import ConversionFailed
from adapter_slots.ports import MetricSink
from adapter_slots.settings import SettingsError
from lora_slots import nim
from lora_slots.base_model.errors import BaseModelError
from lora_slots.errors import UsageError
from lora_slots.peft_source import PeftSource
from trtllm_lora import Bundle, EngineShape

log = structlog.get_logger("lora_slots")

UNWOUND_S = 30.0
"""A process whose Python stood still for so long hangs for ever."""


def open_service(parameters: Mapping[str, str], metrics: MetricSink | None = None) -> Service:
    """Start a slot manager that can convert; parameters are those of `lora_router` (adapter_slots.Settings).

    Raises:
        SettingsError, RegistryError, TierError: with every reason, and the variable that a value came from.
    """
    threading.Thread(target=_end_with_server, args=(os.getppid(),), name="end-with-server", daemon=True).start()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    environment = nim.read(os.environ)
    merged = environment.completed(parameters, lambda folder: EngineShape.from_engine_config(Path(folder)))
    source = _source(environment, merged)
    try:
        service = open_slots(merged, metrics, _converter)
    except SettingsError as error:
        raise environment.told(error) from None
    if source is not None and environment.peft_refresh_s:
        follow = (environment.peft_refresh_s, threading.Event(), _tell)
        threading.Thread(target=source.follow, args=follow, name="peft-source", daemon=True).start()
    return service


def _source(environment: nim.Environment, merged: dict[str, str]) -> PeftSource | None:
    """The folder of adapters that stands in for a registry, looked through once; `merged` is told its registry."""
    if environment.peft_source is None or merged.get("registry"):
        return None
    endpoint = merged.get("s3_endpoint_url")
    source = PeftSource(environment.peft_source, max_rank=environment.max_lora_rank, endpoint_url=endpoint)
    try:
        _tell([f"registry: {source.registry}", *source.scan().lines()])
    except (UsageError, BaseModelError) as error:
        raise SettingsError(f"{environment.variables['peft_source']}: {error}") from None
    merged["registry"] = str(source.registry)
    merged.setdefault("disk_dir", str(source.disk))
    return source


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        log.info("adapters of the source", what=line)


def _end_with_server(server: int) -> None:
    """End this process when the server that started it is gone.

    Left to itself it can hang: a custom metric waits for the server's answer for ever, and lets no other Python thread
    run meanwhile. So there is a timer below Python too, wound up as long as Python runs.
    """
    while os.getppid() == server:
        faulthandler.dump_traceback_later(UNWOUND_S, exit=True)
        time.sleep(1)
    time.sleep(2)  # an orderly end, if it can be had
    os._exit(1)


def _converter(settings: Settings) -> Converter | None:
    if not settings.base_dir:
        return None
    base, engine = Path(settings.base_dir), Path(settings.engine_dir)
    dtype = EngineShape.from_engine_config(engine).dtype

    def convert(adapter: Path, out: Path) -> Bundle:
        from peft_to_trtllm import convert as peft_convert
        from peft_to_trtllm.errors import AdapterRefused, InputError

        try:
            return peft_convert(adapter, base=base, engine=engine, out=out, dtype=dtype)
        except (AdapterRefused, InputError) as error:
            raise ConversionFailed(str(error)) from None

    return convert
