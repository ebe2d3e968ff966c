"""Tensors to sites: names, slices, scales and norms, against values computed in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lora_core.adapters.checkpoint import read_checkpoint
from lora_core.adapters.packing import PackedAdapter, pack
from lora_core.errors import AdapterFormatError, AdapterMismatchError, UnsupportedAdapterError
from lora_core.sites import Site
from lora_core.weights import SliceLayout
from tests.adapters.helpers import config, lora

K, V = 24, 50


@dataclass
class StubTarget:
    site: Site
    base: nn.Module
    dtype: torch.dtype = torch.float32


def target(
    name: str,
    *widths: int,
    parts: tuple[str, ...] = (),
    kind: str = "linear",
    inputs: int = K,
    bias=False,
):
    torch.manual_seed(len(name))
    layout = SliceLayout(widths)
    base = (
        nn.Embedding(inputs, widths[0])
        if kind == "embedding"
        else nn.Linear(inputs, sum(widths), bias=bias)
    )
    return StubTarget(Site(name, kind, inputs, layout, parts or (name,)), base)


def model(*targets: StubTarget) -> dict[str, StubTarget]:
    return {t.site.name: t for t in targets}


def packed(targets: dict, tensors: dict, **fields) -> PackedAdapter:
    return pack(read_checkpoint((config(**fields), tensors)), targets)


def delta_of(update, layout: SliceLayout) -> torch.Tensor:
    """What an update adds to the weight, `[N, K]` in float64."""
    rows = []
    for i, (a, b) in enumerate(zip(update.a, update.b, strict=True)):
        if a is None:
            assert int(update.ranks[i]) == 0
            rows.append(torch.zeros(layout.widths[i], K, dtype=torch.float64))
        else:
            assert int(update.ranks[i]) == a.shape[0] == b.shape[1]
            rows.append(update.scalings[i].double() * b.double() @ a.double())
    return torch.cat(rows)


# -- slices ------------------------------------------------------------------------------------------

QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
Q_K_V = [("q",), ("q", "k"), ("q", "v"), ("k",), ("v",), ("k", "v"), ("q", "k", "v")]


@pytest.mark.parametrize("members", Q_K_V, ids="".join)
def test_k14_missing_members_are_no_ops_of_their_own_width(members):
    widths = {"q": 128, "k": 32, "v": 32}
    site = target("attn.qkv_proj", *widths.values(), parts=QKV)
    tensors = {}
    for rank, name in enumerate(members, start=1):
        tensors |= lora(f"attn.{name}_proj", rank, K, widths[name], seed=rank)
    ranks = {f"{name}_proj": rank for rank, name in enumerate(members, start=1)}
    update = packed(model(site), tensors, rank_pattern=ranks).sites["attn.qkv_proj"]

    expected = torch.zeros(192, K, dtype=torch.float64)
    start = 0
    for name, width in widths.items():
        if name in members:
            a, b = (
                tensors[f"base_model.model.attn.{name}_proj.lora_{x}.weight"].double() for x in "AB"
            )
            expected[start : start + width] = 8 / a.shape[0] * b @ a
        start += width
    torch.testing.assert_close(delta_of(update, site.site.layout), expected, rtol=1e-6, atol=1e-6)
    assert [ranks.get(f"{name}_proj", 0) for name in "qkv"] == update.ranks.tolist()


MERGED = [
    (count, missing)
    for count in (1, 2, 3, 4)
    for missing in [None, *range(count)]
    if not (count == 1 and missing == 0)
]


@pytest.mark.parametrize(("count", "missing"), MERGED)
def test_k15_merged_layers_of_unequal_parts(count, missing):
    widths = (7, 20, 1, 33)[:count]
    parts = tuple(f"mlp.p{i}" for i in range(count))
    site = target("mlp.merged", *widths, parts=parts)
    tensors = {}
    for i in range(count):
        if i != missing:
            tensors |= lora(parts[i], 4, K, widths[i], seed=i)
    update = packed(model(site), tensors).sites["mlp.merged"]
    expected = [
        torch.zeros(widths[i], K, dtype=torch.float64)
        if i == missing
        else 2
        * tensors[f"base_model.model.{parts[i]}.lora_B.weight"].double()
        @ tensors[f"base_model.model.{parts[i]}.lora_A.weight"].double()
        for i in range(count)
    ]
    torch.testing.assert_close(
        delta_of(update, site.site.layout), torch.cat(expected), rtol=1e-6, atol=1e-6
    )


def test_k16_a_fused_adapter_gives_every_slice_the_same_a():
    site = target("attn.qkv_proj", 12, 4, 4, parts=QKV)
    tensors = lora("attn.qkv_proj", 4, K, 20)
    adapter = packed(model(site), tensors)
    update = adapter.sites["attn.qkv_proj"]
    a, b = (t.double() for t in tensors.values())
    torch.testing.assert_close(delta_of(update, site.site.layout), 2 * b @ a, rtol=1e-6, atol=1e-6)
    assert adapter.nbytes < 1.5 * sum(t.numel() * 4 for t in tensors.values())  # A is there once


def test_k16_a_fused_adapter_and_one_of_its_slices_contradict_each_other():
    site = target("attn.qkv_proj", 12, 4, 4, parts=QKV)
    tensors = lora("attn.qkv_proj", 4, K, 20) | lora("attn.k_proj", 4, K, 4)
    with pytest.raises(AdapterFormatError, match=r"both have a for attn.k_proj"):
        packed(model(site), tensors)


def test_embedding_a_is_turned_into_rows_by_token():
    site = target("embed", 16, kind="embedding", inputs=V)
    a, b = torch.randn(4, V), torch.randn(16, 4)
    update = packed(model(site), {"embed.lora_embedding_A": a, "embed.lora_embedding_B": b}).sites[
        "embed"
    ]
    assert torch.equal(update.a[0], a.T)
    assert torch.equal(update.b[0], b)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_members_of_any_layout(data):
    widths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    members = data.draw(st.sets(st.sampled_from(range(len(widths))), min_size=1))
    ranks = [data.draw(st.integers(1, 6)) for _ in widths]
    parts = tuple(f"m.part{i}" for i in range(len(widths)))
    site = target("m.all", *widths, parts=parts)
    tensors = {}
    for i in members:
        tensors |= lora(parts[i], ranks[i], K, widths[i], seed=i)
    rslora = data.draw(st.booleans())
    pattern = {f"part{i}": ranks[i] for i in members}
    update = packed(model(site), tensors, rank_pattern=pattern, use_rslora=rslora).sites["m.all"]
    expected = torch.zeros(sum(widths), K, dtype=torch.float64)
    for i in members:
        a, b = (tensors[f"base_model.model.{parts[i]}.lora_{x}.weight"].double() for x in "AB")
        scale = 8 / math.sqrt(ranks[i]) if rslora else 8 / ranks[i]
        expected[sum(widths[:i]) : sum(widths[: i + 1])] = scale * b @ a
    torch.testing.assert_close(delta_of(update, site.site.layout), expected, rtol=1e-5, atol=1e-5)


# -- DoRA, biases and whole weights ---------------------------------------------------------------------


@pytest.mark.parametrize("members", [*combinations("qkv", 2), tuple("qkv")], ids="".join)
def test_k5_dora_norms_of_square_slices_run_over_the_inputs(members):
    """Square slices: a norm over the wrong axis has the right shape, and only values tell."""
    widths = {"q": K, "k": K, "v": 8}
    site = target("attn.qkv_proj", *widths.values(), parts=QKV)
    tensors, expected, start = {}, torch.ones(sum(widths.values()), dtype=torch.float64), 0
    for name, width in widths.items():
        if name in members:
            tensors |= lora(f"attn.{name}_proj", 4, K, width, seed=ord(name))
            magnitude = torch.rand(width, generator=torch.Generator().manual_seed(ord(name))) + 0.5
            tensors[f"base_model.model.attn.{name}_proj.lora_magnitude_vector"] = magnitude
            a, b = (
                tensors[f"base_model.model.attn.{name}_proj.lora_{x}.weight"].double() for x in "AB"
            )
            whole = site.base.weight.detach().double()[start : start + width] + 2 * b @ a
            expected[start : start + width] = magnitude.double() / whole.pow(2).sum(dim=1).sqrt()
        start += width
    update = packed(model(site), tensors, use_dora=True).sites["attn.qkv_proj"]
    torch.testing.assert_close(update.output_scale.double(), expected, rtol=1e-5, atol=1e-6)


def test_k5_norms_of_many_rows_are_taken_in_pieces(monkeypatch):
    from lora_core.adapters import packing

    site = target("proj", 50)
    tensors = lora("proj", 4, K, 50) | {"proj.lora_magnitude_vector": torch.rand(50)}
    whole = packed(model(site), tensors, use_dora=True).sites["proj"].output_scale
    monkeypatch.setattr(packing, "_NORM_ROWS", 16)
    torch.testing.assert_close(
        packed(model(site), tensors, use_dora=True).sites["proj"].output_scale, whole
    )


def test_dora_leaves_the_base_weight_alone():
    site = target("proj", 8)
    before = site.base.weight.detach().clone()
    packed(
        model(site),
        lora("proj", 4, K, 8) | {"proj.lora_magnitude_vector": torch.rand(8)},
        use_dora=True,
    )
    assert torch.equal(site.base.weight, before)


def test_bias_is_what_has_to_be_added_to_the_base_bias():
    site = target("proj", 8, bias=True)
    bias = torch.randn(8)
    update = packed(model(site), lora("proj", 4, K, 8) | {"proj.base_layer.bias": bias}).sites[
        "proj"
    ]
    torch.testing.assert_close(update.bias + site.base.bias.detach(), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as-is", "rounded"])
def test_a_bias_that_only_repeats_the_base_is_none(dtype):
    """PEFT saves the bias of a head beside its weight: no reason to ask a backend for biases."""
    site = target("proj", 8, bias=True)
    bias = site.base.bias.detach().to(dtype)
    assert (
        packed(model(site), lora("proj", 4, K, 8) | {"proj.base_layer.bias": bias})
        .sites["proj"]
        .bias
        is None
    )


def test_whole_weight_of_one_slice_keeps_the_others():
    site = target("attn.qkv_proj", 12, 4, 4, parts=QKV)
    weight = torch.randn(4, K)
    update = packed(model(site), {"attn.k_proj.weight": weight}).sites["attn.qkv_proj"]
    base = site.base.weight.detach()
    assert torch.equal(update.full, torch.cat([base[:12], weight, base[16:]]))
    assert update.ranks.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("dtype", "saved", "value"),
    [
        (torch.float16, torch.float32, 1e6),
        (torch.float16, torch.bfloat16, 1e6),
        (torch.float32, torch.float64, 1e60),
    ],
)
def test_k44_a_value_that_the_model_cannot_hold_is_an_error(dtype, saved, value):
    site = target("proj", 8)
    site.dtype = dtype
    tensors = {key: tensor.to(saved) for key, tensor in lora("proj", 4, K, 8).items()}
    tensors["base_model.model.proj.lora_A.weight"][1, 2] = value
    with pytest.raises(
        UnsupportedAdapterError,
        match=r"lora_A.weight holds values up to (1e|9.99e)\+.*model's float",
    ):
        packed(model(site), tensors)


# -- scales --------------------------------------------------------------------------------------------


def test_k2_layers_of_their_own_rank_and_alpha():
    names = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    tensors = lora(names[0], 8, K, 10) | lora(names[1], 32, K, 10)
    adapter = packed(
        model(*(target(name, 10) for name in names)),
        tensors,
        r=8,
        lora_alpha=16,
        rank_pattern={"layers.1.self_attn.q_proj": 32},
        alpha_pattern={"layers.1.self_attn.q_proj": 128},
    )
    assert [adapter.sites[name].scalings.item() for name in names] == [2.0, 4.0]
    assert adapter.max_rank == 32
    assert adapter.notes == ()


def test_k2_patterns_that_match_nothing_are_reported():
    adapter = packed(model(target("proj", 10)), lora("proj", 4, K, 10), rank_pattern={"porj": 7})
    assert adapter.notes == ("rank_pattern 'porj' matches no module",)


def test_k2_a_rank_that_contradicts_the_configuration():
    with pytest.raises(
        AdapterFormatError, match=r"proj has tensors of rank 6, but the configuration says 4"
    ):
        packed(model(target("proj", 10)), lora("proj", 6, K, 10))


@pytest.mark.parametrize(("use_rslora", "expected"), [(False, 3.0), (True, 6.0)])
def test_k3_an_alpha_tensor_counts_for_its_module(use_rslora, expected):
    tensors = (
        lora("a", 4, K, 10) | lora("b", 4, K, 10) | {"base_model.model.a.alpha": torch.tensor(12.0)}
    )
    adapter = packed(model(target("a", 10), target("b", 10)), tensors, use_rslora=use_rslora)
    assert adapter.sites["a"].scalings.item() == expected
    assert adapter.sites["b"].scalings.item() == (4.0 if use_rslora else 2.0)


def test_k3_no_lora_alpha_means_pefts_default():
    fields = config()
    del fields["lora_alpha"]
    adapter = pack(read_checkpoint((fields, lora("a", 4, K, 10))), model(target("a", 10)))
    assert adapter.sites["a"].scalings.item() == 2.0  # 8 / 4


def test_k3_a_null_alpha_needs_alpha_tensors():
    tensors = lora("a", 4, K, 10)
    with pytest.raises(AdapterFormatError, match="lora_alpha is null and a has no alpha tensor"):
        packed(model(target("a", 10)), tensors, lora_alpha=None)
    tensors["a.alpha"] = torch.tensor([2.0])
    assert (
        packed(model(target("a", 10)), tensors, lora_alpha=None).sites["a"].scalings.item() == 0.5
    )


# -- names ---------------------------------------------------------------------------------------------

LAYERS = [
    f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")
]


def renamed(change) -> dict:
    tensors = {}
    for name in LAYERS:
        tensors |= lora(change(name), 4, K, 10)
    return tensors


@pytest.mark.parametrize(
    ("of_model", "of_file"),
    [
        ("language_model.", ""),
        ("", "language_model."),
        ("", "module."),
        ("text.", "language_model."),
    ],
)
def test_k7_another_prefix_is_mapped(of_model, of_file):
    targets = model(*(target(of_model + name, 10) for name in LAYERS))
    adapter = packed(targets, renamed(lambda name: of_file + name))
    assert adapter.sites.keys() == targets.keys()


def test_k7_only_what_is_not_found_is_mapped():
    """lm_head stays where it is while the layers lie below `model.language_model`."""
    deep = [name.replace("model.", "model.language_model.", 1) for name in LAYERS]
    targets = model(*(target(name, 10) for name in deep), target("lm_head", V, kind="lm_head"))
    tensors = renamed(lambda name: name) | lora("lm_head", 4, K, V)
    assert packed(targets, tensors).sites.keys() == targets.keys()


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.replace("_proj", "_projection"),
        lambda name: name.replace("layers.1", "layers.2"),
        lambda name: name.replace("layers.0", "layers.7").replace("layers.1", "layers.8"),
        lambda name: name.replace("self_attn", "attention"),
    ],
    ids=["other-parts", "one-layer-more", "other-layers", "other-middle"],
)
def test_k7_another_model_is_refused_with_names_of_both(change):
    targets = model(*(target(name, 10) for name in LAYERS))
    with pytest.raises(
        AdapterMismatchError,
        match=r"have no place .* The file has .*; the model has model.layers.0",
    ):
        packed(targets, renamed(change))


def test_k7_a_prefix_that_fits_twice_is_refused():
    towers = [f"{tower}.{name}" for tower in ("vision", "text") for name in LAYERS]
    targets = model(*(target(name, 10) for name in towers))
    with pytest.raises(AdapterMismatchError, match="Several changes of prefix would fit"):
        packed(targets, renamed(lambda name: name))


def test_k7_a_layer_number_is_never_changed():
    """Only layer 1 in the file, only layer 0 in the model: another layer is another module."""
    with pytest.raises(AdapterMismatchError):
        packed(model(target("model.layers.0.q_proj", 10)), lora("model.layers.1.q_proj", 4, K, 10))


def test_k7_two_modules_never_share_a_place():
    tensors = lora("model.q_proj", 4, K, 10) | lora("other.q_proj", 4, K, 10)
    with pytest.raises(AdapterMismatchError):
        packed(model(target("model.q_proj", 10)), tensors)


def test_modules_of_a_compiled_model():
    tensors = {f"base_model.model._orig_mod.{k.removeprefix('base_model.model.')}": v
               for k, v in lora("proj", 4, K, 10).items()}  # fmt: skip
    assert packed(model(target("proj", 10)), tensors).max_rank == 4


def test_expert_tensors_are_refused_by_name():
    tensors = lora("mlp.gate", 4, K, 10) | lora("mlp.experts.base_layer", 4, K, 10)
    with pytest.raises(
        UnsupportedAdapterError, match=r"adapters of experts that are not wrapped .*mlp.experts"
    ):
        packed(model(target("mlp.gate", 10)), tensors)


# -- nothing is dropped, nothing is half ---------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "proj.lora_E",
        "proj.lora_A.a.b.weight",
        "proj.lora_diag.default.weight",
        "proj.lora_C.weight",
        "proj.hada_w1_a",
        "proj.running_mean",
        "embed.token_adapter.trainable_tokens_delta",
        "prompt_embeddings",
        "weight",
    ],
)
def test_tensors_of_unknown_kinds_are_never_dropped(key):
    tensors = lora("proj", 4, K, 10) | {key: torch.ones(4)}
    with pytest.raises(
        UnsupportedAdapterError, match=rf"1 of 3 tensors .* must not be dropped: {key}"
    ):
        packed(model(target("proj", 10)), tensors)


def test_k6_a_whole_weight_beside_q_proj_is_applied_or_refused_never_left_out():
    tensors = lora("q_proj", 4, K, 10) | {"score.weight": torch.ones(3, K)}
    with pytest.raises(AdapterMismatchError, match="score"):
        packed(model(target("q_proj", 10)), tensors)
    adapter = packed(model(target("q_proj", 10), target("score", 3)), tensors)
    assert torch.equal(adapter.sites["score"].full, torch.ones(3, K))


def test_k6_modules_to_save_without_their_weight():
    targets = model(target("q_proj", 10), target("score", 3))
    with pytest.raises(AdapterFormatError, match=r"modules_to_save names 'score' .* no weight"):
        packed(targets, lora("q_proj", 4, K, 10), modules_to_save=["score"])
    assert packed(targets, lora("q_proj", 4, K, 10), modules_to_save=["classifier"]).max_rank == 4


A, B = "base_model.model.proj.lora_A.weight", "base_model.model.proj.lora_B.weight"
GOOD = lora("proj", 4, K, 10)


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


@pytest.mark.parametrize(
    ("tensors", "fields", "match"),
    [
        (without(B), {}, "not both of A and B"),
        (without(A), {}, "not both of A and B"),
        ({"proj.alpha": torch.ones(1)}, {}, "not both of A and B"),
        ({**GOOD, A: torch.ones(4)}, {}, r"A \(4,\) and B \(10, 4\)"),
        ({**GOOD, A: torch.ones(5, K)}, {}, r"A \(5, 24\) and B \(10, 4\)"),
        ({**GOOD, "proj.lora_A.weight": GOOD[A]}, {}, "the same part of proj"),
        ({**GOOD, "proj.alpha": torch.ones(2)}, {}, "one finite number"),
        ({**GOOD, "proj.alpha": torch.tensor(torch.nan)}, {}, "one finite number"),
        ({**GOOD, "proj.weight": torch.ones(10, K)}, {}, "both a whole weight and A and B"),
        (GOOD, {"use_dora": True}, "has no lora_magnitude_vector"),
        ({**GOOD, "proj.lora_magnitude_vector": torch.ones(10)}, {}, "use_dora is not set"),
    ],
)
def test_tensors_that_contradict_each_other(tensors, fields, match):
    with pytest.raises(AdapterFormatError, match=match):
        packed(model(target("proj", 10)), tensors, **fields)


@pytest.mark.parametrize(
    ("tensors", "fields", "match"),
    [
        (lora("proj", 4, K + 1, 10), {}, "proj is for inputs of 25, in this model inputs are 24"),
        (lora("proj", 4, K, 11), {}, "proj is for outputs of 11, in this model outputs are 10"),
        (
            lora("head", 4, K, V + 1),
            {},
            "head is for vocabulary of 51, in this model vocabulary has 50",
        ),
        (
            {
                "embed.lora_embedding_A": torch.ones(4, V + 2),
                "embed.lora_embedding_B": torch.ones(16, 4),
            },
            {},
            "embed is for vocabulary of 52, in this model vocabulary has 50",
        ),
        (
            {"head.weight": torch.ones(V + 1, K)},
            {},
            r"\(51, 24\), this model needs \(50, 24\) .*vocabulary",
        ),
        ({**GOOD, "proj.bias": torch.ones(10)}, {}, "proj has none in this model"),
        (
            {**GOOD, "proj.lora_magnitude_vector": torch.ones(11)},
            {"use_dora": True},
            r"lora_magnitude_vector has shape \(11,\), this model needs \(10,\)",
        ),
        (lora("embed", 4, V, 16), {}, "tensors of a linear, but in this model it is an embedding"),
        (
            {"proj.lora_embedding_A": torch.ones(4, K), "proj.lora_embedding_B": torch.ones(10, 4)},
            {},
            "tensors of an embedding, but in this model it is a linear",
        ),
    ],
)
def test_k8_refusals_tell_rank_module_and_vocabulary_apart(tensors, fields, match):
    targets = model(
        target("proj", 10),
        target("head", V, kind="lm_head"),
        target("embed", 16, kind="embedding", inputs=V),
    )
    with pytest.raises(AdapterMismatchError, match=match):
        packed(targets, tensors, **fields)


def test_a_base_without_a_plain_weight_takes_lora_but_not_dora():
    site = target("proj", 10)
    site.base = nn.Identity()
    site.base.weight = site.base.bias = None
    assert packed(model(site), GOOD).max_rank == 4
    with pytest.raises(
        UnsupportedAdapterError, match="base weight of proj is not a plain tensor, and DoRA"
    ):
        packed(model(site), {**GOOD, "proj.lora_magnitude_vector": torch.ones(10)}, use_dora=True)


def test_a_file_that_repeats_the_base_and_nothing_else():
    site = target("embed", 16, kind="embedding", inputs=V)
    with pytest.raises(AdapterMismatchError, match="nothing in the file changes this model"):
        packed(model(site), {"embed.base_layer.weight": site.base.weight.detach()})
