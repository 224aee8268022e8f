"""Promises about bits: run to run, process to process, under load, in any batch, on any hardware."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sparse24_plans import ElementKind, GemmSparse24Descriptor, PlanPreference
from sparse24_plans.gemm.backends import wgmma_sp
from sparse24_plans.gemm.schedules.mma_sp import split_k_of
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.gemm.schedules.wgmma_sp import schedules_in

from ..support import EPILOGUES, make_case, same_bits
from .kernel_entries import OWN, case_of, gpu, medium, on_host, promising, row_of, serves, tokens


@promising("deterministic")
def test_deterministic(row, element, op, epilogue):
    case = case_of(row, element=element, op=op, **medium(row))
    first = case.run()
    for _ in range(20):
        case.result.fill(np.zeros_like(first))
        assert same_bits(case.run(), first)


def digest_of(row: str, element: str, op: str) -> str:
    epilogue = "bias_gelu" if op == "forward" else "identity"
    case = case_of(row, element=element, op=op, epilogue=epilogue, **medium(row))
    return hashlib.sha256(case.run().tobytes()).hexdigest()


IN_ANOTHER_PROCESS = """
import json
import sys
from tests.gemm.test_bits import digest_of
print(json.dumps([digest_of(*one) for one in json.loads(sys.argv[1])]))
"""


def check_bits_in_other_processes(problems: list[tuple[str, str, str]], processes: int) -> None:
    here = [digest_of(*one) for one in problems]
    for _ in range(processes):
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, json.dumps(problems)]
        there = subprocess.run(command, capture_output=True, text=True)
        assert there.returncode == 0, there.stderr
        found = dict(zip(problems, json.loads(there.stdout), strict=True))
        assert found == dict(zip(problems, here, strict=True))


BIT_STABLE = [one.values[:3] for one in promising("bit_stable_on_same_hardware").args[1]]


def test_bit_stable_in_another_process_on_the_host():
    """One process, since starting it takes longer than the products."""
    check_bits_in_other_processes([one for one in BIT_STABLE if on_host(one[0])], 1)


@gpu
@pytest.mark.parametrize(("row", "element", "op"), [one for one in BIT_STABLE if not on_host(one[0])])
def test_bit_stable_in_other_processes(row, element, op):
    check_bits_in_other_processes([(row, element, op)], 2)


@promising("bit_stable_on_same_hardware")
def test_bit_stable_under_load_and_on_every_stream(row, element, op, epilogue):
    cases = [case_of(row, element=element, op=op, **medium(row)) for _ in range(4 if on_host(row) else 8)]
    alone = cases[0].run().copy()
    if on_host(row):
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda case: case.run(), cases))
    else:
        import cupy

        streams = [cupy.cuda.Stream(non_blocking=True) for _ in cases]
        for _ in range(10):
            for case, stream in zip(cases, streams, strict=True):
                case.plan.run(case.args, workspace=case.workspace and case.workspace.view, stream=stream)
        results = [case.fetch() for case in cases]
    assert all(same_bits(result, alone) for result in results)


# Batches ------------------------------------------------------------------------------------------


INVARIANT_SHAPES = [
    (8448, 1040),
    (600, 8208),
    (20000, 1040),
    (2440, 4112),
    (1080, 4112),
    (3000, 4112),
    (264, 36880),
]
"""M, K."""


def test_weights_of_all_numbers_of_slices_are_under_test():
    for element in ("bf16", "fp8_e4m3"):
        assert {WGMMA_SP.split_k(m, k, ElementKind(element)) for m, k in INVARIANT_SHAPES} == {1, 2, 3, 4, 8}


@promising("batch_invariant")
@pytest.mark.parametrize(("m", "k"), INVARIANT_SHAPES)
def test_batch_invariant(row, element, op, epilogue, m, k):
    """A row's bits are the same alone, in any batch size and at any position, whatever cut n calls for."""
    most = 9 if on_host(row) else tokens(row, 1100 if op == "forward" else 300)
    sizes = {"m": min(m // 200 * 8, 160), "k": 64} if on_host(row) else {"m": m, "k": k}
    more = {"epilogue": "bias_silu"} if op == "forward" else {}
    full = case_of(row, n=most, element=element, op=op, **more, **sizes)
    whole = full.run()
    dense = full.dense.astype(full.plan.descriptor.element.dtype)
    for n in (1, 2, 7, 16, 31, 33, 64, 65, 128, 129, 299, 1024):
        if n > most:
            continue
        rows = np.random.default_rng(n).permutation(most)[:n]
        part = case_of(row, n=n, element=element, op=op, dense=dense, x=full.x[rows], **more, **sizes)
        if more:
            part.inputs[1].fill(full.inputs[1].numpy())
        assert same_bits(part.run(), whole[rows])


@promising("batch_invariant", ops=["forward"])
@pytest.mark.parametrize(("m", "k"), INVARIANT_SHAPES)
def test_slices_of_a_weight_along_m_keep_their_bits(row, element, op, epilogue, m, k):
    """With whole_m the weight may be cut anywhere: at tiles, as a packed weight is, or elsewhere."""
    n = 5 if on_host(row) else tokens(row, 80)
    m, k = (m // 200 * 8 + 72, 64) if on_host(row) else (m, k)
    whole = case_of(row, n=n, m=m, k=k, element=element)
    y, dense = whole.run(), whole.dense.astype(whole.plan.descriptor.element.dtype)
    of_a_part = PlanPreference(whole_m=m)
    for start, stop in ((0, m // 2 // 64 * 64), (m // 2 // 64 * 64, m), (m // 3, m // 3 + 8)):
        problem = GemmSparse24Descriptor(n=n, m=stop - start, k=k, element=element)
        part = make_case(problem, row=row, preference=of_a_part, dense=dense[start:stop], x=whole.x)
        assert same_bits(part.run(), y[:, start:stop])


@gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize(("m", "k"), [(4096, 4096), (8448, 1032), (20000, 136), (200, 520)])
@pytest.mark.parametrize("n", [1, 9, 40, 64])
def test_both_tensor_core_kernels_sum_alike(monkeypatch, element, m, k, n):
    """wgmma_sp has the bits of mma_sp where it cuts K into as many slices."""
    slices = split_k_of(m)
    schedule = next(one for one in schedules_in(slices, n) if one.split_k * one.k_chunks == slices)
    monkeypatch.setattr(wgmma_sp.WGMMA_SP, "best", lambda *_: schedule)
    problem = {"n": n, "m": m, "k": k, "element": element, "alpha": 1.25}  # of its own: plans are cached
    first = case_of("mma_sp_many", **problem)
    want, dense = first.run(), first.dense.astype(first.plan.descriptor.element.dtype)
    assert same_bits(case_of("mma_sp", **problem, dense=dense, x=first.x).run(), want)
    assert same_bits(case_of("wgmma_sp", **problem, dense=dense, x=first.x).run(), want)


# Hardware -----------------------------------------------------------------------------------------


@promising("bit_stable_across_hardware", epilogues=EPILOGUES)
def test_bit_stable_across_hardware(row, element, op, epilogue):
    """The host's strict row stands for every other device; what that one computes, test_strict.py says."""
    if row == "host_strict":
        pytest.skip("the oracle itself: test_strict.py, test_elements8.py")
    problem = {"n": 21, "m": 104, "k": 160, "element": element, "op": op, "epilogue": epilogue}
    problem["n"] = tokens(row, 21)
    for seed in range(2):
        assert same_bits(
            case_of(row, **problem, seed=seed).run(), case_of("host_strict", **problem, seed=seed).run()
        )


def test_every_row_is_under_test():
    """Each row has something that it is run for here; the rest is cuSPARSELt's."""
    for name in OWN:
        element = row_of(name).elements[0]
        assert serves(name, GemmSparse24Descriptor(n=1, m=8, k=16, element=element))
    if on_host("host_blas"):
        case = case_of("host_blas", n=2, m=8, k=16, element="f32")
        case.check(case.run())
