"""`lora-core check NAME`: the suite from the shell, without pytest and without a file."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from lora_core import __version__
from lora_core.contract import CONTRACT_VERSION
from lora_core.errors import BackendUnavailableError
from lora_core.plugins import Family as FamilyName
from lora_core.testing import engine
from lora_core.testing.engine import CheckFailed, Family, Instance, Level, NotRunHere
from lora_core.testing.families import family_of

Outcome = Literal["passed", "failed", "not_run_for_hardware", "expected_failure", "preview_failed"]


@dataclass(frozen=True)
class Result:
    """What became of one check on one case."""

    id: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """What became of a run; `as_json` is what `--json` writes."""

    backend: str
    contract: str
    device: str
    level: Level
    results: list[Result] = field(default_factory=list)
    commit: str | None = None

    def of(self, outcome: Outcome) -> list[Result]:
        """Results of one outcome."""
        return [result for result in self.results if result.outcome == outcome]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.of("failed")

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        failed = [{"id": result.id, "message": result.detail} for result in self.of("failed")]
        missing = [
            {"id": result.id, "reason": result.detail} for result in self.of("not_run_for_hardware")
        ]
        return {
            "backend": self.backend,
            "passed": [result.id for result in self.of("passed")],
            "failed": failed,
            "not_run_for_hardware": missing,
            "expected_failures": [
                {"id": r.id, "reason": r.detail} for r in self.of("expected_failure")
            ],
            "previews_failed": [
                {"id": r.id, "message": r.detail} for r in self.of("preview_failed")
            ],
            "device": self.device,
            "level": self.level,
            "commit": self.commit,
            "seconds": round(sum(result.seconds for result in self.results), 3),
            "versions": {
                "lora_core": __version__,
                "contract": CONTRACT_VERSION,
                "backend_contract": self.contract,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "triton": _version("triton"),
                "cuda": torch.version.cuda,
            },
        }


def run(
    family: Family[Any],
    subject: Any,
    *,
    level: Level = "smoke",
    expected_failures: Mapping[str, str] | None = None,
    progress: TextIO | None = None,
    stop_at_failure: bool = False,
) -> Report:
    """Run a family's checks on a subject.

    Args:
        family: which contract.
        subject: the backend under test.
        level: how much.
        expected_failures: as `Conformance.expected_failures`.
        progress: where to show one line per check, or None.
        stop_at_failure: end after the first failure.

    Raises:
        ContractError: an expected failure that names nothing.
    """
    expected = expected_failures or {}
    report = Report(subject.label, subject.contract, _describe(subject.device), level)
    if subject.unavailable is not None:
        names = list(family.checks)
        report.results = [
            Result(name, "not_run_for_hardware", str(subject.unavailable)) for name in names
        ]
        return report
    engine.refuse_unknown(family, subject, expected, "this run")
    shown = _Progress(progress)
    plan = family.plan(subject, level)
    for instance in plan:
        result = _outcome(instance, subject, expected)
        report.results.append(result)
        shown.add(instance.check.name, result)
        if stop_at_failure and result.outcome == "failed":
            break
        if result.outcome == "failed" and _is_lost(subject.device):
            rest = len(plan) - len(report.results)
            lost = f"the device was lost in {result.id}; {rest} checks after it were not run"
            report.results.append(Result("device", "failed", lost))
            break
    shown.finish()
    return report


def run_in_processes(
    name: str,
    *,
    family: FamilyName | None = None,
    device: str | None,
    level: Level,
    jobs: int,
    progress: TextIO | None = None,
) -> Report:
    """As `run`, spread over processes: worth it where compiling kernels takes most of the time.

    Args:
        name: an installed backend.
        family: as `family_of`.
        device: where; None leaves it to the backend.
        level: how much.
        jobs: processes; each takes the next check when it is done with one.
        progress: where to show one line per case, as it ends, or None.
    """
    checks = family_of(name, family)
    subject = checks.subject(name, device=device)
    if subject.unavailable is not None:
        return run(checks, subject, level=level)
    report = Report(subject.label, subject.contract, _describe(subject.device), level)
    count = len(checks.plan(subject, level))
    with ProcessPoolExecutor(
        jobs,
        get_context("spawn"),
        initializer=_begin_worker,
        initargs=(name, family, device, level),
    ) as pool:
        # from the end: the last checks of a plan take longest, and none should be left to run alone
        cases = [pool.submit(_run_case, index) for index in reversed(range(count))]
        for done, case in enumerate(as_completed(cases), 1):
            if progress is not None:
                result = case.result()
                told = f"[{done}/{count}] {result.outcome} {result.id} ({result.seconds:.1f} s)"
                print(told, file=progress, flush=True)
    report.results = [case.result() for case in reversed(cases)]
    return report


@dataclass
class _Worker:
    """What a process of `run_in_processes` keeps between its cases."""

    subject: Any
    plan: Sequence[Instance[Any]]
    lost_in: str | None = None  # the case that took the device with it


_worker: _Worker | None = None


def _begin_worker(name: str, family: FamilyName | None, device: str | None, level: Level) -> None:
    global _worker
    checks = family_of(name, family)
    subject = checks.subject(name, device=device)
    _worker = _Worker(subject, checks.plan(subject, level))


def _run_case(index: int) -> Result:
    """One case of the plan, in a process of its own."""
    if _worker is None:
        raise RuntimeError("cases run in processes that _begin_worker has set up")
    instance = _worker.plan[index]
    if _worker.lost_in is not None:
        return Result(instance.id, "failed", f"not run: the device was lost in {_worker.lost_in}")
    result = _outcome(instance, _worker.subject, {})
    if result.outcome == "failed" and _is_lost(_worker.subject.device):
        _worker.lost_in = result.id
    return result


def _outcome(instance: Instance[Any], subject: Any, expected: Mapping[str, str]) -> Result:
    reason = engine.expected_reason(instance, expected)
    began = time.perf_counter()
    outcome: Outcome = "passed"
    detail = ""
    try:
        engine.run_instance(instance, subject)
    except NotRunHere as missing:
        return Result(instance.id, "not_run_for_hardware", str(missing))
    except CheckFailed as failure:
        outcome, detail = "failed", str(failure)
        if engine.is_preview(instance.check, subject):
            outcome = "preview_failed"
        elif reason is not None:
            outcome, detail = "expected_failure", reason
    else:
        if reason is not None:
            outcome, detail = (
                "failed",
                f"it passes but is expected to fail ({reason}): remove the expectation",
            )
    return Result(instance.id, outcome, detail, time.perf_counter() - began)


def _is_lost(device: torch.device) -> bool:
    """Whether a CUDA device answers no more, as after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


