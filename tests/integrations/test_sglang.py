"""LoRACoreBackend on SGLang's terms, with stand-ins for the little of SGLang that it imports.

`test_sglang_layers.py` runs the same backend under SGLang's own manager, pool and layers.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lora_core.errors import (
    BatchMismatchError,
    GraphNotInitializedError,
    NoBatchPreparedError,
    TensorMismatchError,
    UnsupportedOpError,
)
from lora_core.integrations import sglang

S, K, R, WIDTHS = 4, 24, 4, (10, 6, 6)
N = sum(WIDTHS)
OFFSETS = (0, 10, 16, 22)
RANKS, SCALINGS = [4, 2, 0, 3], [0.5, 3.0, 0.0, 2.0]  # slot 2 is SGLang's base model
NAN = float("nan")


class BaseStandIn:
    """The parts of SGLang 0.5.23's BaseLoRABackend that are relied on."""

    def __init__(self, max_loras_per_batch, device):
        self.max_loras_per_batch, self.device = max_loras_per_batch, device
        self.batch_info = self.lm_head_batch_info = self.lm_head_pass_batch_infos = None
        self.prefill_cuda_graph_batch_info = None
        self.told_experts, self._is_moe_lora = [], False

    def reset_batch_state(self):
        self.batch_info = self.lm_head_batch_info = self.lm_head_pass_batch_infos = None

    def reset_routing_cache(self):
        self.told_experts.clear()

    def _add_moe_lora_info(self, forward_batch, batch_info):
        self.told_experts.append(batch_info)
        return batch_info

    def _get_lm_head_pass_segments(self, weight_indices, kept, size=4):
        rows = [i for i, n in zip(weight_indices, kept, strict=True) for _ in range(n)]
        if len(rows) <= size:
            return None
        chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
        return [(chunk, [1] * len(chunk)) for chunk in chunks]


@dataclass
class InfoStandIn:
    use_cuda_graph: bool
    bs: int
    num_segments: int
    seg_indptr: torch.Tensor
    weight_indices: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor
    max_len: int
    seg_lens: torch.Tensor
    expected_tokens: int | None = None


@dataclass
class HooksStandIn:
    after_gate_up: object = None
    after_down: object = None


HOOKS: dict = {}


class Registry:
    """SGLang's hook registry, which patches nothing here."""

    @staticmethod
    def register(target, hook, kind):
        HOOKS[target] = hook, kind


CAPTURE = SimpleNamespace(on=False)
EXPERIMENTAL = SimpleNamespace(get=lambda: False)
BACKENDS: dict = {}
STANDINS = {
    "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_EXPERIMENTAL_LORA_OPTI=EXPERIMENTAL)},
    "sglang.srt.lora.backend.base_backend": {"BaseLoRABackend": BaseStandIn},
    "sglang.srt.lora.backend.lora_registry": {
        "register_lora_backend": lambda name: lambda factory: BACKENDS.setdefault(name, factory)
    },
    "sglang.srt.lora.utils": {
        "LoRABatchInfo": InfoStandIn,
        "get_lm_head_pruned_lens": lambda batch: batch.kept,
    },
    "sglang.srt.lora.lora_moe_runners": {"LoRAHooks": HooksStandIn, "build_lora_hooks": None},
    "sglang.srt.model_executor.runner": {"get_is_capture_mode": lambda: CAPTURE.on},
    "sglang.srt.plugins.hook_registry": {
        "HookRegistry": Registry,
        "HookType": SimpleNamespace(AFTER="after", REPLACE="replace"),
    },
}


