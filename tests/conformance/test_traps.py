"""Comparisons and guards: each lets the right thing pass and the wrong one not."""

from __future__ import annotations

import pytest
import torch

from lora_core.testing import DenseCase, Subject
from lora_core.testing.capture import Captured
from lora_core.testing.compare import assert_close, assert_same_bits, same_bits, unit_in_last_place
from lora_core.testing.dense_case import Base, Problem
from lora_core.testing.engine import Violation
from lora_core.testing.guards import (
    INT_POISON,
    Banded,
    HostReads,
    PoisonedAllocations,
    Unchanged,
    assert_sync_zero,
    no_synchronisation,
    poison,
    poison_scratch,
)
from lora_core.testing.snapshot import assert_remembers_nothing, remember

CPU = torch.device("cpu")

# -- comparing ------------------------------------------------------------------------------------


def test_bits_tell_zeros_apart_and_nans_alike():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(
        AssertionError, match=r"1 of 4 entries differ in bits, first at \[1, 0\] \(here\)"
    ):
        assert_same_bits(
            torch.tensor([[1.0, 2], [3, 4]]),
            torch.tensor([[1.0, 2], [5, 4]]),
            "x",
            lambda i: "here",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [1.0, 1.5, 3.0, 100.0])
def test_unit_in_last_place_is_the_distance_to_the_next_number(dtype, largest):
    row = torch.tensor([[0.25, -largest]], dtype=torch.float64)
    here = torch.tensor(largest, dtype=dtype)
    above = (here.view(torch.int16 if here.element_size() == 2 else torch.int32) + 1).view(dtype)
    assert (above.double() - here.double()).item() == unit_in_last_place(row, dtype).item()


def _close(error_units, plain_units, entries=100, dtype=torch.float32):
    """Compare ones with an error of so many units in every entry, plain torch's likewise."""
    unit = torch.finfo(dtype).eps
    expected = torch.ones(entries, 1, dtype=torch.float64)
    actual = (expected + error_units * unit).to(dtype)
    assert_close(actual, expected, [(expected + plain_units * unit).to(dtype)], "ones")


@pytest.mark.parametrize(("error", "plain"), [(0, 0), (2, 1), (2, 2), (6, 3)])
def test_close_within_twice_plain_torch(error, plain):
    _close(error, plain)


@pytest.mark.parametrize(("error", "plain"), [(1, 0), (3, 1), (4, 1), (7, 3)])
def test_past_twice_plain_torch_is_refused(error, plain):
    with pytest.raises(AssertionError, match="units in the last place"):
        _close(error, plain)


def test_few_entries_are_judged_by_the_largest_error():
    _close(3, 1, entries=10)
    with pytest.raises(AssertionError, match=r"error of 4 units in the last place \(allowed 3\)"):
        _close(4, 1, entries=10)


def test_errors_are_measured_at_the_scale_of_their_row():
    expected = torch.tensor([[1e6], [1.0]], dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"worst is at \[1, 0\]"):
        assert_close((expected + 0.5).float(), expected, [expected.float()], "rows of two scales")


def test_nan_is_refused_where_specified_and_passed_where_not():
    expected = torch.tensor([[1.0], [torch.nan]], dtype=torch.float64)
    assert_close(torch.tensor([[1.0], [5.0]]), expected, [torch.ones(2, 1)], "h")
    with pytest.raises(AssertionError, match=r"not finite, first at \[0, 0\]"):
        assert_close(torch.tensor([[torch.nan], [5.0]]), expected, [torch.ones(2, 1)], "h")


@pytest.mark.parametrize("wrong", [None, torch.ones(2), torch.ones(3, 1, dtype=torch.float16)])
def test_results_of_another_kind_are_refused(wrong):
    with pytest.raises(AssertionError, match="expected"):
        assert_close(
            torch.ones(3, 1) if wrong is None else wrong, torch.ones(2, 1).double(), [], "y"
        )


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.empty_like(torch.ones(3)),
        lambda: torch.ones(3).new_empty(3),
        lambda: torch.empty_strided((3,), (2,)),
    ],
)
def test_uninitialised_memory_is_poisoned(make):
    with PoisonedAllocations():
        found = make()
    assert found.isnan().all()


