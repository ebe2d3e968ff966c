"""Where a run happens: card, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

_DISTRIBUTIONS = ("torch", "triton", "transformers", "lora-core")


def card(device: torch.device) -> str:
    """Name of the device under test."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def versions(peers: dict[str, str] | None = None) -> dict[str, str]:
    """Versions of what is measured, the peers included."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | (peers or {})


def commit() -> str:
    """The commit of this checkout, with a plus when files differ from it; "unknown" outside one."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
