"""Drawn batches, shapes and ranks; a failure is shrunk and printed as code that can be pasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lora_core.capabilities import Op
from lora_core.testing.dense_case import DenseCase
from lora_core.testing.dense_family import DENSE
from lora_core.testing.dense_grid import NONE, dtypes
from lora_core.testing.dense_values import expand, linear, shrink
from lora_core.testing.engine import Level
from lora_core.testing.subject import Subject

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Examples:
    """How many cases to draw."""

    count: int

    @property
    def id(self) -> str:
        """`25-examples`."""
        return f"{self.count}-examples"


def _examples(subject: Subject, level: Level) -> Sequence[Examples]:
    if find_spec("hypothesis") is None:
        return ()  # an extra; the shell command says so
    if subject.interpreted:
        return (Examples(6 if level == "smoke" else 40),)
    return (Examples(25 if level == "smoke" else 250),)


def cases(subject: Subject) -> SearchStrategy[DenseCase]:
    """Cases inside what the backend claims, small enough for an interpreter."""
    from hypothesis import strategies as st

    claims = subject.capabilities
    most_rank = min(claims.max_rank or 16, 16)
    most_slices = min(claims.max_slices or 4, 4)
    kinds = [d for d in dtypes(subject) if not (subject.interpreted and d == "bfloat16")]

    @st.composite
    def draw_case(draw: st.DrawFn) -> DenseCase:
        mode = draw(st.sampled_from(sorted(claims.modes)))
        most = 1 if mode == "decode" else 9
        slots_count = draw(st.integers(1, 5))
        widths = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=most_slices)))
        room = draw(st.integers(1, most_rank))
        rank = st.integers(0, room)
        ranks = tuple(tuple(draw(rank) for _ in widths) for _ in range(slots_count))
        lengths = tuple(draw(st.lists(st.integers(0, most), max_size=6)))
        slots = tuple(draw(st.integers(NONE, slots_count - 1)) for _ in lengths)
        scaled = claims.supports(Op.SCALES) and draw(st.booleans())
        factor = st.sampled_from((0.0, 0.5, 1.0, -2.0))
        return DenseCase(
            lengths=lengths,
            slots=slots,
            ranks=ranks,
            K=draw(st.integers(1, 130)),
            widths=widths,
            R=room,
            dtype=draw(st.sampled_from(kinds)),
            mode=mode,
            padding=draw(st.integers(0, 3)),
            layout=draw(st.sampled_from(("plain", "own"))),
            strided=draw(st.booleans()),
            bias=draw(st.booleans()),
            scales=tuple(draw(factor) for _ in lengths) if scaled else None,
            seed=draw(st.integers(0, 3)),
        )

    return draw_case()


@DENSE.check(
    "V1", "S1", "S2", "S3", "S4", "S5", "S7", "N4", "I1", "I2",
    cases=_examples,
    cause="a combination of lengths, ranks and widths that no example thought of",
)  # fmt: skip
def drawn(subject: Subject, case: Examples) -> None:
    """Linear, shrink and expand are right on drawn cases."""
    from hypothesis import HealthCheck, Phase, given, settings

    last: list[DenseCase] = []

    @settings(
        max_examples=case.count,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(cases(subject))
    def every(one: DenseCase) -> None:
        last[:] = [one]
        linear(subject, one)
        shrink(subject, one)
        expand(subject, one)

    try:
        every()
    except Exception as error:
        smallest = f"  linear({subject.as_code()}, {last[0]!r})" if last else ""
        raise AssertionError(f"{error}\nthe smallest case found:\n{smallest}") from error
