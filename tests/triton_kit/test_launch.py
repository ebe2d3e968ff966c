"""Launch: binding, specialisation, and what reaches Triton's launcher.

Without a GPU the compiled kernel is a recorder: these tests pin which calls may share a kernel and
exactly what the launcher is handed. Values are checked in test_interpreter.py and on GPUs.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from lora_core.triton_kit import launch as launch_module
from lora_core.triton_kit.launch import Launch, specialisation


@triton.jit
def _kernel(x, n, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    pass


@triton.jit
def _wrong_order(x, BLOCK: tl.constexpr, n):
    pass


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (16, 32, True),
        (16, 0, True),
        (1, 5, False),
        (1, 16, False),
        (16, 17, False),
        (5, 7, True),
        (2**40, 16, False),
        (2**40, 2**41, True),
        (2**40 + 1, 5, False),
        (2.0, 3.0, True),
        (1.0, 1, False),
    ],
)
def test_integers_share_a_kernel_exactly_where_triton_compiles_the_same(
    first: float, second: float, shared: bool
) -> None:
    assert (specialisation(first) == specialisation(second)) is shared


def test_tensors_are_told_apart_by_dtype_and_alignment() -> None:
    storage = torch.zeros(64, dtype=torch.float32)
    aligned, off = storage[4:], storage[1:]
    assert specialisation(storage) == specialisation(aligned)
    assert specialisation(storage) != specialisation(off)
    assert specialisation(storage) != specialisation(storage.view(torch.int32))


def test_constexprs_must_all_be_bound_and_come_last() -> None:
    with pytest.raises(TypeError, match=r"_kernel: constexpr parameters \['FLAG'\] are not bound"):
        Launch(_kernel, BLOCK=16)
    with pytest.raises(TypeError, match="_wrong_order: run-time parameters must come before"):
        Launch(_wrong_order, BLOCK=16)


class _Recorder:
    """Stands for a jitted kernel: counts compilations, keeps what its launcher is called with."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: Any, **options: Any) -> Any:
            self.compiled.append((grid, args, options))
            return SimpleNamespace(
                run=lambda *call: self.launched.append(call), function=77, packed_metadata=(4, 1, 0)
            )

        return first


class _OnDevice(torch.Tensor):
    """A CPU tensor that claims to be on a CUDA device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_the_second_call_goes_straight_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "INTERPRETED", False)
    active = SimpleNamespace(get_current_stream=lambda index: 1000 + index)
    monkeypatch.setattr(launch_module, "_current_device", lambda: 0)
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))
    bound, kernel = Launch(_kernel, BLOCK=16, FLAG=True, num_warps=2), _Recorder()
    bound.kernel = kernel
    x = torch.zeros(64).as_subclass(_OnDevice)
    bound((3, 2, 1), x, 32)
    assert kernel.compiled == [
        ((3, 2, 1), (x, 32, 16, True), {"enable_fp_fusion": True, "num_warps": 2})
    ]
    assert kernel.launched == []
    bound((5, 1, 1), x, 48)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [
        (5, 1, 1, 1000, 77, (4, 1, 0), None, None, None, x.data_ptr(), 48, 16, True)
    ]
    bound((5, 1, 1), x, 1)  # specialised: another kernel, in whichever order the two are met
    bound((5, 1, 1), x[1:], 48)
    assert [call[1][1] for call in kernel.compiled] == [32, 1, 48]


def test_fixed_arguments_are_merged_and_only_varying_ones_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_module, "INTERPRETED", False)
    active = SimpleNamespace(get_current_stream=lambda index: 1000 + index)
    monkeypatch.setattr(launch_module, "_current_device", lambda: 0)
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))
    launch, kernel = Launch(_kernel, BLOCK=16, FLAG=True), _Recorder()
    launch.kernel = kernel
    x, y = (torch.zeros(64).as_subclass(_OnDevice) for _ in range(2))
    fixed = launch.fix((x, 32), varying=(0,))
    fixed((1, 1, 1), x)
    assert [call[1][:2] for call in kernel.compiled] == [(x, 32)]
    fixed((2, 1, 1), y)
    assert len(kernel.compiled) == 1
    assert kernel.launched[-1][:4] + kernel.launched[-1][9:] == (
        2,
        1,
        1,
        1000,
        y.data_ptr(),
        32,
        16,
        True,
    )
    fixed((2, 1, 1), y[1:])  # unaligned: another kernel
    assert len(kernel.compiled) == 2


def test_fixed_integers_are_told_apart_as_triton_specialises_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the order of calls: what runs was compiled for the class of every value."""
    monkeypatch.setattr(launch_module, "INTERPRETED", False)
    monkeypatch.setattr(launch_module, "_current_device", lambda: 0)
    active = SimpleNamespace(get_current_stream=lambda index: 0)
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))
    launch = Launch(_kernel, BLOCK=16, FLAG=True)
    x = torch.zeros(64).as_subclass(_OnDevice)
    for values in ((16, 32, 0), (1, 16, 1), (5, 16, 7), (2**40, 16, 2**41), (-16, 16, 32)):
        launch.kernel = kernel = _Recorder()
        launch._compiled.clear()
        fixed = launch.fix((x, 7), varying=(0, 1))
        classes = []
        for value in values:
            fixed((1, 1, 1), x, value)
            if (this := specialisation(value)) not in classes:
                classes.append(this)
        assert len(kernel.compiled) == len(classes), values
        assert len(kernel.launched) == len(values) - len(classes)


