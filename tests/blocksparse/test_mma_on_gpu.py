"""``blocks_mma`` and ``sdd_mma``: small n against float64, edges of tiles, bits, masks; when they serve."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulArgs,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.predicted_times import FEW_TOKENS, few_tokens_us
from sparse24_plans.blocksparse.schedules.sdd_mma import SddMmaSchedule
from sparse24_plans.plan.schedule_choice import constants

from ..sample_devices import A100, H200
from ..strategies import results_of
from ..support import same_bits
from . import products_on_gpu as shared
from .problems import Operands, case_of, kept_of, random_operands
from .products_on_gpu import gpu, random_check
from .sample_layouts import random_layout
from .test_products import check

OPS = ("dsd", "dds")
BLOCKS = (16, 32, 64, 128)
TOKENS = (1, 2, 3, 8, 9, 12, 16, 17, 20, 32, 33, 36, 40, 63, 64, 65)
"""n: round the tokens of each tile; with rows that lanes can load in place, or that must be transposed."""
FORCED = {"prefer_backend": "blocks_mma"}


def plan_of(**fields: Any) -> BlockSparseMatmulPlan:
    desc = BlockSparseMatmulDescriptor(**{"n": 40, "batch": 2, "element": "bf16", **fields})
    return BlockSparseMatmulPlan.select(desc, device=0, preference=FORCED)


# Selection, without a GPU -------------------------------------------------------------------------

SHAPE = BlockSparseShape(heads=1, rows=4096, cols=4096, block=64, blocks=800)
chosen = partial(shared.chosen, layout=SHAPE)


@pytest.mark.parametrize("device", [H200, A100], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("k_last", [False, True])
def test_it_serves_few_tokens_if_predicted_fastest(device, op, k_last, monkeypatch):
    form = {"trans_b": True} if op == "dsd" and k_last else {"trans_a": op == "dds" and not k_last}
    model = constants(f"packed_mma_{'k' if k_last else 'n'}_last_64")
    for launch, most in ((-1e6, FEW_TOKENS[64]), (1e6, 0)):
        monkeypatch.setitem(model, "launch", launch)
        few_tokens_us.cache_clear()
        for n, packed in itertools.product((0, 1, 8, 64, 65), (False, True)):
            found = chosen(op=op, n=n, device=device, packed=packed, **form)
            assert (found == "blocks_mma") == (0 < n <= most)
    few_tokens_us.cache_clear()
    # Kernels that serve more tokens have other bits.
    wanted_bits = {"require": {"batch_invariant": True}}
    assert chosen(op=op, n=8, device=device, preference=wanted_bits, **form) != "blocks_mma"


@pytest.mark.parametrize(
    ("packed", "kept", "serves"), [(False, 0.9, True), (True, 0.3, True), (True, 0.9, False)]
)
def test_denser_packed_operands_may_be_faster_as_a_dense_copy(packed, kept, serves):
    layout = SHAPE.model_copy(update={"blocks": int(kept * 64 * 64)})
    assert (chosen(op="dsd", n=1, layout=layout, packed=packed, device=H200) == "blocks_mma") == serves


@pytest.mark.parametrize("device", [H200, A100], ids=str)
@pytest.mark.parametrize("n", [0, 1, 63, 64, 4096])
def test_a_preference_names_it_for_any_n_with_every_promise(device, n):
    wanted = {**FORCED, "require": {"batch_invariant": True, "nonfinite": "skips_pruned"}}
    for op, block in itertools.product(OPS, BLOCKS):
        layout = SHAPE.model_copy(update={"block": block})
        assert chosen(op=op, n=n, layout=layout, device=device, preference=wanted) == "blocks_mma_any"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_it_replaces_wgmma_for_few_tokens_where_there_is_none(op, packed):
    """On a GPU without wgmma, the kernel is compared with a dense product alone."""
    few = SHAPE.model_copy(update={"blocks": 300})
    for n in (2, 24, 64):
        on_a100, on_h200 = (chosen(op=op, n=n, packed=packed, layout=few, device=one) for one in (A100, H200))
        assert on_a100 == ("blocks_mma" if on_h200 == "blocks_mma" else "blocks_mma_many")
    dense = SHAPE.model_copy(update={"blocks": 64 * 64})
    assert chosen(op=op, n=64, packed=True, layout=dense, device=A100) == "packed_dense"


def test_it_replaces_no_kernel_where_others_are_refused():
    strict = {"max_workspace_bytes": 0}
    assert chosen(n=63, device=A100, preference=strict) == "blocks_mma_many"
    assert chosen(n=65, device=A100, preference=strict) == "blocks_strict_any"
    assert chosen(n=65, device=A100, preference={"tier": "tensor_core"}) == "blocks_mma_any"


def test_refusals_say_why():
    def refused(words: str, **fields: Any) -> None:
        desc = {"op": "dsd", "layout": SHAPE, "n": 12, "element": "bf16", **fields}
        with pytest.raises(UnsupportedError, match=words):
            BlockSparseMatmulPlan.compile(BlockSparseMatmulDescriptor(**desc), device=H200, preference=FORCED)

    refused(r"sdd_mma_any: serves sums of up to 64 products, not 65", op="sdd", n=65)
    refused(r"sdd_mma.*: serves elements f16, bf16, not f32", op="sdd", element="f32")
    refused(r"blocks_mma.*: serves elements f16, bf16, not f32", element="f32")
    refused(r"does not serve inner sparse24", inner="sparse24")


@pytest.mark.parametrize("device", [H200, A100], ids=str)
def test_it_serves_short_sums_of_sdd_up_to_measured_number(device, monkeypatch):
    half = {
        "op": "sdd",
        "layout": SHAPE.model_copy(update={"block": 16, "blocks": 1 << 15}),
        "device": device,
    }
    monkeypatch.setitem(constants("sdd_mma"), "most_terms", {**constants("sdd_mma")["most_terms"], "16": 8})
    for n in (1, 8, 64):
        assert chosen(n=n, **half, preference=FORCED) == ("sdd_mma" if n <= 8 else "sdd_mma_any")
    for n, wanted in {0: False, 1: True, 8: True, 9: False}.items():
        assert (chosen(n=n, **half) == "sdd_mma") == wanted
    promises = {"batch_invariant": True, "nonfinite": "skips_pruned"}
    assert chosen(n=8, **half, preference={"require": promises}) == "sdd_mma"


@pytest.mark.parametrize(("n", "copied"), [(1, False), (7, False), (12, False), (40, False), (127, True)])
@pytest.mark.parametrize("block", BLOCKS)
def test_x_is_copied_only_if_lanes_cannot_load_neighbouring_tokens(block, n, copied):
    """Without a workspace for the copy, a CTA has fewer tokens."""
    layout = SHAPE.model_copy(update={"block": block})
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=n, element="bf16")
    found = explain(desc, preference=FORCED, device=H200)
    assert (("padded first" if block == 16 else "transposed first") in found.details) == copied
    assert (found.workspace_size > 0) == copied
    without = explain(desc, preference={**FORCED, "max_workspace_bytes": 0}, device=H200)
    assert without.workspace_size == 0
    assert ("x 8 tokens" in without.details) == (copied or n <= 8)
    other = explain(desc.model_copy(update={"trans_b": True}), preference=FORCED, device=H200)
    assert other.workspace_size == 0


@pytest.mark.parametrize("block", [32, 64])
def test_x_is_not_copied_if_narrower_ctas_are_faster(block):
    layout = SHAPE.model_copy(update={"block": block})
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=9, element="bf16")
    found = explain(desc, preference=FORCED, device=H200)
    assert found.workspace_size == 0
    assert "x 8 tokens" in found.details


@pytest.mark.parametrize("n", [54, 62])
def test_x_is_copied_if_many_block_rows_read_it(n):
    """Loads of two tokens at a time take longer than the copy: 91 us for 48 at n = 54 on an H200."""
    layout = BlockSparseShape(heads=1, rows=51200, cols=5120, block=16, blocks=84992)
    desc = BlockSparseMatmulDescriptor(
        op="dds", layout=layout, n=n, element="bf16", trans_a=True, longest_panel=1119
    )
    assert "padded first" in explain(desc, preference=FORCED, device=H200).details


# Results ------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_operand_may_be_transposed(op, transposed, block, element):
    layout = random_layout(rows=5, cols=4, block=block)
    for n in (1, 6, 15, 24, 40, 64):
        fields = {"trans_a": transposed[0], "trans_b": transposed[1], "element": element, "n": n}
        random_check(plan_of, layout, op=op, **fields)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_edge
@shared.every_size
def test_layouts_and_sizes_at_their_edges(op, name, sizes):
    for block in BLOCKS:
        shared.layouts_and_sizes_at_their_edges(plan_of, op, name, block, sizes)


@gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", TOKENS)
def test_edges_of_tiles(op, n):
    for block in BLOCKS:
        shared.edges_of_tiles(plan_of, op, n, block)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@shared.every_density
def test_block_rows_of_many_bit_words(block, density):
    for op in OPS:
        shared.block_rows_of_many_bit_words(plan_of, op, block, density)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
def test_long_and_uneven_block_rows(op, transposed, block):
    """Lines of several rounds of each warp, or of none; 16, eight and four warps; CTAs in many waves."""
    sizes = (3, 12288 // block), (3, 1024 // block), (33600 // block, 9)
    for seed, (lines, across) in enumerate(sizes):
        kept = np.random.default_rng(seed).random((1, lines, across)) < 1 / np.arange(1, lines + 1)[:, None]
        layout = BlockSparseLayout(kept, block)
        layout = layout.transposed() if (op == "dds") != transposed[op == "dds"] else layout
        random_check(plan_of, layout, op=op, n=5, trans_a=transposed[0], trans_b=transposed[1], batch=1)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_any_n_with_every_result(op):
    shared.any_n_with_every_result(plan_of, op)


@gpu
@pytest.mark.parametrize("op", OPS)
@shared.every_epilogue
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_epilogue_is_right(op, epilogue, element):
    shared.epilogues(plan_of, op, epilogue, element)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_cells_without_a_kept_block_are_not_read(op, block):
    shared.cells_without_a_kept_partner_are_not_read(plan_of, op, block, [(np.s_[block:], np.nan)])


@gpu
def test_an_empty_block_row_next_to_one_with_infinities():
    for block in BLOCKS:
        shared.an_empty_block_row_next_to_one_with_infinities(plan_of, block)


SUMS = (0, 1, 2, 3, 5, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 63, 64)
"""n of ``sdd``: round the k of each mma; rows that lanes can load as 16, eight, four or two bytes."""


@gpu
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_every_sum_of_sdd(transposed, block, element):
    layout = random_layout(rows=7, cols=5, block=block)
    for n, out in itertools.product(SUMS, results_of(element)):
        fields = {"trans_a": transposed[0], "trans_b": transposed[1], "element": element, "out_element": out}
        random_check(plan_of, layout, op="sdd", n=n, alpha=-0.75, **fields)


@gpu
@shared.every_edge
@shared.every_size
def test_layouts_of_sdd_at_their_edges(name, sizes):
    for block in BLOCKS:
        shared.layouts_and_sizes_at_their_edges(plan_of, "sdd", name, block, sizes)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@shared.every_density
def test_uneven_block_rows_of_sdd(block, density):
    shared.block_rows_of_many_bit_words(plan_of, "sdd", block, density)


@gpu
@shared.every_transposition
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 5, 8, 31, 56])
def test_sdd_multiplies_its_own_cells_alone(transposed, block, n):
    """Another row's, column's or head's NaN is neighbour in memory of what a lane loads."""
    layout = random_layout(seed=n, heads=2, rows=4, cols=5, block=block)
    plan = plan_of(layout=layout, op="sdd", n=n, trans_a=transposed[0], trans_b=transposed[1])
    operands = random_operands(plan.descriptor, layout, np.random.default_rng(0))
    for name, swaps, line in (
        ("a", transposed[0], np.s_[:, :, 1::2]),
        ("b", not transposed[1], np.s_[:, :, ::3]),
    ):
        (operands[name].swapaxes(-1, -2) if swaps else operands[name])[line] = np.nan
        operands[name][-1, -1] = np.nan
    rows, columns = np.arange(layout.shape.rows) % 2 == 0, np.arange(layout.shape.cols) % 3 > 0
    wanted = np.zeros((2, 2, layout.shape.rows, layout.shape.cols), bool)
    wanted[...] = rows[:, None] & columns
    wanted[-1, -1] = False
    found = np.isfinite(
        case_of(plan, operands).run()["c"].view(plan.descriptor.out_element.dtype).astype("f4")
    )
    assert np.array_equal(found, kept_of(layout, wanted))


