"""Hooks that SGLang's expert runners call between their own kernels, over a lora_core backend.

SGLang keeps A as `[S, E, c·R, K]` with slices R apart, zero past an adapter's rank, and B as
`[S, E, N, R]` with the scaling multiplied in; a matrix that all experts share has 1 in place of E.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from sglang.srt.lora import lora_moe_runners
from sglang.srt.lora.lora_moe_runners import LoRAHooks
from sglang.srt.model_executor.runner import get_is_capture_mode
from torch import Tensor

from lora_core.batch import NO_LORA
from lora_core.integrations.sglang import moe_backend
from lora_core.moe import MoELoRABackend, MoELoRAWeights, MoERoute, MoERouting
from lora_core.weights import SliceLayout


class ExpertsInfo(Protocol):
    """What is read of SGLang's LoRAInfo.

    Attributes:
        gate_up_lora_a_weights: `[S, E or 1, c·R, H]`.
        gate_up_lora_b_weights: `[S, E, N, R]`.
        down_lora_a_weights: `[S, E, R, I]`.
        down_lora_b_weights: `[S, E or 1, H, R]`.
        lora_ranks: integers `[S]`.
        token_lora_mapping: int32 `[T]`, slot of each row or -1.
        max_lora_rank: R.
        has_active_lora: whether any row has an adapter.
    """

    gate_up_lora_a_weights: Tensor
    gate_up_lora_b_weights: Tensor
    down_lora_a_weights: Tensor
    down_lora_b_weights: Tensor
    lora_ranks: Tensor
    token_lora_mapping: Tensor
    max_lora_rank: int
    has_active_lora: bool


def install() -> None:
    """Put `build_lora_hooks` in the place of SGLang's own, which its runners look up at each forward."""
    lora_moe_runners.build_lora_hooks = build_lora_hooks


@cache
def _backend(device: torch.device) -> MoELoRABackend[Any]:
    return moe_backend(device)


def build_lora_hooks(
    hidden_states: Tensor,
    lora_info: ExpertsInfo | None,
    topk_ids: Tensor,  # noqa: ARG001 - SGLang's signature
) -> Any:
    """The two hooks of one forward of one layer; both share its routing.

    Args:
        hidden_states: `[T, H]`.
        lora_info: adapters and rows of the batch.
        topk_ids: `[T, k]`, negative where a pair was dropped.

    Returns:
        SGLang's LoRAHooks; without any hook where no row has an adapter.
    """
    if lora_info is None or lora_info.max_lora_rank == 0:
        return LoRAHooks()
    if not (lora_info.has_active_lora or get_is_capture_mode()):
        return LoRAHooks()
    info, backend = lora_info, _backend(hidden_states.device)
    route: MoERoute | None = None

    def routed(ids: Tensor, factors: Tensor) -> MoERoute:
        nonlocal route
        if route is None:
            slots = info.token_lora_mapping[: len(ids)]
            if len(slots) < len(ids):  # padding
                slots = torch.nn.functional.pad(slots, (0, len(ids) - len(slots)), value=NO_LORA)
            num_slots, num_experts = info.gate_up_lora_b_weights.shape[:2]
            routing = MoERouting(
                topk_ids=ids,
                topk_weights=factors,
                slots=slots,
                num_experts=num_experts,
                num_slots=num_slots,
            )
            route = backend.route(routing)
        assert route is not None
        return route

    def after_gate_up(x: Tensor, out: Tensor, factors: Tensor, ids: Tensor) -> None:
        a, b = info.gate_up_lora_a_weights, info.gate_up_lora_b_weights
        backend.gate_up(x, _weights(a, b, info), routed(ids, factors), out)

    def after_down(x: Tensor, out: Tensor, factors: Tensor, ids: Tensor) -> None:
        a, b = info.down_lora_a_weights, info.down_lora_b_weights
        pairs = x.view(*ids.shape, x.shape[-1])
        backend.down(pairs, _weights(a, b, info), routed(ids, factors), out, routed_weights=True)

    return LoRAHooks(after_gate_up=after_gate_up, after_down=after_down)


def _weights(a: Tensor, b: Tensor, info: ExpertsInfo) -> MoELoRAWeights:
    slices = a.shape[2] // b.shape[3]
    ranks = info.lora_ranks.to(torch.int32).unsqueeze(1).repeat(1, slices)
    return MoELoRAWeights(
        a=a.view(*a.shape[:2], slices, b.shape[3], a.shape[3]),
        b=b,
        ranks=ranks,
        scalings=torch.ones_like(ranks, dtype=torch.float32),
        layout=SliceLayout((b.shape[2] // slices,) * slices),
        num_experts=info.gate_up_lora_b_weights.shape[1],
    )
