"""SDD, DSD and DDS against float64: every operand form, element and epilogue, and layouts at their edges."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulArgs,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    InvalidProblemError,
)
from sparse24_plans.arithmetic.fma32 import fma_f32

from ..strategies import results_of
from ..support import check_each, same_bits
from .problems import Operands, case_of, random_operands, reference
from .sample_layouts import EDGES, layouts, random_layout

STRICT = {"require": {"bit_stable_across_hardware": True}}
OPS = ("sdd", "dsd", "dds")
ROWS = {"host_blas": None, "host_strict": STRICT}
every_row = pytest.mark.parametrize("row", ROWS)
every_op = pytest.mark.parametrize("op", OPS)


def plan_of(row: str, **fields) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(**{"n": 24, "batch": 2, "element": "f32", **fields})
    plan = BlockSparseMatmulPlan.select(desc, device="host", preference=ROWS[row])
    assert plan.explain().chosen == row
    return plan


def check(plan: BlockSparseMatmulPlan, operands: Operands) -> np.ndarray:
    """Within the guarantee; poison and guard bytes round every operand."""
    case = case_of(plan, operands)
    desc = plan.descriptor
    got = case.run()["c"].view(desc.out_element.dtype)
    exact, allowed = reference(plan, operands)["c"]
    assert got.shape == exact.shape
    assert (np.abs(got.astype(np.float64) - exact) <= allowed).all()
    return got


def random_check(row: str, layout: BlockSparseLayout, **fields) -> np.ndarray:
    plan = plan_of(row, layout=layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


# Results ------------------------------------------------------------------------------------------


@every_row
@every_op
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_every_operand_may_be_transposed(row, op, trans_a, trans_b):
    check_each(
        partial(random_check, row, random_layout(), op=op, trans_a=trans_a, trans_b=trans_b),
        ({"element": element} for element in ("f32", "f16", "bf16", "s8", "fp8_e4m3")),
    )


@every_row
@every_op
@pytest.mark.parametrize("layout", EDGES.values(), ids=EDGES)
def test_layouts_and_sizes_at_their_edges(row, op, layout):
    """Sums over nothing are zeros, and results are written wherever there are any."""
    sizes: list[dict[str, int]] = [{}, {"n": 0}, {"batch": 0}, {"n": 1, "batch": 1}]
    transposed: list[dict[str, bool]] = [{}, {"trans_a": True, "trans_b": True}]
    check_each(
        partial(random_check, row, layout, op=op),
        ({**size, **flags} for size, flags in itertools.product(sizes, transposed)),
    )


@every_row
@every_op
@pytest.mark.parametrize("block", [32, 64, 128])
def test_every_size_of_blocks(row, op, block):
    random_check(row, random_layout(heads=1, rows=2, cols=3, block=block), op=op, n=9, element="bf16")


@every_row
@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize("epilogue", ["bias", "bias_relu", "bias_gelu", "bias_silu", "bias_gelu_tanh"])
@pytest.mark.parametrize("element", ["f16", "s8"])
def test_epilogues(row, op, epilogue, element):
    for out in results_of(element):
        random_check(
            row, random_layout(), op=op, epilogue=epilogue, element=element, out_element=out, alpha=0.01
        )


@every_row
def test_a_row_without_blocks_is_the_epilogue_of_zero(row):
    layout = BlockSparseLayout([[[1, 1], [0, 0]]], 16)
    plan = plan_of(row, layout=layout, op="dsd", epilogue="bias_relu", batch=1)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    got = check(plan, operands)
    bias = np.maximum(operands["bias"][0, 16:], 0)
    assert np.array_equal(got[0, 0, 16:], np.repeat(bias[:, None], 24, axis=1))


@settings(max_examples=25)
@given(
    layout=layouts(4),
    op=st.sampled_from(OPS),
    transposed=st.tuples(st.booleans(), st.booleans()),
    element=st.sampled_from(["f32", "bf16", "s8"]),
    n=st.integers(0, 20),
    alpha=st.sampled_from([1.0, 0.0, -0.3]),
)
def test_any_product(layout, op, transposed, element, n, alpha):
    fields = {"trans_a": transposed[0], "trans_b": transposed[1], "element": element, "n": n, "alpha": alpha}
    random_check("host_blas", layout, op=op, **fields)


def test_sums_of_8_bit_integers_are_exact():
    layout = BlockSparseLayout(np.ones((1, 1, 40), bool), 128)
    ones = {"a": np.full((1, 40, 128, 128), -128, np.int8), "b": np.full((1, 1, 5120, 3), -128, np.int8)}
    for row in ROWS:
        plan = plan_of(row, layout=layout, op="dsd", element="s8", n=3, batch=1)
        assert (check(plan, Operands(layout, ones)) == 5120 * 2**14).all()


@every_row
@every_op
def test_cells_without_a_kept_block_are_not_read(row, op):
    layout = BlockSparseLayout([[[1, 0], [1, 0]]], 16)
    plan = plan_of(row, layout=layout, op=op, batch=1, n=16)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    if op == "sdd":
        operands["b"][:, :, :, 16:] = np.nan  # columns that are not kept
    elif op == "dsd":
        operands["b"][:, :, 16:] = np.inf
    else:
        layout = layout.transposed()
        operands = replace(operands, layout=layout)
        plan = plan_of(row, layout=layout, op=op, batch=1, n=16)
        operands["a"][:, :, :, 16:] = np.nan
    got = case_of(plan, operands).run()["c"].view(np.float32)
    assert np.isfinite(got).all()


# Bits ---------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("transposed", [False, True])
def test_strict_is_one_fma_a_kept_product_in_increasing_k(op, transposed):
    layout = random_layout(seed=2, heads=2, rows=3, cols=3)
    plan = plan_of("host_strict", layout=layout, op=op, n=7, trans_a=transposed, trans_b=transposed)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    got = case_of(plan, operands).run()["c"].view(np.float32)
    kept = np.kron(layout.bitmap, np.ones((16, 16), bool))
    a, b = operands["a"], operands["b"]
    used_a = used_b = None
    if op == "dsd":
        a, used_a = layout.to_dense(a), kept
    if op == "dds":
        b, used_b = layout.to_dense(b), kept
    if transposed:
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
        used_a, used_b = (one if one is None else one.swapaxes(-1, -2) for one in (used_a, used_b))
    acc = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for k in range(a.shape[-1]):
        added = fma_f32(a[..., k, None], b[..., k, None, :], acc)
        used = np.True_ if used_a is None else used_a[..., k, None]
        used = used if used_b is None else used_b[..., k, None, :]
        acc = np.where(used, added, acc)
    want = layout.values_of(np.where(kept, acc, 0)) if op == "sdd" else acc
    assert same_bits(got.copy(), np.ascontiguousarray(want))


@pytest.mark.parametrize(("element", "name"), [("bf16", "fma32_in_order"), ("s8", "exact_sum")])
def test_strict_names_its_arithmetic(element, name):
    plan = plan_of("host_strict", layout=random_layout(), op="dsd", element=element)
    assert plan.guarantee.arithmetic == name
    asked = {"require": {"arithmetic": name}}
    again = BlockSparseMatmulPlan.select(plan.descriptor, device="host", preference=asked)
    assert again.explain().chosen == "host_strict"


@every_op
def test_strict_results_depend_on_their_own_operands_alone(op):
    """Batch invariance: one batch, and for sparse operands one column of the dense one, alone."""
    layout = random_layout()
    plan = plan_of("host_strict", layout=layout, op=op, batch=3, element="bf16", n=24)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    whole = case_of(plan, operands).run()["c"]
    alone = operands.with_(a=operands["a"][1:2].copy(), b=operands["b"][1:2].copy())
    small = plan_of("host_strict", layout=layout, op=op, batch=1, element="bf16", n=24)
    assert np.array_equal(case_of(small, alone).run()["c"][0], whole[1])
    if op != "sdd":
        name, axis = ("b", 3) if op == "dsd" else ("a", 2)
        few = np.ascontiguousarray(np.take(operands[name], [20, 3], axis))
        narrow = plan_of("host_strict", layout=layout, op=op, batch=3, element="bf16", n=2)
        part = case_of(narrow, operands.with_(**{name: few})).run()["c"]
        assert np.array_equal(part, np.take(whole, [20, 3], axis))


# Refusals -----------------------------------------------------------------------------------------

GOOD = {"op": "dsd", "layout": random_layout(), "n": 8, "element": "bf16"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "ssd"}, "op: "),
        ({"n": -1}, "n: "),
        ({"n": 2**31}, "n: "),
        ({"batch": 2**31}, "batch: "),
        ({"layout": "dense"}, "layout: "),
        ({"layout": {**random_layout().shape.model_dump(), "block": 8}}, "block: expected one of 16, 32"),
        ({"element": "u8"}, "element: expected f32 or f16 or bf16 or s8 or fp8_e4m3, got u8"),
        ({"out_element": "f16"}, "out_element: expected bf16 or f32, got f16"),
        ({"bias_element": "f16"}, "bias_element: expected bf16 or f32, got f16"),
        ({"op": "sdd", "epilogue": "bias"}, "epilogue: expected identity for op sdd, got bias"),
        ({"alpha": 1e39}, "alpha: expected a value finite in float32"),
        ({"trans_a": 1}, "trans_a: "),
        ({"trans_a": np.zeros(2)}, "trans_a: "),
        ({"op": np.array(["dsd", "dds"])}, "op: "),
        ({"n": 2**31 - 1, "batch": 2**31 - 1}, "expected operands of fewer than"),
    ],
)
def test_wrong_fields(change, words):
    BlockSparseMatmulDescriptor(**GOOD)
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseMatmulDescriptor(**{**GOOD, **change})


def test_a_layout_stands_for_its_shape():
    layout = random_layout()
    desc = BlockSparseMatmulDescriptor(**GOOD)
    assert desc.layout == layout.shape
    of_shape = {**GOOD, "layout": layout.shape, "longest_panel": desc.longest_panel}
    assert desc == BlockSparseMatmulDescriptor(**of_shape)
    assert BlockSparseMatmulDescriptor.model_validate_json(desc.model_dump_json()) == desc
    assert BlockSparseMatmulPlan.select(desc, device="host").sku.op == "matmul_blocksparse_dsd"


def args_of(plan: BlockSparseMatmulPlan, layout: BlockSparseLayout) -> BlockSparseMatmulArgs:
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    return case_of(plan, operands).args


def test_tables_that_are_not_the_plans():
    layout = random_layout()
    plan = plan_of("host_blas", layout=layout, op="dsd")
    args = args_of(plan, layout)
    with pytest.raises(
        InvalidProblemError, match=r"layout: expected BlockSparseTables, got .*call plan\.pack"
    ):
        plan.run(replace(args, layout=layout))
    with pytest.raises(InvalidProblemError, match="layout: expected BlockSparseTables, got NoneType"):
        plan.run(replace(args, layout=None))
    other = random_layout(block=32)
    with pytest.raises(InvalidProblemError, match=r"layout: expected tables of .*block=16.*got .*block=32"):
        plan.pack(other)
    foreign = plan_of("host_blas", layout=other, op="dsd").pack(other)
    with pytest.raises(InvalidProblemError, match=r"layout: expected tables of .*block=16.*got .*block=32"):
        plan.run(replace(args, layout=foreign))


@every_op
def test_sizes_that_disagree(op):
    """A K that doesn't fit is named, before anything is written."""
    layout = random_layout()
    plan = plan_of("host_blas", layout=layout, op=op)
    args = args_of(plan, layout)
    for name in ("a", "b", "c"):
        view = getattr(args, name)
        wrong = np.zeros((*view.shape[:-2], view.shape[-2] + 16, view.shape[-1]), np.float32)
        with pytest.raises(InvalidProblemError, match=rf"{name}: expected shape \[2, .*\], got \[2, "):
            plan.run(replace(args, **{name: wrong}))
    strided = np.zeros((2, *args.b.shape[1:-1], 2 * args.b.shape[-1]), np.float32)[..., ::2]
    with pytest.raises(InvalidProblemError, match="b: expected contiguous memory"):
        plan.run(replace(args, b=strided))
