"""adapter_config.json: scales, patterns, and refusals by name."""

from __future__ import annotations

import json
import math

import pytest

from lora_core.adapters.config import AdapterConfig
from lora_core.errors import AdapterFormatError, UnsupportedAdapterError

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


def parse(**fields) -> AdapterConfig:
    return AdapterConfig.parse({"peft_type": "LORA", **fields}, where="the config")


@pytest.mark.parametrize(
    ("rank", "alpha", "use_rslora", "expected"),
    [
        (16, 16, True, 4.0),
        (64, 64, True, 8.0),
        (16, 16, False, 1.0),
        (8, 16, False, 2.0),
        (3, 1, False, 1 / 3),
    ],
)
def test_k1_scaling(rank, alpha, use_rslora, expected):
    assert parse(use_rslora=use_rslora).scaling(rank=rank, alpha=alpha) == expected


def test_k2_patterns_change_rank_and_scale():
    config = parse(
        r=8,
        lora_alpha=16,
        rank_pattern={"layers.1.self_attn.q_proj": 32},
        alpha_pattern={"layers.1.self_attn.q_proj": 128},
    )
    assert [config.rank_of(Q0), config.rank_of(Q1)] == [8, 32]
    scales = [config.scaling(rank=config.rank_of(m), alpha=config.alpha_of(m)) for m in (Q0, Q1)]
    assert scales == [2.0, 4.0]


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "self_attn.q_proj",
        "q_proj|k_proj",
        r".*\.1\..*",
        "^model.layers.1.self_attn.q_proj",
        "_proj",
        "proj",
    ],
)
def test_k2_matching_is_pefts_own(pattern):
    from peft.utils.other import get_pattern_key

    config = parse(r=8, rank_pattern={pattern: 4})
    for module in (Q0, Q1, "lm_head", "q_proj"):
        expected = {pattern: 4}.get(get_pattern_key([pattern], module), 8)
        assert expected == config.rank_of(module)


def test_k2_first_matching_pattern_wins():
    assert parse(rank_pattern={"q_proj": 3, "layers.1.self_attn.q_proj": 5}).rank_of(Q1) == 3


def test_k2_patterns_that_match_nothing_are_reported():
    config = parse(
        rank_pattern={"q_prj": 3},
        alpha_pattern={"q_proj": 2.0},
        target_modules=["q_proj", "up_proj"],
    )
    assert config.idle_patterns([Q0, Q1]) == [
        "rank_pattern 'q_prj' matches no module",
        "target_modules 'up_proj' has no tensors",
    ]


def test_k4_a_regex_is_never_read_letter_by_letter():
    assert parse(target_modules=".*q_proj").idle_patterns([Q0]) == []
    assert parse(target_modules="all-linear").target_modules == "all-linear"


def test_defaults_are_pefts():
    from peft import LoraConfig

    theirs = LoraConfig()
    ours = parse()
    assert (ours.r, ours.lora_alpha, ours.use_rslora) == (
        theirs.r,
        theirs.lora_alpha,
        theirs.use_rslora,
    )
    assert (ours.bias, ours.use_dora, ours.lora_bias) == (
        theirs.bias,
        theirs.use_dora,
        theirs.lora_bias,
    )


def test_every_field_of_the_installed_peft_is_known():
    """A field that a newer PEFT adds must be read, refused or known to be inert; here is the reminder."""
    import dataclasses

    from peft import LoraConfig

    from lora_core.adapters import config as module

    known = set(AdapterConfig.model_fields) | module._INERT_FIELDS | set(module._REFUSED_FIELDS)
    assert {f.name for f in dataclasses.fields(LoraConfig)} - known == set()


def test_all_default_fields_of_peft_are_accepted(tmp_path):
    from peft import LoraConfig

    config = LoraConfig(target_modules=["q_proj"])
    config.save_pretrained(tmp_path)
    saved = AdapterConfig.parse((tmp_path / "adapter_config.json").read_bytes(), where="file")
    assert saved == AdapterConfig.parse(config, where="object")
    assert saved.target_modules == ("q_proj",)


REFUSED = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3},
    "kasa_config": {"x": 1},
    "layer_replication": [[0, 4]],
    "megatron_config": {"x": 1},
    "monteclora_config": {"x": 1},
    "trainable_token_indices": [7],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "a_field_of_the_future": "on",
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED)
def test_features_that_change_results_are_refused_by_name(field, value):
    with pytest.raises(UnsupportedAdapterError, match=rf"the config: {field} is "):
        parse(**{field: value})
    assert parse(**{field: None}) == parse()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"])
def test_initialisations_that_change_the_base_are_refused(init):
    with pytest.raises(UnsupportedAdapterError, match=f"init_lora_weights is '{init}'"):
        parse(init_lora_weights=init)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_other_initialisations_are_history(init):
    assert parse(init_lora_weights=init).r == 8


@pytest.mark.parametrize("kind", ["LOHA", "IA3", "PROMPT_TUNING", "ADALORA"])
def test_other_methods_are_refused_by_name(kind):
    with pytest.raises(UnsupportedAdapterError, match=f"peft_type is '{kind}'"):
        AdapterConfig.parse({"peft_type": kind}, where="the config")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "no 'peft_type'"),
        (json.dumps({"peft_type": "LORA", "r": 0}), "r is 0"),
        (json.dumps({"peft_type": "LORA", "r": "many"}), "r is 'many'"),
        (json.dumps({"peft_type": "LORA", "bias": "some"}), "bias is 'some'"),
        (json.dumps({"peft_type": "LORA", "rank_pattern": {"q": 0}}), r"rank_pattern\['q'\] is 0"),
        (json.dumps({"peft_type": "LORA", "rank_pattern": {"(": 1}}), "not a regular expression"),
        (json.dumps({"peft_type": "LORA", "lora_alpha": math.inf}), "an alpha is inf"),
    ],
)
def test_malformed_configurations(text, match):
    with pytest.raises(AdapterFormatError, match=f"the config: .*{match}|the config: {match}"):
        AdapterConfig.parse(text, where="the config")
