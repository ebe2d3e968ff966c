"""The hooks a plugin may implement. Few on purpose: each has a shipped plugin that uses it."""

from __future__ import annotations

from dataclasses import dataclass

import pluggy

PROJECT = "lora_core"
ENTRY_POINT_GROUP = "lora_core.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a hook."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a plugin says of a backend, without importing it.

    Attributes:
        name: what `load_backend` is given.
        summary: one line for listings.
        target: where the class is, as "package.module:Class"; imported only when the backend is
            loaded or explained.
        priority: `load_backend()` without a name takes the available backend of highest priority.
    """

    name: str
    summary: str
    target: str
    priority: int = 0


@hookspec
def lora_core_backends() -> list[BackendSpec]:
    """Dense backends of this plugin; subclasses of `LoRABackend`.

    Example:
        @hookimpl
        def lora_core_backends():
            return [BackendSpec("mine", "my kernels", "my_package.backend:MyBackend", priority=10)]
    """
    raise NotImplementedError


@hookspec
def lora_core_moe_backends() -> list[BackendSpec]:
    """Expert backends of this plugin; subclasses of `MoELoRABackend`.

    Example:
        @hookimpl
        def lora_core_moe_backends():
            return [BackendSpec("mine", "my expert kernels", "my_package.moe:MyMoEBackend")]
    """
    raise NotImplementedError
