"""SGLang's own LoRA manager, memory pool and layers, on a CPU, over several backends: run by
test_sglang_layers.py with the folder of SGLang's unpacked wheel as its argument.

SGLang's lora package is real. What it imports of the rest is replaced here by the little of it that
the package looks at, because that rest needs SGLang's kernel libraries. Prints one line of JSON: the
largest error of every forward against float64, and the largest difference between backends, each
relative to the largest output.
"""

# ruff: noqa: E402, T201 - SGLang is imported after what stands around it

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

WHEEL, DEVICE = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu"

# -- around SGLang's lora package ----------------------------------------------------------------


def unpinned(function):
    """Pinned memory exists only beside an accelerator."""

    def call(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return call


if DEVICE == "cpu":
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self: self


def package(name: str) -> None:
    """A package of the wheel without what its `__init__` would import."""
    module(name).__path__ = [str(WHEEL.joinpath(*name.split(".")))]


def module(name: str, **attributes) -> ModuleType:
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(attributes)
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, made)
    return made


class Quantisation:
    def apply(self, layer, x, bias=None):
        return functional.linear(x, layer.weight, bias)


class Linear(nn.Module):
    """A base layer of one process."""

    def __init__(self, inputs: int, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sum(parts), inputs), requires_grad=False)
        self.output_sizes = self.output_partition_sizes = list(parts)
        self.output_size, self.input_size_per_partition = sum(parts), inputs
        self.bias, self.tp_group, self.kv_tp_group = None, None, None
        self.skip_bias_add = self.gather_output = self.use_dp_attention_reduce = False
        self.input_is_parallel = self.reduce_results = True
        self.quant_method = Quantisation()


class ReplicatedLinear(Linear): ...


class ColumnParallelLinear(Linear): ...


class MergedColumnParallelLinear(Linear): ...


class RowParallelLinear(Linear): ...


class QKVParallelLinear(Linear):
    def __init__(self, inputs: int, parts: tuple[int, ...], head: int) -> None:
        super().__init__(inputs, parts)
        self.q_proj_shard_size, self.kv_proj_shard_size = parts[:2]
        self.head_size, self.num_kv_head_replicas = head, 1
        self.total_num_heads, self.total_num_kv_heads = parts[0] // head, parts[1] // head


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, dim), requires_grad=False)
        self.embedding_dim, self.tp_size = dim, 1
        self.num_embeddings = self.org_vocab_size = vocab

    def forward(self, ids):
        return functional.embedding(ids, self.weight)


class ParallelLMHead(VocabParallelEmbedding): ...


class Layout(enum.Enum):
    DP_LOCAL = enum.auto()
    TP_GLOBAL = enum.auto()


@dataclass
class ForwardBatch:
    """SGLang's, as far as LoRA reads it. mode: "decode", "extend" or "verify"."""

    mode: str
    lora_ids: list[str | None]
    lengths: list[int]
    logprob_starts: list[int] | None = None
    forward_mode: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        mode = self.mode
        self.batch_size, self.extend_num_tokens = len(self.lengths), sum(self.lengths)
        self.extend_seq_lens_cpu = self.lengths
        self.extend_seq_lens = torch.tensor(self.lengths, dtype=torch.int32).to(DEVICE)
        self.return_logprob = self.logprob_starts is not None
        self.extend_logprob_start_lens_cpu = self.logprob_starts
        self.spec_info = SimpleNamespace(draft_token_num=self.lengths[0])
        self.forward_mode = SimpleNamespace(
            is_idle=lambda: False,
            is_decode=lambda: mode == "decode",
            is_target_verify=lambda: mode == "verify",
            is_extend=lambda: mode in {"extend", "verify"},
            is_draft_extend_v2=lambda: False,
            is_cuda_graph=lambda: mode in {"decode", "verify"},
        )


