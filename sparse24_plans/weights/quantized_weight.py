"""Quantized 2:4 weights: values of 4 or 8 bits, positions, and scales of groups of columns.

The weight W[M, K] that a product multiplies has elements of 16 bits. A stored value q and its scale s make
one of them: ``element(f32(q) * f32(s))``, where the product is rounded to float32 and then to the element,
both to nearest even. The product is exact unless the scale is f32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..device.streams import on_stream
from ..device.subnormals import check_subnormals
from ..device.tensors import TensorView, wrong
from ..errors import InvalidProblemError
from ..vocab import ElementKind, ElementLike, ScaleRule, checked_flag, element_kind, integer
from . import canonical, dense, threads
from .packed_layouts import Quantization, memory_element, stored_width
from .quantize import quantized_groups
from .weight import CanonicalWeight, Sparse24Weight, check_on_host, portable

Array = np.ndarray[Any, Any]

ELEMENTS = (ElementKind.F16, ElementKind.BF16)
"""Elements that a quantized weight may have when it is multiplied."""
DENSE_ELEMENTS = (ElementKind.F32, *ELEMENTS)
"""Elements of weights that can be quantized."""
STORED = (ElementKind.S4, ElementKind.S8, ElementKind.FP8_E4M3)
"""Elements of stored values."""
GROUPS = (0, 32, 64, 128)
"""Columns of a row that share a scale; 0: the whole row."""


def quantization_of(
    element: ElementKind,
    stored: Any,
    group: Any,
    scale_element: Any = None,
    argument: str = "stored",
) -> Quantization:
    """The fields, checked, for a weight of this element. Raises InvalidProblemError naming the field.

    ``argument`` is the name of the caller's argument ``stored``.
    """
    kind = element_kind(stored, argument)
    if element not in ELEMENTS:
        raise wrong("element", " or ".join(ELEMENTS), element)
    if kind not in STORED:
        raise wrong(argument, " or ".join(STORED), stored)
    columns = integer(group)
    if columns not in GROUPS:
        raise wrong("group", " or ".join(map(str, GROUPS)), group)
    scales = element if scale_element is None else element_kind(scale_element, "scale_element")
    if scales not in (element, ElementKind.F32):
        raise wrong("scale_element", f"{element} or f32", scale_element)
    return Quantization(kind, columns, scales)


class Sparse24QuantizedWeight(CanonicalWeight):
    """A 2:4 weight W[M, K] whose kept values are stored in 4 or 8 bits.

    Parameters
    ----------
    values : tensor
        The stored values: [M, K/2] of ``s8`` or ``fp8_e4m3``, or for ``s4`` uint8 [M, K/4] of two signed
        values each, the first in the low four bits.
    metadata : tensor
        uint16 [M, K/8], as for Sparse24Weight.
    scales : tensor
        [M, ceil(K / group)], or [M, 1] for ``group`` 0, of ``scale_element``.
    element : ElementLike
        ``f16`` or ``bf16``: the type of W when it is multiplied.
    stored : ElementLike
        ``s4``, ``s8`` or ``fp8_e4m3``.
    group : int
        Adjacent columns of a row that share a scale: 32, 64 or 128, or 0 for the whole row.
    scale_element : ElementLike, optional
        ``element`` (default) or ``f32``.
    validate : bool
        False skips the scan of the metadata, which on a GPU waits for the device.

    ``m``, ``k``, ``element``, ``device`` and ``quantization`` are W's; ``views`` its memory as TensorViews.

    Raises InvalidProblemError for wrong shapes, types or devices; FormatError, with row and group of four,
    for metadata whose positions do not increase or that has stray bits.
    """

    __slots__ = ("device", "element", "k", "m", "quantization", "views")

    quantization: Quantization

    def __init__(
        self,
        values: Any,
        metadata: Any,
        scales: Any,
        *,
        element: ElementLike,
        stored: ElementLike,
        group: int,
        scale_element: ElementLike | None = None,
        validate: bool = True,
    ) -> None:
        self.element = element_kind(element)
        self.quantization = quantization_of(self.element, stored, group, scale_element)
        given = (
            ("values", values, memory_element(self.quantization.element)),
            ("metadata", metadata, ElementKind.U16),
            ("scales", scales, self.quantization.scale_element),
        )
        self.views = tuple(TensorView.of(one, element=kind, argument=name) for name, one, kind in given)
        self.device = self.views[0].device
        self.m, self.k = self._shape()
        wanted = (
            self.views[0].shape,
            (self.m, self.k // 8),
            (self.m, self.quantization.scales_of_a_row(self.k)),
        )
        for (name, _, _), view, shape in zip(given, self.views, wanted, strict=True):
            if view.shape != shape:
                raise InvalidProblemError(f"{name}: expected shape {list(shape)}, got {list(view.shape)}")
        self._check_memory()
        if checked_flag("validate", validate):
            with on_stream(self.device, None):
                canonical.check_metadata(self.metadata)

    @classmethod
    def quantize(
        cls,
        weight: Sparse24Weight,
        *,
        stored: ElementLike,
        group: int,
        scale_element: ElementLike | None = None,
        rule: ScaleRule | str = ScaleRule.LARGEST,
        element: ElementLike | None = None,
    ) -> Sparse24QuantizedWeight:
        """Quantize the kept values of ``weight``, f32, f16 or bf16, in host memory; the positions stay.

        Values are divided by their group's scale, as it is stored, and rounded to nearest even. ``stored``,
        ``group`` and ``scale_element`` are as for the constructor, and so is ``element``, by default that of
        ``weight``.

        Raises InvalidProblemError; UnsupportedError for a weight in device memory, or in a thread that
        flushes subnormal numbers.
        """
        if type(weight) is not Sparse24Weight:
            raise wrong("weight", "a Sparse24Weight", weight)
        kind = weight.element if element is None else element_kind(element)
        by = quantization_of(kind, stored, group, scale_element)
        if weight.element not in DENSE_ELEMENTS:
            raise wrong("weight", "elements " + " or ".join(DENSE_ELEMENTS), weight.element)
        rule = scale_rule_of(rule)
        check_on_host("quantize", weight.device)
        check_subnormals()
        bits = weight.values_view.bits()
        values = np.empty((weight.m, stored_width(weight.k, by)), memory_element(by.element).dtype)
        scales = np.empty((weight.m, by.scales_of_a_row(weight.k)), by.scale_element.dtype)

        def fill(rows: slice) -> None:
            values[rows], scales[rows] = stored_values(bits[rows], weight.element, kind, by, rule)

        threads.for_each(fill, canonical.row_steps(weight.m, weight.k, True))
        parts = (values, weight.metadata_view, scales)
        return cls(*parts, element=kind, validate=False, **by.arguments)

    def _shape(self) -> tuple[int, int]:
        shape, each = self.views[0].shape, 4 if self.quantization.element is ElementKind.S4 else 2
        if len(shape) != 2 or shape[1] * each % 8:
            width = f"K/{each}"
            raise InvalidProblemError(
                f"values: expected shape [M, {width}] with K a multiple of 8, got {list(shape)}"
            )
        return shape[0], shape[1] * each

    @property
    def values(self) -> Any:
        """The stored values as a NumPy or CuPy array, not copied."""
        return self.views[0].array()

    @property
    def scales(self) -> Any:
        """The scales [M, groups of a row] as a NumPy or CuPy array, not copied."""
        return self.views[2].array()

    def dequantize(self) -> Sparse24Weight:
        """W itself, of ``element``, with the same metadata.

        Raises UnsupportedError for device memory, or in a thread that flushes subnormal numbers.
        """
        check_on_host("dequantize", self.device)
        check_subnormals()
        kept = np.empty((self.m, self.k // 2), self.element.bits_dtype)
        write_dequantized(self.views[0], self.views[2], self.quantization, self.element, kept)
        return Sparse24Weight(kept.view(self.element.dtype), self.views[1], validate=False)

    def decompress(self) -> Any:
        """W as a dense NumPy array [M, K] of ``element``. Raises UnsupportedError for device memory."""
        return self.dequantize().decompress()

    def _of(self, parts: Iterable[Any]) -> Sparse24QuantizedWeight:
        return Sparse24QuantizedWeight(
            *parts, element=self.element, validate=False, **self.quantization.arguments
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold the bits. Raises UnsupportedError for a weight in device memory."""
        return _restored, (
            [portable(view) for view in self.views],
            self.element.value,
            self.quantization.arguments,
        )

    def __repr__(self) -> str:
        return (
            f"Sparse24QuantizedWeight({self.element}[{self.m}, {self.k}], {self.quantization}, {self.device})"
        )


