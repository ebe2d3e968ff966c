"""From pytest's reports of this folder to one file of results: `python -m tests.distributed.report --help`."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch

OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


def rows_of(report: Path) -> list[dict[str, Any]]:
    """One row per test of a JUnit report: where it ran, how it ended, how long it took.

    A test that was interrupted has no name there, and no row here.
    """
    rows = []
    for case in _cases(report):
        if case.get("name") is None:
            continue
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        ended = [child for child in case if child.tag in OUTCOMES]
        row = {
            "test": f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}",
            "world": int(properties.get("world") or 0),
            "transport": properties.get("transport"),
            "backend": properties.get("backend"),
            "outcome": OUTCOMES[ended[0].tag] if ended else "passed",
            "seconds": round(float(case.get("time", 0)), 2),
        }
        if "steps" in properties:
            row["steps"] = int(properties["steps"] or 0)
        if ended:
            row["message"] = (ended[0].get("message") or "").partition("\n")[0][:400]
        rows.append(row)
    return rows


def is_whole(report: Path) -> bool:
    """Whether every test that began has ended."""
    return report.exists() and all(case.get("name") is not None for case in _cases(report))


def _cases(report: Path) -> list[ET.Element]:
    return list(ET.parse(report).getroot().iter("testcase"))


def machine() -> dict[str, Any]:
    """The cards and versions of this machine."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cards:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        versions["driver"] = done.stdout.split("\n")[0].strip()
    return {
        "card": " + ".join(f"{n} x {card}" for card, n in Counter(cards).items()),
        "versions": versions,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="files of pytest --junitxml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="what was tested")
    given = parser.parse_args(arguments)
    rows = sorted(
        (row for report in given.reports if report.exists() for row in rows_of(report)),
        key=lambda row: row["test"],
    )
    lost = [report.name for report in given.reports if not is_whole(report)]
    result = {**machine(), "commit": given.commit, "rows": rows}
    if lost:
        result["unfinished"] = lost
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    lines = [
        f"{row['outcome']}: {row['test']}: {row['message'][:160]}"
        for row in rows
        if row["outcome"] != "passed"
    ]
    counts = Counter((row["backend"], row["outcome"]) for row in rows)
    lines += [f"{key[0]}: {count} {key[1]}" for key, count in sorted(counts.items(), key=str)]
    lines += [f"{report}: that run did not end" for report in lost]
    print("\n".join(lines))  # noqa: T201 - for whoever ran it
    return int(bool(lost) or not rows or any(row["outcome"] != "passed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
