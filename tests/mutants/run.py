"""Run every wrong backend under the real suite: `python -m tests.mutants.run [--device cuda] [NAME ...]`.

Writes build/mutants.json: how many were caught, and which check caught which. Exit code 1 if one was
not. A mutant is run until its first failing check, the expected one first.
"""

# ruff: noqa: T201 - a command prints
from __future__ import annotations

import argparse
import json
import linecache
import sys
import time
import types
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lora_core.testing import engine
from lora_core.testing.dense_family import DENSE
from lora_core.testing.engine import CheckFailed, NotRunHere
from lora_core.testing.subject import Subject
from tests.mutants.faults import FAULTS, Fault

_SOURCE = Path(__file__).with_name("victim.py")
_OUTPUT = Path(__file__).resolve().parents[2] / "build" / "mutants.json"


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    name: str
    about: str
    caught_by: str | None
    clause: str | None
    expected_check: str
    seconds: float


def build(fault: Fault) -> type:
    """The victim's class with the fault in it.

    Raises:
        ValueError: a piece that does not occur exactly once.
    """
    source = _SOURCE.read_text(encoding="utf-8")
    for old, new in fault.patches:
        if source.count(old) != 1:
            raise ValueError(
                f"mutant {fault.name}: {old!r} occurs {source.count(old)} times in {_SOURCE.name}"
            )
        source = source.replace(old, new)
    module = types.ModuleType(f"mutant_{fault.name}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    path = f"{_SOURCE.stem}[{fault.name}].py"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), vars(module))
    mutant: type = module.Victim
    return mutant


def judge(fault: Fault, *, device: str, level: engine.Level = "standard") -> Verdict:
    """Run a mutant under the suite until it is caught."""
    began = time.perf_counter()
    subject = Subject(build(fault), device=device)
    plan = DENSE.plan(subject, level)
    plan.sort(
        key=lambda instance: instance.check.name != fault.hint
    )  # stable: the expected check first
    for instance in plan:
        try:
            engine.run_instance(instance, subject)
        except NotRunHere:
            continue
        except CheckFailed as failure:
            clause = next(
                line for line in str(failure).splitlines() if line.startswith("clause ")
            ).split()[1]
            seconds = time.perf_counter() - began
            return Verdict(
                fault.name,
                fault.about,
                instance.id,
                clause.rstrip(":"),
                fault.hint,
                round(seconds, 3),
            )
    return Verdict(
        fault.name, fault.about, None, None, fault.hint, round(time.perf_counter() - began, 3)
    )


def main(arguments: list[str] | None = None) -> int:
    """Judge the mutants, print one line each, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these mutants")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    on_cuda = torch.device(options.device).type == "cuda"
    here = [fault for fault in faults if on_cuda or not fault.cuda]
    verdicts = []
    for fault in here:
        verdict = judge(fault, device=options.device)
        verdicts.append(verdict)
        print(
            f"{'caught' if verdict.caught_by else 'MISSED':<7} {fault.name:<42} {verdict.caught_by}",
            flush=True,
        )
    caught = [verdict for verdict in verdicts if verdict.caught_by]
    report = {
        "device": options.device,
        "caught": len(caught),
        "total": len(verdicts),
        "missed": [verdict.name for verdict in verdicts if not verdict.caught_by],
        "needs_cuda": [
            {"name": f.name, "about": f.about} for f in faults if f.cuda and not on_cuda
        ],
        "mutants": [asdict(verdict) for verdict in verdicts],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(
        f"{len(caught)} of {len(verdicts)} caught, {len(report['needs_cuda'])} need CUDA; {options.output}"
    )
    return 0 if len(caught) == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
