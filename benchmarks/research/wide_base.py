# ruff: noqa: ANN001, ANN201 - Triton's jit reads annotations itself: only constexpr means anything
"""Wide base: the shrink as spare rows of the base weight, then one expand kernel.

`WideWeight` is how a module's weight is given spare rows and gets rid of them again, `WideBase` the
two launches that were timed. docs/what-did-not-pay.md says what came of it.

`W_ext = [W; A]` with A as `[S * SLICES * R, K]`: one library product gives `[y | h]` of every slot.
The expand reads h from the spare columns, for the rows of each slot, and adds into y.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional


@triton.jit
def expand_wide(
    wide_ptr,  # [T, ROW] : y in the first N columns, h of slot l, slice s at N + (l * SLICES + s) * R
    b_ptr,  # [S, N, R]
    ranks_ptr,  # [S, SLICES] int32
    scalings_ptr,  # [S, SLICES] float32
    perm_ptr,  # [T] int32, rows sorted by slot
    block_slot_ptr,  # [BLOCKS] int32, -1 past the end
    block_begin_ptr,  # [BLOCKS] int32, into perm
    block_end_ptr,  # [BLOCKS] int32
    R,
    N: tl.constexpr,
    ROW: tl.constexpr,
    SLICES: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(1)
    slot = tl.load(block_slot_ptr + block)
    if slot < 0:
        return
    column = tl.program_id(0) * BN
    s = (column >= FIRST_END).to(tl.int32) + (column >= SECOND_END).to(tl.int32)
    begin = tl.load(block_begin_ptr + block)
    end = tl.load(block_end_ptr + block)
    rank = tl.load(ranks_ptr + slot * SLICES + s)
    scaling = tl.load(scalings_ptr + slot * SLICES + s)
    i = begin + tl.arange(0, BM)
    rows = tl.load(perm_ptr + i, mask=i < end, other=0).to(tl.int64)
    n = column + tl.arange(0, BN)
    r = tl.arange(0, BR)
    b_rows = b_ptr + (slot.to(tl.int64) * N + n)[:, None] * R
    b = tl.load(b_rows + r[None, :], mask=(r < rank)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = wide_ptr + rows[None, :] * ROW + n[:, None]
    live = (i < end)[None, :]
    before = tl.load(y, mask=live, other=0.0).to(tl.float32)
    h_rows = wide_ptr + rows[None, :] * ROW + N + (slot * SLICES + s) * R
    h = tl.load(h_rows + r[:, None], mask=(r < rank)[:, None] & live, other=0.0)
    delta = tl.dot(b, h)
    for r0 in range(BR, rank, BR):
        more = r0 + r
        b = tl.load(b_rows + more[None, :], mask=(more < rank)[None, :], other=0.0)
        h = tl.load(h_rows + more[:, None], mask=(more < rank)[:, None] & live, other=0.0)
        delta = tl.dot(b, h, delta)
    if rank > 0:
        tl.store(y, (before + scaling * delta).to(wide_ptr.dtype.element_ty), mask=live)


def row_blocks(row_slots: Tensor, bm: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by slot and cut into blocks of at most `bm` rows of one slot."""
    order = torch.argsort(row_slots, stable=True)
    perm, slots, begins, ends, at = [], [], [], [], 0
    for slot in sorted(set(row_slots.tolist()) - {-1}):
        mine = [int(t) for t in order if row_slots[t] == slot]
        perm += mine
        for first in range(0, len(mine), bm):
            slots.append(slot)
            begins.append(at + first)
            ends.append(at + min(first + bm, len(mine)))
        at += len(mine)
    device = row_slots.device
    return tuple(torch.tensor(v or [-1], dtype=torch.int32, device=device)
                 for v in (perm, slots, begins, ends))  # fmt: skip


