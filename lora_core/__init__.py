"""The compute layer of multi-LoRA serving as a contract.

Lazy: importing `lora_core` imports neither torch nor pydantic nor pluggy; a name does when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_core.backend import BackendConfig as BackendConfig
    from lora_core.backend import BaseModule as BaseModule
    from lora_core.backend import LoRABackend as LoRABackend
    from lora_core.batch import NO_LORA as NO_LORA
    from lora_core.batch import BatchInfo as BatchInfo
    from lora_core.batch import LoRABatch as LoRABatch
    from lora_core.batch import RequestTable as RequestTable
    from lora_core.batch import token_slots as token_slots
    from lora_core.capabilities import Capabilities as Capabilities
    from lora_core.capabilities import GraphKind as GraphKind
    from lora_core.capabilities import Mode as Mode
    from lora_core.capabilities import Op as Op
    from lora_core.contract import CONTRACT_VERSION as CONTRACT_VERSION
    from lora_core.hookspecs import BackendSpec as BackendSpec
    from lora_core.hookspecs import hookimpl as hookimpl
    from lora_core.manager import LoRAManager as LoRAManager
    from lora_core.manager import LoRARequest as LoRARequest
    from lora_core.moe import MoECapabilities as MoECapabilities
    from lora_core.moe import MoELoRABackend as MoELoRABackend
    from lora_core.moe import MoELoRAWeights as MoELoRAWeights
    from lora_core.moe import MoERoute as MoERoute
    from lora_core.moe import MoERouting as MoERouting
    from lora_core.plugins import explain as explain
    from lora_core.plugins import list_backends as list_backends
    from lora_core.plugins import list_moe_backends as list_moe_backends
    from lora_core.plugins import load_backend as load_backend
    from lora_core.plugins import load_moe_backend as load_moe_backend
    from lora_core.weights import LoRAWeights as LoRAWeights
    from lora_core.weights import SliceLayout as SliceLayout
    from lora_core.workspace import Workspace as Workspace

__version__ = "0.1.0"

_HOMES = {
    "BackendConfig": "backend",
    "BackendSpec": "hookspecs",
    "BaseModule": "backend",
    "BatchInfo": "batch",
    "CONTRACT_VERSION": "contract",
    "Capabilities": "capabilities",
    "GraphKind": "capabilities",
    "LoRABackend": "backend",
    "LoRABatch": "batch",
    "LoRAManager": "manager",
    "LoRARequest": "manager",
    "LoRAWeights": "weights",
    "MoECapabilities": "moe",
    "MoELoRABackend": "moe",
    "MoELoRAWeights": "moe",
    "MoERoute": "moe",
    "MoERouting": "moe",
    "Mode": "capabilities",
    "NO_LORA": "batch",
    "Op": "capabilities",
    "RequestTable": "batch",
    "SliceLayout": "weights",
    "Workspace": "workspace",
    "explain": "plugins",
    "hookimpl": "hookspecs",
    "list_backends": "plugins",
    "list_moe_backends": "plugins",
    "load_backend": "plugins",
    "load_moe_backend": "plugins",
    "token_slots": "batch",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 - the names are the keys of _HOMES


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from lora_core.deprecations import current_name

        if (now := current_name(name)) is not None:
            return __getattr__(now)
        raise AttributeError(f"module 'lora_core' has no attribute {name!r}")
    value = getattr(import_module(f"lora_core.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
