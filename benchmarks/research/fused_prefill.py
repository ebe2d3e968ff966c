# ruff: noqa: ANN001, ANN201 - Triton's jit reads annotations itself: only constexpr means anything
"""Prefill with y touched once: each row tile of the base product adds its own adapters' expand.

A shrink kernel writes h first. The product is persistent, fed by tensor descriptors; before a tile is
stored, the segments (rows of one adapter) that overlap its rows each add `h @ B^T` for their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit(do_not_specialize=["T"])
def shrink_rows(
    x_ptr,  # [T, K]
    a_ptr,  # [S, SLICES, R, K]
    ranks_ptr,  # [S, SLICES] int32
    block_slot_ptr,  # [BLOCKS] int32: row blocks of one segment
    block_begin_ptr,  # [BLOCKS] int32
    block_end_ptr,  # [BLOCKS] int32
    h_ptr,  # [T, SLICES, R] bf16
    T,
    R,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    SL: tl.constexpr,  # SLICES rounded up to a power of two
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    block = tl.program_id(0)
    slot = tl.load(block_slot_ptr + block).to(tl.int64)
    begin = tl.load(block_begin_ptr + block)
    end = tl.load(block_end_ptr + block)
    m = begin + tl.arange(0, BM)
    rows = tl.minimum(m, end - 1).to(tl.int64)
    kk = tl.arange(0, BK)
    # all slices at once: column c is rank row c % BR of slice c // BR
    c = tl.arange(0, SL * BR)
    s, r = c // BR, c % BR
    top = tl.load(ranks_ptr + slot * SLICES + s, mask=s < SLICES, other=0)
    r0 = 0
    while r0 < tl.max(top):
        live = r0 + r < top
        a_rows = a_ptr + ((slot * SLICES + tl.minimum(s, SLICES - 1)) * R + r0 + r) * K
        acc = tl.zeros((BM, SL * BR), tl.float32)
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            x = tl.load(x_ptr + rows[:, None] * K + (k0 + kk)[None, :])
            a = tl.load(a_rows[:, None] + (k0 + kk)[None, :], mask=live[:, None], other=0.0)
            acc = tl.dot(x, tl.trans(a), acc)
        to = h_ptr + (m.to(tl.int64)[:, None] * SLICES + s[None, :]) * R + (r0 + r)[None, :]
        tl.store(to, acc.to(h_ptr.dtype.element_ty), mask=(m < end)[:, None] & live[None, :])
        r0 += BR


@triton.jit(do_not_specialize=["T"])
def product_with_expand(
    x_desc,  # [T, K]
    w_desc,  # [N, K]
    y_desc,  # [T, N]
    h_ptr,  # [T, SLICES, R] bf16
    b_ptr,  # [S, N, R]
    ranks_ptr,  # [S, SLICES] int32
    scalings_ptr,  # [S, SLICES] float32
    tile_first_ptr,  # [T / BM + 1] int32: segments that overlap row tile m are first[m] .. last[m]
    tile_last_ptr,
    seg_slot_ptr,  # [SEGMENTS] int32
    seg_begin_ptr,  # [SEGMENTS] int32
    seg_end_ptr,  # [SEGMENTS] int32
    T,
    R,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALVES: tl.constexpr,
    LORA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    row_tiles = tl.cdiv(T, BM)
    column_tiles: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, BLOCKS, flatten=FLATTEN):
        band = tile // (GROUP * column_tiles)
        in_band = tl.minimum(row_tiles - band * GROUP, GROUP)
        pm = band * GROUP + tile % (GROUP * column_tiles) % in_band
        pn = tile % (GROUP * column_tiles) // in_band
        m0, n0 = pm * BM, pn * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            x = x_desc.load([m0, k0])
            w = w_desc.load([n0, k0])
            acc = tl.dot(x, w.T, acc)
        if LORA:
            s = (n0 >= FIRST_END).to(tl.int32) + (n0 >= SECOND_END).to(tl.int32)
            m, n, rr = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BR)
            for segment in range(tl.load(tile_first_ptr + pm), tl.load(tile_last_ptr + pm)):
                slot = tl.load(seg_slot_ptr + segment).to(tl.int64)
                own = (m >= tl.load(seg_begin_ptr + segment)) & (m < tl.load(seg_end_ptr + segment))
                rank = tl.load(ranks_ptr + slot * SLICES + s)
                scaling = tl.load(scalings_ptr + slot * SLICES + s)
                for r0 in range(0, rank, BR):
                    r = r0 + rr
                    h = tl.load(h_ptr + (m.to(tl.int64)[:, None] * SLICES + s) * R + r[None, :],
                                mask=own[:, None] & (r < rank)[None, :], other=0.0)  # fmt: skip
                    b = tl.load(b_ptr + (slot * N + n)[:, None] * R + r[None, :],
                                mask=(r < rank)[None, :], other=0.0)  # fmt: skip
                    acc = tl.dot((h.to(tl.float32) * scaling).to(b.dtype), tl.trans(b), acc)
        if HALVES:
            acc = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(acc)
            y_desc.store([m0, n0], left.to(y_desc.dtype))
            y_desc.store([m0, n0 + BN // 2], right.to(y_desc.dtype))
        else:
            y_desc.store([m0, n0], acc.to(y_desc.dtype))


@dataclass(frozen=True)
class Tiles:
    """One choice of tiles for the product."""

    BM: int = 128
    BN: int = 256
    BK: int = 64
    STAGES: int = 3
    warps: int = 8
    HALVES: bool = True
    GROUP: int = 8
    FLATTEN: bool = True
    BR: int = 16


def segments_of(
    seq_lens: list[int], slots: list[int], bm: int, device: torch.device
) -> dict[str, Tensor]:
    """The tables of both kernels: segments, those that overlap each row tile, and row blocks."""
    begins, ends, owners, at = [], [], [], 0
    for length, slot in zip(seq_lens, slots, strict=True):
        if slot >= 0 and length:
            begins.append(at)
            ends.append(at + length)
            owners.append(slot)
        at += length
    first, last = [], []
    for m in range(0, at, bm):
        over = [i for i, (b, e) in enumerate(zip(begins, ends)) if b < m + bm and e > m]
        first.append(over[0] if over else 0)
        last.append(over[-1] + 1 if over else 0)
    named = {"slot": owners, "begin": begins, "end": ends, "first": first, "last": last}
    return {k: torch.tensor(v, dtype=torch.int32, device=device) for k, v in named.items()}


def shrink(x: Tensor, a: Tensor, ranks: Tensor, blocks: tuple[Tensor, Tensor, Tensor], h: Tensor, *,
           bm: int, br: int = 16, bk: int = 128, stages: int = 4, warps: int = 4) -> None:  # fmt: skip
    """Write h for row blocks of one segment each."""
    slices = a.shape[1]
    shrink_rows[(len(blocks[0]),)](
        x, a, ranks, *blocks, h, x.shape[0], a.shape[2], K=x.shape[1], SLICES=slices,
        SL=triton.next_power_of_2(slices), BM=bm, BR=br, BK=bk, STAGES=stages, num_warps=warps,
    )  # fmt: skip


class Product:
    """Launches `product_with_expand` on fixed tensors."""

    def __init__(self, x: Tensor, w: Tensor, h: Tensor, b: Tensor, ranks: Tensor, scalings: Tensor,
                 widths: tuple[int, ...], tables: dict[str, Tensor], tiles: Tiles, *, lora: bool = True,
                 blocks: int = 132) -> None:  # fmt: skip
        n, slices = w.shape[0], len(widths)
        ends = [*(sum(widths[: i + 1]) for i in range(slices - 1)), n, n][:2]
        t = tiles
        self.x, self.n = x, n
        self.x_desc = TensorDescriptor.from_tensor(x, [t.BM, t.BK])
        self.w_desc = TensorDescriptor.from_tensor(w, [t.BN, t.BK])
        self.store = [t.BM, t.BN // 2 if t.HALVES else t.BN]
        self.rest = (h, b, ranks, scalings, tables["first"], tables["last"], tables["slot"],
                     tables["begin"], tables["end"], x.shape[0], b.shape[2])  # fmt: skip
        self.constants = {"N": n, "K": x.shape[1], "SLICES": slices, "FIRST_END": ends[0], "SECOND_END": ends[1],
                              "BM": t.BM, "BN": t.BN, "BK": t.BK, "BR": t.BR, "GROUP": t.GROUP, "BLOCKS": blocks,
                              "HALVES": t.HALVES, "LORA": lora, "FLATTEN": t.FLATTEN, "num_warps": t.warps,
                              "num_stages": t.STAGES}  # fmt: skip
        self.blocks = blocks

    def __call__(self) -> Tensor:
        y = self.x.new_empty(self.x.shape[0], self.n)
        y_desc = TensorDescriptor.from_tensor(y, self.store)
        product_with_expand[(self.blocks,)](
            self.x_desc, self.w_desc, y_desc, *self.rest, **self.constants
        )
        return y
