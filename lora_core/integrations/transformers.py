"""Many adapters in one batch on a Hugging Face model: `attach`, `generate(adapter_names=...)`, `detach`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from lora_core.backend import LoRABackend
from lora_core.capabilities import Mode
from lora_core.distributed import RankedManager
from lora_core.errors import (
    AttachError,
    BatchMismatchError,
    InvalidBatchError,
    NoBatchPreparedError,
    NoFreeSlotError,
    UnsupportedOpError,
)
from lora_core.integrations.tensor_parallel import (
    is_packed,
    is_sharded,
    tensor_parallel_group,
    wrap_sharded,
)
from lora_core.layers.base import ForwardGate, LoRALayer
from lora_core.layers.embedding import LoRAEmbedding
from lora_core.layers.linear import LoRALinear, OpaqueLinear, linear_features, view_linear
from lora_core.layers.lm_head import LoRALMHead
from lora_core.layers.moe import (
    ExpertsProjection,
    FusedMoEWithLoRA,
    is_packed_experts,
    wrap_packed_experts,
)
from lora_core.manager import LoRAManager, LoRARequest
from lora_core.moe import MoELoRABackend
from lora_core.plugins import load_backend, load_moe_backend
from lora_core.sites import Site
from lora_core.weights import SliceLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE_NAME: Final = "__base__"
"""PEFT's name for rows on the base model; None means the same here."""

_ATTRIBUTE: Final = "_lora_core"
_OMITTED: Final = object()

_PACKED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that pack several projections, and the names adapters know those by."""

_CONTINUOUS: Final = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
)

_REPLACING: Final = ("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings")
"""Methods that would put a bare module where a wrapped one is, and so lose its adapters."""


def attach(
    model: PreTrainedModel,
    backend: LoRABackend[Any] | str | None = None,
    *,
    max_loras: int = 8,
    max_rank: int = 64,
    max_cpu_loras: int | None = None,
    target_modules: Sequence[str] | str | None = None,
    adapter_root: str | Path | None = None,
    experts_backend: MoELoRABackend[Any] | str | None = None,
) -> LoRAManager:
    """Wrap a model's linear, embedding, head and experts modules in place, so that it serves adapters.

    Afterwards `model.generate(..., adapter_names=["sql", None])` and
    `model(..., adapter_names=[...])` run each row of the batch with its own adapter, and None or
    "__base__" on the base model. The argument is PEFT's own.

    Args:
        model: any decoder of transformers, on one device, or cut over several processes by
            transformers' own tensor parallelism. Then every process attaches, loads and calls alike:
            the manager is a `lora_core.distributed.RankedManager`.
        backend: a name for `load_backend`, an instance, or None for the best one available.
        max_loras: slots on the device, the most adapters in one batch.
        max_rank: the largest rank that will be loaded.
        max_cpu_loras: adapters kept in host memory, see `LoRAManager`.
        target_modules: allocate room for these sites at once, see `LoRAManager`.
        adapter_root: load adapters from below this folder only, see `LoRAManager`.
        experts_backend: of experts modules: a name for `load_moe_backend`, an instance, or None for
            the best one available.

    Returns:
        The manager: `manager.load_adapter(name, path)` and all else about adapters.

    Raises:
        AttachError: the model is wrapped already, or lies on several devices.
        UnsupportedOpError: an encoder-decoder.
        BackendNotFoundError: no backend of that name.
        BackendUnavailableError: it cannot run on the model's device.
    """
    _check_model(model)
    device = _device(model)
    for given in (backend, experts_backend):
        if isinstance(given, (LoRABackend, MoELoRABackend)) and given.device != device:
            raise AttachError(
                f"backend {given.name!r} is on {given.device}, but {type(model).__name__} is on {device}: "
                "load the backend on the model's device"
            )
    if not isinstance(backend, LoRABackend):
        backend = load_backend(backend, device=device)
    manager = _make_manager(
        model,
        backend,
        max_cpu_loras=max_cpu_loras,
        max_loras=max_loras,
        max_rank=max_rank,
        target_modules=target_modules,
        adapter_root=adapter_root,
    )
    layers = _wrap_modules(model, manager.gate, experts_backend)
    manager.add_layers(
        {site.site.name: site for layer in layers.values() for site in _sites(layer)}
    )
    _Attachment(model, manager, layers).install()
    return manager


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`: the model gets back the very module objects it had, and its manager is closed.

    Raises:
        AttachError: the model is not attached.
        AdapterInUseError: it is generating, or someone holds an adapter.
    """
    attachment = vars(model).get(_ATTRIBUTE)
    if attachment is None:
        raise AttachError(f"{type(model).__name__} is not attached: nothing to detach")
    attachment.remove()


