"""lora_router: Triton's tensors <-> adapter_slots.Router. Translation only; every decision is in adapter_slots."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from adapter_slots.metrics import FAMILIES
from lora_slots.serving import open_service
from trtllm_lora.request_rules import RULED

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
OWN_INPUTS = ("adapter", "op", "op_args")
TRUE = np.ones((1, 1), np.bool_)
CODES = {"INVALID_ARGUMENT": "INVALID_ARG", "RESOURCE_EXHAUSTED": "UNAVAILABLE"}
"""gRPC's names where Triton's Python backend has another; of those it has none for, the text alone tells."""


class TritonPythonModel:
    """One instance per engine (`count: 1`)."""

    def initialize(self, args):
        """Start the slot manager from this model's parameters."""
        parameters = json.loads(args["model_config"])["parameters"]
        self.metrics = TritonMetrics()
        self.service = open_service({key: value["string_value"] for key, value in parameters.items()}, self.metrics)

    def execute(self, requests):
        """Hand each request to the router; its sender answers it, once, from any thread."""
        for request in requests:
            incoming = TritonRequest(request)
            if incoming.op is None:
                self.service.router.route(incoming)
            else:
                self.service.router.operate(
                    incoming.op, incoming.op_args, incoming.reply, incoming.fail, incoming.sender.is_cancelled
                )

    def finalize(self):
        """Stop the manager, then release the metrics (a metric alive at teardown crashes the stub)."""
        self.service.close()
        self.metrics.close()


class TritonRequest:
    """One Triton request as `adapter_slots.Incoming`."""

    def __init__(self, request):
        self.sender = request.get_response_sender()
        self.request_id = request.request_id()
        self.tensors = {tensor.name(): tensor for tensor in request.inputs()}
        self.adapter, self.op, self.op_args = (self.text(name) for name in OWN_INPUTS)
        task_id = self.tensors.get("lora_task_id")
        self.task_id = None if task_id is None else int(task_id.as_numpy().reshape(-1)[0])
        self.has_weights = "lora_weights" in self.tensors or "lora_config" in self.tensors
        self.parameters = json.loads(request.parameters() or "{}")

    def numbers(self):
        """The engine inputs of one number that have a rule."""
        found = {name: self.tensors[name].as_numpy().reshape(-1) for name in RULED if name in self.tensors}
        return {name: array[0].item() for name, array in found.items() if array.size == 1}

    def prompt_len(self):
        """Tokens of the prompt; 0 without one."""
        lengths = self.tensors.get("input_lengths")
        return 0 if lengths is None else int(lengths.as_numpy().reshape(-1)[0])

    def streams(self):
        """Whether the answer comes in pieces."""
        streaming = self.tensors.get("streaming")
        return streaming is not None and bool(streaming.as_numpy().any())

    def text(self, name):
        """A STRING input; None if it is absent."""
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.as_numpy().reshape(-1)[0].decode("utf-8", "replace")

    def forward(self, task_id):
        """Let the request go on to the engine, with a task id or without.

        The performance counters tell postprocessing which stream a piece belongs to, and which one is the last.
        """
        given = []
        if task_id is not None:
            given.append(pb_utils.Tensor("lora_task_id", np.full((1, 1), task_id, np.uint64)))
        if task_id is not None or self.streams():
            given.append(pb_utils.Tensor("return_perf_metrics", TRUE))
        elif "return_perf_metrics" in self.tensors:
            given.append(self.tensors["return_perf_metrics"])
        self.sender.send(pb_utils.InferenceResponse(given), flags=FINAL)

    def reply(self, result):
        """Answer an operation."""
        text = np.array([[json.dumps(result).encode()]], dtype=np.object_)
        self.sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("op_result", text)]), flags=FINAL)

    def fail(self, error):
        """Answer with an error: the first and final response, so that no caller waits for more."""
        code = getattr(pb_utils.TritonError, CODES.get(error.grpc_code, error.grpc_code), pb_utils.TritonError.INTERNAL)
        self.sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError(error.wire_text, code)), flags=FINAL)


class TritonMetrics:
    """Triton's custom metrics as `adapter_slots.ports.MetricSink`."""

    def __init__(self):
        self.families = {name: self.family(name) for name in FAMILIES}
        self.made = {}

    def family(self, name):
        """A family as Triton knows it."""
        # the stub adds MetricFamily to pb_utils only after this module was imported
        kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
        return pb_utils.MetricFamily(name=name, description=FAMILIES[name].help, kind=kinds[FAMILIES[name].kind])

    def series(self, name, labels):
        """The series with these labels, made on first use."""
        key = (name, *sorted(labels.items()))
        if key not in self.made:
            self.made[key] = self.families[name].Metric(labels=labels)
        return self.made[key]

    def only(self, name, labels):
        """The one series of a family whose labels are its content.

        Triton keeps a series as long as its family, whatever becomes of the object: the family is made anew.
        """
        for key in [key for key in self.made if key[0] == name]:
            del self.made[key]
        del self.families[name]
        self.families[name] = self.family(name)
        return self.series(name, labels)

    def close(self):
        """Release every metric before the stub ends."""
        self.made.clear()
        self.families.clear()