@pytest.fixture(scope="module", autouse=True)
def modules():
    """The modules under test, imported over the stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in STANDINS.items():
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                parent = ".".join(parts[:length])
                if length == len(parts) or not isinstance(sys.modules.get(parent), ModuleType):
                    patch.setitem(sys.modules, parent, ModuleType(parent))
            vars(sys.modules[name]).update(attributes)
            setattr(sys.modules[name.rpartition(".")[0]], parts[-1], sys.modules[name])
        from lora_core.integrations import _sglang_backend, _sglang_experts

        yield SimpleNamespace(backend=_sglang_backend, experts=_sglang_experts)
        for module in (_sglang_backend, _sglang_experts):
            del sys.modules[module.__name__]


def make(modules, device="cpu"):
    return modules.backend.LoRACoreBackend(S, torch.device(device), server_args=None)


@pytest.fixture
def backend(modules, monkeypatch):
    monkeypatch.setenv("LORA_CORE_SGLANG", "torch")
    return make(modules)


def batch(mode, lengths, kept=None, draft=None):
    asked = dict.fromkeys(("is_idle", "is_decode", "is_target_verify", "is_extend"), False)
    asked |= {mode: True} | ({"is_extend": True} if mode == "is_target_verify" else {})
    return SimpleNamespace(
        batch_size=len(lengths),
        extend_seq_lens_cpu=lengths,
        spec_info=SimpleNamespace(draft_token_num=draft),
        forward_mode=SimpleNamespace(**{k: lambda v=v: v for k, v in asked.items()}),
        kept=kept,
    )


def prepare(backend, lengths=(2, 1, 3, 1), indices=(3, 2, 1, 0), mode="is_extend", **kwargs):
    """By default rows of slots 3 3 - 1 1 1 0, where - is the base model."""
    decode, prefill = kwargs.pop("decode", False), kwargs.pop("prefill", False)
    backend.prepare_lora_batch(
        batch(mode, list(lengths), **kwargs), list(indices), RANKS, SCALINGS, decode, prefill
    )


ROWS = [3, 3, 2, 1, 1, 1, 0]


def site(widths=WIDTHS, inputs=K):
    """A and B of each slot, and both as SGLang packs them; NaN wherever nothing may be read."""
    torch.manual_seed(0)
    c = len(widths)
    a, b = torch.full((S, c * R, inputs), NAN), torch.full((S, sum(widths), R), NAN)
    adapters = {}
    for slot, rank in enumerate(RANKS):
        adapters[slot] = [(torch.randn(rank, inputs), torch.randn(n, rank)) for n in widths]
        if rank:
            a[slot, : c * rank] = torch.cat([pair[0] for pair in adapters[slot]])
            b[slot, :, :rank] = torch.cat([pair[1] for pair in adapters[slot]])
    return a, b, adapters


def delta(x, adapters, rows=ROWS):
    """Row by row in float64."""
    return torch.stack([
        torch.cat([SCALINGS[slot] * (b.double() @ (a.double() @ row)) for a, b in adapters[slot]])
        for row, slot in zip(x.double(), rows, strict=True)
    ])  # fmt: skip


def close(actual, expected):
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-5, atol=1e-5)


def offsets(*numbers):
    return torch.tensor(numbers or OFFSETS, dtype=torch.int32)


# -- compute -------------------------------------------------------------------------------------


def test_slots_of_different_rank_in_one_batch_each_with_its_own_packing(backend):
    a, b, adapters = site()
    prepare(backend)
    x, y = torch.randn(7, K), torch.randn(7, N)
    y[2, 0] = -0.0
    before = y.clone()
    out = backend.run_qkv_lora(
        x, a, b, output_offset=offsets(), output_offset_cpu=offsets(), max_qkv_out_dim=10, base_output=y
    )  # fmt: skip
    assert out is y
    close(y, before.double() + delta(x, adapters))
    assert torch.equal(y[2].view(torch.int32), before[2].view(torch.int32))  # the base, bit for bit


def test_columns_stay_where_every_adapter_has_the_whole_rank_except_in_graphs(backend):
    a, b = torch.randn(S, 3 * R, K), torch.randn(S, N, R)
    x, scalings = torch.randn(2, K), [1.0] * S
    backend.init_decode_cuda_graph_batch_info(2, 1)
    expected = torch.stack([
        torch.cat([part @ (a[slot, i * R : (i + 1) * R] @ row) for i, part in enumerate(b[slot].split(WIDTHS))])
        for row, slot in zip(x, [1, 3], strict=True)
    ])  # fmt: skip
    for ranks, decode, moved in (([R, R, 0, R], False, 0), ([R, R, 0, R], True, 1), ([R, R, 1, R], False, 1)):  # fmt: skip
        backend.prepare_lora_batch(batch("is_decode", [1, 1]), [1, 3], ranks, scalings, decode)
        out = forward(backend, None, x, torch.zeros(2, N), a, b, OFFSETS)
        close(out, expected)
        assert len(backend._columns) == moved


def test_gate_up_is_two_slices(backend):
    a, b, adapters = site((8, 8))
    prepare(backend)
    x = torch.randn(7, K)
    for given in (offsets(0, 8, 16), None):
        close(backend.run_gate_up_lora(x, a, b, output_offset_cpu=given), delta(x, adapters))


def test_a_then_b_is_the_whole(backend):
    a, b, adapters = site()
    prepare(backend)
    x = torch.randn(7, K)
    h = backend.run_lora_a_sgemm(x, a, stack_num=3)
    assert (h.shape, h.dtype) == ((7, 3 * R), x.dtype)
    for row, slot in enumerate(ROWS):  # packed as A is
        expected = torch.cat([pair[0] @ x[row] for pair in adapters[slot]])
        torch.testing.assert_close(h[row, : 3 * RANKS[slot]], expected)
    close(backend.run_lora_b_sgemm(h, b, output_offset_cpu=offsets()), delta(x, adapters))
    a, b, adapters = site((5,))
    h = backend.run_lora_a_sgemm(x, a)
    close(backend.run_lora_b_sgemm(h, b, output_offset=offsets(0, 5)), delta(x, adapters))


def forward(backend, layer, x, base, a, b, bounds, **kwargs):
    return backend.forward_with_base(layer, x, lambda: base, a, b, None, bounds, **kwargs)


def test_one_reduction_serves_base_and_delta(backend, modules):
    """Row-parallel over two processes: each has half of the inputs, and of A; B is whole."""
    a, b, adapters = site((9,))
    x, base = torch.randn(7, K), torch.randn(7, 9)
    parts, reduced = [], []
    for half, rank in ((slice(0, 12), backend), (slice(12, 24), make(modules))):
        prepare(rank)
        own = base.clone() if not parts else torch.zeros(7, 9)
        parts.append(
            forward(rank, None, x[:, half].contiguous(), own, a[..., half].contiguous(), b, (0, 9),
                    all_reduce=lambda y: reduced.append(1) or y)
        )  # fmt: skip
    assert len(reduced) == 2
    close(parts[0] + parts[1], base.double() + delta(x, adapters))


def test_columns_past_the_adapted_slices_stay(backend):
    """A projection of more parts than adapters have: SGLang's in_proj of Mamba."""
    a, b, adapters = site((8, 8))
    prepare(backend)
    x, y = torch.randn(7, K), torch.full((7, 20), 5.0)
    forward(backend, None, x, y, a, b, (0, 8, 16))
    close(y[:, :16], 5.0 + delta(x, adapters))
    assert (y[:, 16:] == 5.0).all()


