"""The work list against a plain reading of the batch: every row once, in a tile of its own slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_core.workspace import GraphRoom
from lora_core_triton.worklist import Plan, WorkList, plan_batch

NO_LORA = -1
requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-1, 5), st.sampled_from([1.0, 0.5, -2.0])),
    max_size=40,
)


def read(plan: Plan, work: WorkList) -> dict[int, tuple[int, float]]:
    """row -> (slot, scale), as a kernel would read it; all tiles, dead ones too."""
    room, found = work.room, {}
    tiles = plan.words[room.tiles_at :][: 4 * room.max_tiles].reshape(-1, 4)
    for index, (slot, first, count, scale) in enumerate(tiles.tolist()):
        if slot == NO_LORA:
            continue
        assert 0 < count <= room.tile_rows
        for i in range(count):
            at = index * room.tile_rows + i
            row = int(plan.words[room.rows_at + at]) if room.gathered else first + i
            bits = plan.words[room.scales_at + at] if room.gathered else np.int32(scale)
            assert row not in found
            found[row] = (slot, float(np.int32(bits).view(np.float32)))
    return found


def expected(
    lengths: list[int], slots: list[int], scales: list[float]
) -> dict[int, tuple[int, float]]:
    rows, row = {}, 0
    for length, slot, scale in zip(lengths, slots, scales, strict=True):
        for t in range(row, row + length):
            if slot != NO_LORA:
                rows[t] = (slot, scale)
        row += length
    return rows


@pytest.mark.parametrize("kind", [None, "decode", "verify", "prefill"])
@pytest.mark.parametrize("gathered_max_rows", [0, 512])
@given(batch=requests, scaled=st.booleans())
def test_every_row_with_an_adapter_is_in_one_tile_of_its_slot(
    kind: str | None, gathered_max_rows: int, batch: list[tuple[int, int, float]], scaled: bool
) -> None:
    lengths = [min(length, 1) if kind == "decode" else length for length, _, _ in batch]
    slots = [slot for _, slot, _ in batch]
    scales = [scale if scaled else 1.0 for _, _, scale in batch]
    kept = [length // 2 for length in lengths]
    room = None if kind is None else GraphRoom(40, 1600)
    plan = plan_batch(
        tuple(lengths),
        tuple(slots),
        (tuple(kept),),
        tuple(scales) if scaled else None,
        kind,
        room,
        gathered_max_rows,
    )
    assert read(plan, plan.lists[0]) == expected(lengths, slots, scales)
    assert read(plan, plan.lists[1]) == expected(kept, slots, scales)
    assert plan.num_tokens == sum(lengths)
    assert plan.words[: len(batch) + 1].tolist() == [0, *np.cumsum(lengths).tolist()]
    assert plan.words[plan.slots_at :][: len(batch)].tolist() == slots


def test_without_passes_a_captured_head_finds_the_whole_batch() -> None:
    plan = plan_batch((1, 1, 1), (0, NO_LORA, 2), (), None, "decode", GraphRoom(8, 8), 512)
    assert len(plan.lists) == 2
    assert read(plan, plan.lists[1]) == read(plan, plan.lists[0]) == {0: (0, 1.0), 2: (2, 1.0)}


def test_offsets_keep_kernels_from_being_compiled_twice() -> None:
    """All are divisible by 16, whatever the batch."""
    for count in (1, 5, 17):
        for work in plan_batch(
            (3,) * count, (0,) * count, ((1,) * count,), None, None, None, 512
        ).lists:
            assert not any(
                at % 16 for at in (work.room.tiles_at, work.room.rows_at, work.room.scales_at)
            )
