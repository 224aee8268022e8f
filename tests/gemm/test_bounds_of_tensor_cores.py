"""The error bounds of tensor-core kernels hold for the sums of their arithmetics, which the host runs.

The bounds are thus tested without a GPU, on operands that are made to break them. The tests also check
that some operands come near, so the bounds are not too wide.

Why the bounds hold for Hopper's steps (sparse24_plans/gemm/arithmetic/tensor_core.py). Let T be
sum|x||w|, with subnormal magnitudes counted as the smallest normal number. Cutting makes no addend
larger, so the accumulator stays within T, and 2^E <= T. In a step of p products:

- The addend with the exponent E is not cut. The others lose less than p * 2^-25 * T (fp8: p * 2^-13 *
  T).
- The sum is a multiple of 2^(E - 25), so cutting it to a float32 loses at most 3 * 2^-25 * T (fp8:
  nothing). If the sum's exponent is above E, then T >= 2^(E + 1), and both losses together are smaller.

K is a multiple of 8, so a step has at least 4 products, and a product costs at most 7/4 * 2^-25 (fp8:
2^-13). Adding S slices costs (S - 1) * 2^-24. The u = 2^-22 of f16 and bf16 leaves a factor of 4.5 for
libraries that do not state their order and for mma_sp on other architectures.

Why the bounds hold for split float32. With |x| in [2^e, 2^(e+1)), |x - h| and |m| are at most 2^(e-8),
and h and m lack at most 2^(e-17), all of which l has, down to 2^-110: bf16 ends at 2^-133. Below, 2^-134
may be lost, and tensor cores align subnormal terms as normal ones, so magnitudes below 2^-108 count as
that. Relative to T:

- Omitted products. f32x6 leaves out m l, l m and l l: 2^-24, below product_roundoff = 2^-23. f32x3
  leaves out m m and all of l: 2^-16 + 2 * 2^-17, below 2^-15 + 2^-24.
- Cutting. The small products of a tile are at most 1.02 * 2^-7 of its sum|x||w|, so ten of its twelve
  steps lose little beside the two of h h. With p products a step loses at most (p + 3) * 2^-25 of what
  it adds, so f32x6 loses less than 1.06 * 7/4 * 2^-25 < 2^-24 a kept product. In f32x3 the small
  products of a tile meet the sums of earlier tiles, so all three products count: 1.01 * 21/4 * 2^-25 < 3
  * 2^-24.
- Adding the sums: 2^-24 each.
"""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan

from ..support import Data, case_of
from .kernel_entries import row_of
from .test_error_bounds import KINDS, of_kinds

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
SIZES = [(1, 2, 16), (1, 2, 48), (1, 2, 1024), (1, 1, 4096)]
"""Tokens and outputs of each kind, columns."""


def worst(row: str, element: str, name: str, sizes: tuple[int, int, int]) -> float:
    """The largest error of such sums, of what the row allows: the X of every kind meets the W of each."""
    x, dense = of_kinds(tuple(KINDS), "forward", *sizes, element)
    (m, k), n = dense.shape, len(x)
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element, out_element="f32")
    plan = GemmSparse24Plan.select(desc, preference={"require": {"arithmetic": name}}, device="host")
    got = case_of(plan, Data(dense, x)).run()
    assert plan.guarantee.arithmetic == name
    guarantee = row_of(row).guarantee(desc)
    wide, w = x.astype(np.float64), dense.astype(np.float64).T
    sizes_of = [guarantee.magnitudes(values, element) for values in (wide, w)]
    allowed = guarantee.tolerance(k, wide @ w, sizes_of[0] @ sizes_of[1], "f32")
    return float((np.abs(got - wide @ w) / allowed).max())


@pytest.mark.parametrize(("row", "element", "name"), ARITHMETICS)
def test_no_sum_is_beyond_the_bound_and_some_are_close(row, element, name):
    found = {sizes: worst(row, element, name, sizes) for sizes in SIZES}
    assert {sizes: ratio for sizes, ratio in found.items() if not ratio <= 1} == {}
    assert max(found.values()) > 0.05
