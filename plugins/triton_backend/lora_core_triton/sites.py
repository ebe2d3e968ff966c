"""What a kernel's launch keeps per site, as long as the site's weights live."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakKeyDictionary

from lora_core.weights import LoRAWeights

T = TypeVar("T")
_sites: WeakKeyDictionary[LoRAWeights, dict[Hashable, object]] = WeakKeyDictionary()


def cached(weights: LoRAWeights, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` made for this site and key the first time; forgotten with the weights.

    A pure cache: LoRAWeights is frozen and its tensors stay at their addresses.
    """
    of_site = _sites.get(weights)
    if of_site is None:
        of_site = _sites[weights] = {}
    found = of_site.get(key)
    if found is None:
        found = of_site[key] = make()
    return found  # type: ignore[return-value]
