"""The command `lora-core`. What goes wrong is said in one line on standard error, with exit code 2."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lora_core.errors import LoRACoreError

if TYPE_CHECKING:
    from torch import nn

LEVELS = ("smoke", "standard", "large")


class CommandError(Exception):
    """The command line, or a file that it names, asks for something that cannot be."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 where checks failed, or 2 after an error."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.ERROR,
        format="%(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        code: int = options.run(options)
    except (CommandError, LoRACoreError, OSError, ValueError, ImportError) as error:
        if options.verbose:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"lora-core {options.command}: error: {message}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lora-core", description="Many LoRA adapters in one batch.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log, and show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(name: str, run: Callable[[Any], int], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run)
        return added

    generate = command(
        "generate", _generate, "answer prompts, each with its own adapter, in one batch"
    )
    generate.add_argument(
        "--model", required=True, type=Path, help="a Hugging Face folder, or a GGUF file"
    )
    generate.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="a PEFT folder; repeatable",
    )
    generate.add_argument(
        "--prompts", required=True, type=Path, metavar="FILE.jsonl",
        help='lines of {"prompt": TEXT, "adapter": NAME}; no adapter, or null, is the base model',
    )  # fmt: skip
    generate.add_argument("--backend", help="see `lora-core backends`; default: the best available")
    generate.add_argument("--device", default="cpu", help="such as cpu or cuda (default: cpu)")
    generate.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N")
    generate.add_argument(
        "--batch-size", type=_positive, default=32, metavar="N", help="prompts at once"
    )
    generate.add_argument(
        "--raw", action="store_true", help="do not apply the model's chat template"
    )
    generate.add_argument("--json", action="store_true", help="JSON lines, also on a terminal")

    backends = command(
        "backends", _backends, "list what is installed, and what cannot run here and why"
    )
    backends.add_argument("--device", help="ask about this device")
    backends.add_argument("--json", action="store_true")

    doctor = command(
        "doctor", _doctor, "versions, devices and plugins: what is wrong, and what to do about it"
    )
    doctor.add_argument("--device", help="ask about this device")
    doctor.add_argument("--json", action="store_true")

    trace = command("trace", _trace, "discovery step by step: imports, hook calls, answers, times")
    trace.add_argument("--json", action="store_true")

    new = command(
        "new-backend", _new_backend, "write a distribution that passes the suite as it is"
    )
    new.add_argument("name", help="what load_backend shall be given, such as my_kernels")
    new.add_argument(
        "--ops", default="linear", metavar="OPS",
        help="comma-separated: linear, embedding, lm_head, moe (default: linear)",
    )  # fmt: skip
    new.add_argument("--kernel", choices=("torch", "triton"), default="torch")
    new.add_argument("--directory", type=Path, metavar="DIR", help="default: lora-core-NAME")

    inspect = command(
        "inspect", _inspect, "show an adapter: modules, ranks, scales, what would be refused"
    )
    inspect.add_argument("folder", type=Path, metavar="DIR")
    inspect.add_argument("--json", action="store_true")

    check = command("check", _check, "run the conformance suite on an installed backend")
    check.add_argument("name", help="of the backend")
    check.add_argument(
        "--family", choices=("dense", "moe"), help="where a name is of both; default: dense"
    )
    check.add_argument("--device")
    check.add_argument("--level", choices=LEVELS, default="smoke")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    check.add_argument(
        "--require-device", metavar="TYPE", help="count missing hardware as a failure"
    )
    check.add_argument(
        "--jobs", type=_positive, default=1, help="processes; kernels compile side by side"
    )
    check.add_argument("--commit", help="what is tested, for the report")
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number


# -- generate ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One line of the prompts file."""

    text: str
    adapter: str | None