class ServerArgs:
    """The command line of LoRA alone, with SGLang's own fields."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        from sglang.srt.arg_groups.arg_utils import add_cli_args_from_dataclass
        from sglang.srt.arg_groups.fields.lora import Lora

        add_cli_args_from_dataclass(parser, Lora)


def same(x, *_):
    return x


OPS = torch.library.Library("sglang", "FRAGMENT")


def custom_op(op_name, op_func, mutates_args, fake_impl) -> None:
    OPS.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args))
    OPS.impl(op_name, op_func, "CompositeExplicitAutograd")


for name in (
    "sglang", "sglang.srt", "sglang.srt.lora", "sglang.srt.utils", "sglang.srt.layers", "sglang.srt.layers.moe",
    "sglang.srt.distributed", "sglang.srt.model_executor", "sglang.srt.models", "sglang.kernels", "sglang.kernels.ops",
    "sglang.kernels.ops.lora", "sglang.srt.plugins", "sglang.srt.configs", "sglang.srt.managers",
):  # fmt: skip
    package(name)

UTILITIES = {
    "is_pin_memory_available": lambda: False,
    "get_available_gpu_memory": lambda *_: 0.0,
    "empty_device_cache": lambda: None,
    "replace_submodule": lambda model, name, new: setattr(
        model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], new
    ),
    "ConcurrentCounter": object,
    "LORA_TARGET_ALL_MODULES": "all",
    "SUPPORTED_LORA_TARGET_MODULES": ["q_proj"],
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
    "direct_register_custom_op": custom_op,
    **dict.fromkeys(("is_cuda", "is_hip", "is_xpu", "is_sm90_supported", "is_blackwell_supported"), lambda: False),
}  # fmt: skip
vars(sys.modules["sglang.srt.utils"]).update(UTILITIES)
module("sglang.srt.utils.common", **UTILITIES)
module("sglang.srt.utils.hf_transformers_utils", AutoConfig=object)
module("sglang.srt.utils.aio_rwlock", RWLock=object)
vars(sys.modules["sglang.srt.distributed"]).update(
    divide=lambda a, b: a // b,
    split_tensor_along_last_dim=lambda x, num_partitions: x.chunk(num_partitions, -1),
    tensor_model_parallel_all_gather=same,
    tensor_model_parallel_all_reduce=same,
)
module("sglang.srt.distributed.utils", get_group_rank_size=lambda group: (0, 1))
module(
    "sglang.srt.layers.linear",
    LinearBase=Linear,
    ColumnParallelLinear=ColumnParallelLinear,
    MergedColumnParallelLinear=MergedColumnParallelLinear,
    QKVParallelLinear=QKVParallelLinear,
    ReplicatedLinear=ReplicatedLinear,
    RowParallelLinear=RowParallelLinear,
)
module(
    "sglang.srt.layers.vocab_parallel_embedding",
    ParallelLMHead=ParallelLMHead,
    VocabParallelEmbedding=VocabParallelEmbedding,
)
module(
    "sglang.srt.layers.utils",
    get_layer_id=lambda name: int(m[1]) if (m := re.search(r"layers\.(\d+)\.", name)) else None,
)
module("sglang.srt.layers.dp_attention", DpPaddingMode=None, dp_gather_replicate=None, dp_slot_in=None)  # fmt: skip
module("sglang.srt.layers.moe.topk", TopKOutput=object)
module(
    "sglang.srt.layers.moe.utils",
    should_skip_mlp_all_reduce=lambda: False,
    get_moe_runner_backend=lambda: SimpleNamespace(is_lora=lambda: False),
)
package("sglang.srt.layers.moe.fused_moe_triton")
module("sglang.srt.layers.moe.fused_moe_triton.layer", FusedMoE=type("FusedMoE", (), {}))
module("sglang.srt.models.inkling_common")
module("sglang.srt.models.inkling_common.dense_mlp", InklingBatchDenseMLP=type("Inkling", (), {}))
module("sglang.srt.model_executor.forward_batch_info", ForwardBatch=ForwardBatch)
module("sglang.srt.model_executor.runner", get_is_capture_mode=lambda: False)
package("sglang.kernels.ops.moe")
module("sglang.kernels.ops.moe.moe_align", moe_align_block_size=None)
module("sglang.srt.configs.load_config", LoadConfig=object)
module("sglang.srt.model_loader")
module("sglang.srt.model_loader.loader", DefaultModelLoader=object)
module("sglang.srt.managers.io_struct", LoRAUpdateOutput=SimpleNamespace)
module("sglang.srt.server_args", ServerArgs=ServerArgs)
PARALLEL = SimpleNamespace(
    attn_tp_size=1, attn_cp_size=1, attn_dp_enabled=False, tp_size=1, tp_rank=0, dcp_replicate_q_proj=False,
    moe_ep_size=1, moe_ep_rank=0, moe_tp_size=1, moe_tp_rank=0,
)  # fmt: skip
module(
    "sglang.srt.runtime_context",
    LoRABatchLayout=Layout,
    get_exec=SimpleNamespace,
    get_schedule=SimpleNamespace,
    get_spec=lambda: SimpleNamespace(speculative_algorithm=None),
    get_parallel=lambda: PARALLEL,
    get_forward=lambda: SimpleNamespace(
        lora_batch_layout=Layout.DP_LOCAL, scoped=lambda **_: contextlib.nullcontext()
    ),
    get_lora=lambda: SimpleNamespace(
        enable_lora_overlap_loading=False, lora_eviction_policy="lru", experts_shared_outer_loras=None,
        lora_use_virtual_experts=False, lora_strict_loading=True,
    ),
)  # fmt: skip

# -- a model of one layer, and its adapters --------------------------------------------------------

from lora_core.integrations.sglang import register

register()  # SGLang's load_plugins calls it by the entry point of an installation, then this:

from sglang.srt.plugins.hook_registry import HookRegistry

HookRegistry.apply_hooks()

from sglang.srt.environ import envs
from sglang.srt.lora import lora_moe_runners
from sglang.srt.lora.backend.lora_registry import get_backend_from_name
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef

SGLANGS_HOOKS = lora_moe_runners.build_lora_hooks
K, HEAD, RANK, VOCAB, SLOTS = 32, 8, 8, 48, 4
PREFIX = {"self_attn": ("qkv_proj", "o_proj", "fused_qkv_a_proj_with_mqa", "q_b_proj"), "mlp": ("gate_up_proj", "down_proj")}  # fmt: skip
SITES = {  # site -> inputs, {projection: width}
    "qkv_proj": (K, {"q_proj": 32, "k_proj": 16, "v_proj": 16}),
    "o_proj": (32, {"o_proj": K}),
    "fused_qkv_a_proj_with_mqa": (K, {"q_a_proj": 24, "kv_a_proj_with_mqa": 12}),
    "q_b_proj": (24, {"q_b_proj": 40}),
    "gate_up_proj": (K, {"gate_proj": 24, "up_proj": 24}),
    "down_proj": (24, {"down_proj": K}),
    "embed_tokens": (VOCAB, {"embed_tokens": K}),
    "lm_head": (K, {"lm_head": VOCAB}),
}
KINDS = {"qkv_proj": QKVParallelLinear, "o_proj": RowParallelLinear, "fused_qkv_a_proj_with_mqa": ReplicatedLinear, "q_b_proj": ColumnParallelLinear, "gate_up_proj": MergedColumnParallelLinear, "down_proj": RowParallelLinear}  # fmt: skip


class Config(SimpleNamespace):
    hidden_size, vocab_size, num_hidden_layers, num_attention_heads = K, VOCAB, 1, 4
    q_lora_rank = SITES["fused_qkv_a_proj_with_mqa"][1]["q_a_proj"]


class Model(nn.Module):
    """Enough of a model for SGLang to find, wrap and fill its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        layer = nn.Module()
        for parent, names in PREFIX.items():
            holder = nn.Module()
            setattr(layer, parent, holder)
            for name in names:
                inputs, parts = SITES[name]
                arguments = (HEAD,) if name == "qkv_proj" else ()
                setattr(holder, name, KINDS[name](inputs, tuple(parts.values()), *arguments))
        self.layers = nn.ModuleList([layer])
        self.embed_tokens = VocabParallelEmbedding(VOCAB, K)
        self.lm_head = ParallelLMHead(VOCAB, K)

    def get_hidden_dim(self, name: str, layer: int) -> tuple[int, int]:
        inputs, parts = SITES[name]
        return inputs, sum(parts.values())

    def site(self, name: str) -> nn.Module:
        for parent, names in PREFIX.items():
            if name in names:
                return getattr(getattr(self.layers[0], parent), name)
        return getattr(self, name)