def scale_rule_of(rule: object, argument: str = "rule") -> ScaleRule:
    """The rule, checked. Raises InvalidProblemError naming the argument."""
    try:
        return ScaleRule(rule) if isinstance(rule, str) else ScaleRule(None)
    except ValueError:
        raise wrong(argument, " or ".join(ScaleRule), rule) from None


def _restored(parts: list[Any], element: str, fields: dict[str, Any]) -> Sparse24QuantizedWeight:
    return Sparse24QuantizedWeight(*parts, element=element, **fields)


def signed_nibbles(values: Array) -> Array:
    """The values int8 [rows, 2 * width] of uint8 [rows, width], the low four bits first."""
    found: Array = canonical.array_module(values).empty((values.shape[0], 2 * values.shape[1]), np.int8)
    found[:, ::2] = (values << np.uint8(4)).view(np.int8) >> np.int8(4)
    found[:, 1::2] = values.view(np.int8) >> np.int8(4)
    return found


def nibbles_of(values: Array) -> Array:
    """The inverse of :func:`signed_nibbles`: uint8 [rows, width / 2] of int8 [rows, width], from -8 to 7."""
    bits = values.view(np.uint8)
    found: Array = (bits[:, ::2] & np.uint8(15)) | (bits[:, 1::2] << np.uint8(4))
    return found


