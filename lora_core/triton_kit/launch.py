"""Launch: a kernel bound to its constexprs once, called for microseconds afterwards.

`kernel[grid](...)` binds names, hashes options and looks at every argument on each call, for tens of
microseconds. A `Launch` keeps the compiled kernels by the only things that may still change between
two calls, and hands raw addresses to Triton's own launcher.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

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
_INT32_MAX = 2**31 - 1
_EVEN = 2
"""The class of integers below 2^31, and of addresses, that are divisible by 16."""

# Without its look whether CUDA has begun: whoever holds a tensor on a device has begun it.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # noqa: SLF001


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
    return (_EVEN if value & 15 == 0 else 3) + (0 if -_INT32_MAX <= value <= _INT32_MAX else 2)


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

    __slots__ = ("_compiled", "_constexprs", "_options", "kernel", "unspecialised")

    def __init__(self, kernel: Any, **bound: Any) -> None:
        parameters = _parameters(kernel)
        constexprs = [name for name, is_constexpr in parameters if is_constexpr]
        runtime = len(parameters) - len(constexprs)
        self.unspecialised = _unspecialised(kernel)
        if any(is_constexpr for _, is_constexpr in parameters[:runtime]):
            raise TypeError(f"{_name(kernel)}: run-time parameters must come before constexpr ones")
        missing = [name for name in constexprs if name not in bound]
        if missing:
            raise TypeError(f"{_name(kernel)}: constexpr parameters {missing} are not bound")
        self.kernel = kernel
        self._constexprs = tuple(bound[name] for name in constexprs)
        options = {name: value for name, value in bound.items() if name not in constexprs}
        self._options = {**FIXED_OPTIONS, **options}
        self._compiled: dict[tuple[object, ...], Entry] = {}

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
        if index != _current_device():  # Triton loads and launches on the current device
            with torch.cuda.device(index):
                self(grid, *args)
            return
        entry = self._compiled.get((index, *map(specialisation, args)))
        if entry is None:
            self._compile(grid, args)
            return
        values = [*map(_raw, args), *self._constexprs]
        entry.run(grid, driver.active.get_current_stream(index), values)

    def fix(self, args: Sequence[Any], varying: Sequence[int]) -> Fixed:
        """This launch with all arguments fixed but those at the positions `varying`.

        Args:
            args: of one call; fixed tensors are kept, and must keep their addresses.
            varying: positions whose value each call gives; dtypes stay those of `args`.
        """
        return Fixed(self, args, varying)

    def compiled_for(self, args: Sequence[Any]) -> Entry:
        """What a call with `args` runs; there must have been one of the same specialisation."""
        return self._compiled[args[0].device.index, *map(specialisation, args)]

    def _compile(self, grid: Grid, args: Sequence[Any]) -> None:
        """Run through Triton, and keep what it compiles for the next call."""
        compiled = self.kernel[grid](*args, *self._constexprs, **self._options)
        entry = _entry(compiled, len(args) + len(self._constexprs))
        self._compiled[args[0].device.index, *map(specialisation, args)] = entry


def _entry(compiled: Any, count: int) -> Entry:
    """Triton's own C function where its Python wrapper only passes on what it is given.

    The wrapper differs between Triton releases, so a copy of it is asked what it hands to the C
    function. Where that is not understood, or it has more to do (scratch memory, hooks), it is called.

    Args:
        compiled: what `kernel[grid](...)` returns.
        count: values of all parameters, constexprs among them.
    """
    launcher = compiled.run
    head = (compiled.function, compiled.packed_metadata, None, None, None)
    idle = {"global_scratch_size": 0, "profile_scratch_size": 0}
    if all(getattr(launcher, name, None) == size for name, size in idle.items()):
        handed: list[object] = []
        probe = copy.copy(launcher)
        probe.launch = lambda *call: handed.extend(call)
        values = [object() for _ in range(count)]
        probe(1, 2, 3, 4, *head, *values)
        if handed[:4] == [1, 2, 3, 4] and handed[-count:] == values:
            return Entry(launcher.launch, tuple(handed[4:-count]), packed=False)
        if handed[:4] == [1, 2, 3, 4] and handed[-1:] == [tuple(values)]:
            return Entry(launcher.launch, tuple(handed[4:-1]), packed=True)
    return Entry(launcher, head, packed=False)


class Entry(NamedTuple):
    """How a compiled kernel is launched, by numbers alone.

    Attributes:
        launch: called with the grid, the stream, `head`, and the values of all parameters.
        head: what lies between stream and values.
        packed: whether the values are one argument, or one each.
    """

    launch: Callable[..., object]
    head: tuple[object, ...]
    packed: bool

    def run(self, grid: Grid, stream: int, values: list[Any]) -> None:
        """Launch with the values of all parameters, constexprs among them."""
        if self.packed:
            self.launch(*grid, stream, *self.head, values)
        else:
            self.launch(*grid, stream, *self.head, *values)


class Fixed:
    """A launch of which most arguments stay the same: made by `Launch.fix`, for the hottest paths.

    Per call it looks only at what varies: tensors by alignment, integers by their class. What a call
    does is written out once for these positions (`_WRITTEN_OUT`): a loop over them would take longer
    than all else.

    Attributes:
        call: the instance as a function, called with the grid (programs in x, y, z) and the
            arguments at the varying positions, in order. Runs on the current stream of the device.
    """

    __slots__ = ("_args", "_entries", "_integers", "_launch", "_varying", "call", "even")

    call: Callable[..., None]

    def __init__(self, launch: Launch, args: Sequence[Any], varying: Sequence[int]) -> None:
        self._launch, self._varying = launch, tuple(varying)
        self._integers = frozenset(at for at in self._varying if type(args[at]) is int)
        self._args = [None if at in self._varying else arg for at, arg in enumerate(args)]
        self._entries: dict[tuple[int, ...], Entry] = {}
        self.even: Entry | None = None
        """What runs where all that varies is divisible by 16, as it mostly is."""
        if INTERPRETED:
            self.call = self.first
            return
        values = [*map(_raw, self._args), *launch._constexprs]  # noqa: SLF001 - one unit with Launch
        self.call = _written_out(self._varying, self._integers, launch.unspecialised)(
            self, values, args[0].device.index, _current_device, driver.active.get_current_stream
        )

    def __call__(self, grid: Grid, *varying: Any) -> None:
        """Run `call`."""
        self.call(grid, *varying)

    def entry_for(self, values: list[Any]) -> Entry | None:
        """What runs with these values, if it ran before."""
        return self._entries.get(self._classes(values))

    def first(self, grid: Grid, *varying: Any) -> None:
        """Run through the launch itself, and keep what it ran."""
        args = self._args.copy()
        for at, value in zip(self._varying, varying, strict=True):
            args[at] = value
        self._launch(grid, *args)
        if INTERPRETED:
            return
        entry, classes = self._launch.compiled_for(args), self._classes([*map(_raw, args)])
        self._entries[classes] = entry
        if set(classes) == {_EVEN}:
            self.even = entry

    def _classes(self, values: list[Any]) -> tuple[int, ...]:
        """The class of everything that varies: of an address, whether it is divisible by 16."""
        unspecialised = self._launch.unspecialised
        return tuple(
            [
                _class_of(values[at] & ~15 if at in unspecialised else values[at])
                if at in self._integers
                else _class_of(values[at] & 15)
                for at in self._varying
            ]
        )


_WRITTEN_OUT = """
def bind(fixed, values, index, current_device, stream_of):
    def call(grid, {arguments}):
        if index != current_device():
            return fixed.first(grid, {arguments})
        {addresses}
        raw = values.copy()
        {assignments}
        if ({specialised}) & 15 == 0 and 0 <= ({integers}) <= INT32_MAX:
            entry = fixed.even
        else:
            entry = fixed.entry_for(raw)
        if entry is None:
            fixed.first(grid, {arguments})
        elif entry.packed:
            entry.launch(*grid, stream_of(index), *entry.head, raw)
        else:
            entry.launch(*grid, stream_of(index), *entry.head, *raw)

    return call
