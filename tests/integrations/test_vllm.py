"""The wrapper that vLLM's layers call, on vLLM's terms, with a stand-in for vLLM's base class.

`test_vllm_layers.py` runs the same wrapper under vLLM's own layers.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

S, K, R, WIDTHS = 3, 24, 4, (10, 6, 6)
IDS = [None, 7, 9]  # slot -> adapter id: slots 1 and 2 are taken


class BaseStandIn:
    """The parts of vLLM 0.33's PunicaWrapperBase that the wrapper relies on."""

    def __init__(self, max_num_batched_tokens, max_batches, device, **kwargs):
        self._token_lora_indices = torch.empty(max_num_batched_tokens, dtype=torch.long)
        self._sampler_indices = torch.empty(max_num_batched_tokens, dtype=torch.long)
        self._embeddings_indices = torch.full((max_num_batched_tokens,), 1 << 40)
        self.indices_len = [None] * 4
        self.device = device

    def _update_base_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size):
        for at, (ids, buffer) in enumerate(
            ((mapping.index_mapping, self._token_lora_indices), (mapping.prompt_mapping, self._sampler_indices))
        ):  # fmt: skip
            slots = [lora_index_to_id.index(i) if i > 0 else -1 for i in ids]
            buffer[: len(slots)] = torch.tensor(slots, dtype=torch.long)
            self.indices_len[at] = len(slots)
        self._embeddings_indices[: self.indices_len[0]] = self.token_lora_indices.clamp(min=0) * vocab_size  # fmt: skip

    @property
    def token_lora_indices(self):
        return self._token_lora_indices[: self.indices_len[0]]

    @property
    def sampler_indices(self):
        return self._sampler_indices[: self.indices_len[1]]

    def _select_full_linear_output(self, y, adapter_y, bias_stacked, module_enabled):
        safe = self.sampler_indices.clamp_min(0)
        use = (self.sampler_indices >= 0) & module_enabled[safe]
        return torch.where(use.unsqueeze(-1), adapter_y.to(y.dtype) + bias_stacked[safe], y)


@pytest.fixture(scope="module")
def punica():
    """The module under test, imported over the stand-in."""
    names = (
        "vllm",
        "vllm.lora",
        "vllm.lora.punica_wrapper",
        "vllm.lora.punica_wrapper.punica_base",
    )
    held = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[names[-1]].PunicaWrapperBase = BaseStandIn
    from lora_core.integrations import _vllm_punica

    yield _vllm_punica
    for name, module in held.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


@pytest.fixture
def wrapper(punica, monkeypatch):
    monkeypatch.setenv("LORA_CORE_VLLM", "torch")
    monkeypatch.setenv("LORA_CORE_VLLM_MOE", "torch")
    return punica.PunicaWrapper(16, 8, torch.device("cpu"), lora_config=None)


@pytest.fixture
def stacked():
    """A and B as vLLM stacks them: per slice, `[S, 1, R, K]` and `[S, 1, N, R]`."""
    torch.manual_seed(0)
    a = tuple(torch.randn(S, 1, R, K) for _ in WIDTHS)
    return a, tuple(torch.randn(S, 1, n, R) for n in WIDTHS)


def map_rows(wrapper, tokens, prompts=()):
    mapping = SimpleNamespace(
        index_mapping=tuple(tokens), prompt_mapping=tuple(prompts), is_prefill=True
    )
    wrapper.update_metadata(mapping, IDS, S + 1, 100, some_future_argument=1)


def delta(x, a, b, slots):
    """Row by row in float64; rows of slot -1 get zero."""
    rows = []
    for row, slot in zip(x.double(), slots, strict=True):
        if slot < 0:
            rows.append(torch.zeros(sum(WIDTHS[: len(b)]), dtype=torch.double))
            continue
        parts = [b_i[slot, 0].double() @ (a_i[slot, 0].double() @ row) for a_i, b_i in zip(a, b, strict=True)]  # fmt: skip
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def close(actual, expected):
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-5, atol=1e-5)


TOKENS, SLOTS = [7, 7, 0, 9, 0], [1, 1, -1, 2, -1]


def test_linear_adds_each_rows_own_delta_in_place_and_leaves_base_rows_bit_for_bit(
    wrapper, stacked
):
    map_rows(wrapper, TOKENS)
    x, y = torch.randn(5, K), torch.randn(5, sum(WIDTHS))
    y[2, 0] = -0.0
    before = y.clone()
    wrapper.add_lora_linear(y, x, *stacked, 0.5, WIDTHS, some_future_argument=1)
    close(y, before.double() + 0.5 * delta(x, *stacked, SLOTS))
    assert torch.equal(y[[2, 4]].view(torch.int32), before[[2, 4]].view(torch.int32))