def stored_values(
    kept: Array, given: ElementKind, element: ElementKind, by: Quantization, rule: ScaleRule
) -> tuple[Array, Array]:
    """The stored values, as they lie in memory, and the scales of kept bits [rows, K/2] of ``given``.

    ``element`` is that of the quantized weight.
    """
    values, scales = quantized_groups(dense.widened(kept, given), element, by, rule)
    return nibbles_of(values) if by.element is ElementKind.S4 else values, scales


def write_dequantized(
    values: TensorView, scales: TensorView, by: Quantization, element: ElementKind, out: Array
) -> None:
    """Write the kept values of W on the host to ``out`` [M, K/2], as bits of ``element``. NaN is one NaN."""
    stored, factors = values.bits(), dense.widened(scales.bits(), by.scale_element)
    kept, width = out.view(element.dtype), out.shape[1]

    def fill(rows: slice) -> None:
        wide, some = _widened(stored[rows], by.element), factors[rows]
        with np.errstate(all="ignore"):  # Inf and NaN are results here
            wide *= _of_each_value(some, by, width)
            if not (by.element.is_integer and np.isfinite(some).all()):
                wide[np.isnan(wide)] = np.nan
            kept[rows] = wide.astype(element.dtype)

    threads.for_each(fill, canonical.row_steps(stored.shape[0], width, True))


def _widened(stored: Array, element: ElementKind) -> Array:
    """Stored values, given as bits, as float32 [rows, K/2] in memory of their own."""
    if element is ElementKind.S4:
        return signed_nibbles(stored).astype(np.float32)
    return dense.widened(stored, element)


def _of_each_value(scales: Array, by: Quantization, width: int) -> Array:
    """The scales of the kept values [rows, K/2], or a column of them that broadcasts."""
    return np.repeat(scales, by.group // 2, axis=1)[:, :width] if by.group else scales