def read_prompts(path: Path, adapters: Sequence[str]) -> list[Prompt]:
    """The prompts of a JSON Lines file.

    Raises:
        CommandError: a line that is not what it should be; the message has its number.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise CommandError(f"{where} is no JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise CommandError(f'{where} needs a text "prompt", got {line.strip()[:80]}')
        unknown = sorted(set(entry) - {"prompt", "adapter"})
        if unknown:
            raise CommandError(f"{where} has {', '.join(unknown)}: known are prompt and adapter")
        adapter = entry.get("adapter")
        if adapter is not None and adapter not in adapters:
            raise CommandError(
                f"{where} asks for adapter {adapter!r}: given are {', '.join(adapters) or 'none'} (--adapter NAME=DIR)"
            )
        prompts.append(Prompt(entry["prompt"], adapter))
    if not prompts:
        raise CommandError(f"{path} holds no prompts")
    return prompts


def read_adapters(given: Sequence[str]) -> dict[str, Path]:
    """`NAME=DIR` arguments by name.

    Raises:
        CommandError: not of that form, or a name given twice.
    """
    folders: dict[str, Path] = {}
    for argument in given:
        name, equals, folder = argument.partition("=")
        if not (name and equals and folder):
            raise CommandError(f"--adapter {argument!r} is not of the form NAME=DIR")
        if name in folders:
            raise CommandError(f"--adapter names {name!r} twice: {folders[name]} and {folder}")
        folders[name] = Path(folder)
    return folders


def _generate(options: argparse.Namespace) -> int:
    from lora_core.adapters.summary import summarise

    folders = read_adapters(options.adapter)
    prompts = read_prompts(options.prompts, list(folders))
    ranks = [module.rank for folder in folders.values() for module in summarise(folder).modules]
    _need("transformers", "transformers")
    import torch

    from lora_core.integrations.transformers import attach

    model, tokenizer = _load_model(options.model, options.device)
    manager = attach(
        model,
        options.backend,
        max_loras=max(1, len(folders)),
        max_rank=max((rank for rank in ranks if rank), default=1),
    )
    for name, folder in folders.items():
        manager.load_adapter(name, folder)
    show = _Answers(json_lines=options.json or not sys.stdout.isatty())
    with torch.inference_mode():
        for start in range(0, len(prompts), options.batch_size):
            batch = prompts[start : start + options.batch_size]
            for prompt, answer in zip(
                batch, _answer(model, tokenizer, batch, options), strict=True
            ):
                show.add(prompt, answer)
    show.finish()
    return 0


def _load_model(path: Path, device: str) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, from a folder or a GGUF file."""
    import transformers

    output: Any = transformers.utils.logging
    output.set_verbosity_error()
    output.disable_progress_bar()
    if path.is_dir():
        folder, extra = path, {}
    elif path.is_file():
        _need("gguf", "gguf")
        folder, extra = path.parent, {"gguf_file": path.name}
    else:
        raise CommandError(
            f"--model {path} does not exist: give a Hugging Face folder or a GGUF file"
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **extra)
    dtype = "auto" if not extra else None  # a GGUF file is dequantised to float32
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, **extra
    )
    return model.to(device).eval(), tokenizer


def _answer(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: argparse.Namespace
) -> Iterator[str]:
    texts = [prompt.text for prompt in prompts]
    if tokenizer.chat_template and not options.raw:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    ends = model.generation_config.eos_token_id
    pad = model.generation_config.pad_token_id
    if pad is None:
        pad = ends[0] if isinstance(ends, list) else ends
    if pad is None:
        pad = tokenizer.eos_token_id or 0
    rows = [tokenizer(text)["input_ids"] for text in texts]
    # on the left, so that every row ends where its answer begins
    longest = max(1, *(len(row) for row in rows))
    import torch

    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device
    )
    tokens = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
        adapter_names=[prompt.adapter for prompt in prompts],
    )
    yield from tokenizer.batch_decode(tokens[:, longest:], skip_special_tokens=True)


class _Answers:
    """Prints answers: as JSON lines at once, or as a table at the end."""

    def __init__(self, *, json_lines: bool) -> None:
        self.json_lines = json_lines
        self.rows: list[tuple[Prompt, str]] = []

    def add(self, prompt: Prompt, answer: str) -> None:
        if self.json_lines:
            entry = {"prompt": prompt.text, "adapter": prompt.adapter, "answer": answer}
            print(json.dumps(entry, ensure_ascii=False), flush=True)
        else:
            self.rows.append((prompt, answer))

    def finish(self) -> None:
        if not self.json_lines:
            _table(
                ("prompt", "adapter", "answer"),
                [(prompt.text, prompt.adapter or "", answer) for prompt, answer in self.rows],
            )