ADAPTERS = {"two": (2, 3), "eight": (8, 4), "five": (5, 20), "one": (1, 2)}  # rank, alpha


def adapter(name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(sum(name.encode()))
    rank, _ = ADAPTERS[name]
    return {
        part: (torch.randn(rank, inputs), torch.randn(width, rank))
        for inputs, parts in SITES.values()
        for part, width in parts.items()
        if (name, part) != ("five", "k_proj")  # an adapter without one of the packed projections
    }


def files(name: str) -> dict[str, torch.Tensor]:
    """As PEFT writes them."""
    tensors = {}
    for part, (a, b) in adapter(name).items():
        site = next(site for site, (_, parts) in SITES.items() if part in parts)
        parent = next((parent for parent, names in PREFIX.items() if site in names), None)
        path = part if parent is None else f"layers.0.{parent}.{part}"
        a_name, b_name = ("lora_embedding_A", "lora_embedding_B") if part == "embed_tokens" else ("lora_A.weight", "lora_B.weight")  # fmt: skip
        tensors[f"base_model.model.model.{path}.{a_name}"] = a
        tensors[f"base_model.model.model.{path}.{b_name}"] = b
    return tensors


def expected(site: str, x: torch.Tensor, weight: torch.Tensor, names: list[str | None]):
    """Row by row in float64."""
    y = functional.linear(x.double(), weight.double().T if site == "embed_tokens" else weight.double())  # fmt: skip
    for row, name in enumerate(names):
        at = 0
        for part, width in SITES[site][1].items():
            if name is not None and part in (tensors := adapter(name)):
                a, b = (tensor.double() for tensor in tensors[part])
                rank, alpha = ADAPTERS[name]
                y[row, at : at + width] += alpha / rank * (b @ (a @ x[row].double()))
            at += width
    return y


# -- forwards --------------------------------------------------------------------------------------

FORWARDS = {
    "decode": ForwardBatch("decode", ["two", "two", None, "eight", None], [1] * 5),
    "extend": ForwardBatch("extend", ["eight", None, "five"], [3, 2, 4]),
    "evicts": ForwardBatch("extend", ["one", "five", "eight", "one"], [2, 1, 3, 1]),
    "no base slot": ForwardBatch("decode", ["one", "five", "eight", "two"], [1] * 4),
    "verify": ForwardBatch("verify", ["two", None, "one"], [3, 3, 3]),
    "base only": ForwardBatch("extend", [None, None], [2, 3]),
    "logprobs": ForwardBatch("extend", ["two", None, "five"], [3, 2, 4], logprob_starts=[0, 1, 4]),
    "passes": ForwardBatch("extend", ["two", "eight", None, "five"], [3, 2, 4, 5], logprob_starts=[0, 0, 1, 0]),
}  # fmt: skip
BASE_ONLY: list[str | None] = [None]
GRAPHED = {  # a batch to capture, and batches to replay it with
    "decode graph": (ForwardBatch("decode", BASE_ONLY * 6, [1] * 6), [
        ForwardBatch("decode", ["two", None, "eight"], [1] * 3),
        ForwardBatch("decode", ["five", "five", None, "one", "eight", "five"], [1] * 6),
        ForwardBatch("decode", BASE_ONLY, [1]),
    ]),
    "prefill graph": (ForwardBatch("extend", BASE_ONLY * 2, [7, 5]), [
        ForwardBatch("extend", ["one", None, "eight"], [3, 2, 4]),
        ForwardBatch("extend", ["five", "two"], [1, 11]),
    ]),
}  # fmt: skip


def run(backend: str, *, graphs: bool, without: str = "") -> tuple[LoRAManager, dict[str, tuple]]:
    """Outputs and what they should be, of every forward and site but `without`."""
    model = Model().to(DEVICE)
    bases = {site: model.site(site).weight.data.clone() for site in SITES if site != without}
    manager = LoRAManager(
        base_model=model, base_hf_config=model.config, max_loras_per_batch=SLOTS, load_config=None,
        dtype=torch.float32, server_args=None, lora_backend=backend, max_lora_rank=RANK, target_modules=set(SITES),
    )  # fmt: skip
    parts = [part for _, parts in SITES.values() for part in parts]
    for name, (rank, alpha) in ADAPTERS.items():
        done = manager.load_lora_adapter_from_tensors(
            LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=False),
            files(name),
            {"peft_type": "LORA", "target_modules": parts, "r": rank, "lora_alpha": alpha},
        )
        assert done.success, done.error_message
    results: dict[str, tuple] = {}
    for step, batch in FORWARDS.items():
        forward(manager, model, bases, step, batch, results)
    if graphs:
        graphed(manager, model, bases, results)
    manager.reset_lora_batch()
    x = torch.randn(3, K).to(DEVICE)
    y, _ = model.site("qkv_proj")(x)
    assert torch.equal(y, functional.linear(x, bases["qkv_proj"]))
    return manager, results


