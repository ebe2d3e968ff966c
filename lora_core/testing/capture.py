"""Capturing ops and replaying them: a CUDA graph, or on a CPU the same thing by hand.

The host graph records every kernel that torch's dispatcher runs, and every launch of Triton's
interpreter, with its arguments as they are; replaying runs them again at the same addresses, with
the same numbers. Whatever python decided during the capture stays decided, as in a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_core.testing.engine import Violation
from lora_core.testing.guards import HostReads

_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default}
_UNWRITTEN = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class Captured:
    """A recorded run of a function.

    Args:
        device: where its tensors are.
        function: run once to warm up, as engines do, and once to record it; it must work on tensors
            that stay where they are.

    Attributes:
        result: what the function returned; replaying rewrites it in place.
    """

    result: Any

    def __init__(self, device: torch.device, function: Callable[[], Any]) -> None:
        self._steps: list[Callable[[], None]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                function()
            torch.cuda.current_stream(device).wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.result = function()
        else:
            function()
            recorder = _Recorder(self._steps)
            with HostReads(), recorder, _interpreter_launches(recorder):
                self.result = function()

    def replay(self) -> None:
        """Run it again."""
        if self._graph is not None:
            self._graph.replay()
        for step in self._steps:
            step()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it so
    """Appends what it takes to run each kernel again."""

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = steps
        self.paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and not self.paused:
            raise Violation("R1", f"{func} read a tensor's values during a capture")
        result = func(*args, **kwargs)
        if not self.paused and func not in _UNWRITTEN:
            returns = [value.alias_info for value in func._schema.returns]
            if not any(
                alias is not None and not alias.is_write for alias in returns
            ):  # a view needs no kernel
                self.steps.append(_again(func, args, kwargs, result))
        return result


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Callable[[], None]:
    targets = [
        t
        for t in (result if isinstance(result, (list, tuple)) else [result])
        if isinstance(t, Tensor)
    ]

    def step() -> None:
        fresh = func(*args, **kwargs)
        found = [
            t
            for t in (fresh if isinstance(fresh, (list, tuple)) else [fresh])
            if isinstance(t, Tensor)
        ]
        for target, value in zip(targets, found, strict=True):
            if target is not value:
                target.copy_(value)

    return step


@contextmanager
def _interpreter_launches(recorder: _Recorder) -> Iterator[None]:
    """Inside, launches of Triton's interpreter are recorded too, where Triton is in use at all."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    executor: Any = interpreter.GridExecutor
    original = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        def step() -> None:
            was, recorder.paused = recorder.paused, True
            try:
                original(self, *args, **kwargs)
            finally:
                recorder.paused = was

        if not recorder.paused:
            recorder.steps.append(step)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return original(self, *args, **kwargs)

    executor.__call__ = launch
    try:
        yield
    finally:
        executor.__call__ = original
