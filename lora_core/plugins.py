"""Finding, explaining and loading backends. Listing imports neither torch nor triton.

Every entry point of the group `lora_core.backends` is loaded on its own: one that is broken is
remembered and named in messages, and never takes the host down.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from lora_core import hookspecs
from lora_core.errors import BackendNotFoundError, BackendUnavailableError, PluginError
from lora_core.hookspecs import BackendSpec

if TYPE_CHECKING:
    import torch

    from lora_core.backend import BackendConfig, LoRABackend
    from lora_core.moe import MoELoRABackend

logger = logging.getLogger(__name__)

Family = Literal["dense", "moe"]
_HOOKS: dict[Family, str] = {"dense": "lora_core_backends", "moe": "lora_core_moe_backends"}
_LOADERS: dict[Family, str] = {"dense": "load_backend", "moe": "load_moe_backend"}
DISABLE_VARIABLE = "LORA_CORE_DISABLE"


class _BuiltinBackends:
    """The backends that lora_core itself ships."""

    @hookspecs.hookimpl
    def lora_core_backends(self) -> list[BackendSpec]:
        return [
            BackendSpec(
                "torch",
                "reference in plain torch, any device",
                "lora_core.torch_backend:TorchBackend",
                0,
            )
        ]

    @hookspecs.hookimpl
    def lora_core_moe_backends(self) -> list[BackendSpec]:
        return [
            BackendSpec(
                "torch",
                "reference for experts in plain torch, any device",
                "lora_core.torch_moe_backend:TorchMoEBackend",
                0,
            )
        ]


@dataclass(frozen=True, slots=True)
class FoundBackend:
    """A backend and the distribution that registered it."""

    spec: BackendSpec
    distribution: str


@dataclass(frozen=True, slots=True)
class Call:
    """One step of discovery, as `lora-core trace` shows it.

    Attributes:
        plugin: the distribution, or its entry point where that has another name.
        what: "import module", or the hook.
        seconds: how long it took.
        result: names of the backends a hook returned.
    """

    plugin: str
    what: str
    seconds: float
    result: tuple[str, ...] = ()


@dataclass(slots=True)
class Registry:
    """Everything discovery found, the broken included.

    Attributes:
        found: per family, name -> the distributions that claim it (more than one is a conflict).
        failed: plugin -> why it could not be loaded.
        disabled: names switched off by `LORA_CORE_DISABLE` that exist.
        plugins: the pluggy manager.
        calls: what discovery did, in order.
    """

    plugins: pluggy.PluginManager
    found: dict[Family, dict[str, list[FoundBackend]]] = field(
        default_factory=lambda: {"dense": {}, "moe": {}}
    )
    failed: dict[str, str] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)


@cache
def registry() -> Registry:
    """Discover once per process; `registry.cache_clear()` makes the next call discover again."""
    switched_off = {
        name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()
    }
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    result = Registry(plugins)
    _collect(result, _BuiltinBackends(), "lora-core", switched_off)
    for entry in sorted(
        metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP), key=lambda e: e.name
    ):
        distribution = entry.dist.name if entry.dist is not None else entry.value
        label = (
            distribution if distribution == entry.name else f"{entry.name} (from {distribution})"
        )
        if entry.name in switched_off:
            result.disabled.add(entry.name)
            continue
        began = time.perf_counter()
        try:
            plugin = entry.load()
            result.calls.append(Call(label, f"import {entry.value}", time.perf_counter() - began))
            _collect(result, plugin, distribution, switched_off)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's module may raise anything
            result.failed[label] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            logger.warning("lora_core plugin %s failed to load: %s", label, result.failed[label])
    return result


def _collect(result: Registry, plugin: object, distribution: str, switched_off: set[str]) -> None:
    """Register one plugin and take its specs; on any fault it is unregistered again."""
    manager = result.plugins
    try:
        manager.register(plugin)
        manager.check_pending()  # a marked function that no hook is named after
        specs = {
            family: _called(result, distribution, hook, implementation.function)
            for family, hook in _HOOKS.items()
            for implementation in getattr(manager.hook, hook).get_hookimpls()
            if implementation.plugin is plugin
        }
        if not specs:
            raise PluginError(
                f"it implements no hook: mark a function named {' or '.join(_HOOKS.values())} "
                "with lora_core.hookimpl"
            )
    except BaseException:
        if manager.is_registered(plugin):
            manager.unregister(plugin)
        raise
    for family, listed in specs.items():
        for spec in listed:
            if spec.name in switched_off:
                result.disabled.add(spec.name)
                continue
            result.found[family].setdefault(spec.name, []).append(FoundBackend(spec, distribution))


def _called(
    result: Registry, distribution: str, hook: str, function: Callable[[], object]
) -> list[BackendSpec]:
    began = time.perf_counter()
    specs = _specs(hook, function())
    names = tuple(spec.name for spec in specs)
    result.calls.append(Call(distribution, hook, time.perf_counter() - began, names))
    return specs


def _specs(hook: str, answer: object) -> list[BackendSpec]:
    """What a hook returned, if it is what the hook promises.

    Raises:
        PluginError: it is not.
    """
    if not isinstance(answer, list) or not all(isinstance(spec, BackendSpec) for spec in answer):
        raise PluginError(f"{hook} returned {answer!r}, expected a list of lora_core.BackendSpec")
    for spec in answer:
        if spec.target.count(":") != 1:
            raise PluginError(
                f"{hook} gives backend {spec.name!r} the target {spec.target!r}, "
                "expected 'package.module:Class'"
            )
    return answer


# -- dense ------------------------------------------------------------------------------------------


def list_backends() -> list[BackendSpec]:
    """Installed dense backends, by falling priority, then name; nothing is imported."""
    return _listed("dense")


def load_backend(
    name: str | None = None,
    *,
    device: torch.device | str | None = None,
    config: BackendConfig | None = None,
) -> LoRABackend[Any]:
    """A new, usable instance of a backend.

    Args:
        name: as `list_backends` has it; None takes the available one of highest priority.
        device: where it shall run; None leaves it to the backend.
        config: optional sizing.

    Raises:
        BackendNotFoundError: no such name; the message lists what there is.
        BackendUnavailableError: it cannot run here; the message has the reason.
        PluginError: two distributions claim the name, or its import string leads nowhere.
    """
    backend: LoRABackend[Any] = _load_class("dense", name, device)(device=device, config=config)
    logger.debug("loaded backend %r on %s", backend.name, backend.device)
    return backend


def explain(*, device: torch.device | str | None = None) -> str:
    """One line per backend, dense and experts: available, or why not; then what failed to load."""
    lines = []
    for family in _HOOKS:
        for name, reason in _availability(family, device).items():
            lines.append(f"{name} ({family}): {reason or 'available'}")
    found = registry()
    lines.extend(f"{name}: disabled by {DISABLE_VARIABLE}" for name in sorted(found.disabled))
    lines.extend(f"{label}: failed to load: {reason}" for label, reason in found.failed.items())
    return "\n".join(lines)


def describe(*, device: torch.device | str | None = None) -> dict[str, Any]:
    """What `explain` says, as plain data: `backends`, `failed` and `disabled`."""
    found = registry()
    return {
        "backends": [
            {
                "name": spec.name,
                "family": family,
                "summary": spec.summary,
                "priority": spec.priority,
                "distribution": " and ".join(
                    claim.distribution for claim in found.found[family][spec.name]
                ),
                "reason": reasons[spec.name],
            }
            for family in _HOOKS
            for reasons in [_availability(family, device)]
            for spec in _listed(family)
        ],
        "failed": dict(found.failed),
        "disabled": sorted(found.disabled),
    }


# -- experts ----------------------------------------------------------------------------------------


def list_moe_backends() -> list[BackendSpec]:
    """Installed expert backends, by falling priority, then name; nothing is imported."""
    return _listed("moe")


def load_moe_backend(
    name: str | None = None,
    *,
    device: torch.device | str | None = None,
    config: BackendConfig | None = None,
) -> MoELoRABackend[Any]:
    """Like `load_backend`, for experts."""
    backend: MoELoRABackend[Any] = _load_class("moe", name, device)(device=device, config=config)
    logger.debug("loaded experts backend %r on %s", backend.name, backend.device)
    return backend


# -- both -------------------------------------------------------------------------------------------


def _listed(family: Family) -> list[BackendSpec]:
    claims = registry().found[family].values()
    return sorted((claim[0].spec for claim in claims), key=lambda spec: (-spec.priority, spec.name))


def _load_class(family: Family, name: str | None, device: torch.device | str | None) -> type[Any]:
    if name is None:
        reasons = _availability(family, device)
        usable = [spec for spec in _listed(family) if reasons[spec.name] is None]
        if not usable:
            detail = (
                "; ".join(f"{n}: {reason}" for n, reason in reasons.items()) or "none is installed"
            )
            raise BackendUnavailableError(
                f"no {family} backend is available on {device or 'this machine'}: {detail}"
            )
        name = usable[0].name
    claims = registry().found[family].get(name)
    if claims is None:
        raise BackendNotFoundError(_not_found(family, name))
    reason = unavailable_reason(claims, device)
    if isinstance(reason, Exception):
        raise reason
    if reason is not None:
        raise BackendUnavailableError(
            f"backend {name!r} (from {claims[0].distribution}) cannot run here: {reason}. "
            f"Available: {', '.join(n for n, r in _availability(family, device).items() if r is None) or 'none'}."
        )
    return _import_class(claims[0])


def _not_found(family: Family, name: str) -> str:
    found = registry()
    known = sorted(found.found[family])
    near = difflib.get_close_matches(name, known, n=1)
    parts = [f"no {family} backend is named {name!r}; installed: {', '.join(known) or 'none'}."]
    if near:
        parts.append(f"Did you mean {near[0]!r}?")
    other: Family = "moe" if family == "dense" else "dense"
    if name in found.found[other]:
        parts.append(f"{name!r} is a {other} backend: use {_LOADERS[other]}.")
    if name in found.disabled:
        parts.append(f"{name!r} is switched off by {DISABLE_VARIABLE}.")
    if found.failed:
        failed = "; ".join(f"{label}: {reason}" for label, reason in found.failed.items())
        parts.append(f"Plugins that failed to load: {failed}.")
    return " ".join(parts)


def _availability(family: Family, device: torch.device | str | None) -> dict[str, str | None]:
    """Name -> why it is not available, or None, by falling priority."""
    found = registry().found[family]
    reasons = {spec.name: unavailable_reason(found[spec.name], device) for spec in _listed(family)}
    return {name: None if reason is None else str(reason) for name, reason in reasons.items()}


def unavailable_reason(
    claims: list[FoundBackend], device: torch.device | str | None
) -> str | PluginError | None:
    """A string: cannot run here; a PluginError: cannot be loaded at all; None: available."""
    if len(claims) > 1:
        owners = " and ".join(repr(claim.distribution) for claim in claims)
        return PluginError(
            f"backend {claims[0].spec.name!r} is claimed by {owners}: uninstall one, or switch one off by its "
            f"entry point name in {DISABLE_VARIABLE}"
        )
    try:
        backend_class = _import_class(claims[0])
    except PluginError as error:
        return error
    import torch

    try:
        where = torch.device(device) if device is not None else None
    except RuntimeError:
        return f"{device!r} is no device that torch knows"
    try:
        reason: str | None = backend_class.unavailable_reason(where)
    except Exception as error:  # noqa: BLE001 - a stranger's check must not hide the other backends
        return f"its own check failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return reason


def _import_class(claim: FoundBackend) -> type[Any]:
    """The class behind an import string, checked against this contract version.

    Raises:
        PluginError: it cannot be imported, is no backend, or speaks another contract version.
    """
    from lora_core.contract import check_supported

    spec = claim.spec
    module, _, attribute = spec.target.partition(":")
    try:
        backend_class: type[Any] = getattr(import_module(module), attribute)
        check_supported(f"backend {spec.name!r}", backend_class.contract)
        if backend_class.name != spec.name:
            raise PluginError(
                f"it is registered as {spec.name!r} but its class says {backend_class.name!r}"
            )
    except Exception as error:
        raise PluginError(
            f"backend {spec.name!r} (from {claim.distribution}) failed to load {spec.target!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return backend_class
