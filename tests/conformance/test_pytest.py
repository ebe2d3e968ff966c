"""The pytest face: parametrisation, refusals, options, and what the entry point costs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import count

import pytest

from lora_core.errors import ContractError
from lora_core.testing import BackendConformance
from lora_core.testing.engine import LEVELS

AUTHOR = """
from lora_core.testing import BackendConformance

class TestMine(BackendConformance):
    backend = "torch"
    device = "cpu"
"""


_NUMBERS = count()


class Run:
    """A pytest run of one file in this process, as its author would see it."""

    def __init__(self, folder, source, *arguments):
        path = (
            folder / f"test_author_{next(_NUMBERS)}.py"
        )  # python would find a module of the same name loaded
        path.write_text(source)
        self.ids, self.reports, self.errors = [], [], []
        options = [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:terminal",
            f"--rootdir={folder}",
            "-c",
            str(folder / "no.ini"),
        ]
        (folder / "no.ini").write_text("[pytest]\n")
        self.code = pytest.main([str(path), *options, *arguments], plugins=[self])

    @property
    def outcomes(self):
        return Counter(self.reports_by_outcome())

    def reports_by_outcome(self):
        for report in self.reports:
            if hasattr(report, "wasxfail"):
                yield "xfailed"
            elif report.when == "call" or report.skipped:
                yield report.outcome

    @property
    def text(self):
        return "\n".join(str(report.longrepr) for report in self.reports + self.errors)

    def pytest_collection_finish(self, session):
        self.ids = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.reports.append(report)

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors.append(report)


def test_overriding_a_check_is_refused_where_the_class_is_defined():
    with pytest.raises(ContractError, match="overrides test_linear"):

        class TestMine(BackendConformance):
            backend = "torch"

            def test_linear(self):
                assert True


def test_hiding_a_check_is_refused_too():
    with pytest.raises(ContractError, match="overrides test_dora"):

        class TestMine(BackendConformance):
            backend = "torch"
            test_dora = None


def test_a_mixin_cannot_override_a_check():
    class Mixin:
        def test_shrink(self):
            assert True

    with pytest.raises(ContractError, match="overrides test_shrink"):

        class TestMine(Mixin, BackendConformance):
            backend = "torch"


def test_parametrisation_cannot_be_replaced():
    with pytest.raises(ContractError, match="overrides pytest_generate_tests"):

        class TestMine(BackendConformance):
            backend = "torch"

            def pytest_generate_tests(self, metafunc):
                metafunc.parametrize("instance", [])


def test_three_lines_give_every_check_with_readable_ids(tmp_path):
    ids = Run(tmp_path, AUTHOR, "--collect-only").ids
    assert any(
        id_.endswith("::TestMine::test_linear[fp32-r4-K40-N48-seg(3,2)-slot(0,1)]") for id_ in ids
    )
    names = {id_.split("::")[2].split("[")[0] for id_ in ids}
    assert {f"test_{name}" for name in BackendConformance.family.checks} - names == {
        "test_far_slots", "test_far_rows", "test_many_rows",  # of higher levels
    }  # fmt: skip


def test_nothing_is_skipped_and_own_tests_may_sit_beside_the_inherited_ones(tmp_path):
    source = AUTHOR + "\n    def test_of_my_own(self):\n        assert True\n"
    run = Run(tmp_path, source, "-k", "request_view or batch_info or many_rows or of_my_own")
    assert run.outcomes == {"passed": 11}


WRONG = """
from lora_core.testing import BackendConformance
from lora_core.torch_backend import TorchBackend

class Wrong(TorchBackend):
    name = "wrong"

    def shrink(self, x, weights):
        return 2 * super().shrink(x, weights)

class TestWrong(BackendConformance):
    backend = Wrong
    device = "cpu"
    expected_failures = {expected}
"""


def test_a_failure_shows_the_message_of_the_check(tmp_path):
    run = Run(tmp_path, WRONG.format(expected={}), "-k", "test_shrink and bf16")
    assert run.outcomes == {"failed": 4}
    assert run.code == 1
    for words in ("backend 'wrong' fails shrink[bf16-", "clause V1:", "usual cause:"):
        assert words in run.text


def test_expected_failures_are_expected(tmp_path):
    run = Run(
        tmp_path,
        WRONG.format(expected={"shrink": "doubled on purpose"}),
        "-k",
        "test_shrink and bf16",
    )
    assert run.outcomes == {"xfailed": 4}
    assert run.code == 0


def test_an_expected_failure_that_passes_fails(tmp_path):
    run = Run(
        tmp_path,
        WRONG.format(expected={"linear": "not wrong at all"}),
        "-k",
        "test_linear and ones and fp32",
    )
    assert run.outcomes == {"failed": 1}
    assert "passes but is expected to fail (not wrong at all)" in run.text


def test_an_expected_failure_that_names_nothing_is_an_error(tmp_path):
    run = Run(tmp_path, WRONG.format(expected={"shrimp": "misspelt"}))
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert "expected_failures names 'shrimp'" in run.text


def test_checks_newer_than_the_declared_contract_are_previews(tmp_path):
    older = WRONG.format(expected={}).replace('"wrong"\n', '"wrong"\n    contract = "0.9"\n')
    run = Run(tmp_path, older, "-k", "test_shrink and bf16")
    assert run.outcomes == {"xfailed": 4}
    assert run.code == 0


def test_missing_hardware_is_a_skip_or_with_the_option_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    source = AUTHOR.replace('"cpu"', '"cuda"')
    assert Run(tmp_path, source, "-k", "test_linear or test_scales").outcomes == {"skipped": 2}
    required = Run(
        tmp_path, source, "-k", "test_linear or test_scales", "--lora-require-device", "cuda"
    )
    assert required.outcomes == {"failed": 2}
    assert "torch sees no CUDA device" in required.text


def test_levels(tmp_path):
    counts = [
        len(Run(tmp_path, AUTHOR, "--collect-only", "--lora-level", level).ids) for level in LEVELS
    ]
    assert counts == sorted(set(counts))


def test_a_class_without_a_backend_says_so(tmp_path):
    assert (
        "TestMine does not set `backend`"
        in Run(tmp_path, AUTHOR.replace('    backend = "torch"\n', "")).text
    )


@pytest.mark.parametrize(
    "module", ["lora_core.testing.pytest_plugin", "lora_core.testing", "lora_core"]
)
def test_the_entry_point_imports_neither_torch_nor_pydantic(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'pydantic', 'pluggy', 'numpy'}} & set(sys.modules)))"
    if module.endswith("plugin"):  # pytest itself brings pluggy
        code = code.replace("'pluggy', ", "")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_pytest_run_that_does_not_use_the_suite_does_not_import_it(tmp_path):
    (tmp_path / "test_light.py").write_text(
        "import sys\ndef test_light():\n    assert not {'torch', 'pydantic'} & set(sys.modules)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_every_module_with_asserts_is_rewritten():
    from pathlib import Path

    from lora_core.testing import pytest_plugin

    folder = Path(pytest_plugin.__file__).parent
    asserting = {
        path.stem
        for path in folder.glob("*.py")
        if "\n    assert " in path.read_text() or "\n        assert " in path.read_text()
    }
    assert asserting <= set(pytest_plugin._MODULES)
