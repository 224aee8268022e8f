"""Operands of products: strides, alignment and layouts that a kernel can't serve are said by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import (
    DgradSparse24Args,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    InvalidProblemError,
    MisalignedOperandError,
    PackedWeight,
    TensorView,
)
from sparse24_plans.vocab import CANONICAL_LAYOUT
from sparse24_plans.weights.packed_layouts import layout_called

from ..plan.cases import PlanCase, case_of, changed, kernel_case, random_inputs, rejected
from ..sample_devices import H200
from ..support import Guarded, plan_of_row, random_weight
from .kernel_entries import OWN, marked, row_of

gpu = pytest.mark.gpu
F32, F16 = ElementKind.F32, ElementKind.F16
N, M, K = 6, 16, 32


def row_case(row: str, desc: GemmSparse24Descriptor) -> PlanCase:
    """Operands of this row of the table."""
    plan = plan_of_row(row).select(desc, device="host" if row_of(row).on_host else 0)
    assert plan.explain().chosen == row
    return PlanCase(plan, random_inputs(desc))


@pytest.fixture
def case(device):
    return case_of(GemmSparse24Descriptor(n=N, m=M, k=K, element="f32", epilogue="bias"), device)


# Strides and addresses ------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["x", "y"])
@pytest.mark.parametrize("strides", [(1, 8), (4, 1), (-64, 1), (0, 1), (64, 2)])
def test_strides_that_no_kernel_serves(case, field, strides):
    wrong = changed(getattr(case.args, field), strides=strides)
    rejected(case, replace(case.args, **{field: wrong}), InvalidProblemError, field, "stride")


@pytest.mark.parametrize("field", ["x", "y"])
@pytest.mark.parametrize("order", ["row", "column"])
def test_the_stride_of_a_single_line_says_nothing(field, order):
    """NumPy gives a [1, n] slice of anything whatever stride it came from."""
    other = {f"{field}_order": order}
    one = GemmSparse24Descriptor(n=1, m=M, k=K, element="f32", **other)
    if order == "column":
        one = GemmSparse24Descriptor(n=N, m=1, k=K, element="f32", **other)
    case = case_of(one, "host")
    view = getattr(case.args, field)
    want = case.run()["result"]
    lines = view.shape[0] if order == "row" else view.shape[1]
    if lines > 1:
        return
    strides = (3, 1) if order == "row" else (1, 3)
    case.poison()
    case.plan.run(replace(case.args, **{field: changed(view, strides=strides)}))
    assert np.array_equal(case.fetch()["result"], want)


@gpu
@pytest.mark.parametrize("field", ["x", "y"])
def test_cublas_needs_16_byte_operands(field):
    case = row_case("inflate_cublas", GemmSparse24Descriptor(n=N, m=M, k=K, element="f16"))
    view = getattr(case.args, field)
    wrong = changed(view, address=view.address + 2)
    error = rejected(case, replace(case.args, **{field: wrong}), MisalignedOperandError, field, "16")
    assert error.needed == 16


TENSOR_CORE_ROWS = [name for name in OWN if row_of(name).tier == "sparse_tensor_core"]


@pytest.mark.parametrize("row", [marked(name) for name in TENSOR_CORE_ROWS])
class TestTensorCores:
    @pytest.fixture
    def case(self, row):
        element = row_of(row).elements[0]
        return row_case(row, GemmSparse24Descriptor(n=N, m=M, k=K, element=element))

    def test_canonical_weight(self, row, case):
        weight = random_weight(np.random.default_rng(0), M, K, case.desc.element, 0)
        args = replace(case.args, weight=weight)
        rejected(case, args, InvalidProblemError, "weight", "plan.pack", row_of(row).layout)
        canonical = replace(case.args, weight=PackedWeight.canonical(weight))
        rejected(case, canonical, InvalidProblemError, "canonical", "plan.pack")

    def test_row_stride_off_16_bytes(self, row, case):
        element = case.desc.element
        wide = Guarded((N, K), element, 0, K + 8 // element.itemsize).view
        rejected(case, replace(case.args, x=wide), MisalignedOperandError, "x row stride", "16")

    def test_misaligned_x_and_weight(self, row, case):
        view = case.args.x
        wrong = changed(view, address=view.address + 8)
        rejected(case, replace(case.args, x=wrong), MisalignedOperandError, "x", "16")
        (packed,) = case.args.weight.buffers
        moved = replace(case.args.weight, buffers=(changed(packed, address=packed.address + 8),))
        rejected(case, replace(case.args, weight=moved), MisalignedOperandError, "weight", "16")


@gpu
@pytest.mark.parametrize("row", ["inflate_cublas", "inflate_strict"])
def test_misaligned_weight(row):
    case = row_case(row, GemmSparse24Descriptor(n=N, m=M, k=K, element="f32"))
    values, metadata = case.args.weight.buffers
    for buffers in (
        (changed(values, address=values.address + 4), metadata),
        (values, changed(metadata, address=metadata.address + 2)),
    ):
        wrong = replace(case.args, weight=replace(case.args.weight, buffers=buffers))
        rejected(case, wrong, MisalignedOperandError, "weight", "16")


class TestEmptyResults:
    """Nothing is launched, so operands that are not empty lie where any element may."""

    @pytest.fixture(params=[name for name in OWN if not row_of(name).on_host])
    def plan(self, request):
        desc = GemmSparse24Descriptor(n=N, m=0, k=K, element=row_of(request.param).elements[0])
        return plan_of_row(request.param).select(desc, device=H200)

    @pytest.mark.parametrize("stride", [K, K + 1])
    def test_x_has_any_stride_and_address(self, plan, stride):
        self.accepts(plan, (stride, 1))

    @pytest.mark.parametrize(
        ("row", "stored"), [("wgmma_sp", "f16"), ("wgmma_sp", "s4"), ("inflate_cublas", "f16")]
    )
    def test_columns_of_x_have_any_stride(self, row, stored):
        desc = GemmSparse24Descriptor(n=N, m=0, k=K, element="f16", x_order="column", weight_element=stored)
        self.accepts(plan_of_row(row).select(desc, device=H200), (1, N))

    def accepts(self, plan, strides):
        desc, size = plan.descriptor, plan.descriptor.element.itemsize
        home, layout = plan.parts.home, plan.sku.layout
        x = TensorView(size, (N, K), desc.x_element, home, strides=strides)
        y = TensorView(0, (N, 0), desc.out_element, home)
        shapes = [(0, K // 2), (0, K // 8)]
        if layout != CANONICAL_LAYOUT:
            shapes = [layout_called(layout, desc.quantization).packed_shape(0, K)]
        elements = [ElementKind.U8] if len(shapes) == 1 else [desc.element, ElementKind.U16]
        buffers = tuple(
            TensorView(0, shape, element, home) for shape, element in zip(shapes, elements, strict=True)
        )
        weight = PackedWeight(layout, 0, K, desc.element, home, buffers, quantization=desc.quantization)
        views = plan.parts.checks(GemmSparse24Args(weight, x, y))
        assert views["source"].strides == strides


# Results --------------------------------------------------------------------------------------------


def test_a_read_only_array():
    case = case_of(GemmSparse24Descriptor(n=N, m=M, k=K, element="f32"), "host")
    y = np.zeros((N, M), np.float32)
    y.flags.writeable = False
    rejected(case, replace(case.args, y=y), InvalidProblemError, "y", "read-only")


def test_result_over_an_input(device):
    case = case_of(GemmSparse24Descriptor(n=N, m=K, k=K, element="f32"), device)
    rejected(case, replace(case.args, y=case.args.x), InvalidProblemError, "y", "x", "overlap")


def test_arguments_of_the_other_op(case):
    args = DgradSparse24Args(case.args.weight, case.args.y, case.args.x)
    rejected(case, args, InvalidProblemError, "args", "GemmSparse24Args", "DgradSparse24Args")


# Weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k", "element"), [(M + 1, K, F32), (M, K + 8, F32), (M, K, F16)])
def test_weight_of_another_problem(case, device, m, k, element):
    weight = random_weight(np.random.default_rng(0), m, k, element, device)
    words = ("weight", "f32[16, 32]", f"{element}[{m}, {k}]")
    rejected(case, replace(case.args, weight=weight), InvalidProblemError, *words)
    with pytest.raises(InvalidProblemError, match="weight: expected"):
        case.plan.pack(weight)


def test_what_pack_takes(case):
    for wrong in (np.zeros((M, K)), None, case.args.weight):
        with pytest.raises(InvalidProblemError, match="weight: expected Sparse24Weight"):
            case.plan.pack(wrong)


@pytest.mark.parametrize("row", [marked(name) for name in OWN])
def test_what_pack_gives_is_what_run_takes(row):
    element = row_of(row).elements[0]
    desc = GemmSparse24Descriptor(n=N, m=M, k=K, element=element)
    case = row_case(row, desc)
    assert case.args.weight.layout_id == case.plan.sku.layout == row_of(row).layout
    assert case.plan.can_implement(case.args)


@gpu
def test_one_packed_weight_serves_the_kernels_of_its_layout():
    """Stored once, a weight is read by the kernel for few tokens and by the one for many."""
    few, many = kernel_case("mma_sp"), kernel_case("wgmma_sp")
    want = many.run()
    many.poison()
    many.plan.run(replace(many.args, weight=few.args.weight))
    assert np.array_equal(many.fetch()["result"], want["result"])


def test_a_view_of_the_weights_type_only():
    """Raw bits of the right size aren't the element."""
    case = case_of(GemmSparse24Descriptor(n=N, m=M, k=K, element="f16"), "host")
    view = case.args.x
    bits = TensorView(view.address, view.shape, "u16", view.device, owner=view.owner)
    rejected(case, replace(case.args, x=bits), InvalidProblemError, "x: expected element f16, got u16")
