"""Worlds of two and four processes: one per place and size for all tests of a pytest process."""

from __future__ import annotations

from datetime import timedelta

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
PLACES = [GLOO, *(pytest.param(place, marks=pytest.mark.cuda) for place in NCCL)]
EVERYWHERE = [*PLACES, *(pytest.param(place, marks=pytest.mark.slow) for place in INTERPRETED)]


@pytest.fixture(scope="session")
def worlds():
    """Makes the world of a place, or returns it."""
    made: dict[tuple[int, Place], World] = {}

    def world(size, place=GLOO):
        limits = {}
        if place != GLOO:  # ranks wait for one another's kernels to be compiled, or interpreted
            limits = {"timeout": 200, "group_timeout": timedelta(seconds=60)}
        return made.setdefault((size, place), World(size, place, **limits))

    yield world
    for each in made.values():
        each.close()


def available(place, request):
    """The place, in the test's report; skips, or fails where devices are required, without them."""
    request.node.user_properties += [  # of junit's report
        ("world", 2),
        ("transport", place.transport),
        ("backend", place.backend),
    ]
    found = torch.cuda.device_count() if place.device_type == "cuda" else 2
    if found < 2:
        missing = f"two CUDA devices, of which there are {found}"
        if request.config.getoption("--lora-require-device", default=None) == "cuda":
            pytest.fail(f"--lora-require-device cuda: needs {missing}", pytrace=False)
        pytest.skip(f"needs {missing}")
    return place


@pytest.fixture(params=PLACES, ids=str)
def place2(request):
    """Where two ranks can be."""
    return available(request.param, request)


@pytest.fixture
def world2(worlds, place2):
    return worlds(2, place2)


@pytest.fixture(params=EVERYWHERE, ids=str)
def everywhere2(worlds, request):
    """Plugins in the interpreter, too: slower than all else."""
    return worlds(2, available(request.param, request))


@pytest.fixture
def nccl2(request):
    """The place of two devices, for tests that start a world of their own."""
    return available(NCCL[-1], request)


@pytest.fixture
def gloo2(worlds):
    return worlds(2)


@pytest.fixture
def world4(worlds):
    return worlds(4)