class WideWeight:
    """A linear module whose weight has spare rows behind it, where A lives.

    The module's parameter keeps its identity, shape and values; only the memory behind it is new: the
    beginning of a larger block. It is an alias of exactly its own size (through DLPack), so that
    `torch.save` and `state_dict` see the base weight and no byte of an adapter.

    Attributes:
        module: the linear module.
        whole: `[N + S * n_slices * R, K]`.
        a: `[S, n_slices, R, K]`, the spare rows; zero at first.

    Args:
        module: with a plain weight; `why_not` must have nothing against it.
        num_slots: S.
        num_slices: n_slices.
        max_rank: R.
    """

    def __init__(
        self, module: nn.Module, *, num_slots: int, num_slices: int, max_rank: int
    ) -> None:
        weight = module.weight
        n, k = weight.shape
        spare = num_slots * num_slices * max_rank
        self.module = module
        self.whole = weight.new_empty(n + spare, k, requires_grad=False)
        self.whole[:n].copy_(weight.detach())
        self.whole[n:].zero_()
        self.a = self.whole[n:].view(num_slots, num_slices, max_rank, k)
        weight.data = torch.from_dlpack(self.whole[:n])

    @property
    def extra_bytes(self) -> int:
        """Memory beyond the base weight: that of A, which any backend needs."""
        return self.a.numel() * self.a.element_size()

    def product(self, x: Tensor) -> Tensor:
        """`[y | h]`, `[T, N + S * n_slices * R]`, without the module's bias."""
        return functional.linear(x, self.whole)

    def detach(self) -> None:
        """Give the module a weight of its own again, bit for bit."""
        self.module.weight.data = self.module.weight.detach().clone()


def why_not(
    module: nn.Module, model: nn.Module, spare_rows: int, *, most: int = 1600
) -> str | None:
    """Why a module's weight cannot have spare rows, for `explain()`; None when it can."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not weight.is_floating_point():
        return "its weight is not a plain matrix (quantised?)"
    if not weight.is_contiguous():
        return "its weight is not contiguous"
    if spare_rows > most:
        return f"{spare_rows} spare rows are more than {most}: the product would cost more than a shrink"
    users = [
        name for name, child in model.named_modules() if getattr(child, "weight", None) is weight
    ]
    if len(users) > 1:
        return f"its weight is tied: {', '.join(users)}"
    storage = weight.untyped_storage()
    if storage.nbytes() != weight.numel() * weight.element_size():
        return "its weight shares its memory with other tensors"
    return None


class WideBase:
    """A base weight with spare rows, and the launch of its expand."""

    def __init__(self, w: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scalings: Tensor,
                 widths: tuple[int, ...], row_slots: Tensor, *, bm: int = 16, bn: int = 64,
                 br: int = 16, warps: int = 4, pdl: bool = False) -> None:  # fmt: skip
        n, slices = w.shape[0], len(widths)
        self.weight = torch.cat([w, a.reshape(-1, w.shape[1])])
        self.b, self.ranks, self.scalings = b, ranks, scalings
        self.blocks = row_blocks(row_slots, bm)
        ends = [*(sum(widths[: i + 1]) for i in range(slices - 1)), n, n][:2]
        self.n, self.max_rank = n, a.shape[2]
        self.grid = (n // bn, len(self.blocks[1]))
        self.constants = {"N": n, "ROW": self.weight.shape[0], "SLICES": slices, "FIRST_END": ends[0],
                              "SECOND_END": ends[1], "BM": bm, "BN": bn, "BR": br, "PDL": pdl, "num_warps": warps}  # fmt: skip
        if torch.version.cuda is not None:
            self.constants["launch_pdl"] = pdl

    def product(self, x: Tensor) -> Tensor:
        """`[y | h]`."""
        return functional.linear(x, self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        wide = self.product(x)
        expand_wide[self.grid](wide, self.b, self.ranks, self.scalings, *self.blocks, self.max_rank,
                               **self.constants)  # fmt: skip
        return wide[:, : self.n]
