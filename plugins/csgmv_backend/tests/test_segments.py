"""Ordering and chunking against the sentence that defines them, written as plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_core.staged import rows_of
from lora_core_csgmv.segments import chunk_size, plan_segments, room_for


def expected_plan(slots, lengths, scales, chunk):
    """Rows by adapter (and factor), in request order, cut every `chunk` rows."""
    starts = np.cumsum([0, *lengths])
    indptr, seg_slots, permutation, seg_scales = [0], [], [], []
    for slot, scale in sorted(
        {(s, f) for s, f, n in zip(slots, scales, lengths, strict=True) if s >= 0 and n}
    ):
        rows = [
            row
            for i, (s, f) in enumerate(zip(slots, scales, strict=True))
            if (s, f) == (slot, scale)
            for row in range(starts[i], starts[i + 1])
        ]
        for at in range(0, len(rows), chunk):
            permutation += rows[at : at + chunk]
            indptr.append(len(permutation))
            seg_slots.append(slot)
            seg_scales.append(scale)
    return indptr, seg_slots, permutation, seg_scales


def plan(slots, lengths, scales=None):
    scales = None if scales is None else np.array(scales, np.float32)
    return plan_segments(np.array(slots, np.int32), rows_of(lengths), scales=scales)


requests = st.lists(
    st.tuples(st.integers(-1, 4), st.integers(0, 40), st.sampled_from((0.5, 1.0, 2.0))), max_size=9
)


@settings(max_examples=150, deadline=None)
@given(requests)
def test_rows_are_ordered_by_adapter_and_cut(batch):
    slots, lengths = [r[0] for r in batch], [r[1] for r in batch]
    found = plan(slots, lengths)
    want = expected_plan(slots, lengths, [1.0] * len(batch), chunk_size(sum(lengths)))
    assert want[:3] == (found.indptr.tolist(), found.slots.tolist(), found.permutation.tolist())
    assert found.scales is None


@settings(max_examples=150, deadline=None)
@given(requests)
def test_requests_of_different_factors_share_no_segment(batch):
    slots, lengths, scales = ([r[i] for r in batch] for i in range(3))
    found = plan(slots, lengths, scales)
    want = expected_plan(slots, lengths, scales, chunk_size(sum(lengths)))
    assert want[:3] == (found.indptr.tolist(), found.slots.tolist(), found.permutation.tolist())
    assert want[3] == ([] if found.scales is None else found.scales.tolist())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 5), min_size=1, max_size=60))
def test_one_row_each_is_the_same_without_lengths(slots):
    short = plan(slots, [1] * len(slots))
    long = plan(slots, np.ones(len(slots), np.int32))
    assert rows_of([1] * len(slots)).lengths is None
    assert [part.tolist() for part in long[:3]] == [part.tolist() for part in short[:3]]


@settings(max_examples=150, deadline=None)
@given(requests)
def test_every_batch_fits_its_room(batch):
    lengths = [r[1] for r in batch]
    found = plan([r[0] for r in batch], lengths, [r[2] for r in batch])
    room = room_for(requests=len(batch), rows=sum(lengths))
    assert len(found.slots) <= room.segments
    assert len(found.permutation) <= room.rows


@pytest.mark.parametrize("rows", [1, 16, 1000, 1025, 5000, 20000])
def test_the_room_of_a_graph_holds_smaller_batches_too(rows):
    """Smaller batches have smaller chunks, and so may have more segments than the largest one."""
    room = room_for(requests=3, rows=rows)
    for tokens in (1, rows // 2, min(rows, 1024), min(rows, 4096), rows):
        lengths = [tokens // 3 + 1, tokens // 3, max(0, tokens - 2 * (tokens // 3) - 1)]
        assert len(plan([0, 1, 2], lengths).slots) <= room.segments


def test_a_block_is_laid_out_as_described():
    found = plan([1, 0, -1, 1], [2, 1, 3, 1], [2.0, 1.0, 1.0, 2.0])
    room = room_for(requests=4, rows=7)
    block = np.full(room.words, -7, np.int32)
    found.write(block, room)
    assert block[0] == 2
    assert block[4:7].tolist() == [0, 1, 4]
    assert block[room.slots_at : room.slots_at + 2].tolist() == [0, 1]
    assert block[room.scales_at : room.scales_at + 2].view(np.float32).tolist() == [1.0, 2.0]
    assert block[room.permutation_at : room.permutation_at + 4].tolist() == [2, 0, 1, 6]
    assert all(
        at % 4 == 0 for at in (room.slots_at, room.scales_at, room.permutation_at, room.words)
    )
