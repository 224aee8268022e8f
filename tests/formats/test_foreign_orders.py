"""The memory orders of foreign metadata in ``vendor/``, word by word against the formulas in VENDOR.md."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sparse24_plans._vendor import (
    compressed_tensors,
    cusparselt_blob,
    cutlass_sm80,
    cutlass_sm90,
    nibbles,
    torch_tile,
)

# Offsets, as the formats' sources have them -------------------------------------------------------


def sm80_int16(r: int, c: int, rows: int) -> int:
    return (c // 2) * 2 * rows + r // 32 * 64 + r % 8 * 8 + r % 32 // 16 * 4 + c % 2 * 2 + r % 16 // 8


def sm80_int32(r: int, c: int, rows: int) -> int:
    return (c // 2) * 2 * rows + r // 16 * 32 + r % 8 * 4 + c % 2 * 2 + r % 16 // 8


def pytorch_scatter_offset(r: int, c: int, rows: int, itemsize: int) -> int:
    """PyTorch's description of the same: rows permuted, 2 x 2 blocks transposed, columns interleaved."""
    group, interweave = (32, 4) if itemsize == 2 else (16, 2)
    row, column = r // group * group + r % 8 * interweave + r % group // 8, c
    if row % 2 == 0 and column % 2 == 1:
        row, column = row + 1, column - 1
    elif row % 2 == 1 and column % 2 == 0:
        row, column = row - 1, column + 1
    return column // 2 * rows * 2 + row * 2 + column % 2


