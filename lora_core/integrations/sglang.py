"""SGLang on any lora_core backend: `sglang serve MODEL --enable-lora --lora-backend lora_core ...`.

`register` is for SGLang's entry-point group `sglang.srt.plugins`. It adds the name `lora_core` to
the choices of `--lora-backend`; whoever does not choose it sees no difference.

    LORA_CORE_SGLANG       name of a dense backend; the best available where it is not set
    LORA_CORE_SGLANG_MOE   name of an experts backend, or "auto" for the best available; SGLang's
                           own kernels where it is not set
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from lora_core.plugins import load_backend, load_moe_backend

if TYPE_CHECKING:
    import torch

    from lora_core.backend import LoRABackend
    from lora_core.moe import MoELoRABackend

NAME = "lora_core"
DENSE_VARIABLE, MOE_VARIABLE = "LORA_CORE_SGLANG", "LORA_CORE_SGLANG_MOE"


def register() -> None:
    """Offer `lora_core` to SGLang; it is loaded in the processes that ask for it by name."""
    from sglang.srt.lora.backend.lora_registry import register_lora_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.add_cli_args", _offer_name, HookType.AFTER
    )
    register_lora_backend(NAME)(_backend_class)


def _backend_class() -> type:
    from lora_core.integrations._sglang_backend import LoRACoreBackend

    return LoRACoreBackend


def _offer_name(result: object, parser: argparse.ArgumentParser) -> None:  # noqa: ARG001 - SGLang's
    """Add the name to the choices that SGLang's command line lists."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to one of its options
        if action.dest == "lora_backend" and action.choices is not None:
            action.choices = [*(name for name in action.choices if name != NAME), NAME]


def dense_backend(device: torch.device) -> LoRABackend[Any]:
    """A new instance of the backend that `LORA_CORE_SGLANG` names."""
    name = os.environ.get(DENSE_VARIABLE, "auto")
    return load_backend(None if name in {"", "auto"} else name, device=device)


def moe_backend(device: torch.device) -> MoELoRABackend[Any]:
    """A new instance of the experts backend that `LORA_CORE_SGLANG_MOE` names."""
    name = os.environ.get(MOE_VARIABLE, "auto")
    return load_moe_backend(None if name in {"", "auto"} else name, device=device)
