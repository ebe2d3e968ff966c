"""Pictures of result files, as SVG without any library: lines with the limit drawn in, and bars."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.report import describe
from benchmarks.results import Row

_PALETTE = ("#0b6e4f", "#c84c09", "#3d5a98", "#8b5fbf", "#b8860b", "#777777", "#c2185b", "#2a9d8f")
_LIMIT = "physical limit"
_FLOOR_US = 0.5
_FONT = 'font-family="sans-serif" font-size="11"'
_LETTER = 6.5
"""Width of a letter in that font, rather more than less."""


@dataclass(frozen=True)
class Line:
    """One curve: name, and (x, microseconds) in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


def write(files: Iterable[Path], folder: Path) -> list[Path]:
    """Draw every picture that the rows of some result files allow; returns what was written."""
    rows: list[Row] = []
    cards = set()
    for path in files:
        held = json.loads(path.read_text())
        cards.add(held["card"])
        rows += [row for row in held["rows"] if row.get("ours") and "tokens" in row]
    note = ", ".join(sorted(cards))
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "dense-tokens.svg": _panels(
            _by_tokens(rows), f"Added time against tokens, rank 16, {note}", "tokens"
        ),
        "dense-adapters.svg": _panels(
            _by_adapters(rows),
            f"Added time against adapters, 128 tokens, rank 16, {note}",
            "adapters",
        ),
        "dense-bars.svg": bars(
            _chosen(rows, dense=True), f"Added time per site against peers, {note}"
        ),
        "moe-bars.svg": bars(
            _chosen(rows, dense=False), f"Added time per experts layer against peers, {note}"
        ),
    }
    written = []
    for name, picture in pictures.items():
        if picture is not None:
            (folder / name).write_text(picture)
            written.append(folder / name)
    return written


# -- what is drawn --------------------------------------------------------------------------------


def _even(row: Row) -> bool:
    return "site" in row and row.get("mix") in ("even", "all distinct") and row["rank"] == 16


def _by_tokens(rows: Sequence[Row]) -> dict[str, list[Line]]:
    chosen = [r for r in rows if _even(r) and r["adapters"] == min(8, r["tokens"])]
    return _lines_per_site(chosen, lambda row: float(row["tokens"]))


def _by_adapters(rows: Sequence[Row]) -> dict[str, list[Line]]:
    return _lines_per_site(
        [r for r in rows if _even(r) and r["tokens"] == 128], lambda row: float(row["adapters"])
    )


def _lines_per_site(rows: Sequence[Row], x: Callable[[Row], float]) -> dict[str, list[Line]]:
    panels = {}
    for site in dict.fromkeys(row["site"] for row in rows):
        mine = sorted((r for r in rows if r["site"] == site), key=x)
        if len(mine) < 2:
            continue
        points: dict[str, list[tuple[float, float]]] = {}
        for row in mine:
            for name, us in {**row["ours"], **row["peers"], _LIMIT: row["limit_us"]}.items():
                points.setdefault(name, []).append((x(row), us))
        panels[site] = [Line(name, tuple(p)) for name, p in points.items()]
    return panels


def _chosen(rows: Sequence[Row], *, dense: bool) -> list[Row]:
    if not dense:
        return [row for row in rows if "layout" in row and row["rank"] == 16]
    sizes = {(1, 1), (32, 8), (128, 8), (2048, 8), (8192, 8)}
    return [
        r for r in rows
        if _even(r) and r["site"] in ("o", "qkv", "gate_up", "down") and (r["tokens"], r["adapters"]) in sizes
    ]  # fmt: skip


# -- how ------------------------------------------------------------------------------------------


