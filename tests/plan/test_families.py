"""Families register their backends; preferences take these names, or a kernel's, and list them otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparse24_plans import (
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PlanPreference,
    Tier,
    UnsupportedError,
    explain,
)
from sparse24_plans.blocksparse import kernel_table as blocksparse
from sparse24_plans.gemm import kernel_table as gemm
from sparse24_plans.plan.families import backends
from sparse24_plans.prepare import kernel_table as prepare

BACKENDS = (
    "host host_tensor_core inflate_strict inflate_cublas mma_sp wgmma_sp f32_split3 f32_split6 blocks_mma "
    "blocks_wgmma blocks_wgmma_sp blocks_strict attention_wgmma attention_backward_wgmma conv_wgmma softmax "
    "cusparselt prune decompress pack tile_prune quantize"
)
TIERS = {
    Tier.HOST: "host host_tensor_core",
    Tier.INFLATE: "inflate_strict inflate_cublas blocks_strict",
    Tier.MEMORY: "softmax prune decompress pack tile_prune quantize",
    Tier.TENSOR_CORE: "blocks_mma blocks_wgmma attention_wgmma attention_backward_wgmma conv_wgmma",
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


@pytest.mark.parametrize(
    ("field", "name"),
    [("prefer_backend", name) for name in BACKENDS.split()]
    + [("prefer_kernel", entry.name) for entry in ENTRIES],
)
def test_a_preference_names_a_backend_or_a_kernel(field, name):
    assert getattr(PlanPreference(**{field: name}), field) == name


@pytest.mark.parametrize("name", ["wgmma", "", 3, ["host"], None], ids=repr)
@pytest.mark.parametrize(
    ("field", "other", "known"),
    [
        ("prefer_backend", "wgmma_sp_invariant", "attention_backward_wgmma, "),
        ("prefer_kernel", "blocks", "attention_backward_wgmma, "),
    ],
)
def test_a_wrong_name_is_told_the_known_ones(field, other, known, name):
    with pytest.raises(InvalidProblemError, match=f"{field}: expected one of {known}"):
        PlanPreference(**{field: other if name is None else name})


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
    preference = {"prefer_kernel": "host_strict"}
    answer = explain(desc, preference=preference, device="host")
    assert answer.chosen == "host_strict"
    assert ("host_blas", "host", "prefer_kernel is host_strict") in answer.rows
    assert GemmSparse24Plan.select(desc, preference=preference, device="host").kernel == "host_strict"


def test_a_forced_kernel_that_cannot_serve_says_why():
    desc = GemmSparse24Descriptor(n=8, m=64, k=64, element="f32")
    with pytest.raises(UnsupportedError, match=r"\bwgmma_sp: serves elements f16, bf16, not f32;"):
        GemmSparse24Plan.select(desc, preference={"prefer_kernel": "wgmma_sp"}, device="h100")
