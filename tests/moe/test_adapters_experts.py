"""Adapters of experts from files: PEFT's own form against PEFT, and every other form of the same delta."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from lora_core import load_moe_backend  # noqa: E402
from lora_core.errors import (  # noqa: E402
    AdapterFormatError,
    AdapterMismatchError,
    AttachError,
    UnsupportedAdapterError,
    UnsupportedOpError,
)
from lora_core.integrations.transformers import attach, detach  # noqa: E402
from lora_core.manager import LoRARequest  # noqa: E402
from tests.moe.models import MODELS, tiny_model  # noqa: E402

RANK, EXPERTS, HIDDEN, INNER = 3, 4, 32, 24
IDS = torch.arange(12).view(2, 6) % 32
LAYER = {"qwen3_moe": 0, "mixtral": 0, "olmoe": 0, "deepseek_v3": 1, "gpt_oss": 0}


def config(**changes):
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "peft_version": "0.21.0"} | changes


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def run(model, source):
    """Logits of a batch whose first row has the adapter, and whose second has none."""
    manager = attach(model, "torch", max_loras=2, max_rank=8)
    try:
        manager.load_adapter("one", source)
        with torch.no_grad():
            return model(IDS, adapter_names=["one", None]).logits
    finally:
        detach(model)


class TestAgainstPeft:
    @pytest.mark.parametrize("kind", MODELS, ids=str)
    @pytest.mark.parametrize(
        "targets",
        [
            {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
            {"target_parameters": ["mlp.experts.down_proj"]},
            {
                "target_parameters": ["mlp.experts.gate_up_proj"],
                "target_modules": ["o_proj"],
            },
        ],
        ids=["experts", "down", "attention-and-gate_up"],
    )
    @torch.no_grad()
    def test_logits(self, kind, targets, tmp_path):
        model = tiny_model(kind)
        base = copy.deepcopy(model)
        settings = peft.LoraConfig(r=RANK, lora_alpha=6, **{"target_modules": []} | targets)
        reference = peft.get_peft_model(copy.deepcopy(model), settings)
        for name, parameter in reference.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        reference.save_pretrained(tmp_path)
        out = run(model, tmp_path)
        torch.testing.assert_close(out[0], reference(IDS).logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out[1], base(IDS).logits[1], rtol=1e-5, atol=1e-5)
        assert (out[0] - base(IDS).logits[0]).abs().max() > 1e-2, "the adapter does something"


def one_delta(seed=0):
    """gate_up and down of one layer, as per-expert factors: A [E, r, in] and B [E, out, r]."""
    return {
        "gate_up_proj": (randn(EXPERTS, RANK, HIDDEN), randn(EXPERTS, 2 * INNER, RANK, seed=1)),
        "down_proj": (randn(EXPERTS, RANK, INNER, seed=2), randn(EXPERTS, HIDDEN, RANK, seed=3)),
    }


def as_parameters(delta, home):
    """PEFT's form: expert outside in A, inside in B."""
    tensors = {}
    for path, name in ((f"{home}.base_layer", "gate_up_proj"), (home, "down_proj")):
        a, b = delta[name]
        tensors[f"{path}.lora_A.weight"] = a.flatten(0, 1)
        tensors[f"{path}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return tensors


def as_old_parameters(delta, home):
    """As PEFT before 0.19 would have trained the same delta: the transpose of the pair."""
    return as_parameters({k: (b.mT, a.mT) for k, (a, b) in delta.items()}, home)


def as_stacked(delta, home):
    return {
        f"{home}.{name}.lora_{part}.weight": tensor
        for name, pair in delta.items()
        for part, tensor in zip("AB", pair, strict=True)
    }


def as_single_experts(delta, home, names=("gate_proj", "up_proj", "down_proj")):
    tensors = {}
    (a13, b13), (a2, b2) = delta["gate_up_proj"], delta["down_proj"]
    for e in range(EXPERTS):
        for name, a, b in (
            (names[0], a13[e], b13[e, :INNER]),
            (names[1], a13[e], b13[e, INNER:]),
            (names[2], a2[e], b2[e]),
        ):
            tensors[f"{home}.{e}.{name}.lora_A.weight"] = a.contiguous()
            tensors[f"{home}.{e}.{name}.lora_B.weight"] = b.contiguous()
    return tensors


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        (as_old_parameters, {"peft_version": "0.18.0"}),
        (as_stacked, {}),
        (as_single_experts, {}),
        (
            lambda delta, home: as_single_experts(
                delta, home.replace("mlp", "block_sparse_moe"), ("w1", "w3", "w2")
            ),
            {},
        ),
    ],
    ids=["peft-0.18", "stacked", "per-expert", "mixtral-names"],
)
def test_every_form_of_one_delta_gives_the_same_answer(form, changes):
    """K35."""
    delta, home = one_delta(), "base_model.model.model.layers.0.mlp.experts"
    expected = run(tiny_model("mixtral"), (config(), as_parameters(delta, home)))
    found = run(tiny_model("mixtral"), (config(**changes), form(delta, home)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (expected - tiny_model("mixtral")(IDS).logits).abs().max() > 1e-2


def test_gate_and_up_of_a_base_that_stores_them_in_turn():
    """gpt-oss: the same weights as per-expert gate and up, and as PEFT's one parameter."""
    delta, home = one_delta(), "base_model.model.model.layers.0.mlp.experts"
    a, b = delta["gate_up_proj"]
    in_turn = torch.stack([b[:, :INNER], b[:, INNER:]], 2).flatten(1, 2)
    whole = {"gate_up_proj": (a, in_turn), "down_proj": delta["down_proj"]}
    expected = run(tiny_model("gpt_oss"), (config(), as_parameters(whole, home)))
    found = run(tiny_model("gpt_oss"), (config(), as_single_experts(delta, home)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flat", [False, True], ids=["one-expert", "matrix"])
def test_shared_outer_is_detected_from_shape(flat):
    (a13, b13), (a2, b2) = one_delta().values()
    home = "base_model.model.model.layers.0.mlp.experts"
    shared = {
        f"{home}.gate_up_proj.lora_A.weight": a13[0] if flat else a13[:1],
        f"{home}.gate_up_proj.lora_B.weight": b13,
        f"{home}.down_proj.lora_A.weight": a2,
        f"{home}.down_proj.lora_B.weight": b2[0] if flat else b2[:1],
    }
    full = {
        "gate_up_proj": (a13[:1].expand(EXPERTS, -1, -1), b13),
        "down_proj": (a2, b2[:1].expand(EXPERTS, -1, -1)),
    }
    expected = run(tiny_model("qwen3_moe"), (config(), as_stacked(full, home)))
    model = tiny_model("qwen3_moe")
    manager = attach(model, "torch", max_loras=2, max_rank=8)
    manager.load_adapter("one", (config(), shared))
    with torch.no_grad():
        found = model(IDS, adapter_names=["one", None]).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        projections = [
            manager.layers[f"model.layers.0.mlp.experts.{p}"] for p in ("gate_up_proj", "down_proj")
        ]
        assert [p.weights.shared_a for p in projections] == [True, False]
        assert [p.weights.shared_b for p in projections] == [False, True]

        manager.load_adapter("two", (config(), as_stacked(one_delta(), home)))
        both = model(IDS, adapter_names=["one", "two"]).logits
        assert not any(p.weights.shared_a or p.weights.shared_b for p in projections)
        torch.testing.assert_close(both[0], expected[0], rtol=1e-5, atol=1e-5)
        alone = run(tiny_model("qwen3_moe"), (config(), as_stacked(one_delta(), home)))
        swapped = model(IDS, adapter_names=["two", None]).logits
        torch.testing.assert_close(swapped, alone, rtol=1e-5, atol=1e-5)


def test_rslora_on_experts():
    """K1: the same scale on experts as on dense modules: alpha / sqrt(r)."""
    delta, home = one_delta(), "base_model.model.model.layers.0.mlp.experts"
    scaled = {name: (a, b * 2 / 3**0.5) for name, (a, b) in delta.items()}
    plain = config(lora_alpha=RANK)  # a scale of 1
    expected = run(tiny_model("olmoe"), (plain, as_stacked(scaled, home)))
    found = run(
        tiny_model("olmoe"), (config(lora_alpha=2, use_rslora=True), as_stacked(delta, home))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_generate_with_a_mixed_batch_equals_peft(tmp_path):
    """Greedy tokens of a batch with and without the adapter are PEFT's, on attention and experts."""
    model = tiny_model("deepseek_v3")
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=6,
        target_modules=["o_proj", "shared_experts.down_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    reference = peft.get_peft_model(copy.deepcopy(model), settings)
    for name, parameter in reference.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    reference.save_pretrained(tmp_path)
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    manager = attach(model, "torch", max_loras=2, max_rank=8)
    assert "model.layers.1.mlp.shared_experts.down_proj" in manager.layers
    manager.load_adapter("one", tmp_path)
    found = model.generate(IDS, adapter_names=["one", None], **greedy)
    assert found[0].tolist() == reference.generate(IDS, **greedy)[0].tolist()
    with reference.disable_adapter():
        assert found[1].tolist() == reference.generate(IDS, **greedy)[1].tolist()
    assert found[0].tolist() != found[1].tolist()


def test_expert_parallel_ranks_take_their_own_experts():
    """K37: of a file with all experts, a rank packs those that it holds."""
    from types import SimpleNamespace

    from lora_core import SliceLayout
    from lora_core.adapters.checkpoint import read_checkpoint
    from lora_core.adapters.packing import pack
    from lora_core.sites import Site

    delta, home = one_delta(), "model.layers.0.mlp.experts"
    name = f"{home}.down_proj"
    for held in (range(2), range(2, 4)):
        target = SimpleNamespace(
            site=Site(name, "experts", INNER, SliceLayout((HIDDEN,)), (name,)),
            dtype=torch.float32,
            expert_ids=held,
            total_experts=EXPERTS,
            transposed=False,
        )
        a, b = delta["down_proj"]
        for form in (
            as_stacked({"down_proj": (a, b)}, home),
            {
                f"{home}.lora_A.weight": a.flatten(0, 1),
                f"{home}.lora_B.weight": b.permute(1, 2, 0).flatten(1),
            },
        ):
            update = pack(read_checkpoint((config(), form)), {name: target}).sites[name]
            assert torch.equal(update.a[0], a[held.start : held.stop])
            assert torch.equal(update.b[0], b[held.start : held.stop])


def test_an_experts_backend_elsewhere_is_refused():
    model, backend = tiny_model("qwen3_moe"), load_moe_backend("torch", device="cpu")
    backend.device = torch.device("meta")
    with pytest.raises(AttachError, match="backend 'torch' is on meta"):
        attach(model, "torch", experts_backend=backend)
    assert attach(model, "torch", experts_backend="torch").layers


class TestRefusals:
    """Whatever cannot be applied is refused by name, and nothing is loaded."""

    HOME = "base_model.model.model.layers.0.mlp.experts"

    def load(self, tensors, **changes):
        model = tiny_model("qwen3_moe")
        manager = attach(model, "torch", max_loras=2, max_rank=8)
        try:
            manager.load_adapter("bad", (config(**changes), tensors))
        finally:
            assert not manager.adapters()

    def test_an_expert_that_the_model_lacks(self):
        tensors = {
            f"{self.HOME}.7.down_proj.lora_A.weight": randn(RANK, INNER),
            f"{self.HOME}.7.down_proj.lora_B.weight": randn(HIDDEN, RANK),
        }
        with pytest.raises(
            AdapterMismatchError, match=r"of expert 7, but .*down_proj has 4 experts"
        ):
            self.load(tensors)

    def test_another_number_of_experts(self):
        tensors = {
            f"{self.HOME}.down_proj.lora_A.weight": randn(8, RANK, INNER),
            f"{self.HOME}.down_proj.lora_B.weight": randn(8, HIDDEN, RANK),
        }
        with pytest.raises(AdapterMismatchError, match=r"\(8, 3, 24\).* needs \[4 or 1 experts"):
            self.load(tensors)

    def test_shapes_of_no_parameter(self):
        tensors = {
            f"{self.HOME}.lora_A.weight": randn(EXPERTS * RANK, 17),
            f"{self.HOME}.lora_B.weight": randn(HIDDEN, RANK * EXPERTS),
        }
        with pytest.raises(AdapterMismatchError, match=r"expected \[experts \* rank, in\]"):
            self.load(tensors)

    def test_a_layer_that_the_model_lacks(self):
        tensors = as_parameters(one_delta(), self.HOME.replace("layers.0", "layers.9"))
        with pytest.raises(AdapterMismatchError, match=r"adapts model.layers.9.mlp.experts"):
            self.load(tensors)

    def test_an_unknown_projection(self):
        tensors = {
            f"{self.HOME}.0.router.lora_A.weight": randn(RANK, INNER),
            f"{self.HOME}.0.router.lora_B.weight": randn(HIDDEN, RANK),
        }
        with pytest.raises(UnsupportedAdapterError, match="no part of experts that is known"):
            self.load(tensors)

    def test_one_matrix_of_a_pair(self):
        with pytest.raises(UnsupportedAdapterError, match="both A and B are needed"):
            self.load({f"{self.HOME}.0.down_proj.lora_A.weight": randn(RANK, INNER)})

    def test_a_rank_that_the_configuration_does_not_say(self):
        with pytest.raises(AdapterFormatError, match="rank 3, but the configuration says 5"):
            self.load(as_stacked(one_delta(), self.HOME), r=5)

    def test_one_projection_twice(self):
        tensors = as_stacked(one_delta(), self.HOME) | as_single_experts(one_delta(), self.HOME)
        with pytest.raises(AdapterFormatError, match="both adapt"):
            self.load(tensors)


def test_a_scale_that_would_not_reach_experts_is_refused_by_name():
    """Before anything changes; a scale of 1 is none, and the base has nothing to scale."""
    model = tiny_model("qwen3_moe")
    home = "base_model.model.model.layers.0.mlp.experts"
    manager = attach(model, "torch", max_loras=2, max_rank=8)
    manager.load_adapter("e", (config(), as_stacked(one_delta(), home)))
    with pytest.raises(UnsupportedOpError, match=r"'e' changes model\.layers\.0\.mlp\.experts"):
        manager.prepare([LoRARequest("e", scale=0.5)])
    assert manager.backend.batch_info is None
    manager.prepare([LoRARequest("e", scale=1.0), LoRARequest(None, scale=0.5)])
    manager.reset()
    detach(model)