def inputs(step: str, site: str, rows: int) -> torch.Tensor:
    """Random ones, of embed_tokens ids; the same for every backend."""
    torch.manual_seed(sum(f"{step} {site}".encode()))
    x = torch.randint(0, VOCAB, (rows,)) if site == "embed_tokens" else torch.randn(rows, SITES[site][0])  # fmt: skip
    return x.to(DEVICE)


def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y


def prepare(manager, batch: ForwardBatch) -> list[str | None]:
    """The adapter of each row."""
    manager.fetch_new_loras(set(batch.lora_ids))
    manager.prepare_lora_batch(batch)
    return [name for name, n in zip(batch.lora_ids, batch.lengths, strict=True) for _ in range(n)]


def forward(manager, model, bases, step, batch, results) -> None:
    rows = prepare(manager, batch)
    for site in bases:
        layer, x = model.site(site), inputs(step, site, len(rows))
        if site == "lm_head":
            outputs = logits(layer, batch, x, rows)
        else:
            outputs = [(call(layer, x), x, rows)]
        for number, output in enumerate(outputs):
            keep(results, f"{step} {site} {number}", site, bases, *output)


def graphed(manager, model, bases, results) -> None:
    """Forwards captured with the base model alone, replayed with adapters; rows past them are padding."""
    manager.init_decode_cuda_graph_batch_info(6, 1)
    manager.init_prefill_cuda_graph_batch_info(12, 4)
    for kind, (first, batches) in GRAPHED.items():
        room = sum(first.lengths)
        prepare(manager, first)
        recorded = {
            site: record(manager, model.site(site), inputs(kind, site, room))
            for site in bases
            if (kind, site) != ("prefill graph", "lm_head")  # SGLang runs it after the graph
        }
        for number, batch in enumerate(batches):
            step = f"{kind} {number}"
            rows = prepare(manager, batch)
            assert manager.lora_backend.batch_info.use_cuda_graph
            for site, (x, y, replay) in recorded.items():
                x.copy_(inputs(step, site, room))
                replay()
                keep(results, f"{step} {site}", site, bases, y, x, rows + [None] * (room - len(rows)))  # fmt: skip
            if kind == "prefill graph":
                outputs = logits(model.site("lm_head"), batch, inputs(step, "lm_head", room), rows)
                for output in outputs:
                    keep(results, f"{step} lm_head", "lm_head", bases, *output)


