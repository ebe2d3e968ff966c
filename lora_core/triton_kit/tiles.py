"""Tile tables: launch parameters as plain data, chosen by the first rule that matches.

A table replaces an autotuner: nothing is measured at run time, no call ever pays for a search, and
the same shape always takes the same kernel. Each rule says why it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """How one kernel is launched; equal only to itself, so that it is cheap to look things up by.

    Attributes:
        constexprs: block sizes and switches, passed to the kernel by name.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    constexprs: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 3

    def __getitem__(self, name: str) -> int:
        return self.constexprs[name]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table.

    Attributes:
        tile: what to use.
        reason: why, with what was measured; shown by tools, so that a row can be challenged.
        family: GPU family such as "sm90", or None for any.
        where: shape name -> inclusive (lowest, highest); names not listed match anything.
    """

    tile: Tile
    reason: str
    family: str | None = None
    where: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def matches(self, family: str, shape: Mapping[str, int]) -> bool:
        """Whether this row is for that GPU family and shape."""
        return self.family in (None, family) and all(
            low <= shape[name] <= high for name, (low, high) in self.where.items()
        )


class TileTable:
    """Rules of one kernel, first match wins; the last rule matches everything.

    Args:
        name: of the kernel, for messages.
        keys: the shape names that rules may speak of and that `pick` must be given.
        rules: from the most special to the most general.

    Raises:
        ValueError: a rule speaks of an unknown shape name, has an empty band or no reason, cannot
            be reached, or the last does not match everything.
    """

    def __init__(self, name: str, keys: Iterable[str], rules: Iterable[Rule]) -> None:
        self.name, self.keys, self.rules = name, frozenset(keys), tuple(rules)
        if not self.rules or self.rules[-1].family is not None or self.rules[-1].where:
            raise ValueError(f"tile table {name!r} must end with a rule for any family and shape")
        names = set(self.rules[0].tile.constexprs)
        for index, rule in enumerate(self.rules):
            unknown = set(rule.where) - self.keys
            if unknown:
                raise ValueError(
                    f"tile table {name!r}, rule {index}: unknown shape names {sorted(unknown)}, "
                    f"it has {sorted(self.keys)}"
                )
            if any(low > high for low, high in rule.where.values()):
                raise ValueError(
                    f"tile table {name!r}, rule {index}: an empty band in {dict(rule.where)}"
                )
            if set(rule.tile.constexprs) != names:
                raise ValueError(
                    f"tile table {name!r}, rule {index}: sets {sorted(rule.tile.constexprs)}, "
                    f"the first rule sets {sorted(names)}"
                )
            if not rule.reason.strip():
                raise ValueError(f"tile table {name!r}, rule {index}: a rule needs its reason")
            if any(_covers(earlier, rule) for earlier in self.rules[:index]):
                raise ValueError(
                    f"tile table {name!r}, rule {index}: an earlier rule always matches first"
                )
        self._pick = cache(self._first_match)

    def pick(self, family: str, **shape: int) -> Tile:
        """The tile of the first matching rule.

        Raises:
            ValueError: `shape` does not name exactly the table's keys.
        """
        return self._pick(family, tuple(shape.items()))

    def _first_match(self, family: str, items: tuple[tuple[str, int], ...]) -> Tile:
        shape = dict(items)
        if shape.keys() != self.keys:
            raise ValueError(
                f"tile table {self.name!r} is keyed by {sorted(self.keys)}, got {sorted(shape)}"
            )
        return next(rule.tile for rule in self.rules if rule.matches(family, shape))

    def tiles(self) -> list[Tile]:
        """Every different tile, in rule order."""
        found: list[Tile] = []
        for rule in self.rules:
            if rule.tile not in found:
                found.append(rule.tile)
        return found


def _covers(earlier: Rule, later: Rule) -> bool:
    """Whether `earlier` matches whatever `later` does."""
    if earlier.family not in (None, later.family):
        return False
    return all(
        name in later.where and low <= later.where[name][0] and later.where[name][1] <= high
        for name, (low, high) in earlier.where.items()
    )


@cache
def family(device: torch.device) -> str:
    """The GPU family of a device: "sm80" (8.x), "sm90", "sm100" (10.x and later), "hip", "cpu"."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip is not None:
        return "hip"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm80", 9: "sm90"}.get(major, "sm100" if major >= 10 else "sm70")