def _make_manager(
    model: nn.Module, backend: LoRABackend[Any], *, max_cpu_loras: int | None, **options: Any
) -> LoRAManager:
    """One for this process alone, or for all that the model is cut over."""
    group = tensor_parallel_group(model)
    if group is None:
        return LoRAManager(backend, max_cpu_loras=max_cpu_loras, **options)
    if max_cpu_loras is not None:
        raise UnsupportedOpError(
            backend="tensor parallelism",
            op="max_cpu_loras",
            limit="a host tier of all adapters on every rank",
            value=max_cpu_loras,
        )
    return RankedManager(backend, group=group, **options)


# -- what can be wrapped ---------------------------------------------------------------------------


def _check_model(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if _ATTRIBUTE in vars(model):
        raise AttachError(f"{kind} is attached already: use its manager, or detach(model) first")
    for name, module in model.named_modules():
        if (
            isinstance(module, LoRALayer)
            or hasattr(module, "lora_A")
            or hasattr(module, "lora_embedding_A")
        ):
            raise AttachError(
                f"{kind} has adapter layers of its own already, such as {name!r}: attach to the base model "
                "and load the adapter's folder with manager.load_adapter"
            )
    if model.config.is_encoder_decoder:
        raise UnsupportedOpError(
            backend="transformers integration",
            op="attach",
            limit="decoder-only models",
            value=f"{kind}, an encoder-decoder",
        )
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(p.device) for p in model.parameters() if p.device.type != "meta"}
    for found in (places, devices):
        if len(found) > 1:
            raise AttachError(
                f"{kind} is spread over {', '.join(sorted(found))}, but one backend serves one device: load the "
                'model with device_map={"": device}'
            )