def record(manager, layer, x):
    """Input and output of a captured forward, and its replay; without a GPU, of one that is repeated."""

    def once():
        manager.reset_routing_cache()
        return call(layer, x)

    y = once()
    if DEVICE == "cpu":
        return x, y, lambda: y.copy_(once())
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = once()
    return x, y, graph.replay


def keep(results, key, site, bases, y, x, names) -> None:
    idle = [row for row, name in enumerate(names) if name is None]
    plain = functional.embedding(x, bases[site]) if site == "embed_tokens" else functional.linear(x, bases[site])  # fmt: skip
    assert torch.equal(y[idle], plain[idle]), key
    x = functional.one_hot(x, VOCAB) if site == "embed_tokens" else x
    results[key] = y.cpu().clone(), expected(site, x.cpu(), bases[site].cpu(), names)


def logits(layer, batch, x, rows):
    """lm_head as LogitsProcessor calls it: rows pruned, in several passes where they are many."""
    if batch.mode != "extend":
        yield call(layer, x), x, rows
        return
    kept, at = [], 0
    for length, start in zip(batch.lengths, batch.logprob_starts or [n - 1 for n in batch.lengths], strict=True):  # fmt: skip
        kept += range(at + min(start, length - 1), at + length)
        at += length
    size = envs.SGLANG_LOGPROB_CHUNK_SIZE.get()
    passes = [kept[i : i + size] for i in range(0, len(kept), size)]
    for number, chosen in enumerate(passes):
        if len(passes) > 1:
            layer.set_lm_head_pass(number)
        yield call(layer, x[chosen]), x[chosen], [rows[row] for row in chosen]
    layer.reset_lm_head_pass()


