"""docs/support.md is what the generator writes, and the generator counts what the reports say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_core import support

DOCS = Path(__file__).parents[2] / "docs"
REPORT = {
    "backend": "torch",
    "passed": [
        "linear[fp32-r8-K100-N64-seg(2)-slot(0)]",
        "linear[bf16-r8-K100-N64-seg(2)-slot(0)]",
        "graph_replay[decode-2requests-0adapters-rows20-float32]",
        "drawn[250-examples]",
    ],
    "failed": [{"id": "linear[fp32-r1-K9-N8-seg(2)-slot(0)]", "message": "off"}],
    "not_run_for_hardware": [{"id": "no_sync[bf16-r1]", "reason": "needs cuda: ..."}],
    "expected_failures": [{"id": "expand[fp32-r1]", "reason": "issue 12"}],
    "previews_failed": [{"id": "newer[fp32-r1]", "message": "off"}],
    "device": "cuda:1 (NVIDIA A100)",
    "level": "smoke",
    "commit": "abc",
    "versions": {"torch": "2.11", "triton": "3.6", "python": "3.12"},
}


def write(folder: Path, **changes) -> Path:
    (folder / "conformance-any.json").write_text(json.dumps({**REPORT, **changes}))
    return folder


def test_the_page_is_what_claims_and_reports_give():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "lora_core.support", DOCS / "results"],
        capture_output=True, text=True, check=True, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (DOCS / "support.md").read_text(encoding="utf-8") == done.stdout, (
        "write it anew: python -m lora_core.support docs/results > docs/support.md"
    )


def test_a_report_is_counted_by_dtype(tmp_path):
    lines = support.page(write(tmp_path)).splitlines()
    assert (
        "| `torch` | cuda:1 (NVIDIA A100) | smoke | 2 of 5, **1 failed**, 2 known to fail | **not run** "
        "| 1 of 2, 1 not run | 1 of 1 | abc | torch 2.11, Triton 3.6, Python 3.12 |"
    ) in lines
    told = [line for line in lines if line.startswith("- `torch`")]
    assert told == [
        "- `torch`, cuda:1 (NVIDIA A100): `linear[fp32-r1-K9-N8-seg(2)-slot(0)]` **failed**.",
        "- `torch`, cuda:1 (NVIDIA A100): `newer[fp32-r1]` **failed as a preview**.",
        "- `torch`, cuda:1 (NVIDIA A100): `expand[fp32-r1]` is expected to fail: issue 12.",
    ]


def test_claimed_devices_without_a_report_are_said_to_be_not_run(tmp_path):
    rows = [
        row for row in support.page(write(tmp_path)).splitlines() if row.startswith("| `torch`")
    ]
    dense, experts = (
        [row.split(" | ")[1:4] for row in part]
        for part in (rows[:2], rows[2:])
    )  # fmt: skip
    assert dense[1] == ["cpu", "**not run**", "**not run**"]
    assert experts == [[device, "**not run**", "**not run**"] for device in ("cpu", "cuda")]


def test_kernels_that_claim_only_cuda_ran_in_the_interpreter(tmp_path):
    page = support.page(write(tmp_path, backend="triton", device="cpu (x86_64)"))
    assert "| `triton` | cpu (x86_64), Triton's interpreter | smoke |" in page
    assert "| `triton` | cuda | **not run** |" in page


def test_the_two_torch_backends_are_told_apart_by_their_checks(tmp_path):
    page = support.page(write(tmp_path, passed=["experts_allocate_weights[once]"], failed=[]))
    dense, experts = page.split("## Experts\n")
    assert "A100" not in dense
    assert "A100" in experts


def test_a_report_of_a_backend_that_is_not_installed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="report of 'mine', which is not installed"):
        support.page(write(tmp_path, backend="mine"))
