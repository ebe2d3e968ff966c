"""Train the three adapters in examples/adapters/ with PEFT, on the CPU, from the files in examples/data/.

Each is of another make, so that together they exercise what adapters in the wild look like:

- pirate: rank 4 on q and v;
- json: rank 8 on every linear, scaled by rsLoRA;
- sql: rank 16 with `rank_pattern` and `alpha_pattern`, and lm_head.

Run `python examples/train_adapters.py [NAME ...]`; a few minutes each. Nothing else needs to be run
again: the results are part of the repository.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

import smollm2

HERE = Path(__file__).parent
IGNORED = -100  # the label of tokens that are not learnt
EPOCHS = 8
BATCH = 4

CONFIGS = {
    "pirate": LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    "json": LoraConfig(r=8, lora_alpha=8, use_rslora=True, target_modules="all-linear"),
    "sql": LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj", "o_proj", "lm_head"],
        rank_pattern={r"layers\.[0-9]\.self_attn\.q_proj": 8, "o_proj": 4},
        alpha_pattern={r"layers\.[0-9]\.self_attn\.q_proj": 8, "o_proj": 16, "lm_head": 8},
    ),
}
LEARNING_RATES = {"pirate": 4e-3, "json": 1e-3, "sql": 1e-3}

logger = logging.getLogger("train")


def batches(
    tokenizer: PreTrainedTokenizerBase, path: Path, generator: torch.Generator
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """One epoch in a fresh order: model inputs, and labels that cover the answers alone."""
    examples = [json.loads(line) for line in path.read_text().splitlines()]
    for chosen in torch.randperm(len(examples), generator=generator).split(BATCH):
        prompts = [smollm2.chat(tokenizer, examples[i]["prompt"]) for i in chosen]
        texts = [
            prompt + examples[i]["answer"] + tokenizer.eos_token
            for prompt, i in zip(prompts, chosen, strict=True)
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
        for row, prompt in enumerate(prompts):
            labels[row, : len(tokenizer(prompt)["input_ids"])] = IGNORED
        yield dict(inputs), labels


def train(name: str) -> None:
    """Train one adapter and write it to examples/adapters/NAME in bfloat16."""
    torch.manual_seed(0)
    base, tokenizer = smollm2.load()
    model = get_peft_model(base, CONFIGS[name])
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATES[name], weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(EPOCHS):
        losses = []
        for inputs, labels in batches(tokenizer, HERE / "data" / f"{name}.jsonl", generator):
            logits = model(**inputs).logits
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        logger.info(
            "%s: epoch %d of %d, loss %.3f", name, epoch + 1, EPOCHS, sum(losses) / len(losses)
        )
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)
    target = HERE / "adapters" / name
    model.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(target, save_embedding_layers=False)
    (
        target / "README.md"
    ).unlink()  # an empty form; examples/adapters/README.md describes all three
    size = (target / "adapter_model.safetensors").stat().st_size
    logger.info("%s: %.1f MB in %s", name, size / 1e6, target)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for chosen in sys.argv[1:] or CONFIGS:
        train(chosen)
