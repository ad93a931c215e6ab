"""postprocessing: ids -> text, whole characters only, and the end of the request's lease told to lora_router."""

import json
import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

from lora_slots.steps import StreamDecoders


class TritonPythonModel:
    """Keeps one incremental decoder per running stream."""

    def initialize(self, args):
        """Open the tokenizer named by `tokenizer_dir`."""
        parameters = json.loads(args["model_config"])["parameters"]
        self.decoders = StreamDecoders.from_parameters({k: v["string_value"] for k, v in parameters.items()})
        self.ended = queue.SimpleQueue()
        self.reporter = threading.Thread(target=self.report, name="lease-ends", daemon=True)
        self.reporter.start()

    def execute(self, requests):
        """Decode each response of the engine."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """One response's text; queues the end report if it was the last."""
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        piece = self.decoders.decode(given)
        if piece.final and request.request_id():
            self.ended.put((request.request_id(), piece.num_tokens))
        text = np.array([[text.encode() for text in piece.texts]], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", text)])

    def report(self):
        """Tell lora_router, off the client's path, that requests are over."""
        while (item := self.ended.get()) is not None:
            arguments = json.dumps({"request_id": item[0], "tokens": item[1]}).encode()
            texts = {"op": b"end", "op_args": arguments}
            inputs = [pb_utils.Tensor(name, np.array([[text]], dtype=np.object_)) for name, text in texts.items()]
            call = pb_utils.InferenceRequest(
                model_name="lora_router", requested_output_names=["op_result"], inputs=inputs
            )
            response = call.exec()
            if response.has_error():
                pb_utils.Logger.log_warn(f"lease end of {item[0]}: {response.error().message()}")

    def finalize(self):
        """Let the reporter end."""
        self.ended.put(None)
        self.reporter.join(timeout=5)
