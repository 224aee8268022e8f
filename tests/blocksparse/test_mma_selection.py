"""When ``blocks_mma`` and ``sdd_mma`` serve, what they refuse, and when X is copied first, without a GPU."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseShape,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.predicted_times import few_tokens, few_tokens_us
from sparse24_plans.plan.schedule_choice import constants

from ..sample_devices import A100, H200
from . import products_on_gpu as shared
from .mma_on_gpu import BLOCKS, FORCED, OPS, with_a_long_row

SHAPE = BlockSparseShape(heads=1, rows=4096, cols=4096, block=64, blocks=800)
chosen = partial(shared.chosen, layout=SHAPE)


@pytest.mark.parametrize("device", [H200, A100], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("k_last", [False, True])
def test_it_serves_few_tokens_if_predicted_fastest(device, op, k_last, monkeypatch):
    form = {"trans_b": True} if op == "dsd" and k_last else {"trans_a": op == "dds" and not k_last}
    model = constants(f"packed_mma_{'k' if k_last else 'n'}_last_64")
    for launch, most in ((-1e6, few_tokens(64)), (1e6, 0)):
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


@pytest.mark.parametrize("n", [1, 8, 40, 200])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_known_long_row_has_slices_whatever_n_is(block, n):
    def details(layout: BlockSparseLayout | BlockSparseShape, device: Any = H200, **fields: Any) -> str:
        desc = BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=n, element="bf16", **fields)
        return explain(desc, preference=FORCED, device=device).details

    layout = with_a_long_row(block)
    assert "clusters of 4 for long ones" in details(layout)
    assert "clusters of 4 for long ones" in details(layout, batch=3)
    assert "clusters" not in details(layout.shape)
    assert "clusters" not in details(with_a_long_row(block, heads=2))
    assert "clusters" not in details(layout, device=A100)


@pytest.mark.parametrize("block", BLOCKS)
def test_devices_without_slices_have_the_fastest_schedule_without(block):
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=with_a_long_row(block), n=8, element="bf16")
    whole = {one.row_slices for one in BlocksMmaSchedule.candidates(desc, may_slice=False)}
    assert (whole, BlocksMmaSchedule.of(desc, 132).row_slices) == ({1}, 4)
    of_a_whole_row = BlocksMmaSchedule.of(desc, 108, may_slice=False)
    found = explain(desc, preference=FORCED, device=A100).details
    assert f"{of_a_whole_row.warps} warps a block row" in found
    assert f"of {of_a_whole_row.rows} rows x" in found


@given(
    counts=st.lists(st.integers(0, 600), min_size=1, max_size=40),
    block=st.sampled_from(BLOCKS),
    batch=st.integers(1, 3),
)
def test_rows_behind_those_that_may_have_slices_are_short(counts, block, batch):
    """Rows come by length. A CTA has each whole row's tile, and a cluster each tile of the others."""
    kept = np.arange(600) < np.array(counts)[:, None]
    layout = BlockSparseLayout(kept[None], block)
    desc = BlockSparseMatmulDescriptor(op="dsd", layout=layout, n=12, element="bf16", batch=batch)
    for one in BlocksMmaSchedule.candidates(desc):
        sliced = one._replace(row_slices=4)
        units = sorted((count * block // one.depth for count in counts), reverse=True)
        long_rows = sliced.long_rows(desc)
        assert all(some <= 128 for some in units[long_rows:])
        tiles = one.tiles(desc) // len(counts)
        assert 0 <= sliced.ctas(desc) - tiles * (len(counts) + 3 * long_rows) < 4
        assert sliced.ctas(desc) % 4 == 0
        assert one._replace(row_slices=1).ctas(desc) == one.tiles(desc)