class _Progress:
    """One line per check, printed when its last case is done."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._name: str | None = None
        self._results: list[Result] = []

    def add(self, name: str, result: Result) -> None:
        if name != self._name:
            self.finish()
            self._name = name
        self._results.append(result)

    def finish(self) -> None:
        if self._stream is not None and self._results:
            print(_counted(self._name or "", self._results), file=self._stream, flush=True)
        self._results = []


def _counted(name: str, results: list[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    seconds = sum(result.seconds for result in results)
    told = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in counts.items())
    return f"{name:<28} {told}  ({seconds:.1f} s)"


def _by_check(results: list[Result]) -> list[str]:
    """One line per check, as `_Progress` shows it."""
    checks: dict[str, list[Result]] = {}
    for result in results:
        checks.setdefault(result.id.partition("[")[0], []).append(result)
    return [_counted(name, group) for name, group in checks.items()]


def run_check(
    name: str,
    *,
    family: FamilyName | None = None,
    device: str | None = None,
    level: Level = "smoke",
    json_path: str | Path | None = None,
    require_device: str | None = None,
    jobs: int = 1,
    commit: str | None = None,
    stream: TextIO | None = None,
) -> int:
    """Run the suite on an installed backend and print what became of it.

    Args:
        name: as `load_backend` (or `load_moe_backend`) knows it.
        family: look only there; None takes the dense backend where a name is in both.
        device: where; None leaves it to the backend.
        level: "smoke", "standard" or "large".
        json_path: also write the report there.
        require_device: count checks that are not run for lack of this device type as failed.
        jobs: processes to spread the checks over.
        commit: what was tested, for the report.
        stream: where to print; None is standard output.

    Returns:
        0 when nothing failed, else 1.

    Raises:
        BackendNotFoundError: no backend has that name.
        BackendUnavailableError: `device` is named and the backend cannot run there.
    """
    out = stream if stream is not None else sys.stdout
    checks = family_of(name, family)
    subject = checks.subject(name, device=device)
    if device is not None and subject.unavailable is not None:
        raise BackendUnavailableError(str(subject.unavailable))
    print(
        f"{name}: contract {subject.contract}, level {level}, on {_describe(subject.device)}",
        file=out,
    )
    if find_spec("hypothesis") is None:
        print("drawn batches are left out: install lora-core[testing] for hypothesis", file=out)
    if jobs > 1:
        report = run_in_processes(
            name, family=family, device=device, level=level, jobs=jobs, progress=out
        )
        for counted in _by_check(report.results):
            print(counted, file=out)
    else:
        report = run(checks, subject, level=level, progress=out)
    report.commit = commit
    if require_device is not None:
        report.results = [_required(result, require_device) for result in report.results]
    for result in (*report.of("failed"), *report.of("preview_failed")):
        print(f"\n{result.outcome.upper()} {result.id}\n{result.detail}", file=out)
    missing = Counter(result.detail for result in report.of("not_run_for_hardware"))
    for reason, count in missing.items():
        print(f"not run here: {count} checks, {reason}", file=out)
    counts = Counter(result.outcome for result in report.results)
    summary = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in counts.items())
    print(f"{name}: {summary}", file=out)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if report.ok else 1


def _required(result: Result, device: str) -> Result:
    if result.outcome == "not_run_for_hardware" and result.detail.startswith(f"needs {device}:"):
        return Result(result.id, "failed", f"device {device} is required: {result.detail}")
    return result


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.processor() or platform.machine()})"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
