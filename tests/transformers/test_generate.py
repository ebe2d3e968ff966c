"""generate and forward with adapter_names: every way to call them."""

import itertools

import pytest
import torch
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList, StaticCache
from transformers.generation.streamers import BaseStreamer

from lora_core.errors import (
    AdapterInUseError,
    AdapterNotFoundError,
    BatchMismatchError,
    InvalidBatchError,
    NoBatchPreparedError,
    NoFreeSlotError,
    UnsupportedOpError,
)
from lora_core.integrations.transformers import attach, detach
from lora_core.manager import LoRARequest
from tests.transformers.tiny import make_adapter, make_model, peft_model, prompts

NAMES = ["attention", None, "all-rslora"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def assert_rows_equal_peft(bench, mixed, inputs, names, *, copies=1, **options):
    """Row i of `mixed` (each prompt `copies` times) is what PEFT answers with names[i] alone."""
    for index, adapter in enumerate(names):
        alone = bench.references[adapter].generate(**inputs, **options)
        rows = slice(index * copies, (index + 1) * copies)
        assert mixed[rows].tolist() == alone[rows].tolist(), adapter


@pytest.mark.parametrize("returned", [1, 3])
def test_beams_repeat_the_rows(attached, returned):
    bench, _ = attached("llama")
    inputs = prompts(3)
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "num_beams": 3,
        "num_return_sequences": returned,
    }
    mixed = bench.model.generate(**inputs, **options, adapter_names=NAMES)
    assert len(mixed) == 3 * returned
    assert_rows_equal_peft(bench, mixed, inputs, NAMES, copies=returned, **options)


def test_returned_sequences_repeat_the_rows(attached):
    bench, _ = attached("llama")
    inputs = prompts(3)
    options = {"max_new_tokens": 5, "num_return_sequences": 4, "do_sample": True, "top_k": 1}
    mixed = bench.model.generate(**inputs, **options, adapter_names=NAMES)
    assert_rows_equal_peft(bench, mixed, inputs, NAMES, copies=4, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded"},
        {"prefill_chunk_size": 3},
        {"output_logits": True, "return_dict_in_generate": True},
        {"repetition_penalty": 1.3},
        {"guidance_scale": 1.5},
    ],
    ids=lambda options: next(iter(options)) + "=" + str(next(iter(options.values()))),
)
def test_ways_to_generate(attached, options):
    if options.get("cache_implementation") == "offloaded" and not torch.cuda.is_available():
        options = {"cache_implementation": "dynamic"}
    bench, _ = attached("llama")
    inputs = prompts(3)
    run = lambda model, **more: model.generate(**inputs, **GREEDY, **options, **more)  # noqa: E731
    sequences = lambda out: getattr(out, "sequences", out)  # noqa: E731
    mixed = sequences(run(bench.model, adapter_names=NAMES))
    for index, adapter in enumerate(NAMES):
        assert mixed[index].tolist() == sequences(run(bench.references[adapter]))[index].tolist()


def test_own_static_cache_and_positional_ids(attached):
    bench, _ = attached("llama")
    ids = prompts(3)["input_ids"][:, 3:]
    cache = StaticCache(config=bench.model.config, max_cache_len=16)
    mixed = bench.model.generate(ids, past_key_values=cache, **GREEDY, adapter_names=NAMES)
    for index, adapter in enumerate(NAMES):
        alone = bench.references[adapter].generate(input_ids=ids, **GREEDY)
        assert mixed[index].tolist() == alone[index].tolist()


def test_prompt_embeddings(attached):
    bench, _ = attached("llama")
    inputs = prompts(3)
    embeds = bench.references[None].get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    mixed = bench.model.generate(**given, **GREEDY, adapter_names=NAMES)
    assert_rows_equal_peft(bench, mixed, given, NAMES, **GREEDY)


