"""The base of every descriptor: a frozen model of a problem, which declares the problem's operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, Field

from ..arithmetic.elements import addends_of, biases_of, fp8_results_of, results_of
from ..arithmetic.epilogue import NO_BOUNDS
from ..vocab import ElementKind, EpilogueKind, Model, Number, OpCategory
from .operands import Operand


def _factor(value: float) -> float:
    if abs(value) > float(np.finfo(np.float32).max):
        raise ValueError(f"expected a value finite in float32, got {value}")
    return value + 0.0  # -0.0 becomes +0.0: equal descriptors must mean the same bits


Factor = Annotated[float, Number(finite=True), AfterValidator(_factor)]
"""A number that kernels multiply by, or compare with, in float32."""


AS_ELEMENT = Field(default_factory=lambda data: data["element"])
"""Default of a field that equals ``element`` unless it is given. It must be declared after ``element``."""
OUT_ELEMENT = Field(default_factory=lambda data: results_of(data["element"])[0])
"""Default of a product's field ``out_element``, which must be declared after ``element``."""
BIAS_ELEMENT = Field(default_factory=lambda data: biases_of(data["element"], data["out_element"])[0])
"""Default of a product's field ``bias_element``, which must be declared after ``out_element``."""
C_ELEMENT = Field(default_factory=lambda data: addends_of(data["out_element"])[0])
"""Default of a product's field ``c_element``, which must be declared after ``out_element``."""


class Descriptor(Model):
    """Base of every family's descriptors. They are frozen and hashable, survive JSON, and know no kernels."""

    element: ElementKind
    """Type of the weight's values."""

    category: ClassVar[OpCategory]
    """The category in the plan's KernelSku."""

    def _expect(self, name: str, allowed: tuple[object, ...]) -> None:
        """Raise ValueError if the field's value isn't allowed."""
        if getattr(self, name) not in allowed:
            words = " or ".join(dict.fromkeys(map(str, allowed)))
            raise ValueError(f"{name}: expected {words}, got {getattr(self, name)}")

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


class ProductDescriptor(Descriptor):
    """Base of products with an epilogue. Each descriptor declares these fields itself, in its own order."""

    if TYPE_CHECKING:
        epilogue: EpilogueKind
        alpha: Factor
        out_element: ElementKind
        bias_element: ElementKind

    def _expect_result_types(self, *, gates: bool = False, fp8: bool = False) -> None:
        """Raise ValueError for a result or bias type that doesn't fit the element.

        A gated epilogue is refused as well, unless the family has ``gates``, and a result that needs a scale,
        unless it has ``fp8`` ones.
        """
        if self.epilogue.is_gated and not gates:
            raise ValueError(f"epilogue: expected one that isn't gated, got {self.epilogue}")
        scaled = fp8_results_of(self.element) if fp8 else ()
        self._expect("out_element", results_of(self.element) + scaled)
        self._expect("bias_element", biases_of(self.element, self.out_element))

    @property
    def relu_bounds(self) -> tuple[float, float]:
        """Threshold and upper bound of relu."""
        return NO_BOUNDS

    @property
    def is_plain(self) -> bool:
        """Whether the result is the sum itself, rounded to the result's type."""
        return self.epilogue is EpilogueKind.IDENTITY and self.alpha == 1
