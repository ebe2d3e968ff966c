"""docs/plugins.md lists every hook with its exact arguments, and its example is the one that is tested."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lora_core import BackendSpec, hookspecs

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")


def test_every_hook_is_listed_with_its_arguments():
    listed = set(re.findall(r"^\| `(\w+\(.*?\))` \| `(.+?)` \|", PAGE, flags=re.MULTILINE))
    defined = {
        (
            f"{name}({', '.join(inspect.signature(hook).parameters)})",
            str(inspect.signature(hook).return_annotation),
        )
        for name, hook in vars(hookspecs).items()
        if hasattr(hook, "lora_core_spec")
    }
    assert defined
    assert listed == defined


def test_the_fields_of_a_spec_are_described():
    parameters = inspect.signature(BackendSpec).parameters
    assert "`BackendSpec(name, summary, target, priority=0)`" in PAGE
    assert list(parameters) == ["name", "summary", "target", "priority"]
    assert parameters["priority"].default == 0


def test_the_hook_on_the_page_works():
    block = next(b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "@hookimpl" in b)
    namespace: dict[str, object] = {}
    exec(block, namespace)
    (spec,) = namespace["lora_core_backends"]()
    assert (spec.name, spec.target) == ("mine", "lora_core_mine.backend:MyBackend")
