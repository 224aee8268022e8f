"""The GPU's kernels of products: every form of operand against float64, edges of tiles, bits, masks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    DeviceProperties,
    UnsupportedError,
    explain,
)

from ..strategies import results_of
from ..support import same_bits
from .layouts import EDGES, random_layout
from .problems import Operands, case_of, random_operands
from .test_products import check

gpu = pytest.mark.gpu
H200 = DeviceProperties(
    kind="cuda", name="NVIDIA H200", compute_capability=(9, 0), multiprocessors=132, cublaslt="130000"
)
A100 = H200.model_copy(update={"name": "NVIDIA A100", "compute_capability": (8, 0), "multiprocessors": 108})
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
TURNS = [(False, False), (False, True), (True, False), (True, True)]
BLOCKS = (16, 32, 64, 128)
EDGES_OF_TILES = (8, 56, 64, 72, 128, 136, 248, 256, 264, 520, 1040)
"""n: multiples of 8, round the tokens of every tile."""


def plan_of(row: str, **fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(**{"n": 72, "batch": 2, "element": "bf16", **fields})
    plan = BlockSparseMatmulPlan.select(desc, device=0, preference={"prefer_backend": row})
    assert plan.explain().chosen in (row, f"{row}_any")
    return plan


def random_check(row: str, layout: BlockSparseLayout, **fields: Any) -> np.ndarray:
    plan = plan_of(row, layout=layout, **fields)
    return check(plan, random_operands(plan.descriptor, layout, np.random.default_rng(5)))


# Selection, without a GPU -------------------------------------------------------------------------

SHAPE = BlockSparseShape(heads=1, rows=4096, cols=4096, block=64, blocks=800)


def explained(device: DeviceProperties = H200, preference: Any = None, **fields: Any) -> str | None:
    desc = BlockSparseMatmulDescriptor(
        **{"op": "dsd", "layout": SHAPE, "n": 4096, "element": "bf16", **fields}
    )
    return explain(desc, preference=preference, device=device).chosen


def test_what_is_chosen():
    assert explained() == "blocks_wgmma"
    assert explained(device=A100) == "inflate_cublas"
    assert explained(element="f32") == "blocks_strict"
    most = SHAPE.model_copy(update={"blocks": 2800})
    assert explained(element="f32", layout=most) == "inflate_cublas"
    assert explained(element="f32", layout=most, preference=EXACT) == "blocks_strict_any"
    assert explained(n=4097) == "inflate_cublas"  # rows that the copy engine can't take
    assert explained(op="dds", n=4097) == "blocks_wgmma"
    assert explained(op="sdd") == "blocks_wgmma"
    small = SHAPE.model_copy(update={"block": 32})
    assert explained(op="sdd", layout=small) == "blocks_wgmma"
    half = small.model_copy(update={"blocks": 8192})
    assert explained(op="sdd", layout=half) == "inflate_cublas"
    assert explained(preference={"allow_sm90a": False}) == "inflate_cublas"
    assert explained(preference={"require": {"batch_invariant": True}}) == "blocks_wgmma"
    skips = {"require": {"nonfinite": "skips_pruned"}}
    assert explained(preference=skips) == "blocks_wgmma"
    assert explained(layout=SHAPE.model_copy(update={"block": 32}), preference=skips) == "blocks_strict_any"
    many = SHAPE.model_copy(update={"block": 16, "blocks": 6554})  # a tenth
    assert explained(layout=many) == "blocks_wgmma"
    assert explained(layout=many, n=256) == "blocks_wgmma"
    many = many.model_copy(update={"blocks": 32768})  # a half
    assert explained(layout=many, n=256) == "blocks_wgmma"
    assert explained(layout=many) == "inflate_cublas"
    assert explained(layout=many, preference={"require": {"batch_invariant": True}}) == "blocks_wgmma_any"
    assert explained(device=A100, preference={"max_workspace_bytes": 1 << 20}) == "blocks_strict_any"


@pytest.mark.parametrize("element", OF_8_BITS)
@pytest.mark.parametrize("op", OPS)
def test_what_is_chosen_for_8_bits(element, op):
    assert explained(op=op, element=element, **K_LAST) == "blocks_wgmma"
    none = {"max_workspace_bytes": 0}
    assert explained(op=op, element=element, preference=none, **K_LAST) == "blocks_wgmma"
    for turned in TURNS:
        fields = {"op": op, "element": element, "trans_a": turned[0], "trans_b": turned[1]}
        assert explained(**fields) == "blocks_wgmma"
        if fields["trans_a"] or not fields["trans_b"]:  # it has something to transpose
            assert explained(preference=none, **fields) == "blocks_strict_any"
    assert explained(op=op, element=element, device=A100, **K_LAST) == "blocks_strict_any"
    small = SHAPE.model_copy(update={"block": 32})
    assert explained(op=op, element=element, layout=small, **K_LAST) == "blocks_wgmma"
    small = SHAPE.model_copy(update={"block": 16})
    chosen = "blocks_wgmma" if op == "sdd" else "blocks_strict_any"
    assert explained(op=op, element=element, layout=small, **K_LAST) == chosen
    chosen = "blocks_wgmma" if element == "s8" else "blocks_strict_any"
    assert explained(op=op, element=element, preference=EXACT, **K_LAST) == chosen


def test_sums_of_s8_that_may_exceed_int32():
    wide = BlockSparseShape(heads=1, rows=128, cols=1 << 17, block=128, blocks=3)
    assert explained(element="s8", layout=wide, n=16, **K_LAST) is None
    wide = wide.model_copy(update={"cols": (1 << 17) - 128})
    assert explained(element="s8", layout=wide, n=16, **K_LAST) == "blocks_wgmma"


def test_why_not():
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=SHAPE, n=4097, element="bf16")
    with pytest.raises(UnsupportedError, match=r"needs rows of b in multiples of 16 bytes, got n = 4097"):
        BlockSparseMatmulPlan.compile(desc, device=H200, preference={"prefer_backend": "blocks_wgmma"})
    small = SHAPE.model_copy(update={"block": 16})
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=small, n=4096, element="s8")
    with pytest.raises(UnsupportedError, match=r"serves s8 with blocks of 32 and more, not 16"):
        BlockSparseMatmulPlan.compile(desc, device=H200, preference={"prefer_backend": "blocks_wgmma"})


# What is computed ---------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_operand_may_be_transposed(row, op, turned, block):
    elements = ROWS[row]
    if row == "blocks_wgmma" and (op == "sdd" or block >= 32):
        elements += OF_8_BITS
    for element in elements:
        layout = random_layout(rows=5, cols=4, block=block)
        fields = {"n": 80, "trans_a": turned[0], "trans_b": turned[1], "element": element}
        random_check(row, layout, op=op, **fields)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("sizes", [{}, {"n": 0}, {"batch": 0}, {"n": 8, "batch": 1}])
def test_layouts_and_sizes_at_their_edges(row, op, name, sizes):
    """Sums over nothing are zeros, and results are written wherever there are any."""
    for block in BLOCKS:
        layout = BlockSparseLayout(EDGES[name].bitmap, block)
        random_check(row, layout, op=op, **sizes)
        random_check(row, layout, op=op, trans_a=True, trans_b=True, **sizes)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", EDGES_OF_TILES)
def test_edges_of_tiles(op, n):
    for block in BLOCKS:
        layout = random_layout(seed=n, heads=1, rows=9, cols=7, block=block)
        for turned in (False, True):
            random_check("blocks_wgmma", layout, op=op, n=n, trans_b=turned, batch=1)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("density", [0.03, 0.3, 1.0])
def test_lines_of_many_words(block, density):
    """More columns of blocks than a word of the tables has bits, and lines of very different lengths."""
    layout = random_layout(seed=1, heads=1, rows=11, cols=75, block=block, density=density)
    kept = layout.bitmap.copy()
    kept[:, 3], kept[:, 4, 5:], kept[:, 7] = True, False, False
    for op in OPS:
        random_check("blocks_wgmma", BlockSparseLayout(kept, block), op=op, n=40, batch=1)


@gpu
def test_any_n_for_dds():
    for n in (1, 7, 65, 333):
        random_check("blocks_wgmma", random_layout(block=64), op="dds", n=n)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize("epilogue", ["bias", "bias_relu", "bias_gelu", "bias_silu"])
def test_epilogues(row, op, epilogue):
    for element in ROWS[row]:
        for out in results_of(element):
            layout = random_layout(rows=3, cols=4, block=64)
            fields = {"element": element, "out_element": out, "alpha": 0.01 if element == "s8" else 0.25}
            random_check(row, layout, op=op, epilogue=epilogue, **fields)


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
            random_check("blocks_wgmma", layout, n=96, out_element=out, alpha=alpha, **fields)
    for epilogue in () if op == "sdd" else ("bias", "bias_relu", "bias_gelu", "bias_silu"):
        random_check("blocks_wgmma", layout, n=96, epilogue=epilogue, alpha=0.01, **fields)
    for n in (16, 64, 80, 128, 144, 256, 272, 528, 1040):
        random_check("blocks_wgmma", layout, n=n, **fields)


@gpu
@pytest.mark.parametrize("element", ROWS["blocks_strict"])
@pytest.mark.parametrize("op", OPS)
def test_the_strict_kernel_has_the_bits_of_the_oracle(op, element):
    """Of any size, subnormals, signed zeros, Inf and NaN among the operands; s8 on tensor cores too."""
    rng = np.random.default_rng(7)
    endings = itertools.cycle([(37, "identity"), (160, "bias_silu"), (7, "bias_gelu")])
    for (block, turned), (n, epilogue) in zip(itertools.product(BLOCKS, TURNS), endings, strict=False):
        layout = random_layout(seed=block, rows=3, cols=4, block=block)
        fields = {"op": op, "layout": layout, "n": n, "element": element, "alpha": 0.75}
        fields |= {"trans_a": turned[0], "trans_b": turned[1]}
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
    """With what rounding and selecting could treat otherwise."""
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
    for row, turned in (("blocks_wgmma", (False, True)), ("blocks_strict", (True, False))):
        plan = plan_of(row, layout=layout, op=op, n=512, element="s8", trans_a=turned[0], trans_b=turned[1])
        operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
        operands = operands.with_(**{name: np.full_like(operands[name], -128) for name in "ab"})
        check(plan, operands)


@gpu
@pytest.mark.parametrize("row", ROWS)
def test_a_wide_sdd(row):
    random_check(
        row, random_layout(block=128), op="sdd", element="f16", out_element="f32", alpha=-0.5, n=1000
    )


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_what_meets_no_kept_block_is_not_read(op, block):
    layout = BlockSparseLayout([[[1, 0], [1, 0]]], block)
    layout = layout if op == "dsd" else layout.transposed()
    plan = plan_of("blocks_wgmma", layout=layout, op=op, batch=1, n=16)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    if op == "dsd":
        operands["b"][:, :, block:] = np.inf
    else:
        operands["a"][:, :, :, block:] = np.nan
    got = case_of(plan, operands).run()["c"].view(plan.descriptor.out_element.dtype)
    assert np.isfinite(got.astype(np.float32)).all()


@gpu
def test_a_line_without_a_block_beside_one_with_infinities():
    """Small blocks of a tile share steps: what one line keeps must not reach another that lacks it."""
    for block in BLOCKS:
        kept = np.zeros((1, 128 // block + 1, 3), bool)
        kept[0, 0, :2] = True
        layout = BlockSparseLayout(kept, block)
        plan = plan_of("blocks_wgmma", layout=layout, op="dsd", batch=1, n=64)
        operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
        operands["a"][...] = np.inf
        got = case_of(plan, operands).run()["c"].view(plan.descriptor.out_element.dtype).astype(np.float32)
        assert not np.isfinite(got[0, 0, :block]).any()
        assert (got[0, 0, block:] == 0).all()


# Bits ---------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_bits_do_not_depend_on_what_is_beside(op, block):
    """Batch invariance: a token's results are the same for every n, tile and place, and in a batch of one."""
    layout = random_layout(seed=3, heads=2, rows=10, cols=9, block=block)
    plan = plan_of("blocks_wgmma", layout=layout, op=op, batch=2, n=1040)
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    whole = check(plan, operands)
    name, axis = ("b", 3) if op == "dsd" else ("a", 2)
    for n in EDGES_OF_TILES[:-1]:
        few = plan_of("blocks_wgmma", layout=layout, op=op, batch=1, n=n)
        chosen = np.random.default_rng(n).permutation(1040)[:n]
        part = {key: one[1:].copy() for key, one in operands.arrays.items()}
        part[name] = np.ascontiguousarray(np.take(part[name], chosen, axis))
        got = case_of(few, Operands(layout, part)).run()["c"]
        assert np.array_equal(got[0], np.take(whole[1], chosen, axis - 1).view(got.dtype))


