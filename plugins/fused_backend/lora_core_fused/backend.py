"""FusedBackend: the triton backend, with the base product computed by the same kernel at decode."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lora_core.backend import BackendConfig, BaseModule
from lora_core.capabilities import Capabilities
from lora_core.weights import LoRAWeights
from lora_core_fused.decode import counters, decode
from lora_core_fused.tables import RIDES_UP_TO
from lora_core_triton.backend import TritonBackend, TritonBatchInfo

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
        info = self._require_linear("linear", x, weights)
        if not self._rides(x, base, weights, info):
            return super().linear(x, base, weights)
        assert base.weight is not None
        self._require_work("linear", x.shape[0], info, info.work, weights)
        self._require_last_contiguous("linear", "x", x)
        tiles = self._tiles(info, info.work, x.shape[0], weights)
        sync = self.workspace.sync["fused"]
        return decode(x, base.weight, base.bias, weights, info.work, info.meta, tiles, sync)

    def _rides(
        self, x: Tensor, base: BaseModule, weights: LoRAWeights, info: TritonBatchInfo
    ) -> bool:
        weight, bias = base.weight, base.bias
        return (
            0 < x.shape[0] <= RIDES_UP_TO
            and info.work.room.gathered
            and weight is not None
            and tuple(weight.shape) == (weights.layout.out_features, x.shape[1])
            and (weight.dtype, weight.device) == (x.dtype, x.device)
            and weight.stride(1) == 1
            and (bias is None or (bias.dtype == x.dtype and bias.stride(0) == 1))
            and counters(weights.layout) <= _COUNTERS
        )
