"""docs/pictures of layouts.md and lifecycle.md: every number in them is computed here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from benchmarks.research.wide_base import WideWeight
from lora_core import LoRABatch, MoERouting, SliceLayout, load_backend, load_moe_backend

DOCS = Path(__file__).parents[2] / "docs"
DRAWN = ("pool", "slices", "segments", "chunks", "virtual-experts", "wide-base")
NS = "{http://www.w3.org/2000/svg}"


class Picture:
    """A drawing: its texts and rectangles by id."""

    def __init__(self, name: str) -> None:
        root = ET.parse(DOCS / "pictures" / f"{name}.svg").getroot()
        self.texts = {}
        self.unnamed = []
        for text in root.iter(f"{NS}text"):
            if "id" in text.attrib:
                self.texts[text.get("id")] = text.text
            else:
                self.unnamed.append(text.text)
        self.rects = {
            rect.get("id"): tuple(float(rect.get(key)) for key in ("x", "y", "width", "height"))
            for rect in root.iter(f"{NS}rect")
            if "id" in rect.attrib
        }

    def width(self, name: str) -> float:
        return self.rects[name][2] if name in self.rects else 0

    def height(self, name: str) -> float:
        return self.rects[name][3] if name in self.rects else 0


SEGMENTS = """
import json, sys
from lora_core import LoRABatch, load_backend

