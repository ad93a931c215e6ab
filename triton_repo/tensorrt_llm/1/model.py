"""tensorrt_llm on a CPU: Triton's tensors <-> reference_engine.Backend. Translation only; everything else is there."""

import json
import logging
import os

import triton_python_backend_utils as pb_utils

from reference_engine.backend import Backend
from reference_engine.dlpack import bfloat16_bits
from reference_engine.errors import ReferenceEngineError
from reference_engine.settings import Settings

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """One engine; `count` is 1 because every instance would have a LoRA cache of its own."""

    def initialize(self, args):
        """Open and compile the engine of this model's parameters."""
        log = logging.getLogger("reference_engine")
        log.setLevel(logging.INFO)
        log.handlers, log.propagate = [TritonLog()], False
        config = json.loads(args["model_config"])
        self.bfloat16 = {entry["name"] for entry in config["input"] if entry["data_type"] == "TYPE_BF16"}
        try:
            self.backend = Backend(Settings.from_model_config(config, os.environ))
        except ReferenceEngineError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests):
        """Hand each request to the engine; replies come from its threads."""
        for request in requests:
            sender = request.get_response_sender()
            self.backend.submit(
                {tensor.name(): self.as_array(tensor) for tensor in request.inputs()},
                request.request_id(),
                frozenset(request.requested_output_names()),
                lambda reply, sender=sender: send(sender, reply),
                sender.is_cancelled,
                json.loads(request.parameters() or "{}"),
            )

    def as_array(self, tensor):
        """An input as numpy; bfloat16, which numpy lacks, as its bit pattern."""
        return bfloat16_bits(tensor.to_dlpack(), tensor) if tensor.name() in self.bfloat16 else tensor.as_numpy()

    def finalize(self):
        """End what runs, and stop the engine."""
        self.backend.close()


class TritonLog(logging.Handler):
    """The engine's log lines in Triton's own log."""

    def emit(self, record):
        """Write one record at the level Triton has for it."""
        logger = pb_utils.Logger
        write = logger.log_error if record.levelno >= logging.ERROR else logger.log_warn
        (logger.log_info if record.levelno < logging.WARNING else write)(self.format(record))


def send(sender, reply):
    """One `reference_engine.ticket.Reply` to Triton."""
    flags = FINAL if reply.final else 0
    if reply.error is not None:
        sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(reply.error)), flags)
    elif reply.outputs is not None:
        tensors = [pb_utils.Tensor(name, array) for name, array in reply.outputs.items()]
        sender.send(pb_utils.InferenceResponse(tensors), flags)
    else:
        sender.send(flags=flags)
