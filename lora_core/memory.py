"""How much memory is free, so that an allocation can be refused before it is made."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lora_core.errors import InsufficientMemoryError

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Memory that this process can still take without swapping, cgroup limits included."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # "max" when there is none
        used = int((_CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(counts["inactive_file"]))  # page cache is given back
    except (OSError, KeyError, ValueError):
        return free


def available_bytes(device: torch.device) -> int:
    """Memory that `device` can still give, its allocator's own unused blocks included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_host_bytes()


def require_bytes(needed: int, device: torch.device, what: str) -> None:
    """Refuse an allocation that would not fit.

    Raises:
        InsufficientMemoryError: with what it is for, what it needs and what is free.
    """
    free = available_bytes(device)
    if needed > free:
        raise InsufficientMemoryError(
            f"{what} needs {needed / 2**20:.1f} MiB on {device}, but only {free / 2**20:.1f} MiB are free. "
            "Use fewer slots (max_loras), a lower max_rank, or fewer target_modules."
        )
