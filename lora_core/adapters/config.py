"""adapter_config.json as data: what it asks for, and which of it can be applied exactly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lora_core.errors import AdapterFormatError, UnsupportedAdapterError

_REFUSED_FIELDS = {
    "alora_invocation_tokens": "aLoRA, adapters that begin in the middle of a prompt",
    "arrow_config": "Arrow routing between adapters",
    "kasa_config": "KaSA, which truncates the base weight",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron's parallel layers",
    "monteclora_config": "MonteCLoRA sampling",
    "trainable_token_indices": "trainable tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA's pooled inputs",
}
"""Fields of PEFT that change the result when set, and that nothing here computes."""

_INERT_FIELDS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",  # read at initialisation only, and that one is refused below
        "ensure_weight_tying",  # both tied modules have tensors of their own in the file
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",  # changes the backward pass only
    }
)
"""Fields that say nothing about how to apply tensors that are already trained."""

_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract from the base weight: the tensors fit only that changed base."""


class AdapterConfig(BaseModel):
    """The part of a PEFT LoRA configuration that decides results; defaults are PEFT's own.

    Build it with `AdapterConfig.parse`, which refuses by name whatever cannot be applied exactly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    peft_type: Literal["LORA"]
    r: int = Field(default=8, ge=1)
    lora_alpha: float | None = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    target_modules: str | tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] = ()
    peft_version: str | None = Field(default=None, exclude=True)  # of no account where shapes tell
    layers_to_transform: int | tuple[int, ...] | None = None
    layers_pattern: str | tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = True

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        """PEFT's sets, which are saved in any order, sorted; None for an empty container."""
        if not isinstance(data, dict):
            return data
        plain = dict(data)
        for name in ("target_modules", "target_parameters", "modules_to_save"):
            value = plain.get(name)
            if isinstance(value, (set, frozenset, list, tuple)):
                plain[name] = tuple(sorted(value, key=str))
        for name in ("rank_pattern", "alpha_pattern"):
            plain[name] = plain.get(name) or {}
        for name in ("modules_to_save", "target_parameters"):
            plain[name] = plain.get(name) or ()
        return plain

    @classmethod
    def parse(cls, source: object, *, where: str) -> AdapterConfig:
        """Read a configuration.

        Args:
            source: the JSON text, a mapping, an `AdapterConfig`, or an object with PEFT's `to_dict()`.
            where: what to call it in errors, such as its path.

        Raises:
            AdapterFormatError: not JSON, not an object, or values of the wrong type.
            UnsupportedAdapterError: another PEFT method, or a feature that cannot be applied exactly.
        """
        if isinstance(source, cls):
            return source
        data = _as_mapping(source, where)
        peft_type = getattr(data.get("peft_type"), "value", data.get("peft_type"))
        if peft_type is None:
            raise AdapterFormatError(
                f"{where}: there is no 'peft_type', so this is not a PEFT configuration"
            )
        if peft_type != "LORA":
            raise UnsupportedAdapterError(
                f"{where}: peft_type is {peft_type!r}; only 'LORA' adapters can be applied"
            )
        known = {k: v for k, v in data.items() if k in cls.model_fields} | {"peft_type": peft_type}
        for name, value in data.items():
            if name in cls.model_fields or name in _INERT_FIELDS or not value:
                continue
            meaning = _REFUSED_FIELDS.get(name, "a feature that this version does not know")
            raise UnsupportedAdapterError(
                f"{where}: {name} is {_short(value)} ({meaning}): not supported"
            )
        try:
            config = cls.model_validate(known)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the configuration"
            raise AdapterFormatError(
                f"{where}: {field} is {_short(first.get('input'))}: {first['msg']}"
            ) from error
        _require_exact(config, where)
        return config

    def rank_of(self, module: str) -> int:
        """The rank of a module, by PEFT's matching of `rank_pattern`."""
        key = _matching_pattern(self.rank_pattern, module)
        return self.r if key is None else self.rank_pattern[key]

    def alpha_of(self, module: str) -> float | None:
        """Alpha of a module, by PEFT's matching of `alpha_pattern`; None where the file has null."""
        key = _matching_pattern(self.alpha_pattern, module)
        return self.lora_alpha if key is None else self.alpha_pattern[key]

    def scaling(self, *, rank: int, alpha: float) -> float:
        """`alpha / rank`, or `alpha / sqrt(rank)` for rsLoRA (arXiv:2312.03732)."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def idle_patterns(self, modules: Iterable[str]) -> list[str]:
        """What the configuration names and no module of the file matches, one line each."""
        names = list(modules)
        idle = []
        for field in ("rank_pattern", "alpha_pattern"):
            used = {_matching_pattern(getattr(self, field), name) for name in names}
            idle += [
                f"{field} {key!r} matches no module"
                for key in getattr(self, field)
                if key not in used
            ]
        if isinstance(self.target_modules, tuple):
            idle += [
                f"target_modules {target!r} has no tensors"
                for target in self.target_modules
                if not any(name == target or name.endswith(f".{target}") for name in names)
            ]
        return idle


def _require_exact(config: AdapterConfig, where: str) -> None:
    """Refuse values that are well-formed and yet cannot be applied."""
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise UnsupportedAdapterError(
            f"{where}: init_lora_weights is {init!r}, which changes the base weights that the adapter "
            "belongs to. Convert it to plain LoRA when saving "
            "(PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...))."
        )
    for pattern, rank in config.rank_pattern.items():
        if rank < 1:
            raise AdapterFormatError(
                f"{where}: rank_pattern[{pattern!r}] is {rank}, ranks are at least 1"
            )
    for alpha in (config.lora_alpha, *config.alpha_pattern.values()):
        if alpha is not None and not math.isfinite(alpha):
            raise AdapterFormatError(f"{where}: an alpha is {alpha}, it must be finite")
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterFormatError(
                f"{where}: the pattern {pattern!r} is not a regular expression: {error}"
            ) from error


def _matching_pattern(patterns: Mapping[str, object], module: str) -> str | None:
    """The first pattern, in the order of the file, that matches the end of `module`; as PEFT does."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return None


def _as_mapping(source: object, where: str) -> Mapping[str, Any]:
    if isinstance(source, (str, bytes)):
        try:
            source = json.loads(source)
        except (
            ValueError,
            RecursionError,
        ) as error:  # json's own, undecodable bytes, too many brackets
            raise AdapterFormatError(f"{where}: not valid JSON: {error}") from error
    elif hasattr(source, "to_dict"):
        source = source.to_dict()
    if not isinstance(source, Mapping):
        raise AdapterFormatError(f"{where}: expected a JSON object, found {type(source).__name__}")
    return source


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
