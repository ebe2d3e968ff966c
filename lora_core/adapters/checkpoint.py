"""Adapter folders, read once and completely: configuration and tensors, or one clear error.

Only safetensors is read. The file's own table is checked against the file before anything else, so
that a cut or doctored one is refused with its reason and nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lora_core.adapters.config import AdapterConfig
from lora_core.errors import AdapterFormatError, InsufficientMemoryError
from lora_core.memory import available_host_bytes

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HEADER_LIMIT = 100_000_000  # bytes, the format's own limit
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One adapter as it was saved.

    Attributes:
        config: what decides results.
        tensors: on the host, by the keys of the file.
        where: what to call it in errors: its folder, or "tensors in memory".
    """

    config: AdapterConfig
    tensors: Mapping[str, Tensor]
    where: str

    @cached_property
    def version(self) -> str:
        """A hash of the configuration and of every tensor's name, dtype, shape and bytes.

        Equal for equal content whether it came from files or from memory, so a prefix cache may key
        on it.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.config.model_dump_json().encode())
        for key in sorted(self.tensors):
            tensor = self.tensors[key].detach().contiguous()
            digest.update(f"\0{key}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_checkpoint(source: object, *, root: Path | None = None) -> Checkpoint:
    """Read an adapter from its folder, or take it from memory.

    Args:
        source: the path of a folder, or a pair (configuration, tensors by key).
        root: when given, paths are relative to it and must stay inside it, symlinks followed.

    Raises:
        AdapterFormatError: missing, unreadable, corrupted or forbidden files.
        UnsupportedAdapterError: a configuration that cannot be applied exactly.
        InsufficientMemoryError: the file is larger than the memory that is free.
    """
    if isinstance(source, tuple):
        return _from_memory(source)
    if not isinstance(source, (str, os.PathLike)):
        raise AdapterFormatError(
            f"an adapter is loaded from the path of its folder or from (config, tensors), "
            f"not from {type(source).__name__}"
        )
    text, tensors, where = read_files(Path(source), root=root)
    return Checkpoint(AdapterConfig.parse(text, where=f"{where}/{CONFIG_FILE}"), tensors, where)


def read_files(folder: Path, *, root: Path | None = None) -> tuple[bytes, dict[str, Tensor], str]:
    """The text of the configuration, the tensors, and the folder's own name for errors.

    Raises:
        AdapterFormatError: missing, unreadable, corrupted or forbidden files.
        InsufficientMemoryError: the file is larger than the memory that is free.
    """
    folder = _inside(folder, root)
    if not folder.is_dir():
        raise AdapterFormatError(
            f"{folder}: there is no such folder; an adapter is a local folder with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}"
        )
    text = _read(_inside(folder / CONFIG_FILE, root))
    weights_file = _inside(folder / WEIGHTS_FILE, root)
    if not weights_file.is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise AdapterFormatError(
                f"{folder}: only {pickles[0]} is there, a pickle file, and unpickling can run any code. "
                "Convert it to safetensors (PEFT: save_pretrained(..., safe_serialization=True))."
            )
        raise AdapterFormatError(f"{folder}: {WEIGHTS_FILE} is missing")
    return text, _read_tensors(weights_file), str(folder)


def _from_memory(source: tuple[Any, ...]) -> Checkpoint:
    where = "tensors in memory"
    if len(source) != 2 or not isinstance(source[1], Mapping):
        raise AdapterFormatError(
            f"{where}: expected (config, tensors by key), found {len(source)} parts"
        )
    config = AdapterConfig.parse(source[0], where=f"{where}: config")
    tensors = {}
    for key, value in source[1].items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            raise AdapterFormatError(f"{where}: {key} must be a floating-point tensor with values")
        tensors[key] = value.detach().to("cpu", copy=True)  # the caller may go on training
    if not tensors:
        raise AdapterFormatError(f"{where}: there are no tensors")
    return Checkpoint(config, tensors, where)


def _inside(path: Path, root: Path | None) -> Path:
    """`path` as it is, or below `root`, with every symlink followed.

    Raises:
        AdapterFormatError: it leaves the root.
    """
    if root is None:
        return path
    base = root.resolve()
    resolved = (base / path).resolve()
    if not resolved.is_relative_to(base) or resolved == base:
        raise AdapterFormatError(
            f"{str(path)!r} leads to {resolved}, outside of the adapter root {base}; adapters are loaded "
            "from folders below it"
        )
    return resolved


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterFormatError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    free = available_host_bytes()
    if size > free:
        raise InsufficientMemoryError(
            f"{path} holds {size} bytes, but only {free} bytes of memory are free"
        )
    data = _read(path)
    _check_table(path, data)
    try:
        return dict(safetensors.torch.load(data))
    except (SafetensorError, KeyError, ValueError) as error:
        raise AdapterFormatError(f"{path}: not a valid safetensors file: {error}") from error


def _check_table(path: Path, data: bytes) -> None:
    """Hold the table of tensors against the file: complete, no gaps, nothing past the end."""
    if data[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        raise AdapterFormatError(
            f"{path}: this is a pickle file under another name; it is not opened"
        )
    if len(data) < 8:
        raise AdapterFormatError(f"{path}: {len(data)} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", data[:8])
    if not 2 <= length <= min(_HEADER_LIMIT, len(data) - 8):
        raise AdapterFormatError(
            f"{path}: the header claims {length} bytes, the file has {len(data) - 8} after its length field"
        )
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)
        tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
        spans = sorted((*map(int, entry["data_offsets"]), key) for key, entry in tensors.items())
        kinds = {key: entry["dtype"] for key, entry in tensors.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AdapterFormatError(
            f"{path}: the header is not a table of tensors: {error}"
        ) from error
    if not tensors:
        raise AdapterFormatError(f"{path}: the header is empty, the file holds no tensors")
    end, room = 0, len(data) - 8 - length
    for start, stop, key in spans:
        if start != end or stop < start or stop > room:
            raise AdapterFormatError(
                f"{path}: {key} is said to lie at bytes {start}..{stop} of {room}, after {end}: the file is "
                "cut off or damaged"
            )
        end = stop
    if end != room:
        raise AdapterFormatError(f"{path}: {room - end} bytes at the end belong to no tensor")
    for key, kind in kinds.items():
        if kind not in _FLOATS:
            raise AdapterFormatError(
                f"{path}: {key} has dtype {kind}; adapters are read in {', '.join(sorted(_FLOATS))}"
            )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table
