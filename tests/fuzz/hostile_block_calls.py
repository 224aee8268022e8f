"""The public calls on layouts of blocks, each with arguments that are right."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseConv2dDescriptor,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
    BlockSparseTables,
    PackedBlocks,
    compress_blocks,
    decompress_blocks,
    prune_blocks,
)

from ..plan.cases import select
from .hostile_registry import add_call

LAYOUT = BlockSparseLayout([[[1, 0], [1, 1]]], 16)
_BLOCKS = np.zeros((1, 3, 16, 16), np.float32)
_CROW, _COL = LAYOUT.to_bsr()
add_call("BlockSparseLayout", BlockSparseLayout, bitmap=LAYOUT.bitmap, block=16)
add_call("BlockSparseLayout.transposed", LAYOUT.transposed)
add_call(
    "BlockSparseLayout.from_bsr",
    BlockSparseLayout.from_bsr,
    crow_indices=_CROW,
    col_indices=_COL,
    cols=32,
    block=16,
)
add_call("BlockSparseLayout.to_bsr", LAYOUT.to_bsr)
add_call(
    "BlockSparseLayout.from_torch_bsr",
    BlockSparseLayout.from_torch_bsr,
    tensor=SimpleNamespace(
        layout="torch.sparse_bsr",
        shape=(32, 32),
        values=lambda: _BLOCKS[0],
        crow_indices=lambda: _CROW[0],
        col_indices=lambda: _COL,
    ),
)
add_call(
    "BlockSparseLayout.from_coo",
    BlockSparseLayout.from_coo,
    indices=LAYOUT.to_coo(),
    shape=(1, 32, 32),
    block=16,
)
add_call("BlockSparseLayout.to_coo", LAYOUT.to_coo)
add_call("BlockSparseLayout.from_dense", BlockSparseLayout.from_dense, dense=_BLOCKS[0, 0], block=16)
add_call("BlockSparseLayout.values_of", LAYOUT.values_of, dense=LAYOUT.to_dense(_BLOCKS))
add_call("BlockSparseLayout.to_dense", LAYOUT.to_dense, values=_BLOCKS)
add_call("BlockSparseLayout.to_json", LAYOUT.to_json)
add_call("BlockSparseLayout.from_json", BlockSparseLayout.from_json, text=LAYOUT.to_json())
_LARGE = BlockSparseLayout([[0, 1], [1, 1]], 64)
_CELLS = np.zeros((1, 3, 64, 64), np.float16)
_KEPT = compress_blocks(_LARGE, _CELLS, along="rows")
add_call("compress_blocks", compress_blocks, layout=_LARGE, values=_CELLS, along="rows")
add_call(
    "decompress_blocks", decompress_blocks, layout=_LARGE, along="columns", values=_KEPT[0], metadata=_KEPT[1]
)
add_call(
    "prune_blocks",
    prune_blocks,
    matrix=_LARGE.to_dense(_CELLS)[0],
    block=64,
    density=0.5,
    along="rows",
    scores=_LARGE.to_dense(_CELLS)[0],
)
add_call("BlockSparseTables", BlockSparseTables, layout=LAYOUT)
_MATMUL = BlockSparseMatmulDescriptor(op="dsd", layout=LAYOUT, n=4, element="f32")
add_call("BlockSparseMatmulPlan.pack", select(_MATMUL, "host").pack, layout=LAYOUT)
_PACKING = select(_MATMUL.model_copy(update={"packed": True}), "host")
_VALUES = np.zeros((1, LAYOUT.shape.blocks, LAYOUT.shape.block, LAYOUT.shape.block), np.float32)
add_call("BlockSparseMatmulPlan.pack, packed", _PACKING.pack, layout=LAYOUT, values=_VALUES, stream=None)
_PACKED = _PACKING.pack(LAYOUT, _VALUES)
add_call(
    "PackedBlocks", PackedBlocks, **{one.name: getattr(_PACKED, one.name) for one in fields(PackedBlocks)}
)
_BITMAP = LAYOUT.bitmap.view(np.uint8)
for _desc in (
    _MATMUL,
    BlockSparseSoftmaxDescriptor(layout=LAYOUT, element="f32"),
    BlockSparseAttentionDescriptor(layout=LAYOUT, element="f32", head_size=4),
    BlockSparseConv2dDescriptor(layout=LAYOUT, element="f32", height=2, width=2, kernel=1),
):
    _plan = select(_desc, "host")
    add_call(
        f"{type(_plan).__name__}.update",
        _plan.update,
        tables=BlockSparseTables(LAYOUT),
        bitmap=_BITMAP,
        stream=None,
    )
_SOFTMAX = BlockSparseSoftmaxDescriptor(layout=LAYOUT, element="f32")
add_call("BlockSparseSoftmaxPlan.pack", select(_SOFTMAX, "host").pack, layout=LAYOUT)
_ATTENTION = BlockSparseAttentionDescriptor(layout=LAYOUT, element="f32", head_size=4)
add_call("BlockSparseAttentionPlan.pack", select(_ATTENTION, "host").pack, layout=LAYOUT)
_CONVOLUTION = BlockSparseConv2dDescriptor(layout=LAYOUT, element="f32", height=2, width=2, kernel=1)
add_call("BlockSparseConv2dPlan.pack", select(_CONVOLUTION, "host").pack, layout=LAYOUT)
add_call("BlockSparseTables.update", BlockSparseTables(LAYOUT).update, layout=LAYOUT)
