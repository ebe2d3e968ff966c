"""Checks, where they are registered, and how one is run: the part that every family shares.

A check is a plain function `check(subject, case)` that raises when the backend is wrong, so it can
be called from a REPL. A family (dense, experts) is a set of checks of one contract. Everything else
(the pytest class, the shell command, the mutants) only chooses instances of checks and runs them.
"""

# ruff: noqa: ARG001 - checks and their cases share one signature
from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from lora_core.contract import parse_version
from lora_core.errors import ContractError
from lora_core.testing.clauses import CLAUSES

Level = Literal["smoke", "standard", "large"]
"""smoke: seconds, at every push; standard: minutes; large: what only a GPU's memory can hold."""

LEVELS: tuple[Level, ...] = get_args(Level)


class CheckFailed(AssertionError):  # noqa: N818 - an outcome, not an error
    """A backend failed a check; the message says which clause, what differs, and the usual cause."""


class Violation(AssertionError):  # noqa: N818 - of a clause
    """A broken rule that has a clause of its own, whichever check ran into it."""

    def __init__(self, clause: str, message: str) -> None:
        super().__init__(message)
        self.clause = clause


class NotRunHere(Exception):  # noqa: N818 - an outcome, not an error
    """This machine lacks what the case needs.

    Attributes:
        needs: the missing thing in a word, such as "cuda".
    """

    def __init__(self, needs: str, reason: str) -> None:
        super().__init__(f"needs {needs}: {reason}")
        self.needs = needs


class Case(Protocol):
    """What a check is run on: any value with a readable id and a repr that can be pasted."""

    @property
    def id(self) -> str:
        """Unique among the cases of a check."""


@dataclass(frozen=True)
class Once:
    """The case of a check that needs none."""

    id: str = "once"


