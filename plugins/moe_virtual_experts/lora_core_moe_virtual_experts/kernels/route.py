"""Routing: sort pairs by virtual expert, cut the groups into tiles of at most BM pairs.

    order[p] = pair at place p of a stable sort by key
    tile     = (key, first place, pairs)

Counting, not sorting: a pair's place is how many pairs have a smaller key, plus how many earlier
pairs have the same. All of it is integer sums in fixed order, without atomics, and no table lives in
shared memory, so slots * experts has no limit there. Few pairs are compared with each other in one
launch. Many are compared within chunks; counts per (chunk, key) then become places by prefix sums.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lora_core.moe import MoERouting
from lora_core.triton_kit import family
from lora_core_moe_virtual_experts.kernels.bound import DEPENDENT_LAUNCH, bound
from lora_core_moe_virtual_experts.kernels.keys import load_keys

TILE_WORDS = 4  # key, first place, pairs, unused: one aligned vector


@triton.jit
def _store_tile(p_tile, key, first, pairs, mask):
    tl.store(p_tile, key, mask=mask)
    tl.store(p_tile + 1, first, mask=mask)
    tl.store(p_tile + 2, pairs, mask=mask)


@triton.jit
def _count_same(rows, keys, others, m_others, found):
    """Per row: others of its key, plus 2^16 times those of them that come earlier; fewer than 2^15."""
    same = (found[None, :] == keys[:, None]) & m_others[None, :]
    worth = tl.where(others[None, :] < rows[:, None], (1 << 16) + 1, 1)
    return tl.sum(tl.where(same, worth, 0), 1)


@triton.jit
def route_few(
    p_ids,  # [P] - expert ids
    p_slots,  # [T] int32 - slots of the rows
    p_map,  # [G] - global id -> local expert
    p_order,  # [P] int32, out - pairs by place
    p_tiles,  # [P, 4] int32, out - the tile that begins at a place, of 0 pairs where none does
    P,
    G,
    S,
    E,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """BR pairs against all others, which are at most BC."""
    if PDL:
        cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    m_rows = rows < P
    keys = load_keys(p_ids, p_slots, p_map, rows, m_rows, G, S, E, TOP_K, HAS_MAP)
    others = tl.arange(0, BC)
    m_others = others < P
    found = load_keys(p_ids, p_slots, p_map, others, m_others, G, S, E, TOP_K, HAS_MAP)
    smaller = tl.sum((found[None, :] < keys[:, None]).to(tl.int32), 1)
    same = _count_same(rows, keys, others, m_others, found)
    earlier = same >> 16
    equal = same & 0xFFFF
    places = smaller + earlier
    begins = earlier % BM == 0
    tl.store(p_order + places, rows, mask=m_rows)
    pairs = tl.where(begins, tl.minimum(equal - earlier, BM), 0)
    _store_tile(p_tiles + places * 4, tl.where(begins, keys, S * E), places, pairs, m_rows)


@triton.jit
def compact_tiles(
    p_sparse,  # [P, 4] int32 - tiles of route_few
    p_tiles,  # [TILES, 4] int32, out - those of at least one pair in the same order, then empty ones
    P,
    TILES,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """All tiles, at most BC of them, in one program."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    places = tl.arange(0, BC)
    m_places = places < P
    keys = tl.load(p_sparse + places * 4, mask=m_places, other=0)
    firsts = tl.load(p_sparse + places * 4 + 1, mask=m_places, other=0)
    pairs = tl.load(p_sparse + places * 4 + 2, mask=m_places, other=0)
    real = (pairs > 0).to(tl.int32)
    at = tl.cumsum(real, 0) - real
    _store_tile(p_tiles + at * 4, keys, firsts, pairs, pairs > 0)
    m_rest = (places >= tl.sum(real, 0)) & (places < TILES)
    _store_tile(p_tiles + places * 4, keys * 0, firsts * 0, pairs * 0, m_rest)


