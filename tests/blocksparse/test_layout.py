"""Layouts: values of themselves, conversions that lose nothing, and errors that name the block."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from sparse24_plans import BlockSparseLayout, BlockSparseShape, FormatError, InvalidProblemError

from .sample_layouts import EDGES, layouts, random_layout

every_edge = pytest.mark.parametrize("layout", EDGES.values(), ids=EDGES)


def random_values(layout: BlockSparseLayout, batch: int = 2, dtype: type = np.float32) -> np.ndarray:
    one = layout.shape
    shape = (batch, one.blocks, one.block, one.block)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32).astype(dtype)


def test_a_layout_is_a_value():
    layout, same = random_layout(), random_layout()
    assert layout == same
    assert {layout: 1}[same] == 1
    assert layout != random_layout(seed=1)
    assert layout != random_layout(block=32)
    assert layout != BlockSparseLayout(layout.bitmap.reshape(2, 4, 3), 16)
    assert layout != "layout"
    assert copy.deepcopy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert "2 x [48, 64], block 16" in repr(layout)


def test_a_layout_does_not_change():
    bitmap = np.ones((1, 2, 2), bool)
    layout = BlockSparseLayout(bitmap, 16)
    bitmap[...] = False
    assert layout.bitmap.all()
    with pytest.raises(ValueError, match="read-only"):
        layout.bitmap[0, 0, 0] = False
    with pytest.raises(InvalidProblemError, match="immutable"):
        layout.bitmap = bitmap
    assert not pickle.loads(pickle.dumps(layout)).bitmap.flags.writeable


def test_the_shape_says_what_there_is():
    shape = BlockSparseLayout([[1, 0, 1], [0, 0, 0]], 32).shape
    assert shape == BlockSparseShape(heads=1, rows=64, cols=96, block=32, blocks=2)
    assert (shape.block_rows, shape.block_cols, shape.density) == (2, 3, 2 / 6)
    assert BlockSparseShape.model_validate_json(shape.model_dump_json()) == shape


@given(layouts())
def test_every_form_makes_a_round_trip(layout):
    one = layout.shape
    assert BlockSparseLayout.from_json(layout.to_json()) == layout
    assert BlockSparseLayout.from_bsr(*layout.to_bsr(), one.cols, one.block) == layout
    coo, sizes = layout.to_coo(), (one.heads, one.rows, one.cols)
    assert BlockSparseLayout.from_coo(coo[:, ::-1], sizes, one.block) == layout
    assert layout.transposed().transposed() == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


@every_edge
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn]
)
def test_dense_and_back(layout, dtype):
    values = random_values(layout, dtype=dtype)
    dense = layout.to_dense(values)
    one = layout.shape
    assert dense.shape == (2, one.heads, one.rows, one.cols)
    kept = np.kron(layout.bitmap, np.ones((one.block, one.block), bool))
    assert not (dense != 0)[:, ~kept].any()
    back = layout.values_of(dense)
    assert back.dtype == values.dtype
    assert back.tobytes() == values.tobytes()


@every_edge
def test_values_are_ordered_by_head_then_by_row(layout):
    values = random_values(layout, batch=1)
    dense, b = layout.to_dense(values), layout.shape.block
    for at, (head, row, col) in enumerate(layout.to_coo().T):
        tile = dense[0, head, row * b : (row + 1) * b, col * b : (col + 1) * b]
        assert np.array_equal(tile, values[0, at])


def test_symmetric_is_equal_to_its_transpose():
    assert EDGES["symmetric"].transposed() == EDGES["symmetric"]
    assert EDGES["uneven"].transposed() != EDGES["uneven"]


def test_a_dense_matrix_gives_the_blocks_that_hold_something():
    dense = np.zeros((32, 48), np.float32)
    dense[3, 20], dense[17, 40], dense[0, 0] = 1, np.nan, -0.0
    layout = BlockSparseLayout.from_dense(dense, 16)
    assert layout.bitmap.tolist() == [[[False, True, False], [False, False, True]]]
    assert layout.values_of(dense).shape == (1, 2, 16, 16)


class TorchBsr(SimpleNamespace):
    """The attributes that are read from a torch.sparse_bsr tensor."""

    layout = "torch.sparse_bsr"

    def crow_indices(self) -> np.ndarray:
        return self.crow

    def col_indices(self) -> np.ndarray:
        return self.col

    def values(self) -> np.ndarray:
        return self.blocks


@pytest.mark.parametrize("heads", [1, 2])
def test_from_torch_bsr(heads):
    kept = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]])
    layout = BlockSparseLayout(np.stack([kept] * heads), 16)
    values = random_values(layout, batch=1)
    crow, col = layout.to_bsr()
    if heads == 1:
        tensor = TorchBsr(shape=(48, 48), crow=crow[0], col=col, blocks=values[0])
    else:
        tensor = TorchBsr(
            shape=(2, 48, 48), crow=crow, col=col.reshape(2, 4), blocks=values.reshape(2, 4, 16, 16)
        )
    found, same = BlockSparseLayout.from_torch_bsr(tensor)
    assert found == layout
    assert np.shares_memory(same, values)
    assert np.array_equal(same, values)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_from_bsr_takes_pytorchs_own_tensors():
    torch = pytest.importorskip("torch")
    layout = random_layout(heads=1)
    dense = torch.from_numpy(layout.to_dense(random_values(layout, batch=1))[0, 0])
    bsr = dense.to_sparse_bsr((16, 16))
    found, values = BlockSparseLayout.from_torch_bsr(bsr)
    assert found == layout
    crow, col = layout.to_bsr()
    back = torch.sparse_bsr_tensor(torch.from_numpy(crow[0]), torch.from_numpy(col), values[0], dense.shape)
    assert torch.equal(back.to_dense(), dense)
    assert BlockSparseLayout(torch.from_numpy(np.array(layout.bitmap)), 16) == layout
    with pytest.raises(InvalidProblemError, match=r"tensor: expected layout torch\.sparse_bsr"):
        BlockSparseLayout.from_torch_bsr(dense)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bitmap", "block", "words"),
    [
        ([[1]], 8, "block: expected one of 16, 32, 64, 128, got 8"),
        ([[1]], 48, "block: expected one of 16, 32, 64, 128, got 48"),
        ([[1]], None, "block: expected 16, 32, 64 or 128, got None"),
        ([[0, 2]], 16, r"bitmap: expected 0 or 1, got 2 at block \(0, 1\) of head 0"),
        ([1, 0], 16, r"bitmap: expected \[heads, rows/block, cols/block\], got shape \[2\]"),
        ([[0.5]], 16, "bitmap: expected bools or integers"),
        ("mask", 16, "bitmap: expected a tensor"),
        (np.broadcast_to(np.zeros(1, bool), (1, 1 << 27, 1)), 16, "rows: Input should be less than"),
    ],
)
def test_bad_bitmaps_are_refused(bitmap, block, words):
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseLayout(bitmap, block)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rows": 40}, "rows: expected a multiple of block 16, got 40"),
        ({"cols": 2**31}, "cols: Input should be less than or equal to 2147483647"),
        ({"heads": 2**30}, "heads: expected fewer than 2\\^31 - 1 rows and columns of blocks"),
        ({"blocks": 5}, "blocks: expected at most 4, as many as there are, got 5"),
        ({"block": 256}, "block: expected one of"),
    ],
)
def test_bad_shapes_are_refused(fields, words):
    good = {"heads": 1, "rows": 32, "cols": 32, "block": 16, "blocks": 4}
    BlockSparseShape(**good)
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseShape(**{**good, **fields})


@pytest.mark.parametrize(
    ("crow", "col", "cols", "words"),
    [
        (
            [0, 1, 2],
            [0, 3],
            48,
            r"col_indices: expected blocks of 1 x \[2, 3\], got block \(1, 3\) of head 0",
        ),
        ([0, 2, 2], [1, 1], 48, r"expected columns that increase in a row, got 1 after 1 at block \(0, 1\)"),
        ([0, 2, 2], [2, 0], 48, r"expected columns that increase in a row, got 0 after 2 at block \(0, 0\)"),
        ([0, 1, 3], [0, 1], 48, "col_indices: expected 3 blocks, as crow_indices ends with, got 2"),
        (
            [0, 2, 1],
            [0],
            48,
            "crow_indices: expected values that start at 0 and never decrease in each head, "
            r"got \[0, 2, 1\] in head 0",
        ),
        ([[0, 0, 0], [1, 1, 1]], [0], 48, r"crow_indices: expected .* got \[1, 1, 1\] in head 1"),
        ([0, 2**63 - 1, -2, 0], [], 48, r"crow_indices: expected .* got \[0, 9223372036854775807, -2, 0\]"),
        ([0, 1, 1], [-1], 48, r"got block \(0, -1\) of head 0"),
        ([0, 1, 1], [0], 40, "cols: expected a multiple of block 16 below 2\\^31, got 40"),
        ([], [], 48, "crow_indices: expected"),
    ],
)
def test_bad_bsr_is_refused(crow, col, cols, words):
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseLayout.from_bsr(crow, col, cols, 16)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_unsorted_unsigned_columns_are_refused(dtype):
    crow = np.array([0, 2], dtype)
    with pytest.raises(InvalidProblemError, match="col_indices: expected columns that increase in a row"):
        BlockSparseLayout.from_bsr(crow, np.array([1, 0], dtype), 48, 16)
    found = BlockSparseLayout.from_bsr(crow, np.array([0, 2], dtype), 48, 16)
    assert found.bitmap.tolist() == [[[True, False, True]]]


@pytest.mark.parametrize(
    ("indices", "shape", "words"),
    [
        (
            [[0, 0], [1, 1], [2, 2]],
            (1, 32, 48),
            r"expected each block once, got block \(1, 2\) of head 0 more",
        ),
        (
            [[1], [0], [0]],
            (1, 32, 48),
            r"indices: expected blocks of 1 x \[2, 3\], got block \(0, 0\) of head 1",
        ),
        ([[0, 0]], (1, 32, 48), r"indices: expected \[3, blocks\], got shape \[1, 2\]"),
        ([[0], [0], [0]], (32, 48), r"shape: expected \(heads, rows, cols\), got"),
        ([[0], [0], [0]], (1, 33, 48), "rows: expected a multiple of block 16"),
        ([[0], [0], [0]], (None, 32, 48), r"shape: expected heads from 0 to 2\^31 - 1, got None"),
        ([[0], [0], [0]], (-1, 32, 48), r"shape: expected heads from 0 to 2\^31 - 1, got -1"),
    ],
)
def test_bad_coo_is_refused(indices, shape, words):
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseLayout.from_coo(indices, shape, 16)


def test_a_non_zero_in_a_pruned_block_is_named():
    layout = BlockSparseLayout([[[1, 0], [1, 1]], [[1, 1], [0, 1]]], 16)
    dense = np.zeros((2, 32, 32), np.float32)
    dense[1, 20, 3] = 1e-30
    with pytest.raises(FormatError, match=r"dense: expected zeros outside .* in block \(1, 0\) of head 1"):
        layout.values_of(dense)
    dense[1, 20, 3] = -0.0
    layout.values_of(dense)


def test_sizes_that_disagree():
    layout = random_layout()
    with pytest.raises(InvalidProblemError, match=r"dense: expected \[Z, 2, 48, 64\], got shape \[48, 64\]"):
        layout.values_of(np.zeros((48, 64), np.float32))
    with pytest.raises(InvalidProblemError, match=r"values: expected \[Z, \d+, 16, 16\], got shape"):
        layout.to_dense(np.zeros((1, 3, 32, 32), np.float32))
    with pytest.raises(InvalidProblemError, match="dense rows: expected a multiple of block 16"):
        BlockSparseLayout.from_dense(np.zeros((40, 48), np.float32), 16)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"block": 20},
        {"bitmap_shape": [2, 3]},
        {"bitmap_shape": [2, 3, 5]},
        {"bitmap_shape": [2**30, 2**30, 2**30]},
        {"bitmap": "????"},
        {"bitmap": 3},
    ],
)
def test_bad_headers_are_refused(change):
    header = json.loads(random_layout().to_json())
    with pytest.raises(FormatError, match="text: expected the header of a layout"):
        BlockSparseLayout.from_json(json.dumps({**header, **change}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "got '{}': it has no format, bitmap_shape, bitmap, block"),
        ("3", "got '3': it is no JSON object"),
        (json.dumps({"format": "sparse24_block_layout_v1", "block": 16}), "it has no bitmap_shape, bitmap$"),
    ],
)
def test_a_header_that_lacks_parts_names_them(text, message):
    with pytest.raises(FormatError, match=message):
        BlockSparseLayout.from_json(text)


def test_spare_bits_of_a_header_are_zero():
    header = json.loads(BlockSparseLayout([[1, 1, 1]], 16).to_json())
    with pytest.raises(FormatError, match="a bitmap of 1 bytes for 3 blocks"):
        BlockSparseLayout.from_json(json.dumps({**header, "bitmap": "/w=="}))
