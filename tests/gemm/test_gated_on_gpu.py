"""Every cut, row and order of a gated epilogue on the GPU: inside its bound, with the bits of its promise."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules import wgmma_sp as schedules

from ..support import case_of, make_case, plan_of_row, random_data, same_bits
from .kernel_entries import gpu, row_of
from .test_gated import GATED, IN_COLUMNS, ORDERS, RESULTS, SERVING, check, gated

WGMMA_CUTS = [
    *((n, cut) for n in (1, 13, 60, 200, 1030) for cut in schedules.schedules_for(n)),
    *((n, cut) for n in (16, 200, 300) for cut in schedules.schedules_in(3, n)),
]
WGMMA_CUTS += [
    (n, schedules.WgmmaSpSchedule(*shape[:2], tokens, shape[2], k_chunks=parts, stream_k=7))
    for n, tokens in ((8, 8), (72, 80), (112, 112), (200, 208))
    for shape in schedules._STREAM_K_SHAPES
    for parts in (1, 2)
    if schedules.WgmmaSpSchedule(*shape[:2], tokens, shape[2], k_chunks=parts, stream_k=7).fits()
]


@gpu
@pytest.mark.parametrize(("n", "cut"), WGMMA_CUTS, ids=str)
def test_every_cut_of_wgmma_sp(monkeypatch, n, cut):
    """Forced on a problem that is ragged in n, m and k, has several row blocks, and uneven slices.

    Aligned, and where elements go one by one; in rows, or in columns.
    """
    index = WGMMA_CUTS.index((n, cut))
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: cut)
    element = ("f16", "bf16")[index % 2]
    fields = {"epilogue": GATED[index // 2 % 2], "alpha": (64 + index) / 4096}  # of its own: plans are cached
    out = "f32" if index % 3 == 0 else element
    for pads, offsets in (((8, 8), (0, 0)), ((8, 3), (0, 1))):
        check(
            "wgmma_sp",
            pads=pads,
            offsets=offsets,
            n=n,
            m=2000 + 16 * (index % 3),
            k=1048,
            element=element,
            out_element=out,
            y_order=("row", "column")[index // 4 % 2],
            **fields,
        )


@gpu
@pytest.mark.parametrize("row", [row.name for row in SERVING if not row.on_host])
@pytest.mark.parametrize("n", [1, 7, 16, 33, 77, 128])
@pytest.mark.parametrize("m", [16, 48, 1056])
def test_every_row_element_and_result(row, n, m):
    """Ragged in n and m, with strides and from anywhere."""
    for i, element in enumerate(row_of(row).elements):
        for out in RESULTS[element]:
            scales = {"scale_x": "row", "scale_w": "row"} if row_of(row).scales and n % 2 else {}
            fields = {"element": element, "out_element": out, "epilogue": GATED[(i + n) % 2], **scales}
            fields["alpha"] = -(2.0**-12) if element == "s8" else -0.75  # which float16 has room for
            bias = {"bias_element": "f32"} if n % 3 == 0 else {}
            for pads, offsets in (((0, 0), (0, 0)), ((16, 16), (0, 0)), ((0, 5), (0, 3))):
                check(row, pads=pads, offsets=offsets, n=n, m=m, k=528, **fields, **bias)


@gpu
@pytest.mark.parametrize("n", [1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200])
@pytest.mark.parametrize(("m", "k"), [(4096, 1024), (8448, 640), (20000, 136), (208, 16)])
@pytest.mark.parametrize("order", ["row", "column"])
def test_every_cut_of_mma_sp(n, m, k, order):
    fields = {"element": "f16", "out_element": "f32" if n % 2 else "f16", "y_order": order}
    check("mma_sp_many", pads=(8, 8), n=n, m=m, k=k, epilogue=GATED[n % 2], **fields)


@gpu
@pytest.mark.parametrize("order", ORDERS[1:], ids=lambda order: "-".join(order.values()))
@pytest.mark.parametrize("row", [name for name in IN_COLUMNS if not name.startswith("host")])
@gated
@pytest.mark.parametrize("n", [8, 72, 1032])
def test_columns_have_the_bits_of_rows(order, row, epilogue, n):
    n = min(n, 128) if row == "mma_sp" else n
    problem = {"n": n, "m": 1008, "k": 520, "element": "bf16", "epilogue": epilogue, "alpha": 0.75}
    desc, rows = GemmSparse24Descriptor(**problem, **order), GemmSparse24Descriptor(**problem)
    data = random_data(np.random.default_rng(n), desc)
    kind = plan_of_row(row)
    case = case_of(kind.select(desc, device=0), data, (8, 3))
    got = case.run()
    case.check(got)
    assert same_bits(np.ascontiguousarray(got), case_of(kind.select(rows, device=0), data).run())


@gpu
@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
@gated
@pytest.mark.parametrize(("n", "m"), [(1, 16), (5, 144), (33, 4096), (200, 6000)])
def test_strict_has_the_hosts_bits(element, epilogue, n, m):
    for out in RESULTS[element]:
        desc = GemmSparse24Descriptor(
            n=n, m=m, k=72, element=element, out_element=out, epilogue=epilogue, alpha=1.7
        )
        data = random_data(np.random.default_rng(n), desc)
        one = case_of(plan_of_row("inflate_strict").select(desc, device=0), data, (0, 3)).run()
        other = case_of(plan_of_row("host_strict").select(desc, device="host"), data).run()
        assert same_bits(np.ascontiguousarray(one), np.ascontiguousarray(other))


@gpu
@gated
def test_strict_has_hosts_bits_on_whole_range_of_activation(epilogue):
    """Sums are zeros, so that the bias is what is gated."""
    rng = np.random.default_rng(5)
    m = 1 << 20
    bias = rng.uniform(-20, 20, m).astype(np.float32) * 2.0 ** rng.integers(-30, 4, m).astype(np.float32)
    desc = GemmSparse24Descriptor(n=1, m=m, k=0, element="f32", epilogue=epilogue)
    data = random_data(rng, desc)
    data = type(data)(data.dense, data.x, bias)
    results = [
        case_of(plan_of_row(row).select(desc, device=device), data).run()
        for row, device in (("inflate_strict", 0), ("host_strict", "host"))
    ]
    assert same_bits(*results)


@gpu
@pytest.mark.parametrize("n", [1, 128, 1000])
def test_a_llama_layer(n):
    """Gate and up of 14336 features, chosen by select, and the same bits again."""
    desc = GemmSparse24Descriptor(n=n, m=28672, k=4096, element="bf16", epilogue="bias_swiglu")
    case = make_case(desc, 0)
    assert case.plan.explain().chosen == "wgmma_sp"
    first = case.run().copy()
    case.check(first)
    assert first.shape == (n, 14336)
    bound = case.plan.bind(case.args, workspace=case.workspace and case.workspace.view)
    for _ in range(20):
        bound.launch()
    assert same_bits(case.fetch(), first)
