"""The cuSPARSELt backend on a GPU: what it computes, what it promises, and that its plans live.

The same things as for the package's own kernels, in sizes that the library takes: n a multiple of 8 (16 for
8-bit elements), m and k of 16 (32).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BackendUnavailableError,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    MisalignedOperandError,
    PlanPreference,
    Sparse24Weight,
    UnsupportedError,
    Workspace,
    WorkspaceTooSmallError,
)
from sparse24_plans._vendor import cusparselt_abi as abi
from sparse24_plans._vendor.library_error import LibraryError
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.gemm import table
from sparse24_plans.gemm.backends import cusparselt
from sparse24_plans.gemm.tuned import EMPTY, TunedKernel, TuningTable, shipped
from sparse24_plans.tuning import worker as tuning_worker

from ..support import Guarded, check_that_nothing_is_allocated, make_case, random_values, run_from_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(abi.version() is None, reason="cuSPARSELt is not installed"),
]
FORCED = PlanPreference(prefer_backend="cusparselt")
RESULTS = {"f16": ("f16",), "bf16": ("bf16",), "s8": ("i32", "s8", "f16", "bf16")}
RESULTS["fp8_e4m3"] = ("bf16", "f16", "f32")
PAIRS = [(element, out) for element, results in RESULTS.items() for out in results]
pairs = pytest.mark.parametrize(("element", "out"), PAIRS)
elements = pytest.mark.parametrize("element", RESULTS)


def descriptor(element: str, out: str | None = None, **change: object) -> GemmSparse24Descriptor:
    """n=48, m=96, k=160; a bias of the type that the library takes; s8 results that round and saturate."""
    out = out or RESULTS[element][0]
    alpha = {"f16": 1 / 64, "s8": 1 / 256}.get(out, 0.75) if element == "s8" else 0.75
    fields = {"n": 48, "m": 96, "k": 160, "element": element, "out_element": out, "alpha": alpha}
    fields["bias_element"] = "f32" if out in ("i32", "s8") else out
    return GemmSparse24Descriptor(**{**fields, **change})


def case_of(desc: GemmSparse24Descriptor, **options: object):
    return make_case(desc, 0, FORCED, **options)


def medium(element: str = "bf16", **change: object):
    return case_of(descriptor(element, n=96, m=1024, k=512, epilogue="bias_relu", **change))


# Results ------------------------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize("epilogue", ["identity", "bias", "bias_relu"])
def test_forward(element, out, epilogue):
    case = case_of(descriptor(element, out, epilogue=epilogue))
    case.check(case.run())


@pytest.mark.parametrize(("element", "out"), [("s8", "s8"), ("fp8_e4m3", "bf16")])
def test_the_librarys_gelu_is_the_tanh_approximation(element, out):
    alpha = 1 / 2048 if element == "s8" else 0.25
    case = case_of(descriptor(element, out, epilogue="bias_gelu_tanh", alpha=alpha))
    case.check(case.run())


@elements
@pytest.mark.parametrize("n", [16, 32, 128, 1024])
@pytest.mark.parametrize(("m", "k"), [(32, 32), (32, 2048), (4096, 64), (160, 416), (2080, 1056)])
def test_sizes(element, n, m, k):
    case = case_of(descriptor(element, n=n, m=m, k=k))
    case.check(case.run())


@elements
def test_model_sized(element):
    case = case_of(descriptor(element, n=208, m=4096, k=4096))
    case.check(case.run())


@pairs
@pytest.mark.parametrize("pad", [16, 64])
def test_row_strides(element, out, pad):
    case = case_of(descriptor(element, out), pad=pad)
    case.check(case.run())


@pairs
@pytest.mark.parametrize(("x_order", "y_order"), list(product(("row", "column"), repeat=2)))
@pytest.mark.parametrize("pad", [0, 32])
def test_orders(element, out, x_order, y_order, pad):
    """In columns both: the sparse operand on the left of row-major X^T, into row-major Y^T."""
    desc = descriptor(element, out, epilogue="bias", x_order=x_order, y_order=y_order)
    if x_order == "column" and ElementKind(element).itemsize == 1:
        with pytest.raises(UnsupportedError, match="serves x_order row for"):
            case_of(desc)
        return
    case = case_of(desc, pad=pad)
    case.check(case.run())


@pytest.mark.parametrize("out", RESULTS["s8"])
@pytest.mark.parametrize("epilogue", ["identity", "bias_relu"])
def test_a_scale_a_channel(out, epilogue):
    rng = np.random.default_rng(5)
    x, dense = (rng.integers(-9, 10, shape).astype(np.int8) for shape in ((48, 64), (96, 64)))
    desc = descriptor("s8", out, alpha=1.0, scale_w="row", epilogue=epilogue, k=64)
    case = case_of(desc, x=x, dense=dense)
    case.check(case.run())


def test_large_sums_of_s8_are_right_to_float32():
    """Beyond 2^24 the library's epilogue rounds to float32; the guarantee's tolerance says so."""
    x, dense = np.full((16, 8192), 127, np.int8), np.zeros((32, 8192), np.int8)
    dense[:, 0::4], dense[:, 1::4], dense[0, 0] = 127, 126, 125
    case = case_of(GemmSparse24Descriptor(n=16, m=32, k=8192, element="s8"), x=x, dense=dense)
    got = case.run().astype(np.float64)
    case.check(got)
    exact = x.astype(np.float64) @ dense.T.astype(np.float64)
    assert (got == exact.astype(np.float32)).all()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pair=st.sampled_from(PAIRS),
    units=st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 12)),
    epilogue=st.sampled_from(["identity", "bias", "bias_relu"]),
    y_order=st.sampled_from(["row", "column"]),
    pad=st.sampled_from([0, 16, 48]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_problem(pair, units, epilogue, y_order, pad, seed):
    n, m, k = units[0] * 16, units[1] * 32, units[2] * 32
    desc = descriptor(*pair, n=n, m=m, k=k, epilogue=epilogue, y_order=y_order)
    case = case_of(desc, seed=seed, pad=pad)
    case.check(case.run())


# What a row promises ------------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize("kind", ["normal", "one sign", "cancelling"])
def test_error_bound(element, out, kind):
    n, m, k = 48, 512, 8192
    rng = np.random.default_rng(7)
    x, dense = (random_values(rng, shape, ElementKind(element)) for shape in ((n, k), (m, k)))
    if kind == "one sign":
        # Overflow-safe: the largest int8 is its own magnitude's neighbour.
        x, dense = (np.where(a < 0, -np.maximum(a, -a.dtype.type(100)), a) for a in (x, dense))
    if kind == "cancelling":
        dense[:, k // 2 :] = -np.maximum(dense[:, : k // 2], dense.dtype.type(-100))
        x[:, k // 2 :] = x[:, : k // 2]
    alpha = {"s8": 2.0**-13, "f16": 2.0**-10}.get(out, 1.0)
    case = case_of(descriptor(element, out, n=n, m=m, k=k, alpha=alpha), x=x, dense=dense)
    case.check(case.run())


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_subnormals_are_preserved(element):
    """Inputs and results of f16, results of bf16."""
    rng = np.random.default_rng(1)
    dtype = ElementKind(element).dtype
    scale = 2.0**-13 if element == "f16" else 2.0**-66
    x = (rng.uniform(0.5, 1.0, (16, 16)) * scale).astype(dtype)
    dense = (rng.uniform(0.5, 1.0, (32, 16)) * scale).astype(dtype)
    case = case_of(descriptor(element, n=16, m=32, k=16, alpha=1.0), x=x, dense=dense)
    got = case.run()
    case.check(got)
    assert (np.abs(got.astype(np.float64)) < 2.0 ** (-14 if element == "f16" else -126)).all()
    assert (got != 0).all()


@pytest.mark.parametrize("element", ["f16", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kept", [1.0, 0.0, -0.0])
def test_nonfinite_at_pruned_positions_is_skipped(element, value, kept):
    """Also where a kept value is a zero, which the library alone would move to any other zero."""
    if element == "fp8_e4m3" and not np.isnan(value):
        pytest.skip("e4m3 has no infinity")
    dtype = ElementKind(element).dtype
    codes_of = np.full((32, 64), 1.0).astype(dtype)
    codes_of[:, 2::4] = codes_of[:, 3::4] = 0
    weight = Sparse24Weight.prune_compress(codes_of).to(0)
    values = np.full((32, 32), 1.5).astype(dtype)
    values[::2] = kept
    weight = Sparse24Weight(Guarded((32, 32), ElementKind(element), 0).fill(values).view, weight.metadata)
    x = np.ones((16, 64), dtype)
    x[:, 2::4] = value
    desc = descriptor(element, n=16, m=32, k=64, alpha=1.0)
    plan = GemmSparse24Plan.select(desc, device=0, preference=FORCED)
    source = Guarded((16, 64), desc.element, 0).fill(x)
    result = Guarded((16, 32), desc.out_element, 0)
    space = Guarded((plan.workspace_size(),), ElementKind.U8, 0)
    plan.run(GemmSparse24Args(plan.pack(weight), source.view, result.view), workspace=space.view)
    synchronize()
    want = np.where(np.arange(32) % 2 == 0, 32 * kept, 48.0)
    assert (result.numpy().astype(np.float64) == want).all()


def test_the_row_promises_nothing_of_bits_by_itself():
    plan = GemmSparse24Plan.select(descriptor("bf16"), device=0, preference=FORCED, tuning=EMPTY)
    assert not plan.guarantee.deterministic
    assert not plan.guarantee.bit_stable_on_same_hardware


def table_of(desc: GemmSparse24Descriptor, configuration: dict[str, int], *promises: str) -> TuningTable:
    device = cuda_properties(0)
    entry = TunedKernel(
        kernel="cusparselt_fp8" if desc.element == "fp8_e4m3" else "cusparselt",
        version=cusparselt.tuning_version(device),
        problem=desc,
        configuration=configuration,
        promises=promises,
        microseconds=1,
        default_microseconds=1,
    )
    return TuningTable(device.name, device.driver, [entry])


def test_a_self_tested_configuration_promises_what_it_passed():
    desc = descriptor("bf16")
    table = table_of(desc, {"algorithm": 1}, "deterministic")
    require = PlanPreference(prefer_backend="cusparselt", require={"deterministic": True})
    plan = GemmSparse24Plan.select(desc, device=0, preference=require, tuning=table)
    assert plan.guarantee.deterministic
    assert not plan.guarantee.bit_stable_on_same_hardware
    assert "algorithm 1 of" in plan.explain().details
    assert "tuned" in plan.explain().details
    with pytest.raises(UnsupportedError, match="cusparselt: does not guarantee deterministic"):
        GemmSparse24Plan.select(desc, device=0, preference=require, tuning=EMPTY)


def shipped_entries(count: int) -> list[TunedKernel]:
    """Of the table for this GPU: a spread of those that apply here and are quick to check."""
    device = cuda_properties(0)
    table = shipped(device.name)
    small = [
        entry
        for entry in table.entries
        if entry.kernel.startswith("cusparselt")
        and entry.problem.n <= 1024
        and entry.problem.m * entry.problem.k <= 1 << 26
        and table.mismatch(entry, device, cusparselt.tuning_version(device)) is None
    ]
    if not small:
        pytest.skip("no table for this GPU, driver and library comes with the package")
    return small[:: max(1, len(small) // count)]


def test_the_shipped_configurations_are_right_and_keep_their_promises():
    for entry in shipped_entries(40):
        problem = tuning_worker.Problem(entry.problem, 0)
        plan = problem.plan(entry.kernel, dict(entry.configuration))
        assert problem.is_right(plan), entry
        assert problem.is_deterministic(plan) or "deterministic" not in entry.promises, entry
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            by_default = GemmSparse24Plan.select(entry.problem, device=0, preference=FORCED)
        assert by_default.explain().details == plan.explain().details
        assert by_default.guarantee.deterministic == ("deterministic" in entry.promises)


def digests() -> list[int]:
    """Of the results of some shipped configurations."""
    found = []
    for entry in shipped_entries(8):
        problem = tuning_worker.Problem(entry.problem, 0)
        plan = problem.plan(entry.kernel, dict(entry.configuration))
        found.append(tuning_worker.digest(problem.bits(plan)))
    return found


IN_ANOTHER_PROCESS = "from tests.test_cusparselt import digests; print(digests())"


def test_the_shipped_configurations_give_the_same_bits_in_another_process():
    promised = ["bit_stable_on_same_hardware" in entry.promises for entry in shipped_entries(8)]
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = zip(digests(), json.loads(done.stdout), promised, strict=True)
    assert all(here == there for here, there, kept in pairs if kept)


# Refusals -----------------------------------------------------------------------------------------


def test_the_workspace_is_exactly_what_the_library_says():
    case = medium()
    needed = case.plan.workspace_size()
    assert needed > 0
    view = case.workspace.view
    small = Workspace(view.address, needed - 1, view.device)
    with pytest.raises(WorkspaceTooSmallError) as caught:
        case.plan.run(case.args, workspace=small)
    assert (caught.value.needed, caught.value.got) == (needed, needed - 1)
    assert case.result.untouched()


def test_a_workspace_limit_is_a_limit():
    needed = medium().plan.workspace_size()
    desc = medium().plan.descriptor
    enough = PlanPreference(prefer_backend="cusparselt", max_workspace_bytes=needed)
    assert GemmSparse24Plan.select(desc, device=0, preference=enough).workspace_size() == needed
    short = enough.model_copy(update={"max_workspace_bytes": needed - 1})
    with pytest.raises(UnsupportedError, match=f"needs a workspace of {needed} bytes"):
        GemmSparse24Plan.select(desc, device=0, preference=short)


@pytest.mark.parametrize("pad", [4, 12])
def test_rows_that_are_not_aligned(pad):
    with pytest.raises(MisalignedOperandError) as caught:
        case_of(descriptor("bf16"), pad=pad).run()
    assert caught.value.argument == "x row stride"


def test_results_that_are_not_aligned():
    case = case_of(descriptor("bf16"))
    y = Guarded((48, 96), ElementKind.BF16, 0, 100)
    args = GemmSparse24Args(case.args.weight, case.args.x, y.view)
    verdict = case.plan.can_implement(args)
    assert isinstance(verdict.error, MisalignedOperandError)
    with pytest.raises(MisalignedOperandError, match="y stride"):
        case.plan.run(args, workspace=case.workspace.view)
    assert y.untouched()


@pytest.mark.parametrize("configuration", [{"algorithm": 10**6}, {"algorithm": -1}, {"split_k": -7}])
def test_a_configuration_that_the_library_refuses(configuration):
    desc = descriptor("bf16")
    with pytest.raises(UnsupportedError, match="cuSPARSELt refuses"):
        GemmSparse24Plan.select(desc, device=0, preference=FORCED, tuning=table_of(desc, configuration))


def test_candidates_are_algorithms_of_the_library():
    found = cusparselt.candidates(descriptor("bf16"), cuda_properties(0))
    ids = [one["algorithm"] for one in found if set(one) == {"algorithm"}]
    assert ids == sorted(set(ids))
    assert len(ids) > 1


# Plans that live ----------------------------------------------------------------------------------


def synchronize() -> None:
    import cupy

    cupy.cuda.Device(0).synchronize()


def test_one_weight_serves_every_n():
    rng = np.random.default_rng(3)
    dense = random_values(rng, (96, 160), ElementKind.BF16)
    cases = [case_of(descriptor("bf16", n=n), dense=dense) for n in (8, 64, 512)]
    packed = cases[0].args.weight
    for case in cases:
        args = GemmSparse24Args(packed, case.args.x, case.args.y)
        case.plan.run(args, workspace=case.workspace.view)
        case.check(case.fetch())


@elements
def test_capture_and_replay(element):
    import cupy

    case = medium(element)
    want = case.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    bound = case.plan.bind(case.args, workspace=case.workspace.view)
    with stream:
        stream.begin_capture()
        bound.launch()
        case.plan.run(case.args, workspace=case.workspace.view)
        graph = stream.end_capture()
    for _ in range(3):
        case.result.view.bits()[...] = 1
        graph.launch(stream)
        stream.synchronize()
        case.check(case.fetch())
    assert want.shape == case.fetch().shape


FIRST_LAUNCH_IN_CAPTURE = """
import cupy
from tests.test_cusparselt import medium
case = medium()
stream = cupy.cuda.Stream(non_blocking=True)
stream.begin_capture()
case.plan.run(case.args, workspace=case.workspace.view, stream=stream)
graph = stream.end_capture()
graph.launch(stream)
stream.synchronize()
case.check(case.fetch())
print("done")
"""


def test_the_first_launch_may_be_a_capture():
    done = subprocess.run([sys.executable, "-c", FIRST_LAUNCH_IN_CAPTURE], capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.alone
def test_run_allocates_no_device_memory():
    case = medium()
    case.run()
    check_that_nothing_is_allocated(partial(case.plan.run, case.args, workspace=case.workspace.view))


def test_the_bias_of_a_run_is_its_own():
    """The library keeps the bias's address in the plan: runs in turn, bound ones too, each get theirs."""
    cases = [case_of(descriptor("bf16", epilogue="bias"), seed=seed) for seed in range(3)]
    assert len({id(case.plan) for case in cases}) == 1
    bound = [case.plan.bind(case.args, workspace=case.workspace.view) for case in cases]
    for case, one in zip(cases, bound, strict=True):
        case.check(case.run())
        case.result.view.bits()[...] = 1
        one.launch()
        case.check(case.fetch())


