"""The bounds of rows on tensor cores hold for the sums that their arithmetic gives, which the host runs.

So they are tested without a GPU, on operands that are made to break them; and they aren't so wide that
nothing comes near.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan

from ..support import Data, case_of
from .kernel_entries import row_of
from .test_error_bounds import KINDS, operands

ARITHMETICS = [
    ("wgmma_sp", "f16", "hopper_tc/slices=1"),
    ("wgmma_sp", "f16", "hopper_tc/slices=8"),
    ("wgmma_sp", "bf16", "hopper_tc/slices=1"),
    ("wgmma_sp", "bf16", "hopper_tc/slices=8"),
    ("wgmma_sp_fp8", "fp8_e4m3", "hopper_tc_fp8/slices=1"),
    ("wgmma_sp_fp8", "fp8_e4m3", "hopper_tc_fp8/slices=8"),
    ("wgmma_sp_fp8_promoted", "fp8_e4m3", "hopper_tc_fp8/promoted=128"),
    ("f32_split3", "f32", "hopper_tc_f32x3/slices=1"),
    ("f32_split6", "f32", "hopper_tc_f32x6/slices=1"),
    ("f32_split6", "f32", "hopper_tc_f32x6/slices=8"),
]
"""Each with a row that may name it."""
every_arithmetic = pytest.mark.parametrize(("row", "element", "name"), ARITHMETICS)
SIZES = [(2, 6, 16), (2, 6, 48), (3, 5, 1024), (2, 3, 8192)]
"""Tokens, outputs, columns."""


@cache  # both tests ask
def worst(row: str, element: str, name: str, kind: str, sizes: tuple[int, int, int], seed: int) -> float:
    """The largest error of such sums, of what the row allows."""
    n, m, k = sizes
    x, dense = operands(kind, "forward", n, m, k, element, seed)
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element, out_element="f32")
    plan = GemmSparse24Plan.select(desc, preference={"require": {"arithmetic": name}}, device="host")
    got = case_of(plan, Data(dense, x)).run()
    assert plan.guarantee.arithmetic == name
    guarantee = row_of(row).guarantee(desc)
    wide, w = x.astype(np.float64), dense.astype(np.float64).T
    sizes_of = [guarantee.magnitudes(values, element) for values in (wide, w)]
    allowed = guarantee.tolerance(k, wide @ w, sizes_of[0] @ sizes_of[1], "f32")
    return float((np.abs(got - wide @ w) / allowed).max())


@every_arithmetic
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_sum_is_beyond_the_bound(row, element, name, kind, sizes):
    for seed in range(3):
        assert worst(row, element, name, kind, sizes, seed) <= 1


@every_arithmetic
def test_some_sums_come_near_the_bound(row, element, name):
    found = [worst(row, element, name, kind, sizes, 0) for kind in KINDS for sizes in SIZES]
    assert 0.05 < max(found) <= 1
