"""Captured runs of functions in which ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lora_core.testing.capture import Captured
from tests.distributed import world


class RankGraph:
    """A CUDA graph with this rank's collectives in it, or on a CPU the same thing by hand.

    Every rank captures at the same time, and replays as often as the others.

    Args:
        function: run once before, so that kernels are compiled and communicators have met.

    Attributes:
        result: what the function returned; replaying rewrites it in place.
    """

    result: Tensor

    def __init__(self, function: Callable[[], Tensor]) -> None:
        if world.device.type == "cpu":
            with _recorded_collectives():
                captured = Captured(world.device, function)
            self.result, self.replay = captured.result, captured.replay
            return
        side = torch.cuda.Stream(world.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # other threads, such as the one that watches over collectives, may go on asking for events
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self.result = function()
        self.replay = graph.replay


@contextmanager
def _recorded_collectives():
    """Inside, a collective is one step of the recording, waiting included."""

    def recorded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            recorder: Any = _get_current_dispatch_mode()
            if recorder is None:
                return real(*arguments, **options)
            recorder.steps.append(partial(real, *arguments, **options))
            recorder.paused = True
            try:
                return real(*arguments, **options)
            finally:
                recorder.paused = False

        return call

    with _patched(dist, "all_reduce", recorded), _patched(dist, "all_gather", recorded):
        yield


@contextmanager
def _patched(owner: Any, name: str, wrap: Callable[[Any], Any]):
    real = getattr(owner, name)
    setattr(owner, name, wrap(real))
    try:
        yield
    finally:
        setattr(owner, name, real)
