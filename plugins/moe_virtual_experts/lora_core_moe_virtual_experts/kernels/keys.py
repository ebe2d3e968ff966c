"""The virtual expert of a pair: `slot * E + expert`, or `S * E` for a pair without an adapter."""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_keys(
    p_ids,  # [P] - expert ids of the pairs
    p_slots,  # [T] int32 - slot of each row
    p_map,  # [G] - global id -> local expert; any pointer where HAS_MAP is false
    pairs,  # which
    m_pairs,  # which of them exist
    G,
    S,
    E,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """int32, one key per entry of `pairs`; S * E where masked, inert or out of range.

    TOP_K of 0: the entries are rows, not pairs, and their key is their slot; E is 1.
    """
    if TOP_K == 0:
        slots = tl.load(p_slots + pairs, mask=m_pairs, other=-1)
        return tl.where((slots >= 0) & (slots < S), slots, S).to(tl.int32)
    ids = tl.load(p_ids + pairs, mask=m_pairs, other=-1)
    if HAS_MAP:
        m_known = (ids >= 0) & (ids < G)
        ids = tl.load(p_map + ids, mask=m_known, other=-1)
    slots = tl.load(p_slots + pairs // TOP_K, mask=m_pairs, other=-1)
    live = (ids >= 0) & (ids < E) & (slots >= 0) & (slots < S)
    return tl.where(live, slots * E + ids.to(tl.int32), S * E)
