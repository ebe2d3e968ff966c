"""`out[t, n] += scale(t) * scaling[slot(t), s] * sum_r B[slot(t), n, r] * h[t, s, r]`, in place.

One unit of work is one segment and BLOCK_N columns of one slice. B is the left operand, and
BLOCK_N at least 64, so that rounding follows from the rank and never from how many tokens share the
call. With GATHER, h is read from the rows of an embedding's A instead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from lora_core.triton_kit import dot
from lora_core_csgmv.kernels.work import rows_of, scale_of, segment


@triton.jit(do_not_specialize=["num_rows", "room_segments"])
def expand(
    out,  # [T', N] - base output, added to
    h,  # [T', n, R] float32 or dtype of b; with GATHER: a, [S, V, R]
    ids,  # [T'] integers, with GATHER: the row of a for each token
    b,  # [S, N, R] - stacked B, any strides
    ranks,  # [S, n] int32
    scalings,  # [S, n] float32
    segments,  # block of segments
    num_rows,  # T'
    stride_out,
    stride_h,  # between tokens; with GATHER: between vocabulary entries
    stride_h_rank,
    stride_h_slot,  # with GATHER: between slots of a
    stride_slot,
    stride_n,
    stride_rank,
    room_segments,
    MAX_RANK: tl.constexpr,
    WIDTHS: tl.constexpr,  # tuple - columns of each slice
    GATHER: tl.constexpr,
    PDL: tl.constexpr,  # launched as a programmatic dependent of the kernels before
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: any number of programs; each takes every `num_programs`-th unit of work."""
    NUM_SLICES: tl.constexpr = len(WIDTHS)
    tiles = 0
    for s in tl.static_range(NUM_SLICES):
        tiles += (WIDTHS[s] + BLOCK_N - 1) // BLOCK_N
    units = tl.load(segments) * tiles
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        first, end, slot = segment(segments, unit // tiles, room_segments)
        # the slice that this tile of columns belongs to: [n0, n_end) in out, `s` in ranks
        tile = unit % tiles
        this = 0
        n0 = tile * BLOCK_N
        n_end = 0 + WIDTHS[0]
        before = 0
        begin = 0
        for s in tl.static_range(1, NUM_SLICES):
            before += (WIDTHS[s - 1] + BLOCK_N - 1) // BLOCK_N
            begin += WIDTHS[s - 1]
            this = tl.where(tile >= before, s, this)
            n0 = tl.where(tile >= before, begin + (tile - before) * BLOCK_N, n0)
            n_end = tl.where(tile >= before, begin + WIDTHS[s], n_end)
        rank = tl.load(ranks + slot * NUM_SLICES + this)
        factor = tl.load(scalings + slot * NUM_SLICES + this) * scale_of(segments, unit // tiles, room_segments)
        n = n0 + tl.arange(0, BLOCK_N)
        n_live = n < n_end
        p_b = b + slot * stride_slot + n.to(tl.int64) * stride_n
        p_h = h + slot * stride_h_slot + this * MAX_RANK
        p_out = out + n
        # the plain units take float32 operands from registers, so that its blocks of ranks stay small
        narrow: tl.constexpr = MAX_RANK <= 16 or b.dtype.element_ty == tl.float32
        if rank > 0:
            if narrow:
                _segment(p_out, p_h, ids, p_b, segments, factor, rank, n_live, first, end, num_rows, stride_out, stride_h,
                         stride_h_rank, stride_rank, room_segments, MAX_RANK, GATHER, PDL, BLOCK_T, BLOCK_N, 16)
            elif rank <= 16:
                _segment(p_out, p_h, ids, p_b, segments, factor, rank, n_live, first, end, num_rows, stride_out, stride_h,
                         stride_h_rank, stride_rank, room_segments, MAX_RANK, GATHER, PDL, BLOCK_T, BLOCK_N, 16)
            elif rank <= 32:
                _segment(p_out, p_h, ids, p_b, segments, factor, rank, n_live, first, end, num_rows, stride_out, stride_h,
                         stride_h_rank, stride_rank, room_segments, MAX_RANK, GATHER, PDL, BLOCK_T, BLOCK_N, 32)
            else:
                _segment(p_out, p_h, ids, p_b, segments, factor, rank, n_live, first, end, num_rows, stride_out, stride_h,
                         stride_h_rank, stride_rank, room_segments, MAX_RANK, GATHER, PDL, BLOCK_T, BLOCK_N, 64)


@triton.jit
def _segment(
    p_out, p_h, ids, p_b, segments, factor, rank, n_live, first, end, num_rows, stride_out, stride_h,
    stride_h_rank, stride_rank, room_segments, MAX_RANK: tl.constexpr, GATHER: tl.constexpr, PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns for all rows of one segment, BLOCK_T at a time; the first BLOCK_R ranks of B are read once."""
    r = tl.arange(0, BLOCK_R)
    b_b = tl.load(p_b[:, None] + r[None, :] * stride_rank, mask=n_live[:, None] & (r < rank)[None, :], other=0.0)
    if PDL:
        cuda.gdc_wait()  # B and the batch are older than the kernel before; h and out are its results
    for t0 in range(first, end, BLOCK_T):
        position = t0 + tl.arange(0, BLOCK_T)
        row, t_live = rows_of(segments, position, end, num_rows, room_segments)
        m_out = n_live[:, None] & t_live[None, :]
        b_out = tl.load(p_out[:, None] + row[None, :] * stride_out, mask=m_out, other=0.0)
        p_token = p_h
        if GATHER:
            p_token = p_h + tl.load(ids + row, mask=t_live, other=0).to(tl.int64) * stride_h
        else:
            p_token = p_h + row * stride_h
        b_h = _load_h(p_token, t_live, r, rank, stride_h_rank, MAX_RANK)
        b_sum = dot(b_b, tl.trans(b_h.to(b_b.dtype)), tl.zeros([BLOCK_N, BLOCK_T], tl.float32))
        if MAX_RANK > BLOCK_R and (BLOCK_R == 64 or b_b.dtype == tl.float32):
            for r0 in range(BLOCK_R, rank, BLOCK_R):
                more = r0 + r
                m_b = n_live[:, None] & (more < rank)[None, :]
                b_b2 = tl.load(p_b[:, None] + more[None, :] * stride_rank, mask=m_b, other=0.0)
                b_h2 = _load_h(p_token, t_live, more, rank, stride_h_rank, MAX_RANK)
                b_sum = dot(b_b2, tl.trans(b_h2.to(b_b2.dtype)), b_sum)
        b_new = tl.fma(b_sum, tl.full([BLOCK_N, BLOCK_T], factor, tl.float32), b_out.to(tl.float32))
        tl.store(p_out[:, None] + row[None, :] * stride_out, b_new.to(b_out.dtype), mask=m_out)


@triton.jit
def _load_h(p_token, t_live, r, rank, stride_h_rank, MAX_RANK: tl.constexpr):
    """h of BLOCK_T tokens at ranks `r`, zero at and past `rank`; [BLOCK_T, BLOCK_R].

    What lies past the rank is replaced after the load, not masked in it: a mask that may end
    anywhere would make every element a load of its own.
    """
    b_h = tl.load(p_token[:, None] + r[None, :] * stride_h_rank, mask=t_live[:, None] & (r < MAX_RANK)[None, :], other=0.0)
    return tl.where((r < rank)[None, :], b_h, 0.0)
