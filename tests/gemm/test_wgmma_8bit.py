"""wgmma_sp on s8 and fp8_e4m3: integers to the bit, fp8 inside both its bounds, scales, and every cut."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from sparse24_plans import (
    GemmSparse24Descriptor,
    explain,
)
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules import wgmma_sp as schedules

from ..sample_devices import H200
from ..support import EPILOGUES, make_case, same_bits
from .kernel_entries import OWN

gpu = pytest.mark.gpu
RESULTS = {"s8": ("i32", "s8", "f16", "bf16", "f32"), "fp8_e4m3": ("bf16", "f16", "f32")}
PAIRS = [(element, out) for element, results in RESULTS.items() for out in results]
FIRST = {"s8": "wgmma_sp_s8", "fp8_e4m3": "wgmma_sp_fp8"}
INVARIANT = {"s8": "wgmma_sp_s8", "fp8_e4m3": "wgmma_sp_fp8_invariant"}


def descriptor(element: str, out: str | None = None, **change: object) -> GemmSparse24Descriptor:
    """Ragged sizes; s8 results that both round and saturate, f16 ones that stay finite."""
    alpha = {"f16": 1 / 64, "s8": 1 / 256}.get(out or "", 0.75) if element == "s8" else 0.75
    fields = {"n": 41, "m": 200, "k": 528, "element": element, "out_element": out, "alpha": alpha}
    fields = {name: value for name, value in {**fields, **change}.items() if value is not None}
    return GemmSparse24Descriptor(**fields)


# Selection, without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "require", "row"),
    [
        ("s8", {}, "wgmma_sp_s8"),
        ("s8", {"batch_invariant": True}, "wgmma_sp_s8"),
        ("s8", {"bit_stable_across_hardware": True}, "wgmma_sp_s8"),
        ("fp8_e4m3", {}, "wgmma_sp_fp8"),
        ("fp8_e4m3", {"batch_invariant": True}, "wgmma_sp_fp8_invariant"),
        ("fp8_e4m3", {"max_error_bound": 0.01}, "wgmma_sp_fp8_promoted"),
    ],
)
def test_what_is_chosen(element, require, row):
    desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element=element)
    assert explain(desc, preference={"require": require}, device=H200).chosen == row


def test_the_promoted_bound_hardly_grows_with_k():
    row = wgmma_sp_row("wgmma_sp_fp8_promoted")
    bounds = [row.error_bound(k) for k in (128, 4096, 65536)]
    assert bounds[0] < bounds[1] < bounds[2] < 1.02 * bounds[0]
    assert bounds[2] < wgmma_sp_row("wgmma_sp_fp8").error_bound(4096) / 30


def wgmma_sp_row(name: str):
    from sparse24_plans.gemm.kernel_table import find

    return find(name).guarantee(GemmSparse24Descriptor(n=1, m=8, k=8, element="fp8_e4m3"))


# On a GPU -------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize(("element", "out"), PAIRS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("n", "m"), [(41, 208), (41, 203), (300, 2000)])
def test_every_result_of_every_epilogue(element, out, epilogue, n, m):
    desc = descriptor(element, out, epilogue=epilogue, n=n, m=m)
    case = make_case(desc, row=FIRST[element], pad=16)
    got = case.run()
    case.check(got)
    if element == "s8" and epilogue in ("identity", "bias", "bias_relu"):
        assert same_bits(got, make_case(desc, row="host_strict", pad=16).run())


@gpu
@pytest.mark.parametrize(("scale_x", "scale_w"), list(product(("none", "tensor", "row"), repeat=2)))
@pytest.mark.parametrize(("element", "out"), [("s8", "bf16"), ("fp8_e4m3", "f32")])
@pytest.mark.parametrize("n", [41, 300])
def test_scales(element, out, scale_x, scale_w, n):
    desc = descriptor(element, out, n=n, epilogue="bias_relu", scale_x=scale_x, scale_w=scale_w)
    case = make_case(desc, row=FIRST[element])
    got = case.run()
    case.check(got)
    if element == "s8":
        assert same_bits(got, make_case(desc, row="host_strict").run())


RANGED_ROWS = 8900
EIGHT_BIT_CUTS = [(n, cut) for n in (1, 13, 60, 200, 1030) for cut in schedules.schedules_for(n)]
EIGHT_BIT_CUTS += [
    (n, cut) for n in (13, 300) for cut in schedules.schedules_for(n, RANGED_ROWS) if cut.stream_k
]


@gpu
@pytest.mark.parametrize(("n", "cut"), EIGHT_BIT_CUTS, ids=str)
@pytest.mark.parametrize("odd", [0, 1])
def test_every_cut_sums_integers_exactly(monkeypatch, n, cut, odd):
    """All K of a row beyond what float32 holds; ragged in n, m and k, with uneven slices."""
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: cut)
    rng = np.random.default_rng(n)
    least = RANGED_ROWS if cut.stream_k else 1000
    m = least + 4 * EIGHT_BIT_CUTS.index((n, cut)) + odd  # of its own: plans are cached
    k = 2336 if cut.stream_k else 3344
    x, dense = (rng.integers(120, 128, shape).astype(np.int8) for shape in ((n, k), (m, k)))
    dense[:, 2::4] = dense[:, 3::4] = 0
    case = make_case(GemmSparse24Descriptor(n=n, m=m, k=k, element="s8"), row="wgmma_sp_s8", x=x, dense=dense)
    want = x.astype(np.float64) @ dense.astype(np.float64).T  # exact, below 2^53
    assert want.min() > 2**24
    for _ in range(5):  # a race would show
        assert same_bits(case.run(), want.astype(np.int32))


@gpu
@pytest.mark.parametrize("element", RESULTS)
@pytest.mark.parametrize("rows", [FIRST, INVARIANT], ids=["first", "invariant"])
def test_runs_again_with_the_same_bits(element, rows):
    case = make_case(descriptor(element, epilogue="bias_gelu", n=300, m=1000), row=rows[element])
    first = case.run()
    assert all(same_bits(case.run(), first) for _ in range(20))


def test_where_their_promises_are_tested():
    """Bounds, batches and special values of these rows, beside all others."""
    for name in {*FIRST.values(), *INVARIANT.values()}:
        assert name in OWN
