"""vLLM on any lora_core backend: `LORA_CORE_VLLM=csgmv vllm serve ... --enable-lora`.

`register` is for vLLM's entry-point group `vllm.general_plugins`. Without the variable it does nothing,
so that its being installed changes no result; with it, vLLM's LoRA layers are given `PunicaWrapper` in
place of the platform's own wrapper.

    LORA_CORE_VLLM       name of a dense backend, or "auto" for the best available
    LORA_CORE_VLLM_MOE   name of an experts backend; the best available where it is not set
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lora_core.plugins import load_backend, load_moe_backend

if TYPE_CHECKING:
    import torch

    from lora_core.backend import LoRABackend
    from lora_core.moe import MoELoRABackend

DENSE_VARIABLE, MOE_VARIABLE = "LORA_CORE_VLLM", "LORA_CORE_VLLM_MOE"
WRAPPER = "lora_core.integrations._vllm_punica.PunicaWrapper"


def register() -> None:
    """Point vLLM's platform at lora_core's wrapper, if `LORA_CORE_VLLM` asks for it."""
    name = os.environ.get(DENSE_VARIABLE)
    if not name:
        return
    from vllm.platforms import current_platform

    def get_punica_wrapper(cls: type) -> str:  # noqa: ARG001 - vLLM's signature
        return WRAPPER

    type(current_platform).get_punica_wrapper = classmethod(get_punica_wrapper)


def dense_backend(device: torch.device) -> LoRABackend[Any]:
    """A new instance of the backend that `LORA_CORE_VLLM` names."""
    name = os.environ.get(DENSE_VARIABLE, "auto")
    return load_backend(None if name in {"", "auto"} else name, device=device)


def moe_backend(device: torch.device) -> MoELoRABackend[Any]:
    """A new instance of the experts backend that `LORA_CORE_VLLM_MOE` names."""
    name = os.environ.get(MOE_VARIABLE, "auto")
    return load_moe_backend(None if name in {"", "auto"} else name, device=device)
