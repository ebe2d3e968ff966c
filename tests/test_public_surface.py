"""The names other people's code is written against, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lora_core
from lora_core import errors

PUBLIC = {
    "BackendConfig",
    "BackendSpec",
    "BaseModule",
    "BatchInfo",
    "CONTRACT_VERSION",
    "Capabilities",
    "GraphKind",
    "LoRABackend",
    "LoRABatch",
    "LoRAManager",
    "LoRARequest",
    "LoRAWeights",
    "MoECapabilities",
    "MoELoRABackend",
    "MoELoRAWeights",
    "MoERoute",
    "MoERouting",
    "Mode",
    "NO_LORA",
    "Op",
    "RequestTable",
    "SliceLayout",
    "Workspace",
    "__version__",
    "explain",
    "hookimpl",
    "list_backends",
    "list_moe_backends",
    "load_backend",
    "load_moe_backend",
    "token_slots",
}


def loaded_by(code: str) -> set[str]:
    """Top-level packages that a new interpreter has imported after running `code`."""
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_public_names_are_these():
    assert set(lora_core.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves(name):
    assert getattr(lora_core, name) is not None
    assert name in dir(lora_core)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'lora_core' has no attribute 'LoRaBackend'"):
        _ = lora_core.LoRaBackend


def test_importing_the_package_is_cheap():
    heavy = {"torch", "numpy", "pydantic", "pluggy", "transformers", "triton"}
    assert loaded_by("import lora_core") & heavy == set()


def test_importing_the_pytest_plugin_is_cheap():
    heavy = {"torch", "numpy", "pydantic", "transformers", "triton", "hypothesis"}
    before = loaded_by("import pytest")
    assert (loaded_by("import pytest, lora_core.testing.pytest_plugin") - before) & heavy == set()


def test_the_tree_drawn_in_errors_is_the_tree():
    """One line per class, indented under its base; nothing missing, nothing invented."""
    drawn: dict[str, str] = {}
    ancestors = ["LoRACoreError"]
    for line in (errors.__doc__ or "").splitlines():
        marker = max(line.find("├── "), line.find("└── "))
        if marker < 0:
            continue
        depth = marker // 4
        name = line[marker + 4 :].split()[0]
        drawn[name] = ancestors[depth]
        ancestors[depth + 1 :] = [name]
    defined = {
        name: cls.__bases__[0].__name__
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, Exception) and name != "LoRACoreError"
    }
    assert drawn == defined


def test_every_error_is_caught_by_the_one_base():
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, Exception):
            assert issubclass(cls, errors.LoRACoreError)