def test_embedding_looks_up_each_rows_own_a(backend):
    vocab = 12
    a, b, adapters = site((K,), vocab)
    prepare(backend)
    ids = torch.tensor([0, 11, 5, 3, 0, 7, 11, 999])  # the last row is padding
    layer = SimpleNamespace(vocab_size=vocab, new_embeddings_buffer=None)
    out = forward(backend, layer, ids, torch.zeros(8, K), a, b, (0, K), kind="embedding")
    one_hot = torch.nn.functional.one_hot(ids[:7], vocab)
    close(out[:7], delta(one_hot, adapters))
    assert (out[7] == 0).all()
    layer.new_embeddings_buffer = torch.zeros(S, 2, R)
    with pytest.raises(UnsupportedOpError, match=r"lora_core in SGLang.*added tokens \(4, 2, 4\)"):
        forward(backend, layer, ids, torch.zeros(8, K), a, b, (0, K), kind="embedding")


def test_rows_past_the_batch_are_padding(backend):
    a, b, adapters = site()
    prepare(backend)
    x, y = torch.full((9, K), NAN), torch.zeros(9, N)
    x[:7] = torch.randn(7, K)
    forward(backend, None, x, y, a, b, OFFSETS)
    close(y[:7], delta(x[:7], adapters))
    assert (y[7:] == 0).all()


