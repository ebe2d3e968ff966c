# ruff: noqa: ANN001, ANN202 - Triton's jit reads annotations itself: only constexpr means anything
"""A whole decoder with random weights, under graphs: tokens per second with and without adapters.

Attention, norms and activations are the same for every contender; only the linear sites differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import dense
from benchmarks.check import Adapters
from benchmarks.grid import DenseCell
from benchmarks.results import Row
from benchmarks.timing import BASE, Replay, capture, paired_rounds, timer
from lora_core import load_backend
from lora_core.batch import LoRABatch

Site = Callable[[int, str, Tensor], Tensor]
"""(layer, site name, x `[T, K]`) -> `[T, N]`."""

BATCHES = (1, 8, 32, 128)
ADAPTERS = (1, 8, 32)
CONTEXT = 512
"""Tokens in the cache of every request at decode; a longer one would make LoRA look cheaper."""
PREFILL_TOKENS = 16384
"""At most this many tokens in one prefill."""
_RANK, _MAX_RANK = 16, 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with packed projections."""

    name: str = "llama-3-8b"
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    intermediate: int = 14336
    vocabulary: int = 128256

    @property
    def sites(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Inputs and slice widths of each linear site of a layer."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        return {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
            "gate_up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


@triton.jit
def _rotate(qkv_ptr, cos_ptr, sin_ptr, positions_ptr, row: tl.constexpr, HALF: tl.constexpr):
    """Rotary embedding of one head of one token, in place: `[T, heads * 2 * HALF]`."""
    token, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, HALF)
    position = tl.load(positions_ptr + token)
    cos, sin = tl.load(cos_ptr + position * HALF + i), tl.load(sin_ptr + position * HALF + i)
    at = qkv_ptr + token.to(tl.int64) * row + head * (2 * HALF) + i
    a, b = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(qkv_ptr.dtype.element_ty))
    tl.store(at + HALF, (b * cos + a * sin).to(qkv_ptr.dtype.element_ty))