def told_to_sglang() -> dict[str, bool]:
    """Whether what SGLang's other kernels read of a batch is what its own Triton backend tells them."""
    mine, theirs = (get_backend_from_name(name)(SLOTS, torch.device(DEVICE)) for name in ("lora_core", "triton"))  # fmt: skip
    mine.is_moe_lora = theirs.is_moe_lora = True
    slots = {None: 3, "two": 1, "eight": 0, "five": 2, "one": 0}
    ranks, scalings = [8, 2, 5, 0], [0.5, 1.5, 4.0, 0.0]
    agree = {}
    for step, batch in FORWARDS.items():
        for backend in (mine, theirs):
            chosen = [slots[name] for name in batch.lora_ids]
            backend.prepare_lora_batch(batch, chosen, ranks, scalings, False)
        a, b = vars(mine.batch_info), vars(theirs.batch_info)
        agree[step] = all(
            torch.equal(a[name].long() if name == "lora_ranks" else a[name], b[name])
            if isinstance(b[name], torch.Tensor)
            else a[name] == b[name]
            for name in b
            if name != "moe_lora_info"
        ) and all(
            torch.equal(vars(a["moe_lora_info"])[name], tensor)
            for name, tensor in vars(b["moe_lora_info"]).items()
        )
    return agree


