"""Which configurations are tried: those that keep a kernel's promises, for kernels that can be tuned."""

from __future__ import annotations

from unittest import mock

import pytest

from sparse24_plans import GemmSparse24Descriptor, PlanPreference, UnsupportedError
from sparse24_plans.gemm import wgmma
from sparse24_plans.gemm.backends import mma_sp, wgmma_sp
from sparse24_plans.gemm.kernel_table import find
from sparse24_plans.gemm.schedules import mma_sp as schedules
from sparse24_plans.gemm.schedules.wgmma_sp import WgmmaSpSchedule
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.tuning.search import tunable

from .cases import DESC, H200


@pytest.mark.parametrize("n", [1, 8, 16, 33, 64, 128, 200])
@pytest.mark.parametrize("m", [256, 4096, 28672])
def test_candidates_of_mma_sp_keep_the_bits(n, m):
    """Slices of K alone fix them."""
    desc = DESC.model_copy(update={"n": n, "m": m})
    default = schedules.MmaSpSchedule.in_clusters(n, m, 132)
    found = mma_sp.Kernel.candidates(desc, H200)
    assert len({tuple(one.values()) for one in found}) == len(found)
    with mock.patch.object(mma_sp, "load") as load:
        row = find("mma_sp")
        for configuration in found:
            mma_sp.Kernel(Choice(desc, H200, row, PlanPreference(), configuration))
            asked = load.call_args.args[4]
            assert asked["SPLIT_K"] == default.split_k
            assert asked["STAGES"] >= 2
            assert asked["N8_TILES"] == configuration["n8_tiles"]
            assert tuple(configuration.values()) != default[1:4]


@pytest.mark.parametrize("n", [16, 64, 200, 2048])
@pytest.mark.parametrize(
    "name", ["wgmma_sp", "wgmma_sp_invariant", "wgmma_sp_fp8_invariant", "wgmma_sp_fp8_promoted"]
)
def test_wgmma_sp_refuses_schedules_that_break_its_promises(monkeypatch, n, name):
    monkeypatch.setattr(wgmma, "load", lambda *args, **options: None)
    row = find(name)
    element = "fp8_e4m3" if name.endswith("promoted") else "bf16"
    desc = GemmSparse24Descriptor(n=n, m=8192, k=4096, element=element)
    kept = []
    for configuration in wgmma_sp.Kernel.candidates(desc, H200):
        try:
            wgmma_sp.Kernel(Choice(desc, H200, row, PlanPreference(), configuration))
        except UnsupportedError:
            continue
        kept.append(WgmmaSpSchedule(**configuration))
    assert kept
    if row.guarantee(desc).batch_invariant:
        assert {one.split_k * one.k_chunks for one in kept} == {1}  # of 8192 out features


def test_where_there_is_one_schedule_there_are_no_candidates():
    assert mma_sp.Kernel.candidates(DESC, H200.model_copy(update={"compute_capability": (8, 0)})) == []


def test_rows_that_can_be_tuned():
    names = [row.name for row in tunable(DESC, H200)]
    assert {"mma_sp", "cusparselt"} <= set(names)
    backends = [find(name).backend for name in names]
    assert len(set(backends)) == len(backends)
    ragged = tunable(DESC.model_copy(update={"n": 9}), H200)
    assert "cusparselt" not in [row.name for row in ragged]


@pytest.mark.parametrize("empty", ["n", "m"])
def test_an_empty_result_has_no_kernel_to_tune(empty):
    assert tunable(DESC.model_copy(update={empty: 0}), H200) == []
