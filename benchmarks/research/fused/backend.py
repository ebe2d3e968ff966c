"""FusedBackend: the triton backend, with the base product computed by the same kernel at decode."""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from benchmarks.research.fused.decode import counters, decode
from benchmarks.research.fused.prefill import fits, prefill
from benchmarks.research.fused.tables import PREFILL_FROM, RIDES_UP_TO
from lora_core.backend import BackendConfig, BaseModule
from lora_core.capabilities import Capabilities
from lora_core.triton_kit import INTERPRETED, family
from lora_core.weights import LoRAWeights
from lora_core_triton.backend import TritonBackend
from lora_core_triton.worklist import WorkList

_COUNTERS = 1 << 13


class FusedBackend(TritonBackend):
    """Computes the base product itself where LoRA can ride on it, else as the triton backend does.

    That is for at most 64 rows of x, a gathered batch, and a base that shows a plain weight of the
    dtype of x. Which form runs depends on these alone, never on the adapters of the batch.
    """

    name: ClassVar[str] = "fused"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[Capabilities] = TritonBackend.capabilities.model_copy(
        update={"owns_base": True}
    )

    def __init__(
        self, *, device: torch.device | str | None = None, config: BackendConfig | None = None
    ) -> None:
        super().__init__(device=device, config=config)
        self.workspace.sync["fused"] = torch.zeros(_COUNTERS, dtype=torch.int32, device=self.device)

    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        """`base(x)` plus the delta, by whichever form fits."""
        info = self._require_linear("linear", x, weights)
        weight, bias, rows = base.weight, base.bias, x.shape[0]
        form = None if weight is None else self._form(x, weight, bias, weights, info.work)
        if form is None or weight is None:
            return super().linear(x, base, weights)
        self._require_work("linear", rows, info, info.work, weights)
        self._require_last_contiguous("linear", "x", x)
        tiles = self._tiles(info, info.work, rows, weights)
        if form == "decode":
            sync = self.workspace.sync["fused"]
            return decode(x, weight, bias, weights, info.work, info.meta, tiles, sync)
        table = info.request_table()
        return prefill(x, weight, bias, weights, info.work, info.meta, tiles, table)

    @staticmethod
    def _form(
        x: Tensor, weight: Tensor, bias: Tensor | None, weights: LoRAWeights, work: WorkList
    ) -> Literal["decode", "prefill"] | None:
        """Which kernel computes base and LoRA together; None: neither."""
        layout, rows = weights.layout, x.shape[0]
        if not (
            tuple(weight.shape) == (layout.out_features, x.shape[1])
            and (weight.dtype, weight.device) == (x.dtype, x.device)
            and weight.stride(1) == 1
            and (bias is None or (bias.dtype == x.dtype and bias.stride(0) == 1))
        ):
            return None
        if 0 < rows <= RIDES_UP_TO and work.room.gathered and counters(layout) <= _COUNTERS:
            return "decode"
        if rows >= PREFILL_FROM and not work.room.gathered and _has_descriptors(x):
            return "prefill" if x.element_size() == 2 and fits(x, weight, layout) else None
        return None


@cache
def _family(device: torch.device) -> str:
    return family(device)


def _has_descriptors(x: Tensor) -> bool:
    """Whether the GPU copies tiles by tensor descriptors."""
    return INTERPRETED or _family(x.device) in ("sm90", "sm100")
