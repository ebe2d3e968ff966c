"""What `lora-core doctor` and `lora-core trace` say: versions, devices, plugins, and what to do."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from lora_core import __version__, plugins
from lora_core.contract import CONTRACT_VERSION
from lora_core.errors import ContractError, PluginError

if TYPE_CHECKING:
    import torch

State = Literal["available", "unavailable", "shadowed", "incompatible", "broken", "disabled"]
"""unavailable: not on this machine; shadowed: another distribution claims the same name;
incompatible: it speaks another contract version; broken: it cannot be imported, or its hooks are
wrong."""

FAULTS: frozenset[State] = frozenset({"shadowed", "incompatible", "broken"})
_LIBRARIES = ("torch", "triton", "pluggy", "pydantic", "safetensors", "transformers", "peft", "vllm", "sglang")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One plugin or backend.

    Attributes:
        name: of the backend, or of a plugin that brought none.
        family: "dense" or "moe"; "" for a plugin that brought none.
        distribution: where it is from.
        state: see `State`.
        reason: why, "" where it is available.
        advice: what to do, "" where there is nothing.
    """

    name: str
    family: str
    distribution: str
    state: State
    reason: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything `lora-core doctor` found.

    Attributes:
        versions: of Python, lora_core, its contract, and the libraries it works with; None: absent.
        devices: one line per device that torch sees.
        findings: every backend, dense first, then plugins that brought none.
    """

    versions: dict[str, str | None]
    devices: list[str]
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether no plugin is at fault; missing hardware is nobody's fault."""
        return not any(finding.state in FAULTS for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "versions"
        for name, version in self.versions.items():
            yield f"  {name:<14} {version or 'not installed'}"
        yield "devices"
        yield from (f"  {device}" for device in self.devices)
        yield "backends"
        for finding in self.findings:
            kind = f" ({finding.family})" if finding.family else ""
            why = f": {finding.reason}" if finding.reason else ""
            yield f"  {finding.name}{kind} from {finding.distribution}: {finding.state}{why}"
            if finding.advice:
                yield f"    -> {finding.advice}"
        faults = sum(finding.state in FAULTS for finding in self.findings)
        yield f"{faults} to repair" if faults else "nothing to repair"


def examine(*, device: torch.device | str | None = None) -> Examination:
    """Look at this environment; backends are imported, nothing is run on a device.

    Args:
        device: ask about this device; None: about any.
    """
    found = plugins.registry()
    findings = [
        _finding(family, name, claims, device)
        for family in ("dense", "moe")
        for name, claims in sorted(found.found[family].items())
    ]
    findings += [
        Finding(label, "", label, "broken", reason, _repair(label, reason))
        for label, reason in found.failed.items()
    ]
    findings += [
        Finding(
            name, "", "an installed plugin", "disabled", f"{plugins.DISABLE_VARIABLE}={_disabled()}",
            f"take {name} out of {plugins.DISABLE_VARIABLE} to use it",
        )
        for name in sorted(found.disabled)
    ]  # fmt: skip
    return Examination(_versions(), _devices(), findings)


def _finding(
    family: plugins.Family,
    name: str,
    claims: list[plugins.FoundBackend],
    device: torch.device | str | None,
) -> Finding:
    owners = " and ".join(claim.distribution for claim in claims)
    reason = plugins.unavailable_reason(claims, device)
    if reason is None:
        return Finding(name, family, owners, "available")
    if len(claims) > 1:
        return Finding(
            name, family, owners, "shadowed", "several distributions claim the name",
            f"uninstall all but one, or switch the others off by their entry point names in {plugins.DISABLE_VARIABLE}",
        )  # fmt: skip
    if isinstance(reason, PluginError):
        if isinstance(reason.__cause__, ContractError):
            newer = "Upgrade lora-core" in str(reason)
            return Finding(
                name, family, owners, "incompatible", str(reason.__cause__),
                "pip install --upgrade " + ("lora-core" if newer else owners),
            )  # fmt: skip
        return Finding(name, family, owners, "broken", str(reason), _repair(owners, str(reason)))
    advice = "nothing to repair; run it where it can, or choose another backend"
    if "CUDA" in reason and find_spec("triton") and "TRITON_INTERPRET" not in os.environ:
        advice += "; kernels in Triton also run on a CPU, slowly, with TRITON_INTERPRET=1"
    return Finding(name, family, owners, "unavailable", reason, advice)


def _repair(distribution: str, reason: str) -> str:
    """What to do about a plugin that does not load."""
    name = distribution.partition(" ")[0]
    if "ModuleNotFoundError" in reason or "ImportError" in reason:
        return f"a dependency is missing or too old: pip install --upgrade {name}, then pip check"
    return (
        f"upgrade or uninstall {name}, or report it to its author; meanwhile "
        f"{plugins.DISABLE_VARIABLE}=NAME of its entry point keeps it out"
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "lora_core": __version__,
        "contract": CONTRACT_VERSION,
    }
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            versions[library] = None
    return versions


def _devices() -> list[str]:
    import torch

    devices = [f"cpu: {platform.machine()}, {torch.get_num_threads()} threads"]
    if not torch.cuda.is_available():
        built = "built without CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
        return [*devices, f"cuda: none (torch {torch.__version__}, {built})"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            f"cuda:{index}: {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return devices


def _disabled() -> str:
    return os.environ.get(plugins.DISABLE_VARIABLE, "")


def trace() -> list[dict[str, Any]]:
    """Discover anew and say what happened, step by step: imports, hook calls, failures.

    Returns:
        per step `plugin`, `step`, `seconds` and `result`.
    """
    plugins.registry.cache_clear()
    found = plugins.registry()
    steps = [
        {
            "plugin": call.plugin,
            "step": call.what if call.what.startswith("import ") else f"{call.what}()",
            "seconds": call.seconds,
            "result": ", ".join(call.result),
        }
        for call in found.calls
    ]
    steps += [
        {"plugin": label, "step": "failed", "seconds": 0.0, "result": reason}
        for label, reason in found.failed.items()
    ]
    steps += [
        {"plugin": name, "step": "disabled", "seconds": 0.0, "result": plugins.DISABLE_VARIABLE}
        for name in sorted(found.disabled)
    ]
    return steps
