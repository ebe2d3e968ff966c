"""Writes the distribution of a new backend."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Literal, get_args

from lora_core import __version__
from lora_core.errors import PluginError
from lora_core.plugins import registry
from lora_core.scaffold import templates

Kernel = Literal["torch", "triton"]
OPS = ("linear", "embedding", "lm_head", "moe")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def new_backend(
    name: str,
    *,
    ops: Sequence[str] = ("linear",),
    kernel: Kernel = "torch",
    directory: Path | None = None,
) -> Path:
    """Write a distribution that passes the conformance suite as it is.

    Args:
        name: what `load_backend` shall be given: lower case letters, digits, single underscores.
        ops: of `OPS`; embedding and lm_head come with linear.
        kernel: what the function to replace is written in.
        directory: to make; None is `lora-core-NAME` here.

    Returns:
        The directory.

    Raises:
        PluginError: a name that cannot be or is taken, unknown ops, or the directory exists.
    """
    folder = _checked(name, ops, kernel, directory)
    written = _files(name, frozenset(ops), kernel)
    for path, text in written.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


def _checked(name: str, ops: Sequence[str], kernel: str, directory: Path | None) -> Path:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PluginError(
            f"a backend cannot be named {name!r}: lower case letters, digits and single underscores, "
            "beginning with a letter, such as 'my_kernels'"
        )
    unknown = [op for op in ops if op not in OPS]
    if unknown or not ops:
        raise PluginError(
            f"--ops has {', '.join(unknown) or 'nothing'}: known are {', '.join(OPS)}"
        )
    if kernel not in get_args(Kernel):
        raise PluginError(f"--kernel {kernel!r} is none of {', '.join(get_args(Kernel))}")
    for claims in registry().found.values():
        if name in claims:
            owner = claims[name][0].distribution
            raise PluginError(
                f"{name!r} is taken by {owner}, and two backends of one name cannot both be loaded: "
                "choose another"
            )
    folder = directory if directory is not None else Path(f"lora-core-{name.replace('_', '-')}")
    if folder.exists():
        raise PluginError(f"{folder} exists: nothing is overwritten. Give another --directory")
    return folder


def _files(name: str, ops: frozenset[str], kernel: Kernel) -> dict[str, str]:
    """Path in the distribution -> text."""
    dense, moe = bool(ops - {"moe"}), "moe" in ops
    package = f"lora_core_{name}"
    stem = "".join(part.capitalize() for part in name.split("_"))
    common = {
        "name": name,
        "package": package,
        "distribution": package.replace("_", "-"),
        "Class": stem,
    }
    on_triton = kernel == "triton"
    claims = {
        "dtypes": 'frozenset({"float32", "float16", "bfloat16"})',
        "device_types": '{"cpu", "cuda"}',
        "backend_imports": f"from {package} import kernels\n",
    }
    if on_triton:
        claims["dtypes"] = (
            "frozenset(\n"
            '            {"float32", "float16"} if INTERPRETED else {"float32", "float16", "bfloat16"}\n'
            "        )"
        )
        claims["device_types"] = '{"cpu"} if INTERPRETED else {"cuda"}'
        claims["backend_imports"] = (
            f"from lora_core.triton_kit import INTERPRETED\n{claims['backend_imports']}"
        )

    def fill(template: str, **extra: str) -> str:
        return Template(template).substitute(common | extra)

    hooks, classes, suites = "", "", []
    files = {
        f"{package}/__init__.py": fill(templates.PACKAGE),
        f"{package}/py.typed": "",
    }
    if dense:
        hooks += fill(
            templates.HOOK, hook="lora_core_backends", summary="my kernels", module="backend",
            suffix="Backend",
        )  # fmt: skip
        claimed = ", ".join(f"Op.{op.upper()}" for op in OPS if op in {"linear", *ops} - {"moe"})
        files[f"{package}/backend.py"] = fill(
            templates.BACKEND, suffix="Backend", ops=claimed, **claims
        )
        files[f"{package}/kernels.py"] = fill(
            templates.KERNELS_TRITON if on_triton else templates.KERNELS_TORCH
        )
        suites.append("BackendConformance")
        classes += fill(
            templates.CONFORMANCE_CLASS, family="" if moe is False else "Dense", suite=suites[-1]
        )
    if moe:
        hooks += fill(
            templates.HOOK, hook="lora_core_moe_backends", summary="my expert kernels",
            module="moe", suffix="MoEBackend",
        )  # fmt: skip
        imports = claims["backend_imports"].replace(
            "import kernels", "import moe_kernels as kernels"
        )
        files[f"{package}/moe.py"] = fill(
            templates.MOE, suffix="MoEBackend", **(claims | {"backend_imports": imports})
        )
        files[f"{package}/moe_kernels.py"] = fill(
            templates.MOE_KERNELS_TRITON if on_triton else templates.MOE_KERNELS_TORCH
        )
        suites.append("MoEConformance")
        classes += fill(
            templates.CONFORMANCE_CLASS, family="MoE" if dense else "", suite=suites[-1]
        )
    files[f"{package}/plugin.py"] = fill(templates.PLUGIN, hooks=hooks)
    files["tests/test_conformance.py"] = fill(
        templates.CONFORMANCE, suites=", ".join(suites), classes=classes
    )
    if on_triton:
        files["tests/conftest.py"] = templates.CONFTEST_TRITON
    files["pyproject.toml"] = fill(
        templates.PYPROJECT, dependencies=_listed(_requirements(on_triton=on_triton))
    )
    files["README.md"] = (
        fill(
            templates.README,
            first_steps=templates.FIRST_STEPS + (fill(templates.WITHOUT_GPU) if on_triton else ""),
            functions=" and ".join(
                f"`{package}/{path}`"
                for path in ("kernels.py", "moe_kernels.py")
                if f"{package}/{path}" in files
            ),
        ).rstrip("\n")
        + "\n"
    )
    files[".github/workflows/ci.yml"] = templates.WORKFLOW
    files[".gitignore"] = templates.GITIGNORE
    return files


def _requirements(*, on_triton: bool) -> list[str]:
    """This release of lora_core up to the next that may break: before 1.0 that is the next minor."""
    major, minor, *_ = (int(part) for part in __version__.split("."))
    after = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}"
    core = "lora-core[triton]" if on_triton else "lora-core"
    return [f"{core}>={major}.{minor},<{after}", "torch", "typing-extensions"]


def _listed(requirements: Iterable[str]) -> str:
    return ", ".join(f'"{requirement}"' for requirement in requirements)
