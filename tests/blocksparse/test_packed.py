"""Packed operands: kept blocks or a dense copy, whichever a model finds faster; refusals of others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulArgs,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    BlockSparseTables,
    BufferTooSmallError,
    Device,
    InvalidProblemError,
    PackedBlocks,
    TensorView,
    explain,
)
from sparse24_plans.blocksparse.lookup_tables import length
from sparse24_plans.blocksparse.schedules.blocks_wgmma import BlocksWgmmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cost import mean_panel

from ..sample_devices import A100, H200
from ..support import same_bits
from .problems import Operands, case_of, random_operands
from .products_on_gpu import gpu
from .sample_layouts import EDGES, random_layout
from .test_products import check

OPS = ("dsd", "dds")
FORMS = {"blocks": "blocks_wgmma", "dense_blocks": "inflate_cublas"}
"""A backend that reads each form."""


def described(**fields: Any) -> BlockSparseMatmulDescriptor:
    return BlockSparseMatmulDescriptor(**{"op": "dsd", "n": 24, "element": "f32", "packed": True, **fields})


def chosen(density: float = 0.1, block: int = 128, preference: Any = None, device: Any = H200, **fields: Any):
    """Return what ``select`` would choose for a weight of 4096 x 4096."""
    kept = int((4096 // block) ** 2 * density)
    layout = BlockSparseShape(heads=1, rows=4096, cols=4096, block=block, blocks=kept)
    return explain(
        described(**{"layout": layout, "element": "bf16", **fields}), preference=preference, device=device
    )


# Selection, without a GPU -------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 63, 256, 4096])
def test_few_large_blocks_stay_blocks(op, n):
    assert chosen(op=op, n=n).chosen == ("blocks_mma" if n == 1 else "blocks_wgmma")


@pytest.mark.parametrize("op", OPS)
def test_many_small_blocks_become_dense(op):
    found = chosen(op=op, density=0.6, block=16, n=256)
    assert found.chosen == "packed_dense"
    assert "a dense copy of 33554432 bytes, 60.0% of it kept" in found.details
    reasons = {name: reason for name, _, reason in found.rows}
    assert reasons["blocks_wgmma"].startswith("would take about ")
    inflating = {"prefer_backend": "inflate_cublas"}
    unpacked = chosen(op=op, density=0.6, block=16, n=256, packed=False, preference=inflating)
    assert unpacked.workspace_size > found.workspace_size


def test_long_row_of_blocks_makes_dense_copy_faster():
    """All else is equal: one block row keeps every column."""
    assert chosen(density=0.3, block=32, n=2048).chosen == "blocks_wgmma"
    assert chosen(density=0.3, block=32, n=2048, longest_panel=128).chosen == "blocks_wgmma"
    few = {"density": 0.02, "block": 64, "n": 512}
    assert chosen(**few).chosen == "blocks_wgmma"
    assert chosen(density=0.3, block=32, n=512).chosen == "blocks_wgmma"
    assert chosen(density=0.3, block=32, n=512, longest_panel=128).chosen == "packed_dense"


@pytest.mark.parametrize(("op", "transposed"), [("dsd", False), ("dsd", True), ("dds", False), ("dds", True)])
def test_the_longest_panel_is_the_layouts(op, transposed):
    kept = np.zeros((2, 9, 30), bool)
    kept[1, 3, :25], kept[0, :, 4] = True, True  # of blocks of 64 a panel has two block rows
    layout = BlockSparseLayout(kept, 64)
    trans = {"trans_b" if op == "dds" else "trans_a": transposed}
    desc = described(op=op, layout=layout, **trans)
    assert desc.longest_panel == (9 if (op == "dds") != transposed else 25)
    assert described(op=op, layout=layout, longest_panel=7).longest_panel == 7
    assert described(op=op, layout=layout, packed=False, **trans).longest_panel == desc.longest_panel
    assert described(op=op, layout=layout.shape, packed=False).longest_panel == 0
    assert described(op="sdd", layout=layout, packed=False).longest_panel == 0
    assert BlockSparseMatmulDescriptor.model_validate_json(desc.model_dump_json()) == desc


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("n", [64, 256, 2048])
def test_a_long_row_of_blocks_gets_narrower_tiles(block, n):
    """A long row is the longest work of a CTA, which a narrow tile shortens. Equal rows keep wide tiles."""
    shape = BlockSparseShape(heads=1, rows=8192, cols=8192, block=block, blocks=(8192 // block) ** 2 // 20)
    across = 8192 // block
    alike = described(layout=shape, element="bf16", n=n)
    uneven = alike.model_copy(update={"longest_panel": across})
    equal = alike.model_copy(update={"longest_panel": math.ceil(mean_panel(alike))})
    wide, narrow, same = (BlocksWgmmaSchedule.of(desc, 132) for desc in (alike, uneven, equal))
    assert narrow.tokens <= wide.tokens
    assert same == wide
    if n == 256:
        assert narrow.tokens * narrow.rows < wide.tokens * wide.rows or wide.tokens == 64


@pytest.mark.parametrize("n", [1000, 1001, 1002])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_many_small_blocks_become_dense_for_rows_of_any_length(op, transposed, n):
    """A dense product copies rows that are no multiples of 16 bytes to rows that are, which costs little."""
    many = {"op": op, "trans_a": transposed, "trans_b": transposed, "density": 0.6, "block": 16, "n": n}
    found = chosen(**many)
    assert found.chosen == "packed_dense"
    assert ("transposed first" in found.details) == (n > 1000 and op == "dds" and transposed)
    assert ("rows of c are padded" in found.details) == (n > 1000 and op == "dsd")


def test_copies_to_aligned_rows_count_in_the_choice():
    """A small product takes no longer than they do. Kept blocks need only the copy of X."""
    small = BlockSparseShape(heads=1, rows=1024, cols=1024, block=16, blocks=175)
    assert chosen(layout=small, n=200).chosen == "packed_dense"
    assert chosen(layout=small, n=201).chosen == "blocks_wgmma"


def test_what_is_required_decides():
    many = {"density": 0.6, "block": 16, "n": 256}
    assert chosen(**many, preference={"require": {"batch_invariant": True}}).chosen == "blocks_wgmma_any"
    assert chosen(**many, preference={"prefer_backend": "blocks_wgmma"}).chosen == "blocks_wgmma_any"
    assert chosen(**many, element="s8", trans_b=True, preference=None).chosen == "blocks_strict_any"
    assert chosen(element="s8", trans_b=True).chosen == "blocks_wgmma"
    assert chosen(device=A100).chosen == "blocks_mma_many"
    assert chosen(device=A100, n=256).chosen == "packed_dense"
    assert chosen(preference={"prefer_backend": "inflate_cublas"}).chosen == "packed_dense"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"op": "sdd"}, "packed: expected False for op sdd"),
        ({"inner": "sparse24", "element": "bf16"}, "packed: expected False for inner sparse24"),
        ({"op": "sdd", "packed": False, "longest_panel": 3}, "longest_panel: expected 0 for op sdd, got 3"),
        ({"longest_panel": 1 << 20}, "longest_panel: expected at most the layout's"),
    ],
)
def test_what_cannot_be_packed(fields, words):
    layout = BlockSparseShape(heads=1, rows=128, cols=128, block=64, blocks=2)
    with pytest.raises(InvalidProblemError, match=words):
        described(layout=layout, **fields)


@pytest.mark.parametrize("op", OPS)
def test_tiles_are_cut_only_where_a_row_may_be_long(op):
    """A layout whose rows are alike is known to have no long one, and its CTAs claim no slices."""
    layout = random_layout(heads=1, rows=64, cols=64, block=64, density=0.2)
    known, unknown = (
        chosen(op=op, layout=one, n=512, element="bf16", packed=False).details
        for one in (layout, layout.shape)
    )
    assert "long panels" not in known
    assert "long panels are cut" in unknown


# The packed operand, on the host ------------------------------------------------------------------


def packed_on_host(layout: BlockSparseLayout, **fields: Any) -> tuple[BlockSparseMatmulPlan, PackedBlocks]:
    plan = BlockSparseMatmulPlan.select(described(layout=layout, **fields), device="host")
    one, element = layout.shape, plan.descriptor.element
    values = np.zeros((plan.descriptor.batch, one.blocks, one.block, one.block), element.dtype)
    return plan, plan.pack(layout, values)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", EDGES.values(), ids=EDGES)
def test_results_are_those_of_the_values(op, layout):
    plan = BlockSparseMatmulPlan.select(described(op=op, layout=layout, batch=2), device="host")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    got = check(plan, operands)
    other = plan.descriptor.model_copy(update={"packed": False, "longest_panel": 0})
    assert same_bits(got, check(BlockSparseMatmulPlan.select(other, device="host"), operands))


def test_kept_blocks_are_not_copied():
    layout = random_layout()
    plan = BlockSparseMatmulPlan.select(described(layout=layout), device="host")
    values = np.ones((1, layout.shape.blocks, 16, 16), np.float32)
    packed = plan.pack(layout, values)
    assert (packed.layout_id, plan.sku.layout) == ("blocks", "blocks")
    assert packed.buffers[0].address == values.ctypes.data
    assert packed.nbytes == values.nbytes + 4 * length(layout.shape)


def test_values_are_packed_where_the_descriptor_says_so():
    layout = random_layout()
    plan = BlockSparseMatmulPlan.select(described(layout=layout), device="host")
    with pytest.raises(InvalidProblemError, match=r"values: expected a tensor .*got NoneType"):
        plan.pack(layout)
    values = np.ones((1, layout.shape.blocks, 16, 16), np.float32)
    for wrong, words in (
        (values[:, 1:], "values: expected shape"),
        (values.astype(np.float16), "values: expected element f32, got f16"),
        (values.swapaxes(2, 3), "values: expected contiguous memory"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            plan.pack(layout, wrong)
    with pytest.raises(InvalidProblemError, match="layout: expected tables of"):
        plan.pack(random_layout(rows=7), values)
    other = BlockSparseMatmulPlan.select(described(layout=layout, packed=False), device="host")
    with pytest.raises(InvalidProblemError, match=r"values: expected None, .*, got ndarray"):
        other.pack(layout, values)
    with pytest.raises(InvalidProblemError, match="stream: expected None for a host plan"):
        other.pack(layout, stream="a stream")


def refusal(plan: BlockSparseMatmulPlan, operand: Any, layout: Any = None) -> str:
    desc = plan.descriptor
    made = {one.name: np.zeros(one.shape, one.element.dtype) for one in desc.operands()}
    args = BlockSparseMatmulArgs(layout=layout, **{**made, "a": operand})
    with pytest.raises(InvalidProblemError) as caught:
        plan.run(args)
    verdict = plan.can_implement(args)
    assert not verdict
    assert str(verdict.error) == str(caught.value)
    return str(caught.value)


def test_other_packed_operands_are_refused():
    layout = random_layout()
    plan, packed = packed_on_host(layout)
    assert "a: expected PackedBlocks of layout 'blocks', got ndarray; call plan.pack(layout, values)" in (
        refusal(plan, np.ones(3, np.float32))
    )
    assert "layout: expected None" in refusal(plan, packed, BlockSparseTables(layout))
    assert "a: expected element f32, got bf16" in refusal(plan, packed_on_host(layout, element="bf16")[1])
    assert "a: expected batch 1, got 2" in refusal(plan, packed_on_host(layout, batch=2)[1])
    assert "a: expected shape heads=" in refusal(plan, packed_on_host(random_layout(rows=7))[1])
    one = layout.shape
    dense = TensorView.of(np.zeros((1, one.heads, one.rows, one.cols), np.float32))
    dense = replace(packed, layout_id="dense_blocks", buffers=(dense,))
    assert "a: expected layout 'blocks', got 'dense_blocks'; call plan.pack(layout, values)" in (
        refusal(plan, dense)
    )
    elsewhere = Device("cuda", 0)
    views = [TensorView(64, v.shape, v.element, elsewhere, owner=v) for v in packed.buffers]
    assert "a: expected device host, got cuda:0" in (
        refusal(plan, replace(packed, device=elsewhere, buffers=tuple(views)))
    )


def test_a_packed_operand_fits_its_form():
    _, packed = packed_on_host(random_layout())
    values, tables = packed.buffers
    short = TensorView(tables.address, (3,), tables.element, tables.device, owner=tables.owner)
    with pytest.raises(BufferTooSmallError, match="buffers"):
        replace(packed, buffers=(values, short))
    for fields, words in (
        ({"buffers": (values,)}, "buffers: expected values, tables, got 1"),
        ({"buffers": [values, tables]}, "buffers: expected a tuple of TensorViews"),
        ({"layout_id": "other"}, "layout_id: expected blocks or dense_blocks, got 'other'"),
        ({"batch": -1}, "batch: expected an integer from 0"),
        ({"shape": 3}, "shape: expected a BlockSparseShape"),
        ({"device": Device("cuda", 0)}, "buffers: expected contiguous memory on cuda:0"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            replace(packed, **fields)


# On a GPU -----------------------------------------------------------------------------------------


def plan_of(form: str, **fields: Any) -> BlockSparseMatmulPlan:
    desc = described(**{"element": "bf16", **fields})
    return BlockSparseMatmulPlan.select(desc, device=0, preference={"prefer_backend": FORMS[form]})


@gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("sizes", [{}, {"n": 0}, {"batch": 0}, {"n": 1}, {"n": 63, "batch": 2}])
def test_every_form_gives_the_product(form, op, layout, sizes):
    rng = np.random.default_rng(5)
    for transposed in (False, True):
        plan = plan_of(form, op=op, layout=layout, trans_a=transposed, trans_b=transposed, **sizes)
        check(plan, random_operands(plan.descriptor, layout, rng))


@gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("epilogue", ["bias", "bias_gelu"])
def test_epilogues_of_packed_operands(form, element, epilogue):
    for block in (16, 128):
        layout = random_layout(rows=3, cols=4, block=block)
        for op in OPS:
            plan = plan_of(form, op=op, layout=layout, element=element, epilogue=epilogue, out_element="f32")
            check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


@gpu
@pytest.mark.parametrize("op", OPS)
def test_a_dense_copy_has_the_bits_of_inflating(op):
    layout = random_layout(seed=2, heads=1, rows=20, cols=24, block=32, density=0.5)
    plan = plan_of("dense_blocks", op=op, layout=layout, n=160)
    assert plan.explain().chosen == "packed_dense"
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(5))
    fields = plan.descriptor.model_dump() | {"layout": layout, "packed": False, "longest_panel": 0}
    inflating = BlockSparseMatmulPlan.select(
        BlockSparseMatmulDescriptor(**fields), device=0, preference={"prefer_backend": "inflate_cublas"}
    )
    assert same_bits(check(plan, operands), check(inflating, operands))


@gpu
def test_dense_copy_is_new_memory_and_kept_blocks_are_not():
    import cupy

    layout = random_layout(seed=2, heads=1, rows=20, cols=24, block=32, density=0.5)
    values = cupy.ones((1, layout.shape.blocks, 32, 32), np.float16)
    for form in FORMS:
        plan = plan_of(form, layout=layout, element="f16")
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        packed = plan.pack(layout, values, stream=stream)
        stream.synchronize()
        assert packed.layout_id == form
        shared = packed.buffers[0].address == values.data.ptr
        assert shared == (form == "blocks")
        if form == "dense_blocks":
            assert packed.nbytes == 2 * layout.shape.rows * layout.shape.cols
            dense = packed.buffers[0].array().get()
            assert np.array_equal(dense, layout.to_dense(values.get()))


@gpu
def test_forms_of_another_kernel_are_refused_on_a_gpu():
    import cupy

    layout = random_layout()
    values = cupy.ones((1, layout.shape.blocks, 16, 16), np.float16)
    x, y = (cupy.ones((1, layout.shape.heads, side, 24), np.float16) for side in (layout.shape.cols, 96))
    y = cupy.ones((1, layout.shape.heads, layout.shape.rows, 24), np.float16)
    plans = {form: plan_of(form, layout=layout, element="f16") for form in FORMS}
    for form, other in zip(FORMS, reversed(FORMS), strict=True):
        args = BlockSparseMatmulArgs(layout=None, a=plans[other].pack(layout, values), b=x, c=y)
        with pytest.raises(InvalidProblemError, match=f"expected layout '{form}', got '{other}'"):
            plans[form].run(args)


@gpu
@pytest.mark.parametrize("form", FORMS)
def test_launches_of_packed_operands_are_captured(form):
    import cupy

    layout = random_layout(seed=6, heads=2, rows=6, cols=8, block=64, density=0.4)
    plan = plan_of(form, layout=layout, n=63, epilogue="bias")
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(2))
    case = case_of(plan, Operands(layout, operands.arrays))
    want = {name: bits.copy() for name, bits in case.run().items()}
    bound = plan.bind(case.args, workspace=case.space)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    bound.launch(stream=stream)
    graph = stream.end_capture()
    for _ in range(3):
        case.poison()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert all(np.array_equal(case.fetch()[name], bits) for name, bits in want.items())
