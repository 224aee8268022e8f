"""Plans of block-sparse matrices."""

from __future__ import annotations

from ..plan.operands import Args
from ..plan.plan import Plan
from ..vocab import BlockSparseConvOp, BlockSparsePass
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
    descriptor: BlockSparseMatmulDescriptor

    @classmethod
    def args_type(cls, descriptor: BlockSparseMatmulDescriptor) -> type[Args]:
        cls._check_descriptor(descriptor)
        return BlockSparseMatmulArgs


class BlockSparseSoftmaxPlan(BlockSparsePlan):
    """A kernel chosen for a softmax over kept cells, or for its gradient.

    Its arguments are BlockSparseSoftmaxArgs, for the op ``backward`` BlockSparseSoftmaxBackwardArgs.
    """

    descriptor_type = BlockSparseSoftmaxDescriptor
    table = SOFTMAX_ENTRIES
    descriptor: BlockSparseSoftmaxDescriptor

    @classmethod
    def args_type(cls, descriptor: BlockSparseSoftmaxDescriptor) -> type[Args]:
        cls._check_descriptor(descriptor)
        forward = descriptor.op is BlockSparsePass.FORWARD
        return BlockSparseSoftmaxArgs if forward else BlockSparseSoftmaxBackwardArgs


class BlockSparseAttentionPlan(BlockSparsePlan):
    """A kernel chosen for attention over kept cells, or for its gradients.

    Its arguments are BlockSparseAttentionArgs, for the op ``backward`` BlockSparseAttentionBackwardArgs.
    """

    descriptor_type = BlockSparseAttentionDescriptor
    table = ATTENTION_ENTRIES
    descriptor: BlockSparseAttentionDescriptor

    @classmethod
    def args_type(cls, descriptor: BlockSparseAttentionDescriptor) -> type[Args]:
        cls._check_descriptor(descriptor)
        forward = descriptor.op is BlockSparsePass.FORWARD
        return BlockSparseAttentionArgs if forward else BlockSparseAttentionBackwardArgs


class BlockSparseConv2dPlan(BlockSparsePlan):
    """A kernel chosen for a convolution with a block-sparse filter, or for one of its gradients.

    Its arguments are BlockSparseConv2dArgs, for the op ``dgrad`` BlockSparseConv2dDgradArgs, for ``wgrad``
    BlockSparseConv2dWgradArgs.
    """

    descriptor_type = BlockSparseConv2dDescriptor
    table = CONVOLUTION_ENTRIES
    descriptor: BlockSparseConv2dDescriptor

    @classmethod
    def args_type(cls, descriptor: BlockSparseConv2dDescriptor) -> type[Args]:
        cls._check_descriptor(descriptor)
        return _CONVOLUTION_ARGS[descriptor.op]


_CONVOLUTION_ARGS: dict[BlockSparseConvOp, type[Args]] = {
    BlockSparseConvOp.FORWARD: BlockSparseConv2dArgs,
    BlockSparseConvOp.DGRAD: BlockSparseConv2dDgradArgs,
    BlockSparseConvOp.WGRAD: BlockSparseConv2dWgradArgs,
}
