"""docs/contract.md, the table of clauses and the checks that cite them stay in step, both ways."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_core.errors import ContractError
from lora_core.testing import Family, Subject
from lora_core.testing.clauses import CLAUSES
from lora_core.testing.families import every_family

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


def _documented() -> list[tuple[str, str]]:
    return re.findall(
        r"^### ([A-Z]+\d+) · (.+)$", CONTRACT.read_text(encoding="utf-8"), re.MULTILINE
    )


def test_every_clause_is_documented_once_with_its_title() -> None:
    documented = _documented()
    assert len(documented) == len(dict(documented))
    assert dict(documented) == CLAUSES


def test_every_clause_is_cited_by_a_check() -> None:
    cited = {
        clause
        for family in every_family()
        for check in family.checks.values()
        for clause in check.clauses
    }
    assert cited == set(CLAUSES)


def test_every_clause_says_more_than_its_title() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    bodies = re.split(r"^#{2,3} .*$", text, flags=re.MULTILINE)[1:]
    titles = re.findall(r"^(#{2,3}) ", text, re.MULTILINE)
    assert [
        b for t, b in zip(titles, bodies, strict=True) if t == "###" and len(b.strip()) < 15
    ] == []


def test_every_check_says_what_it_demands_and_what_usually_breaks_it() -> None:
    checks = [check for family in every_family() for check in family.checks.values()]
    assert [
        check.name for check in checks if not check.summary.endswith(".") or not check.cause
    ] == []


def test_a_check_that_cites_no_clause_or_an_unknown_one_is_refused() -> None:
    family: Family[Subject] = Family("other", Subject, ())
    with pytest.raises(ContractError, match="cites clauses none"):
        family.check(cause="x")(lambda subject, case: None)
    with pytest.raises(ContractError, match="Q99"):
        family.check("Q99", cause="x")(lambda subject, case: None)
