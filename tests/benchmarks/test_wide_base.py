"""A weight with spare rows: same values, same file, same module afterwards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from benchmarks.research.wide_base import WideWeight, why_not

N, K, SLOTS, RANK = 48, 32, 4, 8


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))


def widen(module: nn.Module) -> WideWeight:
    wide = WideWeight(module, num_slots=SLOTS, num_slices=1, max_rank=RANK)
    wide.a.normal_()
    return wide


def test_the_module_computes_the_same_bits(model: nn.Sequential) -> None:
    x = torch.randn(5, K)
    before, parameter = model(x), model[0].weight
    widen(model[0])
    assert model[0].weight is parameter
    assert torch.equal(model(x), before)


def test_one_product_gives_base_and_every_slots_h(model: nn.Sequential) -> None:
    wide = widen(model[0])
    x = torch.randn(5, K)
    y, h = wide.product(x).split([N, SLOTS * RANK], dim=1)
    torch.testing.assert_close(y + model[0].bias, model[0](x))
    torch.testing.assert_close(h.view(5, SLOTS, RANK), torch.einsum("tk,srk->tsr", x, wide.a[:, 0]))


def saved_with_torch(model: nn.Module, _: Path) -> bytes:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


def saved_with_safetensors(model: nn.Module, folder: Path) -> bytes:
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("save", [saved_with_torch, saved_with_safetensors])
def test_a_checkpoint_holds_the_base_weight_alone(
    model: nn.Sequential, tmp_path: Path, save: Callable[[nn.Module, Path], bytes]
) -> None:
    before = save(model, tmp_path)
    wide = widen(model[0])
    marker = bytes(wide.a[1, 0, 0].numpy().tobytes())
    after = save(model, tmp_path)
    assert len(after) == len(before)
    assert marker not in after
    assert wide.extra_bytes > 0


def test_detach_restores_the_weight_bit_for_bit(model: nn.Sequential) -> None:
    original = copy.deepcopy(model)
    wide = widen(model[0])
    wide.detach()
    weight = model[0].weight
    assert torch.equal(weight, original[0].weight)
    assert weight.untyped_storage().nbytes() == N * K * 4
    wide.whole.fill_(float("nan"))
    assert torch.equal(weight, original[0].weight)


def test_the_memory_lives_as_long_as_the_module(model: nn.Sequential) -> None:
    expected = model[0].weight.detach().clone()
    widen(model[0])  # nobody keeps the block but the parameter
    torch.randn(1 << 20)
    assert torch.equal(model[0].weight, expected)


def test_who_cannot(model: nn.Sequential) -> None:
    assert why_not(model[0], model, SLOTS * RANK) is None
    assert "spare rows are more than" in (why_not(model[0], model, 5000) or "")
    assert "not a plain matrix" in (why_not(model[1], model, 8) or "")
    tied = nn.Sequential(nn.Linear(K, N), nn.Linear(K, N))
    tied[1].weight = tied[0].weight
    assert why_not(tied[0], tied, 8) == "its weight is tied: 0, 1"
    sliced = nn.Linear(K, N)
    sliced.weight = nn.Parameter(torch.randn(2 * N, K)[:N])
    assert "shares its memory" in (why_not(sliced, sliced, 8) or "")
