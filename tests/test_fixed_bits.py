"""Results of 200 fixed problems keep their bits: between GPUs, and from one release to the next.

``tests/fixed_bits.json`` has a hash of each result. ``python -m tests.test_fixed_bits`` writes the file anew
on a GPU: only a change that is meant to change bits, and says so in the changelog, may do that. All are of
our own kernels, because the bits of NVIDIA's libraries belong to the library's version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseAttentionPlan,
    BlockSparseConv2dDescriptor,
    BlockSparseConv2dPlan,
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    BlockSparseMatmulPlan,
    BlockSparseSoftmaxDescriptor,
    BlockSparseSoftmaxPlan,
    GemmSparse24Descriptor,
    PlanPreference,
)

from .blocksparse import problems
from .support import make_case

GOLDEN = Path(__file__).parent / "fixed_bits.json"
LIBRARIES = {"cusparselt", "inflate_cublas"}
Problem = Callable[[], tuple[str, bytes]]
"""Runs a problem on GPU 0. Returns the kernel's name and the bytes of its results."""


def products() -> Iterator[tuple[str, Problem]]:
    """Products of 2:4 weights: every element, ragged sizes, with and without batch invariance."""
    rng = np.random.default_rng(2026)
    out_elements = {
        "s8": ("i32", "s8", "bf16"),
        "fp8_e4m3": ("bf16", "f32"),
        "bf16": ("bf16", "f32"),
        "f16": ("f16", "f32"),
    }
    for number in range(130):
        element = ("bf16", "f16", "s8", "fp8_e4m3", "f32")[number % 5]
        fields = {
            "n": int(2 ** rng.uniform(0, 9.5)),
            "m": 16 * int(2 ** rng.uniform(2, 8)),
            "k": 16 * int(2 ** rng.uniform(2, 8)),
            "element": element,
            "epilogue": ("identity", "bias_relu", "bias_gelu", "bias_silu", "bias_swiglu")[rng.integers(5)],
            "out_element": str(rng.choice(out_elements.get(element, ("f32",)))),
            "alpha": float(rng.choice([1.0, 0.5])),
        }
        if fields["out_element"] == "i32":
            fields |= {"epilogue": "identity", "alpha": 1.0}
        wanted = {"require": {"batch_invariant": bool(rng.integers(2)), "bit_stable_on_same_hardware": True}}
        if element in ("bf16", "f16") and number % 4 == 0:
            wanted["prefer_backend"] = "mma_sp"
        if element == "f32":
            wanted["prefer_backend"] = ("f32_split3", "f32_split6", "inflate_strict")[number // 5 % 3]
            fields["epilogue"] = "bias_relu"

        def run(fields: dict = fields, wanted: dict = wanted, seed: int = number) -> tuple[str, bytes]:
            case = make_case(GemmSparse24Descriptor(**fields), 0, PlanPreference(**wanted), seed=seed)
            return case.plan.explain().chosen or "", case.run().tobytes()

        yield f"product {number}", run


def blocks() -> Iterator[tuple[str, Problem]]:
    """Products, attention, softmax and convolution of matrices that keep whole blocks."""
    for number in range(40):
        rng = np.random.default_rng(number)
        block, op = (16, 32, 64, 128)[number % 4], ("dsd", "dds", "sdd")[number % 3]
        side = 512 // block
        layout = BlockSparseLayout(rng.random((2, side, side + 1)) < rng.uniform(0.1, 0.6), block)
        desc = BlockSparseMatmulDescriptor(
            op=op,
            layout=layout,
            n=8 * int(rng.integers(1, 60)),
            element=("bf16", "f16")[number % 2],
            trans_a=bool(rng.integers(2)),
            trans_b=bool(rng.integers(2)),
        )
        yield f"block product {number}", _of(BlockSparseMatmulPlan, desc, layout, number)
    for number in range(10):
        rng = np.random.default_rng(number)
        layout = BlockSparseLayout(rng.random((2, 5, 5)) < 0.5, (64, 128)[number % 2])
        desc = BlockSparseAttentionDescriptor(
            op=("forward", "backward")[number // 2 % 2],
            layout=layout,
            head_size=(64, 128)[number // 4 % 2],
            element=("bf16", "f16")[number % 2],
            causal=number > 5,
        )
        yield f"attention {number}", _of(BlockSparseAttentionPlan, desc, layout, number)
    for number in range(10):
        rng = np.random.default_rng(number)
        layout = BlockSparseLayout(rng.random((1, 7, 9)) < 0.4, (16, 32, 64, 128)[number % 4])
        desc = BlockSparseSoftmaxDescriptor(
            layout=layout, element=("f32", "bf16", "f16")[number % 3], batch=2
        )
        yield f"softmax {number}", _of(BlockSparseSoftmaxPlan, desc, layout, number)
    for number in range(10):
        rng = np.random.default_rng(number)
        block = (16, 32, 64)[number % 3]
        layout = BlockSparseLayout(rng.random((1, 128 // block, 9 * 128 // block)) < 0.4, block)
        desc = BlockSparseConv2dDescriptor(
            layout=layout,
            op=("forward", "dgrad", "wgrad")[number % 3],
            batch=2,
            height=16,
            width=16,
            kernel=3,
            element=("bf16", "f16")[number % 2],
        )
        yield f"convolution {number}", _of(BlockSparseConv2dPlan, desc, layout, number)


def _of(plan_type: type, desc: object, layout: BlockSparseLayout, seed: int) -> Problem:
    def run() -> tuple[str, bytes]:
        plan = plan_type.select(desc, device=0)
        if plan.explain().chosen in LIBRARIES:
            plan = plan_type.select(desc, device=0, preference={"prefer_backend": "blocks_wgmma"})
        case = problems.case_of(plan, problems.random_operands(desc, layout, np.random.default_rng(seed)))
        found = case.run()
        return plan.explain().chosen or "", b"".join(found[name].tobytes() for name in sorted(found))

    return run


PROBLEMS = dict((*products(), *blocks()))


def bits_of(problem: Problem) -> str:
    """A hash of the results."""
    kernel, result = problem()
    assert kernel not in LIBRARIES
    return hashlib.sha256(result).hexdigest()[:32]


def test_the_file_names_exactly_these_problems():
    assert set(json.loads(GOLDEN.read_text())) == set(PROBLEMS)
    assert len(PROBLEMS) == 200


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBLEMS)
def test_bits_equal_the_recorded_ones(name):
    assert bits_of(PROBLEMS[name]) == json.loads(GOLDEN.read_text())[name]


def _named(name: str) -> tuple[str, str]:
    return name, bits_of(PROBLEMS[name])


if __name__ == "__main__":
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        made = dict(pool.map(_named, PROBLEMS))
    GOLDEN.write_text(json.dumps(made, indent=0) + "\n")
