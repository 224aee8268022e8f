"""cuSPARSELt on a GPU: what it computes, what its rows promise, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
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

from ..support import (
    Guarded,
    random_values,
    synchronize,
)
from ..support import case_of as plain_case
from .batched_cases import batched_case
from .cusparselt_cases import (
    FORCED,
    PAIRS,
    RESULTS,
    case_of,
    descriptor,
    elements,
    medium,
    needs_cusparselt,
    pairs,
)
from .test_error_bounds import KINDS, operands

pytestmark = needs_cusparselt


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


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pairs
@pytest.mark.parametrize("epilogue", ["identity", "bias_relu"])
@pytest.mark.parametrize("shared_weight", [False, True])
def test_batches(element, out, epilogue, shared_weight):
    """Each with its blob, wherever its operands lie, and with shared ones."""
    desc = descriptor(element, out, epilogue=epilogue, batches=3, shared_weight=shared_weight)
    plan = GemmSparse24Plan.select(desc, device=0, preference=FORCED)
    names = ("x", "bias") if epilogue != "identity" else ("x",)
    for orders, shared in (
        (("dense", "dense", "dense"), ()),
        (("gaps", "interleaved", "dense"), ()),
        (("interleaved", "reversed gaps", "dense"), names),
    ):
        case = batched_case(plan, 1, orders=orders, shared=shared, gap=16)
        found = case.run()
        for batch, data in enumerate(case.data):
            one = GemmSparse24Plan.select(desc.one_batch, device=0, preference=FORCED)
            plain_case(one, data).check(found[batch])


def test_batches_of_channels_scales():
    desc = descriptor("s8", "bf16", alpha=1.0, scale_w="row", k=64, batches=3)
    plan = GemmSparse24Plan.select(desc, device=0, preference=FORCED)
    case = batched_case(plan, 2, gap=16)
    found = case.run()
    one = GemmSparse24Plan.select(desc.one_batch, device=0, preference=FORCED)
    for batch, data in enumerate(case.data):
        plain_case(one, data).check(found[batch])


def test_batches_with_columns_in_a_cuda_graph():
    desc = descriptor("bf16", epilogue="bias", x_order="column", y_order="column", batches=5)
    plan = GemmSparse24Plan.select(desc, device=0, preference=FORCED)
    case = batched_case(plan, 3, orders=("gaps", "interleaved", "dense"), gap=16)
    bound = plan.bind(case.args, workspace=case.workspace and case.workspace.view)
    bound.launch()
    found = case.fetch()
    one = GemmSparse24Plan.select(desc.one_batch, device=0, preference=FORCED)
    for batch, data in enumerate(case.data):
        plain_case(one, data).check(found[batch])


def test_packed_weights_of_other_batches_are_refused():
    """A blob of one weight of the same m and k has other bytes."""
    desc = descriptor("bf16", batches=3)
    plan = GemmSparse24Plan.select(desc, device=0, preference=FORCED)
    case = batched_case(plan, gap=16)
    dense = np.concatenate([one.dense for one in case.data])
    whole = GemmSparse24Plan.select(descriptor("bf16", m=3 * desc.m), device=0, preference=FORCED)
    packed = whole.pack(Sparse24Weight.prune_compress(dense).to(0))
    error = plan.can_implement(replace(case.args, weight=packed)).error
    assert "expected layout 'cusparselt_blob_x3', got 'cusparselt_blob'" in str(error)


# Guarantees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", RESULTS["s8"])
@pytest.mark.parametrize("kind", ["normal", "one sign", "cancelling"])
def test_error_bound_of_integers(out, kind):
    n, m, k = 48, 512, 8192
    rng = np.random.default_rng(7)
    x, dense = (random_values(rng, shape, ElementKind.S8) for shape in ((n, k), (m, k)))
    if kind == "one sign":
        x, dense = (np.where(a < 0, -np.maximum(a, -100), a).astype(np.int8) for a in (x, dense))
    if kind == "cancelling":
        dense[:, k // 2 :] = -np.maximum(dense[:, : k // 2], -100)
        x[:, k // 2 :] = x[:, : k // 2]
    alpha = {"s8": 2.0**-13, "f16": 2.0**-10}.get(out, 1.0)
    case = case_of(descriptor("s8", out, n=n, m=m, k=k, alpha=alpha), x=x, dense=dense)
    case.check(case.run())


@pytest.mark.parametrize(("element", "out"), [pair for pair in PAIRS if pair[0] != "s8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m", "k"), [(48, 64, 32), (48, 512, 1024), (16, 128, 8192)])
def test_error_bound(element, out, kind, n, m, k):
    """With inputs made to break it; results of f16 are scaled to stay finite."""
    x, dense = operands(kind, "forward", n, m, k, element)
    case = case_of(
        descriptor(element, out, n=n, m=m, k=k, alpha=2.0**-24 if out == "f16" else 1.0), x=x, dense=dense
    )
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
    """A kept value may be a zero, which the library alone would move to any other zero."""
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
    synchronize(plan)
    want = np.where(np.arange(32) % 2 == 0, 32 * kept, 48.0)
    assert (result.numpy().astype(np.float64) == want).all()


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
    with pytest.raises(MisalignedOperandError, match="y row stride"):
        case.plan.run(args, workspace=case.workspace.view)
    assert y.untouched()
