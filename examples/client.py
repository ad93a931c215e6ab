"""A streamed answer of one adapter with tritonclient alone: what any program does to use the ensemble.

    python examples/client.py --adapter pirate 'Who are you?'

The ensemble takes finished text; SmolLM2's chat form is written out below.
"""

import argparse
import contextlib
import queue
import sys
import uuid
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def tensor(name: str, value: object, dtype: Any, wire_type: str) -> triton.InferInput:
    """One input of shape [1, 1]: Triton's batch dimension, and one value."""
    array = np.array([[value]], dtype=dtype)
    made = triton.InferInput(name, [1, 1], wire_type)
    made.set_data_from_numpy(array)
    return made


def main() -> int:
    """Ask, and print the pieces as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--adapter", help="adapter name; without it the base model answers")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--url", default="127.0.0.1:8001")
    options = parser.parse_args()

    inputs = [
        tensor("text_input", CHAT.format(options.prompt).encode(), np.object_, "BYTES"),
        tensor("max_tokens", options.max_tokens, np.int32, "INT32"),
        tensor("stream", True, np.bool_, "BOOL"),
    ]
    if options.adapter:
        inputs.append(tensor("adapter", options.adapter.encode(), np.object_, "BYTES"))

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = triton.InferenceServerClient(options.url)
    client.start_stream(lambda result, error: answers.put((result, error)))
    # an id of its own lets the server see the end of this request, and free the adapter's slot at once
    # a stream that is broken already tells what broke it through the callback
    with contextlib.suppress(InferenceServerException):
        client.async_stream_infer("ensemble", inputs, request_id=uuid.uuid4().hex, enable_empty_final_response=True)
    while True:
        result, error = answers.get()
        if error is not None:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if result.as_numpy("text_output") is not None:
            print(result.as_numpy("text_output").reshape(-1)[0].decode(), end="", flush=True)
        if result.get_response().parameters["triton_final_response"].bool_param:
            print()
            return 0


if __name__ == "__main__":
    sys.exit(main())
