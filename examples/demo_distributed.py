"""SmolLM2 over several processes with `make demo`'s adapters; `make demo-distributed` runs it.

1. Tensor parallelism over 3 processes (9 heads, 3 KV heads): transformers cuts the model, `attach` finds
   it cut, and the seventeen rows of `make demo` go through it in one batch.
2. Data-parallel attention over 2 processes: each has the whole attention and its own rows, the MLPs are
   cut over both and run on the rows of both. The second process has few rows, is done early, and goes
   on idle, for the first one's sake.

Tokens of both are compared, row by row, with what one process generates as `make demo` does. The numbers
go to build/demo-distributed.json; the exit code is 0 only if no row differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import demo
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import smollm2
from lora_core import LoRARequest, SliceLayout, load_backend
from lora_core.distributed import Forward, LiveForward, RankedManager
from lora_core.integrations.transformers import attach
from lora_core.layers.linear import LoRALinear
from lora_core.layers.lm_head import LoRALMHead
from lora_core.layers.parallel import LoRAColumnParallelLinear, LoRARowParallelLinear
from lora_core.sites import Shard, Site

TP, DP = 3, 2
TIMEOUT = timedelta(minutes=10)
FEW = 3
"""Rows of the second process in data parallelism; they get fewer tokens, too."""
FEW_TOKENS = demo.NEW_TOKENS // 2


def folders() -> dict[str, Path]:
    """The adapters of `make demo`, those of PEFT's making included."""
    made = demo.BUILD / "demo-adapters"
    found = {name: demo.HERE / "adapters" / name for name in demo.TRAINED}
    return found | {name: made / name for name in demo.RANDOM}


# -- tensor parallelism --------------------------------------------------------------------------


def tensor_parallel(rank: int) -> Tensor:
    """Tokens `[rows, steps]`, the same on every rank."""
    from transformers.distributed import DistributedConfig

    del rank  # transformers asks torch.distributed
    model, tokenizer = smollm2.load(
        distributed_config=DistributedConfig(tp_plan="auto", tp_size=TP)
    )
    manager = attach(model, "torch", max_loras=len(folders()), max_rank=demo.MAX_RANK)
    for name, folder in folders().items():
        manager.load_adapter(name, folder)
    inputs = demo.encode(tokenizer, demo.MIXED)
    answer = demo.generate(model, inputs, adapter_names=[row.adapter for row in demo.MIXED])
    return demo.new_tokens(answer, inputs)


# -- data-parallel attention -----------------------------------------------------------------------


class PartOfLinear(nn.Module):
    """A rank's part of a linear: its inputs where `shard` cuts them, and then a sum over the ranks."""

    def __init__(self, whole: nn.Linear, shard: Shard) -> None:
        super().__init__()
        rows = slice(None) if shard.outputs is None else _slice(shard.outputs[0])
        columns = slice(None) if shard.inputs is None else _slice(shard.inputs)
        self.weight = nn.Parameter(whole.weight[rows, columns].clone(), requires_grad=False)
        self.reduce_results = shard.inputs is not None

    def forward(self, x: Tensor) -> Tensor:
        """The part's product, summed where its inputs are cut."""
        out = nn.functional.linear(x, self.weight)
        if self.reduce_results:
            dist.all_reduce(out)
        return out


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


class GatheredMLP(nn.Module):
    """An MLP cut over the ranks, for the rows of all of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.live: LiveForward | None = None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's rows of what all ranks compute together."""
        assert self.live is not None
        with self.live.everyone():
            everybodys = self.inner(self.live.gather(x.view(-1, x.shape[-1])))
        return self.live.own(everybodys).view(x.shape)


def wrap(model: Any, manager: RankedManager) -> list[GatheredMLP]:
    """Attention whole on every rank, MLPs cut over them; the ranks' own part of every adapter."""
    rank, size = manager.ranks.rank, manager.ranks.size
    layers, mlps = {}, []
    for index, block in enumerate(model.model.layers):
        for parent, name in (
            *((block.self_attn, f"self_attn.{leaf}_proj") for leaf in "qkvo"),
            *((block.mlp, f"mlp.{leaf}_proj") for leaf in ("gate", "up", "down")),
        ):
            path, leaf = f"model.layers.{index}.{name}", name.partition(".")[2]
            linear = getattr(parent, leaf)
            layout = SliceLayout((linear.out_features,))
            make: Any = LoRALinear
            shard = None
            if parent is block.mlp:
                shard = Shard.columns(layout, rank, size)
                make = LoRAColumnParallelLinear
                if leaf == "down_proj":
                    shard = Shard.rows(linear.in_features, rank, size)
                    make = LoRARowParallelLinear
                linear = PartOfLinear(linear, shard)
            site = Site(path, "linear", getattr(parent, leaf).in_features, layout, (path,), shard)
            layers[path] = make(linear, site, manager.gate)
            setattr(parent, leaf, layers[path])
        block.mlp = GatheredMLP(block.mlp)
        mlps.append(block.mlp)
    head = model.lm_head
    site = Site(
        "lm_head", "lm_head", head.in_features, SliceLayout((head.out_features,)), ("lm_head",)
    )
    model.lm_head = layers["lm_head"] = LoRALMHead(head, site, manager.gate)
    manager.add_layers(layers)
    return mlps


