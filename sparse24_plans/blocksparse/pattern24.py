"""Kept blocks that are 2:4 inside, for products with inner ``sparse24``: made from whole blocks, and back.

In a block of side b, each line of b cells that the product sums over keeps two of every four: b/2 values, in
increasing columns. A code says which two of a group of four: ``first | second << 2``, as in metadata of 2:4
weights (docs/formats.md). Metadata have four bits a group, in the order in which mma.sp and wgmma.sp take
them. The 16 groups of 64 cells of a line are four times 16 bits, ``half[line, t]`` of the four groups from
16 * t on, the lowest group in the lowest bits. A block's metadata are uint16
``[tile of 64 lines][w][g][t][64 cells][line 16w + g, line 16w + g + 8]``, w and t below 4 and g below 8.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..device.tensors import TensorView, wrong
from ..errors import FormatError, InvalidProblemError
from ..vocab import ElementKind, integer
from ..vocab.fields import unboxed
from ..weights import canonical
from ..weights.codes import VALID_CODES
from .descriptor import FLOATS, PATTERNED, PATTERNED_BLOCKS
from .layout import BlockSparseLayout, on_host, place_of

Array = np.ndarray[Any, Any]
Along = Literal["columns", "rows"]
ALONG = ("columns", "rows")


def compress_blocks(layout: BlockSparseLayout, values: Any, *, along: Along) -> tuple[Array, Array]:
    """Compress ``values`` [Z, blocks, block, block], f16 or bf16, whose blocks of 64 or 128 are 2:4.

    ``along``: what the groups of four lie along, and the product sums over: ``columns`` of the stored blocks
    for ``dsd``, and for ``dds`` with trans_b; ``rows`` for ``dds``, and for ``dsd`` with trans_a. A line is a
    row of a block then, or a column.

    Returns the values [Z, blocks, block, block/2] of the lines and their metadata, uint8 [Z, blocks, block,
    block/8], in new arrays on the host, where ``values`` is too. -0.0 is a zero. Raises InvalidProblemError
    naming the argument, and FormatError for the first block that has a group with more than two non-zeros.
    """
    cells, element = _cells(layout, values)
    lines = _lined(cells, along)
    codes, crowded = canonical.covering_codes(_rows(lines), element)
    if crowded is not None:
        row, group, count = crowded
        raise FormatError(
            f"values: expected at most 2 non-zeros in every group of 4 along {along}, got {count} in group "
            f"{group} of line {row % lines.shape[2]} of {_where(layout, row // lines.shape[2])}; prune first"
        )
    return _kept(lines, codes, element)


def decompress_blocks(layout: BlockSparseLayout, values: Any, metadata: Any, *, along: Along) -> Array:
    """The blocks [Z, blocks, block, block] that :func:`compress_blocks` was given, in host memory.

    Raises InvalidProblemError naming the argument, and FormatError for the first block with metadata that
    are no two increasing positions.
    """
    cells, element = _cells(layout, values, kept=2)
    block = layout.shape.block
    found = on_host("metadata", metadata)
    wanted = (*cells.shape[:3], block // 8)
    if found.element is not ElementKind.U8 or found.shape != wanted:
        raise InvalidProblemError(
            f"metadata: expected u8{list(wanted)}, got {found.element}{list(found.shape)}"
        )
    codes = codes_of(found.array())
    bad = ~np.isin(codes, VALID_CODES)
    if bad.any():
        at = np.argwhere(bad)[0]
        raise FormatError(
            f"metadata: expected two increasing positions, got code {int(codes[tuple(at)])} in group {at[3]} "
            f"of line {at[2]} of {_where(layout, int(at[0]) * layout.shape.blocks + int(at[1]))}"
        )
    dense = _lined(whole(cells, codes), along)
    return np.ascontiguousarray(dense).view(element.dtype)


def prune_blocks(
    matrix: Any, block: int, density: float, *, along: Along, scores: Any = None
) -> tuple[BlockSparseLayout, tuple[Array, Array]]:
    """The blocks of ``matrix`` [rows, cols], or [heads, rows, cols], that weigh most, and 2:4 inside of them.

    Parameters
    ----------
    matrix : array
        f16 or bf16, in host memory; sides are multiples of ``block``, which is 64 or 128.
    density : float
        The fraction of all heads' blocks that is kept, from 0 to 1; their number is rounded (a half to even).
    along : str
        The direction of the groups of four, as for :func:`compress_blocks`. Each group keeps two cells, as
        with ``PruneSparse24Plan``: the largest by magnitude or by signed score, NaN above Inf, ties in order.
    scores : array, optional
        Like the matrix, ``f32``, ``f16`` or ``bf16``. A block weighs the sum of its scores, without scores
        that of its cells' squares: in float64; NaN weighs most, and of equals the block in front is kept.

    Returns
    -------
    The layout, and values and metadata as :func:`compress_blocks` gives them. Raises InvalidProblemError
    naming the argument.
    """
    cells, element = _matrices("matrix", matrix)
    if element not in PATTERNED:
        raise wrong("matrix", "f16 or bf16", str(element))
    everything = BlockSparseLayout(np.ones(_grid(cells, block), bool), block)
    blocks = everything.values_of(cells.view(element.dtype))
    judged, kind = blocks, element
    if scores is not None:
        found, kind = _matrices("scores", scores)
        if found.shape != cells.shape or kind not in FLOATS:
            raise InvalidProblemError(
                f"scores: expected f32, f16 or bf16 {list(cells.shape)}, got {kind}{list(found.shape)}"
            )
        judged = everything.values_of(found.view(kind.dtype))
    kept = _heaviest(_weights(judged[0], squared=scores is None), density)
    layout = BlockSparseLayout(kept.reshape(everything.bitmap.shape), block)
    ranked = _rows(_lined(judged[:, kept], along)).view(kind.bits_dtype)
    codes = (
        canonical.magnitude_codes(ranked, kind)
        if scores is None
        else canonical.rank_codes(canonical.value_keys(ranked, kind))
    )
    return layout, _kept(_lined(blocks[:, kept].view(cells.dtype), along), codes, element)


# For the backends ---------------------------------------------------------------------------------


def codes_of(metadata: Array) -> Array:
    """Unpack codes uint8 [Z, blocks, block, block/4] from metadata uint8 [Z, blocks, block, block/8],
    unchecked."""
    batch, blocks, block, _ = metadata.shape
    words = np.ascontiguousarray(metadata).view("<u2").reshape(batch, blocks, *_tiled(block))
    halves = words.transpose(0, 1, 2, 3, 7, 4, 6, 5).reshape(batch, blocks, block, block // 16, 1)
    nibbles = halves >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
    return nibbles.astype(np.uint8).reshape(batch, blocks, block, block // 4)


def metadata_of(codes: Array) -> Array:
    """Pack codes into metadata: the inverse of :func:`codes_of`."""
    batch, blocks, block, _ = codes.shape
    nibbles = codes.reshape(batch, blocks, block, block // 16, 4).astype(np.uint16)
    halves = np.bitwise_or.reduce(nibbles << np.arange(0, 16, 4, dtype=np.uint16), axis=-1)
    tiles, w, g, t, wide, pair = _tiled(block)
    words = halves.reshape(batch, blocks, tiles, w, pair, g, wide, t).transpose(0, 1, 2, 3, 5, 7, 6, 4)
    return np.ascontiguousarray(words, "<u2").view(np.uint8).reshape(batch, blocks, block, block // 8)


def whole(values: Array, codes: Array) -> Array:
    """Expand kept values [.., block/2] into lines [.., block], zero elsewhere, by codes [.., block/4]."""
    *outer, width = values.shape
    found: Array = canonical.scatter(_rows(values), codes.reshape(-1))
    return found.reshape(*outer, 2 * width)


def positions(codes: Array) -> Array:
    """Column of each kept value in its line, [.., block/2], from codes [.., block/4]."""
    *outer, groups = codes.shape
    found: Array = canonical.positions(codes.reshape(-1, groups))
    return found.reshape(*outer, 2 * groups)


def _tiled(block: int) -> tuple[int, ...]:
    return block // 64, 4, 8, 4, block // 64, 2


# Parts --------------------------------------------------------------------------------------------


def _rows(lines: Array) -> Array:
    return np.ascontiguousarray(lines).reshape(-1, lines.shape[-1])


def _lined(blocks: Array, along: object) -> Array:
    """Move the summed dimension of the blocks last, or back."""
    if not isinstance(along, str) or along not in ALONG:
        raise wrong("along", "columns or rows", along)
    return blocks if along == "columns" else blocks.swapaxes(-1, -2)


def _kept(lines: Array, codes: Array, element: ElementKind) -> tuple[Array, Array]:
    batch, blocks, block, _ = lines.shape
    values = canonical.gather(_rows(lines), codes).reshape(batch, blocks, block, block // 2)
    return values.view(element.dtype), metadata_of(codes.reshape(batch, blocks, block, block // 4))


def _cells(layout: BlockSparseLayout, values: Any, kept: int = 4) -> tuple[Array, ElementKind]:
    """Bits and element of values [Z, blocks, block, ..] that have ``kept`` of every four cells."""
    if type(layout) is not BlockSparseLayout:
        raise wrong("layout", "BlockSparseLayout", layout)
    one = layout.shape
    if one.block not in PATTERNED_BLOCKS:
        raise InvalidProblemError(f"layout: expected blocks of 64 or 128, got {one.block}")
    view, width = on_host("values", values), one.block * kept // 4
    if len(view.shape) != 4 or view.shape[1:] != (one.blocks, one.block, width):
        raise InvalidProblemError(
            f"values: expected [Z, {one.blocks}, {one.block}, {width}], got shape {list(view.shape)}"
        )
    if view.element not in PATTERNED:
        raise wrong("values", "f16 or bf16", str(view.element))
    return view.bits(), view.element


def _matrices(argument: str, value: Any) -> tuple[Array, ElementKind]:
    view: TensorView = on_host(argument, value)
    if len(view.shape) not in (2, 3):
        raise InvalidProblemError(f"{argument}: expected [heads, rows, cols], got shape {list(view.shape)}")
    return view.bits().reshape((1, *view.shape)[-3:]), view.element


def _grid(cells: Array, block: object) -> tuple[int, int, int]:
    size = integer(block)
    if size not in PATTERNED_BLOCKS:
        raise wrong("block", "64 or 128", block)
    heads, rows, cols = cells.shape
    if rows % size or cols % size:
        raise InvalidProblemError(f"matrix: expected sides in multiples of block {size}, got {[rows, cols]}")
    return heads, rows // size, cols // size


def _weights(blocks: Array, *, squared: bool) -> Array:
    """Weights of blocks [count, b, b]. A block with a NaN weighs Inf, which nothing exceeds."""
    with np.errstate(all="ignore"):
        wide = blocks.astype(np.float64)
        found: Array = (wide * wide if squared else wide).sum(axis=(1, 2))
    return np.where(np.isnan(found), np.inf, found)


def _heaviest(weights: Array, density: object) -> Array:
    """Choose the heaviest blocks."""
    density = unboxed(density)
    if type(density) not in (int, float) or not 0 <= density <= 1:  # type: ignore[operator]
        raise wrong("density", "a number from 0 to 1", density)
    kept = np.zeros(len(weights), bool)
    kept[np.argsort(-weights, kind="stable")[: round(density * len(weights))]] = True  # type: ignore[operator]
    return kept


def _where(layout: BlockSparseLayout, index: int) -> str:
    """Name the block of this index among the values of all batch elements."""
    batch, place = divmod(index, layout.shape.blocks)
    return f"{place_of(layout.to_coo()[:, place])}, batch {batch}"