def _device(model: nn.Module) -> torch.device:
    """Where the model computes: where its hooks move it, else where it is."""
    hooks = (vars(module).get("_hf_hook") for module in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    place: Any = next((place for place in places if place is not None), None)
    if place is None:
        place = next((parameter.device for parameter in model.parameters()), "cpu")
    return torch.empty(0, device=place).device  # with its index


def _wrap_modules(
    model: PreTrainedModel, gate: ForwardGate, experts: MoELoRABackend[Any] | str | None
) -> dict[nn.Module, LoRALayer]:
    """A layer for every module that adapters can change, by the module it wraps."""
    whole: Any = model  # the accessors below have no types
    text_only = model.config.get_text_config() is model.config
    decoder = whole if text_only else whole.get_decoder()  # other modalities have rows of their own
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    eligible = {*decoder.modules(), embedding, head}
    layers: dict[nn.Module, LoRALayer] = {}
    closed: list[str] = []  # nothing is wrapped below these
    for name, module in model.named_modules():
        if not name or name.startswith(tuple(closed)):
            continue
        if is_packed_experts(module) and module in eligible and not is_sharded(module):
            if not isinstance(experts, MoELoRABackend):
                experts = load_moe_backend(experts, device=gate.backend.device)
            layers[module] = wrap_packed_experts(name, module, gate, experts)
            closed.append(f"{name}.")
        elif isinstance(module, nn.MultiheadAttention) or name.rpartition(".")[2] == "experts":
            closed.append(f"{name}.")  # others get some of the rows, in an order of their own
        elif module in eligible:
            layer = _wrap_module(
                name, module, model, gate, is_head=module is head, is_input=module is embedding
            )
            if layer is not None:
                layers[module] = layer
                closed.append(f"{name}.")
    if not layers:
        raise AttachError(f"{type(model).__name__} has no linear or embedding module to wrap")
    return layers


def _wrap_module(
    name: str,
    module: nn.Module,
    model: PreTrainedModel,
    gate: ForwardGate,
    *,
    is_head: bool,
    is_input: bool,
) -> LoRALayer | None:
    """The layer for one module, or None if adapters do not apply to it."""
    sharded = is_sharded(module)
    if is_input and isinstance(module, nn.Embedding):
        layout = SliceLayout((module.embedding_dim,))
        site = Site(name, "embedding", module.num_embeddings, layout, (name,))
        return (
            wrap_sharded(model, site, module, gate)
            if sharded
            else LoRAEmbedding(module, site, gate)
        )
    features = linear_features(module)
    if features is None:
        return None
    in_features, out_features = features
    if is_head:
        site = Site(name, "lm_head", in_features, SliceLayout((out_features,)), (name,))
        if sharded:
            return wrap_sharded(model, site, module, gate)
        return LoRALMHead(module, site, gate, dtype=_opaque_dtype(module, model))
    widths, slice_names = _slices(name, out_features, model.config.get_text_config())
    if sharded and not is_packed(model, name):
        widths, slice_names = (out_features,), (name,)  # cut across the slices
    site = Site(name, "linear", in_features, SliceLayout(widths), slice_names)
    if sharded:
        return wrap_sharded(model, site, module, gate)
    return LoRALinear(module, site, gate, dtype=_opaque_dtype(module, model))


def _sites(layer: LoRALayer) -> tuple[LoRALayer | ExpertsProjection, ...]:
    """What of a layer the manager fills with adapters."""
    return (layer.gate_up, layer.down) if isinstance(layer, FusedMoEWithLoRA) else (layer,)


def _opaque_dtype(module: nn.Module, model: PreTrainedModel) -> torch.dtype | None:
    """What a module without a plain weight computes in; None: as its weight says."""
    return model.dtype if isinstance(view_linear(module), OpaqueLinear) else None


def _slices(name: str, out_features: int, config: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Widths of the projections packed in a module, and what adapters call them."""
    parent, _, leaf = name.rpartition(".")
    widths: tuple[int, ...] = (out_features,)
    if leaf == "gate_up_proj" and out_features % 2 == 0:
        widths = (out_features // 2,) * 2
    elif leaf == "qkv_proj":
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        if heads * head_dim + 2 * kv == out_features:
            widths = (heads * head_dim, kv, kv)
    if len(widths) == 1:
        return widths, (name,)
    return widths, tuple(f"{parent}.{part}" if parent else part for part in _PACKED[leaf])


# -- the attached model ------------------------------------------------------------------------------


class _Generation:
    """One running `generate`: whose rows its forwards hold."""

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = names
        self._requests: dict[tuple[int, int], list[LoRARequest]] = {}

    def requests(self, batch: int, length: int) -> list[LoRARequest]:
        """One request per row; beams and returned sequences repeat each prompt's row."""
        known = self._requests.get((batch, length))
        if known is None:
            copies, rest = divmod(batch, len(self.names))
            if rest:
                raise InvalidBatchError(
                    f"generate was called with {len(self.names)} adapter_names, but a forward has {batch} rows, "
                    "no multiple of that"
                )
            known = [LoRARequest(name, length) for name in self.names for _ in range(copies)]
            self._requests = {(batch, length): known}  # a decode loop asks for the same one again
        return known


class _Attachment:
    """What `attach` changed about one model, and how its calls prepare their batch."""

    def __init__(
        self, model: PreTrainedModel, manager: LoRAManager, layers: dict[nn.Module, LoRALayer]
    ) -> None:
        self.model, self.manager, self.layers = model, manager, layers
        self._generation: _Generation | None = None
        self._inside = False  # a batch of ours is prepared: an inner call runs within it
        self._originals: dict[str, Any] = {}
        self._hooks: dict[LoRALayer, dict[str, Any]] = {}
        self._compiled_call: Any = _OMITTED
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    # -- in and out ----------------------------------------------------------------------------------

    def install(self) -> None:
        _replace_modules(self.model, self.layers)
        for layer in self.layers.values():
            self._hooks[layer] = _lend_hook(layer.base_layer, layer)
        self._override("forward", self._wrap_forward)
        for name in _REPLACING:
            self._override(name, self._wrap_replacing)
        if hasattr(self.model, "generate"):
            self._override("generate", self._wrap_generate)
            self._override("get_compiled_call", self._wrap_compiled)
            for name in _CONTINUOUS:
                if hasattr(self.model, name):
                    self._override(name, self._wrap_continuous)
        own = vars(self.model)
        self._compiled_call = own.pop("_compiled_call", _OMITTED)  # compiled over the bare modules
        own[_ATTRIBUTE] = self

    def remove(self) -> None:
        self.manager.close()
        for layer, hook in self._hooks.items():
            vars(layer.base_layer).update(hook)
        _replace_modules(self.model, {layer: module for module, layer in self.layers.items()})
        own = vars(self.model)
        for name, original in self._originals.items():
            del own[name]
            if original is not _OMITTED:
                own[name] = original
        del own[_ATTRIBUTE]
        own.pop("_compiled_call", None)  # compiled over the wrapped modules
        if self._compiled_call is not _OMITTED:
            own["_compiled_call"] = self._compiled_call

    def _override(
        self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Put a method of its own on this instance; its class stays as it is."""
        original = getattr(self.model, name)
        self._originals[name] = vars(self.model).get(name, _OMITTED)
        vars(self.model)[name] = functools.wraps(original)(wrap(original))

    # -- calls -----------------------------------------------------------------------------------------

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, adapter_names: Any = _OMITTED, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # prepared outside: a graph must not hold a batch
                if adapter_names is not _OMITTED:
                    raise UnsupportedOpError(
                        backend="transformers integration",
                        op="adapter_names inside torch.compile",
                        limit="a batch prepared outside, by manager.batch(...) or by generate",
                        value="adapter_names",
                    )
                return original(*args, **kwargs)
            with self._prepared(args, kwargs, adapter_names):
                return original(*args, **kwargs)

        return forward

    def _wrap_compiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_compiled_call(compile_config: Any) -> Callable[..., Any]:
            compiled = original(compile_config)

            def call(*args: Any, **kwargs: Any) -> Any:
                with self._prepared(args, kwargs, _OMITTED):
                    return compiled(*args, **kwargs)

            return call

        return get_compiled_call

    def _wrap_continuous(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
            gate = self.manager.gate
            if adapter_names is not None or (gate.adapters_loaded and not gate.base_allowed):
                raise _continuous_batching(self.manager)
            return original(*args, **kwargs)

        return refuse

    def _wrap_replacing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise AttachError(
                f"{type(self.model).__name__}.{original.__name__} would replace a wrapped module, whose adapters "
                "would be lost: detach(model) first"
            )

        return refuse

    def _wrap_generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, adapter_names: Any = _OMITTED, **kwargs: Any) -> Any:
            if adapter_names is _OMITTED:
                self._require_intended("generate")
                return original(*args, **kwargs)
            self._refuse_nesting()
            if adapter_names is None:
                with self.manager.base_only():
                    return original(*args, **kwargs)
            if kwargs.get("cache_implementation") == "paged":
                raise _continuous_batching(self.manager)
            names = self._names(adapter_names, _prompts(args, kwargs))
            with self._held(names):
                self._generation = _Generation(names)
                try:
                    return original(*args, **kwargs)
                finally:
                    self._generation = None

        return generate

    @contextmanager
    def _prepared(
        self, args: Sequence[Any], kwargs: dict[str, Any], adapter_names: Any
    ) -> Iterator[None]:
        """The batch of one forward, prepared around it."""
        if adapter_names is _OMITTED and (self._inside or self._generation is None):
            self._require_intended("forward")
            if not self._inside:
                self._require_fit(args, kwargs)
            yield
            return
        if adapter_names is not _OMITTED:
            self._refuse_nesting()
        if adapter_names is None:
            with self.manager.base_only():
                yield
            return
        batch, length = _input_shape(args, kwargs)
        if self._generation is not None:
            requests = self._generation.requests(batch, length)
            held: AbstractContextManager[None] = nullcontext()
        else:
            names = self._names(adapter_names, batch)
            requests = [LoRARequest(name, length) for name in names]
            held = self._held(names)
        kept = self._kept(kwargs, length)
        logits = () if kept is None else ([kept] * batch,)
        mode: Mode = "decode" if length == 1 else "prefill"
        self._inside = True
        try:
            with held, self.manager.batch(requests, mode=mode, logits=logits):
                yield
        finally:
            self._inside = False

    # -- checks ------------------------------------------------------------------------------------------

    def _names(self, adapter_names: Any, rows: int) -> list[str | None]:
        """One name per row, checked; None for the base model."""
        if isinstance(adapter_names, str) or not isinstance(adapter_names, Sequence):
            raise InvalidBatchError(
                f"adapter_names is {adapter_names!r}: give a list with one name per row, None for the base model"
            )
        if len(adapter_names) != rows:
            raise InvalidBatchError(
                f"adapter_names has {len(adapter_names)} entries for a batch of {rows} rows: give one per row, "
                "None for the base model"
            )
        strange = [name for name in adapter_names if not (name is None or isinstance(name, str))]
        if strange:
            raise InvalidBatchError(
                f"adapter_names has {strange[0]!r}: each row has one adapter, by name, or None for the base model"
            )
        return [None if name == BASE_NAME else name for name in adapter_names]

    @contextmanager
    def _held(self, names: Sequence[str | None]) -> Iterator[None]:
        """Adapters stay loaded meanwhile, and were read again if the host tier had dropped them."""
        wanted = dict.fromkeys(name for name in names if name is not None)
        with ExitStack() as holds:
            for name in wanted:
                holds.enter_context(self.manager.acquire(name))
            if len(wanted) > self.manager.max_loras:
                raise NoFreeSlotError(
                    f"adapter_names asks for {len(wanted)} different adapters, but there are "
                    f"{self.manager.max_loras} slots: split the batch, or attach with more max_loras"
                )
            if self.manager.max_cpu_loras is not None:
                for name in wanted:
                    self.manager.prefetch(name)
            yield

    def _kept(self, kwargs: dict[str, Any], length: int) -> int | None:
        """Rows per request that the head gets, None for all."""
        keep = kwargs.get("logits_to_keep", 0) if self._keeps_logits else 0
        if isinstance(keep, Tensor):
            return int(keep.sum()) if keep.dtype == torch.bool else keep.numel()
        return min(keep, length) if keep else None

    def _require_intended(self, call: str) -> None:
        gate = self.manager.gate
        if (
            gate.adapters_loaded
            and not gate.base_allowed
            and gate.backend.batch_info is None
            and self._generation is None
        ):
            raise NoBatchPreparedError(
                f"{type(self.model).__name__}.{call} was called without adapter_names while "
                f"{gate.adapters_loaded} adapters are loaded. Pass adapter_names=[...], one per row, or "
                "adapter_names=None for the base model alone."
            )

    def _require_fit(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A batch that the caller prepared covers exactly the rows of this forward.

        Rows past an eager batch would count as padding, and quietly run on the base model.
        """
        info = self.manager.gate.backend.batch_info
        if info is None or info.graph is not None:
            return
        batch, length = _input_shape(args, kwargs)
        if batch * length != info.num_tokens:
            raise BatchMismatchError(
                f"{type(self.model).__name__}.forward got {batch} x {length} tokens, but the prepared batch has "
                f"{info.num_tokens}. Prepare the batch that belongs to this input."
            )

    def _refuse_nesting(self) -> None:
        if self.manager.gate.backend.batch_info is not None or self._generation is not None:
            raise InvalidBatchError(
                "adapter_names was passed while a batch is prepared already: leave it out within "
                "manager.batch(...), or reset that batch first"
            )


def _continuous_batching(manager: LoRAManager) -> UnsupportedOpError:
    return UnsupportedOpError(
        backend="transformers integration",
        op="continuous batching",
        limit="generate, with one row per prompt",
        value=f"{manager.gate.adapters_loaded} loaded adapters",
    )


def _prompts(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Rows that `generate` starts from."""
    given = (
        args[0] if args else None,
        kwargs.get("inputs"),
        kwargs.get("input_ids"),
        kwargs.get("inputs_embeds"),
    )
    return next((len(tensor) for tensor in given if isinstance(tensor, Tensor)), 1)


def _input_shape(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(rows, tokens per row) of one forward; left padding counts, it runs through the model too."""
    for tensor in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), args[0] if args else None):
        if isinstance(tensor, Tensor) and tensor.dim() >= 2:
            return tensor.shape[0], tensor.shape[1]
    raise InvalidBatchError("adapters need input_ids or inputs_embeds of shape [rows, tokens, ...]")


# -- modules and hooks -----------------------------------------------------------------------------------


def _replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each replacement wherever its module is, shared places included, in the same order."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replacements[module])


def _lend_hook(module: nn.Module, layer: LoRALayer) -> dict[str, Any]:
    """Move an accelerate hook, which places inputs and weights around a forward, to the wrapper.

    Returns:
        What was taken from `module`, to give it back later; empty when it has no hook.
    """
    own = vars(module)
    if "_hf_hook" not in own:
        return {}
    taken: dict[str, Any] = {
        name: own.pop(name) for name in ("_hf_hook", "_old_forward", "forward") if name in own
    }
    hook, plain = taken["_hf_hook"], layer.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook.pre_forward(layer, *args, **kwargs)
        with torch.no_grad() if hook.no_grad else nullcontext():
            output = plain(*args, **kwargs)
        return hook.post_forward(layer, output)

    vars(layer).update(_hf_hook=hook, _old_forward=plain, forward=forward)
    return taken
