"""The pytest face of the suite: one class to subclass per family.

from lora_core.testing import BackendConformance

class TestMine(BackendConformance):
    backend = "mine"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from lora_core.errors import ContractError
from lora_core.testing import engine
from lora_core.testing.dense_family import DENSE
from lora_core.testing.engine import LEVELS, Check, CheckFailed, Family, Instance, Level, NotRunHere
from lora_core.testing.moe_family import MOE


class Conformance:
    """What the classes of all families share; subclass one of those instead.

    Attributes:
        backend: name of the backend, as `load_backend` knows it, or its class.
        device: where to run it; None leaves it to the backend.
        level: None takes `--lora-level`, which is "smoke" unless given.
        expected_failures: check id, or name of a check for all of its cases, -> why it fails. Strict:
            one that passes fails the run, one that names nothing is an error.
    """

    family: ClassVar[Family[Any]]
    backend: ClassVar[str | type[Any] | None] = None
    device: ClassVar[str | None] = None
    level: ClassVar[Level | None] = None
    expected_failures: ClassVar[Mapping[str, str]] = {}

    _checks: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "family" in vars(cls):  # a family's own class: give it its tests
            cls._checks = {
                f"test_{name}": _test(check) for name, check in cls.family.checks.items()
            }
            cls._checks |= {"pytest_generate_tests": vars(Conformance)["pytest_generate_tests"]}
            for name, test in cls._checks.items():
                setattr(cls, name, test)
            return
        for name, test in cls._checks.items():
            if getattr(cls, name, None) is not test:
                raise ContractError(
                    f"{cls.__qualname__} overrides {name}: checks of the conformance suite stay as they are. Name what "
                    f"is known to fail, with the reason, in expected_failures = {{{name.removeprefix('test_')!r}: ...}}"
                )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give every check its cases."""
        check = getattr(metafunc.function, "lora_check", None)
        if check is not None:
            subject, instances, _ = _plan(metafunc.cls, metafunc.config)
            mine = [instance for instance in instances if instance.check is check]
            if subject.unavailable is not None:
                mine = [Instance(check, engine.Once("unavailable"))]
            metafunc.parametrize("instance", mine, ids=[instance.case.id for instance in mine])


def _plan(
    cls: type[Conformance], config: pytest.Config
) -> tuple[Any, list[Instance[Any]], Mapping[str, str]]:
    """Subject, instances and expected failures of a class, made once per class and run."""
    level: Level = cls.level or config.getoption("--lora-level", default="smoke")
    cached = vars(cls).get("_planned")
    if cached is None or cached[0] != level:
        if cls.backend is None:
            raise ContractError(
                f"{cls.__qualname__} does not set `backend`, the name of the backend to test"
            )
        if level not in LEVELS:
            raise ContractError(
                f"{cls.__qualname__}.level is {level!r}: one of {', '.join(LEVELS)}"
            )
        subject = cls.family.subject(cls.backend, device=cls.device)
        if subject.unavailable is None:
            engine.refuse_unknown(cls.family, subject, cls.expected_failures, cls.__qualname__)
        instances = [] if subject.unavailable is not None else cls.family.plan(subject, level)
        cached = (level, (subject, instances, cls.expected_failures))
        cls._planned = cached  # type: ignore[attr-defined]
    planned: tuple[Any, list[Instance[Any]], Mapping[str, str]] = cached[1]
    return planned


def _test(check: Check[Any]) -> Callable[..., None]:
    def test(self: Conformance, instance: Instance[Any], request: pytest.FixtureRequest) -> None:
        __tracebackhide__ = True
        subject, _, expected = _plan(type(self), request.config)
        reason = engine.expected_reason(instance, expected)
        verdict: str | None = None
        try:
            engine.run_instance(instance, subject)
        except NotRunHere as missing:
            required = request.config.getoption("--lora-require-device", default=None)
            if missing.needs == required:
                pytest.fail(f"--lora-require-device {required}: {missing}", pytrace=False)
            pytest.skip(f"not run here, {missing}")
        except CheckFailed as failure:
            if engine.is_preview(check, subject):
                pytest.xfail(f"preview of contract {check.since}: {failure}")
            if reason is not None:
                pytest.xfail(reason)
            if not isinstance(failure.__cause__, AssertionError):
                raise  # out of the backend: its traceback is what the author needs
            verdict = str(failure)
        if verdict is not None:  # outside of `except`, so that it is told once
            pytest.fail(verdict, pytrace=False)
        if reason is not None:
            pytest.fail(
                f"{instance.id} passes but is expected to fail ({reason}): remove it from expected_failures",
                pytrace=False,
            )

    test.__name__ = test.__qualname__ = f"test_{check.name}"
    test.__doc__ = check.run.__doc__
    test.lora_check = check  # type: ignore[attr-defined]
    return test


class BackendConformance(Conformance):
    """Every check of the dense contract: subclass it, set `backend`, done."""

    family = DENSE


class MoEConformance(Conformance):
    """Every check of the experts contract: subclass it, set `backend`, done."""

    family = MOE
