"""A few real processes that share a gloo group and run functions of the tests, for as long as a test needs.

Processes are started once per size and reused: starting takes longer than most tests. Whatever
goes wrong, all of them are killed; none outlives the parent, whose end closes their pipes.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import torch
import torch.multiprocessing as mp

GROUP_TIMEOUT = timedelta(seconds=20)


class WorkerFailedError(AssertionError):
    """A function raised in some process; the message holds every traceback."""


class World:
    """`size` processes in one group."""

    def __init__(self, size: int, *, timeout: float = 60) -> None:
        self.size, self.timeout = size, timeout
        self.processes: list[mp.Process] = []
        self.pipes: list = []

    def run(self, function, *arguments) -> list:
        """`function(rank, size, *arguments)` in every process; the results by rank."""
        outcomes = self.outcomes(function, *arguments)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failed:
            self.close()  # ranks may be at different collectives now
            raise WorkerFailedError("\n".join(failed))
        return [value for _, value in outcomes]

    def outcomes(self, function, *arguments) -> list[tuple[bool, object]]:
        """The same, failures included: (True, result) or (False, traceback) by rank."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        heard: dict[int, tuple[bool, object]] = {}
        end = monotonic() + self.timeout
        while len(heard) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in heard]
            ready = wait(waiting, timeout=max(0.0, end - monotonic()))
            if not ready:
                silent = [rank for rank in range(self.size) if rank not in heard]
                self.close()
                raise TimeoutError(f"ranks {silent} did not answer in {self.timeout} s: {heard}")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    heard[rank] = pipe.recv()
                except EOFError:
                    heard[rank] = (False, "the process is gone")
        return [heard[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = mp.get_context("forkserver")  # which imports torch once, for all worlds
        context.set_forkserver_preload(["tests.distributed.engine"])
        self.meeting = tempfile.TemporaryDirectory(prefix="lora-core-ranks-")
        meeting = self.meeting.name
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, self.size, meeting, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

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


def _serve(rank: int, size: int, meeting: str, pipe) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo",
        init_method=(Path(meeting) / "meeting").as_uri(),
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            with torch.no_grad():
                outcome = (True, function(rank, size, *arguments))
        except BaseException:  # noqa: BLE001 - the parent reports it
            outcome = (False, traceback.format_exc())
        pipe.send(outcome)