# Bits ---------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 5, 16, 24, 40, 63])
def test_bits_of_sdd_do_not_depend_on_schedule_or_transposition(block, n, monkeypatch):
    """One product in runs of any length, with each number of strips, and with A and B stored either way."""
    layout = random_layout(seed=block, heads=2, rows=9, cols=768 // block, block=block)
    desc = BlockSparseMatmulDescriptor(op="sdd", layout=layout, n=n, element="bf16", batch=3)
    plain, chosen_one = random_operands(desc, layout, np.random.default_rng(n)), SddMmaSchedule.of(desc, 1)
    found = []
    strips = [one for one in (1, 2, 4) if one <= chosen_one.strips]
    for number, (one, run, a_transposed, b_transposed) in enumerate(
        itertools.product(strips, (1, 3, 32), (False, True), (False, True))
    ):
        schedule = chosen_one._replace(strips=one, run_blocks=run)
        monkeypatch.setattr(SddMmaSchedule, "of", lambda *_, schedule=schedule: schedule)
        transposed = {"a": a_transposed, "b": b_transposed}
        stored = {
            name: plain[name].swapaxes(-1, -2) if swaps else plain[name] for name, swaps in transposed.items()
        }
        plan = BlockSparseMatmulPlan.select(
            desc.model_copy(update={"trans_a": a_transposed, "trans_b": b_transposed}),
            device=0,
            preference={**FORCED, "max_workspace_bytes": number},  # of its own: plans are cached
        )
        operands = plain.with_(**{name: np.ascontiguousarray(cells) for name, cells in stored.items()})
        assert f"{16 * one} rows of up to {run} blocks" in plan.explain().details
        found.append(check(plan, operands))
    assert all(same_bits(found[0], one) for one in found)
    alone = plan_of(layout=layout, op="sdd", n=n, batch=1)
    assert same_bits(check(alone, plain.batch(desc)), found[0][-1:])


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_neighbours(op, block):
    shared.bits_do_not_depend_on_neighbours(plan_of, op, block)


@gpu
@pytest.mark.parametrize("op", OPS)
def test_bits_of_another_run(op):
    shared.bits_of_another_run(plan_of, op)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 8, 12, 36, 63])