@gpu
@pytest.mark.parametrize(("op", "trans_b"), [("dds", False), ("dds", True), ("dsd", True), ("sdd", False)])
def test_bits_do_not_depend_on_what_is_transposed_first(op, trans_b):
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
    assert [plan.workspace_size() for plan in plans] == [2 * 2048**2, 0]
    operands = random_operands(plans[0].descriptor, layout, np.random.default_rng(1))
    first, second = (check(plan, operands) for plan in plans)
    assert same_bits(first, second)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
def test_bits_of_another_run(row, op):
    layout = random_layout(seed=4, heads=2, rows=20, cols=20, block=64, density=0.3)
    plan = plan_of(row, layout=layout, op=op, n=512)
    case = case_of(plan, random_operands(plan.descriptor, layout, np.random.default_rng(1)))
    first = case.run()["c"].copy()
    for _ in range(5):
        case.poison()
        assert same_bits(case.run()["c"].copy(), first)


# Tables -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", OPS)
def test_another_mask_reaches_what_was_captured(row, op):
    import cupy

    first = random_layout(seed=6, heads=2, rows=6, cols=8, block=64, density=0.4)
    other = BlockSparseLayout(first.bitmap[::-1, ::-1, ::-1], 64)
    plan = plan_of(row, layout=first, op=op, batch=1)
    operands = random_operands(plan.descriptor, other, np.random.default_rng(2))
    wanted = case_of(plan, operands).run()["c"].copy()
    case = case_of(plan, Operands(first, operands.arrays))
    bound = plan.bind(case.args, workspace=case.space)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    bound.launch(stream=stream)
    graph = stream.end_capture()
    graph.launch(stream)
    assert not np.array_equal(_fetched(case, stream), wanted)
    case.args.layout.update(other, stream=stream)
    graph.launch(stream)
    assert np.array_equal(_fetched(case, stream), wanted)


def _fetched(case: Any, stream: Any) -> np.ndarray:
    stream.synchronize()
    return case.fetch()["c"].copy()


@gpu
def test_tables_are_of_their_device():
    import copy
    import pickle

    layout = random_layout(block=64)
    tables = plan_of("blocks_wgmma", layout=layout, op="dsd").pack(layout)
    assert str(tables.device) == "cuda:0"
    for other in (tables, copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert np.array_equal(other.view.array().get(), np.concatenate(other.lookup))
        assert (other is tables) == (other.view.address == tables.view.address)


# Places -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_places_beyond_2_to_the_32_bytes(op):
    """Of C and of the dense operand; the last rows of a product with few blocks are checked."""
    import cupy

    blocks, n = 520, 33_000 // 8 * 8
    kept = np.zeros((1, blocks, blocks), bool)
    kept[0, -1, -1] = kept[0, 0, 1] = kept[0, -2, 3] = True
    layout = BlockSparseLayout(kept, 128)
    plan = plan_of("blocks_wgmma", layout=layout, op=op, batch=1, n=n, element="f16")
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
