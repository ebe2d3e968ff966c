"""Every sharded layer over real processes, against the whole layer in one, in float64."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from lora_core import LoRAManager, LoRARequest, SliceLayout
from lora_core.errors import TensorMismatchError, UnsupportedOpError
from lora_core.layers import parallel
from lora_core.sites import Shard, Site, padded_part
from tests.distributed import world
from tests.distributed.engine import (
    Column,
    Row,
    VocabularyRows,
    adapter,
    delta,
    dense_backend,
    host_numbers,
    numbers,
)

K, V = 24, 50
RANKS = {"one": (8, 16), "two": (3, 4)}
NAMES = ("one", None, "two", "two", None, "one")
LENGTHS = (2, 1, 3, 0, 2, 1)
ROWS = sum(LENGTHS)

# kind -> slices by name, copies of each, flags of the base module
COLUMNS = {
    "column": ({"proj": 16}, None, {}),
    "column-bias": ({"proj": 16}, None, {"bias": True}),
    "column-gather": ({"proj": 16}, None, {"gather_output": True, "bias": True}),
    "merged": ({"gate": 12, "up": 12}, None, {"bias": True}),
    "merged-uneven": ({"a": 4, "b": 20, "c": 8}, None, {}),
    "qkv": ({"q": 32, "k": 8, "v": 8}, None, {"bias": True}),
    "qkv-replicated": ({"q": 32, "k": 8, "v": 8}, "all", {"bias": True}),
    "qkv-in-pairs": ({"q": 32, "k": 8, "v": 8}, "pairs", {"bias": True}),
}
ROW_FLAGS = {
    "row": {},
    "row-bias": {"bias": True},
    "row-unreduced": {"bias": True, "reduce_results": False},
    "row-splits": {"bias": True, "input_is_parallel": False},
}


def make_manager(backend=None):
    return LoRAManager(dense_backend(backend), max_loras=2, max_rank=8)


def load(manager, layer, shapes, embeddings=()):
    manager.add_layers({layer.site.name: layer})
    sources = {
        name: adapter(seed, shapes, *RANKS[name], embeddings) for seed, name in enumerate(RANKS)
    }
    for name, source in sources.items():
        manager.load_adapter(name, source)
    return sources


@contextmanager
def counted_reductions():
    calls, real = [], dist.all_reduce

    def counted(*arguments, **options):
        calls.append(arguments)
        return real(*arguments, **options)

    dist.all_reduce = counted
    try:
        yield calls
    finally:
        dist.all_reduce = real


def run(manager, layer, x, base, *, reduces=None):
    """The layer's output; along the way: base rows have the base's bits, and one collective is enough."""
    requests = [LoRARequest(name, length) for name, length in zip(NAMES, LENGTHS, strict=True)]
    plain = base(x)
    with manager.batch(requests), counted_reductions() as calls:
        out = layer(x)
    assert reduces is None or len(calls) == reduces
    with manager.batch([LoRARequest("one", 0)]), counted_reductions() as calls:
        assert torch.equal(
            layer(x[:0]), plain[:0]
        )  # an empty batch meets the idle ranks' collectives
    assert reduces is None or len(calls) == reduces
    rows = [name for name, length in zip(NAMES, LENGTHS, strict=True) for _ in range(length)]
    none = torch.tensor([name is None for name in rows])
    assert torch.equal(out[none], plain[none])
    assert not torch.equal(out[~none], plain[~none])
    with manager.base_only():
        assert torch.equal(layer(x), plain)
    with manager.idle():
        empty = layer(x[:0])
        assert torch.equal(empty, plain[:0])
        assert empty.shape == plain[:0].shape
    return out


def merged(sources, weight, name_of_slices, *, embedding=False):
    """The whole weight of every row, float64 `[ROWS, ...]`."""
    weights = []
    for name, length in zip(NAMES, LENGTHS, strict=True):
        own = weight.double()
        if name is not None:
            own = own + torch.cat(
                [delta(sources[name], part, embedding=embedding) for part in name_of_slices]
            )
        weights += [own] * length
    return torch.stack(weights)


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def column(rank, size, kind):
    slices, copies, flags = COLUMNS[kind]
    flags = dict(flags)
    layout = SliceLayout(tuple(slices.values()))
    copies = {"all": (1, size, size), "pairs": (1, 2, 2)}.get(copies)
    shard = Shard.columns(layout, rank, size, copies)
    site = Site("proj" if len(slices) == 1 else "block", "linear", K, layout, tuple(slices), shard)
    weight = numbers(1, layout.out_features, K)
    bias = numbers(2, layout.out_features) if flags.pop("bias", False) else None
    base = Column(site, weight, bias, None, **flags)
    manager = make_manager()
    layer = parallel.LoRAColumnParallelLinear(base, site, manager.gate)
    sources = load(manager, layer, {name: (K, width) for name, width in slices.items()})
    x = numbers(3, ROWS, K)
    out = run(manager, layer, x, base, reduces=0)

    whole = torch.einsum("tnk,tk->tn", merged(sources, weight, slices), x.double())
    whole = whole if bias is None else whole + bias.double()
    if flags.get("gather_output"):
        close(out, whole)
        return
    starts = layout.offsets
    own = [
        whole[:, start + part.start : start + part.stop]
        for start, part in zip(starts, shard.outputs, strict=False)
    ]
    close(out, torch.cat(own, dim=1))


def row(rank, size, kind):
    flags = dict(ROW_FLAGS[kind])
    site = Site("down", "linear", K, SliceLayout((10,)), ("down",), Shard.rows(K, rank, size))
    weight = numbers(1, 10, K)
    bias = numbers(2, 10) if flags.pop("bias", False) else None
    base = Row(site, weight, None, None, **flags)
    base.bias = bias
    manager = make_manager()
    layer = parallel.LoRARowParallelLinear(base, site, manager.gate)
    sources = load(manager, layer, {"down": (K, 10)})
    if "reduce_results" in flags:
        assert layer.reduce_results is flags["reduce_results"]  # models assert on it
    x = numbers(3, ROWS, K)
    part = x if not flags.get("input_is_parallel", True) else x.chunk(size, dim=1)[rank]
    reduces = flags.get("reduce_results", True)
    out = run(manager, layer, part, base, reduces=int(reduces))
    if not reduces:
        dist.all_reduce(out)
    whole = torch.einsum("tnk,tk->tn", merged(sources, weight, ["down"]), x.double())
    close(out, whole if bias is None else whole + bias.double())


def embedding(rank, size):
    part = padded_part(V, rank, size, multiple=4)  # the last ranks hold padding
    site = Site("embed", "embedding", V, SliceLayout((10,)), ("embed",), Shard(inputs=part))
    weight = numbers(1, V, 10)
    base = VocabularyRows(site, weight, None, None)
    base.weight[max(0, V - part.start) :] = torch.nan  # what pads a vocabulary is nobody's
    manager = make_manager()
    layer = parallel.LoRAVocabParallelEmbedding(base, site, manager.gate)
    sources = load(manager, layer, {"embed": (V, 10)}, embeddings=["embed"])
    ids = torch.tensor([0, V - 1, 13, 26, 25, 7, 49, 33, 12], device=world.device)[:ROWS]
    out = run(manager, layer, ids, base, reduces=1)
    whole = merged(sources, weight, ["embed"], embedding=True)
    close(out, whole[torch.arange(ROWS, device=ids.device), ids])


def head(rank, size):
    shard = Shard(outputs=(padded_part(V, rank, size, multiple=4),))
    site = Site("head", "lm_head", K, SliceLayout((V,)), ("head",), shard)
    weight = numbers(1, V, K)
    base = Column(site, weight, None, None, gather_output=True)
    manager = make_manager()
    layer = parallel.LoRAParallelLMHead(base, site, manager.gate)
    sources = load(manager, layer, {"head": (K, V)})
    x = numbers(3, ROWS, K)
    out = run(manager, layer, x, base)
    assert out.shape == (ROWS, V)
    close(out, torch.einsum("tnk,tk->tn", merged(sources, weight, ["head"]), x.double()))


def saved_weights(rank, size):
    """modules_to_save: a whole weight is cut like the base's; a bias enters the sum once."""
    for kind in ("row", "column"):
        shard = Shard.rows(K, rank, size) if kind == "row" else None
        shard = shard or Shard.columns(SliceLayout((12,)), rank, size)
        site = Site("proj", "linear", K, SliceLayout((12,)), ("proj",), shard)
        weight, new, bias = numbers(1, 12, K), host_numbers(5, 12, K), host_numbers(6, 12)
        base = (Row if kind == "row" else Column)(site, weight, None, None)
        manager = make_manager("torch")  # the others claim neither
        wrap = (
            parallel.LoRARowParallelLinear if kind == "row" else parallel.LoRAColumnParallelLinear
        )
        layer = wrap(base, site, manager.gate)
        manager.add_layers({"proj": layer})
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
        saved = {"base_model.model.proj.weight": new}
        manager.load_adapter("whole", ({**config, "modules_to_save": ["proj"]}, saved))
        config, tensors = adapter(7, {"proj": (K, 12)}, 4, 8)
        tensors["base_model.model.proj.lora_B.bias"] = bias
        manager.load_adapter("biased", ({**config, "lora_bias": True}, tensors))
        x = numbers(3, 4, K)
        part = x.chunk(size, dim=1)[rank] if kind == "row" else x
        with manager.batch([LoRARequest("whole", 2), LoRARequest("biased", 2)]):
            out = layer(part)
        x, new, bias = x.double(), new.to(world.device), bias.to(world.device)
        biased = weight.double() + delta((config, tensors), "proj")
        expected = torch.cat([x[:2] @ new.double().T, x[2:] @ biased.T + 2 * bias.double()])
        close(out, expected if kind == "row" else expected.chunk(size, dim=1)[rank])


