# ruff: noqa: ANN001, ANN202 - Triton's jit reads annotations itself: only constexpr means anything
"""A whole decoder with random weights, under graphs: tokens per second with and without adapters.

Norms, attention, routers and activations are the same for every contender; only the linear sites and
the experts differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

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
from lora_core import load_backend, load_moe_backend
from lora_core.batch import LoRABatch
from lora_core.layers.moe import CoreConfig, ExpertsCore, ExpertsDeltas
from lora_core.moe import MoELoRAWeights, MoERouting
from lora_core.weights import SliceLayout

CONTEXT = 512
"""Tokens in the cache of every request at decode; a longer one would make LoRA look cheaper."""
PREFILL_TOKENS = 8192
"""At most this many tokens in one prefill, and at most `CONTEXT` of one request."""
OUT_OF_PLACE = "experts core out of place"
"""The row whose base is the same decoder with in-place experts cores, both without adapters."""
_IN_PLACE = "experts core in place"
_RANK, _MAX_RANK = 16, 64
_REFERENCE = "reference"
"""The contender that is computed and compared with, but not timed."""
_REFERENCE_TOKENS = 256
"""Rows up to which the reference of experts is affordable: it gathers the weights of every pair."""
_DIFFERENT = 0.7
"""Of what its adapter changes: a request without it differs by 1, rounding and routers by 0.2 or so."""
_CHANGED = 0.05
"""The share of its base that every adapter must change; rounding in bfloat16 stays far below."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with packed projections; `intermediate` is an expert's where there are any."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0

    @property
    def sites(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Inputs and slice widths of each linear site of a layer."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        attention: dict[str, tuple[int, tuple[int, ...]]] = {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
        }
        if self.experts:
            return attention
        return attention | {
            "gate_up": (self.hidden, (self.intermediate, self.intermediate)),
            "down": (self.intermediate, (self.hidden,)),
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Shape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, experts=128, top_k=8),
    )
}


