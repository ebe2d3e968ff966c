"""A few real processes that share a group and run functions of the tests, for as long as a test needs.

Processes are started once per place and size, and reused: starting takes longer than most tests. Whatever
goes wrong, all of them are killed; none outlives the parent, whose end closes their pipes.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.multiprocessing as mp

GROUP_TIMEOUT = timedelta(seconds=20)
GONE = "the process is gone"
"""What is heard of a rank that ended."""
DUMP_WAIT_MS = 1000
"""NCCL's watchdog sleeps four times this long between a timeout and the end of the process."""
PATIENCE = 5.0
"""Seconds that the other ranks have to say what they saw, after one has failed."""


@dataclass(frozen=True)
class Place:
    """Where the ranks of a world compute, with which backends, and what carries rows between them."""

    backend: str = "torch"
    experts: str = "torch"
    device_type: str = "cpu"
    transport: str = "gloo"

    def __str__(self) -> str:
        return f"{self.transport}-{self.backend}"

    def device(self, rank: int) -> torch.device:
        """Of a rank: one each, where there are several."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", rank)


here = Place()
"""In a process of a world: its place."""
device = torch.device("cpu")
"""In a process of a world: this rank's."""


class WorkerFailedError(AssertionError):
    """A function raised in some process; the message holds every traceback."""


class World:
    """`size` processes in one group."""

    def __init__(
        self,
        size: int,
        place: Place = here,
        *,
        timeout: float = 60,
        group_timeout: timedelta = GROUP_TIMEOUT,
    ) -> None:
        self.size, self.place = size, place
        self.timeout, self.group_timeout = timeout, group_timeout
        self.processes: list[mp.Process] = []
        self.pipes: list = []

    def run(self, function, *arguments, timeout: float | None = None) -> list:
        """`function(rank, size, *arguments)` in every process; the results by rank."""
        outcomes = self.outcomes(function, *arguments, patience=PATIENCE, timeout=timeout)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failed:
            self.close()  # ranks may be at different collectives now
            raise WorkerFailedError("\n".join(failed))
        return [value for _, value in outcomes]

    def outcomes(
        self,
        function,
        *arguments,
        patience: float | None = None,
        timeout: float | None = None,
    ) -> list[tuple[bool, object]]:
        """The same, failures included: (True, result) or (False, traceback) by rank.

        Of ranks that are silent for `patience` seconds after another failed, that is the outcome.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        heard: dict[int, tuple[bool, object]] = {}
        timeout = timeout or self.timeout
        end = monotonic() + timeout
        while len(heard) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in heard]
            ready = wait(waiting, timeout=max(0.0, end - monotonic()))
            if not ready:
                silent = [rank for rank in range(self.size) if rank not in heard]
                if heard and not all(ok for ok, _ in heard.values()):
                    heard.update(dict.fromkeys(silent, (False, "it is still waiting")))
                    break
                self.close()
                raise TimeoutError(f"ranks {silent} did not answer in {timeout} s: {heard}")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    heard[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    heard[rank] = (False, GONE)
                if not heard[rank][0] and patience is not None:
                    end = min(end, monotonic() + patience)
        return [heard[rank] for rank in range(self.size)]

    def _start(self) -> None:
        # forkserver imports torch once for all worlds, but nothing forked may ever have seen a GPU
        context = mp.get_context("forkserver" if self.place.device_type == "cpu" else "spawn")
        if self.place.device_type == "cpu":
            context.set_forkserver_preload(["tests.distributed.engine"])
        self.meeting = tempfile.TemporaryDirectory(prefix="lora-core-ranks-")
        inherited = {"OMP_NUM_THREADS": "1"}
        if self.place.device_type == "cpu":
            inherited["TRITON_INTERPRET"] = "1"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in inherited.items():
                patch.setenv(name, value)
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                arguments = (rank, self.size, self.place, self.meeting.name, self.group_timeout)
                process = context.Process(target=_serve, args=(*arguments, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)

    def close(self) -> None:
        """Kill all processes and wait for them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
            assert not process.is_alive()
        for pipe in self.pipes:
            pipe.close()
        if self.processes:
            self.meeting.cleanup()
        self.processes, self.pipes = [], []


def _serve(
    rank: int, size: int, place: Place, meeting: str, group_timeout: timedelta, pipe
) -> None:
    unable = None
    try:
        _join(rank, size, place, meeting, group_timeout)
    except BaseException:  # noqa: BLE001 - the parent reports it
        unable = traceback.format_exc()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if unable is not None:
                outcome = (False, unable)
            else:
                with torch.no_grad():
                    outcome = (True, function(rank, size, *arguments))
        except BaseException:  # noqa: BLE001 - the parent reports it
            outcome = (False, traceback.format_exc())
        pipe.send(outcome)


def _join(rank: int, size: int, place: Place, meeting: str, group_timeout: timedelta) -> None:
    """Make this process a rank of its world."""
    global here, device
    here, device = place, place.device(rank)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)  # transformers takes that device
    if place.device_type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # one host
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast touches what other users of a host share
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = str(DUMP_WAIT_MS)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        place.transport,
        init_method=(Path(meeting) / "meeting").as_uri(),
        rank=rank,
        world_size=size,
        timeout=group_timeout,
        # communicators are made now, not in the midst of a capture
        device_id=None if device.type == "cpu" else device,
    )