def data_parallel(rank: int) -> Tensor:
    """Tokens of this rank's rows, `[rows, steps]`."""
    model, tokenizer = smollm2.load()
    manager = RankedManager(
        load_backend("torch", device="cpu"), max_loras=len(folders()), max_rank=demo.MAX_RANK
    )
    mlps = wrap(model, manager)
    for name, folder in folders().items():
        manager.load_adapter(name, folder)
    rows = demo.MIXED[-FEW:] if rank else demo.MIXED[:-FEW]
    steps = FEW_TOKENS if rank else demo.NEW_TOKENS
    inputs = demo.encode(tokenizer, rows)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache, tokens = None, []
    for step in range(demo.NEW_TOKENS):  # as long as any rank has work
        forward = Forward()
        if step < steps:
            length = ids.shape[1]
            requests = [LoRARequest(row.adapter, length) for row in rows]
            mode = "decode" if length == 1 else "prefill"
            forward = Forward(requests, mode, logits=[[1] * len(rows)])
        with manager.forward(forward) as live:
            for mlp in mlps:
                mlp.live = live
            if live.is_idle:
                for block in model.model.layers:  # what it owes the other: its part of every MLP
                    block.mlp(torch.empty(0, model.config.hidden_size))
                continue
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


# -- processes -------------------------------------------------------------------------------------


def serve(rank: int, size: int, part: str, folder: str) -> None:
    """One process of a part; its tokens go to a file."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "meeting").as_uri(),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    with torch.no_grad():
        tokens = PARTS[part](rank)
    torch.save(tokens, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


PARTS = {"tensor": tensor_parallel, "data": data_parallel}


def spawn(part: str, size: int) -> list[Tensor]:
    """The tokens of every rank; if one of them fails, all are ended."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # five bars at once are unreadable
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, args=(size, part, folder), nprocs=size)  # joins; ends the others on failure
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]


def compare(
    ours: list[Tensor], theirs: list[Tensor], logits: Tensor, end: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ties and wrong rows; a row of ours may be shorter, of theirs only as much counts.

    Args:
        ours: tokens by row.
        theirs: tokens by row, of one process.
        logits: `[steps, rows, V]`, of one process.
        end: of a turn.
    """
    ties: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for row, (mine, whole) in enumerate(zip(ours, theirs, strict=True)):
        steps = min(len(mine), len(whole))
        parted = demo.first_difference(
            demo.answer_of(mine[:steps], end), demo.answer_of(whole[:steps], end), logits[:, row]
        )
        if parted is not None:
            found = {"row": row, "step": parted[0], "margin": parted[1]}
            (ties if parted[1] <= demo.TIE else wrong).append(found)
    return ties, wrong


def main() -> int:
    """Run both parts; 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=demo.BUILD / "demo-distributed.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with torch.no_grad():
        model, tokenizer = smollm2.load()
        end = tokenizer.eos_token_id
        demo.make_random_adapters(model, demo.BUILD / "demo-adapters")
        manager = attach(model, "torch", max_loras=len(folders()), max_rank=demo.MAX_RANK)
        for name, folder in folders().items():
            manager.load_adapter(name, folder)
        inputs = demo.encode(tokenizer, demo.MIXED)
        answer = demo.generate(model, inputs, adapter_names=[row.adapter for row in demo.MIXED])
    one, logits = demo.new_tokens(answer, inputs), torch.stack(answer.logits)
    rows = len(demo.MIXED)
    report: dict[str, Any] = {"rows": rows, "ties": []}
    failed = False
    for key, part, size in (("tp", "tensor", TP), ("dp", "data", DP)):
        parts = spawn(part, size)
        if part == "tensor":
            failed |= not all(torch.equal(parts[0], other) for other in parts)
            ours = list(parts[0])
        else:
            ours = [row for tokens in parts for row in tokens]
        ties, wrong = compare(ours, list(one), logits, end)
        report[f"{key}_identical_rows"] = rows - len(ties) - len(wrong)
        report["ties"] += [{"part": key, **tie} for tie in ties]
        failed |= bool(wrong)
        print(
            f"{key}: {size} processes, {rows - len(ties) - len(wrong)} of {rows} rows as in one process"
        )
        for found in (*ties, *wrong):
            kind = "tie" if found in ties else "WRONG"
            print(
                f"  {kind}: row {found['row']} parts at step {found['step']} by {found['margin']:.3g}"
            )
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"Written to {options.output}.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
