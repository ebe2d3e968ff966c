"""Shard: which part of a site a rank has, and what of an adapter it keeps."""

from __future__ import annotations

import pytest
import torch

from lora_core import SliceLayout
from lora_core.adapters.packing import SiteUpdate
from lora_core.adapters.sharding import cut_update, cut_weight
from lora_core.errors import TensorMismatchError
from lora_core.sites import Shard, Site, even_part, padded_part

QKV = SliceLayout((16, 8, 4))


def site(shard, kind="linear", inputs=6, layout=QKV):
    return Site("proj", kind, inputs, layout, ("proj",) * layout.num_slices, shard)


def update(layout=QKV, inputs=6, rank=2, *, embedding=False):
    """Numbers that say where they come from."""
    n, out = layout.num_slices, layout.out_features
    a = torch.arange(rank * inputs, dtype=torch.float32).view(rank, inputs)
    b = torch.arange(out * rank, dtype=torch.float32).view(out, rank)
    return SiteUpdate(
        a=(a.T if embedding else a,) * n,
        b=b.split(list(layout.widths)),
        ranks=torch.full((n,), rank, dtype=torch.int32),
        scalings=torch.ones(n),
        output_scale=torch.arange(out).float(),
        bias=torch.arange(out).float(),
        full=torch.arange(out * inputs).float().view(out, inputs),
    )


def test_each_slice_is_cut_for_itself():
    shards = [Shard.columns(QKV, rank, 2) for rank in (0, 1)]
    assert shards[0].outputs == (range(8), range(4), range(2))
    assert shards[1].outputs == (range(8, 16), range(4, 8), range(2, 4))


def test_neighbours_share_copies():
    parts = [Shard.columns(QKV, rank, 4, copies=(1, 2, 4)).outputs for rank in range(4)]
    assert [q.start for q, _, _ in parts] == [0, 4, 8, 12]
    assert [k.start for _, k, _ in parts] == [0, 0, 4, 4]
    assert [v for _, _, v in parts] == [range(4)] * 4


@pytest.mark.parametrize(
    "cut",
    [
        lambda: Shard.columns(QKV, 0, 3),
        lambda: Shard.columns(QKV, 0, 4, copies=(1, 3, 1)),
        lambda: Shard.rows(6, 0, 4),
        lambda: even_part(8, 2, 2),
    ],
    ids=["columns", "copies", "rows", "rank"],
)
def test_what_does_not_divide_is_refused(cut):
    with pytest.raises(TensorMismatchError):
        cut()


def test_padded_parts_are_equal_and_cover():
    parts = [padded_part(50, rank, 3, multiple=4) for rank in range(3)]
    assert parts == [range(20), range(20, 40), range(40, 60)]
    assert padded_part(48, 2, 3) == range(32, 48)


def test_local_site_has_the_shards_size():
    assert site(None).local == site(None)
    local = site(Shard.columns(QKV, 1, 2)).local
    assert (local.in_features, local.layout.widths, local.shard) == (6, (8, 4, 2), None)
    local = site(Shard.rows(6, 1, 2)).local
    assert (local.in_features, local.layout.widths) == (3, QKV.widths)


def test_columns_take_rows_of_b_and_of_all_that_is_per_output():
    whole, cut = update(), cut_update(update(), site(Shard.columns(QKV, 1, 2)))
    rows = torch.tensor([*range(8, 16), *range(20, 24), *range(26, 28)])
    assert torch.equal(torch.cat(cut.b), torch.cat(whole.b)[rows])
    assert all(torch.equal(mine, a) for mine, a in zip(cut.a, whole.a, strict=True))
    for mine, all_of_it in (
        (cut.output_scale, whole.output_scale),
        (cut.bias, whole.bias),
        (cut.full, whole.full),
    ):
        assert torch.equal(mine, all_of_it[rows])


def test_rows_take_columns_of_a_and_the_first_the_bias():
    whole = update()
    first, second = (cut_update(whole, site(Shard.rows(6, rank, 2))) for rank in (0, 1))
    assert torch.equal(second.a[0], whole.a[0][:, 3:])
    assert torch.equal(second.full, whole.full[:, 3:])
    assert torch.equal(torch.cat(second.b), torch.cat(whole.b))
    assert torch.equal(first.bias, whole.bias)
    assert second.bias is None
    assert torch.equal(second.output_scale, whole.output_scale)


def test_a_vocabulary_ends_in_zeros():
    layout = SliceLayout((5,))
    whole = update(layout, inputs=10, embedding=True)
    place = site(Shard(inputs=range(8, 12)), "embedding", 10, layout)
    cut = cut_update(
        SiteUpdate(whole.a, whole.b, whole.ranks, whole.scalings, full=whole.full.T), place
    )
    assert torch.equal(cut.a[0], torch.cat([whole.a[0][8:], torch.zeros(2, 2)]))
    assert torch.equal(cut.full, torch.cat([whole.full.T[8:], torch.zeros(2, 5)]))
    behind = site(Shard(outputs=(range(8, 12),)), "lm_head", 10, layout)
    assert torch.equal(cut_weight(whole.full, behind), torch.zeros(4, 10))


def test_a_shard_does_not_keep_the_whole_alive():
    cut = cut_update(update(), site(Shard.rows(6, 0, 2)))
    assert cut.a[0].untyped_storage().nbytes() == cut.a[0].numel() * 4
