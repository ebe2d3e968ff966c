"""The integration on a CUDA device: every installed backend, eager and compiled with CUDA graphs."""

import copy

import pytest
import torch
from transformers import CompileConfig

from lora_core import list_backends
from lora_core.integrations.transformers import attach, detach
from tests.transformers.tiny import prompts, workbench

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BACKENDS = [spec.name for spec in list_backends()]
PLAIN = ["attention", "all-rslora", "patterns"]  # what every backend claims
GREEDY = {"max_new_tokens": 12, "do_sample": False}
BATCHES = (
    ["attention", None, "all-rslora"],
    ["patterns", "attention", "attention"],
    [None, None, None],
    ["all-rslora", "patterns", "attention"],
)


@pytest.fixture(scope="module")
def expected():
    """Per adapter, PEFT's greedy tokens on the device for each of three prompts."""
    bench = workbench("llama")
    inputs = {key: tensor.cuda() for key, tensor in prompts(3).items()}
    answers = {}
    for adapter in (None, *PLAIN):
        reference = copy.deepcopy(bench.references[adapter]).cuda()
        answers[adapter] = reference.generate(**inputs, **GREEDY).tolist()
    return answers


@pytest.fixture(params=BACKENDS)
def model(request):
    """The model on the device, with its adapters loaded into one backend."""
    bench = workbench("llama")
    model = copy.deepcopy(bench.model).cuda()
    manager = attach(model, request.param)
    assert manager.backend.device == model.device
    for adapter in PLAIN:
        manager.load_adapter(adapter, bench.folders[adapter])
    torch._dynamo.utils.counters.clear()  # reset() leaves them
    yield model
    detach(model)
    torch._dynamo.reset()


def assert_greedy_tokens(model, expected, **options):
    inputs = {key: tensor.cuda() for key, tensor in prompts(3).items()}
    for names in BATCHES:
        mixed = model.generate(**inputs, **GREEDY, **options, adapter_names=names).tolist()
        assert mixed == [expected[adapter][row] for row, adapter in enumerate(names)], names


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_equal_peft(model, expected, cache):
    assert_greedy_tokens(model, expected, cache_implementation=cache, disable_compile=True)


def test_compiled_with_cuda_graphs_equals_peft(model, expected):
    """A recorded graph must not replay the adapters that it was recorded with."""
    config = CompileConfig(fullgraph=True, mode="reduce-overhead")
    assert_greedy_tokens(model, expected, cache_implementation="static", compile_config=config)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] <= 2
