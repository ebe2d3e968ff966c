"""Times tile candidates of this backend's kernels: `python tune.py [--json FILE] [--peers DIR]`.

Few rows: a CUDA graph of layers whose weights rotate, base product and then what LoRA adds; the number
is the median of paired differences to the base alone. Many rows: the kernel alone. Microseconds per
site. Every candidate is held against float32, and against the bits of the first: a tile changes who
computes an element, never how. What it prints is where the rows of `lora_core_triton/tables.py` come from.

`--compile I/N` only fills Triton's cache with every N-th candidate, so that processes share the work.
With a peers kit (docs/performance.md) the whole site is timed beside sglang's triton_v2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lora_core import LoRABatch, LoRAWeights, SliceLayout
from lora_core.triton_kit import Rule, Tile, TileTable
from lora_core_triton import expand as expand_module
from lora_core_triton import shrink as shrink_module
from lora_core_triton import sites, tables
from lora_core_triton.backend import TritonBackend

SITES = {
    "o": (4096, (4096,)),
    "qkv": (4096, (4096, 1024, 1024)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
    "gate_up70": (8192, (28672, 28672)),
    "qkv70tp8": (8192, (1024, 128, 128)),
}


class Point(NamedTuple):
    """One shape.

    Attributes:
        site: of `SITES`.
        tokens: rows.
        adapters: different ones in the batch, round-robin over the requests.
        requests: of equal length.
        rank: of every adapter.
        slots: of the pool.
        max_rank: of the pool.
    """

    site: str
    tokens: int
    adapters: int
    requests: int
    rank: int
    slots: int
    max_rank: int

    def __str__(self) -> str:
        return f"{self.site} T={self.tokens} x{self.adapters} r{self.rank}"

    @property
    def few(self) -> bool:
        """Decode: one row per request."""
        return self.tokens <= tables.GATHERED_MAX_ROWS


DECODE = [
    Point("gate_up", 32, 8, 32, 16, 8, 64),
    Point("down", 8, 8, 8, 16, 8, 64),
    Point("gate_up", 8, 8, 8, 16, 8, 64),
    Point("o", 32, 8, 32, 16, 8, 64),
    Point("o", 32, 8, 32, 64, 8, 64),
    Point("qkv", 1, 1, 1, 16, 8, 64),
    Point("gate_up", 128, 8, 128, 16, 8, 64),
    Point("gate_up", 128, 128, 128, 16, 128, 64),
    Point("gate_up", 32, 32, 32, 64, 32, 64),
]
PREFILL = [
    Point("gate_up", 8192, 1, 8, 64, 8, 64),
    Point("gate_up", 8192, 8, 8, 128, 8, 128),
    Point("gate_up", 8192, 8, 8, 16, 8, 64),
    Point("o", 8192, 8, 8, 16, 8, 64),
    Point("o", 8192, 1, 8, 64, 8, 64),
    Point("down", 8192, 1, 8, 64, 8, 64),
    Point("qkv", 8192, 8, 8, 128, 8, 128),
    Point("o", 2048, 8, 8, 16, 8, 64),
    Point("gate_up", 2048, 8, 8, 16, 8, 64),
    Point("qkv70tp8", 4096, 8, 8, 16, 8, 64),
]


@dataclass(frozen=True)
class Candidate:
    """A tile of one kernel; None is what the table has."""

    kernel: str  # expand | shrink
    tile: Tile | None = None

    def __str__(self) -> str:
        if self.tile is None:
            return f"{self.kernel} table"
        words = " ".join(f"{name}{value}" for name, value in self.tile.constexprs.items())
        return f"{self.kernel} {words} w{self.tile.num_warps} s{self.tile.num_stages}"


def candidates(point: Point) -> Iterator[Candidate]:
    """What is tried at one point."""
    yield Candidate("expand")
    yield Candidate("shrink")
    if point.few:
        for bn, panel, warps in (
            *((64, 1, 2), (128, 1, 4), (128, 1, 8), (128, 2, 4), (128, 4, 4), (256, 1, 8)),
        ):
            for overtakes in (0, 1):
                shape = {"BM": 16, "BN": bn, "BR": 64, "PANEL": panel, "OVERTAKES": overtakes}
                yield Candidate("expand", Tile(shape, warps, 3))
        for bc, bk, group, warps, stages in (
            *((16, 128, 1, 4, 4), (32, 128, 1, 4, 4), (64, 128, 1, 4, 4), (64, 128, 1, 4, 3)),
            *((64, 128, 1, 4, 2), (64, 128, 1, 8, 3), (64, 128, 4, 4, 4), (64, 64, 1, 4, 4)),
        ):
            shape = {"BM": 16, "BC": bc, "BK": bk, "GROUP": group}
            yield Candidate("shrink", Tile(shape, warps, stages))
        return
    for bm, bn, panel, warps in (
        *((32, 128, 1, 4), (64, 64, 1, 4), (64, 64, 2, 4), (64, 64, 4, 4), (64, 64, 8, 4)),
        *((64, 128, 1, 4), (64, 128, 1, 8), (64, 128, 2, 8), (64, 128, 4, 8), (64, 256, 1, 8)),
    ):
        shape = {"BM": bm, "BN": bn, "BR": point.max_rank, "PANEL": panel, "OVERTAKES": 0}
        yield Candidate("expand", Tile(shape, warps, 3))
    for bm, bc, bk, group, warps, stages in (
        *((16, 64, 128, 0, 4, 4), (32, 64, 128, 0, 4, 3), (32, 128, 128, 0, 8, 3)),
        *((64, 64, 128, 0, 4, 3), (64, 64, 128, 0, 8, 4), (64, 128, 128, 0, 8, 3)),
        *((64, 128, 64, 0, 8, 4), (64, 64, 128, 2, 4, 3)),
    ):
        shape = {"BM": bm, "BC": bc, "BK": bk, "GROUP": group}
        yield Candidate("shrink", Tile(shape, warps, stages))


def apply(candidate: Candidate) -> None:
    """Put its tile into the tables, and nothing else."""
    for module, name in ((expand_module, "EXPAND"), (shrink_module, "SHRINK")):
        own = getattr(tables, name)
        hit = candidate.tile is not None and candidate.kernel == own.name
        rules = [Rule(candidate.tile, "candidate")] if hit and candidate.tile is not None else None
        setattr(module, name, TileTable(own.name, own.keys, rules) if rules else own)
    sites._sites.clear()


class Problem:
    """One point made concrete: rotating layers, a backend with a prepared graph batch."""

    def __init__(self, point: Point, layers: int) -> None:
        self.point = point
        k, widths = SITES[point.site]
        self.layout = SliceLayout(widths)
        device, dtype, n = torch.device("cuda"), torch.bfloat16, sum(widths)
        self.x = torch.randn(point.tokens, k, device=device, dtype=dtype)
        self.w = [torch.randn(n, k, device=device, dtype=dtype) * k**-0.5 for _ in range(layers)]
        self.backend = TritonBackend(device=device)
        kind = "decode" if point.few else "prefill"
        self.backend.init_graph(kind, max_requests=point.requests, max_tokens=point.tokens)
        self.lengths = [point.tokens // point.requests] * point.requests
        self.of_requests = [i % point.adapters for i in range(point.requests)]
        batch = LoRABatch(self.lengths, self.of_requests, kind)
        self.backend.prepare_batch(batch, graph=kind)
        self.weights = [self._adapters(k, dtype) for _ in range(layers)]
        self.outs = [torch.randn(point.tokens, n, device=device, dtype=dtype) for _ in self.weights]
        self.h = self.shrink(self.weights[0])

    def _adapters(self, k: int, dtype: torch.dtype) -> LoRAWeights:
        """A pool, NaN wherever no adapter lies."""
        point = self.point
        made = self.backend.allocate_weights(
            num_slots=point.slots,
            max_rank=point.max_rank,
            in_features=k,
            layout=self.layout,
            dtype=dtype,
        )
        made.a.normal_(std=k**-0.5)
        made.b.normal_(std=point.rank**-0.5)
        made.a[:, :, point.rank :].fill_(torch.nan)
        made.b[:, :, point.rank :].fill_(torch.nan)
        made.ranks.fill_(point.rank)
        made.scalings.fill_(1.25)
        return made

    def shrink(self, weights: LoRAWeights) -> Tensor:
        """The kernel, as `linear` launches it in a graph."""
        backend, info = self.backend, self.backend.batch_info
        assert info is not None
        tiles = backend._tiles(info, info.work, len(self.x), weights)
        space = backend.workspace
        return shrink_module.shrink(
            self.x, weights, info.work, info.meta, space, tiles, scratch=False
        )

    def expand(self, weights: LoRAWeights, out: Tensor) -> Tensor:
        """The same, of an h made before."""
        info = self.backend.batch_info
        assert info is not None
        tiles = self.backend._tiles(info, info.work, len(out), weights)
        overtakes = self.point.few
        expand_module.expand(
            self.h, weights, out, info.work, info.meta, tiles, may_overtake=overtakes
        )
        return out

    def base(self) -> list[Tensor]:
        """The base product of every layer."""
        return [torch.mm(self.x, w.T) for w in self.w]

    def whole(self) -> list[Tensor]:
        """Base, shrink and expand through the backend."""
        return [
            self.backend.linear(self.x, lambda x, w=w: torch.mm(x, w.T), weights)
            for w, weights in zip(self.w, self.weights, strict=True)
        ]

    def step(self, candidate: Candidate) -> Callable[[], list[Tensor]]:
        """What is captured and timed."""
        if not self.point.few:
            if candidate.kernel == "shrink":
                return lambda: [self.shrink(weights) for weights in self.weights]
            return lambda: [
                self.expand(weights, out)
                for weights, out in zip(self.weights, self.outs, strict=True)
            ]
        if candidate.kernel == "shrink":
            return self.whole
        return lambda: [
            self.expand(weights, torch.mm(self.x, w.T))
            for weights, w in zip(self.weights, self.w, strict=True)
        ]

    def result(self, candidate: Candidate) -> Tensor:
        """What the candidate computes for the first layer."""
        if candidate.kernel == "shrink":
            return self.shrink(self.weights[0])[:, :, : self.point.rank].clone()
        start = torch.randn(
            self.outs[0].shape,
            device=self.x.device,
            dtype=self.x.dtype,
            generator=torch.Generator(self.x.device).manual_seed(1),
        )
        return self.expand(self.weights[0], start)

    def error(self, candidate: Candidate, got: Tensor) -> float:
        """Relative error in float32 of up to 1024 rows."""
        weights, rank = self.weights[0], self.point.rank
        rows = torch.arange(0, len(self.x), max(1, len(self.x) // 1024), device=self.x.device)
        slots = torch.tensor(self.of_requests).repeat_interleave(torch.tensor(self.lengths))
        slots = slots.to(rows.device)[rows]
        h = torch.zeros(len(rows), self.layout.num_slices, rank, device=rows.device)
        delta = torch.zeros(len(rows), self.layout.out_features, device=rows.device)
        for slot in set(self.of_requests):
            live = slots == slot
            for s in range(self.layout.num_slices):
                span = slice(*self.layout.offsets[s : s + 2])
                h[live, s] = self.x[rows[live]].float() @ weights.a[slot, s, :rank].float().T
                delta[live, span] = 1.25 * h[live, s] @ weights.b[slot, span, :rank].float().T
        if candidate.kernel == "shrink":
            return float((got[rows] - h).norm() / h.norm())
        shape = self.outs[0].shape
        generator = torch.Generator(rows.device).manual_seed(1)
        start = torch.randn(shape, device=rows.device, dtype=self.x.dtype, generator=generator)
        return float((got[rows].float() - start[rows].float() - delta).norm() / delta.norm())

    def peer(self, kit: Any) -> Callable[[], list[Tensor]]:
        """The whole site by sglang's triton_v2."""
        n, rank = self.layout.num_slices, self.point.rank
        count = self.point.adapters
        a = [torch.cat([w.a[:count, s, :rank] for s in range(n)], 1) for w in self.weights]
        b = [w.b[:count, :, :rank].contiguous() for w in self.weights]
        info = kit.build_v2_info(
            self.lengths, self.of_requests, [rank] * count, [1.25] * count, count, self.x.device
        )
        offsets = list(self.layout.offsets)

        def step() -> list[Tensor]:
            info.new_forward()
            return [
                kit.v2_apply(self.x, lambda w=w: torch.mm(self.x, w.T), a[i], b[i], info, offsets)
                for i, w in enumerate(self.w)
            ]

        return step


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Warm up and capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = step()
    graph.kept = kept  # outputs at fixed addresses
    return graph