def test_weights_and_scalings_of_the_next_batch_are_seen(backend):
    a, b, adapters = site()
    prepare(backend)
    x = torch.randn(7, K)
    close(forward(backend, None, x, torch.zeros(7, N), a, b, OFFSETS), delta(x, adapters))
    a[3] *= -2
    backend.prepare_lora_batch(
        batch("is_extend", [2, 1, 3, 1]), [3, 2, 1, 0], RANKS, [2 * s for s in SCALINGS], False
    )
    twice = delta(x, adapters) * torch.tensor([-4.0, -4, 2, 2, 2, 2, 2]).unsqueeze(1)
    close(forward(backend, None, x, torch.zeros(7, N), a, b, OFFSETS), twice)


def test_explicit_segments_of_rows(backend):
    a, b, adapters = site()
    backend.prepare_lora_token_segments(
        segment_lens=[1, 2], weight_indices=[1, 3], lora_ranks=RANKS, scalings=SCALINGS
    )
    x = torch.randn(3, K)
    out = forward(backend, None, x, torch.zeros(3, N), a, b, OFFSETS)
    close(out, delta(x, adapters, [1, 3, 3]))


# -- lm_head -------------------------------------------------------------------------------------


def test_lm_head_gets_the_rows_that_were_kept_while_the_batch_of_all_rows_lives_on(backend):
    a, b, adapters = site((13,))
    prepare(backend, kept=[2, 1, 2, 1])
    x = torch.randn(7, K)
    kept = [0, 1, 2, 4, 5, 6]
    assert backend.lm_head_batch_info.expected_tokens == 6
    assert not backend.lm_head_batch_info.use_cuda_graph
    infos = [backend.lm_head_batch_info, *backend.lm_head_pass_batch_infos]
    chosen = [kept, kept[:4], kept[4:]]
    for info, rows in [*zip(infos, chosen, strict=True), (None, list(range(7))), (infos[0], kept)]:
        out = forward(
            backend, None, x[rows], torch.zeros(len(rows), 13), a, b, (0, 13), kind="lm_head", pruned_batch_info=info
        )  # fmt: skip
        close(out, delta(x[rows], adapters, [ROWS[row] for row in rows]))
    h = backend.run_lora_a_sgemm(x[kept[4:]], a, pruned_batch_info=infos[2])
    close(
        backend.run_lora_b_sgemm(h, b, pruned_batch_info=infos[2]),
        delta(x[kept[4:]], adapters, [1, 0]),
    )


def test_without_pruning_lm_head_has_the_rows_of_the_batch(backend):
    prepare(backend, kept=[1, 1, 1, 1])
    assert backend.lm_head_pass_batch_infos is None
    prepare(backend, [1, 1], [0, 1], "is_decode")
    assert backend.lm_head_batch_info is None


# -- metadata ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "draft", "expected"),
    [
        ("is_idle", None, ([0, 0], "prefill")),
        ("is_decode", None, ([1, 1], "decode")),
        ("is_target_verify", 3, ([3, 3], "verify")),
        ("is_extend", None, ([5, 2], "prefill")),
    ],
)
def test_rows_of_each_request(modules, mode, draft, expected):
    assert modules.backend.request_lengths(batch(mode, [5, 2], draft=draft)) == expected


def test_a_forward_mode_without_adapters_is_refused_by_name(modules):
    with pytest.raises(UnsupportedOpError, match=r"prepare_lora_batch.*idle, decode, extend"):
        modules.backend.request_lengths(batch("is_draft_extend_v2", [1]))


def test_sglangs_own_kernels_are_told_the_batch(backend):
    prepare(backend)
    info = backend.batch_info
    assert (info.bs, info.num_segments, info.max_len, info.expected_tokens) == (4, 4, 3, 7)
    assert info.weight_indices.tolist() == [3, 2, 1, 0]
    assert info.seg_lens.tolist() == [2, 1, 3, 1]
    assert info.seg_indptr.tolist() == [0, 2, 3, 6, 7]
    assert info.lora_ranks.tolist() == RANKS
    assert info.scalings.tolist() == SCALINGS
    assert backend.told_experts == [info]


