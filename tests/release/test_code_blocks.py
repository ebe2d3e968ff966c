"""Every block of code of every page: run by a test, or of a kind that says that it is not.

python   runs as it stands; `RUN_BY` says where
py       illustrates: it compiles, and what it imports from lora_core exists
bash     commands: those of this project exist and have the options that are given
toml     parses
text     output; also blocks without a kind, whose commands are looked at all the same
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lora_core.cli import _parser
from lora_core.testing import DenseCase, Subject
from lora_core.testing.dense_family import DENSE
from tests.release.pages import REPOSITORY, blocks, python

PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "examples/**/README.md")
    for path in REPOSITORY.glob(pattern)
)
HERE = "tests/release/test_code_blocks.py"
RUN_BY = {
    "README.md": HERE,
    "docs/adapters.md": "tests/manager/test_docs.py",
    "docs/conformance.md": HERE,
    "docs/csgmv.md": HERE,
    "docs/distributed.md": "tests/distributed/test_docs.py",
    "docs/engines.md": "tests/integrations/test_docs.py",
    "docs/experts.md": "tests/moe/test_docs.py",
    "docs/lifecycle.md": "tests/manager/test_docs.py",
    "docs/plugins.md": HERE,
    "docs/quickstart.md": "tests/release/test_quickstart.py",
    "docs/transformers.md": "tests/transformers/test_docs.py",
    "docs/triton_kit.md": HERE,
    "docs/tutorial.md": "tests/scaffold/test_tutorial.py",
    "plugins/csgmv_backend/README.md": HERE,
    "plugins/moe_virtual_experts/README.md": HERE,
    "plugins/triton_backend/README.md": HERE,
}
KINDS = {"python", "py", "bash", "toml", "text", ""}


def exec_all(page: str, codes: list[str], **given: object) -> dict:
    for code in codes:
        exec(compile(code, page, "exec"), given)
    return given


# -- every page ---------------------------------------------------------------------------------------


def test_every_kind_of_block_is_known():
    assert {page: {b.kind for b in blocks(page)} - KINDS for page in PAGES} == {
        page: set() for page in PAGES
    }


def test_every_page_with_python_is_run_by_a_test_that_names_it():
    assert sorted(RUN_BY) == [page for page in PAGES if python(page)]
    for page, test in RUN_BY.items():
        assert Path(page).name in (REPOSITORY / test).read_text(encoding="utf-8"), (page, test)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.kind == "py" for b in blocks(p))])
def test_illustrations_import_what_exists(page):
    for block in blocks(page):
        if block.kind == "py":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lora_core"):
                    module = importlib.import_module(str(node.module))
                    assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def test_toml_parses():
    parsed = [tomllib.loads(b.text) for page in PAGES for b in blocks(page) if b.kind == "toml"]
    assert len(parsed) >= 2


def commands() -> list[tuple[str, str]]:
    """Lines of commands in blocks, and commands inside of sentences, each with its page."""
    found = []
    for page in PAGES:
        lines = [
            line
            for block in blocks(page)
            if block.kind in {"bash", "text", ""}
            for line in block.text.replace("\\\n", " ").splitlines()
        ]
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        lines += re.findall(r"`((?:lora-core|make|python -m) [^`]+)`", text)
        found += [(page, line) for line in lines]
    return found


def words(line: str, name: str) -> list[str] | None:
    """Arguments of a command if a line has it; what stands in [brackets] or for a COMMAND has not."""
    match = re.match(rf"(?:[A-Z_]+=\S+ )*(?:\S*/)?{re.escape(name)} (.+)", line.strip())
    if match is None or "[" in match[1] or "COMMAND" in match[1]:
        return None
    return shlex.split(re.split(r" [>|&]+ |;", match[1])[0], comments=True)


def test_commands_of_lora_core_exist_and_take_the_options_that_are_given():
    seen = set()
    for page, line in commands():
        arguments = words(line, "lora-core")
        if arguments is not None:
            if len(arguments) == 1:  # named alone, its arguments left out
                assert f"'{arguments[0]}'" in str(_parser()._actions[-1].choices), (page, line)
            else:
                assert _parser().parse_args(arguments), (page, line)
            seen.add(arguments[0])
    assert {"new-backend", "check", "doctor", "backends", "generate", "inspect"} <= seen


def test_targets_of_make_exist():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    seen = set()
    for page, line in commands():
        for target in words(line, "make") or []:
            if "=" not in target:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), (page, line)
                seen.add(target)
    assert {"demo", "test", "check", "docs", "gpu"} <= seen | {"docs"}


def test_modules_that_are_run_exist():
    seen = set()
    for page, line in commands():
        arguments = words(line, "python -m")
        if arguments and arguments[0].split(".")[0] in {"lora_core", "benchmarks"}:
            assert find_spec(arguments[0]), (page, line)
            seen.add(arguments[0])
    assert {"lora_core.support", "lora_core.triton_kit.aot", "benchmarks"} <= seen


# -- pages that no other test runs --------------------------------------------------------------------


def test_conformance_page():
    seen = exec_all("docs/conformance.md", python("docs/conformance.md"))
    subject = Subject("torch", device="cpu")
    ids = {i.id for level in ("smoke", "standard") for i in DENSE.plan(subject, level)}
    for key in seen["TestMine"].expected_failures:  # of the second class, which has some
        assert key in ids or key in DENSE.checks
    shown = DenseCase(
        (4, 0, 7), (0, -1, 1), ranks=(8,), K=100, widths=(64,), dtype="bfloat16"
    )  # what the page reads aloud
    page = (REPOSITORY / "docs/conformance.md").read_text(encoding="utf-8")
    assert f"TestMine::test_linear[{shown.id}]\n" in page


def test_readme_attaches(tmp_path, monkeypatch):
    from tests.transformers.tiny import make_adapter, make_model, peft_model, prompts

    model = make_model("llama", num_hidden_layers=1)
    folder = make_adapter(
        model, tmp_path / "examples/adapters/sql", seed=0, r=4, target_modules=["q_proj"]
    )
    expected = peft_model(model, folder)
    monkeypatch.chdir(tmp_path)
    attach, _, suite = python("README.md")
    rows = prompts(2)
    seen = exec_all("README.md", [attach], model=model, inputs={**rows, "max_new_tokens": 4})
    assert seen["manager"].adapters()
    with torch.inference_mode():
        logits = model(**rows, adapter_names=["sql", None]).logits
        torch.testing.assert_close(logits[0], expected(**rows).logits[0], rtol=1e-4, atol=1e-4)
    assert exec_all("README.md", [suite])["TestMine"].backend == "mine"


INTERPRETED = """
import torch
from tests.release.pages import python
from tests.release.test_code_blocks import RUN_BY, exec_all

