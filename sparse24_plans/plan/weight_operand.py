"""Operands that are 2:4 weights, in canonical form or in a kernel's own layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..device.tensors import Device
from ..errors import InvalidProblemError
from ..vocab import CANONICAL_LAYOUT, ElementKind
from ..weights.packed_layouts import Quantization, canonical_forms, layout_called
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import CanonicalWeight, PackedWeight, Sparse24Weight
from .operands import Forms, Operand, Packing, Part, Role, Views

CANONICAL_WEIGHTS = (Sparse24Weight, Sparse24QuantizedWeight)
_BUFFERS = ("values", "metadata", "scales")
"""Buffers of a weight in canonical form; only quantized ones have scales."""
_CANONICAL = tuple(Part(name, name) for name in _BUFFERS)


@dataclass(frozen=True, slots=True)
class WeightPacking(Packing):
    """How a weight becomes its ``values``, ``metadata`` and, if quantized, ``scales``; or its ``packed``."""

    m: int
    k: int
    element: ElementKind
    layout: str | None
    """The weight's layout; None: any layout that the plan's kernel reads."""
    quantization: Quantization | None
    """How the weight stores its values; None: as they are."""

    def parts(self, layout: str) -> tuple[Part, ...]:
        if (self.layout or layout) != CANONICAL_LAYOUT:
            return (Part("packed"),)
        return _CANONICAL if self.quantization else _CANONICAL[:2]

    def forms(self, layout: str) -> Forms:
        layout = self.layout or layout
        if layout == CANONICAL_LAYOUT:
            found = canonical_forms(self.m, self.k, self.element, self.quantization)
            return tuple((shape, element) for element, shape in found)
        tiles = layout_called(layout, self.quantization)
        return ((tiles.packed_shape(self.m, self.k), ElementKind.U8),)

    def unpack(self, given: Any, argument: str, layouts: tuple[str, ...], home: Device) -> Views:
        self.check(given, argument, layouts, home)
        if type(given) is not PackedWeight:
            return dict(zip(_BUFFERS, given.views, strict=False))
        if given.layout_id == CANONICAL_LAYOUT:
            return dict(zip(_BUFFERS, given.buffers, strict=False))
        return {"packed": given.buffers[0]}

    def check(self, given: Any, argument: str, layouts: tuple[str, ...], home: Device) -> None:
        """Raise InvalidProblemError unless ``given`` is this weight in a layout that is read, on ``home``."""
        layouts, kind = layouts if self.layout is None else (self.layout,), type(given)
        if kind in CANONICAL_WEIGHTS or kind is PackedWeight:
            self.check_fits(given, argument, home)  # first, because packing a wrong weight would be in vain
        if kind in CANONICAL_WEIGHTS and CANONICAL_LAYOUT in layouts:
            return
        if kind is not PackedWeight:
            hint = "; call plan.pack(weight)" if kind in CANONICAL_WEIGHTS else ""
            canonical = (Sparse24QuantizedWeight if self.quantization else Sparse24Weight).__name__
            wanted = " or a ".join(
                canonical if layout == CANONICAL_LAYOUT else f"PackedWeight of layout {layout!r}"
                for layout in layouts
            )
            raise InvalidProblemError(f"{argument}: expected a {wanted}, got {kind.__name__}{hint}")
        if given.layout_id not in layouts:
            wanted = " or ".join(repr(layout) for layout in layouts)
            raise InvalidProblemError(
                f"{argument}: expected layout {wanted}, got {given.layout_id!r}; call plan.pack(weight)"
            )

    def check_fits(self, weight: PackedWeight | CanonicalWeight, argument: str, home: Device) -> None:
        """Raise InvalidProblemError if shape, element, quantization or device are another weight's."""
        if (weight.m, weight.k) != (self.m, self.k) or weight.element is not self.element:
            wanted, got = (f"{one.element}[{one.m}, {one.k}]" for one in (self, weight))
        elif weight.quantization != self.quantization:
            wanted, got = (str(one.quantization or "values that are not quantized") for one in (self, weight))
        elif weight.device != home:
            wanted, got = f"memory on {home}", str(weight.device)
        else:
            return
        raise InvalidProblemError(f"{argument}: expected {wanted}, got {got}")


def weight_operand(
    name: str,
    m: int,
    k: int,
    element: ElementKind,
    *,
    layout: str | None = None,
    quantization: Quantization | None = None,
) -> Operand:
    """The operand that is a weight [m, k]. Without a ``layout`` the plan's kernel decides."""
    packing = WeightPacking(m, k, element, layout, quantization)
    return Operand(name, Role.WEIGHT, (m, k), element, packing=packing)