def test_after_reset_there_is_no_batch(backend):
    a, b, _ = site()
    for _ in range(2):
        backend.reset_batch_state()  # also before the first batch
        assert backend.batch_info is None
        with pytest.raises(NoBatchPreparedError, match=r"run_qkv_lora.*lora_active"):
            backend.run_qkv_lora(torch.randn(7, K), a, b, output_offset_cpu=offsets())
        prepare(backend)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"weight_indices": [0]}, BatchMismatchError, "1 weight indices for 4 requests"),
        ({"lora_ranks": [1, 2]}, BatchMismatchError, "2 ranks and 4 scalings for 4 slots"),
    ],
    ids=["indices", "ranks"],
)
def test_a_batch_that_contradicts_itself_leaves_none(backend, change, error, match):
    prepare(backend)
    arguments = {"weight_indices": [3, 2, 1, 0], "lora_ranks": RANKS, "scalings": SCALINGS} | change
    with pytest.raises(error, match=match):
        backend.prepare_lora_token_segments(segment_lens=[2, 1, 3, 1], **arguments)
    assert backend.batch_info is None


def test_a_batch_of_the_base_model_computes_nothing(backend, monkeypatch):
    a, b, _ = site()
    prepare(backend, [2], [2])
    for op in ("shrink", "expand"):
        monkeypatch.setattr(type(backend.rows), op, None)
    x, y = torch.randn(2, K), torch.full((2, N), -0.0)
    assert forward(backend, None, x, y, a, b, OFFSETS) is y
    h = backend.run_lora_a_sgemm(x, a, stack_num=3)
    assert h.shape == (2, 3 * R)
    assert backend.run_lora_b_sgemm(h, b, output_offset_cpu=offsets(), base_output=y) is y
    assert backend.run_lora_a_embedding(torch.tensor([0, 9]), a, 5).shape == (2, 3 * R)
    assert y.signbit().all()


def test_no_rows_at_all(backend):
    a, b, _ = site()
    prepare(backend, [0, 0], [1, 3])
    x = torch.empty(0, K)
    h = backend.run_lora_a_sgemm(x, a, stack_num=3)
    assert backend.run_lora_b_sgemm(h, b, output_offset_cpu=offsets()).shape == (0, N)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda s, x, a, b: s.run_qkv_lora(x, a, (b, b), output_offset_cpu=offsets()),
         UnsupportedOpError, "run_qkv_lora: its limit is one tensor as B, .* for tuple"),
        (lambda s, x, a, b: s.run_qkv_lora(x, a, b, output_offset_cpu=offsets(0, 10, 20)),
         TensorMismatchError, r"n_slices=3, but output offsets \(0, 10, 20\)"),
        (lambda s, x, a, b: s.run_qkv_lora(x, a, b, output_offset_cpu=offsets(0, 10, 16, 23)),
         TensorMismatchError, r"offsets \(0, 10, 16, 23\), but B is \(4, 22, 4\): .* from 0 to 22"),
        (lambda s, x, a, b: forward(s, None, x, x.new_zeros(7, N), a, b, (0, 10, 22)),
         TensorMismatchError, "2 slices: expected 8 rows in A"),
        (lambda s, x, a, b: forward(s, None, x, x.new_zeros(7, N), a, b, OFFSETS, kind="sink_down"),
         UnsupportedOpError, "linear, embedding and lm_head, .* for sink_down"),
        (lambda s, x, a, b: s.run_lora_a_sgemm(x, a[:2], stack_num=3),
         TensorMismatchError, r"A of shape \(2, 12, 24\).*max_loras_per_batch=4"),
        (lambda s, x, a, b: s.run_lora_a_sgemm(x, a, stack_num=12),
         UnsupportedOpError, "1 to 8 slices .* 12 slices"),
        (lambda s, x, a, b: s.run_lora_b_sgemm(x, b, output_offset=offsets()),
         UnsupportedOpError, "one slice without output_offset_cpu, .* 3 slices"),
        (lambda s, x, a, b: s.run_lora_b_sgemm(x, b, output_offset_cpu=offsets()),
         TensorMismatchError, "24 columns from A, but B has 3 slices of rank 4"),
        (lambda s, x, a, b: s.run_lora_a_sgemm(x[:3], a, stack_num=3),
         BatchMismatchError, "3 rows, but the prepared batch has 7"),
        (lambda s, x, a, b: s.run_lora_a_sgemm(x, a, stack_num=3, unknown=1), TypeError, "unknown"),
        (lambda s, x, a, b: s.run_extra_token_embedding(x, x, x, 5), UnsupportedOpError, "added"),
    ],
    ids=["tuple", "slices", "end", "rows", "kind", "slots", "many", "device-offsets", "columns", "short", "keyword", "tokens"],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(backend, call, error, match):
    a, b, _ = site()
    prepare(backend)
    with pytest.raises(error, match=match):
        call(backend, torch.randn(7, K), a, b)


