"""Tables of result files: each cell against its bar, means and worst cells."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.results import Row
from benchmarks.stats import geometric_mean

NO_CELL_ABOVE = 0.95
LEAST_RATIO = 0.1
"""Ours over the best peer counts as no less: some forms add nothing, or less."""
_PREFILL_ABOVE = 512


def best_peer_us(row: Row) -> float | None:
    """The fastest peer of a row, counted as at least the physical limit."""
    return max(min(row["peers"].values()), row["limit_us"]) if row.get("peers") else None


def bar_us(row: Row) -> float | None:
    """What a cell has to reach: half of its best peer, or 1.25 times the limit where that is more."""
    best = best_peer_us(row)
    return None if best is None else max(0.5 * best, 1.25 * row["limit_us"])


def describe(row: Row) -> str:
    """A cell in a few words."""
    what = row.get("site") or f"{row['shape']} {row['layout']}"
    mix = "" if row.get("mix", "even") == "even" else f" ({row['mix']})"
    return f"{what} T={row['tokens']} x{row['adapters']} r{row['rank']}{mix}"


def line(row: Row) -> str:
    """One row in one line: base, ours, bar, peers, what failed."""
    bar = bar_us(row)
    parts = [f"{describe(row):44s} base {row.get('base_us') or 0.0:8.1f}"]
    parts += [f"{n} {us:.1f}" for n, us in sorted(row["ours"].items(), key=lambda item: item[1])]
    if bar is not None:
        parts.append(f"| bar {bar:.1f} limit {row['limit_us']:.1f}")
        parts += [
            f"{n} {us:.1f}" for n, us in sorted(row["peers"].items(), key=lambda item: item[1])
        ]
    parts += ["" if row.get("counts") else "(wide)"]
    parts += [f"!! {name}: {what}" for name, what in row.get("errors", {}).items()]
    return "  ".join(parts)


def host_line(row: Row) -> str:
    """One host row in one line."""
    parts = [f"{row['what']:32s} {row['requests']:4d} requests"]
    for key in ("ours_us", "peers_us"):
        parts += [
            f"{n} {us:.0f}" for n, us in sorted(row[key].items(), key=lambda item: item[1])
        ] + ["|"]
    parts += [f"!! {name}: {what}" for name, what in row.get("errors", {}).items()]
    return "  ".join(parts)


def decoder_line(row: Row) -> str:
    """One decoder row in one line."""
    kept = row["tokens_per_second"] / row["base_tokens_per_second"]
    return (
        f"{row['shape']} {row['phase']:7s} batch {row['batch']:3d} x{row['adapters']:<2d} "
        f"{row['backend']:16s} {row['tokens_per_second']:9.0f} of {row['base_tokens_per_second']:9.0f} "
        f"tokens/s, {kept:.1%}"
    )


def kind(row: Row) -> str:
    """Which geometric mean a row belongs to."""
    family = "dense" if "site" in row else "experts"
    return f"{family} {'prefill' if row['tokens'] > _PREFILL_ABOVE else 'decode'}"


def ratios(rows: Iterable[Row], backend: str | None = None) -> dict[str, list[tuple[float, Row]]]:
    """Ours over the best peer, by kind; `backend` None takes the best of ours in each cell."""
    found: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        best, ours = best_peer_us(row), row["ours"]
        mine = min(ours.values(), default=None) if backend is None else ours.get(backend)
        if best is not None and mine is not None:
            found.setdefault(kind(row), []).append((max(mine / best, LEAST_RATIO), row))
    return found


def tables(files: Iterable[Path]) -> str:
    """Means, cells at their bar, and the worst cells of each backend."""
    lines = []
    for path in files:
        held = json.loads(path.read_text())
        rows = [row for row in held["rows"] if "ours" in row]
        names = sorted({name for row in rows for name in row["ours"]})
        lines.append(f"{path}: {held['card']}, {held['commit']}, {len(rows)} cells")
        for name in [*names, None]:
            for group, entries in sorted(ratios(rows, name).items()):
                mean = geometric_mean([ratio for ratio, _ in entries])
                mine = [
                    (min(r["ours"].values()) if name is None else r["ours"][name], r)
                    for _, r in entries
                ]
                reached = sum(us <= (bar_us(r) or 0.0) for us, r in mine)
                worst = sorted(entries, key=lambda e: -e[0])[:3]
                lines.append(
                    f"  {name or 'best of ours':22s} {group:16s} mean {mean:.2f}, {reached} of {len(entries)} "
                    f"cells at their bar, {sum(r > NO_CELL_ABOVE for r, _ in entries)} above {NO_CELL_ABOVE}; "
                    "worst " + ", ".join(f"{describe(r)} {ratio:.2f}" for ratio, r in worst)
                )
    return "\n".join(lines)


def markdown(files: Iterable[Path]) -> str:
    """Every row as a table, the losses included."""
    parts = ["# Measured cells", ""]
    for path in files:
        held = json.loads(path.read_text())
        rows = held["rows"]
        versions = ", ".join(f"{name} {version}" for name, version in held["versions"].items())
        parts += [f"## {path.stem}", "", f"{held['card']}; {versions}.", ""]
        if rows and "what" in rows[0]:
            parts += _table(
                ("what", "requests", "ours, us", "peers, us"),
                [
                    (r["what"], r["requests"], _list(r["ours_us"], 0), _list(r["peers_us"], 0))
                    for r in rows
                ],
            )
        elif rows and "phase" in rows[0]:
            parts += _table(
                ("shape", "phase", "batch", "adapters", "backend", "tokens/s", "base", "kept"),
                [
                    (
                        r["shape"], r["phase"], r["batch"], r["adapters"], r["backend"],
                        f"{r['tokens_per_second']:.0f}", f"{r['base_tokens_per_second']:.0f}",
                        f"{r['tokens_per_second'] / r['base_tokens_per_second']:.1%}",
                    )
                    for r in rows
                ],
            )  # fmt: skip
        elif rows:
            parts += _table(
                (
                    "cell",
                    "base, us",
                    "ours, us",
                    "best peer, us",
                    "bar",
                    "limit",
                    "best of ours / peer",
                ),
                [_cells(r) for r in sorted(rows, key=lambda r: (kind(r), describe(r)))],
            )
        parts.append("")
    return "\n".join(parts)


def summary(files: Iterable[Path]) -> str:
    """Geometric means against the best peer, cells at their bar, and the worst cells, as Markdown."""
    lines = [
        (
            "backend",
            "cells",
            "measured",
            "mean of ours / best peer",
            "at their bar",
            f"above {NO_CELL_ABOVE}",
            "worst",
        )
    ]
    for path in files:
        rows = [row for row in json.loads(path.read_text())["rows"] if row.get("ours")]
        names: list[str | None] = [*sorted({name for row in rows for name in row["ours"]})]
        for name in [*names, None] if len(names) > 1 else names:
            for group, entries in sorted(ratios(rows, name).items()):
                mine = [
                    (min(r["ours"].values()) if name is None else r["ours"][name], r)
                    for _, r in entries
                ]
                worst = sorted(entries, key=lambda e: -e[0])[:3]
                lines.append(
                    (
                        name or "best of ours",
                        group,
                        str(len(entries)),
                        f"{geometric_mean([ratio for ratio, _ in entries]):.2f}",
                        str(sum(us <= (bar_us(r) or 0.0) for us, r in mine)),
                        str(sum(ratio > NO_CELL_ABOVE for ratio, _ in entries)),
                        "; ".join(f"{describe(r)}: {ratio:.2f}" for ratio, r in worst),
                    )
                )
    return "\n".join(_table(lines[0], lines[1:]))


def _cells(row: Row) -> tuple[object, ...]:
    best, bar, ours = best_peer_us(row), bar_us(row), row["ours"]
    peer = min(row["peers"].items(), key=lambda item: item[1]) if row["peers"] else None
    ratio = f"{min(ours.values()) / best:.2f}" if ours and best else ""
    mark = "" if row.get("counts", True) else " (wide interval)"
    return (
        describe(row) + mark,
        "" if row.get("base_us") is None else f"{row['base_us']:.1f}",
        _list(ours, 1),
        "" if peer is None else f"{peer[0]} {peer[1]:.1f}",
        "" if bar is None else f"{bar:.1f}",
        f"{row['limit_us']:.1f}",
        ratio,
    )


def _list(times: dict[str, float], digits: int) -> str:
    return ", ".join(
        f"{n} {us:.{digits}f}" for n, us in sorted(times.items(), key=lambda item: item[1])
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]
