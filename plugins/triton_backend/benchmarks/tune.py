"""Times tile candidates of this backend's kernels: `python tune.py [--seconds S] [--json FILE]`.

Every candidate is a whole CUDA graph of layers whose weights rotate: base product, then what LoRA
adds. Base and candidates are replayed in turn; the number is the median of paired differences, in
microseconds per site. What it prints is where the rows of `lora_core_triton/tables.py` come from.
`--compile I/N` only fills Triton's cache with every N-th candidate, so that processes share the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_core import LoRABatch, LoRAWeights, SliceLayout, load_backend
from lora_core.triton_kit import Rule, Tile, TileTable
from lora_core_triton import expand as expand_module
from lora_core_triton import shrink as shrink_module
from lora_core_triton import sites, tables

SITES = {
    "o": (4096, (4096,)),
    "qkv": (4096, (4096, 1024, 1024)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
DECODE = [  # site, tokens, adapters, rank, slots
    ("o", 1, 1, 16, 8),
    ("o", 32, 8, 16, 8),
    ("o", 512, 8, 16, 8),
    ("qkv", 32, 8, 16, 8),
    ("qkv", 128, 32, 16, 32),
    ("gate_up", 32, 8, 16, 8),
    ("gate_up", 32, 32, 64, 32),
    ("gate_up", 128, 8, 16, 8),
    ("down", 32, 8, 16, 8),
]
PREFILL = [("o", 8192, 8, 16, 8), ("gate_up", 2048, 8, 16, 8)]


@dataclass(frozen=True)
class Variant:
    """One candidate: which form, and the tiles it differs in (None: the table's own)."""

    form: str  # serial | overlap | late | high | shrink | expand
    shrink: Tile | None = None
    expand: Tile | None = None
    split: int = 512

    def __str__(self) -> str:
        tile = self.expand or self.shrink
        words = "" if tile is None else " ".join(f"{k}{v}" for k, v in tile.constexprs.items())
        words += "" if tile is None else f" w{tile.num_warps} s{tile.num_stages}"
        return f"{self.form} {words}" + (f" SPLIT{self.split}" if self.split != 512 else "")


def decode_variants(site: str, rank: int) -> Iterator[Variant]:
    """Candidates for few rows."""
    yield from (Variant("overlap"), Variant("late"), Variant("high"))
    for overtakes in (0, 1) if site in ("o", "down") else (0,):
        for bn, warps in ((64, 2), (128, 2), (128, 4), (256, 4), (256, 8)):
            for br in sorted({16, min(rank, 64)}):
                tile = Tile({"BM": 16, "BN": bn, "BR": br, "OVERTAKES": overtakes}, warps, 3)
                yield Variant("expand", expand=tile)
                if overtakes and bn == 32 * warps:
                    yield Variant("overlap", expand=tile)
    for bc, bk, warps, split, stages in (
        (16, 128, 4, 512, 4), (64, 128, 4, 512, 4), (32, 128, 4, 256, 2), (32, 256, 4, 512, 2), (32, 128, 4, 1024, 4),
    ):  # fmt: skip
        tile = Tile({"BM": 16, "BC": bc, "BK": bk, "GROUP": 1}, warps, stages)
        yield Variant("overlap", shrink=tile, split=split)


def prefill_variants() -> Iterator[Variant]:
    """Candidates for many rows."""
    yield Variant("serial")
    for bm, bn, warps in ((16, 128, 4), (32, 128, 4), (32, 128, 2), (64, 128, 4)):
        yield Variant(
            "expand", expand=Tile({"BM": bm, "BN": bn, "BR": 16, "OVERTAKES": 0}, warps, 3)
        )
    for bm, bc, bk, group, warps, stages in (
        (32, 32, 64, 0, 4, 4), (32, 32, 128, 0, 4, 3), (64, 32, 64, 0, 4, 3), (64, 32, 64, 0, 4, 4), (64, 32, 64, 2, 4, 4),
        (64, 16, 64, 0, 4, 4), (64, 32, 128, 0, 4, 3), (16, 32, 128, 0, 4, 3),
    ):  # fmt: skip
        tile = Tile({"BM": bm, "BC": bc, "BK": bk, "GROUP": group}, warps, stages)
        yield Variant("shrink", shrink=tile)


def variants_of(point: tuple[str, int, int, int, int]) -> list[Variant]:
    """All candidates at one point."""
    return list(decode_variants(point[0], point[3]) if point[1] <= 512 else prefill_variants())


class Problem:
    """One point: rotating layers, a backend with a prepared graph batch."""

    def __init__(self, point: tuple[str, int, int, int, int], layers: int) -> None:
        site, tokens, adapters, rank, slots = point
        self.k, widths = SITES[site]
        self.layout, self.layers = SliceLayout(widths), layers
        device, dtype, n = torch.device("cuda"), torch.bfloat16, sum(widths)
        self.backend: Any = load_backend("triton")
        self.x = torch.randn(tokens, self.k, device=device, dtype=dtype)
        self.w = [
            torch.randn(n, self.k, device=device, dtype=dtype) * self.k**-0.5 for _ in range(layers)
        ]
        self.weights: list[LoRAWeights] = []
        for _ in range(layers):
            made = self.backend.allocate_weights(
                num_slots=slots, max_rank=64, in_features=self.k, layout=self.layout, dtype=dtype
            )
            made.a.normal_(std=self.k**-0.5)
            made.b.normal_(std=rank**-0.5)
            made.a[:, :, rank:].fill_(torch.nan)
            made.b[:, :, rank:].fill_(torch.nan)
            made.ranks.fill_(rank)
            made.scalings.fill_(1.0)
            self.weights.append(made)
        decode = tokens <= 512
        lengths = [1] * tokens if decode else [tokens // adapters] * adapters
        kind = "decode" if decode else "prefill"
        self.backend.init_graph(kind, max_requests=len(lengths), max_tokens=tokens)
        self.row_slots = (
            [i % adapters for i in range(tokens)]
            if decode
            else [i // (tokens // adapters) for i in range(tokens)]
        )
        of_requests = [i % adapters for i in range(len(lengths))]
        self.backend.prepare_batch(LoRABatch(lengths, of_requests, kind), graph=kind)
        self.h = self.backend.shrink(self.x, self.weights[0])

    def base(self) -> None:
        for w in self.w:
            torch.mm(self.x, w.T)

    def step(self, form: str) -> list[torch.Tensor]:
        outs = []
        for w, weights in zip(self.w, self.weights, strict=True):
            if form == "shrink":
                torch.mm(self.x, w.T)
                outs.append(self.backend.shrink(self.x, weights))
                continue
            if form in ("overlap", "late", "high"):
                main, side = torch.cuda.current_stream(), SIDES[form]
                fork = torch.cuda.Event()
                fork.record(main)
                out = torch.mm(self.x, w.T) if form == "late" else None
                side.wait_event(fork)
                with torch.cuda.stream(side):
                    h = self.backend.shrink(self.x, weights)
                out = torch.mm(self.x, w.T) if out is None else out
                main.wait_stream(side)
            else:
                out = torch.mm(self.x, w.T)
                h = self.h if form == "expand" else self.backend.shrink(self.x, weights)
            info = self.backend.batch_info  # as `linear` does it in a graph
            tiles = self.backend._tiles(info, info.work, len(out), weights)
            launch = expand_module.expand
            launch(h, weights, out, info.work, info.meta, tiles, may_overtake=True)
            outs.append(out)
        return outs

    def error(self, out: torch.Tensor) -> float:
        """Relative error of the first layer's delta in float32."""
        w, weights = self.w[0], self.weights[0]
        slots = torch.tensor(self.row_slots, device="cuda")
        base, delta = self.x.float() @ w.float().T, torch.zeros_like(out, dtype=torch.float32)
        for slot in set(self.row_slots):
            rank = int(weights.ranks[slot, 0])
            rows = self.x[slots == slot].float()
            for s in range(self.layout.num_slices):
                span = slice(*self.layout.offsets[s : s + 2])
                h = rows @ weights.a[slot, s, :rank].float().T
                delta[slots == slot, span] = h @ weights.b[slot, span, :rank].float().T
        return float((out.float() - base - delta).norm() / delta.norm())


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
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


SIDES: dict[str, torch.cuda.Stream] = {}


def applied(variant: Variant) -> None:
    """Put the candidate's tiles into the tables."""
    for module, name, tile in (
        (shrink_module, "SHRINK", variant.shrink),
        (expand_module, "EXPAND", variant.expand),
    ):
        own = getattr(tables, name)
        rules = [Rule(tile, "candidate")]
        setattr(module, name, own if tile is None else TileTable("candidate", own.keys, rules))
        module._launch.cache_clear()
    shrink_module.SPLIT = variant.split
    sites._sites.clear()


def once(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(40_000)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measure(
    point: tuple[str, int, int, int, int], rounds: int, deadline: float
) -> list[dict[str, Any]]:
    decode = point[1] <= 512
    layers = 8 if decode else 4
    problem = Problem(point, layers)
    variants = variants_of(point)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    firsts: dict[str, torch.Tensor] = {}
    for variant in variants:
        if time.monotonic() > deadline:
            break
        try:
            applied(variant)
            graphs[str(variant)] = capture(lambda variant=variant: problem.step(variant.form))
            graphs[str(variant)].replay()
            torch.cuda.synchronize()
            kept = graphs[str(variant)].kept[0]
            if variant.form not in ("shrink", "expand"):
                error = problem.error(kept)
                if not error < 0.02:
                    print(f"  WRONG {point} {variant}: {error:.4f}", flush=True)
            elif variant.split == 512:  # every tile gives the same bits
                live = kept[:, :, : point[3]].clone() if variant.form == "shrink" else kept.clone()
                if not torch.equal(live, firsts.setdefault(variant.form, live)):
                    print(f"  OTHER BITS {point} {variant}", flush=True)
        except Exception as error:  # noqa: BLE001 - the other candidates go on
            torch.cuda.synchronize()
            print(
                f"  FAILED {point} {variant}: {type(error).__name__} {str(error)[:160]}", flush=True
            )
    base = capture(problem.base)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    bases = []
    for _ in range(rounds):
        before = once(base)
        bases.append(before / layers)
        for name, graph in graphs.items():
            samples[name].append((once(graph) - before) / layers)
    rows = [
        {"point": list(point), "variant": name, "us": round(statistics.median(found), 2)}
        for name, found in samples.items()
    ]
    print(f"{point} base {statistics.median(bases):.1f} us", flush=True)
    for row in sorted(rows, key=lambda row: (row["variant"].split()[0], row["us"])):
        print(f"   {row['us']:8.2f}  {row['variant']}", flush=True)
    return [
        {"point": list(point), "variant": "base", "us": round(statistics.median(bases), 2)},
        *rows,
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", default="")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    SIDES.update(
        overlap=torch.cuda.Stream(), late=torch.cuda.Stream(), high=torch.cuda.Stream(priority=-1)
    )
    deadline = time.monotonic() + options.seconds
    points = [p for p in [*DECODE, *PREFILL] if options.only in f"{p[0]}-{p[1]}"]
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        jobs = [(point, variant) for point in points for variant in variants_of(point)]
        problem, last = None, None
        for point, variant in jobs[part::parts]:
            if time.monotonic() > deadline:
                break
            try:
                if point != last:
                    problem, last = Problem(point, 1), point
                applied(variant)
                problem.step(variant.form)
            except Exception as error:  # noqa: BLE001 - reported when it is measured
                print(f"  {point} {variant}: {type(error).__name__} {str(error)[:80]}", flush=True)
        return
    rows: list[dict[str, Any]] = []
    for point in points:
        if time.monotonic() > deadline:
            print("out of time before", point)
            break
        rows += measure(point, 12 if point[1] <= 512 else 5, deadline)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
