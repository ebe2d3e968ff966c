"""Plugins of other people: what is found, what is refused, and that none takes the host down."""

from __future__ import annotations

import pytest

EVERYTHING = ("good", "broken", "misspelt", "wrong", "quits", "shapeless", "hookless")

NAMES = "import lora_core; answer = [spec.name for spec in lora_core.list_backends()]"

CAUGHT = """
from lora_core import load_backend
from lora_core.errors import LoRACoreError
answer = "nothing was raised"
try:
    load_backend({name!r})
except LoRACoreError as error:
    answer = [type(error).__name__, str(error)]
"""


def test_an_installed_distribution_is_listed_after_those_of_higher_priority(ask):
    names = ask(NAMES, "good")
    assert names.index("example") > names.index("torch")


def test_listing_imports_neither_torch_nor_triton_nor_the_backend(ask):
    code = f"{NAMES}; import sys; answer = list(sys.modules)"
    heavy = {"torch", "triton", "numpy", "pydantic", "lora_core_example_good_backend"}
    assert set(ask(code, "good")) & heavy == set()


def test_a_loaded_backend_computes(ask):
    code = """
        import torch, lora_core
        torch.manual_seed(0)
        backend = lora_core.load_backend("example")
        weights = backend.allocate_weights(
            num_slots=2, max_rank=4, in_features=8,
            layout=lora_core.SliceLayout((6,)), dtype=torch.float32,
        )
        weights.a.normal_(), weights.b.normal_()
        weights.ranks.fill_(3), weights.scalings.fill_(0.5)
        base = torch.nn.Linear(8, 6)
        x = torch.randn(5, 8)
        backend.prepare_batch(lora_core.LoRABatch(lengths=[2, 3], slots=[1, -1]))
        with torch.no_grad():
            expected = base(x)
            expected[:2] += 0.5 * (x[:2] @ weights.a[1, 0, :3].T) @ weights.b[1, :, :3].T
            answer = (backend.linear(x, base, weights) - expected).abs().max().item()
    """
    assert ask(code, "good") < 1e-5


