"""preprocessing: text -> ids, with tensorrtllm_backend's tensor names. The tokenizer is lora_slots.text."""

import json

import triton_python_backend_utils as pb_utils

from lora_slots.steps import PromptEncoder


class TritonPythonModel:
    """Stateless; one response per request."""

    def initialize(self, args):
        """Open the tokenizer named by `tokenizer_dir`."""
        parameters = json.loads(args["model_config"])["parameters"]
        self.encoder = PromptEncoder.from_parameters({key: value["string_value"] for key, value in parameters.items()})

    def execute(self, requests):
        """Encode each request; a bad one gets its error and does not disturb the others."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """One request's response."""
        try:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            made = self.encoder.encode_request(given)
        except ValueError as error:
            text = f"[INVALID_ARGUMENT] {error}"  # a stream's errors carry no code of their own
            return pb_utils.InferenceResponse([], pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in made.items()])
