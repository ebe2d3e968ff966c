"""The batches and sites that dense checks run on: the kinds that broke real engines, kept tiny.

A smoke grid takes seconds in plain torch, and minutes in an interpreter of kernels; the standard
grid repeats it in every dtype and adds sizes; what only a GPU's memory can hold is `large`.
"""

# ruff: noqa: ARG001 - checks and their cases share one signature
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from lora_core.batch import NO_LORA
from lora_core.capabilities import DTypeName
from lora_core.testing.dense_case import DenseCase
from lora_core.testing.engine import Level
from lora_core.testing.subject import Subject

NONE = NO_LORA

PLAIN = DenseCase()
MIXED = DenseCase(
    lengths=(4, 0, 3, 1, 2, 2),
    slots=(0, 1, 2, 3, NONE, 4),
    ranks=(3, 8, 8, 1, 0, 5),
    K=100,
    widths=(52,),
)
HOLES = DenseCase(
    lengths=(1, 3, 2, 1), slots=(NONE, 0, NONE, 1), ranks=(5, 2, 8), K=40, widths=(49,)
)
MANY = DenseCase(
    lengths=(1,) * 8, slots=(1, 2, 3, 2, 3, 2, 3, 3), ranks=(8, 4, 8, 7), mode="decode"
)
PACKED = DenseCase(
    lengths=(2, 1, 3, 1, 2, 1, 1),
    slots=(0, 1, 2, 3, NONE, 4, 5),
    ranks=((4, 0, 0), (8, 3, 0), (2, 0, 5), (0, 8, 0), (0, 0, 1), (0, 4, 6)),
    widths=(64, 16, 16),
)
LONG = DenseCase(lengths=(24, 0, 13, 4), slots=(1, 0, NONE, 2), ranks=(8, 8, 6), K=33, widths=(20,))

SHAPES: tuple[DenseCase, ...] = (
    PLAIN,
    MIXED,
    HOLES,
    MANY,
    PACKED,
    LONG,
    DenseCase(lengths=(2, 1, 3, 1), slots=(0, 0, 1, 0), ranks=(6, 8), K=64, widths=(32,)),
    DenseCase(lengths=(0, 3, 0, 2, 0), slots=(0, 1, NONE, 0, 1), ranks=(4, 8)),
    DenseCase(lengths=(3, 2), slots=(NONE, NONE), ranks=(4,)),
    DenseCase(lengths=(1,), slots=(2,), ranks=(8, 8, 3), K=7, widths=(7,)),
    DenseCase(lengths=(2,), slots=(0,), ranks=(1,), R=1, K=100, widths=(100,)),
    DenseCase(
        lengths=(5, 2), slots=(1, 0), ranks=(13, 16), R=16, K=129, widths=(65, 3, 70), bias=True
    ),
    DenseCase(
        lengths=(2, 2, 1),
        slots=(0, 1, NONE),
        ranks=((0, 0, 0, 4), (8, 1, 0, 3)),
        widths=(24, 8, 17, 40),
    ),
    DenseCase(lengths=(3, 2), slots=(1, 0), ranks=((3, 7), (8, 8)), widths=(40, 40), padding=3),
    DenseCase(
        lengths=(4, 1, 2),
        slots=(1, NONE, 0),
        ranks=(5, 8),
        K=64,
        widths=(48,),
        strided=True,
        bias=True,
    ),
    DenseCase(
        lengths=(3, 0, 2), slots=(2, 1, 0), ranks=(4, 8, 7), K=50, widths=(30, 18), layout="own"
    ),
    DenseCase(lengths=(3, 4, 2), slots=(0, NONE, 1), ranks=(4, 8), mode="verify"),
    DenseCase(lengths=(2, 2), slots=(0, 1), ranks=(8, 8), K=128, widths=(32,), ones=True),
)

