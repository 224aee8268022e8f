"""Canonical weights from compressed matrices whose metadata only their own library can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..device.devices import current_on
from ..device.tensors import Device, TensorView
from ..errors import FormatError, InvalidProblemError
from ..vocab import ElementKind, ElementLike
from ..weights import canonical
from ..weights.weight import Sparse24Weight
from .base import ALL_ELEMENTS, two_sizes
from .positions import canonical_weight


def from_product(
    blob: Any,
    shape: Sequence[int],
    multiply: Callable[[Any], Any],
    *,
    element: ElementLike | None = None,
) -> Sparse24Weight:
    """A canonical weight from a compressed matrix whose metadata only its own library can read.

    It serves cuSPARSELt on every architecture: the values [M, K/2] are at the start of the blob, row-major,
    and the library itself tells their positions. ``multiply`` is called once, with a copy of the blob whose
    values are 1 and 2 (first and second of their group), and returns the copy's dense matrix: its product
    with the identity matrix. The weight's own values, NaN and Inf too, are copied as bits.

    Parameters
    ----------
    blob : tensor
        The compressed matrix, contiguous, of the element's type. Copied with its own ``clone()`` or
        ``copy()``.
    shape : (int, int)
        M and K.
    multiply : callable
        ``multiply(blob)`` -> tensor [M, K], of a floating type or the element's. For PyTorch:
        ``lambda blob: torch._cslt_sparse_mm(blob, torch.eye(K, dtype=blob.dtype, device=blob.device))``.
    element : ElementKind or str, optional
        The type of the values, if they are raw bits.

    Raises
    ------
    InvalidProblemError
        A shape, size, device or type that is wrong, of the blob or of the product.
    FormatError
        A product that isn't a 2:4 matrix of 1 and 2, with row and group, because the values lie elsewhere.
    """
    if not callable(multiply):
        raise InvalidProblemError(f"multiply: expected a callable, got {type(multiply).__name__}")
    view = TensorView.of(blob, element=element, argument="blob")
    m, k = two_sizes("shape", shape)
    if k % 8 or view.element not in ALL_ELEMENTS:
        raise InvalidProblemError(f"shape: expected K a multiple of 8, got {[m, k]} of {view.element}")
    if not view.is_contiguous or view.nbytes_spanned < m * k // 2 * view.element.itemsize:
        raise InvalidProblemError(f"blob: expected {m * k // 2} values or more, contiguous, got {view!r}")
    with current_on(view.device):
        probe = _copied(blob)
        bits = TensorView.of(probe, element=element, argument="blob").bits().reshape(-1)
        marks = np.array([1, 2]).astype(view.element.dtype).view(view.element.bits_dtype)
        values = view.bits().reshape(-1)[: m * k // 2].reshape(m, k // 2)
        for slot in range(2):
            bits[: m * k // 2][slot::2] = marks[slot]
        codes = _codes_of_product(multiply(probe), m, k, view.device)
        return canonical_weight(values, codes, view.element)


def _copied(blob: Any) -> Any:
    """A copy of the blob, of the same type, so that the library takes it too."""
    for method in ("clone", "copy"):
        if hasattr(blob, method):
            return getattr(blob, method)()
    raise InvalidProblemError(f"blob: expected a tensor with clone() or copy(), got {type(blob).__name__}")


def _codes_of_product(product: Any, m: int, k: int, device: Device) -> Any:
    """Codes [m, k/4] from a dense matrix that marks first values by 1, second ones by 2, both by 3."""
    view = TensorView.of(product, argument="product")
    if view.shape != (m, k) or view.device != device:
        raise InvalidProblemError(
            f"product: expected shape {[m, k]} on {device}, got {list(view.shape)} on {view.device}"
        )
    marks = _small_integers(view)
    xp = canonical.array_module(marks)
    groups = marks.reshape(m, k // 4, 4)
    firsts, seconds = groups & np.uint8(1), groups >> np.uint8(1)
    bad = (firsts.sum(axis=2) != 1) | (seconds.sum(axis=2) != 1)
    if bool(bad.any()):
        row, group = divmod(int(bad.argmax()), k // 4)
        raise FormatError("product: expected one 1 and one 2 in every group of 4", row=row, group=group)
    return (firsts.argmax(axis=2) | seconds.argmax(axis=2) << 2).astype(xp.uint8)


def _small_integers(view: TensorView) -> Any:
    """Elements 0, 1, 2 and 3 as uint8 [m, k]. All others become 255, which the caller refuses."""
    if view.element not in (*ALL_ELEMENTS, ElementKind.I32):
        raise InvalidProblemError(f"product: expected a number type, got {view.element}")
    bits = view.bits()
    xp = canonical.array_module(bits)
    marks = xp.full(bits.shape, 255, np.uint8)
    known = np.array([0, 1, 2, 3]).astype(view.element.dtype).view(view.element.bits_dtype)
    for value, pattern in enumerate(known):
        marks[bits == pattern] = value
    if view.element.unit_roundoff:
        marks[bits == np.array(-0.0).astype(view.element.dtype).view(view.element.bits_dtype)] = 0
    return marks
