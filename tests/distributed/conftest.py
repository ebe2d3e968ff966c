"""Worlds of two and four processes, one of each for all tests of a pytest process."""

from __future__ import annotations

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def _world2():
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def _world4():
    world = World(4)
    yield world
    world.close()


@pytest.fixture
def world2(_world2):
    return _world2


@pytest.fixture
def world4(_world4):
    return _world4
