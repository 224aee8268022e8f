"""The GPU's kernels of products: every form of operand against float64, edges of tiles, bits, masks."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    UnsupportedError,
)
from sparse24_plans.blocksparse.schedules import blocks_wgmma as schedules
from sparse24_plans.blocksparse.schedules import blocks_wgmma_cuts as cuts
from sparse24_plans.blocksparse.schedules.predicted_times import sampled_loses
from sparse24_plans.plan.schedule_choice import constants

from ..sample_devices import A100, H200
from ..strategies import results_of
from ..support import same_bits
from . import products_on_gpu as shared
from .problems import Operands, case_of, random_operands
from .products_on_gpu import TRANSPOSITIONS, gpu, random_check
from .sample_layouts import random_layout
from .test_products import check

OPS = ("sdd", "dsd", "dds")
ROWS = {
    "blocks_wgmma": ("f16", "bf16"),
    "blocks_strict": ("f32", "f16", "bf16", "s8", "fp8_e4m3"),
    "inflate_cublas": ("f32", "f16", "bf16"),
}
OF_8_BITS = ("s8", "fp8_e4m3")
EXACT = {"require": {"bit_stable_across_hardware": True}}
K_LAST = {"trans_a": False, "trans_b": True}
"""How 8-bit elements lie for the tensor cores."""
BLOCKS = (16, 32, 64, 128)


def plan_of(row: str, **fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(**{"n": 72, "batch": 2, "element": "bf16", **fields})
    plan = BlockSparseMatmulPlan.select(desc, device=0, preference={"prefer_backend": row})
    assert plan.explain().chosen in (row, f"{row}_any")
    return plan


wgmma = partial(plan_of, "blocks_wgmma")


# Selection, without a GPU -------------------------------------------------------------------------

SHAPE = BlockSparseShape(heads=1, rows=4096, cols=4096, block=64, blocks=800)
chosen = partial(shared.chosen, layout=SHAPE)


def test_what_is_chosen():
    assert chosen() == "blocks_wgmma"
    assert chosen(device=A100) == "inflate_cublas"
    assert chosen(element="f32") == "blocks_strict"
    most = SHAPE.model_copy(update={"blocks": 2800})
    assert chosen(element="f32", layout=most) == "inflate_cublas"
    assert chosen(element="f32", layout=most, preference=EXACT) == "blocks_strict_any"
    for op in OPS:
        assert chosen(op=op, n=1) == ("sdd_mma" if op == "sdd" else "blocks_mma")
        for n in (63, 4097):
            assert chosen(op=op, n=n) == "blocks_wgmma"
            wanted = "blocks_wgmma" if op == "sdd" else "blocks_wgmma_any"  # with the same slices for every n
            assert chosen(op=op, n=n, preference={"require": {"batch_invariant": True}}) == wanted
    assert chosen(n=4097, preference={"max_workspace_bytes": 1 << 20}) == "blocks_strict_any"
    assert chosen(op="sdd") == "blocks_wgmma"
    small = SHAPE.model_copy(update={"block": 32})
    assert chosen(op="sdd", layout=small) == "blocks_wgmma"
    half = SHAPE.model_copy(update={"block": 16, "blocks": 1 << 15})
    assert chosen(op="sdd", layout=half) == "inflate_cublas"
    assert chosen(preference={"allow_sm90a": False}) == "inflate_cublas"
    assert chosen(preference={"require": {"batch_invariant": True}}) == "blocks_wgmma_any"
    skips = {"require": {"nonfinite": "skips_pruned"}}
    assert chosen(preference=skips) == "blocks_wgmma"
    assert chosen(layout=SHAPE.model_copy(update={"block": 32}), preference=skips) == "blocks_strict_any"
    many = SHAPE.model_copy(update={"block": 16, "blocks": 6554})  # a tenth
    assert chosen(layout=many) == "blocks_wgmma"
    assert chosen(layout=many, n=256) == "blocks_wgmma"
    many = many.model_copy(update={"blocks": 65536})  # all
    assert chosen(layout=many, n=4096, **K_LAST) == "inflate_cublas"
    every = {"preference": {"require": {"batch_invariant": True}}, **K_LAST}
    assert chosen(layout=many, n=4096, **every) == "blocks_wgmma_any"
    assert chosen(device=A100, preference={"max_workspace_bytes": 1 << 20}) == "blocks_strict_any"


@pytest.mark.parametrize("block", [16, 32])
def test_sdd_of_small_blocks_is_inflated_if_predicted_faster(block, monkeypatch):
    layout = SHAPE.model_copy(update={"block": block, "blocks": (4096 // block) ** 2 // 5})
    model = constants(f"sampled_blocks_{block}")
    for launch, wanted in ((-1e6, "blocks_wgmma"), (1e6, "inflate_cublas")):
        monkeypatch.setitem(model, "launch", launch)
        sampled_loses.cache_clear()
        assert chosen(op="sdd", layout=layout) == wanted
    sampled_loses.cache_clear()


@pytest.mark.parametrize("block", [64, 128])
def test_an_sdd_of_large_blocks_is_never_inflated(block):
    """Even where all blocks are kept: it is a dense product then, without a copy of its results."""
    everything = SHAPE.model_copy(update={"block": block, "blocks": (4096 // block) ** 2})
    assert chosen(op="sdd", layout=everything) == "blocks_wgmma"


@pytest.mark.parametrize("element", OF_8_BITS)
@pytest.mark.parametrize("op", OPS)
def test_what_is_chosen_for_8_bits(element, op):
    assert chosen(op=op, element=element, **K_LAST) == "blocks_wgmma"
    none = {"max_workspace_bytes": 0}
    assert chosen(op=op, element=element, preference=none, **K_LAST) == "blocks_wgmma"
    for transposed in TRANSPOSITIONS:
        fields = {"op": op, "element": element, "trans_a": transposed[0], "trans_b": transposed[1]}
        assert chosen(**fields) == "blocks_wgmma"
        if fields["trans_a"] or not fields["trans_b"]:  # it has something to transpose
            assert chosen(preference=none, **fields) == "blocks_strict_any"
    assert chosen(op=op, element=element, device=A100, **K_LAST) == "blocks_strict_any"
    small = SHAPE.model_copy(update={"block": 32})
    assert chosen(op=op, element=element, layout=small, **K_LAST) == "blocks_wgmma"
    small = SHAPE.model_copy(update={"block": 16})
    wanted = "blocks_wgmma" if op == "sdd" else "blocks_strict_any"
    assert chosen(op=op, element=element, layout=small, **K_LAST) == wanted
    wanted = "blocks_wgmma" if element == "s8" else "blocks_strict_any"
    assert chosen(op=op, element=element, preference=EXACT, **K_LAST) == wanted


def test_sums_of_s8_that_may_exceed_int32():
    wide = BlockSparseShape(heads=1, rows=128, cols=1 << 17, block=128, blocks=3)
    assert chosen(element="s8", layout=wide, n=16, **K_LAST) is None
    wide = wide.model_copy(update={"cols": (1 << 17) - 128})
    assert chosen(element="s8", layout=wide, n=16, **K_LAST) == "blocks_wgmma"


def test_refusals_say_why():
    desc = BlockSparseMatmulDescriptor(op="sdd", layout=SHAPE, n=4097, element="s8", trans_a=True)
    with pytest.raises(UnsupportedError, match=r"needs rows of a in multiples of 16 bytes, got n = 4097"):
        BlockSparseMatmulPlan.compile(desc, device=H200, preference={"prefer_backend": "blocks_wgmma"})
    small = SHAPE.model_copy(update={"block": 16})
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=small, n=4096, element="s8")
    with pytest.raises(UnsupportedError, match=r"serves s8 with blocks of 32 and more, not 16"):
        BlockSparseMatmulPlan.compile(desc, device=H200, preference={"prefer_backend": "blocks_wgmma"})


# Results ------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
def test_every_operand_may_be_transposed(row, op, transposed, block):
    elements = ROWS[row]
    if row == "blocks_wgmma" and (op == "sdd" or block >= 32):
        elements += OF_8_BITS
    for element in elements:
        layout = random_layout(rows=5, cols=4, block=block)
        fields = {"n": 80, "trans_a": transposed[0], "trans_b": transposed[1], "element": element}
        random_check(partial(plan_of, row), layout, op=op, **fields)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
@shared.every_edge
@shared.every_size
def test_layouts_and_sizes_at_their_edges(row, op, name, sizes):
    for block in BLOCKS:
        shared.layouts_and_sizes_at_their_edges(partial(plan_of, row), op, name, block, sizes)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_edge_of_tiles
def test_edges_of_tiles(op, n):
    for block in BLOCKS:
        shared.edges_of_tiles(wgmma, op, n, block)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@shared.every_density
def test_block_rows_of_many_bit_words(block, density):
    for op in OPS:
        shared.block_rows_of_many_bit_words(wgmma, op, block, density)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_any_n_with_every_result(op):
    shared.any_n_with_every_result(wgmma, op)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", ["dsd", "dds"])
@shared.every_epilogue
def test_every_epilogue_is_right(row, op, epilogue):
    for element in ROWS[row]:
        shared.epilogues(partial(plan_of, row), op, epilogue, element)


@gpu
@pytest.mark.parametrize("element", OF_8_BITS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_8_bits_on_tensor_cores(element, block, op):
    """Every result, epilogue and edge of a tile."""
    if block < 32 and op != "sdd":
        return
    layout = random_layout(seed=block, heads=1, rows=9, cols=7, block=block)
    fields = {"op": op, "element": element, "batch": 1, **K_LAST}
    for out in results_of(element):
        for alpha in (0.01,) if out == "f16" else (1.0, 0.01):  # which large sums overflow
            random_check(wgmma, layout, n=96, out_element=out, alpha=alpha, **fields)
    for epilogue in () if op == "sdd" else shared.WITH_BIAS:
        random_check(wgmma, layout, n=96, epilogue=epilogue, alpha=0.01, **fields)
    for n in (1, 7, 16, 63, 64, 80, 128, 144, 256, 272, 333, 528, 1040):
        random_check(wgmma, layout, n=n, **fields)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ["f16", "bf16", *OF_8_BITS])
def test_rows_of_c_may_begin_anywhere(block, element):
    """Every result type is written in as many steps as a tile has, at each place of a sector."""
    if block < 32 and element in OF_8_BITS:
        return
    layout = random_layout(seed=block, heads=2, rows=192 // block + 1, cols=5, block=block)
    fields = {"op": "dsd", "element": element, **(K_LAST if element in OF_8_BITS else {})}
    for out, n in itertools.product(results_of(element), (1, 2, 5, 15, 34, 65, 98, 127, 190, 227, 257, 391)):
        random_check(wgmma, layout, n=n, out_element=out, alpha=0.01, **fields)
    random_check(wgmma, layout, n=211, epilogue="bias_gelu", alpha=0.01, **fields)


@gpu
@pytest.mark.parametrize("element", ROWS["blocks_strict"])
@pytest.mark.parametrize("op", OPS)
def test_the_strict_kernel_has_the_bits_of_the_oracle(op, element):
    """Operands of any size hold subnormals, signed zeros, Inf and NaN; s8 on tensor cores too."""
    rng = np.random.default_rng(7)
    endings = itertools.cycle([(37, "identity"), (160, "bias_silu"), (7, "bias_gelu")])
    for (block, transposed), (n, epilogue) in zip(
        itertools.product(BLOCKS, TRANSPOSITIONS), endings, strict=False
    ):
        layout = random_layout(seed=block, rows=3, cols=4, block=block)
        fields = {"op": op, "layout": layout, "n": n, "element": element, "alpha": 0.75}
        fields |= {"trans_a": transposed[0], "trans_b": transposed[1]}
        fields["epilogue"] = "identity" if op == "sdd" else epilogue
        plans = [
            BlockSparseMatmulPlan.select(
                BlockSparseMatmulDescriptor(**fields), device=device, preference={**EXACT, **preference}
            )
            for device, preference in (("host", {}), (0, {"prefer_backend": "blocks_strict"}))
        ]
        assert plans[0].guarantee == plans[1].guarantee
        operands = _special(random_operands(plans[0].descriptor, layout, rng), rng)
        found = [case_of(plan, operands).run()["c"] for plan in plans]
        assert np.array_equal(*found)


def _special(operands: Operands, rng: np.random.Generator) -> Operands:
    """The operands with values that rounding and selecting could treat differently."""
    made = {}
    for name in "ab":
        if name in operands.arrays:
            one = operands[name].copy()
            if one.dtype != np.int8:
                wide = one.astype(np.float32)
                picked = rng.random(one.shape)
                wide[picked < 0.1] *= 2.0**-9 if one.itemsize == 1 else 2.0**-20
                wide[picked < 0.05] = -0.0
                wide[picked > 0.9995] = np.nan
                one = wide.astype(one.dtype)
            made[name] = one
    return operands.with_(**made)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_s8_of_extremes(op):
    """The largest sums: every product is 2^14."""
    layout = random_layout(seed=2, heads=1, rows=3, cols=40, block=64, density=0.9)
    for row, transposed in (("blocks_wgmma", (False, True)), ("blocks_strict", (True, False))):
        plan = plan_of(
            row, layout=layout, op=op, n=512, element="s8", trans_a=transposed[0], trans_b=transposed[1]
        )
        operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
        operands = operands.with_(**{name: np.full_like(operands[name], -128) for name in "ab"})
        check(plan, operands)


@gpu
@pytest.mark.parametrize("row", ROWS)
def test_a_wide_sdd(row):
    fields = {"element": "f16", "out_element": "f32", "alpha": -0.5}
    random_check(partial(plan_of, row), random_layout(block=128), op="sdd", n=1000, **fields)


def results_by_schedule(
    op: str, layout: BlockSparseLayout, transposed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> list[np.ndarray]:
    """Results of one product with each schedule that the kernel takes, checked.

    It is batch invariant, because whether panels are cut may depend on the schedule otherwise.
    """
    monkeypatch.setattr(cuts.Cut, "narrowed", lambda cut, desc: cut)
    fields = {"op": op, "layout": layout, "n": 200, "trans_a": transposed[0], "trans_b": transposed[1]}
    desc, results = BlockSparseMatmulDescriptor(**fields, batch=2, element="bf16"), []
    tried = schedules.schedules_by_density(desc) or schedules.tiles_of_large_blocks(desc)
    for one in tried if op == "sdd" else [*tried, cuts.NARROW]:
        monkeypatch.setattr(schedules.BlocksWgmmaSchedule, "of", lambda *_, one=one: one)
        spare = (1 << 30) + len(results)  # of its own: plans are cached
        wanted = {"prefer_backend": "blocks_wgmma", "max_workspace_bytes": spare}
        wanted["require"] = {"batch_invariant": True}
        plan = BlockSparseMatmulPlan.select(desc, device=0, preference=wanted)
        assert plan.explain().details.startswith("up to ") == (op == "sdd")
        assert f"{one.rows} rows x {one.tokens} tokens on" in plan.explain().details
        assert f"clusters of {one.cluster_n}, {one.stages} stages" in plan.explain().details
        operands = random_operands(plan.descriptor, layout, np.random.default_rng(layout.shape.block))
        results.append(check(plan, operands))
    return results


@gpu
@pytest.mark.parametrize("transposed", TRANSPOSITIONS)
@pytest.mark.parametrize("block", BLOCKS)
def test_bits_of_an_sdd_do_not_depend_on_its_schedule(block, transposed, monkeypatch):
    """Panels keep no, one or all block columns, in one or several work tiles; the last one may be short."""
    layout = random_layout(
        seed=block, heads=2, rows=528 // block, cols=1040 // block, block=block, density=0.3
    )
    kept, lines = layout.bitmap.copy(), max(64 // block, 1)
    kept[0, :lines], kept[0, lines : 2 * lines] = False, True
    kept[1, :lines], kept[1, :lines, -1:] = False, True
    layout = BlockSparseLayout(kept, block)
    first, *others = results_by_schedule("sdd", layout, transposed, monkeypatch)
    assert len(others) == 5
    assert all(same_bits(first, one) for one in others)


@gpu
@pytest.mark.parametrize("transposed", TRANSPOSITIONS)
def test_schedules_change_no_bits_of_sdd_with_many_panels(transposed, monkeypatch):
    """A warp's lanes search more panels than it has lanes for those with a further work tile; many tie."""
    rng, panels, lines = np.random.default_rng(8), 41, 161
    kept = np.zeros((2, lines, 65), bool)  # the last panel has one block row
    columns_of_panels = np.resize([65, 0, 33, 32, 32, 17, 16, 16, 9, 8, 8, 1], (2, panels))
    for (head, panel), columns in np.ndenumerate(columns_of_panels):
        rows = rng.integers(4 * panel, min(4 * panel + 4, lines), columns)
        kept[head, rows, rng.permutation(65)[:columns]] = True
    first, *others = results_by_schedule("sdd", BlockSparseLayout(kept, 16), transposed, monkeypatch)
    assert len(others) == 5
    assert all(same_bits(first, one) for one in others)


