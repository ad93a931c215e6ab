"""Everything that can go wrong in the reference engine.

ReferenceEngineError
├── UnsupportedModel     the base is no model this engine computes exactly; every reason named
├── EngineDirectoryError an engine directory that cannot be read, or could not be written
├── StartupRefused       parameters with which the runtime would refuse to start too (its texts)
└── RequestRefused       one request is refused; `str()` is the text a Triton client sees
"""


class ReferenceEngineError(Exception):
    """Base of this package's errors; the message is for a person."""


class UnsupportedModel(ReferenceEngineError):
    """The base model is outside what the CPU decoder computes exactly."""


class EngineDirectoryError(ReferenceEngineError):
    """An engine directory is incomplete, unreadable, or could not be written."""


class StartupRefused(ReferenceEngineError):
    """The engine refuses to start with these parameters."""


class RequestRefused(ReferenceEngineError):
    """One request is refused and nothing else is disturbed; all carry TRITONSERVER_ERROR_INTERNAL."""


def executor_failed(number: int, text: str) -> str:
    """What the Triton backend makes of an executor error (`model_instance_state.cc`); the executor's own number."""
    return f"Executor failed process requestId {number} due to the following error: {text}"


def fetching(text: str) -> str:
    """What the executor makes of any error, except a LoRA miss, while it fetches a request (`executorImpl.cpp`)."""
    return f"Encountered an error when fetching new request: {text}"
