"""StagedBackend: what is cleared, and when; and the request view, made on first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typing_extensions import override

from lora_core import LoRABatch
from lora_core.batch import token_slots
from lora_core.capabilities import Capabilities, GraphKind, Op
from lora_core.errors import GraphNotInitializedError, UnsupportedOpError
from lora_core.staged import StagedBackend, StagedBatchInfo, counting, int32
from lora_core.workspace import GraphRoom

DEAD = -7


@dataclass(frozen=True, kw_only=True, eq=False)
class Info(StagedBatchInfo):
    pass


class Lists(StagedBackend[Info]):
    """Keeps the requests of a batch, and computes nothing."""

    name: ClassVar[str] = "lists"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[Capabilities] = Capabilities(
        ops=frozenset({Op.LINEAR}),
        dtypes=frozenset({"float32"}),
        device_types=frozenset({"cpu"}),
        graphs=frozenset({"decode", "prefill"}),
    )
    fails: bool = False

    @override
    def _prepare(self, batch: LoRABatch, graph: GraphKind | None) -> Info:
        requests, tokens = len(batch.lengths), batch.num_tokens
        most = requests
        if graph is not None:
            most = self._require_graph(
                graph, requests=requests, tokens=tokens, passes=1
            ).max_requests
        words = 2 * most + 1
        buffer = torch.empty(words, dtype=torch.int32) if graph is None else None
        target = self.workspace.static[graph] if buffer is None else buffer
        entry = self.workspace.staging.acquire(words)
        entry.host[:words] = tokens
        entry.host[: requests + 1] = np.cumsum([0, *batch.lengths])
        entry.host[most + 1 : words] = -1
        entry.host[most + 1 : most + 1 + requests] = int32(batch.slots)
        if self.fails:
            raise RuntimeError("on purpose")
        entry.send(target)
        return Info(
            num_tokens=tokens,
            mode=batch.mode,
            graph=graph,
            has_active_lora=True,
            static_requests=None if graph is None else self._static_requests(graph),
            words=target,
            requests=requests,
            slots_at=most + 1,
        )

    @override
    def _graph_words(self, kind: GraphKind, room: GraphRoom) -> int:
        return 2 * room.max_requests + 1

    @override
    def _slots_at(self, max_requests: int) -> int:
        return max_requests + 1

    @override
    def _neutralise(self, kind: GraphKind) -> None:
        self.workspace.static[kind].fill_(DEAD)

    def shrink(self, x: Any, weights: Any) -> Any:
        raise NotImplementedError

    def expand(self, h: Any, weights: Any, out: Any) -> Any:
        raise NotImplementedError


BATCH = LoRABatch([2, 0, 1], [1, 0, -1])


@pytest.fixture
def backend() -> Lists:
    made = Lists(device="cpu")
    made.init_graph("decode", max_requests=4, max_tokens=8)
    made.init_graph("prefill", max_requests=4, max_tokens=8)
    return made


def dead(backend: Lists, kind: str) -> bool:
    return bool((backend.workspace.static[kind] == DEAD).all())


@pytest.mark.parametrize("graph", [None, "decode"])
def test_the_request_view_is_exact_and_the_same_object_each_time(
    backend: Lists, graph: GraphKind | None
) -> None:
    info = backend.prepare_batch(BATCH, graph=graph)
    assert "req_slots" not in vars(info)
    assert info.req_seg_indptr.tolist() == [0, 2, 2, 3]
    assert info.req_slots.tolist() == [1, 0, -1]
    assert info.req_slots is info.req_slots
    assert info.num_requests == 3
    assert token_slots(info, 5).tolist() == [1, 1, -1, -1, -1]
    with pytest.raises(AttributeError, match="'Info' object has no attribute 'req_slot'"):
        _ = info.req_slot  # type: ignore[attr-defined]


def test_in_a_graph_the_whole_buffers_are_shown_too(backend: Lists) -> None:
    table = backend.prepare_batch(BATCH, graph="decode").request_table()
    assert table.seg_indptr.tolist() == [0, 2, 2, 3, 3]
    assert table.slots.tolist() == [1, 0, -1, -1]
    assert table.slots.data_ptr() == backend.workspace.static["decode"][5:].data_ptr()


@pytest.mark.parametrize("following", [None, "prefill"])
def test_a_kind_that_is_left_is_dead(backend: Lists, following: GraphKind | None) -> None:
    backend.prepare_batch(BATCH, graph="decode")
    assert not dead(backend, "decode")
    backend.prepare_batch(BATCH, graph=following)
    assert dead(backend, "decode")


@pytest.mark.parametrize("following", [None, "decode", "prefill"])
def test_a_prepare_that_fails_leaves_no_batch_and_dead_graphs(
    backend: Lists, following: GraphKind | None
) -> None:
    backend.prepare_batch(BATCH, graph="decode")
    backend.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        backend.prepare_batch(BATCH, graph=following)
    assert backend.batch_info is None
    assert dead(backend, "decode")
    assert dead(backend, "prefill")


def test_reset_is_legal_at_any_time_and_kills_the_graph(backend: Lists) -> None:
    backend.reset_batch_state()
    backend.prepare_batch(BATCH, graph="decode")
    backend.reset_batch_state()
    backend.reset_batch_state()
    assert backend.batch_info is None
    assert dead(backend, "decode")


def test_kinds_are_refused_as_the_contract_says(backend: Lists) -> None:
    with pytest.raises(UnsupportedOpError, match="graph kinds"):
        backend.init_graph("verify", max_requests=1, max_tokens=1)
    with pytest.raises(GraphNotInitializedError, match="before init_graph"):
        backend.prepare_batch(BATCH, graph="verify")


def test_int32_takes_integers_only() -> None:
    assert int32([0, -1, 2**31 - 1]).tolist() == [0, -1, 2**31 - 1]
    assert int32(np.arange(3)).dtype == np.int32
    assert int32([]).tolist() == []
    for wrong in ([1.5], [2**31], ["1"]):
        with pytest.raises(Exception, match=r"integer|range|format"):
            int32(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int32, np.intp])
def test_counting_grows_and_stays_right(dtype):
    assert counting(3, dtype).tolist() == [0, 1, 2]
    big = counting(10_000, dtype)
    assert big.tolist() == list(range(10_000))
    assert big.dtype == dtype
