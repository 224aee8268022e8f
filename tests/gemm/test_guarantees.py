"""Every promise in the registry has a test here that fails if it is untrue, for every row that makes it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan, GuaranteeRequirement, PlanPreference
from sparse24_plans.gemm.table import ROWS

from ..support import ELEMENTS, make_case, same_bits

gpu = pytest.mark.gpu
PREFERENCE = {
    "host_blas": ("host", PlanPreference()),
    "host_strict": ("host", PlanPreference(require={"batch_invariant": True})),
    "inflate_cublas": (0, PlanPreference(prefer_backend="inflate_cublas")),
    "inflate_strict": (0, PlanPreference(prefer_backend="inflate_strict")),
    "mma_sp": (0, PlanPreference(prefer_backend="mma_sp")),
    "mma_sp_few": (0, PlanPreference(prefer_backend="mma_sp")),
    "mma_sp_batch": (0, PlanPreference(prefer_backend="mma_sp")),
    "mma_sp_many": (0, PlanPreference(prefer_backend="mma_sp")),
    "wgmma_sp": (0, PlanPreference(prefer_backend="wgmma_sp")),
    "wgmma_sp_invariant": (
        0,
        PlanPreference(prefer_backend="wgmma_sp", require={"batch_invariant": True}),
    ),
    # Tested in tests/test_wgmma_8bit.py.
    "wgmma_sp_s8": (0, PlanPreference(prefer_backend="wgmma_sp")),
    "wgmma_sp_fp8": (0, PlanPreference(prefer_backend="wgmma_sp")),
    "wgmma_sp_fp8_promoted": (
        0,
        PlanPreference(prefer_backend="wgmma_sp", require={"batch_invariant": True}),
    ),
    # Tested in sizes that the library takes: tests/test_cusparselt.py.
    "cusparselt": (0, PlanPreference(prefer_backend="cusparselt")),
    "cusparselt_fp8": (0, PlanPreference(prefer_backend="cusparselt")),
}


def test_every_row_is_listed_here():
    assert set(PREFERENCE) == {spec.name for spec in ROWS}


def promising(
    flag: str,
    value: object = True,
    elements: tuple[str, ...] = ("bf16",),
    ops: tuple[str, ...] = ("forward",),
) -> pytest.MarkDecorator:
    """The rows whose guarantee has this value, straight from the registry, with all that they serve."""
    problem = GemmSparse24Descriptor(n=1, m=8, k=8, element="bf16")
    combinations = [
        pytest.param(spec.name, element, op, marks=[] if spec.on_host else [gpu])
        for spec in ROWS
        if getattr(spec.guarantee(problem), flag) == value and spec.backend != "cusparselt"
        for element in elements
        for op in ops
        if serves(spec.name, element, op)
    ]
    return pytest.mark.parametrize(("row", "element", "op"), combinations)


BOTH_OPS = ("forward", "dgrad")


def case_of(row: str, **problem: object):
    device, preference = PREFERENCE[row]
    seed = problem.pop("seed", 0)
    dense, x = problem.pop("dense", None), problem.pop("x", None)
    return make_case(GemmSparse24Descriptor(**problem), device, preference, seed=seed, dense=dense, x=x)


def medium(row: str) -> dict[str, int]:
    if PREFERENCE[row][0] == "host":
        return {"n": 6, "m": 48, "k": 96}
    return {"n": {"mma_sp": 16, "mma_sp_many": 200}.get(row, 96), "m": 1024, "k": 2048}


def serves(row: str, element: str = "bf16", op: str = "forward") -> bool:
    spec = next(spec for spec in ROWS if spec.name == row)
    return element in spec.elements and op in spec.ops


@promising("deterministic", ops=BOTH_OPS)
def test_deterministic(row, element, op):
    case = case_of(row, element=element, op=op, **medium(row))
    first = case.run()
    assert all(same_bits(case.run(), first) for _ in range(20))


IN_ANOTHER_PROCESS = """
import sys, hashlib
from tests.gemm.test_guarantees import case_of, medium
case = case_of(sys.argv[1], element="f16", epilogue="bias_gelu", **medium(sys.argv[1]))
print(hashlib.sha256(case.run().tobytes()).hexdigest())
"""


@promising("bit_stable_on_same_hardware")
def test_bit_stable_in_other_processes(row, element, op):
    import hashlib

    case = case_of(row, element="f16", epilogue="bias_gelu", **medium(row))
    here = hashlib.sha256(case.run().tobytes()).hexdigest()
    for _ in range(2):
        there = subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, row], capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here


@promising("bit_stable_on_same_hardware", elements=ELEMENTS)
def test_bit_stable_under_load_and_on_every_stream(row, element, op):
    if PREFERENCE[row][0] == "host":
        cases = [case_of(row, element=element, **medium(row)) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda case: case.run(), cases))
    else:
        import cupy

        cases = [case_of(row, element=element, **medium(row)) for _ in range(8)]
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in cases]
        for _ in range(10):
            for case, stream in zip(cases, streams, strict=True):
                case.plan.run(case.args, workspace=case.workspace and case.workspace.view, stream=stream)
        results = [case.fetch() for case in cases]
    alone = case_of(row, element=element, **medium(row)).run()
    assert all(same_bits(result, alone) for result in results)


@promising("batch_invariant", elements=ELEMENTS, ops=BOTH_OPS)
@pytest.mark.parametrize("m", [4096, 8448, 20000])
def test_batch_invariant(row, element, op, m):
    """A row's bits are the same alone, in any batch size and at any position, whatever cut n calls for."""
    most = 9 if PREFERENCE[row][0] == "host" else 300
    sizes = {"m": m // 100, "k": 64} if PREFERENCE[row][0] == "host" else {"m": m, "k": 1032}
    full = case_of(row, n=most, element=element, op=op, **sizes)
    whole = full.run()
    dense = full.dense.astype(full.plan.descriptor.element.dtype)
    for n in (1, 2, 7, 16, 31, 64, 65, 128, 129, 299):
        if n > most:
            continue
        rows = np.random.default_rng(n).permutation(most)[:n]
        part = case_of(row, n=n, element=element, op=op, dense=dense, x=full.x[rows], **sizes)
        assert same_bits(part.run(), whole[rows])


@gpu
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize(("m", "k"), [(4096, 4096), (8448, 1032), (20000, 136), (200, 8)])
@pytest.mark.parametrize("n", [1, 9, 40, 100, 300, 1100])
def test_the_invariant_rows_give_the_same_bits(element, m, k, n):
    """So a batch-invariant pipeline may decode with one kernel and prefill with another."""
    mma = case_of("mma_sp", n=n, m=m, k=k, element=element)
    dense = mma.dense.astype(mma.plan.descriptor.element.dtype)
    wgmma = case_of("wgmma_sp_invariant", n=n, m=m, k=k, element=element, dense=dense, x=mma.x)
    assert same_bits(wgmma.run(), mma.run())


@promising("bit_stable_across_hardware", elements=ELEMENTS)
def test_bit_stable_across_hardware(row, element, op):
    """The host oracle stands for every other device."""
    problem = {"n": 21, "m": 100, "k": 160, "element": element, "epilogue": "bias_silu"}
    assert same_bits(case_of(row, **problem).run(), case_of("host_strict", **problem).run())


def tiny_values(row: str, element: str):
    """Inputs whose every product and sum is a subnormal float32."""
    dtype = GemmSparse24Descriptor(n=1, m=1, k=8, element=element).element.dtype
    rng = np.random.default_rng(1)
    scale = 1e-4 if element == "f16" else 1e-21
    x = (rng.uniform(0.5, 1.0, (4, 16)) * scale).astype(dtype)
    dense = (rng.uniform(0.5, 1.0, (8, 16)) * scale).astype(dtype)
    alpha = 1e-33 if element == "f16" else 1.0
    return case_of(row, n=4, m=8, k=16, element=element, out_element="f32", alpha=alpha, x=x, dense=dense)


@promising("subnormals", "preserved", elements=ELEMENTS)
def test_subnormals_are_preserved(row, element, op):
    case = tiny_values(row, element)
    got = case.run()
    case.check(got)
    assert (np.abs(got) < np.finfo(np.float32).tiny).all()
    assert (got != 0).all()


def with_nonfinite_at_pruned(row: str, value: float, element: str):
    rng = np.random.default_rng(2)
    dtype = GemmSparse24Descriptor(n=1, m=1, k=8, element=element).element.dtype
    dense = rng.uniform(1.0, 2.0, (24, 64)).astype(dtype)
    dense[:, 2::4] = 0  # column 2 of every group is pruned in every row
    dense[:, 3::4] = 0
    x = rng.standard_normal((5, 64)).astype(dtype)
    x[:, 2::4] = value
    return case_of(row, n=5, m=24, k=64, element=element, x=x, dense=dense)


@promising("nonfinite", "skips_pruned", elements=ELEMENTS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nonfinite_at_pruned_positions_is_skipped(row, element, op, value):
    case = with_nonfinite_at_pruned(row, value, element)
    case.x[:, 2::4] = 0
    case.check(case.run())


@promising("nonfinite", "propagates")
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_nonfinite_at_pruned_positions_propagates(row, element, op, value):
    assert np.isnan(with_nonfinite_at_pruned(row, value, "bf16").run()).all()


@promising("accumulator", "f32", elements=ELEMENTS)
@pytest.mark.parametrize("kind", ["normal", "one sign", "cancelling"])
def test_error_bound(row, element, op, kind):
    """Also where rounding errors add up (one sign) and where the result is small beside its terms."""
    on_host = PREFERENCE[row][0] == "host"
    n, m, k = (4, 16, 1024) if on_host else (48, 512, 8192)
    rng = np.random.default_rng(7)
    dtype = GemmSparse24Descriptor(n=1, m=1, k=8, element=element).element.dtype
    x, dense = rng.standard_normal((n, k)), rng.standard_normal((m, k))
    if kind == "one sign":
        x, dense = np.abs(x) + 0.5, np.abs(dense) + 0.5
    if kind == "cancelling":
        dense[:, k // 2 :] = -dense[:, : k // 2]
        x[:, k // 2 :] = x[:, : k // 2]
    case = case_of(
        row, n=n, m=m, k=k, element=element, out_element="f32", x=x.astype(dtype), dense=dense.astype(dtype)
    )
    case.check(case.run())


@pytest.mark.parametrize("flag", ["deterministic", "batch_invariant", "bit_stable_across_hardware"])
def test_a_requirement_is_a_filter(flag):
    desc = GemmSparse24Descriptor(n=4, m=8, k=16, element="f32")
    assert not getattr(GemmSparse24Plan.select(desc, device="host").guarantee, flag)
    strict = GemmSparse24Plan.select(
        desc, device="host", preference=PlanPreference(require=GuaranteeRequirement(**{flag: True}))
    )
    assert getattr(strict.guarantee, flag)


def test_max_error_bound_is_a_filter():
    desc = GemmSparse24Descriptor(n=4, m=8, k=4096, element="f32")
    loose = GemmSparse24Plan.select(desc, device="host").guarantee.error_bound(4096)
    tight = PlanPreference(require=GuaranteeRequirement(max_error_bound=loose * 0.9))
    chosen = GemmSparse24Plan.select(desc, device="host", preference=tight)
    assert chosen.guarantee.error_bound(4096) <= loose * 0.9


def test_error_bound_is_gamma_n():
    strict = next(spec for spec in ROWS if spec.name == "host_strict")
    forward = strict.guarantee(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"))
    dgrad = strict.guarantee(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32", op="dgrad"))
    u = 2.0**-24
    assert forward.error_bound(4096) == pytest.approx(2048 * u / (1 - 2048 * u))
    assert dgrad.error_bound(4096) == pytest.approx(4096 * u / (1 - 4096 * u))
    assert forward.error_bound(0) == 0
    assert forward.error_bound(2**30) == float("inf")
