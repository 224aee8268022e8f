"""The canonical 2:4 format in array code: one implementation for NumPy and CuPy.

All functions work on unsigned-integer views of the elements, [rows, K] with K a multiple of 8, so that all
element types take the same path. :mod:`codes` defines a *code*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import FormatError
from ..vocab import ElementKind
from . import groups, threads
from .codes import CROWDED, OCCUPANCY, PAIRS, RANKING, VALID_CODES
from .host_code import HostCode

CodesOf = Callable[[Any, slice, HostCode], Any]
"""Gives the codes [groups] of bits, which are these rows of a matrix, by the host's code."""

_HOST_STEP = 1 << 17
"""Elements per step, such that NumPy's temporaries stay inside a core's cache."""

FIRST_NAN = {
    ElementKind.F32: 0x7F800001,
    ElementKind.F16: 0x7C01,
    ElementKind.BF16: 0x7F81,
    ElementKind.FP8_E4M3: 0x7F,
    ElementKind.FP8_E5M2: 0x7D,
}
"""The smallest magnitude bits that are a NaN, for every element that has one."""

_IS_VALID = np.isin(np.arange(256), VALID_CODES)


def array_module(array: Any) -> Any:
    """NumPy or CuPy, whichever ``array`` belongs to."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def _look_up(table: Any, index: Any) -> Any:
    if isinstance(index, np.ndarray):
        with groups.scratch() as space:
            at = space.array("index", index.size, np.intp).reshape(index.shape)
            np.copyto(at, index)  # NumPy's own type of an index is three times as fast
            return table[at]
    return array_module(index).asarray(table)[index]


def magnitude_keys(bits: Any, element: ElementKind, out: Any = None) -> Any:
    """Unsigned keys in the order of |value|. NaN ranks above Inf; +0.0 and -0.0 are equal.

    On the host they may go to ``out``, an array of the same shape and type.
    """
    if element in (ElementKind.S8, ElementKind.I32):
        if isinstance(bits, np.ndarray):  # unsigned, so that the smallest integer has a magnitude
            signed = None if out is None else out.view(element.dtype)
            return np.absolute(bits.view(element.dtype), out=signed).view(bits.dtype)
        sign = (bits.view(element.dtype) >> (8 * element.itemsize - 1)).view(bits.dtype)  # 0 or all ones
        return (bits ^ sign) - sign
    if element in (ElementKind.U8, ElementKind.U16):
        return bits
    limit = _largest_magnitude(bits)
    magnitude = bits & limit if out is None else np.bitwise_and(bits, limit, out=out)
    if element in FIRST_NAN and _may_exceed(magnitude, FIRST_NAN[element]):
        # All NaNs get one rank, because their payload is no magnitude.
        magnitude = array_module(bits).minimum(magnitude, bits.dtype.type(FIRST_NAN[element]))
    return magnitude


def _largest_magnitude(bits: Any) -> Any:
    """All bits set but the sign."""
    return bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)


def _may_exceed(magnitude: Any, limit: int) -> bool:
    """Whether a magnitude may be above the limit. On a GPU the answer is True, because a look would wait."""
    if isinstance(magnitude, np.ndarray):
        return bool(magnitude.size) and int(magnitude.max()) > limit
    return True


def value_keys(bits: Any, element: ElementKind) -> Any:
    """Unsigned keys in the order of the signed values. NaN ranks above Inf; +0.0 and -0.0 are equal."""
    if element.dtype.kind in "iu":
        return bits ^ bits.dtype.type(1 << 8 * element.itemsize - 1) if element.dtype.kind == "i" else bits
    return _signed_keys(bits, FIRST_NAN[element])


def float64_keys(values: Any) -> Any:
    """Keys in the order of NumPy's float64 values, a type that is no element."""
    return _signed_keys(values.view(np.uint64), 0x7FF0_0000_0000_0001)


