"""Files: whole ones are read, damaged and forbidden ones are refused, and nothing is kept of them."""

from __future__ import annotations

import json
import pickle
import shutil
import struct

import pytest
import torch

from lora_core.adapters import checkpoint as module
from lora_core.adapters.checkpoint import read_checkpoint
from lora_core.errors import AdapterFormatError, InsufficientMemoryError
from tests.adapters.helpers import config, lora, write_adapter

TENSORS = lora("q_proj", 4, 64, 32)


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "adapter", config(), TENSORS)


def weights_of(folder):
    return folder / "adapter_model.safetensors"


def with_header(folder, header: dict, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    weights_of(folder).write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(folder, match: str, **options) -> None:
    with pytest.raises(AdapterFormatError, match=match):
        read_checkpoint(folder, **options)


def test_a_whole_folder_is_read(folder):
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config.lora_alpha == 8
    assert TENSORS.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(TENSORS[key], checkpoint.tensors[key]) for key in TENSORS)


def test_k9_a_file_cut_by_a_kibibyte(folder):
    data = weights_of(folder).read_bytes()
    weights_of(folder).write_bytes(data[:-1024])
    refused(folder, "is said to lie at bytes .* the file is cut off or damaged")


@pytest.mark.parametrize("keep", [0, 7, 8, 40])
def test_k9_a_file_cut_in_the_header(folder, keep):
    weights_of(folder).write_bytes(weights_of(folder).read_bytes()[:keep])
    refused(folder, "too few for a safetensors file|the header claims")


def test_k9_bytes_that_belong_to_nobody(folder):
    with weights_of(folder).open("ab") as file:
        file.write(b"\0" * 16)
    refused(folder, "16 bytes at the end belong to no tensor")


@pytest.mark.parametrize("header", [{}, {"__metadata__": {"format": "pt"}}])
def test_k9_an_empty_header(folder, header):
    with_header(folder, header)
    refused(folder, "the header is empty")