@pytest.mark.parametrize("keep", [0, 1, 3, 99, torch.tensor([0, 2]), torch.tensor([-1])], ids=str)
def test_rows_that_the_head_keeps(attached, keep):
    bench, _ = attached("llama")
    names = ["embedding-head", None, "whole-head"]
    inputs = {"input_ids": prompts(3)["input_ids"]}
    with torch.no_grad():
        mixed = bench.model(**inputs, logits_to_keep=keep, adapter_names=names).logits
        for index, adapter in enumerate(names):
            alone = bench.references[adapter](**inputs, logits_to_keep=keep).logits
            torch.testing.assert_close(mixed[index], alone[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "base", [[None, None], ["__base__", "__base__"], [None, "__base__"], None], ids=str
)
def test_base_rows_by_every_name(attached, base):
    bench, manager = attached("llama")
    inputs = prompts(2)
    expected = bench.references[None].generate(**inputs, **GREEDY)
    assert torch.equal(bench.model.generate(**inputs, **GREEDY, adapter_names=base), expected)
    with torch.no_grad():
        logits = bench.model(**inputs, adapter_names=base).logits
        assert torch.equal(logits, bench.references[None](**inputs).logits)
    with manager.base_only():
        assert torch.equal(bench.model.generate(**inputs, **GREEDY), expected)


def test_forgotten_adapter_names_are_an_error(attached):
    bench, manager = attached("llama")
    inputs = prompts(2)
    for call in (bench.model, bench.model.generate):
        with pytest.raises(
            NoBatchPreparedError, match=r"without adapter_names.*adapter_names=None"
        ):
            call(**inputs)
    with pytest.raises(NoBatchPreparedError, match=r"embed_tokens.*manager\.batch"):
        bench.model.model(**inputs)  # past the wrapper of the whole model
    for adapter in list(manager.adapters()):
        manager.unload_adapter(adapter)
    assert torch.equal(
        bench.model.generate(**inputs, **GREEDY),
        bench.references[None].generate(**inputs, **GREEDY),
    )  # nothing loaded, nothing to forget


BAD_NAMES = {
    "too-few": (["attention"], InvalidBatchError, "1 entries for a batch of 2"),
    "too-many": (["attention"] * 4, InvalidBatchError, "4 entries for a batch of 2"),
    "none-at-all": ([], InvalidBatchError, "0 entries"),
    "text": ("attention", InvalidBatchError, "list with one name per row"),
    "several-per-row": ([["attention", "dora"], None], InvalidBatchError, "one adapter"),
    "unknown": (
        ["attention", "atention"],
        AdapterNotFoundError,
        "'atention'.*loaded are 'attention'",
    ),
    "more-than-slots": (["attention", "dora"], NoFreeSlotError, "2 different adapters.*1 slots"),
}


@pytest.mark.parametrize(("names", "error", "message"), BAD_NAMES.values(), ids=BAD_NAMES)
def test_names_that_cannot_be(attached, names, error, message):
    bench, manager = attached("llama", max_loras=1)
    inputs = prompts(2)
    before = manager.stats()
    for call in (bench.model, bench.model.generate):
        with pytest.raises(error, match=message):
            call(**inputs, adapter_names=names)
    assert manager.stats() == before
    assert manager.gate.backend.batch_info is None
    good = ["attention", None]
    mixed = bench.model.generate(**inputs, **GREEDY, adapter_names=good)
    assert_rows_equal_peft(bench, mixed, inputs, good, **GREEDY)


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise ArithmeticError("boom")


def test_an_exception_leaves_nothing_behind(attached):
    bench, manager = attached("llama")
    inputs = prompts(3)
    with pytest.raises(ArithmeticError, match="boom"):
        bench.model.generate(
            **inputs, **GREEDY, adapter_names=NAMES, logits_processor=LogitsProcessorList([Fails()])
        )
    with pytest.raises(AttributeError), torch.no_grad():
        bench.model(**inputs, position_ids="nonsense", adapter_names=NAMES)
    assert manager.gate.backend.batch_info is None
    assert all(info.holds == 0 for info in manager.adapters().values())
    mixed = bench.model.generate(**inputs, **GREEDY, adapter_names=NAMES)
    assert_rows_equal_peft(bench, mixed, inputs, NAMES, **GREEDY)


class Unloads(BaseStreamer):
    """Tries, between two tokens, to unload what is being generated with."""

    def __init__(self, manager):
        self.manager, self.refused = manager, 0

    def put(self, value):
        try:
            self.manager.unload_adapter("attention")
        except AdapterInUseError:
            self.refused += 1

    def end(self):
        pass


def test_adapters_stay_while_they_are_generated_with(attached):
    bench, manager = attached("llama")
    inputs = prompts(1)
    streamer = Unloads(manager)
    bench.model.generate(**inputs, **GREEDY, adapter_names=["attention"], streamer=streamer)
    assert streamer.refused == 1 + GREEDY["max_new_tokens"]
    manager.unload_adapter("attention")
    with pytest.raises(AdapterNotFoundError):
        bench.model.generate(**inputs, **GREEDY, adapter_names=["attention"])


def test_adapters_dropped_from_the_host_are_read_again(attached):
    bench, manager = attached("llama", max_loras=2, max_cpu_loras=2)
    inputs = prompts(2)
    assert not all(info.resident for info in manager.adapters().values())
    for names in itertools.pairwise(bench.folders):  # both dropped: neither may push the other out
        mixed = bench.model.generate(**inputs, **GREEDY, adapter_names=names)
        assert_rows_equal_peft(bench, mixed, inputs, names, **GREEDY)
    assert manager.stats().reads > len(bench.folders)


def test_a_batch_prepared_by_the_caller(attached):
    bench, manager = attached("llama")
    inputs = prompts(3)
    requests = [LoRARequest(name, 7) for name in NAMES]
    with torch.no_grad():
        expected = bench.model(**inputs, adapter_names=NAMES).logits
        with manager.batch(requests):
            assert torch.equal(bench.model(**inputs).logits, expected)
            with pytest.raises(InvalidBatchError, match="prepared already"):
                bench.model(**inputs, adapter_names=NAMES)
            with pytest.raises(BatchMismatchError, match=r"3 x 6 tokens.*21"):
                bench.model(input_ids=inputs["input_ids"][:, 1:])


def test_training_is_refused_by_name(attached):
    bench, _ = attached("llama")
    with pytest.raises(UnsupportedOpError, match=r"training through model\.layers\.0.*no_grad"):
        bench.model(**prompts(1), adapter_names=["attention"])


# -- other generation modes ---------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["attention", "whole-head", None], ids=str)
def test_assisted_generation(attached, adapter):
    bench, _ = attached("llama")
    inputs = {
        "input_ids": prompts(1)["input_ids"].repeat(1, 2),
        "attention_mask": torch.ones(1, 14),
    }
    expected = bench.references[adapter].generate(**inputs, **GREEDY).tolist()
    lookup = bench.model.generate(
        **inputs, **GREEDY, prompt_lookup_num_tokens=3, adapter_names=[adapter]
    )
    assert lookup.tolist() == expected
    assistant = make_model("llama", seed=5, num_hidden_layers=1)
    assisted = bench.model.generate(
        **inputs, **GREEDY, assistant_model=assistant, adapter_names=[adapter]
    )
    assert assisted.tolist() == expected


def test_early_exit_drafts_with_the_same_adapter(attached):
    bench, _ = attached("llama")
    inputs = {"input_ids": prompts(1)["input_ids"], "attention_mask": torch.ones(1, 7)}
    expected = bench.references["attention"].generate(**inputs, **GREEDY)
    out = bench.model.generate(
        **inputs, **GREEDY, assistant_early_exit=1, adapter_names=["attention"]
    )
    assert out.tolist() == expected.tolist()


def test_continuous_batching_is_refused_by_name(attached):
    bench, _ = attached("llama")
    ids = prompts(2)["input_ids"]
    for call in (
        lambda: bench.model.generate(
            ids, cache_implementation="paged", adapter_names=["attention", None]
        ),
        lambda: bench.model.generate_batch(ids.tolist()),
        lambda: bench.model.generate_batch(ids.tolist(), adapter_names=["attention", None]),
        bench.model.init_continuous_batching,
    ):
        with pytest.raises(UnsupportedOpError, match="continuous batching"):
            call()


def test_continuous_batching_of_the_base_model_is_let_through(monkeypatch):
    model = make_model("llama")
    model.generate_batch = lambda inputs: f"ran {inputs}"
    manager = attach(model, "torch")
    assert model.generate_batch([1]) == "ran [1]"  # nothing is loaded
    monkeypatch.setattr(manager.gate, "adapters_loaded", 1)
    with pytest.raises(UnsupportedOpError, match="continuous batching"):
        model.generate_batch([1])
    with manager.base_only():
        assert model.generate_batch([1]) == "ran [1]"


def test_inputs_without_rows_and_forwards_of_odd_rows(attached):
    bench, manager = attached("llama")
    with pytest.raises(InvalidBatchError, match="input_ids or inputs_embeds"), torch.no_grad():
        bench.model(position_ids=torch.zeros(1, 1), adapter_names=["attention"])

    def three_rows(model, input_ids, **_):
        return model(input_ids=torch.ones(3, 2, dtype=torch.long))

    with pytest.raises(InvalidBatchError, match=r"2 adapter_names, but a forward has 3 rows"):
        bench.model.generate(
            **prompts(2), **GREEDY, custom_generate=three_rows, adapter_names=["attention", None]
        )
    assert manager.gate.backend.batch_info is None


@pytest.fixture
def graphs():
    """A function: how many graphs dynamo has made in this test."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_static_cache(attached, compiler, graphs):
    bench, _ = attached("llama")
    config = CompileConfig(backend=compiler, mode=None, fullgraph=True)
    config._compile_all_devices = True  # by default transformers compiles on accelerators only
    options = {**GREEDY, "cache_implementation": "static", "compile_config": config}
    for names in (
        NAMES,
        ["dora", "embedding-head", None],
        [None] * 3,
        ["patterns"] * 3,
        ["whole-head", "attention", None],
    ):
        inputs = prompts(3)
        mixed = bench.model.generate(**inputs, **options, adapter_names=names)
        assert_rows_equal_peft(bench, mixed, inputs, names, **GREEDY)
        assert 1 <= graphs() <= 2  # compiled indeed, and not again


def test_compiled_before_attach_and_after_detach(graphs, tmp_path):
    model = make_model("llama", num_hidden_layers=1)
    folder = make_adapter(model, tmp_path, seed=0, r=4, target_modules="all-linear")
    references = {"one": peft_model(model, folder), None: peft_model(model, None)}
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    inputs = prompts(2)
    options = {**GREEDY, "cache_implementation": "static", "compile_config": config}
    expected = {
        name: reference.generate(**inputs, **GREEDY) for name, reference in references.items()
    }

    assert torch.equal(model.generate(**inputs, **options), expected[None])
    attach(model, "torch").load_adapter("one", folder)
    mixed = model.generate(**inputs, **options, adapter_names=[None, "one"])
    assert torch.equal(mixed[0], expected[None][0])
    assert torch.equal(mixed[1], expected["one"][1])
    assert not torch.equal(mixed[1], expected[None][1])
    detach(model)
    assert torch.equal(model.generate(**inputs, **options), expected[None])
    assert graphs() >= 2


def test_greedy_tokens_are_the_same_over_many_runs(attached):
    bench, _ = attached("llama")
    inputs = prompts(3)
    first = bench.model.generate(**inputs, **GREEDY, adapter_names=NAMES)
    assert all(
        torch.equal(bench.model.generate(**inputs, **GREEDY, adapter_names=NAMES), first)
        for _ in range(10)
    )


def test_neighbours_do_not_change_a_row(attached):
    bench, _ = attached("llama")
    inputs = prompts(3)
    with torch.no_grad():
        first = bench.model(**inputs, adapter_names=["dora", "attention", None]).logits[1:]
        other = bench.model(**inputs, adapter_names=["all-rslora", "attention", None]).logits[1:]
    assert torch.equal(first, other)


def test_a_model_compiled_by_hand(attached, graphs):
    bench, manager = attached("llama")
    inputs = {"input_ids": prompts(3)["input_ids"], "use_cache": False}
    compiled = torch.compile(bench.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for names in (NAMES, ["dora", "whole-head", "embedding-head"]):
            expected = bench.model(**inputs, adapter_names=names).logits
            with manager.batch([LoRARequest(name, 7) for name in names]):
                torch.testing.assert_close(
                    compiled(**inputs).logits, expected, rtol=1e-4, atol=1e-5
                )
        assert graphs() == 1
        with pytest.raises(NoBatchPreparedError):
            compiled(**inputs)
        with pytest.raises(
            Exception, match=r"UnsupportedOpError|adapter_names inside torch\.compile"
        ):
            compiled(**inputs, adapter_names=NAMES)
