"""Names of arithmetics: exact sequences of roundings, which give the same bits wherever they are run.

============================ =====================================================================
``fma32_in_order``           one float32 fma a kept position, in increasing order
``exact_sum``                integers, added exactly, the sum rounded to float32 once
``hopper_tc/slices=S``       steps of Hopper's tensor cores over each of S slices of K, added in order
``hopper_tc_fp8/slices=S``   fp8 steps of Hopper's tensor cores over each of S slices of K, added in order
``hopper_tc_fp8/promoted=C`` fp8 steps over every C columns, whose sums are added in order in float32
``hopper_tc_f32x6/slices=S`` float32 split into three bf16 terms; six of their products are added
``hopper_tc_f32x3/slices=S`` float32 split into two bf16 terms; three of their products are added
============================ =====================================================================

The epilogue is one sequence for all names. docs/guarantees.md has it, with the rules of each name. A
descriptor and a name fix every bit of a result.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InvalidProblemError, shown
from ..vocab import FP8, ElementKind

FMA32, EXACT_SUM, HOPPER, HOPPER_FP8 = "fma32_in_order", "exact_sum", "hopper_tc", "hopper_tc_fp8"
HOPPER_F32 = {2: "hopper_tc_f32x3", 3: "hopper_tc_f32x6"}
"""Names by the number of split terms of a float32. The name ends in the number of products that are added."""
MAX_SLICES, PROMOTED_EVERY = 8, 128
FORMS = (
    FMA32,
    EXACT_SUM,
    f"{HOPPER}/slices=1..{MAX_SLICES}",
    f"{HOPPER_FP8}/slices=1..{MAX_SLICES}",
    f"{HOPPER_FP8}/promoted={PROMOTED_EVERY}",
    *(f"{kind}/slices=1..{MAX_SLICES}" for kind in HOPPER_F32.values()),
)
"""All names in short, for messages."""
_ELEMENTS = {
    FMA32: (ElementKind.F32, ElementKind.F16, ElementKind.BF16, *FP8),
    EXACT_SUM: (ElementKind.S8,),
    HOPPER: (ElementKind.F16, ElementKind.BF16),
    HOPPER_FP8: FP8,
    **dict.fromkeys(HOPPER_F32.values(), (ElementKind.F32,)),
}
_OF_ELEMENT = {**dict.fromkeys(FP8, HOPPER_FP8), ElementKind.F32: HOPPER_F32[3]}


def in_order(element: ElementKind) -> str:
    """The name of the host oracle's arithmetic for an element."""
    return EXACT_SUM if element is ElementKind.S8 else FMA32


class Arithmetic(NamedTuple):
    """A parsed name. ``str`` gives the name."""

    kind: str
    slices: int = 0
    """Slices of K that tensor cores sum one by one; 0 in arithmetics without slices."""
    promoted_every: int = 0
    """Columns of K after which a sum leaves the tensor cores; 0: after a whole slice."""

    @classmethod
    def of(cls, name: object) -> Arithmetic:
        """Parse ``name``. Raises InvalidProblemError."""
        if (complaint := complaint_of(name)) is not None:
            raise InvalidProblemError(f"arithmetic: {complaint}")
        return _KNOWN[str(name)]

    @classmethod
    def hopper(cls, element: ElementKind, slices: int) -> Arithmetic:
        """The arithmetic of tensor cores that sum K in ``slices``. f32 is split into three terms."""
        return cls(_OF_ELEMENT.get(element, HOPPER), slices)

    @classmethod
    def split(cls, parts: int, slices: int) -> Arithmetic:
        """The arithmetic of tensor cores that multiply float32 split into bf16 terms."""
        return cls(HOPPER_F32[parts], slices)

    @classmethod
    def promoted(cls) -> Arithmetic:
        """The arithmetic of tensor cores that sum fp8, with sums promoted to float32 outside of them."""
        return cls(HOPPER_FP8, 0, PROMOTED_EVERY)

    @property
    def on_tensor_cores(self) -> bool:
        return self.kind in _ON_TENSOR_CORES

    @property
    def parts(self) -> int:
        """Split terms in bf16 of every operand; 0: operands are multiplied unsplit."""
        return _PARTS.get(self.kind, 0)

    def takes(self, element: ElementKind) -> bool:
        """Whether the arithmetic is defined for operands of this element."""
        return element in _ELEMENTS[self.kind]

    def __str__(self) -> str:
        if self.promoted_every:
            return f"{self.kind}/promoted={self.promoted_every}"
        return f"{self.kind}/slices={self.slices}" if self.slices else self.kind


_ON_TENSOR_CORES = (HOPPER, HOPPER_FP8, *HOPPER_F32.values())
_PARTS = {kind: parts for parts, kind in HOPPER_F32.items()}
_KNOWN = {
    str(one): one
    for one in (
        Arithmetic(FMA32),
        Arithmetic(EXACT_SUM),
        *(Arithmetic(kind, slices) for kind in _ON_TENSOR_CORES for slices in range(1, MAX_SLICES + 1)),
        Arithmetic.promoted(),
    )
}


def complaint_of(name: object) -> str | None:
    """A message that says why a name is unknown, or None for a known name."""
    if isinstance(name, str) and name in _KNOWN:
        return None
    return f"expected one of {', '.join(FORMS)}, got {shown(name)}"