@pytest.mark.parametrize(
    ("distribution", "reason"),
    [
        ("broken", "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("misspelt", "unknown hook 'lora_core_backend'"),
        ("quits", "SystemExit: licence expired"),
        ("shapeless", "lora_core_backends returned {'name': 'shapeless'}, expected a list"),
        ("hookless", "implements no hook: mark a function named lora_core_backends or"),
    ],
)
def test_a_faulty_plugin_is_named_with_the_reason_and_leaves_the_others(ask, distribution, reason):
    code = "import lora_core; answer = [lora_core.load_backend('torch').name, lora_core.explain()]"
    name, explanation = ask(code, distribution, "good")
    line = next(line for line in explanation.splitlines() if line.startswith(f"{distribution} "))
    assert name == "torch"
    assert f"{distribution} (from lora-core-example-{distribution}): failed to load: " in line
    assert reason in line
    assert "example (dense): available" in explanation


def test_every_faulty_plugin_at_once_leaves_the_sound_ones(ask):
    names = ask(NAMES, *EVERYTHING)
    assert {"torch", "example"} <= set(names)
    assert "unheard" not in names


def test_an_unknown_name_gets_the_list_the_nearest_and_what_failed(ask):
    kind, message = ask(CAUGHT.format(name="exampel"), "good", "broken")
    assert kind == "BackendNotFoundError"
    assert "no dense backend is named 'exampel'" in message
    assert "example" in message
    assert "torch" in message
    assert "Did you mean 'example'?" in message
    assert "broken (from lora-core-example-broken): ModuleNotFoundError" in message


def test_two_distributions_of_one_name_are_an_error_that_names_both(ask):
    kind, message = ask(CAUGHT.format(name="example"), "good", "duplicate")
    assert kind == "PluginError"
    assert "'lora-core-example-duplicate' and 'lora-core-example-good'" in message
    assert "LORA_CORE_DISABLE" in message


def test_a_conflict_leaves_other_names_usable(ask):
    code = "import lora_core; answer = lora_core.load_backend('torch', device='cpu').name"
    assert ask(code, "good", "duplicate") == "torch"


def test_disabling_one_of_two_resolves_the_conflict(ask):
    code = "import lora_core; answer = lora_core.load_backend('example').name"
    assert ask(code, "good", "duplicate", LORA_CORE_DISABLE="duplicate") == "example"


@pytest.mark.parametrize("switched_off", ["good", "example", " other, example "])
def test_disabling_by_entry_point_or_by_backend(ask, switched_off):
    code = f"{CAUGHT.format(name='example')}\nimport lora_core\nanswer.append(lora_core.explain())"
    kind, _, explanation = ask(code, "good", LORA_CORE_DISABLE=switched_off)
    assert kind == "BackendNotFoundError"
    assert ": disabled by LORA_CORE_DISABLE" in explanation
    assert "example (dense)" not in explanation


def test_a_disabled_plugin_is_never_imported(ask):
    code = "import sys, lora_core; lora_core.explain(); answer = 'lora_core_example_good' in sys.modules"
    assert ask(code, "good", LORA_CORE_DISABLE="good") is False


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("nowhere", "PluginError", "No module named 'lora_core_example_missing'"),
        ("classless", "PluginError", "has no attribute 'Missing'"),
        ("tomorrow", "PluginError", "declares contract 1.99, but this lora_core implements 1.0"),
        ("renamed", "PluginError", "registered as 'renamed' but its class says 'another'"),
        ("elsewhere", "BackendUnavailableError", "here: the abacus is not plugged in"),
        ("nervous", "BackendUnavailableError", "its own check failed: OSError: driver not found"),
    ],
)  # fmt: skip
def test_a_backend_that_cannot_be_loaded_says_why(ask, name, kind, reason):
    found, message = ask(CAUGHT.format(name=name), "wrong")
    assert (found, reason in message) == (kind, True), message
    assert name in message


def test_explain_has_one_line_per_backend(ask):
    lines = ask("import lora_core; answer = lora_core.explain().splitlines()", *EVERYTHING)
    subjects = [line.partition(":")[0] for line in lines]
    for name in ("torch", "example", "nowhere", "tomorrow", "elsewhere", "nervous"):
        assert subjects.count(f"{name} (dense)") == 1
    for name in ("broken", "misspelt", "quits", "shapeless", "hookless"):
        assert subjects.count(f"{name} (from lora-core-example-{name})") == 1
    assert "torch (dense): available" in lines


def test_without_a_name_the_available_backend_of_highest_priority_is_taken(ask):
    code = "import lora_core; answer = lora_core.load_backend(device='cpu').name"
    # 'nowhere' and its like stand at priority 0 too, but cannot be loaded; 'example' is at -10
    assert ask(code, *EVERYTHING, LORA_CORE_DISABLE="triton,csgmv") == "torch"
    assert ask(code, "good", LORA_CORE_DISABLE="triton,csgmv,torch") == "example"


def test_no_backend_at_all_says_what_there_was(ask):
    code = CAUGHT.format(name=None)
    kind, message = ask(code, "wrong", LORA_CORE_DISABLE="torch,triton,csgmv")
    assert kind == "BackendUnavailableError"
    assert "no dense backend is available" in message
    assert "elsewhere: the abacus is not plugged in" in message


def test_an_unknown_device_is_refused_by_name(ask):
    code = CAUGHT.replace("load_backend({name!r})", "load_backend('torch', device='gpu')")
    kind, message = ask(code)
    assert kind == "BackendUnavailableError"
    assert "'gpu' is no device that torch knows" in message


def test_a_backend_of_the_other_family_is_pointed_to(ask):
    code = """
        import lora_core.plugins as plugins
        from lora_core.errors import BackendNotFoundError
        try:
            plugins.load_moe_backend("example")
        except BackendNotFoundError as error:
            answer = str(error)
    """
    assert "'example' is a dense backend: use load_backend" in ask(code, "good")
