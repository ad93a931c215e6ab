"""Fixtures of a gateway before the `server` of fakes.little_stack or fakes.smollm2_stack, for a conftest to import."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from fakes.gateways import RunningGateway, gateway
from lora_slots.stack import TritonServer


@pytest.fixture(scope="session")
def door(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway without tenants."""
    with gateway(server.grpc_url, tmp_path_factory.mktemp("gateway") / "log") as made:
        yield made


@pytest.fixture(scope="session")
def client(door: RunningGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which tries nothing again."""
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as made:
        yield made
