"""The wrong backends, as data: each is the victim with one deliberate fault.

A fault is a list of (what the victim's source says, what the mutant says instead); each piece must
occur exactly once. `hint` names the check that is expected to notice, so that it can be run first.
"""

# ruff: noqa: ISC004 - pieces of source, one string each
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One deliberate fault.

    Attributes:
        name: of the mutant.
        about: what is wrong.
        patches: (old, new) pieces of the victim's source.
        hint: a check that should notice.
        cuda: only a CUDA device can show it.
    """

    name: str
    about: str
    patches: tuple[tuple[str, str], ...]
    hint: str
    cuda: bool = False


_RESET = """        info = self.batch_info
        self.batch_info = None
        if info is not None and info.graph is not None:
            self._neutralise(info.graph)
"""
_ASSIGN = "        self.batch_info = self._describe(batch, graph, target, room, sizes, covered)\n"
_RETURN_INFO = _ASSIGN + "        return self.batch_info\n"
_ACQUIRE = "        entry = self.workspace.staging.acquire(words)\n"
_PREPARE = """    def prepare_batch(self, batch, *, graph=None):
        self.reset_batch_state()
"""
_BOUND = "    def _check_expand(self, h, weights, out) -> None:\n"
_SHRINK_SUM = "        return (x.float()[:, None, None, :] * a).sum(-1)\n"
_LIVE = "            live = (columns < ranks[:, s, None]) & mine[:, None]  # [T', R]\n"
_PRODUCT = "            product = torch.where(live[:, None], h[:, s, None] * b[:, span], 0.0)\n"
_DELTA = "            delta = product.sum(-1) * (scalings[:, s] * scales)[:, None]\n"
_TOTAL = "            total = (out[:, span].float() + delta).to(out.dtype)\n"
_WRITE = "            out[:, span] = torch.where(applies, total, out[:, span])\n"
_SPAN = """            span = slice(layout.offsets[s], layout.offsets[s + 1])
            live ="""
_SLOTS = """        slots = rows.slots[:num_rows].long()
        return functional.pad(slots, (0, num_rows - len(slots)), value=NO_LORA)
"""
_LM_HEAD = """        rows = info.passes[logits_pass]
"""
_SHRINK_OP = """        info = self._require_linear("shrink", x, weights)
        self._require_rows("shrink", x.shape[0], info.num_tokens)
        return self._shrink(x, weights, info.rows)
"""
_EXPAND_OP = """        self._expand(h, weights, out, info.rows)
        return out

    def linear"""
_LINEAR_OP = """        info = self._require_linear("linear", x, weights)
        self._require_rows("linear", x.shape[0], info.num_tokens)
        return self._linear(x, base, weights, info.rows, info)
