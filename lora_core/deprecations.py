"""Public names that moved: each with the release since when, and what to use instead.

`lora_core.OLD` gives what `lora_core.NEW` is, and warns; after two minor releases the entry goes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deprecated:
    """One old name.

    Attributes:
        since: release that deprecated it, such as "0.2".
        instead: the public name to use.
    """

    since: str
    instead: str


DEPRECATED: dict[str, Deprecated] = {}
"""Old name -> what became of it."""


def current_name(name: str) -> str | None:
    """What `name` is called now, with a warning; None where it never was a public name."""
    entry = DEPRECATED.get(name)
    if entry is None:
        return None
    warnings.warn(
        f"lora_core.{name} is deprecated since {entry.since}: use lora_core.{entry.instead}",
        DeprecationWarning,
        stacklevel=3,
    )
    return entry.instead
