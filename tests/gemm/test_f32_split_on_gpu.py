"""The GPU's kernels of float32 in bf16 terms: every cut, what their bits don't depend on, Inf and NaN."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor, PlanPreference
from sparse24_plans.gemm.backends import f32_split
from sparse24_plans.gemm.schedules.f32_split_heuristics import Chunking, F32Split
from sparse24_plans.gemm.schedules.wgmma_sp import WgmmaSpSchedule
from sparse24_plans.plan import plan as plans
from sparse24_plans.plan.schedule_choice import constants

from ..support import case_of, device_of_row, make_case, plan_of_row, random_data, same_bits
from .batched_cases import batched_case
from .f32_split_cases import every_row, least_workspace
from .kernel_entries import gpu, row_of


def tried(n: int, m: int, row: str) -> tuple[WgmmaSpSchedule, ...]:
    desc = GemmSparse24Descriptor(n=n, m=m, k=4616, element="f32")
    return F32Split(row_of(row).split_terms).candidates(desc)


CUTS = [
    (row, n, m, cut)
    for row in ("f32_split3", "f32_split6")
    for n, m in ((1, 1800), (13, 9000), (20, 1800), (60, 9000), (200, 9000))
    for cut in tried(n, m, row)
]


@gpu
@pytest.mark.parametrize(("row", "n", "m", "cut"), CUTS, ids=str)
def test_every_cut(monkeypatch, row, n, m, cut):
    """Forced on a problem that is ragged in n, m and k, and long enough for groups of sums."""
    monkeypatch.setattr(
        f32_split.Chunking, "of", lambda desc, entry, *_: Chunking.cut(cut, desc, entry.split_terms)
    )
    alpha = 1 + CUTS.index((row, n, m, cut)) / 64  # of its own: plans are cached
    desc = GemmSparse24Descriptor(n=n, m=m, k=4616, element="f32", epilogue="bias_silu", alpha=alpha)
    case = make_case(desc, row=row, pad=8)
    case.check(case.run())


RANGED = [
    (row, n, cut._replace(stream_k=7))
    for row in ("f32_split3", "f32_split6")
    for n in (1, 13, 20, 60)
    for cut in tried(n, 36000, row)
    if cut.stream_k
]
"""Every shape that is tried with stream-K for few tokens, in so few clusters that a small matrix has work for
all of them."""


@gpu
@pytest.mark.parametrize(("row", "n", "cut"), RANGED, ids=str)
def test_stream_k_for_few_tokens_changes_no_bit(monkeypatch, row, n, cut):
    """A range begins within a group of sums, and another cluster summed the groups before it."""
    desc = GemmSparse24Descriptor(n=n, m=1900, k=6024, element="f32", epilogue="bias_silu")
    assert cut.work_tiles(n, desc.m) > cut.stream_k
    assert cut.work_tiles(n, desc.m) % cut.stream_k
    found = set()
    for one in (cut, cut._replace(stream_k=0)):
        plans._select.cache_clear()  # plans of the other schedule
        chunking = Chunking(one, n)
        monkeypatch.setattr(f32_split.Chunking, "of", lambda *_, chunking=chunking: chunking)
        case = make_case(desc, row=row, pad=8)
        assert (" by stream-K" in case.plan.explain().details) == (one == cut)
        found |= {case.run().tobytes() for _ in range(3)}
        case.check(case.run())
    plans._select.cache_clear()
    assert len(found) == 1


@gpu
@every_row
@pytest.mark.parametrize(("n", "m", "k"), [(1000, 300, 4616), (1300, 9000, 1032), (257, 4096, 8192)])
def test_bits_do_not_depend_on_chunks(row, n, m, k):
    """The workspace bounds the tokens of a chunk. C is Y: no chunk may add another's results."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32", epilogue="bias_silu", beta=0.5)
    data = random_data(np.random.default_rng(), desc)
    data.x[n // 2, 7], data.x[n - 1, 9] = np.inf, 3.4e38
    found, chunks = set(), set()
    least = least_workspace(row_of(row), desc)
    for most in (None, least, 2 * least + 2**25):
        wish = PlanPreference(max_workspace_bytes=most)
        plan = plan_of_row(row).select(desc, device=device_of_row(row), preference=wish)
        case = case_of(plan, data, (8, 12), in_place=True)
        found.add(case.run().tobytes())
        chunks.add(plan.parts.choice.entry.kernel.sized(plan.parts.choice).launches // 2)
        bound = plan.bind(case.args, workspace=case.workspace and case.workspace.view)
        case.result.fill(data.c)
        bound.launch()  # one CUDA graph
        found.add(case.fetch().tobytes())
    assert len(chunks) > 1
    assert len(found) == 1


@gpu
@every_row
@pytest.mark.parametrize("shared_weight", [False, True])
@pytest.mark.parametrize(("n", "m", "k"), [(7, 320, 512), (300, 320, 4616)])
def test_batches_in_chunks_have_the_bits_of_their_products(row, n, m, k, shared_weight):
    """All batches use one workspace in turn. Inf and NaN stay in their batch, and C is Y."""
    fields = {"element": "f32", "epilogue": "bias_silu", "beta": 0.5, "shared_weight": shared_weight}
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, batches=3, **fields)
    least = least_workspace(row_of(row), desc)
    for most in (None, least, 2 * least + 2**20):
        wish = PlanPreference(max_workspace_bytes=most)
        plan = plan_of_row(row).select(desc, device=device_of_row(row), preference=wish)
        case = batched_case(plan, orders=("gaps", "reversed gaps", "dense"), in_place=True)
        x = case.inputs[0].numpy()
        x[1, n // 2, 7], x[1, n - 1, 9] = np.inf, 3.4e38
        case.inputs[0].fill(x)
        case.data[1].x[...] = x[1]
        found = case.run()
        for batch in range(3):
            single = case.single(batch)
            assert same_bits(found[batch], single.run())
            if batch != 1:
                single.check(found[batch])
        bound = plan.bind(case.args, workspace=case.workspace and case.workspace.view)
        case.result.fill(np.stack([one.c for one in case.data]))
        bound.launch()  # one CUDA graph
        assert same_bits(found, case.fetch())


@gpu
@every_row
@pytest.mark.parametrize(("m", "k"), [(1280, 1280), (130, 200), (520, 8232)])
def test_bits_do_not_depend_on_which_kernel_splits_x(row, m, k):
    """Producers split X of few tokens, and a pre-pass kernel X of more."""
    most, found = 24, set()
    rng = np.random.default_rng()
    x = (rng.standard_normal((most, k)) * 2.0 ** rng.integers(-120, 60, (most, k))).astype(np.float32)
    for few in (most, 0):
        for n in (1, 2, 7, 8, 9, 16, most):
            desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(constants("f32_producer_split"), "max_tokens", few)
                plans._select.cache_clear()  # plans of the other kernel
                case = make_case(desc, row=row, x=x[:n], pad=4)
                assert (" bf16 terms, " in case.plan.explain().details) == (few < n)
            found.add((n, case.run().tobytes()))
    plans._select.cache_clear()
    assert len(found) == 7


@gpu
@every_row
@pytest.mark.parametrize("epilogue", ["identity", "bias_relu"])
@pytest.mark.parametrize(("n", "m", "k"), [(1, 130, 200), (40, 136, 1032), (300, 200, 520)])
def test_inf_and_nan_on_a_gpu(row, epilogue, n, m, k):
    """Whatever the cut: where NaN comes from the parts of an operand, the sum is made again."""
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32", epilogue=epilogue)
    rng = np.random.default_rng(n)
    data = random_data(rng, desc)
    x, dense = data.x.copy(), data.dense.copy()
    x[0, 3] = np.inf
    if n > 4:
        x[1, 40], x[2, 7], x[3, 8], x[3, 9] = np.nan, 3.4e38, -np.inf, np.inf
    dense[5, 12], dense[m - 1, 33], dense[70, 50] = -np.inf, np.nan, -3.4e38
    case = make_case(desc, row=row, seed=n, dense=dense, x=x)
    got, kept = case.run(), case.dense != 0
    with np.errstate(all="ignore"):
        exact = np.empty((n, m), np.float32)
        for i in range(m):
            at = np.flatnonzero(kept[i])
            exact[:, i] = (x[:, at].astype(np.float64) * case.dense[i, at]).sum(axis=1)
        size = np.abs(x).astype(np.float64) @ np.abs(case.dense).T
        if case.bias is not None:
            exact = exact + case.bias.astype(np.float32)
            exact = np.where(exact < 0, np.float32(0), exact)
    special = ~np.isfinite(exact)
    assert np.isnan(exact).any()
    assert np.isinf(exact).any()
    np.testing.assert_array_equal(got[special], exact[special])
    tame = ~special & np.isfinite(size)
    assert (np.abs(got - exact)[tame] <= 1e-4 * (size[tame] + 1)).all()
    assert np.isfinite(got[~special]).all()


@gpu
@every_row
@pytest.mark.parametrize("epilogue", ["swiglu", "bias_geglu_tanh"])
@pytest.mark.parametrize("n", [5, 200])
def test_gated_pairs_of_which_a_sum_is_nan_are_recomputed(row, epilogue, n):
    """Values near 2^128 have no finite terms: gates, what they multiply, or both, are summed again."""
    desc = GemmSparse24Descriptor(n=n, m=352, k=512, element="f32", epilogue=epilogue)
    data = random_data(np.random.default_rng(0), desc)
    data.x[3], data.dense[:, 8:], data.dense[:, :8] = 3.39e38, 0, 0
    data.dense[:, :8:4] = 2.0**-126 * np.arange(1, 353)[:, None]
    data.dense[::5, :8] = 0
    plans = (plan_of_row(one).select(desc, device=device_of_row(one)) for one in (row, "host_strict"))
    found, want = (case_of(plan, data).run() for plan in plans)
    assert np.isfinite(want[3]).all()
    np.testing.assert_allclose(found[3], want[3], rtol=1e-5)
