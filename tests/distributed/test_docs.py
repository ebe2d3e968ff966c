"""The code of docs/distributed.md runs as it stands, in two processes."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from lora_core import SliceLayout, load_moe_backend
from lora_core.layers.moe import FusedMoEWithLoRA
from lora_core.sites import Shard, Site, padded_part
from tests.distributed.engine import Column, LocalExperts, Row, VocabularyRows, adapter, numbers
from tests.distributed.graphs import RankGraph

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
SHAPES = {
    "attn.q_proj": (16, 16),
    "attn.k_proj": (16, 8),
    "attn.v_proj": (16, 8),
    "attn.o_proj": (16, 16),
    "embed": (50, 16),
    "lm_head": (16, 50),
}


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def setting(rank, size):
    """What the page takes for granted."""
    qkv = SliceLayout((16, 8, 8))
    part = padded_part(50, rank, size, multiple=8)
    sites = {
        "qkv_module": Site(
            "", "linear", 16, qkv, (), Shard.columns(qkv, rank, size, (1, size, size))
        ),
        "o_module": Site("", "linear", 16, SliceLayout((16,)), (), Shard.rows(16, rank, size)),
        "embed_module": Site("", "embedding", 50, SliceLayout((16,)), (), Shard(inputs=part)),
        "head_module": Site("", "lm_head", 16, SliceLayout((50,)), (), Shard(outputs=(part,))),
    }
    held = range(rank * 2, rank * 2 + 2)
    experts = LocalExperts(numbers(5, 4, 16, 16), numbers(6, 4, 16, 8), held)
    down = Site("experts.down_proj", "experts", 8, SliceLayout((16,)), ("experts.down_proj",))
    gates = SliceLayout((8, 8))
    return {
        "torch": torch,
        "capture": RankGraph,
        "group": None,
        "qkv_module": Column(sites["qkv_module"], numbers(1, 32, 16), None, None),
        "o_module": Row(sites["o_module"], numbers(2, 16, 16), None, None),
        "embed_module": VocabularyRows(sites["embed_module"], numbers(3, 50, 16), None, None),
        "head_module": Column(
            sites["head_module"], numbers(4, 50, 16), None, None, gather_output=True
        ),
        "sql": adapter(1, SHAPES, 4, 8, embeddings=["embed"]),
        "ids": torch.tensor([3, 49, 0, 7, 33]),
        "attention": nn.Linear(16, 16),
        "mlp": nn.Linear(16, 16),
        "route": lambda rows: (
            torch.zeros(len(rows), 1, dtype=torch.long),
            torch.ones(len(rows), 1),
        ),
        "experts_module": experts,
        "FusedMoEWithLoRA": FusedMoEWithLoRA,
        "load_moe_backend": load_moe_backend,
        "gate_up_site": Site(
            "experts.gate_up_proj", "experts", 16, gates, ("experts.gate_proj", "experts.up_proj")
        ),
        "down_site": down,
        "first": held.start,
        "held": len(held),
        "local_ids": experts.map,
    }


def run_page(rank, size):
    world = setting(rank, size)
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), world)
    assert world["logits"].shape == (5, 50)
    assert world["hidden"].shape == (0 if rank else 2, 16)
    assert world["rows"].shape == (2, 16)
    replayed = world["graph"].result[: 2 - 2 * rank]
    own = world["attention"](torch.ones(2 - 2 * rank, 16))
    torch.testing.assert_close(replayed, own + world["mlp"](own))
    assert world["manager"].backend.batch_info is None
    return world["logits"]


def test_the_page_runs(gloo2):
    assert len(blocks()) == 7
    first, second = gloo2.run(run_page)
    assert torch.equal(first, second)