def test_four_threads_on_four_streams_share_a_plan():
    cases = [case_of(descriptor("bf16", n=96, m=512, k=512, epilogue="bias"), seed=s) for s in range(4)]
    assert len({id(case.plan) for case in cases}) == 1
    runs = [partial(case.plan.run, case.args, workspace=case.workspace.view) for case in cases]
    run_from_threads(runs, 200)
    for case in cases:
        case.check(case.fetch())


def test_threads_plan_and_run_at_once():
    """Each thread has a handle of its own; plans of several threads live side by side and outlive them."""
    errors: list[BaseException] = []
    cases: list = []

    def work(seed: int) -> None:
        try:
            for n in range(8, 8 * 9, 8):
                case = case_of(descriptor("bf16", n=n, m=64 + 16 * seed, k=128), seed=seed)
                case.check(case.run())
            cases.append(case)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for case in cases:
        case.check(case.run())


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.alone
def test_ten_thousand_plans_leave_no_memory_behind():
    import gc

    import cupy

    desc, device = descriptor("bf16", epilogue="bias_relu"), cuda_properties(0)

    spec = table.find("cusparselt")

    def cycles(count: int) -> None:
        for _ in range(count):
            cusparselt.Kernel(desc, device, spec, FORCED)

    cycles(1000)  # what the library keeps once, it keeps now
    gc.collect()
    host, free = resident_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    cycles(10_000)
    gc.collect()
    assert cupy.cuda.runtime.memGetInfo()[0] == free
    assert resident_bytes() - host < 4 << 20, "over 400 bytes a plan stay behind"


def test_a_library_without_kernels_for_the_gpu(monkeypatch):
    def refuse(library) -> None:
        raise LibraryError("cusparseLtInit", abi.ARCH_MISMATCH, "ARCH_MISMATCH")

    monkeypatch.setattr(abi, "handle", refuse)
    spec = table.find("cusparselt")
    with pytest.raises(BackendUnavailableError, match="pip install"):
        cusparselt.Kernel(descriptor("bf16"), cuda_properties(0), spec, FORCED)
