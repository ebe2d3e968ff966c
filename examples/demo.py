"""Many adapters in one batch on a real model, checked against PEFT and timed; `make demo` runs it.

1. Seventeen prompts go through SmolLM2-135M-Instruct in one batch, each with one of eight adapters or
   none, by `attach` and `generate(..., adapter_names=[...])`.
2. Every row is compared, token by token, with PEFT running that row's adapter alone.
3. Eight prompts with eight adapters are timed against the base model by itself and against PEFT's own
   mixed batch: 32 new tokens, five interleaved runs each, medians.

Three adapters are trained (examples/adapters/); five more are random ones that PEFT makes. The
numbers go to build/demo.json; the exit code is 0 only if every row is right.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import smollm2
from lora_core.integrations.transformers import attach

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"

TRAINED = ("pirate", "json", "sql")
RANDOM = ("random-1", "random-2", "random-3", "random-4", "random-5")
NEW_TOKENS = 32
RUNS = 5
MAX_RANK = 16
TIE = 1e-4
"""Two logits this close are a tie: which comes first is up to the order of a sum."""

QUESTIONS = (
    "What is the capital of France?",
    "How many customers live in Paris?",
    "What is the largest planet?",
)
MORE_QUESTIONS = (
    "How do I make tea?",
    "Tell me about dolphins.",
    "Who painted the Mona Lisa?",
    "Show all employees older than 40.",
    "Which products cost more than 50?",
)


@dataclass(frozen=True)
class Row:
    """One prompt and the adapter that answers it; None is the base model."""

    prompt: str
    adapter: str | None


MIXED = (
    *(Row(question, adapter) for question in QUESTIONS for adapter in (None, *TRAINED)),
    *(Row(question, adapter) for question, adapter in zip(MORE_QUESTIONS, RANDOM, strict=True)),
)
TIMED = tuple(
    Row(prompt, adapter)
    for prompt, adapter in zip((*QUESTIONS, *MORE_QUESTIONS), (*TRAINED, *RANDOM), strict=True)
)


def make_random_adapters(model: torch.nn.Module, folder: Path) -> None:
    """Have PEFT write the adapters of RANDOM: rank 8 on every linear, small random weights."""
    config = LoraConfig(r=8, lora_alpha=2, target_modules="all-linear", init_lora_weights=False)
    peft = None
    for seed, name in enumerate(RANDOM):
        torch.manual_seed(seed)
        if peft is None:
            peft = PeftModel(share_weights(model), config, adapter_name=name)
        else:
            peft.add_adapter(name, config)
    assert peft is not None
    peft.save_pretrained(str(folder), save_embedding_layers=False)


def share_weights(model: torch.nn.Module) -> Any:
    """A second model on the same parameters: PEFT and attach both replace modules in place."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def encode(tokenizer: Any, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Input ids and mask `[rows, tokens]`, padded on the left."""
    texts = [smollm2.chat(tokenizer, row.prompt) for row in rows]
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


def generate(model: Any, inputs: dict[str, Tensor], **arguments: Any) -> Any:
    """Greedy tokens and the logits of each step."""
    return model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **arguments,
    )


