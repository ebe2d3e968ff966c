"""FusedBackend: the triton backend, with base product, shrink and expand in one kernel at decode."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.research.fused.decode import counters, decode
from benchmarks.research.fused.tables import RIDES_UP_TO
from lora_core.backend import BackendConfig, BaseModule
from lora_core.capabilities import Capabilities
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
        if weight is None or not self._rides(x, weight, bias, weights, info.work):
            return super().linear(x, base, weights)
        self._require_work("linear", rows, info, info.work, weights)
        self._require_last_contiguous("linear", "x", x)
        tiles = self._tiles(info, info.work, rows, weights)
        sync = self.workspace.sync["fused"]
        return decode(x, weight, bias, weights, info.work, info.meta, tiles, sync)

    @staticmethod
    def _rides(
        x: Tensor, weight: Tensor, bias: Tensor | None, weights: LoRAWeights, work: WorkList
    ) -> bool:
        """Whether one kernel computes base and LoRA together."""
        layout, rows = weights.layout, x.shape[0]
        return (
            0 < rows <= RIDES_UP_TO
            and work.room.gathered
            and counters(layout) <= _COUNTERS
            and tuple(weight.shape) == (layout.out_features, x.shape[1])
            and (weight.dtype, weight.device) == (x.dtype, x.device)
            and weight.stride(1) == 1
            and (bias is None or (bias.dtype == x.dtype and bias.stride(0) == 1))
        )
