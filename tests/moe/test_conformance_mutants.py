"""The experts suite itself: deliberately wrong backends, each of which must fail the check named."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lora_core.moe import MoECapabilities
from lora_core.testing.engine import CheckFailed, run_instance
from lora_core.testing.moe_case import MoESubject
from lora_core.testing.moe_family import MOE
from lora_core.torch_moe_backend import TorchMoEBackend


class ForgetsScaling(TorchMoEBackend):
    def gate_up(self, x, weights, route, out, *, accumulate=True):
        plain = dataclasses.replace(weights, scalings=torch.ones_like(weights.scalings))
        return super().gate_up(x, plain, route, out, accumulate=accumulate)


class ForgetsRoutingWeights(TorchMoEBackend):
    def down(self, x, weights, route, out, *, routed_weights=False, accumulate=True):
        return super().down(x, weights, route, out, routed_weights=False, accumulate=accumulate)


class AlwaysAdds(TorchMoEBackend):
    def gate_up(self, x, weights, route, out, *, accumulate=True):
        return super().gate_up(x, weights, route, out, accumulate=True)


class ReadsAnyId(TorchMoEBackend):
    def route(self, routing):
        ids = routing.topk_ids.clamp(0, routing.num_experts - 1)
        return super().route(dataclasses.replace(routing, topk_ids=ids))


class IgnoresTheMap(TorchMoEBackend):
    def route(self, routing):
        return super().route(dataclasses.replace(routing, expert_map=None))


class WritesItsInput(TorchMoEBackend):
    def gate_up(self, x, weights, route, out, *, accumulate=True):
        super().gate_up(x, weights, route, out, accumulate=accumulate)
        x.mul_(1.0009765625)
        return out


class MixesRows(TorchMoEBackend):
    def gate_up(self, x, weights, route, out, *, accumulate=True):
        super().gate_up(x, weights, route, out, accumulate=accumulate)
        return out.add_(x.sum() * 0)


class AddsZeros(TorchMoEBackend):
    def gate_up(self, x, weights, route, out, *, accumulate=True):
        return super().gate_up(x, weights, route, out, accumulate=accumulate).add_(0.0)


class UsesDeadRanks(TorchMoEBackend):
    def gate_up(self, x, weights, route, out, *, accumulate=True):
        full = torch.full_like(weights.ranks, weights.max_rank)
        every = dataclasses.replace(weights, ranks=torch.where(weights.ranks > 0, full, 0))
        return super().gate_up(x, every, route, out, accumulate=accumulate)


class RemembersTheFirstRoute(TorchMoEBackend):
    first = None

    def route(self, routing):
        self.first = self.first or super().route(routing)
        return self.first


class CountsOnTheHost(TorchMoEBackend):
    def route(self, routing):
        if routing.slots is not None and not bool((routing.slots >= 0).any()):
            routing = dataclasses.replace(routing, slots=None)
        return super().route(routing)


class RandomOrder(TorchMoEBackend):
    def gate_up(self, x, weights, route, out, *, accumulate=True):
        super().gate_up(x, weights, route, out, accumulate=accumulate)
        return out.mul_(1 + torch.randint(2, ()) * 2**-20)


class AcceptsAnything(TorchMoEBackend):
    def _require_fit(self, op, x, weights, routing, out):
        pass


class ClaimsLess(TorchMoEBackend):
    capabilities = MoECapabilities(
        dtypes=frozenset({"float32"}), device_types=frozenset({"cpu"}), max_rank=8
    )

    def _require_claimed(self, op, weights):
        pass


class AllocatesRanks(TorchMoEBackend):
    def allocate_weights(
        self, *, num_slots, num_experts, max_rank, in_features, layout, dtype,
        shared_a=False, shared_b=False,
    ):  # fmt: skip
        made = super().allocate_weights(
            num_slots=num_slots, num_experts=num_experts, max_rank=max_rank, in_features=in_features,
            layout=layout, dtype=dtype, shared_a=shared_a, shared_b=shared_b,
        )  # fmt: skip
        made.b.fill_(math.nan)
        made.ranks.fill_(1)
        return made


class LosesBaseRows(TorchMoEBackend):
    def row_slots(self, info, rows):
        found = super().row_slots(info, rows)
        return found if found is None else found.clamp(min=0)


@pytest.mark.parametrize(
    ("backend", "check"),
    [
        (ForgetsScaling, "experts_values"),
        (ForgetsRoutingWeights, "experts_values"),
        (AlwaysAdds, "experts_values"),
        (ReadsAnyId, "ids_and_slots_out_of_range_are_inert"),
        (IgnoresTheMap, "expert_map"),
        (WritesItsInput, "experts_inputs_are_never_written"),
        (MixesRows, "experts_neighbours_change_nothing"),
        (AddsZeros, "rows_without_a_delta_keep_their_bits"),
        (UsesDeadRanks, "rows_without_a_delta_keep_their_bits"),
        (RemembersTheFirstRoute, "one_route_serves_both_projections"),
        (CountsOnTheHost, "experts_in_a_graph"),
        (RandomOrder, "experts_are_deterministic"),
        (AcceptsAnything, "experts_refuse_what_does_not_fit"),
        (ClaimsLess, "experts_refuse_what_is_not_claimed"),
        (AllocatesRanks, "experts_allocate_weights"),
        (LosesBaseRows, "experts_find_the_slots_of_rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_wrong_backend_is_caught(backend, check):
    torch.manual_seed(0)
    subject = MoESubject(backend, device="cpu")
    plan = [instance for instance in MOE.plan(subject, "smoke") if instance.check.name == check]
    assert plan
    with pytest.raises(CheckFailed, match=f"fails {check}"):
        for _ in range(4):
            for instance in plan:
                run_instance(instance, subject)


def test_the_right_backend_passes_them_all():
    subject = MoESubject(TorchMoEBackend, device="cpu")
    names = {instance.check.name for instance in MOE.plan(subject, "smoke")}
    assert names == set(MOE.checks)
