"""The files that `new-backend` writes, as `string.Template`s; `generate.py` says which and when.

Names: `$name` what `load_backend` is given, `$package` the Python package, `$distribution` what pip
knows, `$Class` the stem of class names.
"""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$distribution"
version = "0.1.0"
description = "The $name backend for lora-core"
readme = "README.md"
requires-python = ">=3.11"
dependencies = [$dependencies]

[project.optional-dependencies]
testing = ["lora-core[testing]"]

# How lora_core finds the plugin: the module with the hooks.
[project.entry-points."lora_core.backends"]
$name = "$package.plugin"

[tool.setuptools.packages.find]
include = ["$package", "$package.*"]

[tool.setuptools.package-data]
$package = ["py.typed"]

[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["-ra"]  # says why a check was not run here
"""

README = """\
# $distribution

The backend `$name` for lora-core.

```
pip install --editable '.[testing]'
pytest
lora-core doctor
```

`pytest` runs the conformance suite: it passes now, because what is not written yet is done by
lora_core's reference in plain torch. The code to replace is in $functions.

$first_steps
"""

FIRST_STEPS = """\
1. Replace the kernel. Run `pytest -x`; a failure names the clause of the contract, where the numbers
   first differ, and the call that runs that one case alone.
2. Override the next op. Leave the reference when nothing of it is used any more: then the base class
   is `LoRABackend`, or `MoELoRABackend`.
3. Claim more in `capabilities`: dtypes, devices, ops, graphs. Each claim brings its own checks.
4. Where there is a GPU: `pytest --lora-level standard --lora-require-device cuda`.
"""

WITHOUT_GPU = """
Without a GPU the tests run the kernels in Triton's interpreter, which `tests/conftest.py` chooses.
Outside of pytest choose it yourself: `TRITON_INTERPRET=1 lora-core check $name`, and the same before
Python when a failing case is to be run alone.
"""

PLUGIN = '''\
"""The entry point of this distribution. Imports neither torch nor triton."""

from __future__ import annotations

from lora_core import BackendSpec, hookimpl
$hooks'''

HOOK = '''

@hookimpl
def $hook() -> list[BackendSpec]:
    """What this distribution brings."""
    return [
        BackendSpec(
            name="$name",
            summary="$summary",
            target="$package.$module:$Class$suffix",
            priority=0,  # raise it when it is faster than what is installed besides
        )
    ]
'''

PACKAGE = '"""The backend `$name` for lora_core."""\n'

# -- dense ------------------------------------------------------------------------------------------

BACKEND = '''\
"""$Class$suffix: lora_core's reference with a shrink of its own."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lora_core import BaseModule, Capabilities, LoRABackend, LoRAWeights, Op, token_slots
from lora_core.torch_backend import TorchBackend
$backend_imports

class $Class$suffix(TorchBackend):
    """What is not overridden here, the reference in plain torch does."""

    name = "$name"
    contract = "1.0"
    # Every claim is tested over its whole range; what is not claimed has to refuse.
    capabilities = Capabilities(
        ops=frozenset({$ops}),
        dtypes=$dtypes,
        device_types=frozenset($device_types),
    )

    @override
    def shrink(self, x: Tensor, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("shrink", x, weights)  # a batch, fitting tensors, our claims
        self._require_rows("shrink", x.shape[0], info.num_tokens)
        return kernels.shrink(x, weights, token_slots(info, x.shape[0]))

    @override
    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        # base(x), then expand(shrink(x)), and base(x) alone where no request has an adapter.
        # Fuse or overlap here later.
        return LoRABackend.linear(self, x, base, weights)
'''

KERNELS_TORCH = '''\
"""The function to replace."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_core import LoRAWeights


def shrink(x: Tensor, weights: LoRAWeights, slots: Tensor) -> Tensor:
    """`h[t, s] = A[slots[t], s] @ x[t]`: replace it with your kernel.

    What the contract asks of it:
    - x is read only, and may be a strided view: only its last dimension is contiguous;
    - slots are read on the device: a kernel never makes the host wait;
    - rows of slot -1 (base model, padding) and entries past a slot's own rank may hold anything,
      because expand does not read them; the weights there may be NaN;
    - the sum of a row is the same, bit for bit, whatever the values in its neighbours' rows.

    Args:
        x: `[T, K]`, rows of all requests, then padding.
        weights: `a` is `[S, n_slices, R, K]`; `ranks` int32 `[S, n_slices]`, on the device.
        slots: int32 `[T]`, the adapter of each row, -1 for none.

    Returns:
        float32 `[T, n_slices, R]`.
    """
    rows, n_slices, max_rank = x.shape[0], weights.layout.num_slices, weights.max_rank
    x32 = x.float()
    h = torch.zeros(rows, n_slices * max_rank, device=x.device)
    for slot in range(weights.num_slots):
        a = weights.a[slot].float().reshape(n_slices * max_rank, -1)  # [n_slices * R, K]
        h = torch.where((slots == slot).unsqueeze(1), x32 @ a.T, h)
    return h.view(rows, n_slices, max_rank)
'''

KERNELS_TRITON = '''\
"""The kernel to replace."""

# Triton reads the parameters of kernels itself:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_core import LoRAWeights


@triton.jit
def _shrink(
    x_ptr,  # [T, K] - rows of all requests, then padding
    a_ptr,  # [S, n_slices, R, K] - the adapters
    slots_ptr,  # [T] int32 - the adapter of each row, -1 for none
    h_ptr,  # [T, n_slices * R] float32 - the result
    K,
    max_rank,
    x_row,  # elements between two rows of x
    a_slot,  # elements between two slots of a, two slices, two ranks
    a_slice,
    a_rank,
    n_slices,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one row, one slice, BLOCK_R ranks. Correct and slow; this is yours to replace."""
    row = tl.program_id(0).to(tl.int64)  # 64 bit: row * x_row can pass 2^31
    piece = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:  # rows without an adapter read nothing and write nothing
        r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        k = tl.arange(0, BLOCK_K)
        a_rows = a_ptr + slot * a_slot + piece * a_slice + r[:, None] * a_rank
        acc = tl.zeros([BLOCK_R], dtype=tl.float32)
        for k0 in range(0, K, BLOCK_K):
            k_live = k0 + k < K
            b_x = tl.load(x_ptr + row * x_row + k0 + k, mask=k_live, other=0.0)
            b_a = tl.load(
                a_rows + (k0 + k)[None, :],
                mask=(r[:, None] < max_rank) & k_live[None, :],
                other=0.0,
            )
            # sums in float32, whatever the dtype of x and a
            acc += tl.sum(b_a.to(tl.float32) * b_x.to(tl.float32)[None, :], axis=1)
        tl.store(h_ptr + (row * n_slices + piece) * max_rank + r, acc, mask=r < max_rank)


def shrink(x: Tensor, weights: LoRAWeights, slots: Tensor) -> Tensor:
    """`h[t, s] = A[slots[t], s] @ x[t]`.

    What the contract asks of it:
    - x is read only, and may be a strided view: only its last dimension is contiguous;
    - slots are read on the device: a kernel never makes the host wait;
    - rows of slot -1 (base model, padding) and entries past a slot's own rank may hold anything,
      because expand does not read them; the weights there may be NaN;
    - the sum of a row is the same, bit for bit, whatever the values in its neighbours' rows.

    Args:
        x: `[T, K]`.
        weights: of the site; `ranks` int32 `[S, n_slices]`, on the device.
        slots: int32 `[T]`.

    Returns:
        float32 `[T, n_slices, R]`.
    """
    a = weights.a
    if a.stride(-1) != 1:  # this kernel reads along K
        a = a.contiguous()
    rows, n_slices, max_rank = x.shape[0], weights.layout.num_slices, weights.max_rank
    h = torch.empty(rows, n_slices, max_rank, dtype=torch.float32, device=x.device)
    block_r = min(64, triton.next_power_of_2(max_rank))
    grid = (rows, n_slices, triton.cdiv(max_rank, block_r))
    if rows:
        _shrink[grid](
            x, a, slots, h,
            x.shape[1], max_rank, x.stride(0), a.stride(0), a.stride(1), a.stride(2), n_slices,
            BLOCK_R=block_r, BLOCK_K=128,
        )  # fmt: skip
    return h
'''

# -- experts ----------------------------------------------------------------------------------------

MOE = '''\
"""$Class$suffix: lora_core's reference for experts with a product of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lora_core import MoECapabilities, MoELoRAWeights
from lora_core.torch_moe_backend import TorchMoEBackend, TorchRoute
$backend_imports

class $Class$suffix(TorchMoEBackend):
    """`route` and `down` are the reference's: it says per (row, expert) pair which weights are used."""

    name = "$name"
    contract = "1.0"
    # Every claim is tested over its whole range; what is not claimed has to refuse.
    capabilities = MoECapabilities(
        dtypes=$dtypes,
        device_types=frozenset($device_types),
    )

    @override
    def gate_up(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: TorchRoute,
        out: Tensor,
        *,
        accumulate: bool = True,
    ) -> Tensor:
        self._require_fit("gate_up", x, weights, route.routing, out)
        if route.routing.inert:  # known on the host: nothing to launch
            return out if accumulate else out.zero_()
        delta = kernels.gate_up_delta(x, weights, route.slots, route.experts)
        # A pair without expert or adapter, or a slice of rank 0, keeps its bits: -0.0 + 0.0 is 0.0.
        has_slice = weights.ranks[route.slots] > 0  # [T, k, n_slices]
        widths = torch.tensor(weights.layout.widths).to(out.device)
        touched = (route.live.unsqueeze(-1) & has_slice).repeat_interleave(
            widths, dim=-1, output_size=out.shape[-1]
        )
        total = out.float() + delta if accumulate else delta
        untouched = out if accumulate else torch.zeros((), dtype=out.dtype, device=out.device)
        return out.copy_(torch.where(touched, total.to(out.dtype), untouched))
'''

MOE_KERNELS_TORCH = '''\
"""The function to replace."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_core import MoELoRAWeights


def gate_up_delta(x: Tensor, weights: MoELoRAWeights, slots: Tensor, experts: Tensor) -> Tensor:
    """`delta[t, j] = scaling * B[slot, expert] @ A[slot, expert] @ x[t]`: replace it with your kernel.

    What the contract asks of it:
    - x is read only; slots, experts and ranks are read on the device: the host never waits;
    - what lies past a slot's rank may be NaN and must not reach the result;
    - the result of a pair is the same, bit for bit, whatever the values in its neighbours' rows.

    Args:
        x: `[T, H]`.
        weights: `a` is `[S, E or 1, n_slices, R, H]`, `b` is `[S, E or 1, N, R]`.
        slots: int64 `[T, k]`, adapter of each pair; 0 where the pair has none.
        experts: int64 `[T, k]`, expert of each pair; 0 where it has none.

    Returns:
        float32 `[T, k, N]`.
    """
    layout, pairs = weights.layout, slots.numel()
    slot, expert = slots.flatten(), experts.flatten()
    a = weights.a[slot, 0 if weights.shared_a else expert].float()  # [pairs, n_slices, R, H]
    b = weights.b[slot, 0 if weights.shared_b else expert].float()  # [pairs, N, R]
    rows = x.float().repeat_interleave(slots.shape[1], dim=0).unsqueeze(-1)  # [pairs, H, 1]
    h = torch.bmm(a.flatten(1, 2), rows).view(pairs, layout.num_slices, -1)  # [pairs, n_slices, R]
    past = torch.arange(weights.max_rank, device=x.device) >= weights.ranks[slot].unsqueeze(-1)
    h = (h * weights.scalings[slot].unsqueeze(-1)).masked_fill(past, 0)
    delta = torch.empty(pairs, layout.out_features, device=x.device)
    for s in range(layout.num_slices):
        span = slice(layout.offsets[s], layout.offsets[s + 1])
        live_b = b[:, span].masked_fill(past[:, s].unsqueeze(1), 0)
        delta[:, span] = torch.bmm(live_b, h[:, s].unsqueeze(-1)).squeeze(-1)
    return delta.view(*slots.shape, layout.out_features)
'''

MOE_KERNELS_TRITON = '''\
"""The kernel to replace."""

# Triton reads the parameters of kernels itself:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_core import MoELoRAWeights


@triton.jit
def _delta(
    x_ptr,  # [T, H]
    a_ptr,  # [S, E or 1, n_slices, R, H]
    b_ptr,  # [S, E or 1, N, R]
    ranks_ptr,  # [S, n_slices] int32
    scalings_ptr,  # [S, n_slices] float32
    slots_ptr,  # [T * k] int64 - adapter of each pair, 0 where it has none
    experts_ptr,  # [T * k] int64 - expert of each pair, 0 where it has none
    delta_ptr,  # [T * k, N] float32 - the result
    H,
    N,
    top_k,
    piece,  # which slice
    first,  # its first column of the output, and the one after its last
    end,
    n_slices,
    x_row,  # elements between two rows of x
    a_slot,  # elements between two slots, experts (0: shared), slices and ranks of a
    a_expert,
    a_slice,
    a_rank,
    b_slot,  # the same of b, and between two of its rows
    b_expert,
    b_row,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one pair, BLOCK_N columns of one slice. Slow; this is yours to replace."""
    pair = tl.program_id(0).to(tl.int64)
    n = first + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, expert = tl.load(slots_ptr + pair), tl.load(experts_ptr + pair)
    rank = tl.load(ranks_ptr + slot * n_slices + piece)
    r = tl.arange(0, BLOCK_R)
    r_live = r < rank  # what lies past the slot's rank may be NaN
    x_pair = x_ptr + pair // top_k * x_row
    a_pair = a_ptr + slot * a_slot + expert * a_expert + piece * a_slice
    h = tl.zeros([BLOCK_R], dtype=tl.float32)
    for k0 in range(0, H, BLOCK_H):
        k = k0 + tl.arange(0, BLOCK_H)
        b_x = tl.load(x_pair + k, mask=k < H, other=0.0).to(tl.float32)
        b_a = tl.load(
            a_pair + r[:, None] * a_rank + k[None, :],
            mask=r_live[:, None] & (k < H)[None, :],
            other=0.0,
        )
        h += tl.sum(b_a.to(tl.float32) * b_x[None, :], axis=1)
    h = tl.where(r_live, h, 0.0)  # 0 times an infinite x is NaN
    b_b = tl.load(
        b_ptr + slot * b_slot + expert * b_expert + n.to(tl.int64)[:, None] * b_row + r[None, :],
        mask=(n < end)[:, None] & r_live[None, :],
        other=0.0,
    )
    scaling = tl.load(scalings_ptr + slot * n_slices + piece)
    delta = tl.sum(b_b.to(tl.float32) * (h * scaling)[None, :], axis=1)
    tl.store(delta_ptr + pair * N + n, delta, mask=n < end)


def gate_up_delta(x: Tensor, weights: MoELoRAWeights, slots: Tensor, experts: Tensor) -> Tensor:
    """`delta[t, j] = scaling * B[slot, expert] @ A[slot, expert] @ x[t]`.

    What the contract asks of it:
    - x is read only; slots, experts and ranks are read on the device: the host never waits;
    - what lies past a slot's rank may be NaN and must not reach the result;
    - the result of a pair is the same, bit for bit, whatever the values in its neighbours' rows.

    Args:
        x: `[T, H]`.
        weights: of gate_up.
        slots: int64 `[T, k]`, 0 for pairs without an adapter.
        experts: int64 `[T, k]`, 0 for pairs without an expert.

    Returns:
        float32 `[T, k, N]`.
    """
    layout, a, b = weights.layout, weights.a, weights.b
    delta = torch.empty(*slots.shape, layout.out_features, dtype=torch.float32, device=x.device)
    block_r = triton.next_power_of_2(weights.max_rank)
    block_n = 64
    for s, width in enumerate(layout.widths):
        _delta[(slots.numel(), triton.cdiv(width, block_n))](
            x, a, b, weights.ranks, weights.scalings,
            slots.contiguous(), experts.contiguous(), delta,
            x.shape[1], layout.out_features, slots.shape[1],
            s, layout.offsets[s], layout.offsets[s + 1], layout.num_slices, x.stride(0),
            a.stride(0), 0 if weights.shared_a else a.stride(1), a.stride(2), a.stride(3),
            b.stride(0), 0 if weights.shared_b else b.stride(1), b.stride(2),
            BLOCK_R=block_r, BLOCK_H=64, BLOCK_N=block_n,
        )  # fmt: skip
    return delta
'''

# -- tests and CI -----------------------------------------------------------------------------------

CONFORMANCE = """\
from lora_core.testing import $suites
$classes"""

CONFORMANCE_CLASS = """

class Test$Class$family($suite):
    backend = "$name"
"""

CONFTEST_TRITON = '''\
"""Without a GPU the kernels run in Triton's interpreter; it must be chosen before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
'''

WORKFLOW = """\
name: ci
on: [push, pull_request]

jobs:
  conformance:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
          cache: pip
      - run: pip install '.[testing]'
      - run: lora-core doctor
      - run: pytest
  # With a runner that has a GPU, missing hardware is a failure and nothing is skipped in silence:
  # gpu:
  #   runs-on: [self-hosted, gpu]
  #   steps:
  #     - uses: actions/checkout@v4
  #     - run: pip install '.[testing]'
  #     - run: pytest --lora-level standard --lora-require-device cuda
"""

GITIGNORE = """\
__pycache__/
*.egg-info/
build/
dist/
"""
