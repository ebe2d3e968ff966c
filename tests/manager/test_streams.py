"""A slot is rewritten only after the last forward that used it, and used only after it was written."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch

from lora_core.errors import InsufficientMemoryError
from lora_core.layers.linear import LoRALinear
from lora_core.manager import LoRAManager, LoRARequest
from lora_core.sites import Site
from lora_core.torch_backend import TorchBackend
from lora_core.weights import SliceLayout
from tests.manager.helpers import K, Model, adapter, make, rows


class FakeEvent:
    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None

    def record(self, stream: FakeStream) -> None:
        self.at = (stream.name, len(stream.work))

    def query(self) -> bool:
        return False


class FakeStream:
    """Notes what is queued on it: waits as (stream, place), everything else by name."""

    def __init__(self, name: str = "copies") -> None:
        self.name = name
        self.work: list[object] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append(event.at)


@pytest.fixture
def streams(monkeypatch):
    """Stand-ins for CUDA's streams and events; the current one is `streams["now"]`."""
    known = {"now": FakeStream("main")}
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda _device: known.setdefault("copies", FakeStream())
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: known["now"])

    @contextmanager
    def use(stream):
        before, known["now"] = known["now"], stream
        yield
        known["now"] = before

    monkeypatch.setattr(torch.cuda, "stream", use)
    return known


@pytest.fixture
def manager(streams):
    manager, _ = make(max_loras=1)
    manager.pool._cuda = True
    manager.load_adapter("a", adapter(0))
    manager.load_adapter("b", adapter(1))
    return manager


def forward(manager: LoRAManager, streams: dict, name: str, lane: int = 0) -> None:
    with manager.batch([LoRARequest(name)], lane=lane):
        streams["now"].work.append(f"forward {name}")


def test_a_prefetch_waits_for_the_forward_before_and_is_waited_for(manager, streams):
    main = streams["now"]
    forward(manager, streams, "a")
    assert main.work == [("main", 0), "forward a"]  # its own write, then the forward
    manager.prefetch("b")
    assert ("main", 2) in streams["copies"].work  # after the forward
    written = len(streams["copies"].work)
    forward(manager, streams, "b")
    assert main.work[2:] == [("copies", written), "forward b"]


def test_forwards_of_all_lanes_are_waited_for(manager, streams):
    main, side = streams["now"], FakeStream("side")
    forward(manager, streams, "a")
    streams["now"] = side
    forward(manager, streams, "a", lane=1)
    streams["now"] = main
    done = {("main", len(main.work)), ("side", len(side.work))}
    manager.prefetch("b")
    assert done <= set(streams["copies"].work)


def test_writes_on_the_current_stream_wait_for_forwards_elsewhere(manager, streams):
    """A refresh in a thread whose stream is not that of the forwards."""
    main, side = streams["now"], FakeStream("side")
    forward(manager, streams, "a")
    streams["now"] = side
    manager.refresh("a", adapter(5))
    assert ("main", len(main.work)) in side.work
    streams["now"] = main
    forward(manager, streams, "a")
    assert main.work[-2:] == [("side", len(side.work)), "forward a"]


# -- on a device -----------------------------------------------------------------------------------------


def on_cuda(**options) -> tuple[LoRAManager, Model]:
    model = Model()
    for linear in model.linears.values():
        linear.cuda()
    manager = LoRAManager(
        TorchBackend(device="cuda"), **{"max_loras": 1, "max_rank": 16, **options}
    )
    return model.attach(manager), model


@pytest.mark.cuda
def test_cuda_prefetch_into_the_slot_of_a_running_forward():
    manager, model = on_cuda()
    sources = {"a": adapter(0), "b": adapter(1)}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    x = rows(2).cuda()
    expected = {name: model_expected(model, x, source) for name, source in sources.items()}
    for name, other in ["ab", "ba"] * 5:
        with manager.batch([LoRARequest(name, 2)]):
            torch.cuda._sleep(20_000_000)  # about 10 ms: the copy would easily overtake it
            out = model(x)
        assert manager.prefetch(other)
        torch.testing.assert_close(out, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_cuda_whole_weights_live_as_long_as_forwards_read_them():
    """The memory of an evicted whole weight is taken again at once, while its forward still waits."""
    manager, model = on_cuda()
    whole = {}
    for seed, name in enumerate("ab"):
        config, tensors = adapter(seed, ("q_proj",))
        whole[name] = torch.randn(8, K, generator=torch.Generator().manual_seed(seed))
        manager.load_adapter(name, (config, tensors | {"k_proj.weight": whole[name]}))
    x = rows(2).cuda()
    for name, other in ["ab", "ba"] * 5:
        with manager.batch([LoRARequest(name, 2)]):
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                out = model.layers["k_proj"](x)
        manager.prefetch(other)
        torch.testing.assert_close(out, x @ whole[name].cuda().T, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_cuda_lanes_on_streams_of_their_own():
    manager, model = on_cuda(max_loras=2)
    sources = {name: adapter(seed) for seed, name in enumerate("abc")}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    x = rows(2).cuda()
    expected = {name: model_expected(model, x, source) for name, source in sources.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for first, second, third in ["abc", "bca", "cab"] * 3:
        with manager.batch([LoRARequest(first, 2)], lane=0):
            torch.cuda._sleep(10_000_000)
            one = model(x)
        with torch.cuda.stream(side), manager.batch([LoRARequest(second, 2)], lane=1):
            torch.cuda._sleep(10_000_000)
            two = model(x)
        with manager.batch([LoRARequest(third, 2)], lane=0):
            three = model(x)
        torch.cuda.synchronize()
        for out, name in ((one, first), (two, second), (three, third)):
            torch.testing.assert_close(out, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_cuda_preparing_and_moving_in_never_synchronises():
    manager, _ = on_cuda()
    for seed, name in enumerate("ab"):
        manager.load_adapter(name, adapter(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is new
        torch.cuda.set_sync_debug_mode("error")
    try:
        for name in "abab":
            manager.prepare([LoRARequest(name, 2), LoRARequest(None, 3)])
            manager.reset()
            manager.prefetch("a" if name == "b" else "b")
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_cuda_a_pool_that_would_not_fit_is_refused_unallocated():
    manager = LoRAManager(TorchBackend(device="cuda"), max_loras=4_000_000, max_rank=64)
    linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    site = Site("q_proj", "linear", 1024, SliceLayout((1024,)), ("q_proj",))
    manager.add_layers({"q_proj": LoRALinear(linear, site, manager.gate)})
    tensors = {
        "q_proj.lora_A.weight": torch.ones(8, 1024),
        "q_proj.lora_B.weight": torch.ones(1024, 8),
    }
    before = torch.cuda.memory_allocated()
    with pytest.raises(InsufficientMemoryError, match="MiB on cuda:0, but only"):
        manager.load_adapter("a", ({"peft_type": "LORA"}, tensors))
    assert before == torch.cuda.memory_allocated()


def model_expected(model: Model, x: torch.Tensor, source: tuple) -> torch.Tensor:
    config, tensors = source
    return model.expected(
        x, (config, {key: value.cuda() for key, value in tensors.items()})
    ).float()


@pytest.fixture(autouse=True)
def _cuda_or_skip(request):
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