def test_poison_of_every_kind():
    kinds = [
        torch.zeros(2, dtype=d)
        for d in (torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool)
    ]
    for tensor in kinds:
        poison(tensor)
    assert kinds[0].isnan().all()
    assert [kinds[1].tolist(), kinds[2].tolist()] == [[INT_POISON] * 2] * 2
    assert [kinds[3].tolist(), kinds[4].tolist()] == [[0xF9] * 2, [True] * 2]


@pytest.mark.parametrize("at", [-1, 4, 5, 12], ids=["before", "between", "between2", "after"])
def test_a_write_beside_a_banded_tensor_is_seen(at):
    band = Banded((2, 4), torch.float16, CPU, margin=8, pad_columns=2)
    band.tensor.fill_(1.0)
    band.arm()
    band.check("out")
    band.tensor.fill_(2.0)
    band.check("out", written=True)
    torch.as_strided(band.buffer, (1,), (1,), 8 + at).fill_(0.0)
    with pytest.raises(Violation, match=f"first at element {at}") as seen:
        band.check("out", written=True)
    assert seen.value.clause == "I2"


def test_a_write_into_an_input_is_seen():
    x = torch.tensor([1.0, torch.nan, 0.0])
    unchanged = Unchanged({"x": x})
    unchanged.check()
    x[2] = -0.0
    with pytest.raises(
        Violation, match=r"x was written: 1 elements changed, the first at \[2\]"
    ) as seen:
        unchanged.check()
    assert seen.value.clause == "I1"


def test_margins_may_be_unaligned():
    assert Banded((4,), torch.float16, CPU, margin=65).tensor.data_ptr() % 4 == 2


def test_scratch_and_sync():
    backend = Subject("torch", device="cpu").new()
    backend.workspace.scratch["h"] = torch.zeros(2)
    backend.workspace.sync["count"] = torch.zeros(2, dtype=torch.int32)
    poison_scratch(backend)
    assert backend.workspace.scratch["h"].isnan().all()
    assert_sync_zero(backend)
    backend.workspace.sync["count"][1] = 1
    with pytest.raises(Violation, match=r"sync\['count'\] is not zero"):
        assert_sync_zero(backend)


# -- reads by the host ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t[0].item(),
        lambda t: bool(t[0]),
        lambda t: int(t[0]),
        lambda t: [1, 2, 3][t[0]],
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
    ],
)
def test_reads_by_the_host_are_seen(read):
    with pytest.raises(Violation, match="the host read") as seen, no_synchronisation(CPU):
        read(torch.arange(3))
    assert seen.value.clause == "R1"


def test_work_on_the_device_is_no_read():
    with HostReads():
        t = torch.arange(3)
        t = torch.where(t > 1, t.float(), 0.0).sum() + t.long().float()[:2].mean()
    assert t.item() == 2.5


# -- capturing on a CPU ---------------------------------------------------------------------------


def test_a_host_graph_runs_again_with_what_the_inputs_hold_now():
    x = torch.ones(3)
    out = torch.zeros(3)

    def work():
        y = (x * 2).view(3, 1)
        out.copy_((y + torch.arange(3)).sum(1))
        return torch.where(out > 5, out, 0.0)

    captured = Captured(CPU, work)
    x.copy_(torch.tensor([1.0, 5.0, 7.0]))
    address = captured.result.data_ptr()
    captured.replay()
    assert captured.result.tolist() == [9.0, 33.0, 45.0]
    assert captured.result.data_ptr() == address


def test_what_python_decided_during_the_capture_stays():
    slots = torch.tensor([1, 1])
    chosen = [1]
    captured = Captured(CPU, lambda: slots == chosen[0])
    chosen[0] = 2
    slots.fill_(2)
    captured.replay()
    assert captured.result.tolist() == [False, False]


def test_a_read_during_a_capture_is_refused():
    with pytest.raises(Violation):
        Captured(CPU, lambda: torch.ones(2).sum().item())


# -- what a backend remembers ---------------------------------------------------------------------