def test_without_add_inputs_rows_with_an_adapter_are_overwritten_and_the_others_stay(
    wrapper, stacked
):
    map_rows(wrapper, TOKENS)
    x, y = torch.randn(5, K), torch.full((5, sum(WIDTHS)), 3.0)
    wrapper.add_lora_linear(y, x, *stacked, 1.0, WIDTHS, add_inputs=False)
    live = [0, 1, 3]
    close(y[live], delta(x, *stacked, SLOTS)[live])
    assert (y[[2, 4]] == 3.0).all()


def test_rows_past_the_mapping_are_padding_also_after_a_longer_batch(wrapper, stacked):
    map_rows(wrapper, [9] * 12)
    map_rows(wrapper, TOKENS)
    x, y = torch.full((12, K), float("nan")), torch.zeros(12, sum(WIDTHS))
    x[:5] = torch.randn(5, K)
    wrapper.add_lora_linear(y, x, *stacked, 1.0, WIDTHS)
    close(y[:5], delta(x[:5], *stacked, SLOTS))
    assert (y[5:] == 0).all()
    assert wrapper.token_mapping_meta.token_lora_mapping.tolist() == SLOTS + [-1] * 11


def test_shrink_then_expand_is_linear_and_writes_at_an_offset(wrapper, stacked):
    a, b = stacked
    map_rows(wrapper, TOKENS)
    x = torch.randn(5, K)
    h = torch.full((3, 5, R), 8.0)
    wrapper.add_shrink(h, x, a, 2.0)
    for i, a_i in enumerate(a):
        expected = torch.stack(
            [a_i[slot, 0] @ row * 2 if slot >= 0 else torch.full((R,), 8.0) for row, slot in zip(x, SLOTS, strict=True)]
        )  # fmt: skip
        torch.testing.assert_close(h[i], expected)
    y = torch.zeros(5, sum(WIDTHS) + 4)
    wrapper.add_expand(y, h, b, WIDTHS, offset_start=3, add_input=True)
    close(y[:, 3:-1], 2 * delta(x, a, b, SLOTS))
    assert (y[:, :3] == 0).all()
    assert (y[:, -1] == 0).all()


def test_shards_of_different_rank_are_sites_of_their_own(wrapper):
    """Fully sharded: A has the rank's share of this process, B the whole rank."""
    map_rows(wrapper, TOKENS)
    a, b = torch.randn(S, 1, 2, K), torch.randn(S, 1, 10, 4)
    x, h = torch.randn(5, K), torch.zeros(1, 5, 2)
    wrapper.add_shrink(h, x, (a,), 1.0)
    y = torch.zeros(5, 10)
    wrapper.add_expand(y, torch.cat([h, h], -1), (b,), (10,))
    whole = torch.cat([a, a], 2)
    close(y, delta(x, (whole,), (b,), SLOTS))


def test_embedding_expands_the_rows_that_the_layer_gathered(wrapper, stacked):
    map_rows(wrapper, TOKENS)
    b = stacked[1][0]
    x, y = torch.randn(5, R), torch.zeros(5, WIDTHS[0])
    wrapper.add_lora_embedding(y, x, b, add_input=True)
    expected = [b[s, 0] @ row if s >= 0 else torch.zeros(WIDTHS[0]) for row, s in zip(x, SLOTS, strict=True)]  # fmt: skip
    torch.testing.assert_close(y, torch.stack(expected))


def test_logits_follow_the_sampled_rows_not_the_tokens(wrapper, stacked):
    map_rows(wrapper, TOKENS, prompts=[9, 0])
    a, b = stacked[0][0], stacked[1][0]
    x, y = torch.randn(2, K), torch.zeros(2, WIDTHS[0] + 2)  # the vocabulary is padded
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    close(y[:, :-2], delta(x, (a,), (b,), [2, -1]))
    assert (y[:, -2:] == 0).all()


def test_a_whole_head_replaces_the_rows_of_its_adapter(wrapper):
    map_rows(wrapper, TOKENS, prompts=[9, 0, 7])
    weight, bias = torch.randn(S, 1, 5, K), torch.randn(S, 5)
    x, y = torch.randn(3, K), torch.randn(3, 5)
    before = y.clone()
    wrapper.apply_lora_full_linear(y, x, weight, bias, torch.tensor([True, False, True]))
    torch.testing.assert_close(y[0], weight[2, 0] @ x[0] + bias[2])
    assert torch.equal(y[1:], before[1:])  # the base model, and an adapter without a head