LARGER: tuple[DenseCase, ...] = (
    DenseCase(lengths=(3, 2), slots=(1, 0), ranks=(8, 16), R=16, K=2049, widths=(300,)),
    DenseCase(
        lengths=(70, 1, 0, 59),
        slots=(0, 1, 2, NONE),
        ranks=(32, 17, 9),
        R=32,
        K=256,
        widths=(192, 64, 64),
    ),
    DenseCase(
        lengths=(1,) * 33,
        slots=tuple(i % 5 - 1 for i in range(33)),
        ranks=(8, 64, 1, 32),
        R=64,
        mode="decode",
    ),
    DenseCase(lengths=(2, 2), slots=(0, 1), ranks=(1, 2), R=16, K=4096, widths=(32,), ones=True),
    DenseCase(lengths=(40, 3), slots=(0, 1), ranks=(8, 8), K=64, widths=(64,), layout="own"),
    DenseCase(lengths=(64, 1), slots=(1, 0), ranks=(8, 8), K=64, widths=(520,), strided=True),
    DenseCase(
        lengths=(1,) * 300,
        slots=tuple(i % 9 - 1 for i in range(300)),
        ranks=(8, 3, 0, 5) * 2,
        K=24,
        widths=(20,),
    ),
    DenseCase(lengths=(5,), slots=(0,), ranks=(6,), K=96, widths=(32, 16, 16, 8, 8, 16), R=8),
)

LARGEST: tuple[DenseCase, ...] = (
    DenseCase(lengths=(4096, 1, 900), slots=(0, NONE, 1), ranks=(64, 33), R=64, K=7168, widths=(7168,)),
    DenseCase(lengths=(1,) * 256, slots=tuple(i % 33 - 1 for i in range(256)), ranks=(16,) * 32, R=16, K=4096,
              widths=(4096, 1024, 1024), mode="decode"),
)  # fmt: skip


def dtypes(subject: Subject) -> list[DTypeName]:
    """Claimed dtypes, float32 first."""
    return [dtype for dtype in get_args(DTypeName) if dtype in subject.capabilities.dtypes]


def fits(subject: Subject, case: DenseCase) -> bool:
    """Whether a case lies inside what the backend claims."""
    claims = subject.capabilities
    return (
        case.mode in claims.modes
        and (claims.max_rank is None or claims.max_rank >= case.R)
        and (claims.max_slices is None or claims.max_slices >= len(case.widths))
    )


def claimed(
    subject: Subject, shapes: Iterable[DenseCase], *, every_dtype: bool = True
) -> list[DenseCase]:
    """Those of `shapes` that fit, in every claimed dtype or in the first."""
    kinds = dtypes(subject)[: None if every_dtype else 1]
    return [shape.but(dtype=dtype) for dtype in kinds for shape in shapes if fits(subject, shape)]


def grid(subject: Subject, level: Level) -> Sequence[DenseCase]:
    """For values: smoke has every shape in one dtype and some in the others."""
    if level == "smoke":
        first = claimed(subject, SHAPES, every_dtype=False)
        some = claimed(subject, (MIXED, PACKED, LONG, SHAPES[-1]))
        return list(dict.fromkeys(first + some))
    cases = claimed(subject, SHAPES + LARGER + _extremes(subject))
    return cases if level == "standard" else cases + claimed(subject, LARGEST)


def few(subject: Subject, level: Level) -> Sequence[DenseCase]:
    """For laws and state, which run a case many times."""
    shapes = (MIXED, PACKED, LONG)
    if level == "smoke":
        return claimed(subject, shapes, every_dtype=False)
    return claimed(subject, (*shapes, HOLES, MANY, *LARGER[1:3]))


def one(subject: Subject, level: Level) -> Sequence[DenseCase]:
    """For rules that do not depend on shapes."""
    return claimed(subject, (MIXED,), every_dtype=False)


def _extremes(subject: Subject) -> tuple[DenseCase, ...]:
    """The ends of the claimed range; without a limit, ranks that people ask for."""
    claims = subject.capabilities
    rank = claims.max_rank or 256
    slices = min(claims.max_slices or 8, 16)
    return (
        DenseCase(lengths=(3, 1), slots=(0, 1), ranks=(rank, 1), R=rank, K=64, widths=(48,)),
        DenseCase(
            lengths=(3, 1),
            slots=(0, 1),
            ranks=(8, 3),
            K=64,
            widths=(16, 5) * (slices // 2) + (9,) * (slices % 2),
        ),
    )
