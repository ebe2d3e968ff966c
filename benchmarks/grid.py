"""The cells of the grid: what is asked of a backend, without what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks.roofline import dense_limit_us, moe_limit_us

Cell = TypeVar("Cell")
GridName = Literal["smoke", "judged", "full"]

JUDGED = Path(__file__).with_name("grid.json")
DECODE_UP_TO = 512
"""Up to this many tokens a cell is a decode batch of one token each, above it a prefill."""


@dataclass(frozen=True)
class DenseCell:
    """One linear site, one batch.

    Attributes:
        site: name of the site.
        K: inputs.
        widths: of the packed slices.
        tokens: T.
        adapters: distinct adapters in the batch.
        rank: of each adapter, or the largest of a mixed batch.
        max_loras: slots of our pool.
        max_rank: rank that each of them has room for.
        mix: "even", "half base-only", "ranks 8,16,32,64" or "all distinct".
        requests: sequences in the batch.
        limit_us: the physical limit of the added time.
    """

    site: str
    K: int
    widths: tuple[int, ...]
    tokens: int
    adapters: int
    rank: int
    max_loras: int
    max_rank: int
    mix: str
    requests: int
    limit_us: float

    @property
    def decode(self) -> bool:
        """Whether every request has one token."""
        return self.tokens <= DECODE_UP_TO

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request."""
        return [self.tokens // self.requests] * self.requests

    @property
    def slots(self) -> list[int]:
        """Adapter of each request, round-robin; -1 for the base model."""
        if self.mix == "half base-only":
            return [-1 if i % 2 else i // 2 % self.adapters for i in range(self.requests)]
        return [i % self.adapters for i in range(self.requests)]

    @property
    def ranks(self) -> list[int]:
        """Rank of each adapter."""
        if self.mix.startswith("ranks "):
            cycle = [int(r) for r in self.mix.removeprefix("ranks ").split(",")]
            return [cycle[i % len(cycle)] for i in range(self.adapters)]
        return [self.rank] * self.adapters

    def asked(self) -> dict[str, Any]:
        """The row keys of this cell."""
        return {**asdict(self), "widths": list(self.widths)}


@dataclass(frozen=True)
class MoECell:
    """The experts of one layer, one batch: gate_up and down together."""

    shape: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    adapters: int
    rank: int
    layout: str
    max_loras: int
    limit_us: float

    def asked(self) -> dict[str, Any]:
        """The row keys of this cell."""
        return asdict(self)


SITES = {
    "o": (4096, (4096,)),
    "qkv": (4096, (4096, 1024, 1024)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
    "o70": (8192, (8192,)),
    "qkv70": (8192, (8192, 1024, 1024)),
    "gate_up70": (8192, (28672, 28672)),
    "down70": (28672, (8192,)),
    "qkv70tp8": (8192, (1024, 128, 128)),
    "gate_up70tp8": (8192, (3584, 3584)),
    "down70tp8": (3584, (8192,)),
}
EXPERTS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "deepseek-v3-ep8": (7168, 2048, 32, 8),
}


def dense_cells(name: GridName) -> list[DenseCell]:
    """The dense cells of a grid, spread so that any beginning of the list covers it evenly."""
    judged = [
        DenseCell(**{**cell, "widths": tuple(cell["widths"])})
        for cell in json.loads(JUDGED.read_text())["dense"]
    ]
    if name == "smoke":
        wanted = {
            ("o", 1, 1, 16), ("o", 32, 8, 16), ("qkv", 32, 8, 16), ("gate_up", 1, 1, 16),
            ("gate_up", 32, 8, 16), ("down", 32, 8, 16), ("qkv", 128, 8, 16), ("gate_up", 32, 32, 64),
            ("o", 8192, 8, 16), ("qkv", 8192, 8, 16), ("gate_up", 2048, 8, 16),
        }  # fmt: skip
        return [c for c in judged if (c.site, c.tokens, c.adapters, c.rank) in wanted]
    if name == "judged":
        return spread(judged)
    known = {(c.site, c.tokens, c.adapters, c.rank, c.mix) for c in judged}
    extra = []
    for site, (k, widths) in SITES.items():
        for tokens in (1, 8, 32, 128, 512, 2048, 8192, 16384):
            for adapters in (1, 8, 32):
                if adapters > tokens:
                    continue
                for rank in (8, 16, 32, 64, 128):
                    if (site, tokens, adapters, rank, "even") in known:
                        continue
                    decode = tokens <= DECODE_UP_TO
                    extra.append(
                        DenseCell(
                            site=site, K=k, widths=widths, tokens=tokens, adapters=adapters, rank=rank,
                            max_loras=max(8, adapters), max_rank=max(64, rank), mix="even",
                            requests=tokens if decode else max(8, adapters),
                            limit_us=dense_limit_us(k, widths, rank, tokens, adapters, decode=decode),
                        )
                    )  # fmt: skip
    return spread(judged) + spread(extra)


def moe_cells(name: GridName) -> list[MoECell]:
    """The expert cells of a grid, spread like the dense ones."""
    judged = [MoECell(**cell) for cell in json.loads(JUDGED.read_text())["moe"]]
    if name == "smoke":
        return [
            c
            for c in judged
            if c.shape.startswith("qwen") and c.tokens in (1, 32, 2048) and c.rank == 16
        ]
    if name == "judged":
        return spread(judged)
    known = {(c.shape, c.tokens, c.adapters, c.rank, c.layout) for c in judged}
    extra = []
    for shape, (hidden, inter, experts, top_k) in EXPERTS.items():
        for layout in ("per_expert", "shared_outer"):
            for tokens in (1, 8, 32, 128, 512, 2048, 8192):
                for slots in (8, 32):
                    adapters = min(slots, tokens)
                    if (shape, tokens, adapters, 16, layout) in known:
                        continue
                    extra.append(
                        MoECell(
                            shape, hidden, inter, experts, top_k, tokens, adapters, 16, layout, slots,
                            moe_limit_us(hidden, inter, experts, top_k, 16, tokens, adapters, layout),
                        )
                    )  # fmt: skip
    return spread(judged) + spread(extra)


def spread(cells: Sequence[Cell]) -> list[Cell]:
    """The same cells in an order whose every beginning samples the whole list evenly.

    Steps through the list by the golden section of its length, made coprime to it.
    """
    n = len(cells)
    if n < 3:
        return list(cells)
    step = next(s for s in range(round(n * 0.618), 2 * n) if _coprime(s, n))
    return [cells[i * step % n] for i in range(n)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1