def own_group(rank, size):
    """A layer's own group counts, not the world: two groups of half the ranks, side by side."""
    half = size // 2
    groups = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    group = groups[rank // half]
    own, n = dist.get_rank(group), dist.get_world_size(group)
    site = Site("down", "linear", K, SliceLayout((10,)), ("down",), Shard.rows(K, own, n))
    weight = numbers(1, 10, K)
    base = Row(site, weight, None, group)
    manager = make_manager()
    layer = parallel.LoRARowParallelLinear(base, site, manager.gate, group=group)
    sources = load(manager, layer, {"down": (K, 10)})
    x = numbers(3 + rank // half, ROWS, K)
    out = run(manager, layer, x.chunk(n, dim=1)[own], base)
    close(out, torch.einsum("tnk,tk->tn", merged(sources, weight, ["down"]), x.double()))


def assert_all_forms(world):
    for kind in COLUMNS:
        world.run(column, kind)
    for kind in ROW_FLAGS:
        world.run(row, kind)
    world.run(embedding)
    world.run(head)


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_over_two_ranks(everywhere2, kind):
    everywhere2.run(column, kind)


@pytest.mark.parametrize("kind", ROW_FLAGS)
def test_rows_over_two_ranks(everywhere2, kind):
    everywhere2.run(row, kind)


def test_vocabulary_over_two_ranks(everywhere2):
    everywhere2.run(embedding)
    everywhere2.run(head)


def test_saved_weights_and_biases_over_two_ranks(world2):
    world2.run(saved_weights)


def test_a_layers_own_group_counts(world2):
    world2.run(own_group)


def quantised(rank, size):
    site = Site("proj", "linear", K, SliceLayout((4,)), ("proj",), Shard.rows(K, rank, size))
    base = Row(site, numbers(1, 4, K), None, None)
    base.weight.data = base.weight.data.to(torch.int8)
    with pytest.raises(UnsupportedOpError, match=r"proj.*int8"):
        parallel.LoRARowParallelLinear(base, site, make_manager().gate)
    wrong = Row(site, numbers(1, 4, K), None, None)
    whole = Site("proj", "linear", K, SliceLayout((4,)), ("proj",))
    with pytest.raises(TensorMismatchError, match=rf"weight is \(4, {K // size}\).*\(4, {K}\)"):
        parallel.LoRARowParallelLinear(wrong, whole, make_manager().gate)


def test_weights_that_cannot_be_cut_are_refused(world2):
    world2.run(quantised)


@pytest.mark.slow
def test_all_forms_over_four_ranks(world4):
    assert_all_forms(world4)
    world4.run(saved_weights)


@pytest.mark.slow
def test_groups_smaller_than_the_world(world4):
    world4.run(own_group)
