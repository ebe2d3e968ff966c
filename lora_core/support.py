"""`python -m lora_core.support`: docs/support.md from what the installed backends claim."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Literal

from lora_core.plugins import FoundBackend, registry

_HEADER = """\
# Support

What each backend claims, as it says itself; the conformance suite tests every claim over its whole range, and that everything else is refused. Written by `python -m lora_core.support`; a test compares.

What was last run, where: [Performance](performance.md) for measurements, `lora-core check NAME --device cuda --json FILE` for the suite on a machine of your own.
"""


def page() -> str:
    """The text of docs/support.md for the plugins that are installed."""
    return "\n".join(
        [
            _HEADER,
            "## Dense",
            "",
            *_table("dense", ("ops", "dtypes", "device_types", "graphs", "max_rank", "max_slices", "batch_invariant", "deterministic")),
            "",
            "## Experts",
            "",
            *_table("moe", ("dtypes", "device_types", "graphs", "max_rank", "max_slices", "deterministic")),
            "",
        ]
    )  # fmt: skip


def _table(family: Literal["dense", "moe"], fields: tuple[str, ...]) -> Iterable[str]:
    claims = [found[0] for _, found in sorted(registry().found[family].items())]
    capabilities = [_capabilities(claim) for claim in claims]
    yield f"| | {' | '.join(f'`{claim.spec.name}`' for claim in claims)} |"
    yield "|---" * (len(claims) + 1) + "|"
    for field in fields:
        cells = " | ".join(_cell(getattr(claimed, field)) for claimed in capabilities)
        yield f"| {field.replace('_', ' ')} | {cells} |"


def _capabilities(claim: FoundBackend) -> Any:
    module, _, attribute = claim.spec.target.partition(":")
    return getattr(import_module(module), attribute).capabilities


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "no limit"
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(page())
