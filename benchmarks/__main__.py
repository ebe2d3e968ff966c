"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import dense, environment, host, moe, plots, report
from benchmarks.grid import DECODE_UP_TO, dense_cells, moe_cells
from benchmarks.peers import kit_versions, load_kit
from benchmarks.results import ResultFile, merge
from lora_core import BackendSpec, list_backends, list_moe_backends

LOST_DEVICE = 3
"""Exit status when a kernel made the device unusable: run the same command again to go on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--out", type=Path, help="result file, added to; default build/bench/WHAT.json"
    )
    common.add_argument(
        "--backends", help="comma-separated; default: all installed but the reference"
    )
    common.add_argument("--peers", type=Path, help="folder of a peers kit")
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    common.add_argument("--budget-s", type=float, default=float("inf"), help="stop after this long")
    common.add_argument("--commit", help="commit to record where the checkout has no history")
    common.add_argument("--again", action="store_true", help="also cells that are measured already")

    grid = argparse.ArgumentParser(add_help=False)
    grid.add_argument("--grid", choices=["smoke", "judged", "full"], default="judged")
    grid.add_argument("--cell-s", type=float, default=2.0, help="time for the rounds of one cell")
    grid.add_argument(
        "--phase", choices=["decode", "prefill"], help="only cells of up to, or over, 512 tokens"
    )
    grid.add_argument(
        "--warm", metavar="I/N", help="only compile what every N-th cell from the I-th on needs"
    )
    grid.add_argument("--only", help="cells whose description contains this text")

    command = commands.add_parser("dense", parents=[common, grid], help="linear sites")
    command.set_defaults(run=_dense)
    command = commands.add_parser("moe", parents=[common, grid], help="experts layers")
    command.set_defaults(run=_moe)
    command = commands.add_parser(
        "host", parents=[common], help="host cost of a batch and of a site"
    )
    command.set_defaults(run=_host)
    command = commands.add_parser(
        "decoder", parents=[common], help="a whole decoder, random weights"
    )
    command.add_argument("--shapes", default="llama-3-8b,qwen3-30b-a3b", help="comma-separated")
    command.add_argument("--first", type=int, help="only so many points, those asked for most")
    command.add_argument("--batches", default="1,8,32,128", help="comma-separated")
    command.add_argument("--adapters", default="1,8,32", help="comma-separated")
    command.add_argument("--phases", default="decode,prefill", help="comma-separated")
    command.add_argument("--peer-names", default="sglang_v2", help="peers to run, comma-separated")
    command.add_argument("--cell-s", type=float, default=2.0, help="time for the rounds of a point")
    command.add_argument(
        "--warm", metavar="I/N", help="only compile what every N-th point from the I-th on needs"
    )
    command.set_defaults(run=_decoder)
    command = commands.add_parser("merge", help="merge result files of one card")
    command.add_argument("target", type=Path)
    command.add_argument("sources", type=Path, nargs="+")
    command.set_defaults(run=lambda o: print(merge(o.target, o.sources), "rows in", o.target) or 0)
    command = commands.add_parser("report", help="tables and bars of result files")
    command.add_argument("files", type=Path, nargs="+")
    command.set_defaults(run=lambda o: print(report.tables(o.files)) or 0)
    command = commands.add_parser("tables", help="every row of result files, as Markdown")
    command.add_argument("files", type=Path, nargs="+")
    command.set_defaults(run=lambda o: print(report.markdown(o.files)) or 0)
    command = commands.add_parser("summary", help="means against the best peer, as Markdown")
    command.add_argument("files", type=Path, nargs="+")
    command.set_defaults(run=lambda o: print(report.summary(o.files)) or 0)
    command = commands.add_parser("plots", help="pictures of result files")
    command.add_argument("folder", type=Path)
    command.add_argument("files", type=Path, nargs="+")
    command.set_defaults(run=_plots)
    return parser


def _plots(options: argparse.Namespace) -> int:
    for path in plots.write(options.files, options.folder):
        print(path)
    return 0


def _names(options: argparse.Namespace, listed: Callable[[], list[BackendSpec]]) -> list[str]:
    if options.backends:
        return [name for name in options.backends.split(",") if name]
    return [spec.name for spec in listed() if spec.name != "torch"]


def _file(options: argparse.Namespace, what: str) -> ResultFile:
    return ResultFile(
        options.out or Path("build/bench") / f"{what}.json",
        card=environment.card(torch.device(options.device)),
        versions=environment.versions(kit_versions(options.peers)),
        commit=options.commit or environment.commit(),
    )


def _dense(options: argparse.Namespace) -> int:
    return _cells(options, "dense", dense_cells(options.grid), dense, list_backends)


def _moe(options: argparse.Namespace) -> int:
    if not options.backends:  # both of what peers do: adding, and writing deltas
        names = _names(options, list_moe_backends)
        options.backends = ",".join(f"{name}{form}" for name in names for form in moe.FORMS)
    return _cells(options, "moe", moe_cells(options.grid), moe, list_moe_backends)


@torch.inference_mode()
def _cells(
    options: argparse.Namespace,
    what: str,
    cells: Sequence[Any],
    benchmark: ModuleType,
    listed: Callable[[], list[BackendSpec]],
) -> int:
    began, device = time.perf_counter(), torch.device(options.device)
    names, kit = _names(options, listed), load_kit(options.peers)
    cells = [cell for cell in cells if not options.only or options.only in repr(cell)]
    if options.phase:
        cells = [c for c in cells if (c.tokens <= DECODE_UP_TO) == (options.phase == "decode")]
    if options.warm:
        index, total = map(int, options.warm.split("/"))
        for cell in cells[index::total]:
            if time.perf_counter() - began < options.budget_s:
                benchmark.warm(cell, names, kit, device=device)
        return 0
    results = _file(options, what)
    for done, cell in enumerate(cells):
        if not options.again and results.has(cell.asked(), names):
            continue
        if time.perf_counter() - began > options.budget_s:
            print(f"time is up after {done} of {len(cells)} cells; run again to go on")
            break
        try:
            row = benchmark.measure(cell, names, kit, device=device, seconds=options.cell_s)
        except Exception as error:  # noqa: BLE001 - one cell must not end the run
            print(f"{cell}: {type(error).__name__}: {error}", file=sys.stderr)
            if "CUDA error" not in str(error):
                continue
            # the device context is lost: keep the cell as failed, so that the next call goes on behind it
            failed = dict.fromkeys(names, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            results.add({**cell.asked(), "ours": {}, "peers": {}, "errors": failed})
            return LOST_DEVICE
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        results.add(row)
        print(report.line(row), flush=True)
    return 0


@torch.inference_mode()
def _host(options: argparse.Namespace) -> int:
    results = _file(options, "host")
    names, kit = _names(options, list_backends), load_kit(options.peers)
    for row in host.rows(names, kit, device=torch.device(options.device)):
        results.add(row)
        print(report.host_line(row), flush=True)
    return 0


@torch.inference_mode()
def _decoder(options: argparse.Namespace) -> int:
    from benchmarks import decoder  # it needs triton, which the other benchmarks do not

    began, device = time.perf_counter(), torch.device(options.device)
    names, kit = _names(options, list_backends), load_kit(options.peers)
    peers = options.peer_names.split(",") if kit is not None else []
    phases = options.phases.split(",")
    batches, adapters = (
        [int(n) for n in o.split(",")] for o in (options.batches, options.adapters)
    )
    points = [
        point
        for point in decoder.POINTS
        if point.phase in phases and point.batch in batches and point.adapters in adapters
    ][: options.first]
    shapes = [decoder.SHAPES[name] for name in options.shapes.split(",")]
    if options.warm:
        index, total = map(int, options.warm.split("/"))
        pairs = [(shape, point) for shape in shapes for point in points][index::total]
        for shape, point in pairs:
            if time.perf_counter() - began < options.budget_s:
                decoder.warm(shape, names, kit, device=device, peers=peers, points=[point])
        return 0
    results = _file(options, "decoder")
    for shape in shapes:

        def wanted(point: decoder.Point, shape: decoder.Shape = shape) -> bool:
            held = {
                row["backend"]
                for row in results.rows.values()
                if (row["shape"], row["phase"], row["batch"], row["adapters"])
                == (shape.name, *point)
                and row["commit"] == results.commit
            }
            missing = not held.issuperset([*decoder.contenders_of(names, shape), *peers])
            return (missing or options.again) and time.perf_counter() - began < options.budget_s

        if not any(map(wanted, points)):
            continue
        for found in decoder.rows(
            shape, names, kit, device=device, peers=peers, points=points, wanted=wanted,
            seconds=options.cell_s,
        ):  # fmt: skip
            for row in found:
                results.add(row)
                print(report.decoder_line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