def test_nothing_is_added_before_the_first_metadata(wrapper, stacked):
    y = torch.zeros(4, sum(WIDTHS))
    wrapper.add_lora_linear(y, torch.randn(4, K), *stacked, 1.0, WIDTHS)
    assert (y == 0).all()


def test_padded_rows_of_an_embedding_gather_from_a_slot_that_exists(wrapper):
    assert wrapper._embeddings_indices.tolist() == [0] * 16
    map_rows(wrapper, [9] * 12)
    map_rows(wrapper, TOKENS)
    assert wrapper._embeddings_indices.tolist() == [100, 100, 0, 200, 0] + [0] * 11


def test_weights_written_in_place_are_seen(wrapper, stacked):
    map_rows(wrapper, TOKENS)
    x = torch.randn(5, K)
    for _ in range(2):
        y = torch.zeros(5, sum(WIDTHS))
        wrapper.add_lora_linear(y, x, *stacked, 1.0, WIDTHS)
        close(y, delta(x, *stacked, SLOTS))
        for tensor in (*stacked[0], *stacked[1]):
            tensor[1].mul_(-2)


def test_a_compiled_layer_does_not_look_into_the_op(wrapper, stacked):
    map_rows(wrapper, TOKENS)

    @torch.compile(backend="eager", fullgraph=True)
    def layer(x, y):
        wrapper.add_lora_linear(y, x, *stacked, 1.0, WIDTHS)
        return y + 1

    x = torch.randn(5, K)
    out = layer(x, torch.zeros(5, sum(WIDTHS)))
    close(out, 1 + delta(x, *stacked, SLOTS))


@pytest.mark.parametrize("add_inputs", [True, False])
def test_experts(wrapper, add_inputs):
    torch.manual_seed(3)
    experts, top_k, inner, tokens = 4, 2, 6, 5
    map_rows(wrapper, TOKENS)
    a = tuple(torch.randn(S, experts, R, K) for _ in range(2))
    b = tuple(torch.randn(S, experts, inner, R) for _ in range(2))
    down_a, down_b = torch.randn(S, experts, R, inner), torch.randn(S, experts, K, R)
    ids = torch.randint(0, experts, (tokens, top_k), dtype=torch.int32)
    factors = torch.rand(tokens, top_k)
    enabled = torch.tensor([0, 1, 0, 0])  # slot 2 has no expert weights
    x, y = torch.randn(tokens, K), torch.full((tokens * top_k, 2 * inner), 5.0)
    common = {"w1": y, "w2": y, "num_tokens": tokens, "top_k_num": top_k, "max_loras": S, "top_k": top_k,
                  "adapter_enabled": enabled, "fully_sharded": False, "use_tuned_config": False,
                  "add_inputs": add_inputs}  # fmt: skip
    routed = wrapper.add_lora_w13(
        y, x, a, b, ids, factors, None, local_num_experts=experts, num_slices=2, **common
    )
    rows, x2, y2 = y.view(tokens, top_k, -1), torch.randn(tokens * top_k, inner), torch.full((tokens, top_k, K), 5.0)  # fmt: skip
    wrapper.add_lora_w2(y2, x2, (down_a,), (down_b,), factors, *routed, tp_rank=0, **common)
    for t in range(tokens):
        for j in range(top_k):
            e, live = ids[t, j], SLOTS[t] == 1
            start = 5.0 if add_inputs or not live else 0.0
            up = torch.cat([b_i[1, e] @ (a_i[1, e] @ x[t]) for a_i, b_i in zip(a, b, strict=True)])
            torch.testing.assert_close(rows[t, j], start + (up if live else torch.zeros_like(up)))
            back = factors[t, j] * (
                down_b[1, e] @ (down_a[1, e] @ x2.view(tokens, top_k, -1)[t, j])
            )
            torch.testing.assert_close(y2[t, j], start + (back if live else torch.zeros_like(back)))


def test_experts_sharded_like_the_base_are_refused(wrapper):
    with pytest.raises(NotImplementedError, match="fully_sharded_loras=True"):
        wrapper._refuse_sharded(True)


def test_register_asks_the_platform_only_when_told_to(monkeypatch):
    from lora_core.integrations.vllm import register

    class Platform:
        @classmethod
        def get_punica_wrapper(cls):
            return "vllm's own"

    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = Platform()
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.delenv("LORA_CORE_VLLM", raising=False)
    register()
    assert platforms.current_platform.get_punica_wrapper() == "vllm's own"
    monkeypatch.setenv("LORA_CORE_VLLM", "torch")
    register()
    assert platforms.current_platform.get_punica_wrapper() == (
        "lora_core.integrations._vllm_punica.PunicaWrapper"
    )
