"""What counts as free memory."""

from __future__ import annotations

import os

import pytest
import torch

from lora_core import memory
from lora_core.errors import InsufficientMemoryError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """10 000 KiB are available, and no cgroup limits it."""
    (tmp_path / "meminfo").write_text("MemTotal: 20000 kB\nMemAvailable:   10000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def cgroup(machine, limit: str, used: int, cached: int) -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    (machine / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\nfile 9\n")


def test_what_the_system_calls_available(machine):
    assert memory.available_host_bytes() == 10_000 * 1024


def test_a_cgroup_limits_it_less_the_cache_it_gives_back(machine):
    cgroup(machine, "5000000", used=4_000_000, cached=500_000)
    assert memory.available_host_bytes() == 1_500_000
    cgroup(machine, "5000000000", used=4_000_000, cached=500_000)
    assert memory.available_host_bytes() == 10_000 * 1024


def test_a_cgroup_without_a_limit(machine):
    cgroup(machine, "max", used=4_000_000, cached=0)
    assert memory.available_host_bytes() == 10_000 * 1024


def test_elsewhere_all_there_is(machine):
    (machine / "meminfo").unlink()
    assert memory.available_host_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_refusals_say_what_for_how_much_and_what_is_free(machine):
    cpu = torch.device("cpu")
    memory.require_bytes(10_000 * 1024, cpu, "this")
    with pytest.raises(
        InsufficientMemoryError, match=r"this needs 9.8 MiB on cpu, but only 9.8 MiB are free"
    ):
        memory.require_bytes(10_000 * 1024 + 1, cpu, "this")
