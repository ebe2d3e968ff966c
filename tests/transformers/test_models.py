"""One mixed batch equals PEFT with each adapter alone, row by row, on every family of models."""

import pytest
import torch

from tests.transformers.tiny import FAMILIES, NEW_TOKENS, prompts, recipes


def rows_of(name):
    """Every adapter of the family and the base in between, some of them twice."""
    adapters = list(recipes(name))
    return [None, *adapters, None, adapters[0], adapters[2]]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_mixed_batch(attached, name):
    bench, _ = attached(name)
    names = rows_of(name)
    inputs = prompts(len(names))
    with torch.no_grad():
        mixed = bench.model(**inputs, adapter_names=names).logits
        base = bench.references[None](**inputs).logits
        for adapter in dict.fromkeys(names):
            rows = [i for i, other in enumerate(names) if other == adapter]
            alone = bench.references[adapter](**inputs).logits
            assert torch.equal(alone, base) == (adapter is None)
            kept = inputs["attention_mask"][rows].bool()  # what padding answers means nothing
            torch.testing.assert_close(
                mixed[rows][kept],
                alone[rows][kept],
                rtol=1e-4,
                atol=1e-4,
                msg=lambda m, a=adapter: f"{a}: {m}",
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_base_rows_are_bitwise_the_base(attached, name):
    bench, _ = attached(name)
    names = rows_of(name)
    inputs = prompts(len(names))
    base = [i for i, adapter in enumerate(names) if adapter is None]
    with torch.no_grad():
        mixed = bench.model(**inputs, adapter_names=names).logits
        alone = bench.references[None](**inputs).logits
    assert torch.equal(mixed[base], alone[base])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_of_a_mixed_batch(attached, name, cache):
    bench, _ = attached(name)
    names = rows_of(name)
    inputs = prompts(len(names))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
    mixed = bench.model.generate(**inputs, **options, adapter_names=names)
    differing = 0
    for adapter in dict.fromkeys(names):
        rows = [i for i, other in enumerate(names) if other == adapter]
        alone = bench.references[adapter].generate(**inputs, **options)
        assert mixed[rows].tolist() == alone[rows].tolist(), adapter
        base = (
            bench.references[None].generate(**inputs, **options)
            if adapter and cache == "dynamic"
            else alone
        )
        differing += alone[rows].tolist() != base[rows].tolist()
    if cache == "dynamic":
        assert differing >= 3  # adapters that answer otherwise than the base
