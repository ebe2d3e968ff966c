"""Cores for `FusedMoEWithLoRA` in Triton: plain expert weights, and packed 4-bit ones.

Pairs are sorted by expert once for both products, as the deltas are by virtual expert. Neither core
writes `hidden_states` unless its configuration says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import triton
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lora_core.errors import TensorMismatchError
from lora_core.layers.moe import CoreConfig, ExpertsCore, ExpertsDeltas
from lora_core.triton_kit import Tile, family
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.kernels.bound import bound
from lora_core_moe_virtual_experts.kernels.combine import combine_pairs
from lora_core_moe_virtual_experts.kernels.product import experts_product
from lora_core_moe_virtual_experts.kernels.route import launch_row_route

Activation = Callable[[Tensor], Tensor]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., gate | up]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True, eq=False)
class ExpertsWeight:
    """One projection of all experts.

    Attributes:
        data: `[E, N, K]`; packed: uint8 `[E, N, K / 2]`, the even k in the low half.
        scales: packed: `[E, N, K / group]`; a value is `(half byte - 8) * scale`.
    """

    data: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        packed = self.data.dtype == torch.uint8
        if (
            self.data.dim() != 3
            or not self.data.is_contiguous()
            or packed != (self.scales is not None)
        ):
            raise TensorMismatchError(
                f"ExpertsWeight.data is {tuple(self.data.shape)} {self.data.dtype}: expected contiguous "
                "[E, N, K], or uint8 [E, N, K / 2] with scales"
            )
        if self.scales is not None and (
            self.scales.shape[:2] != self.data.shape[:2]
            or not self.scales.is_contiguous()
            or self.in_features % self.scales.shape[2]
        ):
            raise TensorMismatchError(
                f"ExpertsWeight.scales is {tuple(self.scales.shape)}: expected contiguous "
                f"[{self.data.shape[0]}, {self.data.shape[1]}, groups that divide {self.in_features}]"
            )

    @property
    def in_features(self) -> int:
        """K."""
        return self.data.shape[2] * (1 if self.scales is None else 2)

    @property
    def group(self) -> int:
        """Values of k that share a scale; 1 where nothing is packed."""
        return 1 if self.scales is None else self.in_features // self.scales.shape[2]


def pack_int4(weight: Tensor, group: int) -> ExpertsWeight:
    """Round weights to 4 bits, symmetric, with one scale per `group` inputs.

    Args:
        weight: `[E, N, K]`, K divisible by `group` and by 2.
        group: values of k that share a scale.
    """
    experts, outputs, inputs = weight.shape
    groups = weight.float().view(experts, outputs, inputs // group, group)
    scales = (groups.abs().amax(-1) / 7).clamp(min=1e-10).to(weight.dtype)
    halves = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int32) + 8
    halves = halves.view(experts, outputs, inputs).to(torch.uint8)
    return ExpertsWeight((halves[..., ::2] | (halves[..., 1::2] << 4)).contiguous(), scales)


class TritonExpertsCore(ExpertsCore):
    """Experts as two grouped products, of plain or packed weights.

    Args:
        gate_up: the first projection.
        down: the second.
        activation: `[T, k, N]` -> `[T, k, I]`.
        config: how to run.

    Raises:
        TensorMismatchError: projections of different numbers of experts.
    """

    def __init__(
        self,
        gate_up: ExpertsWeight,
        down: ExpertsWeight,
        *,
        activation: Activation = silu_and_mul,
        config: CoreConfig | None = None,
    ) -> None:
        if gate_up.data.shape[0] != down.data.shape[0]:
            raise TensorMismatchError(
                f"gate_up has {gate_up.data.shape[0]} experts, down has {down.data.shape[0]}"
            )
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.config = config or CoreConfig()
        self.num_experts = gate_up.data.shape[0]

    @override
    def with_config(self, config: CoreConfig) -> Self:
        return type(self)(self.gate_up, self.down, activation=self.activation, config=config)

    @override
    def run(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        deltas: ExpertsDeltas | None = None,
    ) -> Tensor:
        if not topk_ids.numel():
            return hidden_states if self.config.inplace else torch.empty_like(hidden_states)
        tile = tiles.PRODUCT.pick(
            family(hidden_states.device),
            spread=topk_ids.numel() // self.num_experts,
            packed=int(self.gate_up.scales is not None),
        )
        groups = launch_row_route(topk_ids.flatten(), self.num_experts, tile["BM"])
        inner = self._product(hidden_states, self.gate_up, groups, topk_ids.shape, tile)
        if deltas is not None:
            deltas.gate_up(inner)
        activated = self.activation(inner)
        pairs = self._product(activated, self.down, groups, topk_ids.shape, tile)
        if deltas is not None:
            deltas.down(activated, pairs)
        out = hidden_states if self.config.inplace else torch.empty_like(hidden_states)
        block_n = 512
        bound(combine_pairs, TOP_K=topk_ids.shape[1], BN=block_n, num_warps=4)(
            (topk_ids.shape[0], triton.cdiv(out.shape[1], block_n), 1),
            *(pairs, topk_weights.contiguous(), out, out.shape[1]),
        )
        return out

    def _product(
        self,
        x: Tensor,
        weight: ExpertsWeight,
        groups: tuple[Tensor, Tensor],
        shape: torch.Size,
        tile: Tile,
    ) -> Tensor:
        outputs, packed = weight.data.shape[1], weight.scales is not None
        out = torch.empty(*shape, outputs, dtype=x.dtype, device=x.device)
        bound(
            experts_product,
            TOP_K=shape[1],
            PAIRS=x.dim() == 3,
            INT4=packed,
            GROUP=weight.group,
            BM=tile["BM"],
            BN=tile["BN"],
            BK=tile["BK"],
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )(
            (groups[1].shape[0], triton.cdiv(outputs, tile["BN"]), 1),
            *(
                x,
                weight.data,
                weight.data if weight.scales is None else weight.scales,
                out,
                *groups,
            ),
            *(weight.in_features, outputs, self.num_experts, x.stride(-2)),
        )
        return out
