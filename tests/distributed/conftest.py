"""Worlds of two and four processes: one per place and size for all tests of a pytest process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.world import Place, World

GLOO = Place()
INTERPRETED = [Place(name, "virtual_experts") for name in ("triton", "csgmv")]
NCCL = [
    Place("triton", "virtual_experts", "cuda", "nccl"),
    Place("csgmv", "virtual_experts", "cuda", "nccl"),
    Place("torch", "torch", "cuda", "nccl"),
]
PLACES = [
    GLOO,
    *(pytest.param(place, marks=pytest.mark.slow) for place in INTERPRETED),
    *(pytest.param(place, marks=pytest.mark.cuda) for place in NCCL),
]


@pytest.fixture(scope="session")
def worlds():
    """Makes the world of a place, or returns it."""
    made: dict[tuple[int, Place], World] = {}

    def world(size, place=GLOO):
        return made.setdefault((size, place), World(size, place))

    yield world
    for each in made.values():
        each.close()


@pytest.fixture(params=PLACES, ids=str)
def place2(request, record_property):
    """Every place where two ranks can be."""
    place = request.param
    record_property("world", 2)
    record_property("transport", place.transport)
    record_property("backend", place.backend)
    found = torch.cuda.device_count() if place.device_type == "cuda" else 2
    if found < 2:
        missing = f"two CUDA devices, of which there are {found}"
        if request.config.getoption("--lora-require-device", default=None) == "cuda":
            pytest.fail(f"--lora-require-device cuda: needs {missing}", pytrace=False)
        pytest.skip(f"needs {missing}")
    return place


@pytest.fixture
def world2(worlds, place2):
    return worlds(2, place2)


@pytest.fixture
def gloo2(worlds):
    return worlds(2)


@pytest.fixture
def world4(worlds):
    return worlds(4)
