"""Launch: a kernel bound to its constexprs once, called for microseconds afterwards.

`kernel[grid](...)` binds names, hashes options and looks at every argument on each call, for tens of
microseconds. A `Launch` keeps the compiled kernels by the only things that may still change between
two calls, and hands raw addresses to Triton's own launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether kernels defined from now on run in Triton's interpreter (`TRITON_INTERPRET=1`)."""

FIXED_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
"""Options whose default differs between Triton releases, so that results do not."""

Grid = tuple[int, int, int]
Run = Callable[[int, int, int, int, Sequence[Any]], None]
"""(x, y, z, stream, run-time arguments as numbers): launches a compiled kernel."""
_INT32_MAX = 2**31 - 1


def specialisation(value: object) -> object:
    """What Triton compiles into a kernel about one run-time argument.

    Tensors: dtype, and whether the address is divisible by 16. Integers: whether the value is 1,
    divisible by 16, or needs 64 bits. Two values of equal specialisation may share a kernel; two of
    different must not: a kernel compiled for a stride of 4096 loads vectors that a stride of 4097
    does not have. Other values (floats) by type alone.
    """
    if type(value) is int:
        return _class_of(value)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() & 15 == 0
    return type(value)


def _class_of(value: int) -> int:
    """The class of an integer (or an address) that Triton compiles for; small, so cheap to hash."""
    if value == 1:
        return 1
    return (2 if value & 15 == 0 else 3) + (0 if -_INT32_MAX <= value <= _INT32_MAX else 2)


class Launch:
    """One kernel with its constexprs and launch options bound.

    The kernel's run-time parameters must come first, constexprs last. The first call of each
    specialisation (see `specialisation`) goes through Triton and compiles; run one before a graph
    is captured. Later calls cost a few microseconds. Safe to capture: the stream is read per call.

    Args:
        kernel: a `@triton.jit` function.
        bound: every constexpr parameter by name, and launch options (`num_warps`, `num_stages`,
            `launch_pdl`, ...).

    Raises:
        TypeError: a constexpr is missing, or stands before a run-time parameter.
    """

    __slots__ = ("_compiled", "_constexprs", "_options", "kernel")

    def __init__(self, kernel: Any, **bound: Any) -> None:
        parameters = _parameters(kernel)
        constexprs = [name for name, is_constexpr in parameters if is_constexpr]
        runtime = len(parameters) - len(constexprs)
        if any(is_constexpr for _, is_constexpr in parameters[:runtime]):
            raise TypeError(f"{_name(kernel)}: run-time parameters must come before constexpr ones")
        missing = [name for name in constexprs if name not in bound]
        if missing:
            raise TypeError(f"{_name(kernel)}: constexpr parameters {missing} are not bound")
        self.kernel = kernel
        self._constexprs = tuple(bound[name] for name in constexprs)
        options = {name: value for name, value in bound.items() if name not in constexprs}
        self._options = {**FIXED_OPTIONS, **options}
        self._compiled: dict[tuple[object, ...], Run] = {}

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Run on the current stream of the first argument's device.

        Args:
            grid: programs in x, y, z.
            args: the run-time arguments in order; the first is a tensor.
        """
        if INTERPRETED:
            self.kernel[grid](*args, *self._constexprs)
            return
        index = args[0].device.index
        if index != torch.cuda.current_device():  # Triton loads and launches on the current device
            with torch.cuda.device(index):
                self(grid, *args)
            return
        run = self._compiled.get((index, *map(specialisation, args)))
        if run is None:
            self._compile(grid, args)
            return
        raw = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        run(*grid, driver.active.get_current_stream(index), raw)

    def fix(self, args: Sequence[Any], varying: Sequence[int]) -> Fixed:
        """This launch with all arguments fixed but those at the positions `varying`.

        Args:
            args: of one call; fixed tensors are kept, and must keep their addresses.
            varying: positions whose value each call gives; dtypes stay those of `args`.
        """
        return Fixed(self, args, varying)

    def compiled_for(self, args: Sequence[Any]) -> Run:
        """What a call with `args` runs; there must have been one of the same specialisation."""
        return self._compiled[args[0].device.index, *map(specialisation, args)]

    def _compile(self, grid: Grid, args: Sequence[Any]) -> None:
        """Run through Triton, and keep what it compiles for the next call."""
        compiled = self.kernel[grid](*args, *self._constexprs, **self._options)
        launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        constexprs = self._constexprs

        def run(x: int, y: int, z: int, stream: int, raw: Sequence[Any]) -> None:
            launcher(x, y, z, stream, function, metadata, None, None, None, *raw, *constexprs)

        self._compiled[args[0].device.index, *map(specialisation, args)] = run


class Fixed:
    """A launch of which most arguments stay the same: made by `Launch.fix`, for the hottest paths.

    Per call it looks only at what varies: tensors by alignment, integers by their class.
    """

    __slots__ = ("_args", "_index", "_launch", "_raw", "_runs", "_varying")

    def __init__(self, launch: Launch, args: Sequence[Any], varying: Sequence[int]) -> None:
        self._launch, self._varying, self._index = launch, tuple(varying), args[0].device.index
        self._args = [None if at in self._varying else arg for at, arg in enumerate(args)]
        self._raw = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in self._args]
        self._runs: dict[tuple[int, ...], Run] = {}

    def __call__(self, grid: Grid, *varying: Any) -> None:
        """Run on the current stream of the device.

        Args:
            grid: programs in x, y, z.
            varying: the arguments at the varying positions, in order.
        """
        if INTERPRETED or self._index != torch.cuda.current_device():
            self._launch(grid, *self._merged(self._args, varying))
            return
        values = [value if type(value) is int else value.data_ptr() for value in varying]
        key = tuple([_class_of(value) for value in values])
        run = self._runs.get(key)
        if run is None:
            args = self._merged(self._args, varying)
            self._launch(grid, *args)
            self._runs[key] = self._launch.compiled_for(args)
            return
        stream = driver.active.get_current_stream(self._index)
        run(*grid, stream, self._merged(self._raw, values))

    def _merged(self, fixed: list[Any], varying: Sequence[Any]) -> list[Any]:
        merged = fixed.copy()
        for position, value in zip(self._varying, varying, strict=True):
            merged[position] = value
        return merged


def _parameters(kernel: Any) -> list[tuple[str, bool]]:
    """(name, whether it is a constexpr) of every parameter."""
    if isinstance(kernel, triton.runtime.JITFunction):
        return [(parameter.name, parameter.is_constexpr) for parameter in kernel.params]
    annotations = kernel.fn.__annotations__  # of the interpreter's own function class
    return [(name, "constexpr" in str(annotations.get(name, ""))) for name in kernel.arg_names]


def _name(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", None) or kernel.fn.__name__)
