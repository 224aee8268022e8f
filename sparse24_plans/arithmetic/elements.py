"""The types that the result, the bias and C of a product may have, by the element that is multiplied."""

from __future__ import annotations

from ..vocab import FP8, ElementKind

_F32, _F16, _BF16 = ElementKind.F32, ElementKind.F16, ElementKind.BF16
# Result types of 8-bit elements, the default first. Results of other elements are the element or f32.
_OUT_OF = {
    ElementKind.S8: (ElementKind.I32, ElementKind.S8, _F16, _BF16, _F32),
    **dict.fromkeys(FP8, (_BF16, _F16, _F32)),
}


def sources_of(element: ElementKind) -> tuple[ElementKind, ...]:
    """Types of X, the default first: the weight's type, or either fp8 type beside an fp8 weight."""
    return (element, *(kind for kind in FP8 if kind is not element)) if element in FP8 else (element,)


def results_of(element: ElementKind) -> tuple[ElementKind, ...]:
    """Types of the result that need no scale, the default first."""
    return _OUT_OF.get(element, (element, _F32))


def fp8_results_of(element: ElementKind) -> tuple[ElementKind, ...]:
    """Types of the result that a scale may fit into 8 bits."""
    return () if element in (ElementKind.F32, ElementKind.S8) else FP8


def biases_of(element: ElementKind, out: ElementKind) -> tuple[ElementKind, ...]:
    """Types of the bias of a result of type ``out``, the default first."""
    if out in FP8:
        return _BF16, _F16, _F32
    if element not in _OUT_OF:
        return element, _F32
    return (_F32, _F32) if out.is_integer else (out, _F32)


def addends_of(out: ElementKind) -> tuple[ElementKind, ...]:
    """Types of C, which is added to a result of type ``out``, the default first."""
    return (_BF16, _F16, _F32) if out in FP8 else (out, _F32)
