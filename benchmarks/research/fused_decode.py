# ruff: noqa: ANN001, ANN201, ANN202 - Triton's jit reads annotations itself: only constexpr means anything
"""Decode in one launch: base product, shrink and expand of one linear site in one kernel.

`out = x @ W^T + sum over slices of scaling * (x @ A[slot]^T) @ B[slot]^T`, for at most 64 rows.

The first blocks of the grid compute h, a few rank rows each over a part of K, and count up when they
are done. The others compute tiles of the base product, which takes longer, then wait for that count
(by then it is reached), add their own part of the expand in registers and write the output once.
Blocks that others wait for come first in the grid, and blocks start in grid order.

A split over K of the base tiles is for sites with too few columns to fill the device: partial tiles
are summed in a fixed order by the block that arrives last, so results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _select_rows(values, other, row_slots, slot):
    """`values` where a row belongs to `slot`, else `other`: [.., BM]."""
    return tl.where((row_slots == slot)[None, :], values, other)


@triton.jit(do_not_specialize=["T"])
def fused_decode(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    a_ptr,  # [S, SLICES, R, K]
    b_ptr,  # [S, N, R]
    ranks_ptr,  # [S, SLICES] int32
    scalings_ptr,  # [S, SLICES] float32
    row_slots_ptr,  # [T] int32, -1 for the base model
    groups_ptr,  # [GROUPS] int32, the distinct slots of the batch, then -1
    h_ptr,  # [H_SPLIT, SLICES, BM, R] float32 scratch
    part_ptr,  # [N / BN, SPLIT, BN, BM] float32 scratch
    sync_ptr,  # [2 + N / BN] int32, zero between launches: h blocks done, blocks gone, arrivals
    out_ptr,  # [T, N]
    T,
    R,
    K: tl.constexpr,
    N: tl.constexpr,
    SLICES: tl.constexpr,
    FIRST_END: tl.constexpr,  # column at which slice 1 begins (N when there is none)
    SECOND_END: tl.constexpr,
    GROUPS: tl.constexpr,
    H_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BKH: tl.constexpr,
    STAGES: tl.constexpr,
    H_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_H: tl.constexpr = GROUPS * SLICES * H_SPLIT
    NUM_Y: tl.constexpr = (N // BN) * SPLIT
    pid = tl.program_id(0)
    i = tl.arange(0, BM)
    row_slots = tl.load(row_slots_ptr + i, mask=i < T, other=-1)
    rows = tl.minimum(i, T - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if pid < NUM_H:
        part = pid % H_SPLIT
        s = pid // H_SPLIT % SLICES
        slot = tl.load(groups_ptr + pid // (H_SPLIT * SLICES))
        if slot >= 0:
            rank = tl.load(ranks_ptr + slot * SLICES + s)
            rr, kk = tl.arange(0, BR), tl.arange(0, BKH)
            k_begin = part * (K // H_SPLIT)
            for r0 in range(0, rank, BR):
                r = r0 + rr
                a_rows = a_ptr + ((slot.to(tl.int64) * SLICES + s) * R + r) * K + k_begin
                acc = tl.zeros((BR, BM), tl.float32)
                for k0 in tl.range(0, K // H_SPLIT, BKH, num_stages=H_STAGES):
                    a = tl.load(
                        a_rows[:, None] + (k0 + kk)[None, :], mask=(r < rank)[:, None], other=0.0
                    )
                    x = tl.load(x_ptr + rows[:, None] * K + (k_begin + k0 + kk)[None, :])
                    acc = tl.dot(a, tl.trans(x), acc)
                h = h_ptr + ((part * SLICES + s) * BM + i)[None, :] * R + r[:, None]
                tl.store(h, acc, mask=(r < rank)[:, None] & (row_slots == slot)[None, :])
        tl.debug_barrier()
        tl.atomic_add(sync_ptr, 1, sem="release")
    else:
        tile = (pid - NUM_H) // SPLIT
        part = (pid - NUM_H) % SPLIT
        n = tile * BN + tl.arange(0, BN)
        kk = tl.arange(0, BK)
        acc = tl.zeros((BN, BM), tl.float32)
        k_begin = part * (K // SPLIT)
        w_rows = w_ptr + n.to(tl.int64) * K + k_begin
        for k0 in tl.range(0, K // SPLIT, BK, num_stages=STAGES):
            w = tl.load(w_rows[:, None] + (k0 + kk)[None, :])
            x = tl.load(x_ptr + rows[:, None] * K + (k_begin + k0 + kk)[None, :])
            acc = tl.dot(w, tl.trans(x), acc)
        last = True
        if SPLIT > 1:
            cell = tl.arange(0, BN)[:, None] * BM + i[None, :]
            own_part = part_ptr + (tile * SPLIT + part) * (BN * BM)
            tl.store(own_part + cell, acc)
            tl.debug_barrier()
            last = tl.atomic_add(sync_ptr + 2 + tile, 1, sem="acq_rel") == SPLIT - 1
            if last:
                acc = tl.zeros((BN, BM), tl.float32)
                for p in tl.static_range(SPLIT):
                    from_part = part_ptr + (tile * SPLIT + p) * (BN * BM)
                    acc += tl.load(from_part + cell, cache_modifier=".cg")
                tl.store(sync_ptr + 2 + tile, 0)
        if last:
            column = tile * BN
            s = (column >= FIRST_END).to(tl.int32) + (column >= SECOND_END).to(tl.int32)
            rr = tl.arange(0, BR)
            while tl.load(sync_ptr, volatile=True) < NUM_H:
                pass
            tl.atomic_add(sync_ptr, 0, sem="acquire")
            for g in range(GROUPS):
                slot = tl.load(groups_ptr + g)
                if slot >= 0:
                    rank = tl.load(ranks_ptr + slot * SLICES + s)
                    scaling = tl.load(scalings_ptr + slot * SLICES + s)
                    delta = tl.zeros((BN, BM), tl.float32)
                    mine = row_slots == slot
                    for r0 in range(0, rank, BR):
                        r = r0 + rr
                        live = (r < rank)[:, None] & mine[None, :]
                        h = tl.zeros((BR, BM), tl.float32)
                        for p in tl.static_range(H_SPLIT):
                            from_h = h_ptr + ((p * SLICES + s) * BM + i)[None, :] * R + r[:, None]
                            h += tl.load(from_h, mask=live, other=0.0, cache_modifier=".cg")
                        from_b = b_ptr + (slot.to(tl.int64) * N + n)[:, None] * R + r[None, :]
                        b = tl.load(from_b, mask=(r < rank)[None, :], other=0.0)
                        delta = tl.dot(b, h.to(b.dtype), delta)
                    if rank > 0:
                        acc = _select_rows(acc + scaling * delta, acc, row_slots, slot)
            to = out_ptr + i.to(tl.int64)[None, :] * N + n[:, None]
            tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(i < T)[None, :])
        tl.debug_barrier()
        gone = tl.atomic_add(sync_ptr + 1, 1, sem="acq_rel")
        if gone == NUM_Y - 1:
            tl.store(sync_ptr, 0)
            tl.store(sync_ptr + 1, 0)


@dataclass(frozen=True)
class Tiles:
    """One choice of tiles; the grid of a launch depends on nothing else but the shape."""

    BN: int = 32
    BK: int = 128
    SPLIT: int = 1
    H_SPLIT: int = 4
    BR: int = 16
    BKH: int = 128
    STAGES: int = 5
    H_STAGES: int = 4
    warps: int = 4
    PDL: bool = False


class FusedDecode:
    """Launches `fused_decode` for one site geometry and at most `max_rows` rows."""

    def __init__(self, k: int, widths: tuple[int, ...], max_rank: int, groups: int, max_rows: int,
                 tiles: Tiles, device: torch.device) -> None:  # fmt: skip
        n, slices = sum(widths), len(widths)
        bm = max(16, triton.next_power_of_2(max_rows))
        if slices > 3 or any(w % tiles.BN for w in widths) or k % (tiles.BK * tiles.SPLIT):
            raise ValueError(f"{k=} {widths=} do not fit {tiles}")
        if k % (tiles.H_SPLIT * tiles.BKH):
            raise ValueError(f"{k=} does not fit {tiles}")
        ends = [*(sum(widths[: i + 1]) for i in range(slices - 1)), n, n][:2]
        self.constants = {
            "K": k, "N": n, "SLICES": slices, "FIRST_END": ends[0], "SECOND_END": ends[1], "GROUPS": groups, "BM": bm,
            "H_SPLIT": tiles.H_SPLIT, "SPLIT": tiles.SPLIT, "BN": tiles.BN, "BK": tiles.BK, "BR": tiles.BR,
            "BKH": tiles.BKH, "STAGES": tiles.STAGES, "H_STAGES": tiles.H_STAGES, "PDL": tiles.PDL,
            "num_warps": tiles.warps, "launch_pdl": tiles.PDL,
        }  # fmt: skip
        self.grid = (groups * slices * tiles.H_SPLIT + n // tiles.BN * tiles.SPLIT,)
        self.max_rank = max_rank
        self.h = torch.empty(tiles.H_SPLIT * slices * bm * max_rank, device=device)
        self.part = torch.empty(n * tiles.SPLIT * bm if tiles.SPLIT > 1 else 1, device=device)
        self.sync = torch.zeros(2 + n // tiles.BN, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, w: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scalings: Tensor,
                 row_slots: Tensor, groups: Tensor) -> Tensor:  # fmt: skip
        out = x.new_empty(x.shape[0], w.shape[0])
        constants = self.constants
        if torch.version.cuda is None:  # the interpreter knows no launch attributes
            constants = {k: v for k, v in constants.items() if k != "launch_pdl"}
        fused_decode[self.grid](
            x, w, a, b, ranks, scalings, row_slots, groups, self.h, self.part, self.sync, out,
            x.shape[0], self.max_rank, **constants,
        )  # fmt: skip
        return out
