"""Medians, intervals and when a cell counts."""

from __future__ import annotations

import random
from fractions import Fraction
from math import comb

import pytest

from benchmarks.stats import Estimate, counts, geometric_mean, median_interval


def coverage(n: int, below: int) -> Fraction:
    """Exact probability that the median lies between order statistics `below` and `n - 1 - below`."""
    outside = sum(Fraction(comb(n, k), 2**n) for k in range(below + 1))
    return 1 - 2 * outside


@pytest.mark.parametrize("n", [6, 7, 11, 20, 22, 33, 121])
def test_interval_is_the_narrowest_pair_of_order_statistics_that_covers_enough(n: int) -> None:
    samples = list(range(n))
    random.Random(n).shuffle(samples)
    estimate = median_interval(samples)
    below = int(estimate.low)
    assert estimate.high == n - 1 - below
    assert coverage(n, below) >= Fraction(95, 100)
    assert below + 1 >= (n - 1) / 2 or coverage(n, below + 1) < Fraction(95, 100)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_samples_give_the_whole_range(n: int) -> None:
    assert median_interval(list(range(n))) == Estimate((n - 1) / 2, 0, n - 1)


def test_interval_covers_the_true_median_as_often_as_it_says() -> None:
    source = random.Random(0)
    trials = 2000
    covered = 0
    for _ in range(trials):
        estimate = median_interval([source.expovariate(1.0) for _ in range(11)])
        covered += estimate.low <= 0.6931 <= estimate.high
    assert covered / trials > 0.95 - 3 * (0.95 * 0.05 / trials) ** 0.5


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


@pytest.mark.parametrize(
    ("ours", "best_peer", "expected"),
    [
        (Estimate(5.0, 4.5, 5.5), Estimate(10.0, 9.5, 10.5), True),
        (Estimate(5.0, 4.0, 6.5), Estimate(10.0, 9.5, 10.5), False),
        (Estimate(5.0, 4.5, 5.5), Estimate(10.0, 8.5, 11.0), False),
        (Estimate(5.0, 4.9, 5.0), Estimate(-1.0, -1.2, -0.8), True),  # the limit of 3 is believed
        (Estimate(5.0, 4.5, 5.5), Estimate(-1.0, -1.2, -0.8), False),
    ],
    ids=["both-narrow", "ours-wide", "peer-wide", "peer-under-the-limit", "wide-for-the-limit"],
)
def test_a_cell_counts_when_ours_and_the_best_peer_are_known_to_a_fifth_of_the_peer(
    ours: Estimate, best_peer: Estimate, expected: bool
) -> None:
    estimates = {"ours": ours, "best": best_peer, "slow": Estimate(99.0, 1.0, 999.0)}
    assert counts(estimates, ["ours"], ["slow", "best"], limit=3.0) == expected


def test_a_cell_with_no_result_does_not_count() -> None:
    assert not counts({}, ["ours"], [], limit=3.0)


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
