"""Result files: `{card, versions, commit, rows: [...]}`, written after every row and merged by cell.

A row stands on its own: the base and the peers beside it come from the same run. Merging therefore
never mixes parts of two rows; it chooses one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_OUTCOME = frozenset(
    {
        "base_us", "ours", "peers", "interval_us", "counts", "rounds", "error", "errors", "commit",
        "ours_us", "peers_us", "base_tokens_per_second", "tokens_per_second", "limit_us", "prepared",
        "versions",
    }
)  # fmt: skip


def cell_key(row: Mapping[str, Any]) -> str:
    """What identifies a row's cell: everything in it that was asked, nothing that was measured."""
    return json.dumps({k: v for k, v in row.items() if k not in _OUTCOME}, sort_keys=True)


def better(old: Row, new: Row) -> Row:
    """Which of two rows of one cell to keep.

    The newer, unless it lacks a backend or a peer that the older has, or does not count where the
    older does.
    """
    for kind in ("ours", "peers"):
        before, after = old.get(kind), new.get(kind)
        if isinstance(before, dict) and set(before) - set(after or ()):
            return old
    if old.get("counts", True) and not new.get("counts", True):
        return old
    return new


class ResultFile:
    """One result file on disk, and the run that is adding to it.

    Args:
        path: of the JSON file; read when it exists.
        card: name of the device.
        versions: of the software in use, by name.
        commit: of this repository.

    Raises:
        ValueError: the file holds rows of another card.
    """

    def __init__(self, path: Path, *, card: str, versions: dict[str, str], commit: str) -> None:
        self.path, self.card, self.versions, self.commit = path, card, versions, commit
        self.rows: dict[str, Row] = {}
        if path.exists():
            held = json.loads(path.read_text())
            if held["card"] != card:
                raise ValueError(
                    f"{path} holds results of {held['card']!r}, this machine has {card!r}: "
                    "times of two cards do not go into one file. Name another with --out."
                )
            self.rows = {cell_key(row): row for row in held["rows"]}

    def has(self, cell: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether this commit already measured `cell` with all of these contenders, and it counts."""
        row = self.rows.get(cell_key(cell))
        if row is None or row["commit"] != self.commit or not row.get("counts", True):
            return False
        measured = {*row.get("ours", {}), *row.get("peers", {}), *row.get("errors", {})}
        return set(names) <= measured

    def add(self, row: Row) -> None:
        """Take a row in and write the file, whole or not at all."""
        row = {**row, "commit": self.commit}
        if self.versions:
            row["versions"] = self.versions
        old = self.rows.get(cell_key(row))
        self.rows[cell_key(row)] = row if old is None else better(old, row)
        self.write()

    def write(self) -> None:
        """Write the file, one row a line, replacing the old one in one step."""
        rows = ",\n".join(json.dumps(_rounded(row)) for row in self.rows.values())
        head = json.dumps({"card": self.card, "versions": self.versions, "commit": self.commit})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(f'{head[:-1]}, "rows": [\n{rows}\n]}}\n')
        partial.replace(self.path)


def merge(target: Path, sources: Iterable[Path]) -> int:
    """Merge result files of one card into `target`; returns how many rows it then holds.

    Raises:
        ValueError: two cards.
    """
    merged: ResultFile | None = None
    for source in sources:
        held = json.loads(source.read_text())
        if merged is None:
            merged = ResultFile(
                target, card=held["card"], versions=held["versions"], commit=held["commit"]
            )
        elif held["card"] != merged.card:
            raise ValueError(f"{source} is of {held['card']!r}, {target} of {merged.card!r}")
        for row in held["rows"]:
            old = merged.rows.get(cell_key(row))
            merged.rows[cell_key(row)] = row if old is None else better(old, row)
        merged.versions, merged.commit = held["versions"], held["commit"]
    if merged is None:
        raise ValueError("nothing to merge")
    merged.write()
    return len(merged.rows)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < 100 else round(value, 1)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value
