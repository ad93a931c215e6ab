"""What `lora-slots up` prints when it serves: lines to paste for a person, one line of JSON for a program."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_slots import examples

if TYPE_CHECKING:
    from lora_slots.demo import Answer
    from lora_slots.embedded import Prepared
    from lora_slots.stack import TritonServer


def ready_json(server: TritonServer, prepared: Prepared, known: Sequence[str], warm: Sequence[str]) -> str:
    """Where it serves, what, and the process that a signal stops."""
    served = {"base": prepared.base.name, "registry": str(prepared.registry), "adapters": list(known)}
    return json.dumps({**server.urls, **served, "warm": list(warm), "pid": os.getpid()})


def check_json(prompt: str, answers: Sequence[Answer], problems: Sequence[str]) -> str:
    """What `--check` found: every answer with its times, and what is wrong."""
    rows = [
        {
            "name": answer.name,
            "text": answer.text,
            "first_piece_s": answer.first_piece_s,
            "total_s": answer.total_s,
            "error": None if answer.error is None else str(answer.error),
        }
        for answer in answers
    ]
    return json.dumps({"prompt": prompt, "answers": rows, "problems": list(problems)}, indent=1, ensure_ascii=False)


def ready_lines(server: TritonServer, text: str, adapter: str | None, max_tokens: int) -> str:
    """Ready-to-paste lines, for the first of the adapters."""
    from lora_slots import address, stack_folders

    body = {"id": "demo-1", "text_input": text, "max_tokens": max_tokens, "stream": True}
    if adapter:
        body["adapter"] = adapter
    option = f" --adapter {adapter}" if adapter else ""
    alone = server.grpc_url == address.find() and len(stack_folders.running()) == 1
    at = "" if alone else f" --url {server.grpc_url}"
    url = f"http://{server.http_url}/v2/models/ensemble/generate_stream"
    python = _short(Path(sys.executable))
    command = _short(Path(sys.executable).with_name("lora-slots"))
    client = _short(examples.folder() / "client.py")
    return "\n".join(
        [
            "",
            "curl (one line of JSON per token):",
            f"  curl -sN {url} -d {shlex.quote(json.dumps(body))}",
            "tritonclient:",
            f"  {python} {client} --url {server.grpc_url}{option} 'Who are you?'",
            "command line:",
            f"  {command} generate{at}{option} 'Who are you?'",
            f"  {command} slots status{at}",
            f"metrics: {server.metrics_url}",
            "",
            "serving until Ctrl-C",
        ]
    )


def _short(path: Path) -> str:
    """A path as a person in this folder would type it."""
    absolute = path.absolute()  # not resolved: .venv/bin/python is a link
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
