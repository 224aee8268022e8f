"""Attention over kept cells in NumPy, in float32, one block row at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..descriptor import BlockSparseAttentionDescriptor
from ..dropout import dropped as is_dropped
from ..lookup_tables import LookUp
from . import products
from .products import BlockRow, Multiply
from .softmax import exp32, in_order, softmax

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Attention:
    """One run. ``read`` maps names to operands in float32, and to lengths."""

    desc: BlockSparseAttentionDescriptor
    tables: LookUp
    multiply: Multiply
    read: dict[str, Array]

    def forward(self) -> tuple[Array, Array]:
        """Return O [Z, H, rows, head_size] and the rows' logsumexp [Z, H, rows]."""
        q, k, v = self._of_queries("q"), self._of_keys("k"), self._of_keys("v")
        out, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
        for row in self._block_rows():
            scores, dropped = self._scores(row, q, k)
            found = softmax(np.where(dropped, np.float32(-np.inf), scores))
            out[:, row.head, row.cells] = self.multiply(
                found.probabilities * self._kept(row), v[:, row.head][:, self._columns(row)]
            )
            lse[:, row.head, row.cells] = found.logsumexp[..., 0]
        return out, lse

    def backward(self) -> tuple[Array, Array, Array]:
        """Return dQ, dK and dV. Probabilities are recomputed from the scores and ``lse``."""
        desc, one = self.desc, self.desc.layout
        q, k, v = self._of_queries("q"), self._of_keys("k"), self._of_keys("v")
        out_gradient = self._of_queries("do")
        deltas = in_order(out_gradient * self._of_queries("o"))
        shape = (desc.batch, one.blocks, one.block, one.block)
        probabilities, score_gradients = np.empty(shape, np.float32), np.empty(shape, np.float32)
        for row in self._block_rows():
            scores, dropped = self._scores(row, q, k)
            lse = self.read["lse"][:, row.head, row.cells, None]
            p = np.where(
                dropped, np.float32(0), exp32(scores - np.where(np.isneginf(lse), np.float32(0), lse))
            )
            dp = self.multiply(
                out_gradient[:, row.head, row.cells], v[:, row.head][:, self._columns(row)].swapaxes(1, 2)
            )
            kept = self._kept(row)
            ds = p * (dp * kept - deltas[:, row.head, row.cells])
            probabilities[:, row.places] = products.in_blocks(p * kept)
            score_gradients[:, row.places] = products.in_blocks(ds)
        scale = np.float32(desc.scale)
        dq = self._product(score_gradients, k, transposed=False) * scale
        dk = self._of_groups(self._product(score_gradients, q, transposed=True)) * scale
        return dq, dk, self._of_groups(self._product(probabilities, out_gradient, transposed=True))

    # Parts ------------------------------------------------------------------------------------------

    def _block_rows(self, *, transposed: bool = False) -> Any:
        return products.block_rows(self.desc.layout, self.tables, transposed=transposed)

    def _columns(self, row: BlockRow) -> Array:
        return row.cells_across(self.desc.layout.block)

    def _scores(self, row: BlockRow, q: Array, k: Array) -> tuple[Array, Array]:
        """Return the scores of a block row [Z, block, cells], and which of them are hidden."""
        columns_read = self._columns(row)
        keys = k[:, row.head][:, columns_read].swapaxes(1, 2)
        scores = self.multiply(q[:, row.head, row.cells], keys) * np.float32(self.desc.scale)
        rows = np.arange(row.cells.start, row.cells.stop)[:, None]
        dropped = np.zeros(scores.shape, np.bool_)
        if self.desc.causal:
            dropped |= columns_read > rows
        if self.desc.lengths:
            dropped |= rows >= self.read["q_lengths"][:, None, None]
            dropped |= columns_read >= self.read["kv_lengths"][:, None, None]
        return scores, dropped

    def _kept(self, row: BlockRow) -> Array:
        """Return dropout's factors of a block row: 0 for a dropped cell, else 1 / (1 - p) in float32."""
        desc = self.desc
        if not desc.dropout:
            return np.ones((), np.float32)
        matrices = np.arange(desc.batch, dtype=np.int64) * desc.layout.heads + row.head
        rows = np.arange(row.cells.start, row.cells.stop, dtype=np.int64)
        out = is_dropped(
            self.read["seed_offset"].astype(np.int64),
            desc.dropout,
            matrices[:, None, None],
            rows[:, None],
            self._columns(row).astype(np.int64),
        )
        return np.where(out, np.float32(0), np.float32(1 / (1 - desc.dropout)))

    def _of_queries(self, name: str) -> Array:
        return self._within(self.read[name], "q_lengths")

    def _of_keys(self, name: str) -> Array:
        """Repeat an operand of K's heads for every head of Q."""
        heads = np.arange(self.desc.layout.heads) // max(self.desc.group, 1)
        return self._within(self.read[name], "kv_lengths")[:, heads]

    def _within(self, matrices: Array, lengths: str) -> Array:
        """Return the matrices with zeros beyond the lengths, where callers may leave anything."""
        if not self.desc.lengths:
            return matrices
        beyond = np.arange(matrices.shape[2]) >= self.read[lengths][:, None]
        return np.where(beyond[:, None, :, None], np.float32(0), matrices)

    def _of_groups(self, gradients: Array) -> Array:
        """Sum gradients over the heads of Q that share a head of K, from the first to the last."""
        batch, _, rows, width = gradients.shape
        groups = gradients.reshape(batch, self.desc.kv_heads, self.desc.group, rows, width)
        total = np.zeros((batch, self.desc.kv_heads, rows, width), np.float32)
        for head in range(self.desc.group):
            total = total + groups[:, :, head]
        return total

    def _product(self, values: Array, dense: Array, *, transposed: bool) -> Array:
        """Multiply S, or S transposed, by a dense matrix."""
        one = self.desc.layout
        rows = one.cols if transposed else one.rows
        found = np.empty((self.desc.batch, one.heads, rows, dense.shape[3]), np.float32)
        for row in self._block_rows(transposed=transposed):
            found[:, row.head, row.cells] = products.sparse_times_dense(
                row, values, dense, self.multiply, transposed=transposed
            )
        return found