def sm90_wide(m: int, k: int, tile: int, rows: int, unit: int) -> int:
    """16-bit with ``unit`` 8 dense columns a byte; tf32 with 4."""
    n = tile // (4 * unit)
    within = k % (2 * unit) // unit + 2 * (m // 8 % 2) + 4 * (k // (4 * unit) % n) + 4 * n * (m % 8)
    above = 32 * n * (k // (2 * unit) % 2) + 64 * n * (m // 16 % 4) + 256 * n * (m // 64)
    return within + above + k // tile * rows * tile // unit


def sm90_narrow(m: int, k: int, tile: int, rows: int, unit: int) -> int:
    return m * (tile // 8) + k % tile // 8 + k // tile * rows * tile // 8


def blob_sm80(r: int, c: int, rows: int) -> int:
    """``c`` counts words of 16 dense columns."""
    return (
        r // 128 * 512
        + c // 4 * 512 * (rows // 128)
        + c % 4 // 2 * 256
        + r % 128 // 32 * 64
        + r % 8 * 8
        + r % 32 // 16 * 4
        + c % 2 * 2
        + r % 16 // 8
    )


def blob_sm90_16(r: int, g: int, k: int) -> int:
    block = r // 64 * 16 * k + g // 8 * 512 + r % 64 // 16 * 128
    return block + r % 8 * 16 + g // 2 % 2 * 8 + g % 2 * 4 + g // 4 % 2 * 2 + r % 16 // 8


def blob_sm90_8(r: int, g: int, k: int) -> int:
    block = r // 64 * 16 * k + g // 16 * 1024 + r % 64 // 16 * 256
    return block + r % 8 * 32 + g // 4 % 2 * 16 + g // 2 % 2 * 8 + g // 8 % 2 * 4 + r % 16 // 8 * 2 + g % 2


def check_order(stored: np.ndarray, plain: np.ndarray, offset: Callable[[int, int], int]) -> None:
    assert stored.shape == (plain.size,)
    for r, c in np.ndindex(plain.shape):
        assert stored[offset(r, c)] == plain[r, c]


def counting(rows: int, columns: int, dtype: str = "u4") -> np.ndarray:
    return np.arange(rows * columns, dtype=dtype).reshape(rows, columns)


# CUTLASS's own description of E: the atom's axes, and the order in which they are laid out.
# include/cutlass/gemm/collective/builders/sm90_sparse_config.inl: TensorEAtom_16bit and its kin.


def ordered_strides(axes: list[int], steps: list[int]) -> list[int]:
    """CuTe's ``make_ordered_layout``: compact strides, the axis with the lowest step first."""
    strides, stride = [0] * len(axes), 1
    for axis in sorted(range(len(axes)), key=lambda axis: steps[axis]):
        strides[axis], stride = stride, stride * axes[axis]
    return strides


def cutlass_offset(m: int, k: int, tile: int, rows: int, itemsize: int) -> int:
    """In dense elements: the atom of 64 rows x tile K, then atoms along M, then along K."""
    if itemsize == 1:
        axes, steps = [64, tile], [1, 0]
    else:
        columns = 32 // itemsize  # 16 for 16-bit, 8 for 32-bit
        axes, steps = [8, 2, 4, columns, 2, tile // (2 * columns)], [3, 1, 5, 0, 4, 2]
    strides = ordered_strides(axes, steps)
    offset, split = 0, 1 if itemsize == 1 else 3
    for start, rest in ((0, m % 64), (split, k % tile)):
        for axis in range(start, start + split):
            offset += rest % axes[axis] * strides[axis]
            rest //= axes[axis]
    return offset + m // 64 * 64 * tile + k // tile * rows * tile


# The orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(32, 2), (96, 6), (64, 8)])
def test_sm80_int16(rows, columns):
    words = counting(rows, columns, "u2")
    stored = cutlass_sm80.reorder(words)
    check_order(stored, words, lambda r, c: sm80_int16(r, c, rows))
    check_order(stored, words, lambda r, c: pytorch_scatter_offset(r, c, rows, 2))
    assert np.array_equal(cutlass_sm80.restore(stored, rows, columns), words)


@pytest.mark.parametrize(("rows", "columns"), [(16, 2), (48, 6), (64, 4)])
def test_sm80_int32(rows, columns):
    words = counting(rows, columns, "u4")
    stored = cutlass_sm80.reorder(words)
    check_order(stored, words, lambda r, c: sm80_int32(r, c, rows))
    check_order(stored, words, lambda r, c: pytorch_scatter_offset(r, c, rows, 4))
    assert np.array_equal(cutlass_sm80.restore(stored, rows, columns), words)


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize(
    ("itemsize", "tile"), [(1, 8), (1, 64), (1, 128), (2, 32), (2, 64), (2, 96), (2, 128), (4, 16), (4, 48)]
)
def test_sm90_for_any_tile(itemsize, tile, tiles):
    rows, unit = 128, cutlass_sm90.dense_columns_per_byte(itemsize)
    assert tile % cutlass_sm90.tile_multiple(itemsize) == 0
    plain = counting(rows, tiles * tile // unit)
    stored = cutlass_sm90.reorder(plain, tile // unit, itemsize)
    offset = sm90_narrow if itemsize == 1 else sm90_wide
    check_order(stored, plain, lambda m, byte: offset(m, byte * unit, tile, rows, unit))
    check_order(stored, plain, lambda m, byte: cutlass_offset(m, byte * unit, tile, rows, itemsize) // unit)
    assert np.array_equal(cutlass_sm90.restore(stored, *plain.shape, tile // unit, itemsize), plain)


@pytest.mark.parametrize(("rows", "k"), [(128, 128), (256, 384)])
def test_cusparselt_sm80(rows, k):
    words = counting(rows, k // 16)
    stored = cusparselt_blob.reorder_sm80(words)
    check_order(stored, words, lambda r, c: blob_sm80(r, c, rows))
    assert np.array_equal(cusparselt_blob.restore_sm80(stored, rows, k // 16), words)


@pytest.mark.parametrize(("rows", "k"), [(64, 64), (128, 192)])
@pytest.mark.parametrize(("itemsize", "offset"), [(2, blob_sm90_16), (1, blob_sm90_8)])
def test_cusparselt_sm90(itemsize, offset, rows, k):
    plain = counting(rows, k // 4)
    stored = cusparselt_blob.reorder_sm90(plain, itemsize)
    check_order(stored, plain, lambda r, g: offset(r, g, k))
    assert np.array_equal(cusparselt_blob.restore_sm90(stored, rows, k // 4, itemsize), plain)


def test_the_tile_packers_bitmask():
    kept = np.random.default_rng(0).integers(0, 2, (24, 40), np.uint8)
    mask = torch_tile.encode_mask(kept)
    assert mask.shape == (3, 5, 8)
    for row, column in np.ndindex(kept.shape):
        quadrant = row % 8 // 4 * 2 + column % 8 // 4
        low, high = (int(mask[row // 8, column // 8, 2 * quadrant + byte]) for byte in (0, 1))
        assert (low | high << 8) >> (column % 4 + 4 * (row % 4)) & 1 == kept[row, column]
    assert np.array_equal(torch_tile.decode_mask(mask, np.empty), kept)


def test_the_tile_packers_view_of_its_metadata():
    """[Rp, 2, Cp/32] with strides (2, 1, 2*Rp): PyTorch's permutation of [Cp/32, Rp, 2]."""
    stored = np.arange(64 * 128 // 16, dtype=np.int16)
    view = torch_tile.as_view(stored, 64, 128)
    assert view.shape == (64, 2, 4)
    assert view.strides == (4, 2, 2 * 2 * 64)
    for form in (view, np.ascontiguousarray(view), stored, stored.reshape(64, 8)):
        assert np.array_equal(torch_tile.as_stored(form), stored)


def test_nibbles_are_packed_low_first():
    plain = np.array([[4, 8, 9, 12], [13, 14, 0, 15]], np.uint8)
    assert nibbles.pack(plain).tolist() == [[0x84, 0xC9], [0xED, 0xF0]]
    assert np.array_equal(nibbles.unpack(nibbles.pack(plain), np.empty), plain)


def test_flags_of_nibbles():
    for nibble, flags in enumerate(compressed_tensors.FLAGS_OF_NIBBLE):
        first, second = nibble & 3, nibble >> 2
        assert flags == (1 << first | 1 << second if first < second else 0)
    for flags, nibble in enumerate(compressed_tensors.NIBBLE_OF_FLAGS):
        assert nibble == (compressed_tensors.FLAGS_OF_NIBBLE.index(flags) if flags.bit_count() == 2 else 0)
