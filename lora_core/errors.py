"""Every exception lora_core raises.

LoRACoreError
├── ContractError              a backend class breaks the contract where it is defined
├── PluginError                a plugin is broken, misspelt, or claims a name that is taken
├── BackendNotFoundError       no installed plugin has that name
├── BackendUnavailableError    installed, but not usable here (no such device, no such library)
├── UnsupportedOpError         a backend is asked for something it does not claim
├── NoBatchPreparedError       an op or a layer ran without a prepared batch
├── InvalidBatchError          a batch that cannot be: lengths, slots, modes that do not fit
├── BatchMismatchError         tensors that do not fit the prepared batch
├── TensorMismatchError        tensors that do not fit each other: shape, dtype, device
├── GraphNotInitializedError   a graph batch without init_graph, or larger than it
├── AttachError                a model that cannot be wrapped, or is wrapped already
├── AdapterError
│   ├── AdapterFormatError         unreadable, corrupted or forbidden files
│   ├── UnsupportedAdapterError    a readable adapter with a feature that cannot be applied exactly
│   ├── AdapterMismatchError       an adapter made for another model
│   ├── AdapterNotFoundError       no adapter of that name is loaded
│   ├── AdapterExistsError         the name is taken
│   └── AdapterInUseError          the adapter is held, pinned, or part of the prepared batch
├── NoFreeSlotError            more adapters in one batch than slots
├── RanksDisagreeError         another process failed, or does something else; nothing was changed
└── InsufficientMemoryError    refused before it was taken

Messages say who, what was asked, what was found, what is available, and what to do.
"""

from __future__ import annotations


class LoRACoreError(Exception):
    """Base of every error raised by lora_core."""


class ContractError(LoRACoreError, TypeError):
    """A backend class breaks the contract; raised when the class is defined."""


class PluginError(LoRACoreError):
    """A plugin cannot be used: it failed to load, or its claim conflicts with another's."""


class BackendNotFoundError(LoRACoreError, LookupError):
    """No installed plugin registers a backend of that name."""


class BackendUnavailableError(LoRACoreError, RuntimeError):
    """The backend is installed but cannot run here; the message holds the reason."""


class UnsupportedOpError(LoRACoreError, NotImplementedError):
    """A backend was asked for something its capabilities do not claim."""

    def __init__(self, *, backend: str, op: str, limit: str, value: object) -> None:
        """Names the backend, the op, the limit it states, and the value that was asked for."""
        self.backend, self.op, self.limit, self.value = backend, op, limit, value
        super().__init__(
            f"backend {backend!r} does not support {op}: its limit is {limit}, "
            f"but it was asked for {value!s}. Choose another backend "
            "(`lora-core backends` lists what each one claims)."
        )


class NoBatchPreparedError(LoRACoreError, RuntimeError):
    """An op ran while no batch was prepared."""


class InvalidBatchError(LoRACoreError, ValueError):
    """The description of a batch contradicts itself or the pool it is for."""


class BatchMismatchError(LoRACoreError, ValueError):
    """A tensor has fewer rows than the prepared batch, or a logits pass does not exist."""


class TensorMismatchError(LoRACoreError, ValueError):
    """Tensors of one call do not fit each other in shape, dtype or device."""


class GraphNotInitializedError(LoRACoreError, RuntimeError):
    """A graph batch was prepared before `init_graph`, or exceeds what it allocated."""


class AttachError(LoRACoreError, RuntimeError):
    """A model cannot be wrapped, is wrapped already, or is not wrapped."""


class AdapterError(LoRACoreError):
    """Base of errors about one adapter."""


class AdapterFormatError(AdapterError, ValueError):
    """The adapter's files are unreadable, corrupted, or of a forbidden kind."""


class UnsupportedAdapterError(AdapterError, NotImplementedError):
    """The adapter is readable but uses a feature that cannot be applied exactly."""


class AdapterMismatchError(AdapterError, ValueError):
    """The adapter was made for another model: names or shapes do not fit."""


class AdapterNotFoundError(AdapterError, LookupError):
    """No adapter of that name is loaded."""


class AdapterExistsError(AdapterError, ValueError):
    """An adapter of that name is loaded already."""


class AdapterInUseError(AdapterError, RuntimeError):
    """The adapter is held, pinned, or named by the prepared batch."""


class NoFreeSlotError(LoRACoreError, RuntimeError):
    """A batch names more adapters than there are slots, or every slot is in use."""


class RanksDisagreeError(LoRACoreError, RuntimeError):
    """Another process of the group cannot go on, or is at another call than this one."""


class InsufficientMemoryError(LoRACoreError, MemoryError):
    """An allocation was refused before it was made, because it would not fit."""
