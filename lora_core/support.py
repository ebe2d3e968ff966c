"""`python -m lora_core.support REPORTS`: docs/support.md, from claims and from what was run.

The claims are those of the installed backends; REPORTS is a folder of what `lora-core check --json`
wrote.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from lora_core.capabilities import DTypeName
from lora_core.plugins import Family, registry

_HEADER = """\
# Support

What each backend claims, as it says itself, and what the conformance suite found where it was last run. The suite tests every claim over its whole range, and that everything else is refused. Written by `python -m lora_core.support docs/results > docs/support.md`; a test compares.

The tables of runs count the checks that passed, of those that the level has; checks whose case has no dtype are counted apart. **Not run** says that no report covers a device or a dtype that the backend claims: nobody has shown that it works there. A report tells about its own commit and versions, not about later ones. On a CPU the kernels of backends that claim only CUDA run in Triton's interpreter, whose bfloat16 is wrong and therefore left to GPUs.
"""
_TITLES: dict[Family, str] = {"dense": "Dense", "moe": "Experts"}
_FIELDS: dict[Family, tuple[str, ...]] = {
    "dense": ("ops", "dtypes", "device_types", "graphs", "max_rank", "max_slices", "batch_invariant", "deterministic"),
    "moe": ("dtypes", "device_types", "graphs", "max_rank", "max_slices", "deterministic"),
}  # fmt: skip
_DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)
_IN_IDS = {name: name for name in _DTYPES} | dict(zip(("fp32", "fp16", "bf16"), _DTYPES, strict=True))  # fmt: skip
_NOT_RUN = "**not run**"
_NOT_CLAIMED = "no claim"

Report = dict[str, Any]


def page(reports: Path) -> str:
    """The text of docs/support.md.

    Args:
        reports: a folder of `conformance-*.json`, as `lora-core check --json` writes them.

    Raises:
        ValueError: a report of a backend that is not installed.
    """
    found: dict[Family, list[Report]] = {"dense": [], "moe": []}
    for path in sorted(reports.glob("conformance-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        found[_family(path, report)].append(report)
    lines = [_HEADER]
    for family, title in _TITLES.items():
        claims = _claims(family)
        lines += [f"## {title}", "", *_claimed(family, claims), ""]
        lines += [f"### {title}: what was run", "", *_run(claims, found[family]), ""]
    return "\n".join(lines)


def _claims(family: Family) -> dict[str, Any]:
    """Capabilities by name of backend."""
    claims = {}
    for name, (found, *_) in sorted(registry().found[family].items()):
        module, _, attribute = found.spec.target.partition(":")
        claims[name] = getattr(import_module(module), attribute).capabilities
    return claims


def _family(path: Path, report: Report) -> Family:
    """Whose checks a report has: one name may stand for a dense backend and for one of experts."""
    from lora_core.testing.moe_family import MOE

    ids = _ids(report)
    family: Family = "moe" if ids and ids[0].partition("[")[0] in MOE.checks else "dense"
    if report["backend"] not in registry().found[family]:
        raise ValueError(f"{path} is a report of {report['backend']!r}, which is not installed")
    return family


def _claimed(family: Family, claims: dict[str, Any]) -> Iterator[str]:
    yield f"| | {' | '.join(f'`{name}`' for name in claims)} |"
    yield "|---" * (len(claims) + 1) + "|"
    for field in _FIELDS[family]:
        cells = " | ".join(_cell(getattr(claimed, field)) for claimed in claims.values())
        yield f"| {field.replace('_', ' ')} | {cells} |"


def _run(claims: dict[str, Any], reports: Sequence[Report]) -> Iterator[str]:
    """A row per backend and device, claimed or reported; then whatever did not pass, by id."""
    yield f"| backend | device | level | {' | '.join(_DTYPES)} | without dtype | commit | versions |"
    yield "|---" * (len(_DTYPES) + 6) + "|"
    for name, claimed in claims.items():
        own = [report for report in reports if report["backend"] == name]
        for report in own:
            yield _row(report, claimed)
        for device in sorted(claimed.device_types - {_device_type(report) for report in own}):
            cells = [_NOT_RUN if dtype in claimed.dtypes else _NOT_CLAIMED for dtype in _DTYPES]
            yield f"| `{name}` | {device} | {_NOT_RUN} | {' | '.join(cells)} | {_NOT_RUN} | | |"
    for report in reports:
        where = f"`{report['backend']}`, {report['device']}"
        for kind, told in (("failed", "failed"), ("previews_failed", "failed as a preview")):
            for result in report[kind]:
                yield f"\n- {where}: `{result['id']}` **{told}**."
        for result in report["expected_failures"]:
            yield f"\n- {where}: `{result['id']}` is expected to fail: {result['reason']}."


def _row(report: Report, claimed: Any) -> str:
    versions = report["versions"]
    told = f"torch {versions['torch']}, Triton {versions['triton']}, Python {versions['python']}"
    device = report["device"]
    if _device_type(report) not in claimed.device_types:
        device += ", Triton's interpreter"
    cells = [
        _counted(report, dtype) or (_NOT_RUN if dtype in claimed.dtypes else _NOT_CLAIMED)
        for dtype in _DTYPES
    ]
    return (
        f"| `{report['backend']}` | {device} | {report['level']} | {' | '.join(cells)} | "
        f"{_counted(report, None) or _NOT_RUN} | {report['commit'] or 'not told'} | {told} |"
    )


def _counted(report: Report, dtype: str | None) -> str:
    """Such as "240 of 242, **1 failed**, 1 not run"; empty if no check of this dtype ran."""
    passed, failed, missing = (
        sum(_dtype(_id(result)) == dtype for result in report[kind])
        for kind in ("passed", "failed", "not_run_for_hardware")
    )
    rest = sum(
        _dtype(_id(result)) == dtype
        for kind in ("expected_failures", "previews_failed")
        for result in report[kind]
    )
    if not passed + failed + rest:
        return ""
    told = f"{passed} of {passed + failed + missing + rest}"
    told += f", **{failed} failed**" if failed else ""
    told += f", {missing} not run" if missing else ""
    return told + (f", {rest} known to fail" if rest else "")


def _ids(report: Report) -> list[str]:
    kinds = ("passed", "failed", "not_run_for_hardware", "expected_failures", "previews_failed")
    return [_id(result) for kind in kinds for result in report[kind]]


def _id(result: str | dict[str, str]) -> str:
    return result if isinstance(result, str) else result["id"]


def _dtype(check: str) -> str | None:
    """The dtype that an id such as `linear[bf16-r8-K100-N64-seg(2)-slot(0)]` carries, or None."""
    parts = re.split(r"[\[\]-]", check)
    return next((_IN_IDS[part] for part in parts if part in _IN_IDS), None)


def _device_type(report: Report) -> str:
    return re.split(r"[ :]", report["device"], maxsplit=1)[0]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "no limit"
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    return str(value)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lora_core.support REPORTS > docs/support.md")
    sys.stdout.write(page(Path(sys.argv[1])))