@triton.jit
def _silu_mul(both_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """`silu(gate) * up` of `[T, 2N]`."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both_ptr + token * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + token * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * N + n,
        (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty),
        mask=n < N,
    )


class Decoder:
    """Random weights of one shape."""

    def __init__(self, shape: Shape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        generator = torch.Generator(device).manual_seed(0)

        def linear(k: int, n: int) -> nn.Linear:
            base = nn.Linear(k, n, bias=False, device="meta", dtype=dtype)
            weight = torch.randn(n, k, device=device, dtype=dtype, generator=generator) * k**-0.5
            base.weight = nn.Parameter(weight, requires_grad=False)
            return base

        self.bases = [
            {name: linear(k, sum(widths)) for name, (k, widths) in shape.sites.items()}
            for _ in range(shape.layers)
        ]
        self.embedding = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype)
        self.head = linear(shape.hidden, shape.vocabulary)
        self.norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        angle = torch.outer(
            torch.arange(PREFILL_TOKENS, device=device),
            500000.0 ** (-torch.arange(0, 1, 2 / shape.head, device=device)),
        )
        self.cos, self.sin = angle.cos(), angle.sin()

    def base(self, layer: int, name: str, x: Tensor) -> Tensor:
        """A site without adapters."""
        return self.bases[layer][name](x)

    def forward(self, ids: Tensor, positions: Tensor, site: Site, attend: Callable[[int, Tensor], Tensor],
                last: Tensor) -> Tensor:  # fmt: skip
        """Greedy next tokens of the rows `last`."""
        shape = self.shape
        x = self.embedding[ids]
        for layer in range(shape.layers):
            qkv = site(layer, "qkv", self._normed(x))
            _rotate[(len(ids), shape.heads + shape.kv_heads)](
                qkv, self.cos, self.sin, positions, qkv.stride(0), shape.head // 2
            )
            x = x + site(layer, "o", attend(layer, qkv))
            both = site(layer, "gate_up", self._normed(x))
            active = both.new_empty(len(ids), shape.intermediate)
            _silu_mul[(len(ids), triton.cdiv(shape.intermediate, 1024))](
                both, active, shape.intermediate, 1024
            )
            x = x + site(layer, "down", active)
        return self.head(self._normed(x[last])).argmax(-1)

    def _normed(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.shape.hidden,), self.norm, 1e-5)

    def split(self, qkv: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of q, k and v: `[batch, heads, length, head]`."""
        s = self.shape
        heads = qkv.view(batch, -1, s.heads + 2 * s.kv_heads, s.head).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        return q, k, v

    def decode_step(self, batch: int, site: Site) -> Callable[[], list[Tensor]]:
        """One token of every request, each with `CONTEXT` tokens in the cache."""
        s, device = self.shape, self.device
        cache = torch.randn(
            s.layers, 2, batch, s.kv_heads, CONTEXT, s.head, device=device, dtype=self.dtype
        )
        ids = torch.arange(batch, device=device) * 7 % s.vocabulary
        positions = torch.full((batch,), CONTEXT - 1, device=device, dtype=torch.int32)
        rows = torch.arange(batch, device=device)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = self.split(qkv, batch)
            cache[layer, 0, :, :, -1:] = k
            cache[layer, 1, :, :, -1:] = v
            out = functional.scaled_dot_product_attention(q, *cache[layer], enable_gqa=True)
            return out.transpose(1, 2).reshape(batch, -1)

        return lambda: [self.forward(ids, positions, site, attend, rows)]

    def prefill_step(self, batch: int, length: int, site: Site) -> Callable[[], list[Tensor]]:
        """A prompt of `length` tokens for every request."""
        device = self.device
        ids = torch.arange(batch * length, device=device) * 7 % self.shape.vocabulary
        positions = torch.arange(length, device=device, dtype=torch.int32).repeat(batch)
        last = torch.arange(1, batch + 1, device=device) * length - 1

        def attend(_: int, qkv: Tensor) -> Tensor:
            out = functional.scaled_dot_product_attention(
                *self.split(qkv, batch), is_causal=True, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(batch * length, -1)

        return lambda: [self.forward(ids, positions, site, attend, last)]


def rows(
    backends: Sequence[str],
    kit: ModuleType | None,
    *,
    device: torch.device,
    peers: Sequence[str] = ("sglang_v2",),
    shape: Shape | None = None,
    batches: Sequence[int] = BATCHES,
    adapters: Sequence[int] = ADAPTERS,
    phases: Sequence[str] = ("decode", "prefill"),
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 2.0,
) -> Iterator[Row]:
    """Every decoder row: `shape, phase, batch, adapters, backend, base_tokens_per_second, tokens_per_second`.

    One row per backend and per peer; rows of one point share their base, replayed in turn with them.
    """
    shape = shape or Shape()
    model = Decoder(shape, device=device, dtype=dtype)
    for phase in phases:
        for batch in batches:
            for count in sorted({min(a, batch) for a in adapters}):
                yield from _point(model, backends, kit, peers, phase, batch, count, seconds)


def _point(model: Decoder, backends: Sequence[str], kit: ModuleType | None, peers: Sequence[str],
           phase: str, batch: int, count: int, seconds: float) -> Iterator[Row]:  # fmt: skip
    length = 1 if phase == "decode" else min(CONTEXT, PREFILL_TOKENS // batch)
    tokens, device = batch * length, model.device
    failures = dense.Failures()

    def step(site: Site) -> Callable[[], list[Tensor]]:
        return (
            model.decode_step(batch, site)
            if phase == "decode"
            else model.prefill_step(batch, length, site)
        )

    cells = {
        name: DenseCell(
            name, k, widths, tokens, count, _RANK, max(8, count), _MAX_RANK, "even", batch, 2.5
        )
        for name, (k, widths) in model.shape.sites.items()
    }
    pools = [
        {name: _adapters(cell, model) for name, cell in cells.items()}
        for _ in range(model.shape.layers)
    ]
    replays: dict[str, Replay] = {BASE: capture(step(model.base), device)}
    for name in backends:
        with failures.recorded(name):
            replays[name] = capture(
                step(_our_site(model, name, cells, pools, phase, batch, length)), device
            )
    if kit is not None:
        with failures.recorded("peers"):
            sites = _peer_sites(model, kit, cells, pools, batch, length, peers)
            for name, site in sites.items():
                with failures.recorded(name):
                    replays[name] = capture(step(site), device)
    paired = paired_rounds(timer(replays, device), list(replays), layers=1, enough=lambda p: p.rounds >= 22,
                           seconds=seconds)  # fmt: skip
    base_us = sorted(paired.base)[paired.rounds // 2]
    estimates = paired.estimates()
    for name in replays:
        if name != BASE:
            yield {
                "shape": model.shape.name, "phase": phase, "batch": batch, "adapters": count,
                "tokens": tokens, "backend": name, "base_tokens_per_second": tokens / base_us * 1e6,
                "tokens_per_second": tokens / (base_us + estimates[name].median) * 1e6,
            }  # fmt: skip
    for name, what in failures.found.items():
        print(f"!! {phase} batch {batch} x{count} {name}: {what}", flush=True)


def _adapters(cell: DenseCell, model: Decoder) -> Adapters:
    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, device=model.device, dtype=model.dtype) * scale

    n, slices = sum(cell.widths), len(cell.widths)
    return Adapters(
        a=[normal(slices, _RANK, cell.K, scale=cell.K**-0.5) for _ in range(cell.adapters)],
        b=[normal(n, _RANK, scale=0.1) for _ in range(cell.adapters)],
        offsets=[sum(cell.widths[:i]) for i in range(slices + 1)],
    )


def _our_site(model: Decoder, name: str, cells: dict[str, DenseCell], pools: list[dict[str, Adapters]],
              phase: Any, batch: int, length: int) -> Site:  # fmt: skip
    backend = load_backend(name, device=model.device)
    weights = [
        {
            site: dense.fill(backend, model.bases[layer][site], pool[site], cells[site])
            for site in cells
        }
        for layer, pool in enumerate(pools)
    ]
    graph = phase if model.device.type == "cuda" and phase in backend.capabilities.graphs else None
    if graph is not None:
        backend.init_graph(graph, max_requests=batch, max_tokens=batch * length)
    slots = next(iter(cells.values())).slots
    backend.prepare_batch(LoRABatch([length] * batch, slots, phase), graph=graph)
    return lambda layer, site, x: backend.linear(x, model.bases[layer][site], weights[layer][site])


def _peer_sites(model: Decoder, kit: ModuleType, cells: dict[str, DenseCell],
                pools: list[dict[str, Adapters]], batch: int, length: int,
                names: Sequence[str]) -> dict[str, Site]:  # fmt: skip
    slots = next(iter(cells.values())).slots
    calls = {
        site: kit.dense(
            seq_lens=[length] * batch, slots=slots, ranks=cell.ranks, widths=list(cell.widths),
            A=[torch.stack(pool[site].a) for pool in pools],
            B=[torch.stack(pool[site].b) for pool in pools], device=model.device,
        )
        for site, cell in cells.items()
    }  # fmt: skip

    def site_of(name: str) -> Site:
        return lambda layer, site, x: calls[site][name](
            layer, x, partial(model.bases[layer][site], x)
        )

    return {name: site_of(name) for name in names}