def test_sglangs_experimental_layers_are_refused_by_name(modules, monkeypatch):
    monkeypatch.setattr(EXPERIMENTAL, "get", lambda: True)
    with pytest.raises(UnsupportedOpError, match="SGLANG_EXPERIMENTAL_LORA_OPTI=1"):
        make(modules)


# -- graphs ----------------------------------------------------------------------------------------


def addresses(backend):
    """Of all that a captured kernel of a batch reads."""
    rows, info = backend.rows.batch_info, backend.batch_info
    tensors = [*rows.request_table(), info.weight_indices, info.seg_lens, info.seg_indptr]
    tables = (backend.table.packed, backend.table.ranks, backend.table.scalings)
    tensors += [tensor for table in tables for tensor in table.values()]
    return [tensor.data_ptr() for tensor in tensors]


def test_a_graph_that_was_captured_without_adapters_has_the_same_addresses_with_them(backend):
    a, b, adapters = site()
    backend.init_decode_cuda_graph_batch_info(max_bs_in_cuda_graph=6, num_tokens_per_req=1)
    prepare(backend, [1] * 6, [2] * 6, "is_decode", decode=True)
    captured = addresses(backend)
    assert backend.rows.batch_info.graph == "decode"
    x = torch.randn(6, K)
    backend.reset_routing_cache()
    assert (forward(backend, None, x, torch.zeros(6, N), a, b, OFFSETS) == 0).all()
    prepare(backend, [1] * 3, [1, 2, 3], "is_decode", decode=True)
    assert addresses(backend) == captured
    out = forward(backend, None, x, torch.zeros(6, N), a, b, OFFSETS)
    close(out, delta(x, adapters, [1, 2, 3, 2, 2, 2]))
    info = backend.batch_info
    assert (info.use_cuda_graph, info.bs, info.num_segments, info.max_len) == (True, 3, 3, 1)
    assert info.weight_indices.tolist() == [1, 2, 3, 0, 0, 0]
    assert info.seg_lens.tolist() == [1, 1, 1, 0, 0, 0]  # requests past the batch are empty
    assert info.seg_indptr.tolist() == [0, 1, 2, 3, 3, 3, 3]


def test_a_captured_forward_records_where_its_columns_come_from(backend):
    a, b, _ = site()
    backend.init_decode_cuda_graph_batch_info(2, 1)
    prepare(backend, [1, 1], [1, 3], "is_decode", decode=True)
    forward(backend, None, torch.randn(2, K), torch.zeros(2, N), a, b, OFFSETS)
    (first,) = backend._columns.values()
    backend.reset_routing_cache()
    forward(backend, None, torch.randn(2, K), torch.zeros(2, N), a, b, OFFSETS)
    (second,) = backend._columns.values()
    assert first is not second
    assert torch.equal(first, second)
    assert first.view(2, 3, R)[0, 1].tolist() == [2, 3, 4, 5]  # rank 2: its second slice


def test_verify_graphs_have_several_rows_of_each_request(backend):
    a, b, adapters = site()
    backend.init_decode_cuda_graph_batch_info(3, 2)
    prepare(backend, [2, 2], [0, 1], "is_target_verify", draft=2, decode=True)
    assert backend.rows.batch_info.graph == "verify"
    x = torch.randn(6, K)
    out = forward(backend, None, x, torch.zeros(6, N), a, b, OFFSETS)
    close(out, delta(x, adapters, [0, 0, 1, 1, 2, 2]))
    with pytest.raises(BatchMismatchError, match=r"requests of 2 rows, but this batch has \[3\]"):
        prepare(backend, [3], [0], "is_target_verify", draft=3, decode=True)


