"""The results of ``torch._sparse_semi_structured_tile``: both forms of a transposable 2:4 matrix.

For a matrix [R, C] they are ``packed`` [Rp, Cp/2] and ``meta`` for W, ``packed_t`` and ``meta_t`` for W^T,
and a bitmask. xFormers' ``sparse24_sparsify_both_ways`` writes the same. Rp is R rounded up to 32, Cp is C
rounded up to 64 (for W^T the other way round). The padding is not initialised; nor are, in metadata, the
positions of values that are absent because pruning kept fewer than two of a group.

The packer of PyTorch 2.11 writes past W^T's end where C isn't a multiple of 64: such results are unsound.

Metadata is in the order of :mod:`.cutlass_sm80` for int16, over the padded matrix; the tensor is a view
[Rp, 2, Cp/32] of the storage [Cp/32, Rp, 2].

The bitmask is uint8 [Rp/8, Cp/8, 8]: eight bytes for an 8 x 8 tile, as four uint16 for its quadrants (top
left, top right, bottom left, bottom right); bit ``column + 4*row`` of a quadrant is set where the value was
kept.
"""

from __future__ import annotations

from typing import Any

ROWS, COLUMNS = 32, 64
"""The tile of a warp: rows are padded to the first, columns to the second."""


def padded(rows: int, columns: int) -> tuple[int, int]:
    """[Rp, Cp]."""
    return -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS


def as_view(stored: Any, rows: int, columns: int) -> Any:
    """Stored words [Rp * Cp / 16] -> the tensor that PyTorch returns, a view [Rp, 2, Cp/32] of them."""
    return stored.reshape(columns // 32, rows, 2).transpose(1, 2, 0)


def as_stored(meta: Any) -> Any:
    """The inverse of :func:`as_view`; metadata of one or two axes is taken to be as stored."""
    return (meta.transpose(2, 0, 1) if meta.ndim == 3 else meta).reshape(-1)


def encode_mask(kept: Any) -> Any:
    """Flags uint8 (0 or 1) [Rp, Cp] -> the bitmask uint8 [Rp/8, Cp/8, 8]."""
    rows, columns = kept.shape
    # [8s of rows, quadrant row, byte of the quadrant, 2 rows, 8s of columns, quadrant column, 4 columns]
    tiles = kept.reshape(rows // 8, 2, 2, 2, columns // 8, 2, 4).transpose(0, 4, 1, 5, 2, 3, 6)
    bits = tiles.reshape(rows // 8, columns // 8, 8, 8)
    result = bits[..., 0].copy()
    for bit in range(1, 8):
        result |= bits[..., bit] << bit
    return result


def decode_mask(mask: Any, empty: Any) -> Any:
    """The inverse of :func:`encode_mask`. ``empty`` is the array module's."""
    rows, columns = 8 * mask.shape[0], 8 * mask.shape[1]
    bits = empty((*mask.shape, 8), mask.dtype)
    for bit in range(8):
        bits[..., bit] = mask >> bit & 1
    tiles = bits.reshape(rows // 8, columns // 8, 2, 2, 2, 2, 4).transpose(0, 2, 4, 5, 1, 3, 6)
    return tiles.reshape(rows, columns)
