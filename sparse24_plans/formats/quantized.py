"""The base class of foreign formats of quantized weights, and what such formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.tensors import HOST, TensorView, wrong
from ..errors import FormatError, InvalidProblemError, UnsupportedError
from ..vocab import ElementKind, ElementLike, element_kind, integer
from ..weights import canonical, dense, threads
from ..weights.quantized_weight import ELEMENTS, GROUPS, Sparse24QuantizedWeight, nibbles_of
from .base import Format, Option, Parts, integer_option
from .positions import unpacked_nibbles

Array = np.ndarray[Any, Any]
Rows = Callable[[slice], Array]
"""Gives the stored integers uint8 [rows, K] of some rows of W."""

_SCALES = (*ELEMENTS, ElementKind.F32)


def _checked_group(name: str, value: Any) -> int:
    group = integer(value)
    if group not in GROUPS:
        raise wrong(name, " or ".join(map(str, GROUPS)), value)
    return group


BITS = integer_option(4, "4 or 8", lambda bits: bits in (4, 8))
"""Bits of a stored integer."""
GROUP = Option(None, _checked_group)
"""Columns that share a scale, 0 for the whole row; by default those that the number of scales tells."""


def middle_of(bits: int) -> int:
    """The zero point of symmetric quantization."""
    return 1 << bits - 1


@dataclass(frozen=True, slots=True)
class Stored:
    """The parts of a foreign quantized weight, all options of its format, and the wanted element of W."""

    parts: Mapping[str, Any]
    options: Mapping[str, Any]
    element: ElementLike | None

    def view(self, part: str, element: ElementKind | None = None) -> TensorView:
        """A matrix in host memory. Raises InvalidProblemError or UnsupportedError.

        Integers of any sign are taken for an integer ``element`` of their size.
        """
        raw = element if element is not None and element.is_integer else None
        found = TensorView.of(self.parts[part], element=raw, argument=part)
        if element is not None and found.element is not element:
            raise InvalidProblemError(f"{part}: expected {element}, got {found.element}")
        if found.device != HOST:
            raise UnsupportedError(f"{part}: expected a tensor in host memory, got one on {found.device}")
        if len(found.shape) != 2:
            raise InvalidProblemError(f"{part}: expected a matrix, got a tensor {list(found.shape)}")
        return found

    def words(self, part: str, *shape: int) -> Array:
        """A matrix of int32 as uint32, of this shape if one is given."""
        bits: Array = self.view(part, ElementKind.I32).bits().view(np.uint32)
        if shape and bits.shape != shape:
            raise wrong_shape(part, shape, bits.shape)
        return bits

    def order(self, part: str, k: int) -> Array | None:
        """The group of each column [K], as int64, or None if the part is missing."""
        if part not in self.parts:
            return None
        found = TensorView.of(self.parts[part], element=ElementKind.I32, argument=part)
        if found.shape != (k,) or found.device != HOST:
            raise InvalidProblemError(f"{part}: expected i32[{k}] in host memory, got {found!r}")
        return np.asarray(found.array(), np.int64)


def wrong_shape(part: str, wanted: tuple[int, ...], got: tuple[int, ...]) -> InvalidProblemError:
    """The error for a part of another shape."""
    return InvalidProblemError(f"{part}: expected shape {list(wanted)}, got {list(got)}")


class QuantizedFormat(Format, ABC):
    """A foreign format of quantized weights, which become Sparse24QuantizedWeights."""

    @abstractmethod
    def decode(self, found: Stored) -> Sparse24QuantizedWeight:
        """The weight. Raises InvalidProblemError, UnsupportedError, or FormatError (row and group)."""

    def encode(self, weight: Sparse24QuantizedWeight) -> Parts:
        """The parts, as new arrays. Raises UnsupportedError for a weight that the format can't hold."""
        raise UnsupportedError(f"name: {self.name} is read and not written")

    def check(self, m: int, k: int, fits: bool = True) -> None:
        """Raise InvalidProblemError if ``constraint`` doesn't allow the shape."""
        if k % 8 or not fits:
            raise InvalidProblemError(f"{self.name}: expected {self.constraint}; got M = {m}, K = {k}")