class Point(NamedTuple):
    """One measurement: so many requests, round-robin over so many adapters."""

    phase: str
    batch: int
    adapters: int

    @property
    def length(self) -> int:
        """New tokens of each request."""
        return 1 if self.phase == "decode" else min(CONTEXT, PREFILL_TOKENS // self.batch)

    @property
    def tokens(self) -> int:
        """Rows of a forward."""
        return self.batch * self.length

    def cell(self, site: str, inputs: int, widths: tuple[int, ...]) -> DenseCell:
        """A linear site of it."""
        return DenseCell(
            site, inputs, widths, self.tokens, self.adapters, _RANK, max(8, self.adapters), _MAX_RANK,
            "even", self.batch, 2.5,
        )  # fmt: skip


POINTS = (
    Point("decode", 32, 8),
    Point("prefill", 32, 8),
    Point("decode", 8, 8),
    Point("decode", 128, 8),
    Point("decode", 1, 1),
    Point("decode", 32, 1),
    Point("decode", 32, 32),
    Point("prefill", 8, 8),
    Point("decode", 128, 32),
    Point("prefill", 32, 32),
    Point("decode", 128, 1),
    Point("decode", 8, 1),
    Point("prefill", 8, 1),
    Point("prefill", 1, 1),
    Point("prefill", 32, 1),
)
"""From what is asked most often to what is asked least: a short run keeps the beginning."""


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


@triton.jit
def _choose(logits_ptr, ids_ptr, factors_ptr, E: tl.constexpr, TOP_K: tl.constexpr):
    """The TOP_K largest of a row of E logits, and the softmax over them."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    logits = tl.load(logits_ptr + token * E + e).to(tl.float32)
    top = tl.max(logits, 0)
    powers = tl.exp(logits - top)
    chosen = e < 0
    for _ in tl.static_range(TOP_K):
        chosen |= e == tl.argmax(tl.where(chosen, float("-inf"), logits), 0)
    total = tl.sum(tl.where(chosen, powers, 0.0), 0)
    at = token * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + at, e, mask=chosen)
    tl.store(factors_ptr + at, powers / total, mask=chosen)


def silu_mul(both: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., gate | up]`, contiguous."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    _silu_mul[(both.numel() // both.shape[-1], triton.cdiv(width, 1024))](both, out, width, 1024)
    return out


class Contender(Protocol):
    """What differs between contenders."""

    def site(self, layer: int, name: str, x: Tensor) -> Tensor:
        """A linear site, `[T, K]` -> `[T, N]`."""

    def experts(self, layer: int, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """The experts of a layer, `[T, H]` -> `[T, H]`."""

    def begin(self) -> None:
        """Called once per forward."""


class Decoder:
    """Random weights of one shape."""

    def __init__(self, shape: Shape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self.bases = [
            {name: self._linear(k, sum(widths)) for name, (k, widths) in shape.sites.items()}
            for _ in range(shape.layers)
        ]
        self.cores: list[ExpertsCore] = []
        self.routers: list[Tensor] = []
        if shape.experts:
            self.routers = [self._normal(shape.experts, shape.hidden) for _ in range(shape.layers)]
            self.cores = [self._core() for _ in range(shape.layers)]
        self.embedding = self._normal(shape.vocabulary, shape.hidden, std=1.0)
        self.head = self._linear(shape.hidden, shape.vocabulary)
        self.norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        angle = torch.outer(
            torch.arange(CONTEXT, device=device),
            500000.0 ** (-torch.arange(0, 1, 2 / shape.head, device=device)),
        )
        self.cos, self.sin = angle.cos(), angle.sin()

    def _normal(self, *shape: int, std: float | None = None) -> Tensor:
        """Random, by default such that a product keeps the size of its input."""
        out = torch.empty(shape, device=self.device, dtype=self.dtype)
        return out.normal_(
            0.0, shape[-1] ** -0.5 if std is None else std, generator=self._generator
        )

    def _linear(self, k: int, n: int) -> nn.Linear:
        base = nn.Linear(k, n, bias=False, device="meta", dtype=self.dtype)
        base.weight = nn.Parameter(self._normal(n, k), requires_grad=False)
        return base

    def _core(self) -> ExpertsCore:
        from lora_core_moe_virtual_experts.cores import ExpertsWeight, TritonExpertsCore

        s = self.shape
        return TritonExpertsCore(
            ExpertsWeight(self._normal(s.experts, 2 * s.intermediate, s.hidden)),
            ExpertsWeight(self._normal(s.experts, s.hidden, s.intermediate)),
            activation=silu_mul,
        )

    def forward(self, ids: Tensor, positions: Tensor, use: Contender,
                attend: Callable[[int, Tensor], Tensor], last: Tensor) -> list[Tensor]:  # fmt: skip
        """Greedy next tokens of the rows `last`, and what they were chosen from."""
        shape = self.shape
        use.begin()
        x = self.embedding[ids]
        for layer in range(shape.layers):
            qkv = use.site(layer, "qkv", self._normed(x))
            _rotate[(len(ids), shape.heads + shape.kv_heads)](
                qkv, self.cos, self.sin, positions, qkv.stride(0), shape.head // 2
            )
            x = x + use.site(layer, "o", attend(layer, qkv))
            normed = self._normed(x)
            if shape.experts:
                x = x + use.experts(layer, normed, *self._route(layer, normed))
            else:
                x = x + use.site(layer, "down", silu_mul(use.site(layer, "gate_up", normed)))
        hidden = self._normed(x[last])
        return [self.head(hidden).argmax(-1), hidden]

    def _normed(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.shape.hidden,), self.norm, 1e-5)

    def _route(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        s = self.shape
        logits = functional.linear(x, self.routers[layer])
        ids = torch.empty(len(x), s.top_k, dtype=torch.int32, device=x.device)
        factors = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
        _choose[(len(x),)](logits, ids, factors, s.experts, s.top_k)
        return ids, factors

    def _split(self, qkv: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of q, k and v: `[batch, heads, length, head]`."""
        s = self.shape
        heads = qkv.view(batch, -1, s.heads + 2 * s.kv_heads, s.head).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        return q, k, v

    def step(self, point: Point) -> Callable[[Contender], list[Tensor]]:
        """One forward of a point: all of its contenders write the same cache."""
        return (
            self._decode_step(point.batch) if point.phase == "decode" else self._prefill_step(point)
        )

    def _decode_step(self, batch: int) -> Callable[[Contender], list[Tensor]]:
        """One token of every request, each with `CONTEXT` tokens in the cache."""
        s, device = self.shape, self.device
        cache = self._normal(s.layers, 2, batch, s.kv_heads, CONTEXT, s.head, std=1.0)
        ids = torch.arange(batch, device=device) * 7 % s.vocabulary
        positions = torch.full((batch,), CONTEXT - 1, device=device, dtype=torch.int32)
        rows = torch.arange(batch, device=device)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = self._split(qkv, batch)
            cache[layer, 0, :, :, -1:] = k
            cache[layer, 1, :, :, -1:] = v
            out = functional.scaled_dot_product_attention(q, *cache[layer], enable_gqa=True)
            return out.transpose(1, 2).reshape(batch, -1)

        return lambda use: self.forward(ids, positions, use, attend, rows)

    def _prefill_step(self, point: Point) -> Callable[[Contender], list[Tensor]]:
        """A prompt of `length` tokens for every request."""
        device, batch, length = self.device, point.batch, point.length
        ids = torch.arange(batch * length, device=device) * 7 % self.shape.vocabulary
        positions = torch.arange(length, device=device, dtype=torch.int32).repeat(batch)
        last = torch.arange(1, batch + 1, device=device) * length - 1

        def attend(_: int, qkv: Tensor) -> Tensor:
            out = functional.scaled_dot_product_attention(
                *self._split(qkv, batch), is_causal=True, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(batch * length, -1)

        return lambda use: self.forward(ids, positions, use, attend, last)


class Base:
    """No adapters; experts cores as they are given."""

    def __init__(self, model: Decoder, *, inplace: bool = False) -> None:
        self.model = model
        self.cores = [core.with_config(CoreConfig(inplace=inplace)) for core in model.cores]

    def begin(self) -> None:
        """Nothing to do."""

    def site(self, layer: int, name: str, x: Tensor) -> Tensor:
        """The base module."""
        out: Tensor = self.model.bases[layer][name](x)
        return out

    def experts(self, layer: int, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """The core alone."""
        return self.cores[layer].run(x, ids, factors)


class Pools(NamedTuple):
    """The adapters of a point, made once for all contenders: per layer and site, and of experts."""

    linear: list[dict[str, Adapters]]
    gate_up: list[MoELoRAWeights]
    down: list[MoELoRAWeights]


def _pools(model: Decoder, cells: dict[str, DenseCell], count: int) -> Pools:
    """Random adapters; experts' pools are as large as the adapters are, and shared by all contenders."""
    s = model.shape

    def normal(*shape: int, std: float) -> Tensor:
        return torch.empty(shape, device=model.device, dtype=model.dtype).normal_(0.0, std)

    def linear(cell: DenseCell) -> Adapters:
        widths = cell.widths
        return Adapters(
            a=[normal(len(widths), _RANK, cell.K, std=cell.K**-0.5) for _ in range(count)],
            b=[normal(sum(widths), _RANK, std=0.1) for _ in range(count)],
            offsets=[sum(widths[:i]) for i in range(len(widths) + 1)],
        )

    def experts(inputs: int, widths: tuple[int, ...]) -> MoELoRAWeights:
        n = len(widths)
        return MoELoRAWeights(
            a=normal(count, s.experts, n, _RANK, inputs, std=inputs**-0.5),
            b=normal(count, s.experts, sum(widths), _RANK, std=0.1),
            ranks=torch.full((count, n), _RANK, dtype=torch.int32, device=model.device),
            scalings=torch.ones(count, n, device=model.device),
            layout=SliceLayout(widths),
            num_experts=s.experts,
        )

    layers = range(s.layers)
    pools = Pools([{name: linear(cell) for name, cell in cells.items()} for _ in layers], [], [])
    if s.experts:
        pools.gate_up.extend(experts(s.hidden, (s.intermediate,) * 2) for _ in layers)
        pools.down.extend(experts(s.intermediate, (s.hidden,)) for _ in layers)
    return pools


class Ours(Base):
    """A dense backend, beside an experts backend where the model has experts: `dense+experts`."""

    def __init__(self, model: Decoder, name: str, cells: dict[str, DenseCell], pools: Pools,
                 point: Point) -> None:  # fmt: skip
        super().__init__(model)
        phase: Any = point.phase
        dense_name, _, experts_name = name.partition("+")
        self.backend, self.pools = load_backend(dense_name, device=model.device), pools
        self.moe = load_moe_backend(experts_name, device=model.device) if experts_name else None
        self.weights = [
            {
                site: dense.fill(self.backend, model.bases[layer][site], pool[site], cells[site])
                for site in cells
            }
            for layer, pool in enumerate(pools.linear)
        ]
        on_cuda = model.device.type == "cuda"
        graph = phase if on_cuda and phase in self.backend.capabilities.graphs else None
        if graph is not None:
            self.backend.init_graph(graph, max_requests=point.batch, max_tokens=point.tokens)
        slots = next(iter(cells.values())).slots
        self.backend.prepare_batch(
            LoRABatch([point.length] * point.batch, slots, phase), graph=graph
        )
        self.tokens = point.tokens
        self.row_slots: Tensor | None = None

    def begin(self) -> None:
        """The slots of rows, once per forward, from the dense backend's batch."""
        if self.moe is not None:
            self.row_slots = self.moe.row_slots(self.backend.batch_info, self.tokens)

    def site(self, layer: int, name: str, x: Tensor) -> Tensor:
        """Through the contract."""
        return self.backend.linear(x, self.model.bases[layer][name], self.weights[layer][name])

    def experts(self, layer: int, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """The core with the deltas let in."""
        assert self.moe is not None
        up, down = self.pools.gate_up[layer], self.pools.down[layer]
        routing = MoERouting(
            topk_ids=ids, topk_weights=factors, slots=self.row_slots, num_experts=up.num_experts,
            num_slots=up.num_slots,
        )  # fmt: skip
        moe, route = self.moe, self.moe.route(routing)

        class Deltas:
            def gate_up(self, out: Tensor) -> None:
                moe.gate_up(x, up, route, out)

            def down(self, activated: Tensor, out: Tensor) -> None:
                moe.down(activated, down, route, out)

        return self.cores[layer].run(x, ids, factors, deltas=Deltas())


class Peer(Base):
    """A peer's kernels at the same places; see docs/performance.md for what a kit gives."""

    def __init__(self, model: Decoder, name: str, cells: dict[str, DenseCell], pools: Pools,
                 point: Point, kit: ModuleType) -> None:  # fmt: skip
        super().__init__(model)
        slots, lengths = next(iter(cells.values())).slots, [point.length] * point.batch
        self.calls = {
            site: kit.dense(
                seq_lens=lengths, slots=slots, ranks=cell.ranks, widths=list(cell.widths),
                A=[torch.stack(pool[site].a) for pool in pools.linear],
                B=[torch.stack(pool[site].b) for pool in pools.linear], device=model.device,
            )[name]
            for site, cell in cells.items()
        }  # fmt: skip
        self.deltas: Callable[[int, Tensor, Tensor], ExpertsDeltas] | None = None
        if model.shape.experts:
            self.deltas = kit.experts(
                seq_lens=lengths, slots=slots, rank=_RANK, num_experts=model.shape.experts,
                gate_up=[(w.a.flatten(2, 3), w.b) for w in pools.gate_up],
                down=[(w.a.flatten(2, 3), w.b) for w in pools.down], device=model.device,
            )[name]  # fmt: skip

    def site(self, layer: int, name: str, x: Tensor) -> Tensor:
        """Base and delta by the peer."""
        out: Tensor = self.calls[name](layer, x, partial(self.model.bases[layer][name], x))
        return out

    def experts(self, layer: int, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """The same core, the peer's deltas."""
        assert self.deltas is not None
        return self.cores[layer].run(x, ids, factors, deltas=self.deltas(layer, x, ids))


def contenders_of(backends: Sequence[str], shape: Shape) -> list[str]:
    """The backends' names at this shape; with experts, `+virtual_experts` where none is named."""
    if not shape.experts:
        return [name for name in backends if "+" not in name]
    return [name if "+" in name else f"{name}+virtual_experts" for name in backends]


def rows(
    shape: Shape,
    backends: Sequence[str],
    kit: ModuleType | None,
    *,
    device: torch.device,
    peers: Sequence[str] = ("sglang_v2",),
    points: Sequence[Point] = POINTS,
    wanted: Callable[[Point], bool] = lambda _: True,
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 2.0,
) -> Iterator[list[Row]]:
    """The rows of every point: `shape, phase, batch, adapters, backend, base_tokens_per_second, tokens_per_second`.

    One row per contender; those of one point share their base, replayed in turn with them.

    Args:
        shape: of the decoder.
        backends: see `contenders_of`.
        kit: of peers.
        device: where.
        peers: those of the kit that run.
        points: in this order.
        wanted: asked before every point.
        dtype: of everything.
        seconds: for the rounds of a point.
    """
    model = Decoder(shape, device=device, dtype=dtype)
    for point in points:
        if wanted(point):
            found = _measure(model, backends, kit, peers, point, seconds)
            _free(device)
            yield found


def warm(shape: Shape, backends: Sequence[str], kit: ModuleType | None, *, device: torch.device,
         peers: Sequence[str], points: Sequence[Point], dtype: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
    """Run every contender once on one layer, so that its kernels are compiled; nothing is timed."""
    model = Decoder(replace(shape, layers=1), device=device, dtype=dtype)
    for point in points:
        failures = dense.Failures()
        step = model.step(point)
        for name, make in _contenders(model, backends, kit, peers, point).items():
            with failures.recorded(name):
                step(make())
        _free(device)
        for name, what in failures.found.items():
            print(f"!! {point} {name}: {what}", flush=True)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _contenders(model: Decoder, backends: Sequence[str], kit: ModuleType | None, peers: Sequence[str],
                point: Point) -> dict[str, Callable[[], Contender]]:  # fmt: skip
    cells = {name: point.cell(name, k, widths) for name, (k, widths) in model.shape.sites.items()}
    pools = _pools(model, cells, point.adapters)
    found: dict[str, Callable[[], Contender]] = {BASE: partial(Base, model)}
    if model.shape.experts:
        found[_IN_PLACE] = partial(Base, model, inplace=True)
    for name in contenders_of(backends, model.shape):
        found[name] = partial(Ours, model, name, cells, pools, point)
    if kit is not None and (not model.shape.experts or hasattr(kit, "experts")):
        for name in peers:
            found[name] = partial(Peer, model, name, cells, pools, point, kit)
    if not model.shape.experts or point.tokens <= _REFERENCE_TOKENS:
        reference = "torch+torch" if model.shape.experts else "torch"
        found[_REFERENCE] = partial(Ours, model, reference, cells, pools, point)
    return found


def _measure(model: Decoder, backends: Sequence[str], kit: ModuleType | None, peers: Sequence[str],
             point: Point, seconds: float) -> list[Row]:  # fmt: skip
    device, failures, step = model.device, dense.Failures(), model.step(point)
    replays: dict[str, Replay] = {}
    expected: Tensor | None = None
    for name, make in _contenders(model, backends, kit, peers, point).items():
        with failures.recorded(name):
            if name == _REFERENCE:
                expected = step(make())[1]
            else:
                replays[name] = capture(partial(step, make()), device)
    _check(replays, failures, expected)
    for name, what in failures.found.items():
        print(f"!! {model.shape.name} {point} {name}: {what}", flush=True)
    if BASE not in replays:
        return []
    paired = paired_rounds(timer(replays, device), list(replays), layers=1, enough=lambda p: p.rounds >= 22,
                           seconds=seconds)  # fmt: skip
    base_us, estimates = sorted(paired.base)[paired.rounds // 2], paired.estimates()
    asked = {
        "shape": model.shape.name,
        "layers": model.shape.layers,
        "phase": point.phase,
        "batch": point.batch,
        "tokens": point.tokens,
    }

    def row(adapters: int, backend: str, without_us: float, with_us: float) -> Row:
        return {
            **asked,
            "adapters": adapters,
            "backend": backend,
            "base_tokens_per_second": point.tokens / without_us * 1e6,
            "tokens_per_second": point.tokens / with_us * 1e6,
        }

    found = [
        row(point.adapters, name, base_us, base_us + estimates[name].median)
        for name in replays
        if name not in (BASE, _IN_PLACE)
    ]
    if _IN_PLACE in replays:
        found.append(row(0, OUT_OF_PLACE, base_us + estimates[_IN_PLACE].median, base_us))
    return found


def _check(
    replays: dict[str, Replay], failures: dense.Failures, expected: Tensor | None = None
) -> None:
    """Replay every contender once and drop those that do not compute the same thing.

    Every request must be changed by its adapter, and agree with the reference, or where there is none
    with another contender. Rounding goes through every layer and may change a router's choice, so only
    a delta that is missing, or another adapter's, shows here; the benchmarks of sites compare closely.

    Args:
        replays: loses what is wrong; everything when the base is.
        failures: gains what was found.
        expected: hidden states `[requests, H]` of the reference.
    """
    hidden: dict[str, Tensor] = {}
    for name, replay in replays.items():
        with failures.recorded(name):
            hidden[name] = _replayed(replay)
    reference = {} if expected is None else {_REFERENCE: expected.float()}
    for name, found in (hidden | reference).items():
        fault = _unusable(found)
        if fault is not None:
            failures.found[name] = fault
    if BASE in failures.found:
        replays.clear()
        return
    base = hidden.pop(BASE)
    usable = {n: h for n, h in (hidden | reference).items() if n not in failures.found}
    in_place = usable.pop(_IN_PLACE, None)
    if in_place is not None:
        worst = float(((in_place - base).norm(dim=1) / base.norm(dim=1)).max())
        if not worst < _DIFFERENT:
            failures.found[_IN_PLACE] = f"a request differs from the base by {worst:.3g} of it"
    for name, own in usable.items():
        others = [_REFERENCE] if _REFERENCE in usable else list(usable)
        others = [other for other in others if other != name]
        fault = _fault(own, base, {other: usable[other] for other in others})
        if fault is not None:
            failures.found[name] = fault
    for name in failures.found:
        replays.pop(name, None)


def _replayed(replay: Replay) -> Tensor:
    """Hidden states of one more run, float32 `[requests, H]`.

    Capturing a graph computes nothing: until the first replay its outputs are memory that nobody wrote.
    They are poisoned first, so that a replay which leaves them alone is found out.
    """
    for out in replay.outputs:
        out.fill_(float("nan") if out.is_floating_point() else -1)
    replay.run()
    return replay.outputs[1].float()


def _unusable(hidden: Tensor) -> str | None:
    """Why hidden states `[requests, H]` cannot be compared with anything, or None."""
    nans, infinite = int(hidden.isnan().sum()), int(hidden.isinf().sum())
    if nans or infinite:
        return f"{nans} NaN and {infinite} infinite of {hidden.numel()} hidden values"
    zero = int((hidden == 0).all(dim=1).sum())
    return f"hidden values of {zero} of {len(hidden)} requests are all zero" if zero else None


def _fault(own: Tensor, base: Tensor, others: dict[str, Tensor]) -> str | None:
    """What is wrong with usable hidden states `[requests, H]`, or None; with no others, less is known."""
    least = float(((own - base).norm(dim=1) / base.norm(dim=1)).min())
    if not least >= _CHANGED:
        return (
            f"an adapter changes a request by {least:.3g} of the base, expected {_CHANGED} or more"
        )
    if not others:
        return None

    def apart(name: str) -> float:
        """Of the worst request, as a share of what its adapter changes; endless where that is nothing."""
        changed = (others[name] - base).norm(dim=1)
        shares = (own - others[name]).norm(dim=1) / changed
        return float(torch.where(changed > 0, shares, float("inf")).max())

    nearest = min(others, key=apart)
    if apart(nearest) < _DIFFERENT:
        return None
    return (
        f"a request differs from {nearest} by {apart(nearest):.3g} of what its adapter changes, "
        f"expected less than {_DIFFERENT}"
    )
