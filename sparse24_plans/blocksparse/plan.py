"""Plans of block-sparse matrices."""

from __future__ import annotations

from typing import ClassVar

from ..plan.plan import Plan
from ..vocab import BlockSparseConvOp, BlockSparseOp, BlockSparsePass
from .args import (
    BlockSparseAttentionArgs,
    BlockSparseAttentionBackwardArgs,
    BlockSparseConv2dArgs,
    BlockSparseConv2dDgradArgs,
    BlockSparseConv2dWgradArgs,
    BlockSparseMatmulArgs,
    BlockSparseSoftmaxArgs,
    BlockSparseSoftmaxBackwardArgs,
)
from .convolution import BlockSparseConv2dDescriptor
from .descriptor import (
    BlockSparseAttentionDescriptor,
    BlockSparseDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseSoftmaxDescriptor,
)
from .kernel_table import ATTENTION_ENTRIES, CONVOLUTION_ENTRIES, MATMUL_ENTRIES, SOFTMAX_ENTRIES
from .layout import BlockSparseLayout
from .lookup_tables import BlockSparseTables, view_of


class BlockSparsePlan(Plan):
    """Base of the family's plans."""

    descriptor: BlockSparseDescriptor

    def pack(self, layout: BlockSparseLayout) -> BlockSparseTables:
        """Return the layout's look-up tables, on the plan's device. They serve every plan of the layout's
        shape.

        Raises InvalidProblemError if the shape is not the descriptor's.
        """
        tables = BlockSparseTables(layout, self._home)
        view_of(self.descriptor.layout, tables)
        return tables


class BlockSparseMatmulPlan(BlockSparsePlan):
    """A kernel chosen for a product with a block-sparse matrix. Its arguments are BlockSparseMatmulArgs."""

    descriptor_type = BlockSparseMatmulDescriptor
    table = MATMUL_ENTRIES
    args_types: ClassVar = dict.fromkeys(BlockSparseOp, BlockSparseMatmulArgs)
    descriptor: BlockSparseMatmulDescriptor


class BlockSparseSoftmaxPlan(BlockSparsePlan):
    """A kernel chosen for a softmax over kept cells, or for its gradient.

    Its arguments are BlockSparseSoftmaxArgs, for the op ``backward`` BlockSparseSoftmaxBackwardArgs.
    """

    descriptor_type = BlockSparseSoftmaxDescriptor
    table = SOFTMAX_ENTRIES
    args_types: ClassVar = {
        BlockSparsePass.FORWARD: BlockSparseSoftmaxArgs,
        BlockSparsePass.BACKWARD: BlockSparseSoftmaxBackwardArgs,
    }
    descriptor: BlockSparseSoftmaxDescriptor


class BlockSparseAttentionPlan(BlockSparsePlan):
    """A kernel chosen for attention over kept cells, or for its gradients.

    Its arguments are BlockSparseAttentionArgs, for the op ``backward`` BlockSparseAttentionBackwardArgs.
    """

    descriptor_type = BlockSparseAttentionDescriptor
    table = ATTENTION_ENTRIES
    args_types: ClassVar = {
        BlockSparsePass.FORWARD: BlockSparseAttentionArgs,
        BlockSparsePass.BACKWARD: BlockSparseAttentionBackwardArgs,
    }
    descriptor: BlockSparseAttentionDescriptor


class BlockSparseConv2dPlan(BlockSparsePlan):
    """A kernel chosen for a convolution with a block-sparse filter, or for one of its gradients.

    Its arguments are BlockSparseConv2dArgs, for the op ``dgrad`` BlockSparseConv2dDgradArgs, for ``wgrad``
    BlockSparseConv2dWgradArgs.
    """

    descriptor_type = BlockSparseConv2dDescriptor
    table = CONVOLUTION_ENTRIES
    args_types: ClassVar = {
        BlockSparseConvOp.FORWARD: BlockSparseConv2dArgs,
        BlockSparseConvOp.DGRAD: BlockSparseConv2dDgradArgs,
        BlockSparseConvOp.WGRAD: BlockSparseConv2dWgradArgs,
    }
    descriptor: BlockSparseConv2dDescriptor
