"""Medians of paired differences and distribution-free intervals around them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

COUNTS_WITHIN = 0.2
"""A cell counts when the interval is at most this share of the best peer's overhead."""


@dataclass(frozen=True)
class Estimate:
    """A median and its confidence interval, in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Length of the interval."""
        return self.high - self.low


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> Estimate:
    """The median, and the interval between two order statistics that covers it.

    How many samples lie below the true median is binomial(n, 1/2) whatever the distribution is, so
    the k-th smallest and k-th largest enclose it with probability `1 - 2 P(X < k)`. With too few
    samples for the confidence, the interval is the whole range.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("median_interval of no samples")
    ordered = sorted(samples)
    n, outside, k = len(ordered), 0.0, 0
    while k < n // 2:
        outside += math.comb(n, k) * 0.5**n
        if 2 * outside > 1 - confidence:
            break
        k += 1
    k = max(k, 1)
    return Estimate(median(ordered), ordered[k - 1], ordered[n - k])


def counts(
    estimates: Mapping[str, Estimate], ours: Iterable[str], peers: Iterable[str], limit: float
) -> bool:
    """Whether a cell counts: ours and the best peer are known well enough to be compared.

    Args:
        estimates: of all contenders.
        ours: names of the backends under test.
        peers: names of the peers; without any, our own best overhead is the measure.
        limit: the physical limit, the least overhead that is believed.
    """
    mine = [estimates[name] for name in ours if name in estimates]
    best_peer = min(
        (estimates[name] for name in peers if name in estimates),
        key=lambda e: e.median,
        default=None,
    )
    compared = mine if best_peer is None else [*mine, best_peer]
    if not compared:
        return False
    overhead = best_peer.median if best_peer is not None else min(e.median for e in mine)
    return all(e.width <= COUNTS_WITHIN * max(overhead, limit) for e in compared)


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean of positive ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
