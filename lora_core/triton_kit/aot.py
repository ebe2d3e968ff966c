"""Compile kernels for GPUs that are not there, and bound what they use.

    python -m lora_core.triton_kit.aot [--arch sm80 --arch sm90] [--only TEXT] [--json FILE]

Takes the cases of every installed plugin: an entry point of the group `lora_core.triton_aot` names a
function that returns a list of `AotCase`. Prints registers, stack (spills) and shared memory per
case and architecture, and fails when one exceeds its bounds or does not compile. This finds what the
interpreter cannot: shared memory over the limit, shapes that are not constant, spills.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_core.triton_kit.launch import FIXED_OPTIONS

ENTRY_POINT_GROUP = "lora_core.triton_aot"


@dataclass(frozen=True, slots=True)
class Arch:
    """A compile target and its limit."""

    target: GPUTarget
    max_shared: int  # bytes one block may use


ARCHS: dict[str, Arch] = {
    "sm80": Arch(GPUTarget("cuda", 80, 32), 166_912),
    "sm90": Arch(GPUTarget("cuda", 90, 32), 232_448),
    "sm100": Arch(GPUTarget("cuda", 100, 32), 232_448),
    "gfx942": Arch(GPUTarget("hip", "gfx942", 64), 65_536),
}
DEFAULT_ARCHS = ("sm80", "sm90", "sm100")


@dataclass(frozen=True, kw_only=True)
class AotCase:
    """One kernel as it is launched with one tile.

    Attributes:
        label: for the table, such as "shrink[bf16 rows16 BC32]".
        kernel: the `@triton.jit` function.
        types: run-time parameter -> Triton type ("*bf16", "i32", "i64", "fp32").
        constexprs: constexpr parameter -> value.
        options: `num_warps`, `num_stages`, ...
        unaligned: parameters that are not divisible by 16; all other pointers and integers are.
        ones: integer parameters whose value is 1.
        archs: restrict to these; None: all that are asked for.
        max_registers: bound per thread.
        max_stack: bound in bytes per thread; what the compiler spills shows up here.
    """

    label: str
    kernel: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    unaligned: frozenset[str] = frozenset()
    ones: frozenset[str] = frozenset()
    archs: frozenset[str] | None = None
    max_registers: int = 255
    max_stack: int = 0


@dataclass(frozen=True, slots=True)
class AotResult:
    """What one compiled case uses; `problem` is None when it is within its bounds.

    Registers and stack are -1 where the target has no tool to read them.
    """

    label: str
    arch: str
    registers: int
    stack: int
    shared: int
    problem: str | None


def compile_case(case: AotCase, arch: str) -> AotResult:
    """Compile one case for one architecture and hold it against its bounds."""
    limits, source = ARCHS[arch], _source(case)
    try:
        compiled = triton.compile(
            source, target=limits.target, options={**FIXED_OPTIONS, **case.options}
        )
    except Exception as error:  # noqa: BLE001 - any compiler failure is a finding
        lines = str(error).strip().splitlines() or [""]
        return AotResult(case.label, arch, -1, -1, -1, f"{type(error).__name__}: {lines[-1]}")
    shared = compiled.metadata.shared
    registers, stack = _resources(compiled.asm["cubin"]) if "cubin" in compiled.asm else (-1, -1)
    problems = [
        f"{what} {found} > {bound}"
        for what, found, bound in (
            ("registers", registers, case.max_registers),
            ("stack", stack, case.max_stack),
            ("shared", shared, limits.max_shared),
        )
        if found > bound
    ]
    return AotResult(case.label, arch, registers, stack, shared, ", ".join(problems) or None)


def _source(case: AotCase) -> ASTSource:
    names = list(case.kernel.arg_names)
    constexprs = {**case.constexprs, **dict.fromkeys(case.ones, 1)}
    unknown = (set(case.types) | set(case.constexprs) | case.unaligned | case.ones) - set(names)
    missing = set(names) - set(case.types) - set(case.constexprs)
    if unknown or missing:
        raise ValueError(
            f"{case.label}: unknown parameters {sorted(unknown)}, missing {sorted(missing)}"
        )
    signature = {name: "constexpr" if name in constexprs else case.types[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constexprs
        and name not in case.unaligned
        and not signature[name].startswith("fp")
    }
    return ASTSource(case.kernel, signature=signature, constexprs=constexprs, attrs=aligned)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, stack bytes per thread) from the cuobjdump that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(  # noqa: S603 - a fixed tool on a file of our own
            [str(tool), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resources: {report!r}")
    return int(found[1]), int(found[2])


def installed_cases() -> list[AotCase]:
    """The cases of every installed plugin, by entry point name."""
    cases: list[AotCase] = []
    for entry in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        cases.extend(entry.load()())
    return cases


def run(cases: Iterable[AotCase], archs: Sequence[str]) -> list[AotResult]:
    """Compile every case for every architecture, printing one line each."""
    results = []
    for case in cases:
        for arch in archs:
            if case.archs is not None and arch not in case.archs:
                continue
            result = compile_case(case, arch)
            print(  # noqa: T201 - a command
                f"{result.arch:7s} reg {result.registers:4d} stack {result.stack:4d} "
                f"shared {result.shared:7d}  {result.label}"
                + (f"  FAILED: {result.problem}" if result.problem else ""),
                flush=True,
            )
            results.append(result)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when everything compiled within its bounds."""
    parser = argparse.ArgumentParser(
        prog="python -m lora_core.triton_kit.aot", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=sorted(ARCHS),
        help="default: " + ", ".join(DEFAULT_ARCHS),
    )
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    cases = [case for case in installed_cases() if options.only in case.label]
    if not cases:
        parser.error(
            f"no installed plugin offers a case with {options.only!r} in the group {ENTRY_POINT_GROUP!r}"
        )
    results = run(cases, options.arch or DEFAULT_ARCHS)
    failed = [result for result in results if result.problem]
    print(  # noqa: T201 - a command
        f"triton {triton.__version__}: {len(results)} compiled, {len(failed)} outside their bounds"
    )
    if options.json:
        rows = [{name: getattr(result, name) for name in AotResult.__slots__} for result in results]
        options.json.write_text(
            json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
