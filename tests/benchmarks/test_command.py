"""The command: resuming, budgets, filters, a lost device, merging and reporting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import dense
from benchmarks.grid import DenseCell


def cell(tokens: int) -> DenseCell:
    return DenseCell("toy", 32, (16,), tokens, 2, 4, 4, 8, "even", tokens, 1.0)


CELLS = [cell(2), cell(3), cell(4)]


@pytest.fixture(autouse=True)
def toy_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "dense_cells", lambda _: CELLS)


def run(out: Path, *more: str) -> int:
    return command.main(
        ["dense", "--backends", "torch", "--device", "cpu", "--cell-s", "0.01", "--commit", "c1",
         "--out", str(out), *more]
    )  # fmt: skip


def tokens_of(out: Path) -> list[int]:
    return [row["tokens"] for row in json.loads(out.read_text())["rows"]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every cell that is measured; the rows count whatever their intervals are."""
    measured: list[int] = []
    real = dense.measure

    def measure(cell: DenseCell, *args: Any, **options: Any) -> dict[str, Any]:
        measured.append(cell.tokens)
        return {**real(cell, *args, **options), "counts": True}

    monkeypatch.setattr(dense, "measure", measure)
    return measured


def test_a_run_measures_every_cell_once(tmp_path: Path, counted: list[int]) -> None:
    out = tmp_path / "dense.json"
    assert run(out) == 0
    assert run(out) == 0
    assert counted == [2, 3, 4]
    assert tokens_of(out) == [2, 3, 4]
    run(out, "--again")
    assert counted == [2, 3, 4, 2, 3, 4]


def test_a_spent_budget_stops_and_says_how_far_it_came(
    tmp_path: Path, counted: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "dense.json", "--budget-s", "0") == 0
    assert counted == []
    assert "after 0 of 3 cells" in capsys.readouterr().out


def test_filters(tmp_path: Path, counted: list[int]) -> None:
    run(tmp_path / "a.json", "--only", "tokens=3,")
    run(tmp_path / "b.json", "--phase", "prefill")
    assert counted == [3]


def test_a_cell_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(monkeypatch, 3, "no memory")
    assert run(tmp_path / "dense.json") == 0
    assert tokens_of(tmp_path / "dense.json") == [2, 4]
    assert "no memory" in capsys.readouterr().err


def test_a_lost_device_ends_the_run_and_the_next_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dense.json"
    fail_at(monkeypatch, 3, "CUDA error: an illegal memory access was encountered")
    assert run(out) == command.LOST_DEVICE
    assert run(out) == 0
    assert tokens_of(out) == [2, 3, 4]
    lost = json.loads(out.read_text())["rows"][1]
    assert lost["ours"] == {}
    assert "illegal memory access" in lost["errors"]["torch"]


def fail_at(monkeypatch: pytest.MonkeyPatch, tokens: int, message: str) -> None:
    real = dense.measure

    def measure(cell: DenseCell, *args: Any, **options: Any) -> dict[str, Any]:
        if cell.tokens == tokens:
            raise RuntimeError(message)
        return {**real(cell, *args, **options), "counts": True}

    monkeypatch.setattr(dense, "measure", measure)


def test_warming_times_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    monkeypatch.setattr(dense, "warm", lambda cell, *_, **__: warmed.append(cell.tokens))
    assert run(tmp_path / "dense.json", "--warm", "1/2") == 0
    assert warmed == [3]
    assert not (tmp_path / "dense.json").exists()


def test_warming_runs_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    real = dense.our_step
    monkeypatch.setattr(
        dense,
        "our_step",
        lambda problem, backend: called.append(backend.name) or real(problem, backend),
    )
    dense.warm(CELLS[0], ["torch"], None, device=command.torch.device("cpu"))
    assert called == ["torch"]


def test_merge_report_tables_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a.json", "--only", "tokens=2,")
    run(tmp_path / "b.json", "--only", "tokens=4,")
    both = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    for arguments in (["merge", str(tmp_path / "all.json"), *both], ["report", *both], ["tables", *both], ["summary", *both],
                      ["plots", str(tmp_path / "pictures"), *both]):  # fmt: skip
        assert command.main(arguments) == 0
    assert tokens_of(tmp_path / "all.json") == [2, 4]
    out = capsys.readouterr().out
    assert "2 rows in" in out
    assert "| toy T=4 x2 r4" in out


def test_host_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.host, "_sites", lambda: [cell(4)])
    monkeypatch.setattr(command.host, "_CALLS", 10)
    monkeypatch.setattr(command.host, "host_us", short(command.host.host_us))
    out = tmp_path / "host.json"
    assert command.main(["host", "--backends", "torch", "--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(row["what"], row["requests"]) for row in rows} >= {
        ("prepare_batch, eager", 256), ("prepare_batch, decode graph", 1), ("one site, eager: toy", 4)
    }  # fmt: skip
    assert all(set(row["ours_us"]) == {"torch"} and row["peers_us"] == {} for row in rows)


def short(host_us: Any) -> Any:
    return lambda call, device: host_us(call, device, calls=10)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused: Sequence[str] = ["sparse"]
    with pytest.raises(SystemExit):
        command.main(refused)
    assert "invalid choice" in capsys.readouterr().err