info = load_backend("csgmv", device="cpu").prepare_batch(LoRABatch(*json.loads(sys.argv[1])))
parts = ("req_seg_indptr", "req_slots", "seg_indptr", "seg_slots", "permutation")
print(json.dumps({part: getattr(info, part).tolist() for part in parts}))
"""


def csgmv(lengths, slots) -> dict[str, list[int]]:
    """Both views of a batch that csgmv prepared; on a CPU its kernels would be interpreted."""
    done = subprocess.run(
        [sys.executable, "-c", SEGMENTS, json.dumps([lengths, slots])],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pool():
    ranks, room = [4, 8, 0, 0], 8
    names = ("sql", "chat", "absent here", "unused")
    picture = Picture("pool")
    assert picture.texts == {
        "first_rank": "rank 0",
        "last_rank": f"rank {room - 1}",
        **{f"slot_{i}": f"slot {i}: {name}" for i, name in enumerate(names)},
        **{f"rank_{i}": str(rank) for i, rank in enumerate(ranks)},
    }
    for i, rank in enumerate(ranks):
        assert picture.height(f"a_live_{i}") == 20 * rank
        assert picture.height(f"a_past_{i}") == 20 * (room - rank)
        assert picture.width(f"b_live_{i}") == 14 * rank
        assert picture.width(f"b_past_{i}") == 14 * (room - rank)

    # what is hatched may be NaN
    backend = load_backend("torch", device="cpu")
    weights = backend.allocate_weights(
        num_slots=4, max_rank=room, in_features=6, layout=SliceLayout((5,)), dtype=torch.float32
    )
    weights.a.fill_(torch.nan)
    weights.b.fill_(torch.nan)
    for i, rank in enumerate(ranks):
        weights.a[i, 0, :rank] = 1 + i
        weights.b[i, :, :rank] = 1
        weights.ranks[i], weights.scalings[i] = rank, 1
    backend.prepare_batch(LoRABatch([1, 1, 1, 1], [0, 1, 2, 3]))
    y = backend.expand(backend.shrink(torch.ones(4, 6), weights), weights, torch.full((4, 5), -0.0))
    assert y[:, 0].tolist() == [6 * 4 * 1, 6 * 8 * 2, 0, 0]
    assert y[2:].signbit().all()  # not even touched


def test_slices():
    layout = SliceLayout((4096, 1024, 1024))
    ranks = (16, 8, 0)
    picture = Picture("slices")
    assert picture.texts == {
        **{f"rank_{i}": f"rank {rank}" for i, rank in enumerate(ranks)},
        **{f"width_{i}": str(width) for i, width in enumerate(layout.widths)},
        **{f"offset_{i}": str(offset) for i, offset in enumerate(layout.offsets)},
        "note": "h is float32 [T', n_slices, R]. A slice of rank 0 is not touched: not even -0.0 changes.",
    }
    scale = 480 / layout.out_features
    for i, width in enumerate(layout.widths):
        for part in ("b", "y"):
            x, _, drawn, _ = picture.rects[f"{part}_{i}"]
            assert (x - 90, drawn) == (layout.offsets[i] * scale, width * scale)

    backend = load_backend("torch", device="cpu")
    weights = backend.allocate_weights(
        num_slots=1, max_rank=16, in_features=6, layout=layout, dtype=torch.float32
    )
    weights.a.fill_(1)
    weights.b.fill_(1)
    weights.ranks[0], weights.scalings[0] = torch.tensor(ranks), 1.0
    backend.prepare_batch(LoRABatch([1], [0]))
    h = backend.shrink(torch.ones(1, 6), weights)
    assert (h.dtype, h.shape) == (torch.float32, (1, 3, 16))
    (y,) = backend.expand(h, weights, torch.full((1, 6144), -0.0))
    assert [set(part.tolist()) for part in y.split(layout.widths)] == [{96.0}, {48.0}, {-0.0}]
    assert y[layout.offsets[2] :].signbit().all()


def test_requests_and_segments():
    lengths = [3, 0, 2, 4]
    info = csgmv(lengths, [0, 1, -1, 0])
    picture = Picture("segments")
    assert picture.texts == {
        "request_0": "request 0: slot 0",
        "request_1": "request 1: slot 1, no rows",
        "request_2": "request 2: base",
        "request_3": "request 3: slot 0",
        "req_seg_indptr": str(info["req_seg_indptr"]),
        "req_slots": str(info["req_slots"]),
        "segment_0": f"segment 0: slot {info['seg_slots'][0]}",
        "seg_indptr": str(info["seg_indptr"]),
        "seg_slots": str(info["seg_slots"]),
        **{f"at_{row}": str(row) for row in range(sum(lengths))},
        **{f"permuted_{i}": str(row) for i, row in enumerate(info["permutation"])},
    }
    assert len(info["permutation"]) == 7


def test_chunks():
    lengths, words = [40, 3], {2: "two", 4: "four"}
    info = csgmv(lengths, [0, 1])
    bounds = {"request": info["req_seg_indptr"], "segment": info["seg_indptr"]}
    sizes = [end - begin for begin, end in pairwise(info["seg_indptr"])]
    picture = Picture("chunks")
    assert picture.texts == {
        "requests": f"{words[len(info['req_slots'])]} requests",
        "lengths": f"lengths {lengths}",
        "segments": f"{words[len(info['seg_slots'])]} segments",
        "chunk": f"chunks of {max(sizes)}",
        "seg_slots": str(info["seg_slots"]),
        **{f"{kind}_at_{row}": str(row) for kind, rows in bounds.items() for row in rows},
    }
    for kind, rows in bounds.items():
        drawn = [picture.rects[f"{kind}_{i}"] for i in range(len(rows) - 1)]
        assert [(x, width) for x, _, width, _ in drawn] == [
            (30 + 14 * begin, 14 * (end - begin)) for begin, end in pairwise(rows)
        ]
    page = (DOCS / "layouts.md").read_text(encoding="utf-8")
    assert f"of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} rows" in page


def test_virtual_experts():
    ids, slots, experts = [[0, 2], [2, 3], [0, 1], [2, -1]], [0, 1, -1, 0], 4
    routing = MoERouting(
        topk_ids=torch.tensor(ids), topk_weights=torch.ones(4, 2), slots=torch.tensor(slots).int(),
        num_experts=experts, num_slots=2,
    )  # fmt: skip
    route = load_moe_backend("torch", device="cpu").route(routing)
    groups: dict[tuple[int, int], list[int]] = {}
    for pair, live in enumerate(route.live.flatten().tolist()):
        if live:
            key = (int(route.slots.flatten()[pair]), int(route.experts.flatten()[pair]))
            groups.setdefault(key, []).append(pair)
    flat = [expert for row in ids for expert in row]
    assert Picture("virtual-experts").texts == {
        **{f"row_{t}": str(t) for t in range(4)},
        **{f"slot_{t}": str(slot) for t, slot in enumerate(slots)},
        **{f"name_{pair}": f"pair {pair}" for pair in range(8)},
        **{f"expert_{p}": f"expert {e}" if e >= 0 else str(e) for p, e in enumerate(flat)},
        **{f"key_{s}_{e}": f"(slot {s}, expert {e})" for s, e in groups},
        **{f"pairs_{s}_{e}": ", ".join(map(str, pairs)) for (s, e), pairs in groups.items()},
    }
    assert len(groups) == 4


def test_wide_base():
    slots, rank, rows = 8, 64, 4096
    weight = WideWeight(torch.nn.Linear(8, rows), num_slots=slots, num_slices=1, max_rank=rank)
    whole, spare = weight.whole.shape[0], weight.whole.shape[0] - rows
    picture = Picture("wide-base")
    assert picture.texts == {
        "w_begin": "row 0",
        "a_begin": f"row {rows}: A of slot 0",
        "a_end": f"row {whole}, the end",
        "y_begin": "0",
        "h_begin": str(rows),
        "h_end": str(whole),
        "h_slots": f"h of {slots} slots",
        "spare": f"rank {rank} each: {spare} spare columns",
    }
    assert weight.a.shape == (slots, 1, rank, 8)
    assert weight.product(torch.ones(1, 8)).shape == (1, whole)
    heights = [picture.height("w"), *(picture.height(f"a_{s}") for s in range(slots))]
    ends = [round(end / 0.05) for end in accumulate(heights)]
    assert ends == [rows + rank * s for s in range(slots + 1)]
    page = (DOCS / "what-did-not-pay.md").read_text(encoding="utf-8")
    assert f"| o | {spare} |" in page


@pytest.mark.parametrize("name", [*DRAWN, "lifecycle", "graphs"])
def test_no_number_is_left_unchecked(name):
    numbered = [text for text in Picture(name).unnamed if re.search(r"\d", text)]
    assert numbered == []


@pytest.mark.parametrize(
    ("page", "pictures"), [("layouts.md", DRAWN), ("lifecycle.md", ("lifecycle", "graphs"))]
)
def test_every_drawing_is_on_its_page(page, pictures):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert re.findall(r"\(pictures/(.+?)\.svg\)", text) == list(pictures)
