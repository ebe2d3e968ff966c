"""The file of results says what pytest said."""

from __future__ import annotations

import json

from tests.distributed import report

XML = """<testsuites><testsuite>
<testcase classname="tests.distributed.test_graphs" name="test_two_lanes[nccl-triton]" time="1.256">
<properties><property name="world" value="2"/><property name="transport" value="nccl"/>
<property name="backend" value="triton"/></properties></testcase>
<testcase classname="tests.distributed.test_forwards" name="test_x[nccl-torch]" time="2">
<properties><property name="world" value="2"/><property name="transport" value="nccl"/>
<property name="backend" value="torch"/></properties><failure message="it broke">text</failure></testcase>
</testsuite></testsuites>"""


def test_rows_outcomes_and_exit_code(tmp_path, capsys):
    (tmp_path / "a.xml").write_text(XML)
    out = tmp_path / "out.json"
    assert report.main([str(tmp_path / "a.xml"), "--out", str(out), "--commit", "abc"]) == 1
    result = json.loads(out.read_text())
    assert result["commit"] == "abc"
    assert result["versions"]["torch"]
    assert result["rows"] == [
        {
            "test": "test_forwards::test_x[nccl-torch]",
            "world": 2,
            "transport": "nccl",
            "backend": "torch",
            "outcome": "failed",
            "seconds": 2.0,
            "message": "it broke",
        },
        {
            "test": "test_graphs::test_two_lanes[nccl-triton]",
            "world": 2,
            "transport": "nccl",
            "backend": "triton",
            "outcome": "passed",
            "seconds": 1.26,
        },
    ]
    assert "failed: test_forwards::test_x[nccl-torch]: it broke" in capsys.readouterr().out


def test_a_run_that_did_not_end_is_no_success(tmp_path, capsys):
    passed = XML.replace('<failure message="it broke">text</failure>', "")
    (tmp_path / "a.xml").write_text(passed)
    out = ["--out", str(tmp_path / "out.json")]
    assert report.main([str(tmp_path / "a.xml"), *out]) == 0
    assert report.main([str(tmp_path / "a.xml"), str(tmp_path / "b.xml"), *out]) == 1
    assert "b.xml: that run did not end" in capsys.readouterr().out


def test_an_interrupted_test_did_not_pass(tmp_path):
    cut = XML.replace("</testsuite></testsuites>", '<testcase time="0"/></testsuite></testsuites>')
    (tmp_path / "a.xml").write_text(cut)
    out = tmp_path / "out.json"
    assert report.main([str(tmp_path / "a.xml"), "--out", str(out)]) == 1
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 2
    assert result["unfinished"] == ["a.xml"]
