"""docs/versioning.md, executed: contract versions, deprecations, what generated plugins require."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import lora_core
from lora_core import contract, deprecations
from lora_core.errors import ContractError
from lora_core.scaffold.generate import new_backend

PAGE = (Path(__file__).parents[2] / "docs" / "versioning.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| ([\d., ]+) \| (accepted|refused)", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("versions", "outcome"), TABLE)
def test_contract_versions_are_taken_as_the_page_says(monkeypatch, versions, outcome):
    monkeypatch.setattr(contract, "CONTRACT_VERSION", "1.2")
    for version in versions.split(", "):
        if outcome == "accepted":
            contract.check_supported("backend 'mine'", version)
        else:
            with pytest.raises(ContractError, match=f"backend 'mine' declares contract {version}"):
                contract.check_supported("backend 'mine'", version)


def test_the_page_has_every_kind_of_version():
    assert [outcome for _, outcome in TABLE] == ["accepted", "refused", "refused"]


def test_a_backend_of_an_older_contract_is_loaded_and_new_checks_cannot_fail_it(monkeypatch):
    from lora_core.testing import Subject, engine
    from lora_core.testing.dense_family import DENSE

    monkeypatch.setattr(contract, "CONTRACT_VERSION", "1.7")
    subject = Subject("torch")
    assert subject.contract == "1.0"
    check = next(iter(DENSE.checks.values()))
    assert not engine.is_preview(check, subject)
    assert engine.is_preview(dataclasses.replace(check, since="1.7"), subject)


def test_a_name_that_moved_still_works_and_says_what_to_use(monkeypatch):
    entry = deprecations.Deprecated(since="0.2", instead="LoRABatch")
    monkeypatch.setitem(deprecations.DEPRECATED, "Batch", entry)
    with pytest.warns(DeprecationWarning, match=r"lora_core\.Batch is deprecated since 0\.2: use lora_core\.LoRABatch"):  # fmt: skip
        assert lora_core.Batch is lora_core.LoRABatch
    with pytest.raises(AttributeError, match="has no attribute 'Botch'"):
        _ = lora_core.Botch


def test_every_deprecation_leads_to_a_public_name():
    for name, entry in deprecations.DEPRECATED.items():
        assert entry.instead in lora_core.__all__
        assert name not in lora_core.__all__
        assert re.fullmatch(r"\d+\.\d+", entry.since)


def test_the_page_has_every_environment_variable():
    package = Path(lora_core.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    variables = re.compile(r"\bLORA_CORE_[A-Z_]*[A-Z]\b")
    assert set(variables.findall(PAGE)) == set(variables.findall(source))


def test_generated_plugins_require_what_the_page_says(tmp_path):
    folder = new_backend("mine", directory=tmp_path / "mine")
    assert '"lora-core>=0.1,<0.2"' in (folder / "pyproject.toml").read_text()
    assert "`lora-core>=0.1,<0.2`" in PAGE