def _colours(names: Iterable[str]) -> dict[str, str]:
    ordered = [name for name in dict.fromkeys(names) if name != _LIMIT]
    return {name: _PALETTE[i % len(_PALETTE)] for i, name in enumerate(ordered)} | {
        _LIMIT: "#000000"
    }


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... around a range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [
        m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5) if low <= m * 10.0**e <= high
    ]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Logarithmic; values under `low` are drawn at its place."""
    span = math.log(high / low) or 1.0
    return lambda value: start + (end - start) * math.log(max(value, low) / low) / span


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_FONT}{more}>{escape(text)}</text>'
    )


def _document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">',
            '<rect width="100%" height="100%" fill="white"/>',
            _text(width / 2, 18, title, more=' font-weight="bold"'),
            *parts,
            "</svg>\n",
        ]
    )


def _legend(colours: Mapping[str, str], y: float, width: float) -> list[str]:
    needed = [30 + _LETTER * len(name) for name in colours]
    parts, x = [], 20.0
    for (name, colour), room in zip(colours.items(), needed, strict=True):
        parts.append(f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="14" height="8" fill="{colour}"/>')
        parts.append(_text(x + 18, y, name, "start"))
        x += room * max(1.0, width / sum(needed))
    return parts


def _panels(panels: Mapping[str, list[Line]], title: str, x_label: str) -> str | None:
    """One log-log panel per site, two a row."""
    if not panels:
        return None
    colours = _colours(line.name for lines in panels.values() for line in lines)
    across, wide, tall = min(2, len(panels)), 430, 270
    width, height = across * wide + 20, math.ceil(len(panels) / across) * tall + 60
    parts = _legend(colours, 38, width - 40)
    for i, (site, lines) in enumerate(panels.items()):
        left, top = 55 + i % across * wide, 70 + i // across * tall
        right, bottom = left + wide - 80, top + tall - 70
        xs = [x for line in lines for x, _ in line.points]
        ys = [max(us, _FLOOR_US) for line in lines for _, us in line.points]
        to_x = _scale(min(xs), max(xs), left, right)
        to_y = _scale(min(ys), max(ys), bottom, top)
        parts.append(_text((left + right) / 2, top - 8, site))
        for value in _ticks(min(ys), max(ys)):
            y = to_y(value)
            parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#dddddd"/>')
            parts.append(_text(left - 5, y + 4, f"{value:g}", "end"))
        for value in sorted(set(xs)):
            parts.append(_text(to_x(value), bottom + 15, f"{value:g}"))
        parts.append(_text((left + right) / 2, bottom + 32, f"{x_label} (vertical: microseconds)"))
        for line in lines:
            path = "L".join(f"{to_x(x):.1f} {to_y(us):.1f}" for x, us in line.points)
            dash = ' stroke-dasharray="5 4"' if line.name == _LIMIT else ""
            parts.append(
                f'<path d="M{path}" fill="none" stroke="{colours[line.name]}" stroke-width="2"{dash}>'
                f"<title>{escape(line.name)}</title></path>"
            )
    return _document(width, height, title, parts)


def bars(rows: Sequence[Row], title: str) -> str | None:
    """One cluster of bars per row, shorter is better, on a logarithmic scale; the limit is a mark."""
    if not rows:
        return None
    names = [
        *dict.fromkeys(n for r in rows for n in r["ours"]),
        *dict.fromkeys(n for r in rows for n in r["peers"]),
    ]
    colours = _colours([*names, _LIMIT])
    bar, gap, left = 9, 14, max(190, round(20 + _LETTER * max(len(describe(row)) for row in rows)))
    cluster = bar * len(names) + gap
    width, height = 900, 70 + cluster * len(rows)
    values = [
        max(us, _FLOOR_US)
        for r in rows
        for us in [*r["ours"].values(), *r["peers"].values(), r["limit_us"]]
    ]
    low = min(values) / 1.5
    to_x = _scale(low, max(values), left, width - 70)
    parts = _legend(colours, 38, width - 40)
    for value in _ticks(low, max(values)):
        parts.append(f'<path d="M{to_x(value):.1f} 50V{height - 10}" stroke="#dddddd"/>')
        parts.append(_text(to_x(value), height - 2, f"{value:g}"))
    for i, row in enumerate(rows):
        top = 56 + i * cluster
        parts.append(_text(left - 8, top + cluster / 2, describe(row), "end"))
        for j, name in enumerate(names):
            us = {**row["peers"], **row["ours"]}.get(name)
            if us is None:
                continue
            y, end = top + j * bar, to_x(us)
            parts.append(
                f'<rect x="{left}" y="{y}" width="{max(end - left, 1):.1f}" height="{bar - 1}" fill="{colours[name]}">'
                f"<title>{escape(name)}: {us:.1f} us</title></rect>"
            )
            parts.append(
                _text(end + 3, y + bar - 1, f"{us:.1f}", "start", ' style="font-size:8px"')
            )
        mark = to_x(row["limit_us"])
        parts.append(
            f'<path d="M{mark:.1f} {top}v{cluster - gap}" stroke="#000000" stroke-width="2"/>'
        )
    return _document(width, height, title, parts)