# Scales -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales [M, groups] of a weight, and what they say about W."""

    values: Array
    element: ElementKind
    """Type of W when it is multiplied."""
    scale_element: ElementKind
    group: int

    @classmethod
    def of(cls, found: Stored, part: str, k: int, arranged: Callable[[Array], Array]) -> Scales:
        """The scales of a part; ``arranged`` gives them as [M, groups].

        They keep their type if it is W's, and become float32, which is exact, if it isn't.
        """
        view = found.view(part)
        if view.element not in _SCALES:
            raise wrong(part, "scales of " + " or ".join(_SCALES), view.element)
        given = view.element if found.element is None else element_kind(found.element)
        if given not in ELEMENTS:
            raise wrong("element", " or ".join(ELEMENTS) + f" for scales of {view.element}", found.element)
        bits = np.ascontiguousarray(arranged(view.bits()))
        group = _group_of(k, bits.shape[1], found.options["group"], part)
        if given is view.element:
            return cls(bits.view(given.dtype), given, given, group)
        return cls(dense.widened(bits, view.element), given, ElementKind.F32, group)

    def of_columns(self, per_group: Array, k: int) -> Array:
        """Numbers [rows, groups] as numbers of each column [rows, k], or one column that broadcasts."""
        return np.repeat(per_group, self.group, axis=1)[:, :k] if self.group else per_group

    def check_order(self, part: str, groups: Array | None) -> None:
        """Raise UnsupportedError unless the given groups of columns are adjacent and in order."""
        if groups is None:
            return
        wanted = np.arange(groups.size) // (self.group or max(groups.size, 1))
        if (bad := groups != wanted).any():
            at = int(bad.argmax())
            raise UnsupportedError(
                f"{part}: expected column k in group k // {self.group or groups.size}, got group "
                f"{int(groups[at])} for column {at}; quantize without reordering columns (desc_act, actorder)"
            )

    def weight(self, values: Array, metadata: Array, bits: int) -> Sparse24QuantizedWeight:
        """The weight of kept values int8 [M, K/2], stored in ``bits`` bits each, and their metadata."""
        stored = ElementKind.S4 if bits == 4 else ElementKind.S8
        return Sparse24QuantizedWeight(
            nibbles_of(values) if bits == 4 else values,
            metadata,
            self.values,
            element=self.element,
            stored=stored,
            group=self.group,
            scale_element=self.scale_element,
            validate=False,
        )


def _group_of(k: int, count: int, given: int | None, part: str) -> int:
    """The columns that share a scale where a row of k columns has ``count`` of them."""
    if given is None and count == 1:
        return 0
    for group in GROUPS if given is None else (given,):
        if count == (-(-k // group) if group else 1):
            return group
    wanted = "groups of 32, 64 or 128 columns" if given is None else f"group {given}"
    raise InvalidProblemError(f"{part}: expected scales of {wanted} for K = {k}, got {count} a row")


# Matrices of integers with their zeros --------------------------------------------------------------


def unpacked(words: Array, bits: int) -> Array:
    """The integers uint8 [rows, width * 32 / bits] of uint32 [rows, width], the lowest bits first."""
    rows, width = words.shape
    if bits == 4:
        found: Array = unpacked_nibbles(words, rows, 8 * width)
        return found
    return np.ascontiguousarray(words).view(np.uint8).reshape(rows, 4 * width)


def sparse_weight(
    part: str, integers: Rows, zeros: Array | None, scales: Scales, bits: int, k: int
) -> Sparse24QuantizedWeight:
    """The weight of ``bits``-bit integers u of a part, whose values scale * (u - z) are 2:4.

    ``zeros`` [M, groups] are the zero points z; None: the middle. Values that have no other zero points are
    stored in as many bits, and those of 4 bits in 8 else.

    Raises FormatError, with row and group, for a group of four with more than two values other than 0, or
    for a value that 8 bits can't hold.
    """
    middle, m = middle_of(bits), len(scales.values)
    symmetric = zeros is None or bool((zeros == middle).all())
    kept, metadata = np.empty((m, k // 2), np.int8), np.empty((m, k // 8), np.uint16)

    def fill(rows: slice) -> None:
        point = middle if symmetric or zeros is None else scales.of_columns(zeros[rows].astype(np.int16), k)
        values = integers(rows).astype(np.int16) - np.int16(1) * point
        _check_range(part, values, rows.start)
        cells = values.astype(np.int8).view(np.uint8)
        codes, crowded = canonical.covering_codes(cells, ElementKind.S8)
        if crowded is not None:
            row, group, count = crowded
            raise FormatError(
                f"{part}: expected at most 2 values other than 0 in every group of 4, got {count}",
                row=rows.start + row,
                group=group,
            )
        kept[rows] = canonical.gather(cells, codes).view(np.int8)
        metadata[rows] = canonical.to_metadata(codes, *cells.shape)

    threads.for_each(fill, canonical.row_steps(m, k, True))
    return scales.weight(kept, metadata, bits if symmetric else 8)


def _check_range(part: str, values: Array, first_row: int) -> None:
    bad = (values < -128) | (values > 127)
    if bad.any():
        row, column = divmod(int(bad.argmax()), values.shape[1])
        raise FormatError(
            f"{part}: expected values minus zero points from -128 to 127, got {int(values[row, column])}",
            row=first_row + row,
            group=column // 4,
        )