def test_bits_do_not_depend_on_strips_or_transposition(op, block, n, monkeypatch):
    """One product with the most strips and with one, and with either operand stored either way."""
    layout = random_layout(seed=block, heads=2, rows=768 // block, cols=1280 // block, block=block)
    sparse, dense = ("a", "b") if op == "dsd" else ("b", "a")
    fields = {"op": op, "n": n, "element": "bf16"}
    plain = random_operands(
        BlockSparseMatmulDescriptor(layout=layout, **fields), layout, np.random.default_rng(n)
    )
    found, strips = [], []
    for most, s_transposed, x_transposed in itertools.product((True, False), (False, True), (False, True)):
        operands = _transposed(plain, sparse) if s_transposed else plain
        if x_transposed:
            operands = operands.with_(**{dense: np.ascontiguousarray(operands[dense].swapaxes(-1, -2))})
        transposed = {f"trans_{sparse}": s_transposed, f"trans_{dense}": x_transposed}
        desc = BlockSparseMatmulDescriptor(layout=operands.layout, **fields, **transposed)
        tried = [one for one in BlocksMmaSchedule.candidates(desc) if one.warps == 8]
        schedule = tried[0 if most else -1]
        monkeypatch.setattr(BlocksMmaSchedule, "of", lambda *_, schedule=schedule: schedule)
        spare = {**FORCED, "max_workspace_bytes": (1 << 30) + most}  # of its own: plans are cached
        plan = BlockSparseMatmulPlan.select(desc, device=0, preference=spare)
        strips.append(schedule.strips)
        found.append(check(plan, operands))
    assert (len(set(strips)) > 1) == (block > 16)
    assert all(same_bits(found[0], one) for one in found)


def of_lengths(block: int, seed: int, *, transposed: bool) -> BlockSparseLayout:
    """Block rows of op(S) with lengths round those at which the number of shares changes, and a long one."""
    lengths = (0, 1, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 65, 600)
    rng = np.random.default_rng(seed)
    kept = np.zeros((1, len(lengths), 10240 // block + 8), bool)
    for row, length in enumerate(lengths):
        kept[0, row, rng.permutation(kept.shape[2])[: max(length * 16 // block, min(length, 1))]] = True
    return BlockSparseLayout(kept.transpose(0, 2, 1) if transposed else kept, block)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", OPS)
@shared.every_transposition
@pytest.mark.parametrize("n", [1, 12, 28, 64])
def test_bits_do_not_depend_on_the_number_of_warps(op, block, transposed, n, monkeypatch):
    layout = of_lengths(block, n, transposed=transposed[op == "dds"] != (op == "dds"))
    desc = BlockSparseMatmulDescriptor(
        op=op, layout=layout, n=n, trans_a=transposed[0], trans_b=transposed[1], element="bf16", batch=2
    )
    operands = random_operands(desc, layout, np.random.default_rng(block))
    chosen_one, found = BlocksMmaSchedule.of(desc, 132), []
    for number, warps in enumerate((4, 8, 16)):
        schedule = chosen_one._replace(warps=warps)
        monkeypatch.setattr(BlocksMmaSchedule, "of", lambda *_, schedule=schedule: schedule)
        spare = {**FORCED, "max_workspace_bytes": (1 << 31) + number}  # of its own: plans are cached
        plan = BlockSparseMatmulPlan.select(desc, device=0, preference=spare)
        assert f"{warps} warps a block row" in plan.explain().details
        found.append(check(plan, operands))
    assert all(same_bits(found[0], one) for one in found)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_bits_of_a_row_depend_on_its_own_blocks_alone(block):
    """The other rows change how many warps share it."""
    kept = np.random.default_rng(block).random((1, 9, 2048 // block)) < 0.4
    results = []
    for density in (0.0, 0.05, 1.0):
        kept[0, 1:] = np.random.default_rng(1).random(kept[0, 1:].shape) < density
        layout = BlockSparseLayout(kept.copy(), block)
        plan = plan_of(op="dsd", layout=layout, n=24, batch=1)
        first = random_operands(
            plan.descriptor.model_copy(update={"layout": layout.shape}), layout, np.random.default_rng(2)
        )
        values, x = first["a"].copy(), np.random.default_rng(3).standard_normal(first["b"].shape)
        own = np.count_nonzero(kept[0, 0])
        values[0, :own] = np.random.default_rng(4).standard_normal(values[0, :own].shape).astype(values.dtype)
        operands = first.with_(a=values, b=x.astype(first["b"].dtype))
        results.append(check(plan, operands)[..., :block, :].copy())
    assert all(same_bits(results[0], one) for one in results)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_more_warps_share_rows_of_an_operand_with_long_ones(block):
    """The result has the bits of a plan that knows of no long row."""
    import cupy

    kept = np.random.default_rng(block).random((1, 600, 16384 // block)) < 0.01
    kept[0, 7] = True
    layout, results = BlockSparseLayout(kept, block), []
    rng = cupy.random.default_rng(3)
    values = rng.standard_normal((1, layout.shape.blocks, block, block)).astype(np.float16)
    x = rng.standard_normal((1, 1, layout.shape.cols, 16)).astype(np.float16)
    for packed in (False, True):
        known = layout if packed else layout.shape
        plan = plan_of(op="dsd", layout=known, n=16, batch=1, element="f16", packed=packed)
        assert (" 4 warps a block row" in plan.explain().details) == (not packed)
        y = cupy.full((1, 1, layout.shape.rows, 16), np.nan, np.float16)
        own = (
            {"layout": None, "a": plan.pack(layout, values)}
            if packed
            else {"layout": plan.pack(layout), "a": values}
        )
        args = BlockSparseMatmulArgs(b=x, c=y, **own)
        space = cupy.empty(max(plan.workspace_size(), 1), np.uint8)
        plan.run(args, workspace=space)
        results.append(y.get())
    assert np.isfinite(results[0]).all()
    assert same_bits(*results)


def _transposed(operands: Operands, sparse: str) -> Operands:
    """The operands with the sparse one stored transposed."""
    layout = operands.layout
    places = np.full(layout.bitmap.shape, -1)
    places[layout.bitmap] = np.arange(layout.shape.blocks)
    order = places.transpose(0, 2, 1)[layout.bitmap.transpose(0, 2, 1)]
    values = np.ascontiguousarray(operands[sparse][:, order].swapaxes(-1, -2))
    return Operands(layout.transposed(), {**operands.arrays, sparse: values})


# Tables and packed operands -----------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", [*OPS, "sdd"])
def test_another_mask_reaches_what_was_captured(op):
    shared.another_mask_reaches_what_was_captured(plan_of, op)


@gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_what_another_kernel_has_packed_is_multiplied(block):
    import cupy

    layout = random_layout(seed=2, heads=2, rows=6, cols=8, block=block)
    rng = cupy.random.default_rng(3)
    values = rng.standard_normal((1, layout.shape.blocks, block, block)).astype(np.float16)
    x = rng.standard_normal((1, 2, layout.shape.cols, 12)).astype(np.float16)
    plans = [
        BlockSparseMatmulPlan.select(
            BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=n, element="f16", packed=True),
            device=0,
            preference={"prefer_backend": backend},
        )
        for n, backend in ((256, "blocks_wgmma"), (12, "blocks_mma"))
    ]
    results = []
    for plan in plans:
        y = cupy.full((1, 2, layout.shape.rows, 12), np.nan, np.float16)
        args = BlockSparseMatmulArgs(layout=None, a=plan.pack(layout, values), b=x, c=y)
        plans[1].run(args)
        results.append(y.get())
    assert np.isfinite(results[0]).all()
    assert same_bits(*results)