@triton.jit
def count_chunks(
    p_ids,  # [P] - expert ids
    p_slots,  # [T] int32 - slots of the rows
    p_map,  # [G] - global id -> local expert
    p_ranked,  # [P] int32, out - key, and in the low 8 bits earlier pairs of it in the chunk
    p_counts,  # [chunks, KEYS] int32, zero, out - pairs of each key in a chunk
    P,
    G,
    S,
    E,
    KEYS,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    """BR pairs against the others of their chunk."""
    if PDL:
        cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BR
    rows = first + tl.arange(0, BR)
    m_rows = rows < P
    chunk = first // CHUNK
    others = chunk * CHUNK + tl.arange(0, CHUNK)
    m_others = others < P
    keys = load_keys(p_ids, p_slots, p_map, rows, m_rows, G, S, E, TOP_K, HAS_MAP)
    found = load_keys(p_ids, p_slots, p_map, others, m_others, G, S, E, TOP_K, HAS_MAP)
    same = _count_same(rows, keys, others, m_others, found)
    earlier = same >> 16
    equal = same & 0xFFFF
    tl.store(p_ranked + rows, (keys << 8) + earlier, mask=m_rows)
    p_count = p_counts + chunk.to(tl.int64) * KEYS + keys
    tl.store(p_count, equal, mask=m_rows & (earlier == 0))


@triton.jit
def scan_counts(
    p_counts,  # [chunks, KEYS] int32, changed - becomes the pairs of that key in earlier chunks
    p_totals,  # [3, KEYS] int32, out - per key: pairs, and pairs and tiles of earlier keys in its block
    p_blocks,  # [2, blocks] int32, out - pairs and tiles of each block of keys
    CHUNKS,
    KEYS,
    BM: tl.constexpr,
    BCH: tl.constexpr,
    BKEY: tl.constexpr,
    PDL: tl.constexpr,
):
    """BKEY keys over all chunks, BCH at a time: column sums, then sums within the block."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    keys = block * BKEY + tl.arange(0, BKEY)
    m_keys = keys < KEYS
    totals = tl.zeros([BKEY], tl.int32)
    for start in range(0, CHUNKS, BCH):
        chunks = start + tl.arange(0, BCH)
        mask = (chunks < CHUNKS)[:, None] & m_keys[None, :]
        p_here = p_counts + chunks.to(tl.int64)[:, None] * KEYS + keys[None, :]
        counts = tl.load(p_here, mask=mask, other=0)  # [BCH, BKEY]
        before = tl.cumsum(counts, 0) - counts
        tl.store(p_here, totals[None, :] + before, mask=mask)
        totals += tl.sum(counts, 0)
    tiles = (totals + BM - 1) // BM
    tl.store(p_totals + keys, totals, mask=m_keys)
    tl.store(p_totals + KEYS + keys, tl.cumsum(totals, 0) - totals, mask=m_keys)
    tl.store(p_totals + 2 * KEYS + keys, tl.cumsum(tiles, 0) - tiles, mask=m_keys)
    tl.store(p_blocks + block, tl.sum(totals, 0))
    tl.store(p_blocks + tl.num_programs(0) + block, tl.sum(tiles, 0))


@triton.jit
def place_pairs(
    p_ranked,  # [P] int32 - key, and in the low 8 bits earlier pairs of it in the chunk
    p_counts,  # [chunks, KEYS] int32 - pairs of that key in earlier chunks
    p_totals,  # [3, KEYS] int32 - see scan_counts
    p_blocks,  # [2, blocks] int32
    p_order,  # [P] int32, out - pairs by place
    p_tiles,  # [TILES, 4] int32, out - in the order of keys, then empty ones
    P,
    KEYS,
    BLOCKS,
    TILES,  # at most P
    BM: tl.constexpr,
    BKEY: tl.constexpr,
    BB: tl.constexpr,
    CHUNK: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    """BR pairs: where each goes, and the tiles that begin with one of them."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BR
    rows = first + tl.arange(0, BR)
    m_rows = rows < P
    ranked = tl.load(p_ranked + rows, mask=m_rows, other=0)
    keys = ranked >> 8
    blocks = tl.arange(0, BB)
    m_blocks = blocks < BLOCKS
    pairs_of = tl.load(p_blocks + blocks, mask=m_blocks, other=0)
    tiles_of = tl.load(p_blocks + BLOCKS + blocks, mask=m_blocks, other=0)
    lower = blocks[None, :] < (keys // BKEY)[:, None]  # [BR, BB]
    pairs_before = tl.sum(tl.where(lower, pairs_of[None, :], 0), 1)
    tiles_before = tl.sum(tl.where(lower, tiles_of[None, :], 0), 1)

    p_chunk = p_counts + (first // CHUNK).to(tl.int64) * KEYS + keys
    rank = (ranked & 255) + tl.load(p_chunk, mask=m_rows, other=0)
    total = tl.load(p_totals + keys, mask=m_rows, other=0)
    places = pairs_before + tl.load(p_totals + KEYS + keys, mask=m_rows, other=0) + rank
    tiles = tiles_before + tl.load(p_totals + 2 * KEYS + keys, mask=m_rows, other=0) + rank // BM
    tl.store(p_order + places, rows, mask=m_rows)
    m_tile = m_rows & (rank % BM == 0)
    _store_tile(p_tiles + tiles * 4, keys, places, tl.minimum(total - rank, BM), m_tile)
    m_rest = (rows >= tl.sum(tiles_of, 0)) & (rows < TILES)
    _store_tile(p_tiles + rows * 4, keys * 0, keys * 0, keys * 0, m_rest)


FEW_PAIRS = 2048
"""Comparing all with all costs P * P: up to here cheaper than two more launches."""
_COMPACT_ABOVE = 256
_CHUNK = 256
_ROWS = 32
_COUNT_ROWS = 16  # 40 registers; with 32 rows 96, and a quarter of the programs at a time
_MAX_BLOCKS = 128  # blocks of keys, so that placing compares each pair with few
_SCAN_ELEMENTS = 8192
_FEW_ELEMENTS = 8192  # comparisons of one program


def max_tiles(pairs: int, virtual_experts: int, block_m: int) -> int:
    """A bound on the tiles of any routing of these sizes: what the grids of other kernels cover.

    Args:
        pairs: P.
        virtual_experts: S * E.
        block_m: BM, most pairs of a tile.
    """
    most = min(pairs, pairs // block_m + virtual_experts + 1)
    return pairs if pairs <= FEW_PAIRS and not _worth_compacting(pairs, most) else most


def _worth_compacting(pairs: int, most: int) -> bool:
    """Whether closing the gaps between tiles, a launch of 1.5 us, saves more than launching them.

    DeepSeek T=128, 1024 tiles or 321: 91 us, with gaps 96. Qwen, 1024 either way: 71 us, with gaps 68.
    """
    return pairs > _COMPACT_ABOVE and most <= pairs // 2


def launch_route(routing: MoERouting, block_m: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a routing on its device.

    Args:
        routing: with slots.
        block_m: BM, most pairs of a tile.

    Returns:
        order int32 `[P]`; tiles int32 `[max_tiles, 4]` of (key, first place, pairs, unused), some of
        them of 0 pairs.
    """
    ids, slots, mapping = routing.topk_ids, routing.slots, routing.expert_map
    assert slots is not None
    return _sort(
        (ids, slots, ids if mapping is None else mapping),
        (ids.numel(), 0 if mapping is None else mapping.shape[0]),
        (routing.num_slots, routing.num_experts),
        {"TOP_K": routing.top_k, "HAS_MAP": mapping is not None},
        block_m,
    )


def launch_row_route(slots: Tensor, num_slots: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Sort rows by slot alone, see `launch_route`.

    Args:
        slots: int32 `[T]`.
        num_slots: S.
        block_m: BM, most rows of a tile.
    """
    kinds = {"TOP_K": 0, "HAS_MAP": False}
    return _sort((slots, slots, slots), (slots.shape[0], 0), (num_slots, 1), kinds, block_m)


def _sort(
    sources: tuple[Tensor, Tensor, Tensor],
    entries: tuple[int, int],
    pool: tuple[int, int],
    kinds: Mapping[str, object],
    block_m: int,
) -> tuple[Tensor, Tensor]:
    """Ids, slots and map; P and G; S and E: sorted as `launch_route` says."""
    device, (pairs, _), keys = sources[0].device, entries, pool[0] * pool[1] + 1
    num_tiles = max_tiles(pairs, keys - 1, block_m)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(num_tiles, TILE_WORDS, dtype=torch.int32, device=device)
    overlap = family(device) in DEPENDENT_LAUNCH
    triggers, pdl = {"PDL": overlap}, {"PDL": overlap, "launch_pdl": overlap}
    if pairs <= FEW_PAIRS:
        compared = max(16, triton.next_power_of_2(pairs))
        rows = max(1, _FEW_ELEMENTS // compared)
        compacted = num_tiles < pairs
        found = (
            torch.empty(pairs, TILE_WORDS, dtype=torch.int32, device=device) if compacted else tiles
        )
        few = bound(route_few, BM=block_m, BR=rows, BC=compared, num_warps=8, **kinds, **triggers)
        few((triton.cdiv(pairs, rows), 1, 1), *sources, order, found, *entries, *pool)
        if compacted:
            compact = bound(compact_tiles, BC=compared, num_warps=8, **pdl)
            compact((1, 1, 1), found, tiles, pairs, num_tiles)
        return order, tiles

    chunks = triton.cdiv(pairs, _CHUNK)
    key_block = max(16, triton.next_power_of_2(triton.cdiv(keys, _MAX_BLOCKS)))
    blocks = triton.cdiv(keys, key_block)
    chunk_block = min(_CHUNK, max(1, _SCAN_ELEMENTS // key_block), triton.next_power_of_2(chunks))
    ranked = torch.empty(pairs, dtype=torch.int32, device=device)
    counts = torch.zeros(chunks, keys, dtype=torch.int32, device=device)
    totals = torch.empty(3, keys, dtype=torch.int32, device=device)
    sums = torch.empty(2, blocks, dtype=torch.int32, device=device)
    count = bound(count_chunks, CHUNK=_CHUNK, BR=_COUNT_ROWS, num_warps=4, **kinds, **triggers)
    count(
        (triton.cdiv(pairs, _COUNT_ROWS), 1, 1),
        *(*sources, ranked, counts, *entries, *pool, keys),
    )
    scan = bound(scan_counts, BM=block_m, BCH=chunk_block, BKEY=key_block, num_warps=8, **pdl)
    scan((blocks, 1, 1), counts, totals, sums, chunks, keys)
    place = bound(
        place_pairs,
        BM=block_m,
        BKEY=key_block,
        BB=triton.next_power_of_2(blocks),
        CHUNK=_CHUNK,
        BR=_ROWS,
        **pdl,
    )
    place(
        (triton.cdiv(pairs, _ROWS), 1, 1),
        *(ranked, counts, totals, sums, order, tiles, pairs, keys, blocks, num_tiles),
    )
    return order, tiles