for page in ("csgmv_backend", "moe_virtual_experts", "triton_backend"):
    page = f"plugins/{page}/README.md"
    print(*{type(v).name for v in exec_all(page, python(page)).values() if hasattr(type(v), "name")})
exec_all("docs/csgmv.md", python("docs/csgmv.md"))
print(exec_all("README.md", python("README.md")[1:2])["backend"].name)
print(exec_all("docs/plugins.md", python("docs/plugins.md"))["MyBackend"].name)

import kit

launch, x = python("docs/triton_kit.md")[1], torch.arange(4.0)
seen = exec_all("docs/triton_kit.md", python("docs/triton_kit.md")[:1], x=x)
print(seen["tile"])
exec_all("docs/triton_kit.md", [launch], Launch=kit.Launch, kernel=kit.kernel, programs=1, x=x,
         weights=torch.ones(4), rows=4, stride=1)
print(x.tolist())
"""
KIT = """
import triton.language as tl
import triton
from lora_core.triton_kit import Launch


@triton.jit
def kernel(x, weights, rows, stride, BM: tl.constexpr, BK: tl.constexpr):
    i = tl.arange(0, BM)
    old = tl.load(x + i * stride, mask=i < rows, other=0.0)
    tl.store(x + i * stride, old + tl.load(weights + i, mask=i < rows, other=0.0), mask=i < rows)
"""


def test_pages_whose_backends_need_a_gpu_or_the_interpreter(tmp_path):
    (tmp_path / "kit.py").write_text(KIT)
    path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [line for line in done.stdout.splitlines() if ": available" not in line]
    assert names[:5] == ["csgmv", "virtual_experts", "triton", "csgmv", "mine"]
    assert "'BM': 16" in names[5]
    assert names[6] == "[1.0, 2.0, 3.0, 4.0]"