@gpu
@pytest.mark.parametrize("transposed", TRANSPOSITIONS)
@pytest.mark.parametrize(("block", "schedule_count"), [(16, 6), (32, 6), (64, 4)])
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_bits_do_not_depend_on_the_schedule(op, block, schedule_count, transposed, monkeypatch):
    """Row panels keep no, one or all block columns, some in their second half alone; one panel is short."""
    lines, half = 128 // block, 64 // block
    layout = random_layout(
        seed=block, heads=2, rows=672 // block, cols=1040 // block, block=block, density=0.3
    )
    kept = layout.bitmap.copy()
    kept[0, :lines], kept[0, lines : 2 * lines] = False, True
    kept[0, 2 * lines : 2 * lines + half] = False
    kept[1, :lines], kept[1, half:lines, -1:] = False, True
    layout = BlockSparseLayout(kept, block)
    if (op == "dds") != transposed[op == "dds"]:  # panels are columns of the sparse matrix as it is stored
        layout = layout.transposed()
    first, *others = results_by_schedule(op, layout, transposed, monkeypatch)
    assert 1 + len(others) == schedule_count
    assert all(same_bits(first, one) for one in others)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_cells_without_a_kept_block_are_not_read(op, block):
    worst = [(np.s_[block:], np.inf if op == "dsd" else np.nan)]
    shared.cells_without_a_kept_partner_are_not_read(wgmma, op, block, worst)


