"""Plans of block-sparse matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, overload

from ..device.streams import launch_on, on_stream, stream_handle
from ..device.tensors import HOST, TensorView
from ..errors import InvalidProblemError, UnsupportedError
from ..plan.operands import Alignment, Operand, Role, check_tensor
from ..plan.plan import Plan
from ..vocab import DENSE_BLOCKS_LAYOUT, BlockSparseConvOp, BlockSparseOp, BlockSparsePass, ElementKind
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
from .device_tables import table_kernel
from .kernel_table import ATTENTION_ENTRIES, CONVOLUTION_ENTRIES, MATMUL_ENTRIES, SOFTMAX_ENTRIES
from .layout import BlockSparseLayout
from .lookup_tables import BlockSparseTables, note_update, view_of
from .packed import PackedBlocks


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

    def update(self, tables: BlockSparseTables, bitmap: Any, *, stream: Any = None) -> None:
        """Write the tables of the mask in ``bitmap`` in place, in one launch on the GPU.

        For masks that are made on a GPU, with blocks of 64 or 128. ``bitmap`` is uint8 [heads, rows/block,
        cols/block] on the plan's device, not 0 where a block is kept. It must keep as many blocks as the
        tables: nothing waits to see it, and with another number the tables keep none. After the first call
        of a shape, which compiles, a CUDA graph may capture it.

        Raises InvalidProblemError naming the argument; UnsupportedError for other blocks, a host's plan and
        layouts that are too large: call ``tables.update``.
        """
        view_of(self.descriptor.layout, tables)
        shape = self.descriptor.layout
        if self._home == HOST:
            raise UnsupportedError("plan: expected a GPU's plan, got the host's; call tables.update")
        if tables.device != self._home:
            raise InvalidProblemError(f"tables: expected tables on {self._home}, got {tables.device}")
        sides = shape.heads, shape.block_rows, shape.block_cols
        operand = Operand("bitmap", Role.IN, sides, ElementKind.U8)
        view = check_tensor(bitmap, operand, Alignment(), self._home)
        handle = stream_handle(stream, self._home)
        launch = table_kernel(shape, self.device).bind(view.address, tables.view.address)
        note_update(tables, handle)
        launch_on(self._home, launch, handle)


class BlockSparseMatmulPlan(BlockSparsePlan):
    """A kernel chosen for a product with a block-sparse matrix. Its arguments are BlockSparseMatmulArgs."""

    descriptor_type = BlockSparseMatmulDescriptor
    table = MATMUL_ENTRIES
    args_types: ClassVar = dict.fromkeys(BlockSparseOp, BlockSparseMatmulArgs)
    descriptor: BlockSparseMatmulDescriptor

    @overload
    def pack(self, layout: BlockSparseLayout, *, stream: Any = None) -> BlockSparseTables: ...
    @overload
    def pack(self, layout: BlockSparseLayout, values: Any, *, stream: Any = None) -> PackedBlocks: ...
    def pack(
        self, layout: BlockSparseLayout, values: Any = None, *, stream: Any = None
    ) -> BlockSparseTables | PackedBlocks:
        """Return the layout's look-up tables, or for a descriptor with ``packed`` the packed operand.

        ``values`` [Z, blocks, block, block] are the sparse operand's, on the plan's device. A kernel of kept
        blocks reads these values themselves; another one gets a dense copy in new memory, written on
        ``stream`` (``plan.explain()`` says which). Pack again if the values change. Tables are written on
        ``stream``, too.

        Raises InvalidProblemError or MisalignedOperandError naming the argument, BackendUnavailableError if
        memory is full.
        """
        desc = self.descriptor
        if not desc.packed:
            if values is not None:
                raise InvalidProblemError(
                    "values: expected None, because the descriptor has packed=False, got "
                    f"{type(values).__name__}"
                )
            with on_stream(self._home, stream):
                return super().pack(layout)
        operand = next(one for one in self._operands if one.role is Role.PACKED)
        alignment = self._kernel.alignment_of(operand.name)
        view = check_tensor(values, replace(operand, argument="values"), alignment, self._home)
        with on_stream(self._home, stream):
            buffers: tuple[TensorView, ...] = view, super().pack(layout).view
            if self._entry.layout == DENSE_BLOCKS_LAYOUT:
                kernel: Any = self._kernel
                buffers = (kernel.pack(*buffers),)
        return PackedBlocks(self._entry.layout, desc.layout, desc.batch, desc.element, self._home, buffers)


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
