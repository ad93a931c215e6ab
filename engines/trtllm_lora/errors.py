"""Everything that can be wrong with a file or tensor of the engine contract.

ContractError
├── ShapeError     an engine config.json that cannot be read as an engine of the 1.2 line
├── TensorError    lora_weights / lora_config that break the layout
├── BundleError    a bundle directory that is not what its manifest says
├── SignatureError a key that cannot be used, or a digest without a good signature by a trusted key
├── GeometryError  LoRA cache parameters with which the engine would refuse to start
└── CacheError     the engine's LoRA cache refused an operation (text as the runtime's)
"""


class ContractError(Exception):
    """Base of this package's errors; the message is one line for a person."""


class ShapeError(ContractError):
    """An engine or base config.json is missing a field or holds an impossible one."""


class TensorError(ContractError):
    """`lora_weights` / `lora_config` break the layout."""


class BundleError(ContractError):
    """A bundle on disk is not complete, or not what its manifest says."""


class SignatureError(ContractError):
    """A key that cannot be used, or a digest without a good signature by a trusted key."""


class GeometryError(ContractError):
    """The engine would refuse to start with these `lora_cache_*` parameters."""


class CacheError(ContractError):
    """An operation the engine's LoRA cache refuses; `str()` is the runtime's own text.

    `evicted` names the tasks that are gone although the operation failed (the runtime evicts first).
    """

    def __init__(self, text: str, *, evicted: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.evicted = evicted