def test_prefill_graphs_with_an_eager_head(backend):
    a, b, adapters = site((13,))
    assert backend.supports_prefill_cuda_graph
    backend.init_prefill_cuda_graph_batch_info(max_num_tokens=8, max_num_requests=4)
    assert (backend.prefill_cuda_graph_max_bs, backend.prefill_cuda_graph_max_tokens) == (4, 8)
    prepare(backend, [3, 2], [3, 1], prefill=True, kept=[1, 1])
    assert backend.batch_info is backend.prefill_cuda_graph_batch_info
    assert (backend.batch_info.bs, backend.batch_info.max_len) == (4, 8)  # covers any replay
    x = torch.randn(8, K)
    out = forward(backend, None, x, torch.zeros(8, 13), a, b, (0, 13))
    close(out, delta(x, adapters, [3, 3, 3, 1, 1, 2, 2, 2]))
    head = backend.lm_head_batch_info
    out = forward(
        backend, None, x[[2, 4]], torch.zeros(2, 13), a, b, (0, 13), kind="lm_head", pruned_batch_info=head
    )  # fmt: skip
    close(out, delta(x[[2, 4]], adapters, [3, 1]))
    assert backend.head.batch_info.graph is None


@pytest.mark.parametrize("family", ["decode", "prefill"])
def test_a_graph_batch_without_its_buffers_is_refused(backend, family):
    with pytest.raises(GraphNotInitializedError, match=f"init_{family}_cuda_graph_batch_info"):
        prepare(backend, [1], [0], "is_decode", **{family: True})
    getattr(backend, f"init_{family}_cuda_graph_batch_info")(1, 1)
    with pytest.raises(GraphNotInitializedError, match="exceeds"):
        prepare(backend, [1, 1], [0, 1], "is_decode", **{family: True})
    assert backend.batch_info is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["torch", "triton", "csgmv"])
def test_a_replay_follows_the_batch(modules, monkeypatch, name):
    monkeypatch.setenv("LORA_CORE_SGLANG", name)
    backend = make(modules, "cuda")
    a, b, adapters = site((64, 16, 16), 64)
    a, b = a.cuda(), b.cuda()
    backend.init_decode_cuda_graph_batch_info(6, 1)
    x, y = torch.randn(6, 64, device="cuda"), torch.zeros(6, 96, device="cuda")

    def layer():
        backend.reset_routing_cache()
        forward(backend, None, x, y, a, b, (0, 64, 80, 96))

    prepare(
        backend, [1] * 6, [2] * 6, "is_decode", decode=True
    )  # captured with the base model alone
    for _ in range(2):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for indices in ([1, 2, 3], [0, 0, 2, 3, 1, 1], [2]):
        prepare(backend, [1] * len(indices), indices, "is_decode", decode=True)
        y.zero_()
        graph.replay()
        rows = indices + [2] * (6 - len(indices))
        close(y.cpu(), delta(x.cpu(), adapters, rows))
    backend.reset_batch_state()
    y.zero_()
    graph.replay()
    assert (y == 0).all()  # a stray replay adds nothing


# -- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_experts(modules, monkeypatch, shared, gated):
    monkeypatch.setenv("LORA_CORE_SGLANG_MOE", "torch")
    modules.experts._backend.cache_clear()
    torch.manual_seed(1)
    experts, k, inner, rows = 4, 2, 6, 5
    some, c = 1 if shared else experts, 2 if gated else 1
    info = SimpleNamespace(
        gate_up_lora_a_weights=torch.randn(S, some, c * R, K),
        gate_up_lora_b_weights=torch.randn(S, experts, c * inner, R),
        down_lora_a_weights=torch.randn(S, experts, R, inner),
        down_lora_b_weights=torch.randn(S, some, K, R),
        lora_ranks=torch.tensor(RANKS),
        token_lora_mapping=torch.tensor([3, -1, 1, 0], dtype=torch.int32),  # the fifth row is padding
        max_lora_rank=R,
        has_active_lora=True,
    )  # fmt: skip
    ids = torch.tensor([[0, 3], [1, 2], [2, -1], [3, 1], [0, 1]])
    factors, x, pairs = torch.rand(rows, k), torch.randn(rows, K), torch.randn(rows * k, inner)
    up, down = torch.full((rows, k, c * inner), 5.0), torch.full((rows, k, K), 5.0)
    hooks = modules.experts.build_lora_hooks(x, info, ids)
    hooks.after_gate_up(x, up, factors, ids)
    hooks.after_down(pairs, down, factors, ids)
    for t, slot in enumerate([3, -1, 1, 0, -1]):
        for j in range(k):
            e, added = int(ids[t, j]), (torch.zeros(c * inner), torch.zeros(K))
            if slot >= 0 and e >= 0:
                rank, outer = RANKS[slot], 0 if shared else e
                a = info.gate_up_lora_a_weights[slot, outer].view(c, R, K)[:, :rank]
                b = info.gate_up_lora_b_weights[slot, e].view(c, inner, R)[..., :rank]
                down_a = info.down_lora_a_weights[slot, e, :rank]
                down_b = info.down_lora_b_weights[slot, outer, :, :rank]
                added = (
                    torch.cat([b[i] @ (a[i] @ x[t]) for i in range(c)]),
                    factors[t, j] * (down_b @ (down_a @ pairs[t * k + j])),
                )
            close(up[t, j], 5.0 + added[0])
            close(down[t, j], 5.0 + added[1])