def _remembered(change):
    backend = Subject("torch", device="cpu").new()
    backend.notes = {"sizes": [1, 2], "table": torch.zeros(3)}
    before = remember(backend)
    assert_remembers_nothing(before, remember(backend), "at once")
    change(backend)
    with pytest.raises(Violation) as seen:
        assert_remembers_nothing(before, remember(backend), "afterwards")
    assert seen.value.clause == "B2"
    return str(seen.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: setattr(b, "last", 1), "self.last appeared: 1"),
        (lambda b: b.notes["sizes"].append(3), "self.notes.sizes[2] appeared: 3"),
        (lambda b: b.notes["table"].add_(1), "self.notes.table changed from tensor (3,)"),
        (lambda b: b.notes.update(table=torch.zeros(3)), "self.notes.table changed"),
        (lambda b: delattr(b, "notes"), "self.notes vanished"),
        (lambda b: setattr(b.workspace, "more", 5), "self.workspace.more appeared: 5"),
        (
            lambda b: b.workspace.graph_room.update(decode=(1, 2)),
            "self.workspace.graph_room.decode appeared",
        ),
    ],
)
def test_every_change_of_the_object_is_found(change, words):
    assert words in _remembered(change)


def test_state_on_the_class_is_found():
    from lora_core.torch_backend import TorchBackend

    class Sharing(TorchBackend):
        name = "sharing"
        shared: dict[str, int] = {}  # noqa: RUF012

    backend = Sharing(device="cpu")
    before = remember(backend)
    Sharing.shared["x"] = 1
    with pytest.raises(Violation, match=r"Sharing\.shared\.x appeared: 1"):
        assert_remembers_nothing(before, remember(backend), "now")


def test_the_homes_may_change():
    backend = Subject("torch", device="cpu").new()
    before = remember(backend)
    backend.workspace.scratch["h"] = torch.zeros(2)
    backend.prepare_batch(DenseCase().batch)
    assert_remembers_nothing(before, remember(backend), "in its homes")


# -- the problem of a case ------------------------------------------------------------------------


def test_everything_a_result_may_not_depend_on_is_nan():
    case = DenseCase(
        lengths=(2, 1), slots=(0, -1), ranks=((3, 0), 4), K=6, widths=(2, 3), R=4, padding=1
    )
    problem = Problem(Subject("torch", device="cpu"), case)
    w = problem.weights
    assert not w.a[0, 0, :3].isnan().any()
    assert w.a[0, 0, 3:].isnan().all()
    assert w.a[0, 1].isnan().all()
    assert w.b[0, 2:].isnan().all()
    assert w.a[1].isnan().all()
    assert w.scalings[1].isnan().all()
    assert w.ranks.tolist() == [[3, 0], [4, 4]]
    assert problem.x[3].isnan().all()
    assert not problem.x[:3].isnan().any()


def test_a_case_prints_as_code_and_builds_the_same_tensors():
    case = DenseCase(
        lengths=(2, 1), slots=(1, 0), ranks=(3, (4,)), dtype="bfloat16", strided=True, seed=3
    )
    again = eval(repr(case))
    assert again == case
    subject = Subject("torch", device="cpu")
    assert same_bits(Problem(subject, case).x, Problem(subject, again).x)


@pytest.mark.parametrize(
    ("case", "id_"),
    [
        (DenseCase(), "fp32-r4-K40-N48-seg(3,2)-slot(0,1)"),
        (
            DenseCase(
                lengths=(4, 0, 7),
                slots=(0, -1, 1),
                ranks=(8, 8),
                K=100,
                widths=(32, 16),
                dtype="bfloat16",
                padding=2,
            ),
            "bf16-r8-K100-N32+16-seg(4,0,7)-slot(0,.,1)-pad2",
        ),
        (
            DenseCase(lengths=(1,) * 9, slots=(0,) * 9, mode="decode", R=4),
            "fp32-r4-R4-K40-N48-seg(1x9)-slot(0x9)-decode",
        ),
    ],
)
def test_ids_are_readable(case, id_):
    assert case.id == id_


def test_the_base_gives_fresh_results_between_canaries():
    base = Base(torch.eye(2), pad_columns=3)
    x = torch.tensor([[1.0, 2.0]])
    first, second = base(x), base(x)
    assert first.tolist() == [[1.0, 2.0]]
    assert first.data_ptr() != second.data_ptr()
    assert base.results[0].buffer.isnan().sum() == len(base.results[0].buffer) - 2
