"""Families register their backends; preferences take these names, or a kernel's, and list them otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparse24_plans import GemmSparse24Descriptor, InvalidProblemError, PlanPreference, Tier, explain
from sparse24_plans.blocksparse import kernel_table as blocksparse
from sparse24_plans.gemm import kernel_table as gemm
from sparse24_plans.plan.families import backends
from sparse24_plans.prepare import kernel_table as prepare

BACKENDS = (
    "host host_tensor_core inflate_strict inflate_cublas mma_sp wgmma_sp f32_split3 f32_split6 blocks_wgmma "
    "blocks_wgmma_sp blocks_strict attention_wgmma attention_backward_wgmma conv_wgmma softmax cusparselt "
    "prune decompress pack tile_prune"
)
TIERS = {
    Tier.HOST: "host host_tensor_core",
    Tier.INFLATE: "inflate_strict inflate_cublas blocks_strict",
    Tier.MEMORY: "softmax prune decompress pack tile_prune",
    Tier.TENSOR_CORE: "blocks_wgmma attention_wgmma attention_backward_wgmma conv_wgmma",
    Tier.SPARSE_TENSOR_CORE: "mma_sp wgmma_sp f32_split3 f32_split6 blocks_wgmma_sp cusparselt",
}
ENTRIES = (
    *gemm.ENTRIES,
    *prepare.ENTRIES,
    *blocksparse.MATMUL_ENTRIES,
    *blocksparse.SOFTMAX_ENTRIES,
    *blocksparse.ATTENTION_ENTRIES,
    *blocksparse.CONVOLUTION_ENTRIES,
)


def test_backends_are_exactly_these():
    assert backends() == tuple(sorted(BACKENDS.split()))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_each_kernel_states_its_tier(entry):
    assert entry.backend in TIERS[entry.tier].split()


@pytest.mark.parametrize("name", ["wgmma_sp", "wgmma_sp_invariant", "host"])
def test_a_preference_names_a_backend_or_a_kernel(name):
    assert PlanPreference(prefer_backend=name).prefer_backend == name


@pytest.mark.parametrize("name", ["wgmma", "", 3, ["host"]], ids=repr)
def test_a_wrong_name_is_told_the_backends(name):
    with pytest.raises(InvalidProblemError, match="expected one of attention_backward_wgmma, "):
        PlanPreference(prefer_backend=name)


def test_names_are_known_before_their_family_is_imported():
    code = (
        "import sparse24_plans as s; print(s.PlanPreference(prefer_backend='blocks_strict').prefer_backend)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "blocks_strict"


def test_preferring_a_kernel_leaves_out_its_siblings():
    desc = GemmSparse24Descriptor(n=8, m=64, k=64, element="f32")
    answer = explain(desc, preference={"prefer_backend": "host_strict"}, device="host")
    assert answer.chosen == "host_strict"
    assert ("host_blas", "host", "prefer_backend is host_strict") in answer.rows
