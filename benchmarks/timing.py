"""Replaying contenders in turn and pairing what they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.stats import Estimate, median_interval

Step = Callable[[], list[Tensor]]
"""One pass over the rotating layers; returns what each of them computed."""

BASE = "base"
_AHEAD_CYCLES = 400_000
"""The device waits this long at the start of a round, so that the host runs ahead of it."""


@dataclass
class Replay:
    """A step that can be repeated at fixed addresses.

    Attributes:
        run: repeats it, without waiting.
        outputs: what it computed, overwritten by every run.
        step: what was captured; a graph knows only addresses, this keeps the tensors behind them.
    """

    run: Callable[[], object]
    outputs: list[Tensor]
    step: Step


def capture(step: Step, device: torch.device) -> Replay:
    """Warm a step up and capture it in a CUDA graph; on a CPU the step itself is the replay."""
    if device.type != "cuda":
        held = step()

        def again() -> None:
            for old, new in zip(held, step(), strict=True):
                old.copy_(new)

        return Replay(again, held, step)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = step()
    torch.cuda.synchronize(device)
    return Replay(graph.replay, outputs, step)


@dataclass
class Paired:
    """Samples of one measurement, in microseconds per layer.

    Attributes:
        base: times of the base alone.
        added: per contender, its time minus the base's of the same round.
    """

    base: list[float] = field(default_factory=list)
    added: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Rounds taken."""
        return len(self.base)

    def estimates(self) -> dict[str, Estimate]:
        """Median and interval of what each contender adds."""
        return {name: median_interval(samples) for name, samples in self.added.items()}

    def take(self, times: Mapping[str, float], layers: int) -> None:
        """Pair one round's times."""
        base = times[BASE]
        self.base.append(base / layers)
        for name, took in times.items():
            if name != BASE:
                self.added.setdefault(name, []).append((took - base) / layers)


Timer = Callable[[Sequence[str]], Mapping[str, float]]
"""Replays the named contenders in this order and returns the microseconds of each."""


def timer(replays: Mapping[str, Replay], device: torch.device) -> Timer:
    """A timer over captured replays: device events on CUDA, the wall clock on a CPU."""

    def on_cuda(order: Sequence[str]) -> dict[str, float]:
        marks = {name: (torch.cuda.Event(True), torch.cuda.Event(True)) for name in order}
        torch.cuda._sleep(_AHEAD_CYCLES)
        for name in order:
            start, end = marks[name]
            start.record()
            replays[name].run()
            end.record()
        torch.cuda.synchronize(device)
        return {name: start.elapsed_time(end) * 1e3 for name, (start, end) in marks.items()}

    def on_cpu(order: Sequence[str]) -> dict[str, float]:
        times = {}
        for name in order:
            start = time.perf_counter()
            replays[name].run()
            times[name] = (time.perf_counter() - start) * 1e6
        return times

    return on_cuda if device.type == "cuda" else on_cpu


def paired_rounds(
    time_round: Timer,
    names: Sequence[str],
    *,
    layers: int,
    enough: Callable[[Paired], bool],
    min_rounds: int = 11,
    max_rounds: int = 121,
    seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Paired:
    """Replay base and contenders in turn until the estimate is good enough.

    Every round replays each once, beginning one further along the list than the round before, so
    that none always runs behind the same neighbour.

    Args:
        time_round: replays in a given order.
        names: all contenders; must contain `BASE`.
        layers: in one replay; times are divided by it.
        enough: asked every `min_rounds` rounds.
        min_rounds: rounds before `enough` is asked; `seconds` does not cut below a third of it.
        max_rounds: never more.
        seconds: wall time after which the cell is given up as it is.
        clock: seconds, for `seconds`.
    """
    time_round(names)  # the first replay of a graph uploads it
    paired, began = Paired(), clock()
    while paired.rounds < max_rounds:
        first = paired.rounds % len(names)
        paired.take(time_round([*names[first:], *names[:first]]), layers)
        late = clock() - began > seconds
        if late and paired.rounds >= max(5, min_rounds // 3):
            break
        if paired.rounds % min_rounds == 0 and enough(paired):
            break
    return paired
