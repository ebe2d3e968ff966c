"""Compare csgmv with triton from a result file: the table of docs/csgmv.md, and its picture.

python docs/pictures/draw_csgmv.py docs/results/dense-h200.json
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "csgmv.md"
PICTURE = HERE / "csgmv.svg"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
BANDS = {
    "1 to 8": (1, 8),
    "32 to 64": (9, 64),
    "128 to 512": (65, 512),
    "2048 and more": (513, 1 << 30),
}
Row = dict[str, Any]


def ratio(row: Row) -> float:
    """Time of csgmv over time of triton, both on top of the base product; below 1 csgmv is faster.

    An overhead under half a microsecond is within the noise of the base and counts as that.
    """
    return max(row["ours"]["csgmv"], 0.5) / max(row["ours"]["triton"], 0.5)


def against_peer(row: Row) -> float:
    """Time of csgmv over the best peer, which counts as at least the limit of the cell."""
    peer = max(min(row["peers"].values()), row["limit_us"])
    return float(max(row["ours"]["csgmv"], 0.5) / peer)


def apart(row: Row) -> bool:
    """Whether the two intervals do not touch."""
    mine, other = row["interval_us"]["csgmv"], row["interval_us"]["triton"]
    return bool(mine[1] < other[0] or other[1] < mine[0])


def table(rows: list[Row]) -> str:
    """Markdown: per band of rows and adapters, the geometric means and who is faster in how many cells."""
    lines = [
        "| rows | adapters | cells | csgmv / triton | csgmv / best peer | csgmv faster | triton faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for band, (low, high) in BANDS.items():
        for adapters in sorted({row["adapters"] for row in rows}):
            mine = [r for r in rows if low <= r["tokens"] <= high and r["adapters"] == adapters]
            if not mine:
                continue
            ratios = [ratio(row) for row in mine]
            peers = [against_peer(row) for row in mine if row["peers"]]
            faster = sum(apart(r) and x < 1 for r, x in zip(mine, ratios, strict=True))
            slower = sum(apart(r) and x > 1 for r, x in zip(mine, ratios, strict=True))
            peer = f"{geometric_mean(peers):.2f}" if peers else ""
            lines.append(
                f"| {band} | {adapters} | {len(mine)} | {geometric_mean(ratios):.2f} | {peer} "
                f"| {faster} | {slower} |"
            )
    return "\n".join(lines)


def picture(rows: list[Row]) -> str:
    """SVG: the ratio of every cell over its rows; the size of a mark is the rank."""
    width, height, left, top, bottom = 760, 380, 60, 40, 50
    colours = {1: "#1f77b4", 8: "#2ca02c", 32: "#d62728", 128: "#9467bd"}
    span = max(0.3, *(abs(math.log2(ratio(row))) for row in rows))
    last = math.log2(max(row["tokens"] for row in rows)) or 1.0

    def x(tokens: float) -> float:
        return left + 20 + (width - left - 60) * math.log2(tokens) / last

    def y(value: float) -> float:
        middle = (top + height - bottom) / 2
        return middle - (height - top - bottom) / 2 * math.log2(value) / span

    def text(at_x: float, at_y: float, words: str, anchor: str = "middle") -> str:
        return (
            f'<text x="{at_x:.0f}" y="{at_y:.0f}" text-anchor="{anchor}" font-family="sans-serif" '
            f'font-size="12">{words}</text>'
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(width / 2, 20, "time of csgmv over time of triton, on top of the base product"),
        f'<line x1="{left}" x2="{width - 20}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="black"/>',
        text(left - 8, y(1) + 4, "1", "end"),
        text(left - 8, top + 4, f"{2**span:.2f}", "end"),
        text(left - 8, height - bottom, f"{2**-span:.2f}", "end"),
        text(width / 2, height - 8, "rows of the forward; larger marks are larger ranks"),
    ]
    parts += [
        text(x(tokens), height - bottom + 18, str(tokens))
        for tokens in sorted({row["tokens"] for row in rows})
        if tokens in (1, 8, 32, 128, 512, 2048, 8192)
    ]
    for i, (adapters, colour) in enumerate(colours.items()):
        at_y = height - bottom - 70 + 16 * i
        label = f"{adapters} adapter" + "s" * (adapters > 1)
        parts.append(f'<circle cx="{left + 100}" cy="{at_y}" r="5" fill="{colour}"/>')
        parts.append(text(left + 112, at_y + 4, label, "start"))
    for row in rows:
        colour = colours.get(row["adapters"], "gray")
        size = 2 + math.log2(row["rank"]) / 1.5
        parts.append(
            f'<circle cx="{x(row["tokens"]):.1f}" cy="{y(ratio(row)):.1f}" r="{size:.1f}" fill="{colour}" '
            f'fill-opacity="0.6"><title>{row["site"]} T={row["tokens"]} r={row["rank"]}</title></circle>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main(source: str) -> None:
    """Write the picture, and the table between the marks of the page."""
    held = json.loads(Path(source).read_text())
    rows = [row for row in held["rows"] if {"csgmv", "triton"} <= set(row.get("ours", {}))]
    if not rows:
        sys.exit(f"{source} has no cell with both csgmv and triton")
    PICTURE.write_text(picture(rows))
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    about = f"{len(rows)} cells on {held['card']}, geometric means; below 1 csgmv is faster."
    PAGE.write_text(f"{before}{BEGIN}\n{about}\n\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1])
