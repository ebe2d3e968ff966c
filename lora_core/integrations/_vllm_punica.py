"""PunicaWrapper: the interface that vLLM's LoRA layers call, over any lora_core backend.

vLLM keeps A and B of each packed projection in tensors of their own, `[S, 1, R, K]` and
`[S, 1, N, R]`; each is a lora_core site of one slice, without a copy. Ranks below R are zero there,
and scaling is multiplied into B, so every slot has rank R and factor 1.

Rows of tokens and rows of sampled positions are two batches alive at once: two backend instances.
On a GPU both are prepared as graph batches, in fixed buffers, so that a CUDA graph that vLLM
captured follows `update_metadata`. Ops are torch custom ops, which torch.compile does not look into.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from lora_core.backend import LoRABackend
from lora_core.batch import NO_LORA, LoRABatch
from lora_core.errors import UnsupportedOpError
from lora_core.integrations.vllm import dense_backend, moe_backend
from lora_core.moe import MoELoRABackend, MoELoRAWeights, MoERouting
from lora_core.weights import LoRAWeights, SliceLayout


class TokenMapping:
    """What vLLM's expert-parallel dispatch reads of `token_mapping_meta`.

    Attributes:
        token_lora_mapping: int32 `[max tokens]` at a fixed address, slot of each row, -1 past the
            batch.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.token_lora_mapping = torch.full((rows,), NO_LORA, dtype=torch.int32, device=device)

    def fill(self, slots: Tensor) -> None:
        """Take the slots of a batch; the rows past it belong to no adapter."""
        self.token_lora_mapping[: len(slots)].copy_(slots)
        self.token_lora_mapping[len(slots) :].fill_(NO_LORA)