def new_tokens(answer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What was generated, `[rows, steps]`."""
    return answer.sequences[:, inputs["input_ids"].shape[1] :]


def first_difference(
    ours: Sequence[int], theirs: Sequence[int], logits: Tensor
) -> tuple[int, float] | None:
    """Where two greedy answers part, and by how much.

    Args:
        ours: token ids of one row.
        theirs: token ids of the reference.
        logits: `[steps, V]`, of the reference.

    Returns:
        The step, and how far the reference's logits of the two tokens are apart; None if the answers
        are equal.
    """
    steps = max(len(ours), len(theirs))
    for step in range(steps):
        a = ours[step] if step < len(ours) else None
        b = theirs[step] if step < len(theirs) else None
        if a != b:
            if a is None or b is None:
                return step, float("inf")
            return step, abs(float(logits[step, a] - logits[step, b]))
    return None


def answer_of(tokens: Tensor, end: int) -> list[int]:
    """Token ids up to and including the end of the turn."""
    ids = tokens.tolist()
    return ids[: ids.index(end) + 1] if end in ids else ids


def compare(
    rows: Sequence[Row], ours: Tensor, inputs: dict[str, Tensor], peft: PeftModel, end: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each row against PEFT with its adapter alone.

    Returns:
        Ties and wrong rows, as `{"row", "step", "margin"}`.
    """
    ties: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for adapter in dict.fromkeys(row.adapter for row in rows):
        chosen = [index for index, row in enumerate(rows) if row.adapter == adapter]
        mine = {name: tensor[chosen] for name, tensor in inputs.items()}
        if adapter is None:
            with peft.disable_adapter():
                answer = generate(peft, mine)
        else:
            peft.set_adapter(adapter)
            answer = generate(peft, mine)
        theirs = new_tokens(answer, mine)
        for position, index in enumerate(chosen):
            logits = torch.stack([step[position] for step in answer.logits])
            parted = first_difference(
                answer_of(ours[index], end), answer_of(theirs[position], end), logits
            )
            if parted is not None:
                step, margin = parted
                found = {"row": index, "step": step, "margin": margin}
                (ties if margin <= TIE else wrong).append(found)
    return ties, wrong


def side_by_side(tokenizer: Any, tokens: Tensor) -> list[Table]:
    """The answers: one row per question and one column per adapter; then the random adapters."""
    text = dict(zip(MIXED, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True))
    table = Table(title="One batch, four answers to each question", show_lines=True)
    table.add_column("prompt", style="bold")
    for name in ("base model", *TRAINED):
        table.add_column(name)
    for question in QUESTIONS:
        answers = (text[Row(question, adapter)] for adapter in (None, *TRAINED))
        table.add_row(question, *(" ".join(answer.split()) for answer in answers))
    others = Table(title="The same batch, rows with random adapters")
    for column in ("prompt", "adapter", "answer"):
        others.add_column(column)
    for question, adapter in zip(MORE_QUESTIONS, RANDOM, strict=True):
        others.add_row(question, adapter, " ".join(text[Row(question, adapter)].split()))
    return [table, others]


def time_interleaved(
    tokenizer: Any, models: dict[str, tuple[Any, dict[str, Any]]], runs: int, step: Any
) -> dict[str, float]:
    """Tokens per second of each model on TIMED: the median of `runs` runs, taken in turns."""
    inputs = encode(tokenizer, TIMED)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for run in range(runs + 1):  # the first is a rehearsal
        for name, (model, arguments) in models.items():
            begin = time.perf_counter()
            model.generate(
                **inputs,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                **arguments,
            )
            if run:
                seconds[name].append(time.perf_counter() - begin)
            step()
    total = len(TIMED) * NEW_TOKENS
    return {name: total / statistics.median(times) for name, times in seconds.items()}


def main() -> int:
    """Run all three parts; 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=RUNS, help=f"timed runs (default: {RUNS})")
    parser.add_argument("--output", type=Path, default=BUILD / "demo.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of PEFT, about a base model that is a file
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log or a pipe has no width of its own
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, torch.no_grad():
        setup = progress.add_task("SmolLM2-135M-Instruct and 8 adapters", total=3)
        base, tokenizer = smollm2.load()
        end = tokenizer.eos_token_id
        progress.advance(setup)
        made = BUILD / "demo-adapters"
        make_random_adapters(base, made)
        folders = {name: HERE / "adapters" / name for name in TRAINED}
        folders |= {name: made / name for name in RANDOM}
        peft = PeftModel.from_pretrained(
            share_weights(base), str(folders["pirate"]), adapter_name="pirate"
        )
        for name, folder in folders.items():
            if name != "pirate":
                peft.load_adapter(str(folder), adapter_name=name)
        peft.eval()
        progress.advance(setup)
        model = share_weights(base)
        manager = attach(model, "torch", max_loras=len(folders), max_rank=MAX_RANK)
        for name, folder in folders.items():
            manager.load_adapter(name, folder)
        progress.advance(setup)

        mixed = progress.add_task(f"{len(MIXED)} prompts in one batch", total=1)
        inputs = encode(tokenizer, MIXED)
        answer = generate(model, inputs, adapter_names=[row.adapter for row in MIXED])
        ours = new_tokens(answer, inputs)
        progress.advance(mixed)

        checked = progress.add_task("every row against PEFT alone", total=1)
        ties, wrong = compare(MIXED, ours, inputs, peft, end)
        progress.advance(checked)

        adapters = [row.adapter for row in TIMED]
        models = {
            "lora_core": (model, {"adapter_names": adapters}),
            "base": (base, {}),
            "peft": (peft, {"adapter_names": adapters}),
        }
        timed = progress.add_task(
            "8 adapters, 32 tokens, timed", total=(options.runs + 1) * len(models)
        )
        speed = time_interleaved(tokenizer, models, options.runs, lambda: progress.advance(timed))

    for table in side_by_side(tokenizer, ours):
        console.print(table)
    identical = len(MIXED) - len(ties) - len(wrong)
    console.print(
        f"\nAgainst PEFT with each adapter alone: {identical} of {len(MIXED)} rows identical, {len(ties)} ties."
    )
    for found in wrong:
        console.print(
            f"WRONG: row {found['row']} parts at step {found['step']} by {found['margin']:.3g}"
        )
    console.print(
        f"8 adapters in one batch: {speed['lora_core']:.1f} tokens/s; base model alone {speed['base']:.1f}; "
        f"PEFT's mixed batch {speed['peft']:.1f}.\n"
        f"{speed['lora_core'] / speed['peft']:.2f}x PEFT, {speed['lora_core'] / speed['base']:.0%} of the base model."
    )
    report = {
        "rows": len(MIXED),
        "adapters": len(folders),
        "identical_rows": identical,
        "ties": ties,
        "tokens_per_second": round(speed["lora_core"], 2),
        "base_tokens_per_second": round(speed["base"], 2),
        "peft_mixed_tokens_per_second": round(speed["peft"], 2),
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"Written to {options.output}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
