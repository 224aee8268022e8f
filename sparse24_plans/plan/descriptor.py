"""What every descriptor is: a frozen model that says what is to be computed and declares its operands."""

from __future__ import annotations

from typing import ClassVar

from ..vocab import ElementKind, Model, OpCategory
from .operands import Operand


class Descriptor(Model):
    """Base of every family's descriptors. Frozen, hashable, JSON round-trip; knows nothing of kernels."""

    element: ElementKind
    """Type of the weight's values."""

    category: ClassVar[OpCategory]
    """What a kernel of the problem does: part of the plan's KernelSku."""

    @property
    def op_name(self) -> str:
        """The op of the plan's KernelSku."""
        raise NotImplementedError

    @property
    def reduction(self) -> int:
        """Length of the sum behind one result, which error bounds depend on; 1 where nothing is summed."""
        return 1

    def operands(self) -> tuple[Operand, ...]:
        """Every operand, in the order of the arguments."""
        raise NotImplementedError
