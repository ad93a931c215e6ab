"""Composition root of `lora_router`: the slot manager, with the converter for raw PEFT adapters and JSON logs.

`adapter_slots` never imports `peft_to_trtllm`: what turns a raw adapter into a bundle is handed in here.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from adapter_slots import Service, Settings
from adapter_slots import open_service as open_slots
from adapter_slots.disk import Converter
from adapter_slots.errors import ConversionFailed
from adapter_slots.ports import MetricSink
from trtllm_lora import Bundle, EngineShape

UNWOUND_S = 30.0
"""A process whose Python stood still for so long hangs for ever."""


def open_service(parameters: Mapping[str, str], metrics: MetricSink | None = None) -> Service:
    """Start a slot manager that can convert; parameters are those of `lora_router` (adapter_slots.Settings).

    Raises:
        SettingsError, RegistryError, TierError: with every reason.
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
    return open_slots(parameters, metrics, _converter)


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