def timed(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each in turn, `rounds` times after one that does not count."""
    marks = {name: (torch.cuda.Event(True), torch.cuda.Event(True)) for name in graphs}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + 1):
        torch.cuda._sleep(200_000)  # the host runs ahead of the device
        for name, graph in graphs.items():
            marks[name][0].record()
            graph.replay()
            marks[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in marks.items():
            if round_:
                samples[name].append(start.elapsed_time(end) * 1e3)
    return samples


def measure(point: Point, deadline: float, kit: Any) -> dict[str, Any]:
    """Time every candidate at one point and print the table."""
    layers = 8 if point.few else 2 if SITES[point.site][1][0] > 8192 else 4
    problem = Problem(point, layers)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    notes: dict[str, str] = {}
    first: dict[str, Tensor] = {}
    for candidate in candidates(point):
        if time.monotonic() > deadline:
            break
        try:
            apply(candidate)
            got = problem.result(candidate)
            error = problem.error(candidate, got)
            if not error < (1e-4 if candidate.kernel == "shrink" else 0.02):
                notes[str(candidate)] = f"WRONG {error:.5f}"
            if not torch.equal(got, first.setdefault(candidate.kernel, got)):
                notes[str(candidate)] = notes.get(str(candidate), "") + " OTHER BITS"
            graphs[str(candidate)] = capture(problem.step(candidate))
        except Exception as error:  # noqa: BLE001 - the other candidates go on
            torch.cuda.synchronize()
            print(f"  FAILED {point} {candidate}: {type(error).__name__} {str(error)[:120]}")
    apply(Candidate("expand"))
    graphs["whole"] = capture(problem.whole)
    if kit is not None:
        graphs["whole, sglang triton_v2"] = capture(problem.peer(kit))
    graphs["base"] = capture(problem.base)
    samples = timed(graphs, 15 if point.few else 6)
    base = samples["base"]
    us = {}
    for name, found in samples.items():
        if name == "base" or (not point.few and not name.startswith("whole")):
            us[name] = statistics.median(found) / layers
        else:
            paired = [took - alone for took, alone in zip(found, base, strict=True)]
            us[name] = statistics.median(paired) / layers
    print(f"{point}", flush=True)
    for name in sorted(us, key=lambda name: (name.split()[0], us[name])):
        print(f"  {us[name]:9.2f}  {name} {notes.get(name, '')}", flush=True)
    return {"point": list(point), "us": {k: round(v, 2) for k, v in us.items()}, "notes": notes}


def compile_all(part: int, parts: int) -> None:
    """Launch each candidate once, on as few rows as take the same kernel."""
    jobs = [(point, c) for point in (*DECODE, *PREFILL) for c in candidates(point)]
    problem: Problem | None = None
    for point, candidate in jobs[part::parts]:
        try:
            if problem is None or problem.point != point:
                problem = Problem(point, 1)
            apply(candidate)
            problem.result(candidate)
        except Exception as error:  # noqa: BLE001 - reported when it is measured
            print(f"  {point} {candidate}: {type(error).__name__} {str(error)[:80]}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--compile", default="")
    parser.add_argument("--only", default="", help="points whose name contains this")
    options = parser.parse_args()
    if options.compile:
        compile_all(*map(int, options.compile.split("/")))
        return
    kit = None
    if options.peers is not None:
        sys.path.insert(0, str(options.peers))
        import sgl_shim as kit  # type: ignore[import-not-found]
    deadline = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    for point in (*PREFILL, *DECODE):
        if options.only not in str(point):
            continue
        if time.monotonic() > deadline:
            print("out of time before", point)
            break
        rows.append(measure(point, deadline, kit))
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
