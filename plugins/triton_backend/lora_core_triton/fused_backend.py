"""FusedTritonBackend: the triton backend with the expand inside its own base product, at prefill."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from typing_extensions import override

from lora_core.backend import BaseModule
from lora_core.batch import NO_LORA, LoRABatch
from lora_core.capabilities import Capabilities, GraphKind
from lora_core.staged import int32
from lora_core.triton_kit import Tile, family
from lora_core.weights import LoRAWeights
from lora_core.workspace import GraphRoom
from lora_core_triton import fused_plan
from lora_core_triton.backend import TritonBackend, TritonBatchInfo
from lora_core_triton.fused import product
from lora_core_triton.fused_plan import Plan
from lora_core_triton.fused_tables import FUSED_FROM, PRODUCT, TWO_KERNELS, column_step
from lora_core_triton.shrink import shrink
from lora_core_triton.tables import band


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedBatchInfo(TritonBatchInfo):
    """The batch of the triton backend, and the plan of its products.

    Attributes:
        plan: None where the batch, or the graph kind, has too few rows for any product.
    """

    plan: Plan | None


class FusedTritonBackend(TritonBackend):
    """Computes the base product itself where that saves the second pass over the output.

    Which form a site takes depends on the site, the rows of x and the lengths of the batch, never on
    adapters: a row without an adapter has the same bits whoever stands beside it.
    """

    name: ClassVar[str] = "triton_fused"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[Capabilities] = TritonBackend.capabilities.model_copy(
        update={"owns_base": True}
    )

    @override
    def _prepare(self, batch: LoRABatch, graph: GraphKind | None) -> FusedBatchInfo:
        info = super()._prepare(batch, graph)
        try:
            plan = self._plan(batch, info)
        except BaseException:
            if graph is not None:  # the work list is already on its way
                self._neutralise(graph)
            raise
        of_triton = {f.name: getattr(info, f.name) for f in fields(info) if f.init}
        return FusedBatchInfo(**of_triton, plan=plan)

    def _plan(self, batch: LoRABatch, info: TritonBatchInfo) -> Plan | None:
        room = None if info.graph is None else self.workspace.graph_room[info.graph]
        if (info.num_tokens if room is None else room.max_tokens) < FUSED_FROM:
            return None
        scales = None
        if batch.scales is not None:
            scales = np.fromiter(batch.scales, np.float32, len(batch.scales)).view(np.int32)
        tiles, seams = fused_plan.make(int32(batch.lengths), int32(batch.slots), scales)
        return fused_plan.send(
            self.workspace.staging,
            tiles,
            seams,
            device=self.device,
            static=None if info.graph is None else self.workspace.static[_home(info.graph)],
            room=room,
        )

    @override
    def _add_static(self, kind: GraphKind, room: GraphRoom) -> None:
        words = fused_plan.plan_words(room.max_tokens, room.max_requests)
        plan = torch.empty(words, dtype=torch.int32, device=self.device)
        self.workspace.static[_home(kind)] = plan

    @override
    def _neutralise(self, kind: GraphKind) -> None:
        super()._neutralise(kind)
        self.workspace.static[_home(kind)].fill_(NO_LORA)

    @override
    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        """`base(x)` plus the delta: one product, or the triton backend's two kernels behind the base."""
        info = self._require_linear("linear", x, weights)
        assert isinstance(info, FusedBatchInfo)
        weight = base.weight
        if weight is None or info.plan is None or self.why_two_kernels(x, base, weights):
            return self._linear("linear", x, base, weights, info, info.work)
        rows, work, eager = x.shape[0], info.work, info.graph is None
        self._require_work("linear", rows, info, work, weights)
        h = None
        if self._launches(info, work, rows):
            tiles = self._tiles(info, work, rows, weights)
            h = shrink(
                x, weights, work, info.meta, self.workspace, tiles, scratch=eager, h_scratch=eager
            )
        return product(x, weight, base.bias, h, weights, info.plan, _tile(x, weights))

    @staticmethod
    def why_two_kernels(x: Tensor, base: BaseModule, weights: LoRAWeights) -> str | None:
        """Why a site takes the triton backend's two kernels behind the base module; None: it does not.

        Args:
            x: [T', K].
            base: the module.
            weights: of the site.
        """
        if x.shape[0] < FUSED_FROM:
            return f"fewer than {FUSED_FROM} rows"
        weight, bias, n = base.weight, base.bias, weights.layout.out_features
        if weight is None:
            return "the base shows no plain weight"
        if _has_hooks(base):
            return "the base has forward hooks, which only a call runs"
        if tuple(weight.shape) != (n, x.shape[1]):
            return "the weight is not [N, K]"
        if (weight.dtype, weight.device) != (x.dtype, x.device):
            return "x and the weight differ in dtype or device"
        if bias is not None and (bias.dtype != x.dtype or bias.stride(0) != 1):
            return "the bias is of another dtype, or strided"
        if n * x.element_size() % 16 or not (_has_descriptor(x) and _has_descriptor(weight)):
            return "rows of x, the weight or the output are not contiguous in steps of 16 bytes"
        if _tile(x, weights) is TWO_KERNELS:
            return "no tile pays at this GPU, dtype and layout (fused_tables.PRODUCT)"
        return None


def _tile(x: Tensor, weights: LoRAWeights) -> Tile:
    return PRODUCT.pick(
        _family(x.device),
        rows=band(x.shape[0]),
        columns=weights.layout.out_features,
        k=x.shape[1],
        step=column_step(weights.layout),
        bytes=x.element_size(),
    )


def _home(kind: GraphKind) -> str:
    return f"{kind} plan"


def _has_descriptor(tensor: Tensor) -> bool:
    """Whether a tensor descriptor can address a matrix: 16-byte rows that lie one behind the other."""
    return (
        tensor.stride(1) == 1
        and tensor.stride(0) * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
    )


def _has_hooks(base: BaseModule) -> bool:
    """Whether calling the module does more than its product."""
    module = base if isinstance(base, nn.Module) else getattr(base, "module", None)
    return isinstance(module, nn.Module) and bool(
        module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook()  # type: ignore[no-untyped-call]  # noqa: SLF001
    )


@cache
def _family(device: torch.device) -> str:
    return family(device)