@gpu
def test_an_empty_block_row_next_to_one_with_infinities():
    """Small blocks of a tile share steps, where the empty row has zeros."""
    for block in BLOCKS:
        shared.an_empty_block_row_next_to_one_with_infinities(wgmma, block)


# Bits ---------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_bits_do_not_depend_on_neighbours(op, block):
    shared.bits_do_not_depend_on_neighbours(wgmma, op, block)


@gpu
@pytest.mark.parametrize(("op", "trans_b"), [("dds", False), ("dds", True), ("dsd", True), ("sdd", False)])
def test_bits_do_not_depend_on_transposing_pre_passes(op, trans_b):
    layout = random_layout(seed=5, heads=1, rows=128, cols=128, block=16, density=0.1)
    fields = {"op": op, "layout": layout, "n": 2048, "element": "bf16", "trans_b": trans_b}
    plans = [
        BlockSparseMatmulPlan.select(
            BlockSparseMatmulDescriptor(**fields),
            device=0,
            preference={"prefer_backend": "blocks_wgmma", "max_workspace_bytes": most},
        )
        for most in (None, 0)
    ]
    assert ["transposed first" in plan.explain().details for plan in plans] == [True, False]
    assert [plan.workspace_size() >= 2 * 2048**2 for plan in plans] == [True, False]
    operands = random_operands(plans[0].descriptor, layout, np.random.default_rng(1))
    first, second = (check(plan, operands) for plan in plans)
    assert same_bits(first, second)  # no panel of this layout is so long that it is cut


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
def test_bits_of_another_run(row, op):
    shared.bits_of_another_run(partial(plan_of, row), op)


