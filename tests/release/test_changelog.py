"""Changelog fragments: names that towncrier knows, something in each, and a place where they go."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import lora_core

REPOSITORY = Path(__file__).parents[2]
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "towncrier"
]
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")


def test_kinds_are_those_of_keep_a_changelog_and_are_documented():
    assert tuple(SETTINGS["fragment"]) == KINDS
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "`+what.added.md`, or `changed`, `deprecated`, `removed`, `fixed`, `security`" in page


def test_every_fragment_has_a_name_of_its_kind_and_a_sentence():
    for path in (REPOSITORY / SETTINGS["directory"]).glob("*"):
        assert re.fullmatch(rf"\+[a-z0-9-]+\.({'|'.join(KINDS)})\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip().endswith("."), path.name


def test_fragments_go_below_the_marker_and_above_the_last_release():
    text = (REPOSITORY / SETTINGS["filename"]).read_text(encoding="utf-8")
    before, after = text.split(SETTINGS["start_string"])
    assert "## [" not in before
    assert re.findall(r"^## \[(.+?)\]", after, re.MULTILINE)[0] == lora_core.__version__


def test_make_check_parses_them():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    check = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert "towncrier build --draft" in check
    assert SETTINGS["ignore"] == []  # anything else in the folder fails there
