"""Every test draws the same numbers at every run, in whatever order tests run."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_random_numbers() -> None:
    random.seed(0)
    torch.manual_seed(0)