def test_experts_without_adapters_get_no_hooks_unless_a_graph_is_captured(modules, monkeypatch):
    monkeypatch.setenv("LORA_CORE_SGLANG_MOE", "torch")
    info = SimpleNamespace(max_lora_rank=R, has_active_lora=False)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    build = modules.experts.build_lora_hooks
    assert build(torch.zeros(1, K), None, ids) == HooksStandIn()
    assert build(torch.zeros(1, K), info, ids) == HooksStandIn()
    monkeypatch.setattr(CAPTURE, "on", True)
    assert build(torch.zeros(1, K), info, ids).after_down is not None


# -- registration ----------------------------------------------------------------------------------


def test_register_offers_a_name_and_loads_nothing(modules, monkeypatch):
    monkeypatch.delitem(sys.modules, "lora_core.integrations._sglang_backend")
    for _ in range(2):
        sglang.register()
    assert list(BACKENDS) == ["lora_core"]
    assert "lora_core.integrations._sglang_backend" not in sys.modules
    monkeypatch.setitem(sys.modules, "lora_core.integrations._sglang_backend", modules.backend)
    assert BACKENDS["lora_core"]() is modules.backend.LoRACoreBackend
    hook, when = HOOKS["sglang.srt.server_args.ServerArgs.add_cli_args"]
    assert when == "after"
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora-backend", choices=["triton", "csgmv"], default="csgmv")
    for _ in range(2):
        hook(None, parser)
    assert parser.parse_args(["--lora-backend", "lora_core"]).lora_backend == "lora_core"
    assert parser.parse_args([]).lora_backend == "csgmv"
    (action,) = [action for action in parser._actions if action.dest == "lora_backend"]
    assert action.choices == ["triton", "csgmv", "lora_core"]


def test_sglang_finds_register_by_its_entry_point():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["sglang.srt.plugins"]
    assert {name: pkgutil.resolve_name(point) for name, point in points.items()} == {
        "lora_core": sglang.register
    }


@pytest.mark.parametrize("chosen", [False, True])
def test_sglangs_experts_make_way_only_when_told_to(modules, backend, monkeypatch, chosen):
    runners = sys.modules["sglang.srt.lora.lora_moe_runners"]
    monkeypatch.setattr(runners, "build_lora_hooks", "sglang's own")
    monkeypatch.delenv("LORA_CORE_SGLANG_MOE", raising=False)
    if chosen:
        monkeypatch.setenv("LORA_CORE_SGLANG_MOE", "torch")
    assert not backend.is_moe_lora
    assert runners.build_lora_hooks == "sglang's own"
    backend.is_moe_lora = True
    assert backend.is_moe_lora
    assert (runners.build_lora_hooks is modules.experts.build_lora_hooks) == chosen


def test_the_variable_names_the_backend(modules, monkeypatch):
    monkeypatch.setenv("LORA_CORE_SGLANG", "no such")
    with pytest.raises(LookupError, match="no such"):
        make(modules)
    monkeypatch.delenv("LORA_CORE_SGLANG")
    backend = make(modules)
    assert backend.rows is not backend.head
    assert type(backend.rows) is type(backend.head)