class PunicaWrapper(PunicaWrapperBase):  # type: ignore[misc]
    """vLLM's LoRA compute by the backend that `LORA_CORE_VLLM` names.

    Args:
        max_num_batched_tokens: rows of the largest forward.
        max_batches: requests of the largest forward.
        device: of the model.
        kwargs: `lora_config`, and whatever else a release of vLLM passes.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._embeddings_indices.zero_()
        where = torch.device(device)
        self.tokens, self.prompts = dense_backend(where), dense_backend(where)
        self.token_mapping_meta = TokenMapping(max_num_batched_tokens, where)
        self.prompt_mapping_meta = TokenMapping(max_num_batched_tokens, where)
        self._experts: MoELoRABackend[Any] | None = None
        self._weights: dict[tuple[object, ...], tuple[LoRAWeights, tuple[Tensor, ...]]] = {}
        self._graph = where.type == "cuda" and "prefill" in self.tokens.capabilities.graphs
        for backend in (self.tokens, self.prompts):
            if self._graph:
                backend.init_graph(
                    "prefill", max_requests=max_batches, max_tokens=max_num_batched_tokens
                )
            self._prepare(backend, [])  # vLLM's profiling runs come before any metadata
        self.handle = id(self)
        _WRAPPERS[self.handle] = self

    # -- metadata ----------------------------------------------------------------------------------

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Prepare both batches from vLLM's mapping of rows to adapter ids; id 0 is the base model."""
        del kwargs
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        # the embedding layer gathers with these for padded rows too, where vLLM leaves what was there
        self._embeddings_indices[len(mapping.index_mapping) :].zero_()
        self.is_prefill = mapping.is_prefill
        slot_of = {id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None}

        def slots(ids: Sequence[int]) -> list[int]:
            return [slot_of[id_] if id_ > 0 else NO_LORA for id_ in ids]

        self._prepare(self.tokens, slots(mapping.index_mapping))
        self._prepare(self.prompts, slots(mapping.prompt_mapping))
        self.token_mapping_meta.fill(self.token_lora_indices)
        self.prompt_mapping_meta.fill(self.sampler_indices)

    def _prepare(self, backend: LoRABackend[Any], slots: list[int]) -> None:
        runs = [(slot, len(list(rows))) for slot, rows in groupby(slots)]
        batch = LoRABatch(lengths=[length for _, length in runs], slots=[slot for slot, _ in runs])
        backend.prepare_batch(batch, graph="prefill" if self._graph else None)

    def site(self, a: Tensor | None, b: Tensor | None) -> LoRAWeights:
        """Tensors of vLLM as a site of one slice; a missing half has the width 1 and is not read."""
        key = tuple(t if t is None else (t.data_ptr(), t.shape) for t in (a, b))
        if key not in self._weights:
            some = a if a is not None else b
            assert some is not None
            slots, rank = some.shape[0], a.shape[2] if a is not None else some.shape[-1]
            stacked_a = a if a is not None else some.new_zeros(slots, 1, rank, 1)
            stacked_b = b.squeeze(1) if b is not None else some.new_zeros(slots, 1, rank)
            site = LoRAWeights(
                a=stacked_a,
                b=stacked_b,
                ranks=torch.full((slots, 1), rank, dtype=torch.int32, device=some.device),
                scalings=torch.ones(slots, 1, dtype=torch.float32, device=some.device),
                layout=SliceLayout((stacked_b.shape[1],)),
            )
            kept = tuple(tensor for tensor in (a, b) if tensor is not None)
            self._weights[key] = site, kept  # while they are kept, their addresses are their own
        return self._weights[key][0]

    # -- dense -------------------------------------------------------------------------------------

    def add_shrink(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> Tensor:
        """`y[i] = x @ A[i].T * scale`, `[n, T, R]` float32; rows without an adapter stay."""
        del kwargs
        torch.ops.lora_core.vllm_shrink(y, x, list(lora_a_stacked), scale, self.handle)
        return y

    def add_expand(
        self,
        y: Tensor,
        x: Tensor | tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """`y[:, slice i] += x[i] @ B[i].T`; `add_inputs=False` overwrites rows with an adapter."""
        del kwargs
        torch.ops.lora_core.vllm_expand(
            y, list(x), list(lora_b_stacked), list(output_slices), offset_start, add_inputs, self.handle
        )  # fmt: skip
        return y

    def add_lora_embedding(
        self,
        y: Tensor,
        x: Tensor,
        lora_b_stacked: Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """`y += x @ B.T`, where x are rows that the layer gathered from A."""
        del kwargs
        torch.ops.lora_core.vllm_expand(
            y, [x], [lora_b_stacked], [lora_b_stacked.shape[2]], 0, add_inputs, self.handle
        )
        return y

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """`y[:, slice i] += x @ A[i].T @ B[i].T * scale`."""
        del buffer, kwargs
        torch.ops.lora_core.vllm_linear(
            y, x, list(lora_a_stacked), list(lora_b_stacked), scale, list(output_slices), add_inputs, False,
            self.handle,
        )  # fmt: skip
        return y

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`y += x @ A.T @ B.T * scale`, over the sampled rows."""
        del buffer, kwargs
        torch.ops.lora_core.vllm_linear(
            y, x, [lora_a_stacked], [lora_b_stacked], scale, [lora_b_stacked.shape[2]], True, True, self.handle
        )  # fmt: skip
        return y

    def apply_lora_full_linear(
        self,
        y: Tensor,
        x: Tensor,
        weight_stacked: Tensor,
        bias_stacked: Tensor,
        module_enabled: Tensor,
    ) -> Tensor:
        """Sampled rows whose adapter brings a whole head use its weight `[S, 1, N, K]` and bias."""
        adapter_y = y.new_zeros(1, x.shape[0], weight_stacked.shape[2], dtype=torch.float32)
        self.run_shrink(self.prompts, adapter_y, x, [weight_stacked], 1.0)
        y.copy_(self._select_full_linear_output(y, adapter_y[0], bias_stacked, module_enabled))
        return y

    # -- experts -----------------------------------------------------------------------------------

    def add_lora_w13(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        num_tokens: int,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: Tensor,
        local_num_experts: int,
        top_k: int,
        num_slices: int,
        fully_sharded: bool,
        use_tuned_config: bool,
        add_inputs: bool = True,
        token_lora_mapping: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, None, Tensor]:
        """The delta of gate and up, before the activation.

        Returns:
            what vLLM hands to `add_lora_w2`: ids, expert map, None, slots.
        """
        del w1, w2, max_loras, top_k, num_slices, use_tuned_config, kwargs
        self._refuse_sharded(fully_sharded)
        slots = token_lora_mapping
        if slots is None:
            slots = self.token_mapping_meta.token_lora_mapping[:num_tokens]
        torch.ops.lora_core.vllm_experts(
            y.view(-1, top_k_num, y.shape[-1]), x, list(lora_a_stacked), list(lora_b_stacked), topk_ids,
            topk_weights, expert_map, slots, adapter_enabled, local_num_experts, False, add_inputs,
            self.handle,
        )  # fmt: skip
        return topk_ids, expert_map, None, slots

    def add_lora_w2(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        sorted_token_ids_lora: Tensor | None,
        expert_ids_lora: Tensor | None,
        num_tokens_post_padded_lora: Tensor | None,
        token_lora_mapping: Tensor | None,
        num_tokens: int,
        w1: Tensor,
        w2: Tensor,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: Tensor,
        top_k: int,
        fully_sharded: bool,
        tp_rank: int,
        use_tuned_config: bool,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """The delta of down times the routing weights, before vLLM sums over experts."""
        del num_tokens_post_padded_lora, num_tokens, w1, w2, max_loras, top_k, tp_rank
        del use_tuned_config, kwargs
        self._refuse_sharded(fully_sharded)
        torch.ops.lora_core.vllm_experts(
            y.view(-1, top_k_num, y.shape[-1]), x, list(lora_a_stacked), list(lora_b_stacked),
            sorted_token_ids_lora, topk_weights, expert_ids_lora, token_lora_mapping, adapter_enabled,
            lora_a_stacked[0].shape[1], True, add_inputs, self.handle,
        )  # fmt: skip

    def _refuse_sharded(self, fully_sharded: bool) -> None:
        if fully_sharded:
            raise UnsupportedOpError(
                backend="lora_core in vLLM",
                op="experts",
                limit="LoRA sharded like the base weights",
                value="fully_sharded_loras=True",
            )

    # -- inside the custom ops -----------------------------------------------------------------------

    def _backend(self, sampled: bool) -> tuple[LoRABackend[Any], Tensor]:
        if sampled:
            return self.prompts, self.prompt_mapping_meta.token_lora_mapping
        return self.tokens, self.token_mapping_meta.token_lora_mapping

    def _nothing_to_do(self, backend: LoRABackend[Any], rows: int) -> bool:
        """Eager without adapters, or no rows; a captured graph may be replayed with adapters."""
        info = backend.batch_info
        assert info is not None
        return rows == 0 or (info.graph is None and not info.has_active_lora)

    def run_shrink(
        self, backend: LoRABackend[Any], y: Tensor, x: Tensor, a: Sequence[Tensor], scale: float
    ) -> None:
        x = x.reshape(-1, x.shape[-1])
        if self._nothing_to_do(backend, len(x)):
            return
        mapping = self._backend(backend is self.prompts)[1]
        live = (mapping[: len(x)] != NO_LORA).unsqueeze(1)
        for target, stacked in zip(y, a, strict=True):
            h = backend.shrink(x.to(stacked.dtype), self.site(stacked, None))[:, 0]
            target.copy_(torch.where(live, h * scale if scale != 1 else h, target))

    def run_expand(
        self,
        backend: LoRABackend[Any],
        y: Tensor,
        h: Sequence[Tensor],
        sites: Sequence[LoRAWeights],
        widths: Sequence[int],
        offset: int,
        add_inputs: bool,
    ) -> None:
        y = y.view(-1, y.shape[-1])
        if self._nothing_to_do(backend, len(y)):
            return
        live = (self._backend(backend is self.prompts)[1][: len(y)] != NO_LORA).unsqueeze(1)
        for part, site, width in zip(h, sites, widths, strict=True):
            out = y[:, offset : offset + width]
            if not add_inputs:
                out.masked_fill_(live, 0)
            backend.expand(part.float().unsqueeze(1), site, out)
            offset += width

    def run_linear(
        self,
        y: Tensor,
        x: Tensor,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        scale: float,
        widths: Sequence[int],
        add_inputs: bool,
        sampled: bool,
    ) -> None:
        backend, _ = self._backend(sampled)
        x = x.reshape(-1, x.shape[-1])
        if self._nothing_to_do(backend, len(x)):
            return
        sites = [self.site(*pair) for pair in zip(a, b, strict=True)]
        parts = [backend.shrink(x.to(site.a.dtype), site)[:, 0] for site in sites]
        if scale != 1:
            parts = [part * scale for part in parts]
        self.run_expand(backend, y, parts, sites, widths, 0, add_inputs)

    def run_experts(
        self,
        y: Tensor,
        x: Tensor,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        slots: Tensor,
        adapter_enabled: Tensor,
        num_experts: int,
        down: bool,
        add_inputs: bool,
    ) -> None:
        if y.numel() == 0:
            return
        if self._experts is None:
            self._experts = moe_backend(y.device)
        backend = self._experts
        num_slots, rank = a[0].shape[0], a[0].shape[2]
        enabled = adapter_enabled[slots.clamp(min=0).long()] > 0
        slots = torch.where(enabled, slots, NO_LORA).to(torch.int32)
        route = backend.route(
            MoERouting(
                topk_ids=topk_ids,
                topk_weights=topk_weights,
                slots=slots,
                num_experts=num_experts,
                num_slots=num_slots,
                expert_map=expert_map,
            )
        )
        live = (slots != NO_LORA).view(-1, 1, 1)
        begin = 0
        for stacked_a, stacked_b in zip(a, b, strict=True):
            width = stacked_b.shape[2]
            weights = MoELoRAWeights(
                a=stacked_a.unsqueeze(2),
                b=stacked_b,
                ranks=torch.full((num_slots, 1), rank, dtype=torch.int32, device=y.device),
                scalings=torch.ones(num_slots, 1, device=y.device),
                layout=SliceLayout((width,)),
                num_experts=num_experts,
            )
            delta = torch.empty(*topk_ids.shape, width, dtype=stacked_a.dtype, device=y.device)
            rows = x.to(stacked_a.dtype)
            if down:
                rows = rows.reshape(*topk_ids.shape, -1)
                backend.down(rows, weights, route, delta, routed_weights=True, accumulate=False)
            else:
                backend.gate_up(rows, weights, route, delta, accumulate=False)
            out = y[..., begin : begin + width]
            out.copy_(torch.where(live, out + delta if add_inputs else delta, out))
            begin += width


_WRAPPERS: WeakValueDictionary[int, PunicaWrapper] = WeakValueDictionary()
"""Handle -> wrapper: what a custom op is given, since its arguments are tensors and numbers."""


@torch.library.custom_op("lora_core::vllm_shrink", mutates_args=("y",))
def _shrink(y: Tensor, x: Tensor, a: Sequence[Tensor], scale: float, handle: int) -> None:
    wrapper = _WRAPPERS[handle]
    wrapper.run_shrink(wrapper.tokens, y, x, a, scale)


@torch.library.custom_op("lora_core::vllm_expand", mutates_args=("y",))
def _expand(
    y: Tensor,
    h: Sequence[Tensor],
    b: Sequence[Tensor],
    widths: Sequence[int],
    offset: int,
    add_inputs: bool,
    handle: int,
) -> None:
    wrapper = _WRAPPERS[handle]
    sites = [wrapper.site(None, stacked) for stacked in b]
    wrapper.run_expand(wrapper.tokens, y, h, sites, widths, offset, add_inputs)


@torch.library.custom_op("lora_core::vllm_linear", mutates_args=("y",))
def _linear(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    widths: Sequence[int],
    add_inputs: bool,
    sampled: bool,
    handle: int,
) -> None:
    _WRAPPERS[handle].run_linear(y, x, a, b, scale, widths, add_inputs, sampled)


@torch.library.custom_op("lora_core::vllm_experts", mutates_args=("y",))
def _experts(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    slots: Tensor,
    adapter_enabled: Tensor,
    num_experts: int,
    down: bool,
    add_inputs: bool,
    handle: int,
) -> None:
    _WRAPPERS[handle].run_experts(
        y, x, a, b, topk_ids, topk_weights, expert_map, slots, adapter_enabled, num_experts, down, add_inputs
    )  # fmt: skip
