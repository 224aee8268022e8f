"""Layouts, which say which blocks of a matrix are kept, and conversions from and to other formats."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from ..device.tensors import HOST, TensorView, wrong
from ..errors import FormatError, InvalidProblemError, refusing, shown
from ..vocab import integer
from ..vocab.fields import INT32_MAX
from .shape import BLOCK_SIZES, BlockSparseShape

Array = np.ndarray[Any, Any]

_JSON_FORMAT = "sparse24_block_layout_v1"
_JSON_FIELDS = ("format", "bitmap_shape", "bitmap", "block")


class BlockSparseLayout:
    """The kept blocks of ``heads`` matrices [rows, cols]: a bitmap [heads, rows/block, cols/block].

    Immutable and hashable; equal where the bitmaps and the block's size are. The kept cells of such matrices
    are ``values`` [Z, blocks, block, block]: Z batches, each with the blocks of head 0 first, and of a head
    row by row from left to right; the cells of a block row by row.
    """

    __slots__ = ("_bits", "bitmap", "shape")

    bitmap: np.ndarray[Any, np.dtype[np.bool_]]
    """Bool [heads, rows/block, cols/block], read-only."""
    shape: BlockSparseShape
    """Sizes of the matrix: heads, rows, columns and block."""
    _bits: bytes

    def __init__(self, bitmap: Any, block: int) -> None:
        """``bitmap``: [heads, R, C], or [R, C] of one head, of bools or of integers 0 and 1; it is copied.

        ``block``: 16, 32, 64 or 128 cells. Raises InvalidProblemError naming the argument.
        """
        found = _integers("bitmap", bitmap)
        if found.ndim == 2:
            found = found[None]
        if found.ndim != 3:
            raise InvalidProblemError(
                f"bitmap: expected [heads, rows/block, cols/block], got shape {list(found.shape)}"
            )
        if found.dtype != np.bool_ and found.size and not ((found == 0) | (found == 1)).all():
            at = np.argwhere((found != 0) & (found != 1))[0]
            raise InvalidProblemError(f"bitmap: expected 0 or 1, got {found[tuple(at)]} at {place_of(at)}")
        kept = np.array(found, np.bool_, order="C")
        kept.flags.writeable = False
        size = integer(block)
        if size is None:
            raise wrong("block", "16, 32, 64 or 128", block)
        (heads, rows, cols), blocks = kept.shape, int(np.count_nonzero(kept))
        shape = BlockSparseShape(heads=heads, rows=rows * size, cols=cols * size, block=size, blocks=blocks)
        for name, value in (("shape", shape), ("bitmap", kept), ("_bits", np.packbits(kept).tobytes())):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise InvalidProblemError(f"{name}: expected no change, as a BlockSparseLayout is immutable")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not BlockSparseLayout:
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[tuple[int, ...], int, bytes]:
        return self.bitmap.shape, self.shape.block, self._bits

    def __copy__(self) -> BlockSparseLayout:
        return self

    def __deepcopy__(self, memo: object) -> BlockSparseLayout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockSparseLayout, (np.array(self.bitmap), self.shape.block)

    def __repr__(self) -> str:
        one = self.shape
        return (
            f"BlockSparseLayout({one.heads} x [{one.rows}, {one.cols}], block {one.block}, "
            f"{one.blocks} blocks, {one.density:.1%})"
        )

    def transposed(self) -> BlockSparseLayout:
        """Layout of the transposed matrices; equal to this one if it is symmetric."""
        return BlockSparseLayout(self.bitmap.transpose(0, 2, 1), self.shape.block)

    # BSR --------------------------------------------------------------------------------------------

    @classmethod
    def from_bsr(cls, crow_indices: Any, col_indices: Any, cols: int, block: int) -> BlockSparseLayout:
        """Make a layout of block compressed sparse rows, in the terms of ``torch.sparse_bsr``.

        ``crow_indices``: [heads, R + 1], or [R + 1] of one head, each head's from 0. ``col_indices``: the
        columns of blocks, increasing in each row, of all heads one after the other in any shape. ``cols``:
        columns of cells. Raises InvalidProblemError naming argument and block.
        """
        pointers = _integers("crow_indices", crow_indices)
        pointers = pointers[None] if pointers.ndim == 1 else pointers
        if pointers.ndim != 2 or pointers.shape[1] < 1:
            raise InvalidProblemError(
                f"crow_indices: expected [heads, rows/block + 1], got shape {list(pointers.shape)}"
            )
        pointers = pointers.astype(np.int64)
        falls = pointers[:, 1:] < pointers[:, :-1]  # differences of int64 may wrap around
        wrong = (pointers[:, 0] != 0) | falls.any(axis=1)
        if wrong.any():
            head = int(wrong.argmax())
            raise InvalidProblemError(
                "crow_indices: expected values that start at 0 and never decrease in each head, got "
                f"{shown(pointers[head].tolist())} in head {head}"
            )
        counts = np.diff(pointers, axis=1)
        heads, rows = counts.shape
        columns = _integers("col_indices", col_indices).reshape(-1).astype(np.int64)
        total = sum(map(int, pointers[:, -1]))
        if columns.size != total:
            raise InvalidProblemError(
                f"col_indices: expected {total} blocks, as crow_indices ends with, got {columns.size}"
            )
        width = _blocks_along("cols", cols, block)
        row_of = np.repeat(np.arange(heads * rows), counts.reshape(-1))
        at = np.stack([row_of // max(rows, 1), row_of % max(rows, 1), columns])
        back = np.flatnonzero((np.diff(columns) <= 0) & (np.diff(row_of) == 0))
        if back.size:
            raise InvalidProblemError(
                f"col_indices: expected columns that increase in a row, got {columns[back[0] + 1]} after "
                f"{columns[back[0]]} at {place_of(at[:, back[0] + 1])}"
            )
        return cls(_bitmap("col_indices", at, (heads, rows, width)), block)

    def to_bsr(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """``crow_indices`` int64 [heads, R + 1], and ``col_indices`` int64 [blocks] of all heads.

        For one head, ``torch.sparse_bsr_tensor(crow[0], col, values[0], (rows, cols))`` is the matrix.
        """
        counts = np.count_nonzero(self.bitmap, axis=2)
        pointers = np.zeros((counts.shape[0], counts.shape[1] + 1), np.int64)
        np.cumsum(counts, axis=1, out=pointers[:, 1:])
        return pointers, np.nonzero(self.bitmap)[2]

    @classmethod
    def from_torch_bsr(cls, tensor: Any) -> tuple[BlockSparseLayout, Any]:
        """Layout and values of a ``torch.sparse_bsr`` tensor [rows, cols], or [heads, rows, cols].

        The values are its own memory, as a tensor [1, blocks, block, block]. Raises InvalidProblemError.
        """
        with refusing("tensor", "a torch.sparse_bsr tensor", type(tensor).__name__):
            if str(tensor.layout) != "torch.sparse_bsr":
                raise wrong("tensor", "layout torch.sparse_bsr", str(tensor.layout))
            values, shape = tensor.values(), tuple(tensor.shape)
            block, width = tuple(values.shape)[-2:]
            crow, col = tensor.crow_indices(), tensor.col_indices()
        if block != width or len(shape) not in (2, 3):
            raise InvalidProblemError(
                f"tensor: expected [heads, rows, cols] in square blocks, got {list(shape)} "
                f"in blocks of {block} x {width}"
            )
        layout = cls.from_bsr(crow, col, shape[-1], block)
        return layout, values.reshape(1, layout.shape.blocks, block, block)

    # COO --------------------------------------------------------------------------------------------

    @classmethod
    def from_coo(cls, indices: Any, shape: tuple[int, int, int], block: int) -> BlockSparseLayout:
        """Make a layout of places: ``indices`` [3, blocks] are heads, block rows and block columns.

        ``shape``: (heads, rows, cols), the last two in cells. Blocks may be in any order, and come into the
        order of the layout's values by ``np.lexsort(indices[::-1])``. Raises InvalidProblemError naming
        argument and block.
        """
        at = _integers("indices", indices)
        if at.ndim != 2 or at.shape[0] != 3:
            raise InvalidProblemError(f"indices: expected [3, blocks], got shape {list(at.shape)}")
        if not isinstance(shape, (tuple, list)) or len(shape) != 3:
            raise wrong("shape", "(heads, rows, cols)", shape)
        heads = integer(shape[0])
        if heads is None or not 0 <= heads <= INT32_MAX:
            raise wrong("shape", "heads from 0 to 2^31 - 1", shape[0])
        rows, cols = (
            _blocks_along(name, size, block) for name, size in zip(("rows", "cols"), shape[1:], strict=True)
        )
        return cls(_bitmap("indices", at.astype(np.int64), (heads, rows, cols)), block)

    def to_coo(self) -> np.ndarray[Any, Any]:
        """Int64 [3, blocks]: head, row and column of each block, in the order of the values."""
        return np.stack(np.nonzero(self.bitmap))

    # Dense ------------------------------------------------------------------------------------------

    @classmethod
    def from_dense(cls, dense: Any, block: int) -> BlockSparseLayout:
        """Make a layout of the blocks with a non-zero in matrices [heads, rows, cols], or [rows, cols].

        NaN is a non-zero, -0.0 is a zero. Raises InvalidProblemError naming the argument.
        """
        view = on_host("dense", dense)
        if len(view.shape) not in (2, 3):
            raise InvalidProblemError(f"dense: expected [heads, rows, cols], got shape {list(view.shape)}")
        heads, rows, cols = (1, *view.shape)[-3:]
        tiled = (_blocks_along("dense rows", rows, block), _blocks_along("dense cols", cols, block))
        cells = view.array().reshape(heads, tiled[0], int(block), tiled[1], int(block))
        return cls((cells != 0).any(axis=(2, 4)), block)

    def values_of(self, dense: Any) -> np.ndarray[Any, Any]:
        """The values [Z, blocks, block, block] of ``dense`` [Z, heads, rows, cols], or fewer dimensions.

        Host memory in, a new array out. Raises InvalidProblemError for other sizes, and FormatError for a
        non-zero outside of the kept blocks: it names the first such block.
        """
        one, view = self.shape, on_host("dense", dense)
        shape = (1,) * (4 - len(view.shape)) + view.shape
        if shape[1:] != (one.heads, one.rows, one.cols):
            raise InvalidProblemError(
                f"dense: expected [Z, {one.heads}, {one.rows}, {one.cols}], got shape {list(view.shape)}"
            )
        tiles = self._tiles(view.array().reshape(shape))
        lost = (tiles != 0).any(axis=(0, 4, 5)) & ~self.bitmap
        if lost.any():
            where = place_of(np.argwhere(lost)[0])
            raise FormatError(f"dense: expected zeros outside of the kept blocks, got others in {where}")
        return np.ascontiguousarray(tiles[:, self.bitmap])

    def to_dense(self, values: Any) -> np.ndarray[Any, Any]:
        """``values`` [Z, blocks, block, block] as a new array [Z, heads, rows, cols], zero elsewhere.

        Host memory in. Raises InvalidProblemError for other sizes.
        """
        one, view = self.shape, on_host("values", values)
        if len(view.shape) != 4 or view.shape[1:] != (one.blocks, one.block, one.block):
            raise InvalidProblemError(
                f"values: expected [Z, {one.blocks}, {one.block}, {one.block}], got shape {list(view.shape)}"
            )
        cells = view.array()
        dense = np.zeros((view.shape[0], one.heads, one.rows, one.cols), cells.dtype)
        self._tiles(dense)[:, self.bitmap] = cells
        return dense

    def _tiles(self, dense: Array) -> Array:
        """View of the same memory as [Z, heads, R, C, block, block]."""
        one = self.shape
        shape = (dense.shape[0], one.heads, one.block_rows, one.block, one.block_cols, one.block)
        return dense.reshape(shape).transpose(0, 1, 2, 4, 3, 5)

    # JSON -------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Header that :meth:`from_json` reads: the block size, the bitmap's shape and its bits in base64."""
        return json.dumps(
            {
                "format": _JSON_FORMAT,
                "block": self.shape.block,
                "bitmap_shape": self.bitmap.shape,
                "bitmap": base64.b64encode(self._bits).decode(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> BlockSparseLayout:
        """Read what :meth:`to_json` wrote: bits in row-major order, the highest of a byte first.

        Raises FormatError for anything else.
        """
        try:
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("it is no JSON object")
            absent = [name for name in _JSON_FIELDS if name not in header]
            if absent:
                raise ValueError(f"it has no {', '.join(absent)}")
            if header["format"] != _JSON_FORMAT:
                raise ValueError(f"format {shown(header['format'])}")
            sizes = header["bitmap_shape"]
            if len(sizes) != 3 or any(type(size) is not int or not 0 <= size <= INT32_MAX for size in sizes):
                raise ValueError(f"bitmap_shape {shown(sizes)}")
            bits = np.frombuffer(base64.b64decode(header["bitmap"], validate=True), np.uint8)
            cells = sizes[0] * sizes[1] * sizes[2]
            if bits.size != -(-cells // 8) or (cells % 8 and bits[-1] << cells % 8 & 0xFF):
                raise ValueError(f"a bitmap of {bits.size} bytes for {cells} blocks")
            return cls(np.unpackbits(bits, count=cells).reshape(sizes), header["block"])
        except Exception as error:  # whatever JSON may hold
            raise FormatError(f"text: expected the header of a layout, got {shown(text)}: {error}") from error


# Parts --------------------------------------------------------------------------------------------


def _integers(argument: str, value: Any) -> Array:
    """Convert bools or integers to an array: NumPy's, nested lists, or a tensor of PyTorch on any device."""
    try:
        if hasattr(type(value), "detach"):
            value = value.detach().cpu().numpy()
        elif not isinstance(value, (np.ndarray, list, tuple)) or isinstance(value, np.ma.MaskedArray):
            value = on_host(argument, value).array()
        found = np.asarray(value)
    except InvalidProblemError:
        raise
    except Exception as error:  # whatever a broken object raises
        raise wrong(argument, "an array of integers", value) from error
    if type(found) is np.ndarray and found.size == 0 and found.dtype == np.float64:
        found = found.astype(np.int64)  # of empty lists
    if found.dtype.kind not in "biu":
        raise InvalidProblemError(f"{argument}: expected bools or integers, got {found.dtype}")
    return found


def on_host(argument: str, value: Any) -> TensorView:
    view = TensorView.of(value, argument=argument)
    if view.device != HOST:
        raise InvalidProblemError(f"{argument}: expected host memory, got {view.device}")
    return view


def _blocks_along(argument: str, cells: object, block: object) -> int:
    """Number of blocks along a side of ``cells`` cells."""
    count, size = integer(cells), integer(block)
    if size not in BLOCK_SIZES:
        raise wrong("block", "16, 32, 64 or 128", block)
    if count is None or not 0 <= count <= INT32_MAX or count % size:
        raise wrong(argument, f"a multiple of block {size} below 2^31", cells)
    return count // size


def _bitmap(argument: str, at: Array, sizes: tuple[int, int, int]) -> Array:
    """Bitmap of blocks at places [3, blocks], each inside and named once."""
    outside = ((at < 0) | (at >= np.array(sizes)[:, None])).any(axis=0)
    if outside.any():
        raise InvalidProblemError(
            f"{argument}: expected blocks of {sizes[0]} x [{sizes[1]}, {sizes[2]}], got "
            f"{place_of(at[:, int(outside.argmax())])}"
        )
    try:
        kept = np.zeros(sizes, np.bool_)
    except (MemoryError, ValueError) as error:
        raise InvalidProblemError(f"shape: expected a bitmap that fits into memory, got {sizes}") from error
    kept[tuple(at)] = True
    if int(np.count_nonzero(kept)) != at.shape[1]:
        seen, counts = np.unique(at, axis=1, return_counts=True)
        twice = seen[:, int((counts > 1).argmax())]
        raise InvalidProblemError(
            f"{argument}: expected each block once, got {place_of(twice)} more than once"
        )
    return kept


def place_of(at: Any) -> str:
    head, row, col = (int(one) for one in at)
    return f"block ({row}, {col}) of head {head}"
