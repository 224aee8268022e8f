"""Weights cut and joined, along M (out features) and along K (in features).

Merged projections (q, k and v as one product), shards of tensor parallelism, and checkpoints of either need
this. No bit changes: the dense matrices of the results are slices, or the concatenation, of the given ones.

Every layout is a grid of blocks that move as a whole: groups of four columns of a row in the canonical form
and in ``dense_f32``, columns that share a scale in a quantized weight, tiles in the packed layouts. Blocks of
a grid row are adjacent, so that any cut along M is a window of the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..device.streams import on_stream, stream_handle
from ..device.tensors import TensorView, wrong
from ..errors import InvalidProblemError, UnsupportedError, refusing, shown
from ..vocab import CANONICAL_LAYOUT, DENSE_F32_LAYOUT, ElementKind
from ..vocab.fields import checked_integer
from . import canonical
from .packed_layouts import TILE_LAYOUTS, TILE_M, canonical_forms
from .quantized_weight import Sparse24QuantizedWeight
from .weight import CanonicalWeight, PackedWeight, Sparse24Weight

W = TypeVar("W", Sparse24Weight, Sparse24QuantizedWeight, PackedWeight)

_GROUP = 4
_MIN_K = 8
"""K of a weight in canonical form is a multiple of this."""
_AXES = ("M", "K")


def slice_weight(
    weight: W, start: int, stop: int, *, axis: int = 0, copy: bool | None = None, stream: Any = None
) -> W:
    """Rows ``start`` to ``stop`` of W[M, K] (``axis=0``), or columns (``axis=1``), as a weight of its own.

    Parameters
    ----------
    weight : Sparse24Weight, Sparse24QuantizedWeight or PackedWeight
        Canonical, or as ``plan.pack`` made it: any layout but cuSPARSELt's blob, which is the library's.
    start, stop : int
        0 <= start <= stop <= M (or K). A canonical weight is cut at any row and at any group of four columns,
        or, if columns share a scale, at multiples of their number and at its end; a packed one at its tiles,
        64 rows x 128 columns (16-bit elements), x 256 (8-bit) or x 64 (32-bit), and at its end.
        Whatever the layout, the width of what is cut along K is a multiple of 8.
    axis : int
        0: M, out features. 1: K, in features.
    copy : bool, optional
        None: a view of the same memory, which it keeps alive, if the layout allows one (along M it always
        does), or a copy. False: a view, or InvalidProblemError. True: memory of its own.
    stream : optional
        The stream that a copy on a GPU is queued on; see ``plan.run``.

    Raises
    ------
    InvalidProblemError
        An invalid argument, or a cut through a block of the layout: the message says which multiples are
        allowed.
    UnsupportedError
        A layout that isn't this package's.
    """
    grid = _grid_of(weight, "weight")
    _check_axis(axis)
    size = (grid.weight.m, grid.weight.k)[axis]
    first, last = (checked_integer(name, value) for name, value in (("start", start), ("stop", stop)))
    if not first <= last <= size:
        raise InvalidProblemError(
            f"start, stop: expected 0 <= start <= stop <= {_AXES[axis]} = {size}, "
            f"got {shown(first)}, {shown(last)}"
        )
    return _slice(weight, grid, (first, last), ("start", "stop"), axis, copy, stream)


def split_weight(
    weight: W, sizes: int | Sequence[int], *, axis: int = 0, copy: bool | None = None, stream: Any = None
) -> tuple[W, ...]:
    """W[M, K] in parts along M (``axis=0``) or K (``axis=1``), in order; views where the layout allows them.

    Shards of a column-parallel linear are along M, of a row-parallel one along K.

    Parameters
    ----------
    weight, axis, copy, stream
        See :func:`slice_weight`, also for where a weight can be cut.
    sizes : int or sequence of int
        How many equal parts, or the size of each: their sum is M (or K).

    Raises
    ------
    InvalidProblemError, UnsupportedError
        See :func:`slice_weight`; also for sizes that don't add up.
    """
    grid = _grid_of(weight, "weight")
    _check_axis(axis)
    size = (grid.weight.m, grid.weight.k)[axis]
    parts, start = [], 0
    for width in _widths(sizes, size, _AXES[axis]):
        parts.append(_slice(weight, grid, (start, start + width), ("sizes", "sizes"), axis, copy, stream))
        start += width
    return tuple(parts)


def concat_weights(weights: Iterable[W], *, axis: int = 0, stream: Any = None) -> W:
    """Weights one below the other (``axis=0``, along M) or side by side (``axis=1``, along K), in new memory.

    Parameters
    ----------
    weights : iterable of Sparse24Weight, of Sparse24QuantizedWeight, or of PackedWeight
        At least one, of one element, quantization, device and layout, and of one K (along M) or M (along K).
        The M (or K) of packed weights, but of the last, is a multiple of the tile's; the K of quantized ones
        one of the columns that share a scale. Weights with one scale a row are joined along K if their scales
        are equal, which on a GPU waits for the device.
    axis : int
        0: M, out features, as for merged q, k and v. 1: K, in features.
    stream : optional
        The stream that copies on a GPU are queued on; see ``plan.run``.

    Raises
    ------
    InvalidProblemError
        Weights that don't fit together; the message names the first that doesn't, and the allowed sizes.
    UnsupportedError
        A layout that isn't this package's.
    """
    _check_axis(axis)
    if isinstance(weights, (CanonicalWeight, PackedWeight)) or not isinstance(weights, Iterable):
        raise wrong("weights", "a sequence of weights", weights)
    found = _checked(weights)
    if not found:
        raise InvalidProblemError("weights: expected at least one weight, got none")
    first, like, grids = found[0][0], found[0][1].weight, [grid for _, grid in found]
    for at, (one, grid) in enumerate(found):
        _check_fits(grids[0], grid, at, axis, last=at == len(found) - 1, same=type(one) is type(first))
    sizes = [sum((one.m, one.k)[axis] for one, _ in found), (like.k, like.m)[axis]]
    m, k = sizes if axis == 0 else sizes[::-1]
    parts = []
    with on_stream(like.device, stream):
        for number in range(len(like.buffers)):
            joined = _joined([grid.rows_of(number) for grid in grids], grids[0].parts[number], axis)
            parts.append((TensorView.of(joined), 0))
    return grids[0].made(first, m, k, parts)


def _joined(memory: list[Any], part: _Part, axis: int) -> Any:
    """One buffer of the weights [rows, bytes of a row], joined in new contiguous memory."""
    xp = canonical.array_module(memory[0])
    if axis == 1 and not part.columns:
        for at, other in enumerate(memory[1:], 1):
            if bool((other != memory[0]).any()):
                raise InvalidProblemError(
                    f"weights[{at}]: expected the scales of weights[0], because a row has one scale for all "
                    "of K, got others"
                )
        return memory[0].copy()
    return xp.ascontiguousarray(xp.concatenate(memory, axis=axis))  # it may choose another order


def take_rows(weight: W, rows: Any, *, stream: Any = None) -> W:
    """Rows ``rows`` of W[M, K], in this order and in new memory, as for a gated epilogue: ``gated_rows``.

    Parameters
    ----------
    weight : Sparse24Weight, Sparse24QuantizedWeight or PackedWeight
        In a layout whose rows can be told apart: canonical, or ``dense_f32``.
    rows : array of int
        NumPy's indices [M'], each from 0 to below M; the result is [M', K].
    stream : optional
        The stream that a copy on a GPU is queued on; see ``plan.run``.

    Raises
    ------
    InvalidProblemError
        Indices that are no integers, or out of range.
    UnsupportedError
        A layout of tiles, or one that isn't this package's.
    """
    grid = _grid_of(weight, "weight")
    if grid.rows != 1:
        raise UnsupportedError(
            f"weight: rows of layout {grid.weight.layout_id!r} can't be reordered{_remedy(grid.weight)}"
        )
    packed = grid.weight
    if type(rows) is not np.ndarray or rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise wrong("rows", "a one-dimensional NumPy array of integers", rows)
    bad = (rows < 0) | (rows >= packed.m)
    if bad.any():
        raise wrong("rows", f"indices from 0 to below M = {packed.m}", int(rows[bad][0]))
    with on_stream(packed.device, stream):
        found = [grid.rows_of(number) for number in range(len(packed.buffers))]
        index = canonical.array_module(found[0]).asarray(rows)
        parts = [(TensorView.of(part[index]), 0) for part in found]
    return grid.made(weight, len(rows), packed.k, parts)


def _checked(weights: Iterable[W]) -> list[tuple[W, _Grid]]:
    """The weights and their grids, one at a time, because an iterable of other objects may have no end."""
    found: list[tuple[W, _Grid]] = []
    with refusing("weights", "a sequence of weights", weights):
        for one in weights:
            found.append((one, _grid_of(one, f"weights[{len(found)}]")))
    return found


# How layouts are cut ------------------------------------------------------------------------------


class _Part(NamedTuple):
    """How a buffer lies: each grid row has ``nbytes`` bytes for every ``columns`` dense columns begun."""

    columns: int
    """0: the bytes are those of a whole grid row."""
    nbytes: int

    def at(self, column: int) -> int:
        """Bytes before a column that begins a block."""
        return -(-column // self.columns) * self.nbytes if self.columns else 0

    def span(self, first: int, last: int) -> slice:
        """Bytes of the columns from ``first`` to below ``last``."""
        return slice(self.at(first), self.at(last) if self.columns else self.nbytes)


class _Grid(NamedTuple):
    """A weight and its layout's blocks, each of ``rows`` x ``columns`` dense cells."""

    weight: PackedWeight
    rows: int
    columns: int
    parts: tuple[_Part, ...]
    """How each of the buffers lies."""
    block: str
    """The name of a block in messages."""

    def down(self, m: int) -> int:
        """Blocks along M."""
        return -(-m // self.rows)

    def rows_of(self, number: int) -> Any:
        """A buffer as bytes [grid rows, bytes of a grid row]."""
        width = self.parts[number].span(0, self.weight.k).stop
        shape = (self.down(self.weight.m), width)
        return _view(self.weight.buffers[number], 0, ElementKind.U8, shape).bits()

    def made(self, like: W, m: int, k: int, parts: Iterable[tuple[TensorView, int]]) -> W:
        """A weight [m, k] of the type of ``like`` in this layout, of each buffer's memory and offset."""
        packed = self.weight
        buffers = tuple(_view(*part, *typed) for part, typed in zip(parts, self._types(m, k), strict=True))
        if isinstance(like, CanonicalWeight):
            return like._of(buffers)
        fields = (packed.layout_id, m, k, packed.element, packed.device, buffers)
        return PackedWeight(*fields, packed.quantization)

    def _types(self, m: int, k: int) -> tuple[tuple[ElementKind, tuple[int, ...]], ...]:
        """Element and shape of each buffer of a weight [m, k]."""
        layout = self.weight.layout_id
        if layout == DENSE_F32_LAYOUT:
            return ((ElementKind.F32, (m, k)),)
        if layout != CANONICAL_LAYOUT:
            return ((ElementKind.U8, (self.down(m), *self._tiles(k))),)
        return canonical_forms(m, k, self.weight.element, self.weight.quantization)

    def _tiles(self, k: int) -> tuple[int, int]:
        """Tiles along K, and their bytes."""
        return -(-k // self.columns), self.parts[0].nbytes


def _view(memory: TensorView, offset: int, element: ElementKind, shape: tuple[int, ...]) -> TensorView:
    """Memory from ``offset`` bytes on, with the owner of ``memory``."""
    owner = memory if memory.owner is None else memory.owner
    return TensorView(
        memory.address + offset, shape, element, memory.device, readonly=memory.readonly, owner=owner
    )


_METADATA = _Part(_GROUP, 1)


def _grid_of(weight: Any, argument: str) -> _Grid:
    if type(weight) in (Sparse24Weight, Sparse24QuantizedWeight):
        packed = PackedWeight.canonical(weight)
    elif type(weight) is PackedWeight:
        packed = weight
    else:
        raise wrong(argument, "a Sparse24Weight, a Sparse24QuantizedWeight or a PackedWeight", weight)
    if packed.layout_id == CANONICAL_LAYOUT and packed.quantization is not None:
        by = packed.quantization
        group = _GROUP if by.group == 0 else by.group
        scales = _Part(by.group, by.scale_element.itemsize)
        values = _Part(_GROUP, by.value_bytes(1, _GROUP))
        return _Grid(packed, 1, group, (values, _METADATA, scales), "group of columns with one scale")
    if packed.layout_id == CANONICAL_LAYOUT:
        values = _Part(_GROUP, 2 * packed.element.itemsize)
        return _Grid(packed, 1, _GROUP, (values, _METADATA), "group")
    if packed.layout_id == DENSE_F32_LAYOUT:
        return _Grid(packed, 1, _GROUP, (_Part(_GROUP, 4 * _GROUP),), "group")
    for layout in TILE_LAYOUTS:
        if packed.layout_id == layout.layout_id:
            return _Grid(packed, TILE_M, layout.tile_k, (_Part(layout.tile_k, layout.tile_bytes),), "tile")
    raise UnsupportedError(
        f"{argument}: layout {packed.layout_id!r} can be neither cut nor joined; "
        "do that with canonical weights, and pack the results"
    )


def _slice(
    weight: W,
    grid: _Grid,
    cells: tuple[int, int],
    names: tuple[str, str],
    axis: int,
    copy: bool | None,
    stream: Any,
) -> W:
    """Rows (or columns) ``cells[0]`` to ``cells[1]``. The caller has checked that the weight has them."""
    packed = grid.weight
    unit, size = (grid.rows, grid.columns)[axis], (packed.m, packed.k)[axis]
    for name, at in zip(names, cells, strict=True):
        if at % unit and at != size:
            raise InvalidProblemError(
                f"{name}: expected cuts along {_AXES[axis]} at multiples of {unit}, the size of a "
                f"{grid.block} of layout {packed.layout_id!r}, or at the end {size}, "
                f"got {at}{_remedy(packed)}"
            )
    width = cells[1] - cells[0]
    if axis == 1 and width % _MIN_K:
        raise InvalidProblemError(f"{names[1]}: expected a K that is a multiple of {_MIN_K}, got {width}")
    m, k = (width, packed.k) if axis == 0 else (packed.m, width)
    whole_rows = axis == 0 or grid.down(packed.m) <= 1 or width in (0, packed.k)
    if not _is_view(copy, whole_rows, f"columns {cells[0]} to {cells[1]} of {packed.m} rows"):
        with on_stream(packed.device, stream):
            parts = []
            for number, part in enumerate(grid.parts):
                found = grid.rows_of(number)
                some = found[:, part.span(*cells)] if axis else found[cells[0] // unit : grid.down(cells[1])]
                parts.append((TensorView.of(some.copy()), 0))
    else:
        stream_handle(stream, packed.device)  # refuses an object that is no stream
        offsets = (
            part.at(cells[0]) if axis else cells[0] // unit * part.span(0, packed.k).stop
            for part in grid.parts
        )
        parts = list(zip(packed.buffers, offsets, strict=True))
    return grid.made(weight, m, k, parts)


def _is_view(copy: object, possible: bool, cells: str) -> bool:
    if copy is not None and type(copy) is not bool:
        raise wrong("copy", "None, True or False", copy)
    if copy is False and not possible:
        raise InvalidProblemError(
            f"copy: expected None or True, because {cells} are not contiguous, got False"
        )
    return possible and not copy


# Arguments ----------------------------------------------------------------------------------------


def _check_axis(axis: object) -> None:
    if type(axis) is not int or axis not in (0, 1):
        raise wrong("axis", "0 (M, out features) or 1 (K, in features)", axis)


def _widths(sizes: object, size: int, axis: str) -> list[int]:
    """Sizes of the parts."""
    if isinstance(sizes, Sequence) and not isinstance(sizes, (str, bytes)):
        widths = [checked_integer("sizes", one) for one in sizes]
        if sum(widths) != size:
            raise wrong("sizes", f"a sum of {axis} = {size}", sum(widths))
        return widths
    parts = checked_integer("sizes", sizes)
    if not parts or size % parts:
        raise wrong("sizes", f"a number of parts that divides {axis} = {size}", parts)
    return [size // parts] * parts


def _check_fits(first: _Grid, grid: _Grid, at: int, axis: int, *, last: bool, same: bool) -> None:
    """Raise InvalidProblemError if weight number ``at`` can't be joined to the ones before it."""
    like, one, name = first.weight, grid.weight, f"weights[{at}]"
    across = ("k", "m")[axis]
    for what, wanted, got in (
        ("element", like.element, one.element),
        ("quantization", like.quantization, one.quantization),
        ("layout", like.layout_id, one.layout_id),
        (across.upper(), getattr(like, across), getattr(one, across)),
        ("memory on", like.device, one.device),
    ):
        if wanted != got:
            raise InvalidProblemError(f"{name}: expected {what} {wanted}, like weights[0], got {got}")
    if not same:
        raise InvalidProblemError(f"{name}: expected weights of one type, got a canonical and a packed one")
    unit, size = (grid.rows, grid.columns)[axis], (one.m, one.k)[axis]
    if not last and size % unit:
        raise InvalidProblemError(
            f"{name}: expected {_AXES[axis]} a multiple of {unit} where another weight follows, the size "
            f"of a {grid.block} of layout {one.layout_id!r}, got {size}{_remedy(one)}"
        )


def _remedy(packed: PackedWeight) -> str:
    canonical_form = packed.layout_id == CANONICAL_LAYOUT
    return "" if canonical_form else "; or do it with canonical weights, and pack the results"