# Tables -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
def test_another_mask_reaches_what_was_captured(row, op):
    shared.another_mask_reaches_what_was_captured(partial(plan_of, row), op)


@gpu
def test_tables_are_of_their_device():
    import copy
    import pickle

    layout = random_layout(block=64)
    tables = wgmma(layout=layout, op="dsd").pack(layout)
    assert str(tables.device) == "cuda:0"
    for other in (tables, copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert np.array_equal(other.view.array().get(), np.concatenate(other.lookup))
        assert (other is tables) == (other.view.address == tables.view.address)


# Places -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_places_beyond_2_to_the_32_bytes(op):
    """C and the dense operand exceed 2^32 bytes; the last rows are checked, of few blocks."""
    import cupy

    blocks, n = 520, 33_000 // 8 * 8
    kept = np.zeros((1, blocks, blocks), bool)
    kept[0, -1, -1] = kept[0, 0, 1] = kept[0, -2, 3] = True
    layout = BlockSparseLayout(kept, 128)
    plan = wgmma(layout=layout, op=op, batch=1, n=n, element="f16")
    rows, shapes = blocks * 128, {one.name: one.shape for one in plan.descriptor.operands()}
    sparse, dense = ("a", "b") if op == "dsd" else ("b", "a")
    values = (
        cupy.random.default_rng(0).standard_normal(shapes[sparse], dtype=cupy.float32).astype(cupy.float16)
    )
    matrix = cupy.zeros(shapes[dense], cupy.float16)
    c = cupy.full(shapes["c"], cupy.nan, cupy.float16)
    edge = (slice(0, 1), slice(0, 1), slice(rows - 128, rows), slice(n - 64, n))
    edge = edge if op == "dsd" else (*edge[:2], edge[3], edge[2])
    part = cupy.random.default_rng(1).standard_normal(matrix[edge].shape, dtype=cupy.float32)
    matrix[edge] = part.astype(cupy.float16)
    plan.run(
        plan.args_type(plan.descriptor)(layout=plan.pack(layout), c=c, **{sparse: values, dense: matrix})
    )
    last = values[0, 2].astype(cupy.float64)
    met = matrix[edge][0, 0].astype(cupy.float64)
    exact = last @ met if op == "dsd" else met @ last
    assert cupy.abs(c[edge][0, 0].astype(cupy.float64) - exact).max() < 0.1
    assert not c[:, :, : c.shape[2] // 2].any()  # also no NaN is left
