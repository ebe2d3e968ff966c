"""pytest options and marks of the conformance suite.

pytest imports this in every run of an environment that has lora-core, so it imports neither torch
nor pydantic nor the suite. The asserts of the suite are plain; naming its modules here, before they
are imported, makes pytest rewrite them in editable installs too.
"""

from __future__ import annotations

import pytest

_MODULES = (
    "compare",
    "conformance",
    "dense_case",
    "dense_errors",
    "dense_graphs",
    "dense_laws",
    "dense_property",
    "dense_state",
    "dense_values",
    "engine",
    "guards",
    "moe_case",
    "moe_laws",
    "moe_values",
)

pytest.register_assert_rewrite(*(f"lora_core.testing.{module}" for module in _MODULES))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of every conformance class in the run."""
    group = parser.getgroup("lora-core", "conformance suite of lora-core")
    group.addoption(
        "--lora-level",
        choices=("smoke", "standard", "large"),
        default="smoke",
        help="how much the conformance classes run that set no level of their own (default: smoke)",
    )
    group.addoption(
        "--lora-require-device",
        metavar="TYPE",
        default=None,
        help="a check that is not run for lack of this device type, such as cuda, fails instead of being skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Marks that the suite's own tests and plugins use."""
    config.addinivalue_line("markers", "cuda: needs a CUDA device, and is skipped only without one")
    config.addinivalue_line("markers", "slow: takes more than about five seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop checks without a case: their level is higher, or the op is unclaimed and tested to refuse."""
    idle = [item for item in items if _has_no_case(item)]
    if idle:
        items[:] = [item for item in items if item not in idle]


def _has_no_case(item: pytest.Item) -> bool:
    check = getattr(getattr(item, "function", None), "lora_check", None)
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return check is not None and not hasattr(parameters.get("instance"), "case")
