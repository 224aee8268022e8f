"""Blocks that are 2:4 inside, on the host: conversions, pruning, metadata, products."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    FormatError,
    InvalidProblemError,
    PruneSparse24Descriptor,
    Sparse24Weight,
    compress_blocks,
    decompress_blocks,
    prune_blocks,
)
from sparse24_plans.arithmetic.fma32 import fma_f32
from sparse24_plans.blocksparse.pattern24 import codes_of, metadata_of
from sparse24_plans.weights.codes import PAIRS, VALID_CODES
from sparse24_plans.weights.packing import pack

from ..plan.cases import PlanCase, rejected
from ..plan.cases import select as select_plan
from ..support import check_each, same_bits
from . import test_products as products
from .problems import along_of, case_of, random_metadata, random_operands
from .sample_layouts import EDGES, random_layout
from .test_products import ROWS, every_row

every_along = pytest.mark.parametrize("along", ["columns", "rows"])
every_block = pytest.mark.parametrize("block", [64, 128])
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


plan_of = partial(products.plan_of, element="bf16", inner="sparse24")
random_check = partial(products.random_check, element="bf16", inner="sparse24")


def two_of_four(shape: tuple[int, ...], along: str, seed: int = 0) -> np.ndarray:
    """Float16 blocks of which each group keeps two cells, one, or none, some of them -0."""
    rng = np.random.default_rng(seed)
    kept = rng.permuted(np.tile([1, 1, 0, 0], (*shape[:-1], shape[-1] // 4, 1)), axis=-1).reshape(shape)
    values = rng.choice([0.0, -0.0, 1.5, -2.0, 3.0], shape) * kept
    blocks = values.astype(np.float16)
    return blocks if along == "columns" else np.ascontiguousarray(blocks.swapaxes(-1, -2))


# Metadata -----------------------------------------------------------------------------------------


def half_words(metadata: np.ndarray, block: int) -> dict[tuple[int, int], int]:
    """(line, column / 16) -> the nibbles of 16 columns, by PTX's fragments: as wgmma.sp's lanes hold them."""
    words, found = metadata.reshape(-1).view("<u4"), {}
    steps = block // 64  # words of a lane
    for tile in range(block // 64):
        for thread in range(128):
            w, g, t = thread // 32, thread % 32 // 4, thread % 4
            for j in range(steps):
                word = int(words[(tile * 128 + thread) * steps + j])
                column = 64 * j + 32 * (t // 2) + 16 * (t % 2)  # selector t / 2 takes lanes 0, 1 or 2, 3
                for row, half in ((g, word & 0xFFFF), (g + 8, word >> 16)):
                    found[64 * tile + 16 * w + row, column // 16] = half
    return found


@every_block
def test_metadata_are_the_fragments_of_the_instruction(block):
    metadata = random_metadata((1, 1, block, block // 8), np.random.default_rng(1))
    halves, codes = half_words(metadata, block), codes_of(metadata)[0, 0]
    assert len(halves) == block * block // 16
    for (line, part), half in halves.items():
        assert [half >> 4 * i & 15 for i in range(4)] == codes[line, 4 * part : 4 * part + 4].tolist()
    assert np.array_equal(metadata_of(codes[None, None]), metadata)


def test_metadata_of_block_of_128_are_those_of_packed_weight():
    blocks = two_of_four((1, 1, 128, 128), "columns")
    packed = pack(Sparse24Weight.compress(blocks[0, 0])).buffers[0].array()
    _, metadata = compress_blocks(BlockSparseLayout([[1]], 128), blocks, along="columns")
    assert np.array_equal(packed[:, 0, 8192:].reshape(-1), metadata.reshape(-1))


# Conversions --------------------------------------------------------------------------------------


@every_along
@every_block
@pytest.mark.parametrize("element", TYPES)
def test_there_and_back(along, block, element):
    layout = random_layout(heads=2, rows=2, cols=3, block=block)
    blocks = two_of_four((2, layout.shape.blocks, block, block), along).astype(TYPES[element])
    values, metadata = compress_blocks(layout, blocks, along=along)
    assert values.shape == (2, layout.shape.blocks, block, block // 2)
    assert values.dtype == blocks.dtype
    assert (metadata.dtype, metadata.shape) == (np.uint8, (2, layout.shape.blocks, block, block // 8))
    again = decompress_blocks(layout, values, metadata, along=along)
    assert again.dtype == blocks.dtype
    assert np.array_equal(again.astype(np.float32), blocks.astype(np.float32))
    assert same_bits(compress_blocks(layout, again, along=along)[0], values)


@every_along
def test_values_are_the_kept_cells_of_each_line_in_order(along):
    layout = BlockSparseLayout([[1]], 64)
    blocks = two_of_four((1, 1, 64, 64), along)
    values, metadata = compress_blocks(layout, blocks, along=along)
    lines = blocks[0, 0] if along == "columns" else blocks[0, 0].T
    for line, kept, codes in zip(lines, values[0, 0], codes_of(metadata)[0, 0], strict=True):
        at = [4 * group + place for group, code in enumerate(codes) for place in (code & 3, code >> 2)]
        assert np.array_equal(line[at], kept)
        assert set(np.flatnonzero(line)) <= set(at)


@every_along
def test_a_crowded_group_is_named(along):
    layout = BlockSparseLayout([[[0, 1], [1, 1]], [[1, 0], [0, 1]]], 64)
    blocks = np.zeros((2, 5, 64, 64), np.float16)
    line = blocks[1, 3, 7] if along == "columns" else blocks[1, 3, :, 7]
    line[20:23] = 1
    words = (
        f"at most 2 non-zeros in every group of 4 along {along}, got 3 in group 5 of line 7 of "
        r"block \(0, 0\) of head 1, batch 1; prune first"
    )
    with pytest.raises(FormatError, match=words):
        compress_blocks(layout, blocks, along=along)
    other = "rows" if along == "columns" else "columns"
    assert compress_blocks(layout, blocks, along=other)[0].any()  # a pattern runs one way alone


def test_broken_metadata_are_named():
    layout = BlockSparseLayout([[0, 1], [1, 0]], 64)
    values, metadata = compress_blocks(layout, np.zeros((1, 2, 64, 64), np.float16), along="rows")
    codes = codes_of(metadata).copy()
    codes[0, 1, 9, 3] = 5
    words = r"got code 5 in group 3 of line 9 of block \(1, 0\) of head 0, batch 0"
    with pytest.raises(FormatError, match=words):
        decompress_blocks(layout, values, metadata_of(codes), along="rows")


def test_what_conversions_refuse():
    layout, small = BlockSparseLayout([[1]], 64), BlockSparseLayout([[1]], 32)
    cells = np.zeros((1, 1, 64, 64), np.float16)
    values, metadata = compress_blocks(layout, cells, along="rows")
    wrong: list[tuple[str, Any]] = [
        ("along: expected columns or rows", lambda: compress_blocks(layout, cells, along="k")),
        (
            "along: expected columns or rows",
            lambda: compress_blocks(layout, cells, along=np.array(["k"] * 2)),
        ),
        ("layout: expected BlockSparseLayout", lambda: compress_blocks(None, cells, along="rows")),
        ("layout: expected blocks of 64 or 128, got 32", lambda: compress_blocks(small, cells, along="rows")),
        ("values: expected f16 or bf16", lambda: compress_blocks(layout, cells.astype("f4"), along="rows")),
        (r"values: expected \[Z, 1, 64, 64\]", lambda: compress_blocks(layout, values, along="rows")),
        (
            r"values: expected \[Z, 1, 64, 32\]",
            lambda: decompress_blocks(layout, cells, metadata, along="rows"),
        ),
        (
            "metadata: expected u8",
            lambda: decompress_blocks(layout, values, metadata[:, :, :32], along="rows"),
        ),
        ("metadata: expected u8", lambda: decompress_blocks(layout, values, values, along="rows")),
        (
            "metadata: expected u8.* got s8",
            lambda: decompress_blocks(layout, values, metadata.view(np.int8), along="rows"),
        ),
    ]
    for words, call in wrong:
        with pytest.raises(InvalidProblemError, match=words):
            call()


# Pruning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("density", "blocks"), [(0.24, 2), (0.25, 2), (0.26, 3), (0.34, 3), (0.35, 4), (0.36, 4)]
)
def test_the_number_of_kept_blocks_is_rounded_half_to_even(density, blocks):
    layout, _ = prune_blocks(np.ones((2, 320, 64), np.float16), 64, density, along="rows")
    assert layout.shape.blocks == blocks


@every_along
@pytest.mark.parametrize("density", [0.0, 0.3, 0.5, np.float64(0.3), 1.0, 1])
def test_the_blocks_of_highest_energy_are_kept(along, density):
    rng = np.random.default_rng(2)
    matrix = (rng.standard_normal((2, 192, 256)) * rng.choice([0.1, 1, 2], (2, 192, 1))).astype(np.float16)
    layout, (values, metadata) = prune_blocks(matrix, 64, density, along=along)
    assert layout.shape.blocks == round(24 * density)
    energies = np.square(matrix.astype(np.float64)).reshape(2, 3, 64, 4, 64).sum(axis=(2, 4))
    if 0 < density < 1:
        assert energies[layout.bitmap].min() > energies[~layout.bitmap].max()
    cells = layout.values_of(np.where(np.kron(layout.bitmap, np.ones((64, 64))), matrix, 0))
    found = decompress_blocks(layout, values, metadata, along=along)
    lines, kept = (one if along == "columns" else one.swapaxes(-1, -2) for one in (cells, found))
    groups, left = (one.reshape(*one.shape[:3], 16, 4).astype(np.float32) for one in (lines, kept))
    largest = np.sort(np.abs(groups), axis=-1)[..., 2:]
    assert np.array_equal(np.sort(np.abs(left), axis=-1)[..., 2:], largest)
    assert ((left == groups) | (left == 0)).all()


def test_groups_are_pruned_as_the_plan_of_pruning_does():
    """Ties, infinities and NaN, by magnitude and by scores."""
    bits = np.random.default_rng(3).choice(
        np.array([0, 1, 0x8001, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E01, 0xFE00], np.uint16), (64, 64)
    )
    matrix = bits.view(np.float16)
    for scores in (None, np.ascontiguousarray(matrix[::-1])):
        kind = None if scores is None else "f16"
        plan = select_plan(PruneSparse24Descriptor(m=64, k=64, element="f16", scores=kind), "host")
        inputs = {"dense": bits} if scores is None else {"dense": bits, "scores": scores.view(np.uint16)}
        pruned = PlanCase(plan, inputs).run()["pruned"]
        layout, (values, metadata) = prune_blocks(matrix, 64, 1.0, along="columns", scores=scores)
        found = decompress_blocks(layout, values, metadata, along="columns")[0, 0].view(np.uint16)
        assert np.array_equal(found, pruned)


def test_scores_choose_in_place_of_the_matrix():
    matrix = np.arange(64 * 128, dtype=np.float16).reshape(64, 128) + 1
    scores = np.zeros((64, 128), np.float32)
    scores[:, :64:4], scores[:, 1:64:4] = 2, 1
    layout, (values, _) = prune_blocks(matrix, 64, 0.5, along="columns", scores=scores)
    assert layout.bitmap.tolist() == [[[True, False]]]
    assert np.array_equal(values[0, 0, :, ::2], matrix[:, :64:4])
    assert np.array_equal(values[0, 0, :, 1::2], matrix[:, 1:64:4])
    scores[3, 100] = np.nan  # before all others
    assert prune_blocks(matrix, 64, 0.5, along="rows", scores=scores)[0].bitmap.tolist() == [[[False, True]]]


def test_of_equal_blocks_the_one_in_front_is_kept():
    layout, _ = prune_blocks(np.ones((128, 128), np.float16), 64, 0.5, along="rows")
    assert layout.bitmap.tolist() == [[[True, True], [False, False]]]


def test_what_pruning_refuses():
    matrix = np.ones((128, 128), np.float16)
    for words, fields in (
        ("block: expected 64 or 128", {"block": 32}),
        ("matrix: expected sides in multiples of block 128", {"block": 128, "matrix": matrix[:, :64].copy()}),
        ("matrix: expected f16 or bf16", {"matrix": matrix.astype(np.float32)}),
        ("density: expected a number from 0 to 1", {"density": 1.5}),
        ("density: expected a number from 0 to 1", {"density": float("nan")}),
        ("density: expected a number from 0 to 1", {"density": True}),
        ("scores: expected f32, f16 or bf16", {"scores": matrix[:64].copy()}),
        ("scores: expected f32, f16 or bf16", {"scores": matrix.astype(np.int32)}),
        ("along: expected columns or rows", {"along": 1}),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            prune_blocks(**{"matrix": matrix, "block": 64, "density": 0.5, "along": "rows", **fields})


# Products -----------------------------------------------------------------------------------------


@every_row
@every_block
@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_every_operand_may_be_transposed(row, block, op, transposed):
    layout = random_layout(heads=1, rows=2, cols=3, block=block)
    random_check(row, layout, op=op, trans_a=transposed[0], trans_b=transposed[1], n=9)


@every_row
@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize("name", EDGES)
def test_layouts_and_sizes_at_their_edges(row, op, name):
    layout = BlockSparseLayout(EDGES[name].bitmap, 64)
    check_each(partial(random_check, row, layout, op=op), ({"n": 3}, {"n": 0}, {"n": 3, "batch": 0}))


@every_row
def test_epilogues_apply_to_2_4_blocks(row):
    random_check(row, random_layout(block=64), op="dsd", epilogue="bias_silu", alpha=-0.5, n=5, element="f16")


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99), op=st.sampled_from(["dsd", "dds"]), transposes=st.booleans(), n=st.integers(0, 9)
)
def test_any_product(seed, op, transposes, n):
    random_check(
        "host_blas", random_layout(seed=seed, block=64), op=op, trans_a=transposes, trans_b=transposes, n=n
    )


@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize("transposed", [False, True])
def test_strict_is_one_fma_a_kept_cell_in_increasing_k(op, transposed):
    layout = random_layout(seed=2, heads=1, rows=2, cols=2, block=64)
    plan = plan_of("host_strict", layout=layout, op=op, n=5, trans_a=transposed, trans_b=transposed, batch=1,
                   element="f16", out_element="f32")  # fmt: skip
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(1))
    got = case_of(plan, operands).run()["c"].view(np.float32)
    sparse, other, along = *(("a", "b") if op == "dsd" else ("b", "a")), along_of(plan.descriptor)
    ones = np.ones_like(operands[sparse])
    whole, kept = (
        layout.to_dense(decompress_blocks(layout, one, operands["metadata"], along=along))[0, 0]
        for one in (operands[sparse], ones)
    )
    x = operands[other][0, 0]
    x, whole, kept = (one.T if transposed else one for one in (x, whole, kept))
    left, used, right = (whole, kept, x) if op == "dsd" else (whole.T, kept.T, x.T)
    acc = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for k in range(left.shape[1]):
        added = fma_f32(left[:, k, None].astype(np.float32), right[k].astype(np.float32), acc)
        acc = np.where(used[:, k, None] != 0, added, acc)
    assert same_bits(got[0, 0].copy(), np.ascontiguousarray(acc if op == "dsd" else acc.T))
    assert plan.guarantee.arithmetic == "fma32_in_order"
    assert plan.guarantee.terms_per_k == 0.5


def test_strict_skips_what_meets_no_kept_cell():
    layout = BlockSparseLayout([[1]], 64)
    for row in ROWS:
        plan = plan_of(row, layout=layout, op="dsd", batch=1, n=4)
        operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
        operands["metadata"][...] = 0x44  # positions 0 and 1 of every group
        operands["b"][:, :, 2::4] = np.inf
        got = case_of(plan, operands).run()["c"].view(ml_dtypes.bfloat16).astype(np.float32)
        skips = plan.guarantee.nonfinite == "skips_pruned"
        assert skips == (row == "host_strict")
        assert np.isfinite(got).all() == skips


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("inner: expected dense for op sdd", {"op": "sdd"}),
        ("element: expected f16 or bf16", {"element": "f32"}),
        ("element: expected f16 or bf16", {"element": "s8"}),
        (
            "layout: expected blocks of 64 or 128 for inner sparse24, got 32",
            {"layout": random_layout(block=32)},
        ),
        ("inner", {"inner": "2:4"}),
    ],
)
def test_descriptors_refuse(words, fields):
    good = {"op": "dsd", "layout": random_layout(block=64), "n": 8, "element": "bf16", "inner": "sparse24"}
    with pytest.raises(InvalidProblemError, match=words):
        BlockSparseMatmulDescriptor(**{**good, **fields})


def test_arguments_are_those_of_the_pattern():
    layout = random_layout(block=64)
    plan = plan_of("host_blas", layout=layout, op="dsd")
    case = case_of(plan, random_operands(plan.descriptor, layout, np.random.default_rng(0)))
    kind = type(case.args)
    fields = {name: getattr(case.args, name) for name in ("layout", "a", "b", "c", "metadata")}
    rejected(
        case, kind(**{**fields, "metadata": None}), InvalidProblemError, "metadata: expected a tensor u8"
    )
    whole = np.zeros((2, layout.shape.blocks, 64, 64), ml_dtypes.bfloat16)
    rejected(case, kind(**{**fields, "a": whole}), InvalidProblemError, "a: expected shape", "64, 32]")
    dense = BlockSparseMatmulPlan.select(plan.descriptor.model_copy(update={"inner": "dense"}), device="host")
    verdict = dense.can_implement(kind(**{**fields, "a": whole}))
    assert "metadata: expected None" in str(verdict.error)


def test_pairs_and_codes_are_all_drawn():
    codes = codes_of(random_metadata((1, 1, 64, 8), np.random.default_rng(0)))
    assert set(codes.reshape(-1).tolist()) == set(VALID_CODES)
    assert len(PAIRS) == len(VALID_CODES)