def test_a_call_on_another_device_goes_through_the_launch_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_module, "INTERPRETED", False)
    monkeypatch.setattr(launch_module, "_current_device", lambda: 0)
    active = SimpleNamespace(get_current_stream=lambda index: 0)
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))
    launch = Launch(_kernel, BLOCK=16, FLAG=True)
    launch.kernel = _Recorder()
    x = torch.zeros(64).as_subclass(_OnDevice)
    fixed, entered = launch.fix((x, 32), varying=(0,)), []
    fixed((1, 1, 1), x)
    current = [1, 1]  # device 1 while the call begins, then what torch.cuda.device makes of it
    monkeypatch.setattr(launch_module, "_current_device", lambda: current.pop() if current else 0)
    moved = launch.fix((x, 32), varying=(0,))

    def enter(index: int) -> Any:
        entered.append(index)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    moved((1, 1, 1), x)
    assert entered == [0]
    assert len(launch.kernel.launched) == 1


def _spread(self: Any, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
    self.launch(x, y, z, stream, function, False, None, *args)


def _packed(self: Any, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
    self.launch(x, y, z, stream, function, *args[:4], b"signature", args[4:])


def _reordered(self: Any, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
    self.launch(x, y, z, stream, function, *reversed(args))


@pytest.mark.parametrize(
    ("wrapper", "scratch", "direct"),
    [(_spread, 0, True), (_packed, 0, True), (_reordered, 0, False), (_spread, 64, False)],
    ids=["one-each", "packed", "not-understood", "needs-scratch"],
)
def test_the_wrapper_is_left_out_only_where_it_just_passes_on(
    wrapper: Any, scratch: int, direct: bool
) -> None:
    calls: list[tuple[Any, ...]] = []
    sizes = {"global_scratch_size": scratch, "profile_scratch_size": 0}
    launcher = type("Launcher", (), {"__call__": wrapper, **sizes})()
    launcher.launch = lambda *call: calls.append(call)
    compiled = SimpleNamespace(run=launcher, function=77, packed_metadata=(4, 1, 0))
    entry = launch_module._entry(compiled, 3)
    assert calls == []
    entry.run((5, 6, 7), 1000, [8, 9, "flag"])
    launcher(5, 6, 7, 1000, 77, (4, 1, 0), None, None, None, 8, 9, "flag")
    ours, tritons = ([list(p) if isinstance(p, tuple) else p for p in call] for call in calls)
    assert ours == tritons
    assert (entry.launch is launcher.launch) is direct


def test_the_wrapper_of_the_installed_triton_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, this Triton launches in another way: launches are right, but slower."""
    from triton.backends.nvidia.driver import CudaLauncher

    launcher, calls = object.__new__(CudaLauncher), []
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl, launcher.num_ctas = False, True, 1
    launcher.gsan_enabled = False
    launcher.arg_annotations, launcher.kernel_signature = (1, 2, 3), b"iii"
    launcher.launch = lambda *call: calls.append(call)
    compiled = SimpleNamespace(run=launcher, function=77, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(driver, "_active", SimpleNamespace())
    entry = launch_module._entry(compiled, 3)
    assert entry.launch is launcher.launch
    entry.run((5, 6, 7), 1000, [8, 9, "flag"])
    launcher(5, 6, 7, 1000, 77, (4, 1, 0), None, None, None, 8, 9, "flag")
    ours, tritons = ([list(p) if isinstance(p, tuple) else p for p in call] for call in calls)
    assert ours == tritons
