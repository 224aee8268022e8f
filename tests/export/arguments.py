"""The arguments of a plan, made of the addresses and strides that C is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparse24_plans.blocksparse.lookup_tables import BlockSparseTables
from sparse24_plans.blocksparse.packed import PackedBlocks
from sparse24_plans.blocksparse.shape import BlockSparseShape
from sparse24_plans.device.tensors import TensorView
from sparse24_plans.export.recording import buffers_of
from sparse24_plans.plan.operands import Args, Role, fields_of
from sparse24_plans.plan.plan import Plan
from sparse24_plans.vocab import CANONICAL_LAYOUT
from sparse24_plans.weights.weight import PackedWeight, Sparse24Weight


def views_of(plan: Plan, given: Sequence[tuple[int, int]], most_n: int = 0) -> dict[str, TensorView | None]:
    """Views by the names that kernels give them. Optional operands without an address are absent: None.

    ``most_n``: the tokens that the product was exported for.
    """
    views: dict[str, TensorView | None] = {}
    for buffer, (address, stride) in zip(
        buffers_of(plan.parts.operands, plan.sku.layout, most_n), given, strict=True
    ):
        absent = buffer.operand.optional and not address
        views[buffer.view] = None if absent else buffer.at(address, stride, plan.parts.home)
    return views


def tables_at(shape: BlockSparseShape, view: TensorView | None) -> BlockSparseTables:
    """Tables whose memory on the device is somebody else's."""
    tables = BlockSparseTables.__new__(BlockSparseTables)
    tables.shape, tables._view = shape, view
    return tables


def args_of(plan: Plan, views: Mapping[str, TensorView | None]) -> Args:
    """The arguments of these views."""
    args_type = plan.args_type(plan.descriptor)
    fields: dict[str, Any] = dict.fromkeys(fields_of(args_type))
    desc: Any = plan.descriptor
    _, operands, _, home = plan.parts
    for operand in operands:
        buffers = tuple(views[one.view] for one in buffers_of([operand], plan.sku.layout))
        if operand.role is Role.PACKED:
            form = plan.sku.layout, desc.layout, desc.batch, desc.element, home
            fields[operand.argument] = PackedBlocks(*form, buffers)
            continue
        if operand.role is not Role.WEIGHT:
            view = views[operand.name]
            fields[operand.argument] = tables_at(desc.layout, view) if operand.role is Role.TABLES else view
            continue
        layout = operand.packing.layout or plan.sku.layout
        if layout == CANONICAL_LAYOUT:
            fields[operand.argument] = Sparse24Weight(*buffers, element=desc.element, validate=False)
        else:
            about = layout, *operand.shape, desc.element, home, buffers, operand.packing.quantization
            fields[operand.argument] = PackedWeight(*about)
    return args_type(**fields)