"""
_ROW_SLOTS = (
    "            host[at : at + used] = np.repeat(np.asarray(batch.slots, np.int32), lengths)\n"
)

FAULTS: tuple[Fault, ...] = (
    # -- batch state --
    Fault(
        "state_kept_after_reset", "reset keeps the batch", ((_RESET, "        pass\n"),), "no_batch"
    ),
    Fault(
        "only_batch_info_cleared",
        "a second attribute with the batch's rows survives the reset",
        (
            (
                _RETURN_INFO,
                _ASSIGN
                + "        self.rows = self.batch_info.rows\n        return self.batch_info\n",
            ),
        ),
        "remembers_nothing",
    ),
    Fault(
        "static_not_neutralised",
        "reset clears batch_info and leaves the static buffers of the last batch",
        ((_RESET, "        self.batch_info = None\n"),),
        "stray_replay",
    ),
    Fault(
        "pass_index_stored",
        "lm_head keeps the pass of its last call and counts on",
        (
            (
                _LM_HEAD,
                "        self.turn = getattr(self, 'turn', -1) + 1\n        rows = info.passes[self.turn % len(info.passes)]\n",
            ),
        ),
        "lm_head",
    ),
    Fault(
        "old_metadata_when_lengths_repeat",
        "metadata is taken from a cache keyed by lengths",
        (
            (
                _PREPARE,
                _PREPARE
                + "        key = (tuple(batch.lengths), batch.mode, graph, len(batch.logits))\n"
                "        if graph is None and key in _CACHE and self.device.type == _CACHE[key].req_slots.device.type:\n"
                "            self.batch_info = _CACHE[key]\n            return self.batch_info\n",
            ),
            (
                _RETURN_INFO,
                _ASSIGN + "        _CACHE[key] = self.batch_info\n        return self.batch_info\n",
            ),
            ("class Victim(LoRABackend):", "_CACHE = {}\n\n\nclass Victim(LoRABackend):"),
        ),
        "many_batches",
    ),
    Fault(
        "state_on_the_class",
        "batch_info is shared by all instances",
        (
            (
                _RETURN_INFO,
                _ASSIGN
                + "        type(self).batch_info = self.batch_info\n        return self.batch_info\n",
            ),
        ),
        "remembers_nothing",
    ),
    Fault(
        "failing_prepare_keeps_old_batch",
        "the old batch is cleared only after the new one is built",
        ((_PREPARE, "    def prepare_batch(self, batch, *, graph=None):\n"),),
        "failing_prepare",
    ),
    Fault(
        "prepare_returns_another",
        "prepare_batch returns a copy of what it keeps",
        (
            (
                _RETURN_INFO,
                _ASSIGN
                + "        import dataclasses\n        return dataclasses.replace(self.batch_info)\n",
            ),
        ),
        "batch_info",
    ),
    Fault(
        "reset_before_prepare_raises",
        "reset wants a batch",
        (
            (
                _RESET,
                _RESET.replace(
                    "        self.batch_info = None\n",
                    "        if info is None:\n            raise RuntimeError('no batch')\n        self.batch_info = None\n",
                ),
            ),
            (
                _PREPARE,
                _PREPARE.replace(
                    "        self.reset",
                    "        if self.batch_info is not None:\n            self.reset",
                ),
            ),
        ),
        "no_batch",
    ),
    Fault(
        "no_batch_runs_the_base",
        "linear without a batch answers with the base model",
        (
            (
                _LINEAR_OP,
                "        if self.batch_info is None:\n            return base(x)\n" + _LINEAR_OP,
            ),
        ),
        "no_batch",
    ),
    Fault(
        "sync_left_counting",
        "a counter in workspace.sync is not brought back to zero",
        (
            (
                _SHRINK_OP,
                "        self.workspace.sync.setdefault('arrived', torch.zeros(1, dtype=torch.int32, device=x.device)).add_(1)\n"
                + _SHRINK_OP,
            ),
        ),
        "shrink",
    ),
    Fault(
        "metadata_in_scratch",
        "slots of rows are kept in scratch between ops",
        (
            (
                _RETURN_INFO,
                _ASSIGN
                + "        self.workspace.scratch['slots'] = self.batch_info.rows.slots.clone()\n        return self.batch_info\n",
            ),
            (
                "        slots = self._slots(rows, x.shape[0]).clamp(min=0)\n",
                "        slots = self.workspace.scratch['slots'][: x.shape[0]].long().clamp(min=0)\n"
                "        slots = functional.pad(slots, (0, x.shape[0] - len(slots)))\n",
            ),
        ),
        "shrink",
    ),
    # -- request view --
    Fault(
        "indptr_one_off",
        "the request view begins at the end of the first request",
        (
            (
                "        indptr = [0, *accumulate(batch.lengths)]\n",
                "        indptr = [*accumulate(batch.lengths), sum(batch.lengths)]\n",
            ),
        ),
        "request_view",
    ),
    Fault(
        "view_built_from_chunks",
        "requests of more than 16 tokens appear as several",
        (
            (_PREPARE, _PREPARE + "        batch = _chunked(batch)\n"),
            (
                "class Victim(LoRABackend):",
                "def _chunked(batch):\n    import dataclasses\n"
                "    if batch.logits or batch.scales is not None:\n        return batch\n"
                "    parts = [(min(16, n - at), s) for n, s in zip(batch.lengths, batch.slots) for at in range(0, max(n, 1), 16)]\n"
                "    return dataclasses.replace(batch, lengths=[n for n, _ in parts], slots=[s for _, s in parts])\n\n\n"
                "class Victim(LoRABackend):",
            ),
        ),
        "request_view",
    ),
    Fault(
        "empty_requests_active",
        "has_active_lora counts requests without tokens",
        (("any(slot != NO_LORA and n for slot, n", "any(slot != NO_LORA for slot, n"),),
        "request_view",
    ),
    # -- numbers --
    Fault(
        "scaling_ignored",
        "scalings are not applied",
        ((_DELTA, _DELTA.replace("scalings[:, s] * scales", "scales")),),
        "expand",
    ),
    Fault(
        "scaling_twice",
        "scalings are applied twice",
        (
            (
                _DELTA,
                _DELTA.replace(
                    "scalings[:, s] * scales", "scalings[:, s] * scalings[:, s] * scales"
                ),
            ),
        ),
        "expand",
    ),
    Fault(
        "scaling_of_neighbouring_slice",
        "every slice uses the first one's scaling",
        ((_DELTA, _DELTA.replace("scalings[:, s]", "scalings[:, 0]")),),
        "expand",
    ),
    Fault(
        "rank_of_neighbouring_slice",
        "every slice uses the first one's rank",
        ((_LIVE, _LIVE.replace("ranks[:, s, None]", "ranks[:, 0, None]")),),
        "expand",
    ),
    Fault(
        "ranks_rounded_up",
        "ranks are rounded up to a multiple of four, into what lies there",
        ((_LIVE, _LIVE.replace("ranks[:, s, None]", "(ranks[:, s, None] + 3) // 4 * 4")),),
        "expand",
    ),
    Fault(
        "rank_loses_one",
        "the last column of every rank is left out",
        ((_LIVE, _LIVE.replace("columns < ranks[:, s, None]", "columns + 1 < ranks[:, s, None]")),),
        "expand",
    ),
    Fault(
        "slice_offsets_swapped",
        "the last slice is written where the first is",
        (
            (
                _SPAN,
                _SPAN.replace(
                    "        live =",
                    "        if layout.num_slices > 1 and layout.widths[0] == layout.widths[-1]:\n"
                    "                last = layout.num_slices - 1 - s\n"
                    "                span = slice(layout.offsets[last], layout.offsets[last + 1])\n            live =",
                ),
            ),
        ),
        "linear",
    ),
    Fault(
        "k_and_v_with_q_width",
        "every slice begins at a multiple of the first one's width",
        (
            (
                _SPAN,
                "            width = layout.widths[0]\n            span = slice(s * width, min((s + 1) * width, out.shape[1]))\n            live =",
            ),
        ),
        "expand",
    ),
    Fault(
        "h_kept_in_half",
        "h is rounded to half precision between shrink and expand",
        ((_SHRINK_SUM, _SHRINK_SUM.replace(".sum(-1)", ".sum(-1).half().float()")),),
        "shrink",
    ),
    Fault(
        "sums_in_bfloat16",
        "partial sums over K are kept in bfloat16",
        (
            (
                _SHRINK_SUM,
                "        terms = x.float()[:, None, None, :] * a\n        total = torch.zeros_like(terms[..., 0]).bfloat16()\n"
                "        for part in terms.split(32, dim=-1):\n            total = (total.float() + part.sum(-1)).bfloat16()\n"
                "        return total.float()\n",
            ),
        ),
        "shrink",
    ),
    Fault(
        "tf32_dots",
        "float32 inputs lose the bits that tf32 has not",
        (
            (
                _SHRINK_SUM,
                "        x = (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32)\n"
                + _SHRINK_SUM,
            ),
        ),
        "shrink",
    ),
    Fault(
        "int32_offsets",
        "the offset of a slot is computed in 32 bits",
        (
            (
                "        return stacked[index]\n",
                "        offset = index[0].max().item() * stacked.stride(0) if len(index[0]) else 0\n"
                "        if offset >= 2**31:\n            index = (torch.zeros_like(index[0]), *index[1:])\n"
                "        return stacked[index]\n",
            ),
        ),
        "far_slots",
    ),
    Fault(
        "out_read_twice",
        "the base's output is doubled where an adapter applies",
        (
            (
                _TOTAL,
                _TOTAL.replace("out[:, span].float() + delta", "2 * out[:, span].float() + delta"),
            ),
        ),
        "expand",
    ),
    Fault(
        "weights_kept_by_address",
        "a float32 copy of A is made when weights are first seen",
        (
            (
                "        a = self._of_slot(weights.a, slots).float()  # [T', n, R, K]\n",
                "        key = (weights.a.data_ptr(), tuple(weights.a.shape), weights.a.dtype)\n"
                "        a = self._of_slot(_COPIES.setdefault(key, weights.a.float()), slots)\n",
            ),
            ("class Victim(LoRABackend):", "_COPIES = {}\n\n\nclass Victim(LoRABackend):"),
        ),
        "rewritten_slots",
    ),
    # -- who gets what --
    Fault(
        "no_lora_as_slot_0",
        "rows without an adapter use slot 0",
        (
            (
                "        mine, own = slots >= 0, slots.clamp(min=0)\n",
                "        mine, own = slots >= -1, slots.clamp(min=0)\n",
            ),
        ),
        "expand",
    ),
    Fault(
        "no_lora_as_last_slot",
        "rows without an adapter use the last slot, as index -1 does",
        (
            (
                "        mine, own = slots >= 0, slots.clamp(min=0)\n",
                "        mine, own = slots >= -1, slots\n",
            ),
            (
                "        slots = self._slots(rows, x.shape[0]).clamp(min=0)\n",
                "        slots = self._slots(rows, x.shape[0])\n",
            ),
        ),
        "base_rows",
    ),
    Fault(
        "adds_zero",
        "0.0 is added to rows without an adapter",
        (
            (
                _WRITE,
                "            out[:, span] = (out[:, span].float() + torch.where(applies, delta, 0.0)).to(out.dtype)\n",
            ),
        ),
        "base_rows",
    ),
    Fault(
        "masked_by_multiplication",
        "dead ranks are multiplied by zero",
        ((_PRODUCT, "            product = h[:, s, None] * b[:, span] * live[:, None]\n"),),
        "expand",
    ),
    Fault(
        "empty_segment_writes",
        "a request without tokens takes the next one's row",
        (
            (
                _ROW_SLOTS,
                _ROW_SLOTS
                + "            begin = 0\n            for slot, length in zip(batch.slots, lengths, strict=True):\n"
                "                if not length and begin < used:\n                    host[at + begin] = slot\n                begin += length\n",
            ),
        ),
        "linear",
    ),
    Fault(
        "padded_rows_live",
        "rows past the batch use the last row's slot",
        (
            (
                _SLOTS,
                "        slots = rows.slots[:num_rows].long()\n        last = int(slots[-1]) if len(slots) and rows.count == len(slots) else NO_LORA\n"
                "        return functional.pad(slots, (0, num_rows - len(slots)), value=last)\n",
            ),
        ),
        "expand",
    ),
    Fault(
        "result_depends_on_the_batch",
        "batches of more than eight rows are summed by a matrix product, while invariance is claimed",
        (
            (
                _SHRINK_SUM,
                "        if len(x) > 8 and a.shape[1] == 1 and not bool((slots != slots[0]).any()):\n"
                "            return (x.float() @ a[0, 0].T)[:, None]\n" + _SHRINK_SUM,
            ),
        ),
        "other_batches",
    ),
    Fault(
        "nan_spreads",
        "a neighbour's NaN reaches every row through a product with all of them",
        (
            (
                _DELTA,
                _DELTA
                + "            delta = delta + 0.0 * torch.where(mine[:, None], h[:, s], 0.0).sum()\n",
            ),
        ),
        "neighbours",
    ),
    Fault(
        "unordered_atomics",
        "partial sums are added in whatever order, while determinism is claimed",
        (
            (
                _SHRINK_SUM,
                "        terms = (x.float()[:, None, None, :] * a).unbind(-1)\n        total = torch.zeros_like(terms[0])\n"
                "        for k in torch.randperm(len(terms)).tolist():\n            total = total + terms[k]\n"
                "        return total\n",
            ),
        ),
        "repeated",
    ),
    # -- memory --
    Fault(
        "writes_past_out",
        "the row after out is written",
        (
            (
                _EXPAND_OP,
                "        self._expand(h, weights, out, info.rows)\n        if len(out):\n"
                "            torch.as_strided(out, (1,), (1,), out.storage_offset() + len(out) * out.stride(0)).fill_(0.0)\n        return out\n\n    def linear",
            ),
        ),
        "expand",
    ),
    Fault(
        "writes_between_rows",
        "out is taken as contiguous",
        (
            (
                _EXPAND_OP,
                "        self._expand(h, weights, out, info.rows)\n        if len(out) > 1:\n"
                "            torch.as_strided(out, (1,), (1,), out.storage_offset() + out.shape[1]).fill_(1.0)\n        return out\n\n    def linear",
            ),
        ),
        "expand",
    ),
    Fault(
        "x_modified",
        "NaNs of x are replaced in place",
        (
            (
                _SHRINK_OP,
                _SHRINK_OP.replace("        return", "        x.nan_to_num_()\n        return"),
            ),
        ),
        "shrink",
    ),
    Fault(
        "weights_modified",
        "A is cleaned in place past the ranks",
        (
            (
                _SHRINK_OP,
                _SHRINK_OP.replace(
                    "        return", "        weights.a.nan_to_num_()\n        return"
                ),
            ),
        ),
        "shrink",
    ),
    Fault(
        "expand_returns_a_copy",
        "expand leaves out as it was and returns a new tensor",
        ((_EXPAND_OP, "        out = out.clone()\n" + _EXPAND_OP),),
        "expand",
    ),
    Fault(
        "returns_none",
        "linear forgets its return",
        ((_LINEAR_OP, _LINEAR_OP.replace("return self._linear", "self._linear")),),
        "linear",
    ),
    Fault(
        "returns_a_view_of_scratch",
        "shrink hands out its scratch",
        (
            (
                _SHRINK_OP,
                _SHRINK_OP.replace(
                    "        return self._shrink(x, weights, info.rows)\n",
                    "        h = self._shrink(x, weights, info.rows)\n        self.workspace.scratch['h'] = h\n        return h[:]\n",
                ),
            ),
        ),
        "shrink",
    ),
    Fault(
        "reads_uninitialised_memory",
        "h is added into memory that nobody cleared",
        (
            (
                _SHRINK_SUM,
                "        h = torch.empty(len(x), a.shape[1], a.shape[2], dtype=torch.float32, device=x.device)\n"
                "        return h.add_((x.float()[:, None, None, :] * a).sum(-1))\n",
            ),
        ),
        "shrink",
    ),
    # -- optional parts --
    Fault(
        "dora_scales_the_bias",
        "the base's bias is scaled too",
        (
            ("            total = total - bias\n", ""),
            (
                "            total = total * weights.output_scale[own] + bias\n",
                "            total = total * weights.output_scale[own]\n",
            ),
        ),
        "dora",
    ),
    Fault(
        "bias_for_everybody",
        "an adapter's bias reaches rows without one",
        (
            (
                "        out.copy_(torch.where(mine, total.to(out.dtype), out))\n",
                "        out.copy_(total.to(out.dtype))\n",
            ),
        ),
        "adapter_bias",
    ),
    Fault(
        "full_weight_added",
        "a whole weight is added to the base's product",
        (
            (
                "            replaced = functional.linear(x, whole, base.bias)\n",
                "            replaced = out + functional.linear(x, whole)\n",
            ),
        ),
        "full_weight",
    ),
    Fault(
        "scales_by_row",
        "scales are given to rows in order instead of to requests",
        (
            (
                "            factors[:used] = np.repeat(np.asarray(scales, np.float32), lengths)\n",
                "            factors[:used] = np.resize(np.asarray(scales or [1.0], np.float32), used)\n",
            ),
        ),
        "scales",
    ),
    Fault(
        "pass_uses_all_rows",
        "a logits pass takes its slots from the batch's rows",
        (
            (
                "            passes=tuple(rows[1:]) or (rows[0],),\n",
                "            passes=tuple(Rows(r.count, rows[0].slots, rows[0].scales) for r in rows[1:]) or (rows[0],),\n",
            ),
        ),
        "lm_head",
    ),
    Fault(
        "embedding_of_one_slot",
        "every row gathers from the first request's slot",
        (
            (
                "        h = self._of_slot(weights.a, slots.clamp(min=0), ids)",
                "        h = self._of_slot(weights.a, slots.clamp(min=0)[:1].expand(len(ids)), ids)",
            ),
        ),
        "embedding",
    ),
    # -- claims and errors --
    Fault(
        "silent_fallback",
        "DoRA is not claimed, and left out in silence",
        (
            ("        ops=frozenset(Op),\n", "        ops=frozenset(Op) - {Op.DORA},\n"),
            (
                "        if weights.output_scale is None and weights.bias is None:\n",
                "        if weights.bias is None:\n",
            ),
        ),
        "unclaimed_ops",
    ),
    Fault(
        "claim_that_does_not_hold",
        "ranks up to 256 are claimed, past 128 they are cut",
        (
            (
                "        columns = torch.arange(weights.max_rank, device=out.device)\n",
                "        columns = torch.arange(weights.max_rank, device=out.device)\n        columns = torch.where(columns < 128, columns, 2**30)\n",
            ),
        ),
        "linear",
    ),
    Fault(
        "unclaimed_dtype_runs",
        "bfloat16 is not claimed and runs",
        (
            (
                '        dtypes=frozenset({"float32", "float16", "bfloat16"}),\n',
                '        dtypes=frozenset({"float32", "float16"}),\n',
            ),
            (
                "    # -- the sums ----",
                "    def _require_supported(self, op, weights):\n        pass\n\n    # -- the sums ----",
            ),
        ),
        "unclaimed_ranges",
    ),
    Fault(
        "mode_not_checked",
        "verify is not claimed and runs",
        (
            (
                "        batch_invariant=True,\n",
                '        batch_invariant=True,\n        modes=frozenset({"decode", "prefill"}),\n',
            ),
            (
                '        graphs=frozenset({"decode", "prefill", "verify"}),\n',
                '        graphs=frozenset({"decode", "prefill"}),\n',
            ),
        ),
        "unclaimed_modes",
    ),
    Fault(
        "rows_not_compared",
        "inputs of fewer rows than the batch run",
        (
            (
                "    # -- the sums ----",
                "    def _require_rows(self, op, rows, needed):\n        pass\n\n    # -- the sums ----",
            ),
        ),
        "too_few_rows",
    ),
    Fault(
        "shapes_trusted",
        "expand does not look at shapes",
        ((_BOUND, _BOUND + "        return\n"),),
        "misfits",
    ),
    Fault(
        "negative_pass",
        "pass -1 is the last one, as in a list",
        (
            (
                "        if not 0 <= logits_pass < len(info.passes):\n",
                "        if logits_pass >= len(info.passes):\n",
            ),
        ),
        "too_few_rows",
    ),
    # -- graphs --
    Fault(
        "graph_buffer_reallocated",
        "every graph batch gets a new buffer",
        (
            (
                "            target = self.workspace.static[graph]\n",
                "            target = self.workspace.static[graph] = torch.empty_like(self.workspace.static[graph])\n",
            ),
        ),
        "static_addresses",
    ),
    Fault(
        "graph_tail_not_cleared",
        "entries past the batch stay from the batch before",
        (
            (
                "            host[at : at + size] = NO_LORA\n",
                "            host[at : at + size] = NO_LORA if not self.workspace.graph_room else host[at : at + size]\n",
            ),
            (
                "        host[room + 1 : 2 * room + 1] = NO_LORA\n",
                "        host[room + 1 : 2 * room + 1] = NO_LORA if not self.workspace.graph_room else host[room + 1 : 2 * room + 1]\n",
            ),
        ),
        "static_requests",
    ),
    Fault(
        "indptr_tail_wrong",
        "indptr past the batch is zero",
        (("        host[: room + 1] = indptr[-1]\n", "        host[: room + 1] = 0\n"),),
        "static_requests",
    ),
    Fault(
        "count_frozen_at_capture",
        "only as many rows as the captured batch had are processed",
        (
            (
                "        mine, own = slots >= 0, slots.clamp(min=0)\n",
                "        mine, own = (slots >= 0) & (torch.arange(len(slots), device=slots.device) < rows.count), slots.clamp(min=0)\n",
            ),
        ),
        "graph_replay",
    ),
    Fault(
        "capture_without_adapter_records_nothing",
        "a graph batch without adapters launches nothing",
        (
            (
                "        if info.graph is None and not info.has_active_lora:\n",
                "        if not info.has_active_lora:\n",
            ),
        ),
        "graph_replay",
    ),
    Fault(
        "slots_frozen_at_capture",
        "only as many slots as the captured batch had requests are looked for",
        (
            (
                _WRITE,
                "            if self.batch_info.graph is not None:\n"
                "                applies = applies & (slots < self.batch_info.num_requests)[:, None]\n"
                + _WRITE,
            ),
        ),
        "graph_replay",
    ),
    Fault(
        "ranks_frozen_at_capture",
        "ranks are copied when weights are first seen",
        (
            (
                "        ranks, scalings = weights.ranks[own], weights.scalings[own]  # [T', n]\n",
                "        ranks, scalings = _SEEN.setdefault(weights.ranks.data_ptr(), weights.ranks.clone())[own], weights.scalings[own]\n",
            ),
            ("class Victim(LoRABackend):", "_SEEN = {}\n\n\nclass Victim(LoRABackend):"),
        ),
        "graph_sees_new_adapters",
    ),
    Fault(
        "reset_frees_graph_buffers",
        "reset drops the static buffer and allocates another",
        (
            (
                _RESET,
                _RESET.replace(
                    "            self._neutralise(info.graph)\n",
                    "            self.workspace.static[info.graph] = self.workspace.static[info.graph].clone()\n            self._neutralise(info.graph)\n",
                ),
            ),
        ),
        "static_addresses",
    ),
    Fault(
        "graph_room_not_checked",
        "a batch larger than init_graph is cut",
        (
            (
                "            limits = self._require_graph(graph, requests=requests, tokens=tokens, passes=passes)\n",
                "            limits = self._require_graph(graph, requests=0, tokens=0, passes=0)\n",
            ),
        ),
        "graph_limits",
    ),
    Fault(
        "other_kind_left_live",
        "a batch of one graph kind leaves the static buffers of another as they were",
        ((_PREPARE, _PREPARE.replace("self.reset_batch_state()", "self.batch_info = None")),),
        "two_graph_kinds",
    ),
    Fault(
        "scales_left_on",
        "a batch without scales keeps those of the batch before",
        (
            (
                "            factors[:] = 1.0\n",
                "            if batch.scales is not None:\n                factors[:] = 1.0\n",
            ),
            (
                "            factors[:used] = np.repeat(np.asarray(scales, np.float32), lengths)\n",
                "            if batch.scales is not None or not self.workspace.graph_room:\n"
                "                factors[:] = 1.0\n"
                "                factors[:used] = np.repeat(np.asarray(scales, np.float32), lengths)\n",
            ),
        ),
        "graph_ops",
    ),
    # -- running --
    Fault(
        "memory_grows",
        "every shrink keeps its result in scratch under a new name",
        (
            (
                _SHRINK_SUM,
                "        h = (x.float()[:, None, None, :] * a).sum(-1)\n"
                "        self.workspace.scratch[str(len(self.workspace.scratch))] = h.clone()\n"
                "        return h\n",
            ),
        ),
        "flat_memory",
    ),
    Fault(
        "one_staging_buffer",
        "staging is used again without asking whether its copy has finished",
        (
            (
                _ACQUIRE,
                _ACQUIRE
                + "        entry = next((e for e in self.workspace.staging.entries if e.host.size >= words), entry)\n",
            ),
        ),
        "delayed_copy",
    ),
    Fault(
        "prepare_reads_back",
        "prepare reads the metadata back from the device",
        (
            (
                _RETURN_INFO,
                _ASSIGN
                + "        assert self.batch_info.req_seg_indptr[-1].item() >= 0\n        return self.batch_info\n",
            ),
        ),
        "no_reads_by_host",
    ),
    Fault(
        "op_reads_in_graph",
        "an op looks at slots on the host in graph mode",
        (
            (
                "        mine, own = slots >= 0, slots.clamp(min=0)\n",
                "        mine, own = slots >= 0, slots.clamp(min=0)\n        assert slots.tolist() is not None\n",
            ),
        ),
        "no_reads_by_host",
    ),
    # -- only CUDA shows it --
    Fault(
        "prepare_waits_for_the_device",
        "prepare synchronises with the stream",
        (
            (
                _RETURN_INFO,
                _ASSIGN
                + "        torch.cuda.current_stream().synchronize() if self.device.type == 'cuda' else None\n        return self.batch_info\n",
            ),
        ),
        "no_reads_by_host",
        cuda=True,
    ),
    Fault(
        "pageable_staging",
        "metadata goes over from pageable memory, which waits",
        (
            (
                "        entry.send(target)\n",
                "        target.copy_(entry.tensor[:words].clone().to(self.device)) if self.device.type == 'cuda' else entry.send(target)\n",
            ),
        ),
        "no_reads_by_host",
        cuda=True,
    ),
)