class SubjectLike(Protocol):
    """What the engine needs of a backend under test; each family has its own class."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    @property
    def contract(self) -> str:
        """The contract version it declares."""

    @property
    def unavailable(self) -> NotRunHere | None:
        """Why nothing can be run here, or None."""

    def as_code(self) -> str:
        """An expression that builds it again."""


SubjectT = TypeVar("SubjectT", bound=SubjectLike)


@dataclass(frozen=True)
class Check(Generic[SubjectT]):
    """One registered check.

    Attributes:
        name: of the function.
        run: the function itself.
        clauses: of docs/contract.md which it proves, the main one first.
        cases: (subject, level) -> what to run it on; nothing where the backend does not claim it.
        since: contract version that introduced it.
        cause: what usually makes it fail.
    """

    name: str
    run: Callable[[SubjectT, Any], None]
    clauses: tuple[str, ...]
    cases: Callable[[SubjectT, Level], Sequence[Case]]
    since: str
    cause: str

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (self.run.__doc__ or "").strip().partition("\n")[0]


@dataclass(frozen=True)
class Instance(Generic[SubjectT]):
    """A check and one case."""

    check: Check[SubjectT]
    case: Case

    @property
    def id(self) -> str:
        """`linear[bf16-r8-K100-seg(4,0,7)]`."""
        return f"{self.check.name}[{self.case.id}]"


def once(subject: object, level: Level) -> Sequence[Case]:
    """The `cases` of a check that needs none."""
    return (Once(),)


@dataclass
class Family(Generic[SubjectT]):
    """The checks of one contract.

    Attributes:
        name: "dense" or "moe", as in the plugin registry.
        subject: builds the backend under test from a name or a class and a device.
        modules: where the checks are; imported when they are first asked for.
    """

    name: str
    subject: Callable[..., SubjectT]
    modules: tuple[str, ...]
    _checks: dict[str, Check[SubjectT]] = field(default_factory=dict)

    def check(
        self,
        *clauses: str,
        cause: str,
        cases: Callable[[SubjectT, Level], Sequence[Case]] = once,
        since: str = "1.0",
    ) -> Callable[[Callable[[SubjectT, Any], None]], Callable[[SubjectT, Any], None]]:
        """Register a function as a check; the function itself stays as it is.

        Raises:
            ContractError: a clause that does not exist, or a name that is taken.
        """

        def register(run: Callable[[SubjectT, Any], None]) -> Callable[[SubjectT, Any], None]:
            name = run.__name__
            unknown = [clause for clause in clauses if clause not in CLAUSES]
            if unknown or not clauses:
                raise ContractError(
                    f"check {name!r} cites clauses {unknown or 'none'}: see docs/contract.md"
                )
            if name in self._checks:
                raise ContractError(f"two {self.name} checks are named {name!r}")
            self._checks[name] = Check(name, run, clauses, cases, since, cause)
            return run

        return register

    @property
    def checks(self) -> Mapping[str, Check[SubjectT]]:
        """Every check by name, in the order of the modules."""
        for module in self.modules:
            import_module(module)
        return self._checks

    def plan(self, subject: SubjectT, level: Level) -> list[Instance[SubjectT]]:
        """The instances to run at a level.

        Raises:
            ContractError: two cases of a check share an id.
        """
        instances: list[Instance[SubjectT]] = []
        for check in self.checks.values():
            cases = check.cases(subject, level)
            ids = [case.id for case in cases]
            twice = sorted({id_ for id_ in ids if ids.count(id_) > 1})
            if twice:
                raise ContractError(f"check {check.name!r} has two cases named {', '.join(twice)}")
            instances.extend(Instance(check, case) for case in cases)
        return instances

    def known_ids(self, subject: SubjectT) -> set[str]:
        """Ids of every level and names of every check: what an expected failure may name."""
        ids = {instance.id for level in LEVELS for instance in self.plan(subject, level)}
        return ids | set(self.checks)


def is_preview(check: Check[Any], subject: SubjectLike) -> bool:
    """Whether the check is newer than the contract the backend declares: then it cannot fail."""
    return parse_version(check.since) > parse_version(subject.contract)


def expected_reason(instance: Instance[Any], expected: Mapping[str, str]) -> str | None:
    """Why this instance is expected to fail: named itself, or its whole check named."""
    return expected.get(instance.id) or expected.get(instance.check.name)


def refuse_unknown(
    family: Family[SubjectT], subject: SubjectT, expected: Mapping[str, str], where: str
) -> None:
    """Refuse expected failures that name nothing, or give no reason.

    Raises:
        ContractError: such a key.
    """
    if not expected:
        return
    unknown = sorted(set(expected) - family.known_ids(subject))
    if unknown:
        raise ContractError(
            f"{where}.expected_failures names {', '.join(map(repr, unknown))}, which is no check and no "
            f"check id of the {family.name} suite for backend {subject.label!r}: correct it or remove it"
        )
    silent = sorted(key for key, reason in expected.items() if not reason.strip())
    if silent:
        raise ContractError(
            f"{where}.expected_failures gives no reason for {', '.join(map(repr, silent))}"
        )


def run_instance(instance: Instance[SubjectT], subject: SubjectT) -> None:
    """Run one check on one case.

    Raises:
        NotRunHere: this machine lacks what it needs.
        CheckFailed: the backend is wrong.
    """
    if subject.unavailable is not None:
        raise subject.unavailable
    try:
        instance.check.run(subject, instance.case)
    except NotRunHere:
        raise
    except Exception as error:
        raise CheckFailed(describe(instance, subject, error)) from error


def describe(instance: Instance[Any], subject: SubjectLike, error: BaseException) -> str:
    """The message of a failing check."""
    check = instance.check
    found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    lines = [f"backend {subject.label!r} fails {instance.id}: {check.summary}"]
    clause = error.clause if isinstance(error, Violation) else check.clauses[0]
    others = [other for other in check.clauses if other != clause]
    more = f"; this check also cites {', '.join(others)}" if others else ""
    lines += [f"clause {clause}: {CLAUSES[clause]} (docs/contract.md{more})"]
    lines += ["found: " + (found.strip() or "an assertion without words").replace("\n", "\n  ")]
    if not isinstance(error, CheckFailed):
        lines += [f"at: {_where(error)}"]
    interpreted = ", with TRITON_INTERPRET=1" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    lines += [f"usual cause: {check.cause}", f"to run it alone{interpreted}:"]
    module = check.run.__module__
    lines += [f"  from {module} import {check.name}"]
    lines += [f"  from {type(instance.case).__module__} import {type(instance.case).__name__}"]
    lines += [f"  from {type(subject).__module__} import {type(subject).__name__}"]
    lines += [f"  {check.name}({subject.as_code()}, {instance.case!r})"]
    return "\n".join(lines)


def _where(error: BaseException) -> str:
    """The innermost places of a traceback, for runs that show no traceback."""
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)[-3:]
    return " <- ".join(
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in reversed(list(frames))
    )
