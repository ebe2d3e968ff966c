"""The work list against a plain reading of the batch: every row once, in a tile of its own slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_core.staged import rows_of
from lora_core_triton.worklist import (
    Room,
    WorkList,
    cut,
    eager_rooms,
    graph_rooms,
    lists_at,
    slots_at,
    write,
)

NO_LORA = -1
requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-1, 5), st.sampled_from([1.0, 0.5, -2.0])),
    max_size=40,
)


def read(host: np.ndarray, work: WorkList) -> dict[int, tuple[int, float]]:
    """row -> (slot, scale), as a kernel would read it; all tiles, dead ones too."""
    room, found = work.room, {}
    tiles = host[room.tiles_at :][: 4 * room.max_tiles].reshape(-1, 4)
    for index, (slot, first, count, scale) in enumerate(tiles.tolist()):
        if slot == NO_LORA:
            continue
        assert 0 < count <= room.tile_rows
        for i in range(count):
            at = index * room.tile_rows + i
            row = int(host[room.rows_at + at]) if room.gathered else first + i
            bits = host[room.scales_at + at] if room.gathered else np.int32(scale)
            assert row not in found
            found[row] = (slot, float(np.int32(bits).view(np.float32)))
    return found


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "contiguous"])
@pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "eager"])
@given(batch=requests, scaled=st.booleans(), one_row_each=st.booleans())
def test_every_row_with_an_adapter_is_in_one_tile_of_its_slot(
    in_graph: bool,
    gathered: bool,
    batch: list[tuple[int, int, float]],
    scaled: bool,
    one_row_each: bool,
) -> None:
    lengths = [1 if one_row_each else length for length, _, _ in batch]
    slots = np.array([slot for _, slot, _ in batch], np.int32)
    bits = np.array([scale for _, _, scale in batch], np.float32).view(np.int32) if scaled else None
    expected, row = {}, 0
    for length, slot, scale in zip(
        lengths, slots.tolist(), [scale for _, _, scale in batch], strict=True
    ):
        for t in range(row, row + length):
            if slot != NO_LORA:
                expected[t] = (slot, scale if scaled else 1.0)
        row += length

    listed = rows_of(lengths)
    part = cut(slots, listed, bits, gathered=gathered)
    if in_graph:
        room: Room = graph_rooms("decode" if gathered else "prefill", 40, 1600)[0]
    else:
        (room,) = eager_rooms(len(batch), [part])
    host = np.full(room.end, 7, np.int32)  # what a batch before this one left
    assert read(host, write(host, room, part)) == expected
    assert listed.indptr.tolist() == [0, *np.cumsum(lengths, dtype=int).tolist()]
    assert part.num_rows == row
    assert part.highest_slot == max((slot for slot, _ in expected.values()), default=NO_LORA)


def test_parts_do_not_overlap_and_offsets_keep_kernels_from_being_compiled_twice() -> None:
    """All offsets are divisible by 16, whatever the batch."""
    for count in (1, 5, 17):
        part = cut(np.zeros(count, np.int32), rows_of([3] * count), None, gathered=True)
        marks = [0, count + 1, slots_at(count), slots_at(count) + count, lists_at(count)]
        for room in eager_rooms(count, [part, part]):
            marks += [room.tiles_at, room.rows_at, room.scales_at, room.end]
        assert marks == sorted(marks)
        assert not any(at % 16 for at in (*marks[2:3], *marks[4:]))