def test_k9_an_offset_past_the_end(folder):
    with_header(folder, {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8)
    refused(folder, "x is said to lie at bytes 0..16 of 8")


@pytest.mark.parametrize("spans", [[(0, 8), (4, 12)], [(4, 12), (12, 16)], [(8, 4), (0, 16)]])
def test_k9_tensors_that_overlap_or_leave_gaps(folder, spans):
    table = {
        f"x{i}": {"dtype": "F32", "shape": [2], "data_offsets": span}
        for i, span in enumerate(spans)
    }
    with_header(folder, table, b"\0" * 16)
    refused(folder, "cut off or damaged")


def test_k9_shape_and_bytes_that_disagree(folder):
    with_header(folder, {"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}, b"\0" * 16)
    refused(folder, "not a valid safetensors file")


def test_k9_a_name_that_appears_twice(folder):
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f'{{"x":{entry},"x":{entry}}}'.encode()
    weights_of(folder).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    refused(folder, "a name appears twice")


@pytest.mark.parametrize(
    "table", [b"[" * 100_000, b"[]", b"nonsense", b'{"x": 3}', b'{"x": {"dtype": "F32"}}']
)
def test_k9_a_header_that_is_no_table(folder, table):
    weights_of(folder).write_bytes(struct.pack("<Q", len(table)) + table)
    refused(folder, "the header is not a table of tensors")


@pytest.mark.parametrize("kind", ["I8", "F8_E4M3", "BOOL"])
def test_dtypes_that_are_no_adapters(folder, kind):
    with_header(folder, {"x": {"dtype": kind, "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4)
    refused(folder, f"x has dtype {kind}")


class Bomb:
    """Unpickling it would be seen."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle file was opened",))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "weights.pth", "x.ckpt"])
def test_pickles_are_refused_and_not_opened(folder, name):
    weights_of(folder).unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    refused(folder, f"only {name} is there, a pickle file")


@pytest.mark.parametrize("protocol", [2, 4, "zip"])
def test_pickles_under_another_name_are_refused(folder, protocol):
    if protocol == "zip":
        torch.save(TENSORS, weights_of(folder))
    else:
        weights_of(folder).write_bytes(pickle.dumps(Bomb(), protocol=protocol))
    refused(folder, "this is a pickle file under another name")


def test_a_pickle_beside_safetensors_is_left_alone(folder):
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert len(read_checkpoint(folder).tensors) == 2


def test_missing_files_and_folders(folder, tmp_path):
    refused(tmp_path / "nowhere", "there is no such folder")
    refused("an-org/on-a-hub", "there is no such folder; an adapter is a local folder")
    refused(weights_of(folder), "there is no such folder")
    (folder / "adapter_config.json").unlink()
    refused(folder, "adapter_config.json: cannot be read: No such file")


def test_missing_weights(folder):
    weights_of(folder).unlink()
    refused(folder, "adapter_model.safetensors is missing")


@pytest.mark.parametrize("source", [3, None, {"r": 4}, object()])
def test_other_sources(source):
    refused(source, "loaded from the path of its folder or from")


@pytest.mark.parametrize(
    "name", ["/etc", "../outside", "inside/../../outside", ".", "", "inside/.."]
)
def test_k10_paths_that_leave_the_root(tmp_path, name):
    root = tmp_path / "root"
    write_adapter(root / "inside", config(), TENSORS)
    write_adapter(tmp_path / "outside", config(), TENSORS)
    refused(name, "outside of the adapter root", root=root)
    assert len(read_checkpoint("inside", root=root).tensors) == 2


def test_k10_symlinks_that_leave_the_root(tmp_path):
    root = tmp_path / "root"
    outside = write_adapter(tmp_path / "outside", config(), TENSORS)
    write_adapter(root / "inside", config(), TENSORS)
    (root / "link").symlink_to(outside)
    refused("link", "outside of the adapter root", root=root)
    weights_of(root / "inside").unlink()
    weights_of(root / "inside").symlink_to(weights_of(outside))
    refused("inside", "outside of the adapter root", root=root)
    assert len(read_checkpoint(root / "inside").tensors) == 2  # without a root links are the user's


def test_k10_symlinks_within_the_root_are_followed(tmp_path):
    write_adapter(tmp_path / "real", config(), TENSORS)
    (tmp_path / "link").symlink_to("real")
    assert len(read_checkpoint("link", root=tmp_path).tensors) == 2


def test_k11_nothing_is_read_after_loading(folder):
    checkpoint = read_checkpoint(folder)
    shutil.rmtree(folder)
    assert all(torch.equal(TENSORS[key], checkpoint.tensors[key]) for key in TENSORS)


def test_a_file_larger_than_memory_is_refused_unread(folder, monkeypatch):
    monkeypatch.setattr(module, "available_host_bytes", lambda: 1000)
    with pytest.raises(InsufficientMemoryError, match=r"holds \d+ bytes, but only 1000 bytes"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ((config(),), "found 1 parts"),
        ((config(), [1]), "found 2 parts"),
        ((config(), {}), "there are no tensors"),
        ((config(), {"x": 3}), "x must be a floating-point tensor"),
        ((config(), {"x": torch.ones(2, dtype=torch.int8)}), "x must be a floating-point tensor"),
        ((config(), {"x": torch.ones(2, device="meta")}), "x must be a floating-point tensor"),
    ],
)
def test_tensors_in_memory_that_cannot_be(source, match):
    refused(source, match)


def test_tensors_in_memory_are_copied():
    mine = {key: value.clone() for key, value in TENSORS.items()}
    checkpoint = read_checkpoint((config(), mine))
    for value in mine.values():
        value.zero_()  # the owner goes on training
    assert all(torch.equal(TENSORS[key], checkpoint.tensors[key]) for key in TENSORS)


def test_k42_version_is_of_the_content(folder, tmp_path):
    version = read_checkpoint(folder).version
    assert version == read_checkpoint((config(), dict(reversed(TENSORS.items())))).version
    assert version == read_checkpoint(shutil.copytree(folder, tmp_path / "copy")).version
    key = next(iter(TENSORS))
    ordered = [
        read_checkpoint((config(target_modules=t), TENSORS)).version
        for t in (["a", "b"], {"b", "a"})
    ]
    assert ordered[0] == ordered[1]
    others = [
        (config(lora_alpha=9), TENSORS),
        (config(use_rslora=True), TENSORS),
        (config(), {**TENSORS, key: TENSORS[key] * 2}),
        (config(), {**TENSORS, key: TENSORS[key].bfloat16()}),
        (config(), {**TENSORS, key: TENSORS[key].view(64, 4)}),
        (config(), {f"x.{k}": v for k, v in TENSORS.items()}),
    ]
    versions = {read_checkpoint(other).version for other in others}
    assert len(versions) == len(others)
    assert version not in versions
