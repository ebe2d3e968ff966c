"""Pictures are well-formed, show every contender, and put longer times at longer bars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.dom import minidom

from benchmarks.plots import bars, write


def row(tokens: int, ours: float, peer: float, **changes: Any) -> dict[str, Any]:
    return {
        "site": "o", "tokens": tokens, "adapters": min(8, tokens), "rank": 16, "mix": "even",
        "ours": {"mine": ours}, "peers": {"theirs": peer}, "limit_us": 2.5, **changes,
    }  # fmt: skip


def test_pictures_of_a_result_file(tmp_path: Path) -> None:
    rows = [
        row(1, 3.0, 5.0),
        row(32, 4.0, 7.0),
        row(128, 5.0, 9.0),
        row(128, 6.0, 9.0, adapters=32),
    ]
    (tmp_path / "dense.json").write_text(json.dumps({"card": "a <card>", "rows": rows}))
    written = write([tmp_path / "dense.json"], tmp_path / "pictures")
    assert [p.name for p in written] == ["dense-tokens.svg", "dense-adapters.svg", "dense-bars.svg"]
    for path in written:
        text = minidom.parse(str(path)).documentElement.toxml()
        for name in ("mine", "theirs", "physical limit", "a &lt;card&gt;"):
            assert name in text


def test_no_rows_no_picture(tmp_path: Path) -> None:
    (tmp_path / "dense.json").write_text(json.dumps({"card": "card", "rows": []}))
    assert write([tmp_path / "dense.json"], tmp_path) == []


def test_longer_times_are_longer_bars() -> None:
    picture = bars([row(32, 4.0, 8.0), row(128, 16.0, -1.0)], "title")
    assert picture is not None
    found = re.findall(
        r'<rect x="190" y="\d+" width="([\d.]+)"[^>]*><title>(\w+): (-?[\d.]+)', picture
    )
    widths = {float(us): float(width) for width, _, us in found}
    assert sorted(widths) == [-1.0, 4.0, 8.0, 16.0]
    assert widths[-1.0] < widths[4.0] < widths[8.0] < widths[16.0]
    # logarithmic: equal ratios are equal lengths
    assert abs((widths[8.0] - widths[4.0]) - (widths[16.0] - widths[8.0])) < 0.3
