"""Other projects' kernels, brought beside this one by a peers kit and measured in the same run.

A kit is a folder with a module `peers.py` of three functions, `dense`, `moe` and `prepare`; see
docs/performance.md for what each takes and returns.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType


def load_kit(folder: Path | None) -> ModuleType | None:
    """The kit's module, or None when no folder is given.

    Raises:
        FileNotFoundError: the folder holds no kit.
    """
    if folder is None:
        return None
    if not (folder / "peers.py").is_file():
        raise FileNotFoundError(
            f"--peers {folder}: there is no peers.py in it; build the kit first"
        )
    sys.path.insert(0, str(folder.resolve()))
    return importlib.import_module("peers")


def kit_versions(folder: Path | None) -> dict[str, str]:
    """Versions of the projects in a kit, as its setup script pins them (`name==version`)."""
    if folder is None:
        return {}
    for script in (folder / "versions.txt", folder / "setup.py"):
        if script.is_file():
            return dict(re.findall(r"\b([a-z]+)==([\d.]+)", script.read_text()))
    return {}