def _signed_keys(bits: Any, first_nan: int) -> Any:
    top_bit = 8 * bits.itemsize - 1
    negative = (bits.view(f"i{bits.itemsize}") >> top_bit).view(bits.dtype)  # 0 or all ones
    magnitude = bits & _largest_magnitude(bits)
    keys = magnitude ^ negative
    keys -= negative
    keys ^= bits.dtype.type(1 << top_bit)
    if _may_exceed(magnitude, first_nan - 1):
        keys[magnitude >= bits.dtype.type(first_nan)] = bits.dtype.type(2 ** (top_bit + 1) - 1)
    return keys


def row_steps(rows: int, width: int, on_host: bool) -> Iterator[slice]:
    """Slices of rows to work on at a time. Rows without columns, maybe 2^60 of them, are one slice."""
    step = max(1, _HOST_STEP // width) if on_host and width else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


# The parameter ``by`` below is the code that works on the host. GPUs ignore it.


def rank_codes(keys: Any, by: HostCode = groups) -> Any:
    """Codes [groups] of the two largest keys in every group of ``keys`` [rows, K]."""
    if isinstance(keys, np.ndarray):
        with groups.scratch() as space:
            return by.largest(keys, space)
    xp = array_module(keys)
    column = [xp.ascontiguousarray(keys[:, i::4]).reshape(-1) for i in range(4)]
    outcome = xp.zeros(column[0].shape, np.uint8)
    for bit, (i, j) in enumerate(PAIRS):
        outcome |= (column[i] >= column[j]).view(np.uint8) << np.uint8(bit)
    return xp.asarray(RANKING)[outcome]


def magnitude_codes(bits: Any, element: ElementKind, by: HostCode = groups) -> Any:
    """Codes [groups] of the two largest of ``bits`` [rows, K] by |value|."""
    if isinstance(bits, np.ndarray):
        with groups.scratch() as space:
            keys = space.array("keys", bits.size, bits.dtype).reshape(bits.shape)
            return by.largest(magnitude_keys(bits, element, keys), space)
    return rank_codes(magnitude_keys(bits, element))


def covering_codes(
    bits: Any, element: ElementKind, by: HostCode = groups
) -> tuple[Any, tuple[int, int, int] | None]:
    """Codes [groups] that cover the non-zeros of ``bits`` [rows, K], where -0.0 counts as zero.

    A crowded group, with more than two non-zeros, gets the code of its first two. The second result is the
    row, the group and the number of non-zeros of the first crowded group, or None.
    """
    if isinstance(bits, np.ndarray):
        with groups.scratch() as space:
            cells = bits
            if element in FIRST_NAN:
                cells = space.array("keys", bits.size, bits.dtype).reshape(bits.shape)
                np.bitwise_and(bits, _largest_magnitude(bits), out=cells)
            codes, masks = by.covering(cells, space)
    else:
        nonzero = magnitude_keys(bits, element) != 0
        masks = array_module(bits).zeros((bits.shape[0], bits.shape[1] // 4), np.uint8)
        for i in range(4):
            masks |= nonzero[:, i::4].view(np.uint8) << np.uint8(i)
        codes = codes_of_masks(masks)
    return codes, None if masks is None else _first_crowded(masks.reshape(bits.shape[0], -1))


def positions(codes: Any) -> Any:
    """Columns of the kept values, int64 [rows, K/2], from NumPy's codes [rows, K/4]."""
    pairs = np.stack([codes & 3, codes >> 2], axis=-1).astype(np.int64)
    pairs += np.arange(codes.shape[1])[:, None] * 4
    return pairs.reshape(codes.shape[0], 2 * codes.shape[1])


def codes_of_masks(masks: Any) -> Any:
    """Codes [groups] of the first two cells of every mask. Spare slots take the lowest free positions."""
    return _look_up(OCCUPANCY & np.uint8(15), masks.reshape(-1))


def _first_crowded(masks: Any) -> tuple[int, int, int] | None:
    """Row, group and non-zeros of the first group of masks [rows, groups] that has more than two, or None."""
    rest = masks & (masks - np.uint8(1))  # without its lowest one
    crowded = rest & (rest - np.uint8(1)) != 0
    if not bool(crowded.any()):
        return None
    row, group = divmod(int(crowded.argmax()), masks.shape[1])
    return row, group, bin(int(masks[row, group])).count("1")


def crowded_error(row: int, group: int, count: int) -> FormatError:
    """The error for a dense group of more than two non-zeros."""
    return FormatError(
        f"dense: expected at most 2 non-zeros in every group of 4, got {count}; prune first",
        row=row,
        group=group,
    )


def occupancy_codes(bits: Any, element: ElementKind, first_row: int = 0, by: HostCode = groups) -> Any:
    """Codes [groups] that cover the non-zeros of ``bits`` [rows, K].

    Raises FormatError for the first group with more than two non-zeros; ``first_row`` is added to its row.
    """
    codes, crowded = covering_codes(bits, element, by)
    if crowded is not None:
        row, group, count = crowded
        raise crowded_error(first_row + row, group, count)
    return codes


def _flat_positions(codes: Any) -> tuple[Any, Any]:
    xp = array_module(codes)
    base = xp.arange(codes.size, dtype=np.int64) * 4
    return base + (codes & np.uint8(3)), base + (codes >> np.uint8(2))


def gather(bits: Any, codes: Any, out: Any = None, by: HostCode = groups) -> Any:
    """The kept values [rows, K/2] of ``bits`` [rows, K], written to a contiguous ``out`` if it is given."""
    xp = array_module(bits)
    values = xp.empty((bits.shape[0], bits.shape[1] // 2), bits.dtype) if out is None else out
    if xp is np:
        by.gather(bits, codes, values)
        return values
    flat = xp.ascontiguousarray(bits).reshape(-1)
    for slot, index in enumerate(_flat_positions(codes)):
        values.reshape(-1, 2)[:, slot] = flat[index]
    return values


def scatter(values: Any, codes: Any, out: Any = None, by: HostCode = groups) -> Any:
    """The inverse of :func:`gather`: dense bits [rows, K], zero where nothing was kept."""
    xp = array_module(values)
    dense = xp.empty((values.shape[0], 2 * values.shape[1]), values.dtype) if out is None else out
    if xp is np:
        by.scatter(values, codes, dense)
        return dense
    dense[...] = 0
    pairs = xp.ascontiguousarray(values).reshape(-1, 2)
    for slot, index in enumerate(_flat_positions(codes)):
        dense.reshape(-1)[index] = pairs[:, slot]
    return dense


def to_metadata(codes: Any, rows: int, k: int) -> Any:
    """Codes [groups] -> metadata uint16 [rows, K/8], one byte a group, low byte first."""
    return codes.view("<u2").reshape(rows, k // 8)


def from_metadata(metadata: Any) -> Any:
    """Metadata uint16 [rows, K/8] -> codes [groups] as bytes, unchecked."""
    return array_module(metadata).ascontiguousarray(metadata).reshape(-1).view(np.uint8)


def compress(bits: Any, codes_of: CodesOf, values: Any, metadata: Any, by: HostCode) -> None:
    """Write the kept values [rows, K/2] and the metadata [rows, K/8] of ``bits`` [rows, K], on all cores."""

    def fill(rows: slice) -> None:
        part = bits[rows]
        codes = codes_of(part, rows, by)
        gather(part, codes, values[rows], by)
        metadata[rows] = to_metadata(codes, *part.shape)

    threads.for_each(fill, row_steps(bits.shape[0], bits.shape[1], isinstance(bits, np.ndarray)))


def expand(values: Any, metadata: Any, dense: Any, by: HostCode) -> None:
    """Write the dense bits [rows, K] of values and unchecked metadata, on all cores."""

    def fill(rows: slice) -> None:
        scatter(values[rows], from_metadata(metadata[rows]), dense[rows], by)

    threads.for_each(fill, row_steps(dense.shape[0], dense.shape[1], isinstance(dense, np.ndarray)))


def check_metadata(metadata: Any) -> None:
    """Raise FormatError for the first byte that isn't one of the six valid codes."""
    if (found := first_invalid(metadata)) is not None:
        raise metadata_error(*found)


def first_invalid(metadata: Any) -> tuple[int, int, int] | None:
    """Row, group and value of the first byte that isn't one of the six valid codes, or None."""
    rows, width = metadata.shape
    for step in row_steps(rows, width * 2, isinstance(metadata, np.ndarray)):
        codes = from_metadata(metadata[step])
        bad = ~_look_up(_IS_VALID, codes)
        if bool(bad.any()):
            at = int(bad.argmax())
            row, group = divmod(at, 2 * width)
            return step.start + row, group, int(codes[at])
    return None


def metadata_error(row: int, group: int, byte: int) -> FormatError:
    """The error for an invalid metadata byte."""
    complaint = f"expected strictly increasing positions, got {byte & 3} then {byte >> 2}"
    if byte > 15:
        complaint = f"expected bits 4-7 to be zero, got byte {byte:#04x}"
    return FormatError(f"metadata: {complaint}", row=row, group=group)


# Positions of foreign formats ------------------------------------------------------------------------

IMPOSSIBLE = 0xFF
"""Mark of occupied positions that no target covers, in a table of targets."""
_LOWEST_FREE = np.where(OCCUPANCY & CROWDED, np.uint8(IMPOSSIBLE), OCCUPANCY)


def normalise(values: Any, codes: Any, element: ElementKind, first_row: int = 0) -> tuple[Any, Any]:
    """Kept bits [rows, K/2] with codes [groups] of any positions, in canonical form.

    The positions may be unsorted, and those of zeros arbitrary. The dense matrix stays the same bit for bit:
    values with any bit set (-0.0 too) keep their positions, the other slots take the lowest free positions.
    Raises FormatError, with row and group, if two non-zeros have one position.
    """
    return relocate(values, codes, element, _LOWEST_FREE, first_row, "")


def relocate(
    values: Any, codes: Any, element: ElementKind, targets: Any, first_row: int, complaint: str
) -> tuple[Any, Any]:
    """``values`` and ``codes``, moved to the positions that ``targets`` [16] has for the occupied ones.

    Raises FormatError with ``complaint`` if a target is IMPOSSIBLE.
    """
    xp = array_module(values)
    groups = values.shape[1] // 2
    pairs = xp.ascontiguousarray(values).reshape(-1, 2)
    positions = (codes & np.uint8(3), codes >> np.uint8(2) & np.uint8(3))
    occupied = _occupied(pairs, positions, element, groups, first_row)
    mask = occupied[0].view(np.uint8) << positions[0] | occupied[1].view(np.uint8) << positions[1]
    moved = _look_up(targets, mask)
    refused = moved == np.uint8(IMPOSSIBLE)
    if bool(refused.any()):
        row, group = divmod(int(refused.argmax()), groups)
        raise FormatError(complaint, row=first_row + row, group=group)
    result = xp.zeros_like(pairs)
    for slot in range(2):
        wanted = moved >> np.uint8(2 * slot) & np.uint8(3)
        for source in range(2):
            here = occupied[source] & (positions[source] == wanted)
            result[:, slot] = xp.where(here, pairs[:, source], result[:, slot])
    return result.reshape(values.shape), moved


def _occupied(
    pairs: Any, positions: tuple[Any, Any], element: ElementKind, groups: int, first_row: int
) -> tuple[Any, Any]:
    """Flags of the slots that hold bits. If both slots have one position, a zero or an equal value yields."""
    occupied = (pairs[:, 0] != 0, pairs[:, 1] != 0)
    clash = occupied[0] & occupied[1] & (positions[0] == positions[1])
    if not bool(clash.any()):
        return occupied
    nonzero = magnitude_keys(pairs, element) != 0
    both = clash & nonzero[:, 0] & nonzero[:, 1] & (pairs[:, 0] != pairs[:, 1])
    if bool(both.any()):
        at = int(both.argmax())
        row, group = divmod(at, groups)
        raise FormatError(
            f"metadata: expected two positions, got {int(positions[0][at])} for two values",
            row=first_row + row,
            group=group,
        )
    keeps_first = ~clash | nonzero[:, 0] | ~nonzero[:, 1]
    return occupied[0] & keeps_first, occupied[1] & (~clash | ~keeps_first)
