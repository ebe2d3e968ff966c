"""The experts backend under test, and the problems that checks give it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lora_core.contract import CONTRACT_VERSION
from lora_core.errors import BackendUnavailableError
from lora_core.moe import MoECapabilities, MoELoRABackend, MoELoRAWeights, MoERouting
from lora_core.plugins import load_moe_backend
from lora_core.testing.engine import NotRunHere
from lora_core.testing.moe_oracle import PairDeltas, pair_deltas
from lora_core.testing.subject import Subject
from lora_core.weights import SliceLayout

OpName = Literal["gate_up", "down", "down_rows"]
"""`down_rows` is down into one row per token."""

OPS: tuple[OpName, ...] = ("gate_up", "down", "down_rows")


class MoESubject(Subject):
    """An experts backend by name, as `load_moe_backend` knows it, or by class.

    Args:
        backend: name or class.
        device: where; None leaves it to the backend.
    """

    moe_capabilities: MoECapabilities

    def __init__(
        self,
        backend: str | type[MoELoRABackend[Any]],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self._moe, self._where = backend, device
        self.unavailable = None
        self.label = backend if isinstance(backend, str) else backend.name
        try:
            first = self.new_moe()
        except BackendUnavailableError as error:
            self.unavailable = NotRunHere(
                "cuda" if device is None else torch.device(device).type, str(error)
            )
            self.moe_capabilities = MoECapabilities(dtypes=frozenset(), device_types=frozenset())
            self.contract, self.device = CONTRACT_VERSION, torch.device("cpu")
        else:
            self.moe_capabilities = first.capabilities
            self.contract, self.device = first.contract, first.device

    def new_moe(self) -> MoELoRABackend[Any]:
        """A fresh instance."""
        if isinstance(self._moe, str):
            return load_moe_backend(self._moe, device=self._where)
        return self._moe(device=self._where)

    def as_code(self) -> str:
        """An expression that builds it again."""
        backend = repr(self._moe) if isinstance(self._moe, str) else self._moe.__qualname__
        where = "" if self._where is None else f", device={str(self._where)!r}"
        return f"MoESubject({backend}{where})"


@dataclass(frozen=True, kw_only=True)
class MoECase:
    """One forward of one projection.

    Attributes:
        op: which.
        dtype: of x, weights and out.
        slots: of the rows; -1 for the base model.
        experts: E.
        top_k: k.
        hidden: H.
        inner: I.
        gated: gate_up has two slices.
        shared: the outer matrix is shared: A of gate_up, B of down.
        ranks: of each slot, the same for its slices.
        max_rank: R.
        ids: expert ids, or None for random ones.
        expert_map: global id -> local id.
        accumulate: as the op takes it.
        seed: of everything random.
    """

    op: OpName = "gate_up"
    dtype: str = "float32"
    slots: tuple[int, ...] = (0, 1, -1, 0, 2)
    experts: int = 4
    top_k: int = 2
    hidden: int = 32
    inner: int = 24
    gated: bool = True
    shared: bool = False
    ranks: tuple[int, ...] = (4, 2, 0)
    max_rank: int = 6
    ids: tuple[tuple[int, ...], ...] | None = None
    expert_map: tuple[int, ...] | None = None
    accumulate: bool = True
    seed: int = 0

    @property
    def id(self) -> str:
        """Readable and unique within a check."""
        parts = [
            self.op,
            self.dtype,
            f"T{len(self.slots)}",
            f"E{self.experts}",
            f"k{self.top_k}",
            f"H{self.hidden}",
            f"I{self.inner}",
            "shared" if self.shared else "per-expert",
            f"r{'.'.join(map(str, self.ranks))}of{self.max_rank}",
        ]
        parts += ["plain"] * (not self.gated) + ["map"] * (self.expert_map is not None)
        if self.ids is not None:
            parts.append("ids" + ".".join(str(i) for row in self.ids for i in row))
        parts += ["overwrite"] * (not self.accumulate)
        return "-".join(parts)

    def but(self, **changes: Any) -> MoECase:
        """The same with changes."""
        return dataclasses.replace(self, **changes)


class MoEProblem:
    """The tensors of a case. What must not matter is NaN: ranks past a slot's own, unused slots.

    Args:
        case: what to build.
        device: where.
    """

    def __init__(self, case: MoECase, device: torch.device) -> None:
        self.case, self.device = case, device
        g = torch.Generator().manual_seed(case.seed)
        dtype = getattr(torch, case.dtype)
        tokens, up = len(case.slots), case.op == "gate_up"
        inputs = case.hidden if up else case.inner
        widths = (case.inner,) * (2 if case.gated else 1) if up else (case.hidden,)
        slots, n = len(case.ranks), len(widths)
        a = torch.randn(
            slots, 1 if case.shared and up else case.experts, n, case.max_rank, inputs, generator=g
        )
        b = torch.randn(
            slots,
            1 if case.shared and not up else case.experts,
            sum(widths),
            case.max_rank,
            generator=g,
        )
        for slot, rank in enumerate(case.ranks):
            a[slot, :, :, rank:] = math.nan
            b[slot, ..., rank:] = math.nan
        self.weights = MoELoRAWeights(
            a=(a / math.sqrt(inputs)).to(dtype).to(device),
            b=b.to(dtype).to(device),
            ranks=torch.tensor([[rank] * n for rank in case.ranks], dtype=torch.int32).to(device),
            scalings=(torch.rand(slots, n, generator=g) + 0.5).to(device),
            layout=SliceLayout(widths),
            num_experts=case.experts,
        )
        if case.ids is None:
            ids = torch.rand(tokens, case.experts, generator=g).topk(case.top_k, dim=1).indices
        else:
            ids = torch.tensor(case.ids)
        mapping = case.expert_map
        self.routing = MoERouting(
            topk_ids=ids.int().to(device),
            topk_weights=torch.rand(ids.shape, generator=g).to(device),
            slots=torch.tensor(case.slots, dtype=torch.int32).to(device),
            num_experts=case.experts,
            num_slots=slots,
            expert_map=None
            if mapping is None
            else torch.tensor(mapping, dtype=torch.int32).to(device),
        )
        shape = (tokens, inputs) if up else (tokens, case.top_k, inputs)
        self.x = torch.randn(shape, generator=g).to(dtype).to(device)
        rows = (tokens,) if case.op == "down_rows" else (tokens, case.top_k)
        self.base = torch.randn(*rows, sum(widths), generator=g).to(dtype).to(device)

    def run(
        self, backend: MoELoRABackend[Any], *, x: Tensor | None = None, route: Any = None
    ) -> Tensor:
        """The op, from a fresh route into a copy of the base's result (or into NaN)."""
        route = backend.route(self.routing) if route is None else route
        return self.into(backend, route, self.start(), x=x)

    def start(self) -> Tensor:
        """What `out` holds before."""
        return self.base.clone() if self.case.accumulate else torch.full_like(self.base, math.nan)

    def into(
        self, backend: MoELoRABackend[Any], route: Any, out: Tensor, *, x: Tensor | None = None
    ) -> Tensor:
        """The op into a given `out`."""
        x = self.x if x is None else x
        accumulate = self.case.accumulate
        if self.case.op == "gate_up":
            return backend.gate_up(x, self.weights, route, out, accumulate=accumulate)
        return backend.down(x, self.weights, route, out, routed_weights=True, accumulate=accumulate)

    @cached_property
    def deltas(self) -> PairDeltas:
        """Of every pair, times its routing weight for down."""
        found = pair_deltas(self.x, self.weights, self.routing)
        if self.case.op == "gate_up":
            return found
        factor = self.routing.topk_weights.double().cpu().unsqueeze(-1)
        return PairDeltas(found.delta * factor, found.touched, found.scale * factor)

    @property
    def expected(self) -> Tensor:
        """Float64, on the host."""
        delta = self.deltas.delta
        if self.case.op == "down_rows":
            delta = delta.sum(1)
        return delta + self.base.double().cpu() if self.case.accumulate else delta

    @property
    def touched(self) -> Tensor:
        """Where something is added."""
        touched = self.deltas.touched
        return touched.any(1) if self.case.op == "down_rows" else touched

    def plain(self) -> Tensor:
        """What plain torch gives in the dtype of the case, pair by pair."""
        weights, routing, case = self.weights, self.routing, self.case
        out = self.start() if case.accumulate else torch.zeros_like(self.base)
        out = out.cpu()
        for token, choice in self.deltas.touched.any(-1).nonzero().tolist():
            slot = case.slots[token]
            expert = int(routing.topk_ids[token, choice])
            if case.expert_map is not None:
                expert = case.expert_map[expert]
            row = (self.x[token] if self.x.dim() == 2 else self.x[token, choice]).cpu()
            target = out[token] if case.op == "down_rows" else out[token, choice]
            for s in range(weights.layout.num_slices):
                span = slice(weights.layout.offsets[s], weights.layout.offsets[s + 1])
                rank = case.ranks[slot]
                a = weights.a[slot, 0 if weights.shared_a else expert, s, :rank].cpu()
                b = weights.b[slot, 0 if weights.shared_b else expert, span, :rank].cpu()
                delta = (b @ (a @ row)) * float(weights.scalings[slot, s])
                if case.op != "gate_up":
                    delta = delta * float(routing.topk_weights[token, choice])
                target[span] += delta.to(target.dtype)
        return out