"""


@cache
def _written_out(
    varying: tuple[int, ...], integers: frozenset[int], unspecialised: frozenset[int]
) -> Callable[..., Any]:
    """`_WRITTEN_OUT` for these positions: `v0` is an argument, `p0` the address of a tensor."""
    names = {at: f"{'v' if at in integers else 'p'}{at}" for at in varying}
    tensors = [at for at in varying if at not in integers]
    source = _WRITTEN_OUT.format(
        arguments=", ".join(f"v{at}" for at in varying),
        addresses="; ".join(f"p{at} = v{at}.data_ptr()" for at in tensors) or "pass",
        assignments="; ".join(f"raw[{at}] = {name}" for at, name in names.items()),
        specialised=" | ".join(name for at, name in names.items() if at not in unspecialised)
        or "0",
        integers=" | ".join(names[at] for at in sorted(integers)) or "0",
    )
    scope: dict[str, Any] = {"INT32_MAX": _INT32_MAX}
    exec(source, scope)  # noqa: S102 - made of positions alone
    return scope["bind"]  # type: ignore[no-any-return]


def _raw(arg: Any) -> Any:
    """A run-time argument as Triton's C function takes it fastest."""
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def _parameters(kernel: Any) -> list[tuple[str, bool]]:
    """(name, whether it is a constexpr) of every parameter."""
    if isinstance(kernel, triton.runtime.JITFunction):
        return [(parameter.name, parameter.is_constexpr) for parameter in kernel.params]
    annotations = kernel.fn.__annotations__  # of the interpreter's own function class
    return [(name, "constexpr" in str(annotations.get(name, ""))) for name in kernel.arg_names]


def _unspecialised(kernel: Any) -> frozenset[int]:
    """Positions of parameters that Triton compiles nothing into but the width of, on request."""
    parameters = getattr(kernel, "params", ())  # the interpreter's function class has none
    return frozenset(at for at, parameter in enumerate(parameters) if parameter.do_not_specialize)


def _name(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", None) or kernel.fn.__name__)
