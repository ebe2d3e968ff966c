"""LoRALMHead: the head, which sees only the rows that logits are wanted of."""

from __future__ import annotations

from torch import Tensor

from lora_core.layers.linear import LoRALinear


class LoRALMHead(LoRALinear):
    """A head `[..., K] -> [..., V]` with adapters, tied to the embedding or not.

    Its rows are those of one logits pass of the batch (`LoRABatch.logits`); a forward that calls the
    head several times, chunk after chunk, says which pass each call is.
    """

    def forward(self, x: Tensor, *, logits_pass: int = 0) -> Tensor:
        """`base_layer(x)`, plus each row's adapter while a batch is prepared.

        Args:
            x: `[..., K]`, the rows of the pass in request order.
            logits_pass: which pass of the batch.
        """
        return self._forward(x, logits_pass=logits_pass)