# -- the others --------------------------------------------------------------------------------------


def _backends(options: argparse.Namespace) -> int:
    from lora_core.plugins import describe

    found = describe(device=options.device)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    _table(
        ("name", "family", "priority", "from", "here", "summary"),
        [
            (
                entry["name"],
                entry["family"],
                str(entry["priority"]),
                entry["distribution"],
                entry["reason"] or "available",
                entry["summary"],
            )
            for entry in found["backends"]
        ],
    )
    for label, reason in found["failed"].items():
        print(f"failed to load: {label}: {reason}")
    for name in found["disabled"]:
        print(f"switched off by LORA_CORE_DISABLE: {name}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from lora_core.doctor import examine

    report = examine(device=options.device)
    print(json.dumps(report.as_json(), indent=2) if options.json else report)
    return 0 if report.ok else 1


def _trace(options: argparse.Namespace) -> int:
    from lora_core.doctor import trace

    calls = trace()
    if options.json:
        print(json.dumps(calls, indent=2))
        return 0
    _table(
        ("plugin", "step", "ms", "result"),
        [
            (call["plugin"], call["step"], f"{1e3 * call['seconds']:.1f}", call["result"])
            for call in calls
        ],
    )
    return 0


def _new_backend(options: argparse.Namespace) -> int:
    from lora_core.scaffold.generate import new_backend

    ops = [op.strip() for op in options.ops.split(",") if op.strip()]
    folder = new_backend(options.name, ops=ops, kernel=options.kernel, directory=options.directory)
    print(
        f"{folder}: a backend that passes the suite. Next:\n\n"
        f"  cd {folder}\n  pip install --editable '.[testing]'\n  pytest\n\n"
        "README.md says which function to replace."
    )
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from lora_core.adapters.summary import summarise

    summary = summarise(options.folder)
    if options.json:
        print(
            json.dumps(
                {
                    "folder": summary.where,
                    "bytes": summary.nbytes,
                    "refused": summary.refused,
                    "notes": summary.notes,
                    "modules": [
                        {
                            "name": module.name,
                            "rank": module.rank,
                            "scaling": module.scaling,
                            "shape": module.shape,
                            "extras": module.extras,
                        }
                        for module in summary.modules
                    ],
                },
                indent=2,
            )
        )
        return 0
    print(f"{summary.where}: {len(summary.modules)} modules, {summary.nbytes / 1e6:.1f} MB")
    _table(
        ("module", "rank", "scale", "outputs x inputs", "besides"),
        [
            (
                module.name,
                "" if module.rank is None else str(module.rank),
                "" if module.scaling is None else f"{module.scaling:g}",
                "" if module.shape is None else f"{module.shape[0]} x {module.shape[1]}",
                ", ".join(module.extras),
            )
            for module in summary.modules
        ],
    )
    for note in summary.notes:
        print(f"note: {note}")
    for reason in summary.refused:
        print(f"would be refused: {reason}")
    return 0


def _check(options: argparse.Namespace) -> int:
    _need("hypothesis", "testing")
    from lora_core.testing.runner import run_check

    return run_check(
        options.name,
        family=options.family,
        device=options.device,
        level=options.level,
        json_path=options.json,
        require_device=options.require_device,
        jobs=options.jobs,
        commit=options.commit,
    )


# -- helpers -----------------------------------------------------------------------------------------


def _need(module: str, extra: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise CommandError(f"this needs {module}: pip install 'lora-core[{extra}]'")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table by rich on a terminal, else columns of plain text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(show_lines=max((len(row[-1]) for row in rows), default=0) > 60)
            for name in header:
                table.add_column(name)
            for row in rows:
                table.add_row(*(Text(cell) for cell in row))
            Console().print(table)
            return
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join([*cells, line[-1]]).rstrip())


if __name__ == "__main__":
    sys.exit(main())