def experts(*, shared: bool) -> dict[str, float]:
    """What SGLang's own hooks and those in their place add to gate_up and to down, compared."""
    torch.manual_seed(int(shared))
    slots, count, rank, hidden, inner, top_k, tokens = 4, 16, 4, 32, 24, 2, 3
    some = 1 if shared else count
    ranks = torch.tensor([4, 2, 0, 3], dtype=torch.int32)
    gate_up_a, gate_up_b = torch.randn(slots, some, 2, rank, hidden), torch.randn(slots, count, 2 * inner, rank)  # fmt: skip
    down_a, down_b = torch.randn(slots, count, rank, inner), torch.randn(slots, some, hidden, rank)
    for slot, live in enumerate(ranks.tolist()):  # SGLang's pool holds zeros past an adapter's rank
        gate_up_a[slot, :, :, live:], down_a[slot, :, live:] = 0, 0
        gate_up_b[slot, ..., live:], down_b[slot, ..., live:] = 0, 0
    tensors = {
        "gate_up_lora_a_weights": gate_up_a.flatten(2, 3),
        "gate_up_lora_b_weights": gate_up_b,
        "down_lora_a_weights": down_a,
        "down_lora_b_weights": down_b,
        "seg_indptr": torch.arange(tokens + 1, dtype=torch.int32),
        "req_to_lora": torch.tensor([1, 2, 3], dtype=torch.int32),
        "lora_ranks": ranks,
        "adapter_enabled": (ranks > 0).int(),
        "token_lora_mapping": torch.tensor([1, -1, 3], dtype=torch.int32),
    }
    info = lora_moe_runners.LoRAInfo(
        **{name: tensor.to(DEVICE) for name, tensor in tensors.items()},
        max_lora_rank=rank,
        num_experts=count,
        has_active_lora=True,
        experts_shared_outer_loras=shared,
    )
    ids = torch.randint(0, count, (tokens, top_k), dtype=torch.int32).to(DEVICE)
    factors, x, pairs = (torch.rand(*shape).to(DEVICE) for shape in ((tokens, top_k), (tokens, hidden), (tokens * top_k, inner)))  # fmt: skip
    results = []
    for build in (lora_moe_runners.build_lora_hooks, SGLANGS_HOOKS):
        up, down = (
            torch.ones(tokens, top_k, width, device=DEVICE) for width in (2 * inner, hidden)
        )
        hooks = build(x, info, ids)
        hooks.after_gate_up(x, up, factors, ids)
        hooks.after_down(pairs, down, factors, ids)
        assert (up[[0, 2]] != 1).all()
        assert (down[[0, 2]] != 1).all()
        assert (up[1] == 1).all()
        assert (down[1] == 1).all()
        results.append((up, down))
    assert lora_moe_runners.build_lora_hooks is not SGLANGS_HOOKS
    info.has_active_lora = False
    assert lora_moe_runners.build_lora_hooks(x, info, ids) == lora_moe_runners.LoRAHooks()
    return {name: relative(*pair) for name, pair in zip(("gate_up", "down"), zip(*results, strict=True), strict=True)}  # fmt: skip


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def main() -> None:
    os.environ["SGLANG_ENABLE_LOGPROB_CHUNK"], os.environ["SGLANG_LOGPROB_CHUNK_SIZE"] = "1", "4"
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    chosen = parser.parse_args(["--lora-backend", "lora_core"]).lora_backend
    with torch.inference_mode():
        manager, mine = run(chosen, graphs=True)
        peers = {
            "triton": run("triton", graphs=False)[1],
            # does not know of pruned rows
            "torch_native": run("torch_native", graphs=False, without="lm_head")[1],
        }
    backend = manager.lora_backend
    print(
        json.dumps(
            {
                "backend": [type(backend).__module__, backend.rows.name, backend.head.name],
                "layers": sorted(type(model).__name__ for model in manager.base_model.modules() if "WithLoRA" in type(model).__name__),
                "told": told_to_sglang(),
                "experts": [experts(shared=False), experts(shared=True)],
                "errors": {key: relative(*pair) for key, pair in mine.items()},
                "differences": {
                    name: {key: relative(mine[key][0], y) for key, (y, _) in theirs.items()}
                    for name, theirs in peers.items()
                },
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
