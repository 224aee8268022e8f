"""Bad input gets a typed error naming the argument, what was expected and what came; nothing is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    DgradSparse24Args,
    ElementKind,
    FormatError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    MisalignedOperandError,
    PackedWeight,
    PlanPreference,
    Sparse24Error,
    Sparse24Weight,
    TensorView,
    UnsupportedError,
    Workspace,
    WorkspaceTooSmallError,
)
from sparse24_plans.device.devices import cuda_device_count

from ..support import Guarded, make_case, random_weight

gpu = pytest.mark.gpu
F32, F16 = ElementKind.F32, ElementKind.F16
N, M, K = 6, 16, 32
OWN = object()


def rejected(case, args, kind, *words, workspace=OWN, stream=None):
    """``run``, ``bind`` and ``can_implement`` refuse alike, and nothing is written."""
    space = (case.workspace and case.workspace.view) if workspace is OWN else workspace
    with pytest.raises(kind) as caught:
        case.plan.run(args, workspace=space, stream=stream)
    assert isinstance(caught.value, Sparse24Error)
    for word in words:
        assert word in str(caught.value)
    assert case.result.untouched()
    if workspace is OWN and stream is None:
        with pytest.raises(kind):
            case.plan.bind(args, workspace=space)
        verdict = case.plan.can_implement(args)
        assert not verdict
        assert type(verdict.error) is type(caught.value)
        assert str(verdict.error) == str(caught.value)
    return caught.value


@pytest.fixture
def case(device):
    desc = GemmSparse24Descriptor(n=N, m=M, k=K, element="f32", epilogue="bias")
    return make_case(desc, device)


def test_good_arguments_are_accepted(case):
    assert case.plan.can_implement(case.args)
    case.check(case.run())


@pytest.mark.parametrize(
    ("field", "shape", "element", "words"),
    [
        ("x", (N, K - 8), F32, ("x", "[6, 32]", "[6, 24]")),
        ("x", (N, K, 1), F32, ("x", "[6, 32]")),
        ("x", (N, K), F16, ("x", "f32", "f16")),
        ("y", (M, N), F32, ("y", "[6, 16]", "[16, 6]")),
        ("y", (N, M), F16, ("y", "f32", "f16")),
        ("bias", (M + 1,), F32, ("bias", "[16]", "[17]")),
        ("bias", (M,), F16, ("bias", "f32", "f16")),
    ],
)
def test_wrong_shape_or_element(case, device, field, shape, element, words):
    flat = Guarded((int(np.prod(shape)),), element, device).view
    wrong = TensorView(flat.address, shape, element, flat.device, owner=flat)
    rejected(case, replace(case.args, **{field: wrong}), InvalidProblemError, *words)


def test_missing_and_unwanted_bias(case, device):
    rejected(case, replace(case.args, bias=None), InvalidProblemError, "bias", "[16]", "NoneType")
    plain = make_case(GemmSparse24Descriptor(n=N, m=M, k=K, element="f32"), device)
    rejected(plain, replace(plain.args, bias=case.args.bias), InvalidProblemError, "bias", "None")


@pytest.mark.parametrize("field", ["x", "y", "bias"])
@pytest.mark.parametrize("thing", [3, "x", object(), [[1.0]]])
def test_not_a_tensor(case, field, thing):
    rejected(case, replace(case.args, **{field: thing}), InvalidProblemError, field, type(thing).__name__)


@pytest.mark.parametrize("field", ["x", "y", "bias", "weight"])
def test_wrong_device(case, field):
    elsewhere = Device("cuda", 7)
    if field == "weight":
        views = [TensorView(v.address, v.shape, v.element, elsewhere) for v in case.args.weight.buffers]
        moved = replace(case.args.weight, device=elsewhere, buffers=tuple(views))
    else:
        view = getattr(case.args, field)
        moved = TensorView(view.address, view.shape, view.element, elsewhere, strides=view.strides)
    rejected(case, replace(case.args, **{field: moved}), InvalidProblemError, field, "cuda:7")


def strided(view, strides):
    return TensorView(view.address, view.shape, view.element, view.device, strides=strides, owner=view.owner)


@pytest.mark.parametrize("field", ["x", "y"])
@pytest.mark.parametrize("strides", [(1, 8), (4, 1), (-64, 1), (0, 1), (64, 2)])
def test_strides_that_no_kernel_serves(case, field, strides):
    wrong = strided(getattr(case.args, field), strides)
    rejected(case, replace(case.args, **{field: wrong}), InvalidProblemError, field, "stride")


def test_misaligned_element(case):
    view = case.args.x
    wrong = TensorView(view.address + 2, view.shape, view.element, view.device, owner=view.owner)
    error = rejected(case, replace(case.args, x=wrong), MisalignedOperandError, "x", "multiple of")
    assert error.argument == "x"


@gpu
@pytest.mark.parametrize("field", ["x", "y"])
def test_cublas_needs_16_byte_operands(field):
    case = make_case(
        GemmSparse24Descriptor(n=N, m=M, k=K, element="f16"),
        0,
        PlanPreference(prefer_backend="inflate_cublas"),
    )
    view = getattr(case.args, field)
    wrong = TensorView(view.address + 2, view.shape, view.element, view.device, owner=view.owner)
    error = rejected(case, replace(case.args, **{field: wrong}), MisalignedOperandError, field, "16")
    assert error.needed == 16


def test_read_only_result():
    case = make_case(GemmSparse24Descriptor(n=N, m=M, k=K, element="f32"), "host")
    y = np.zeros((N, M), np.float32)
    y.flags.writeable = False
    rejected(case, replace(case.args, y=y), InvalidProblemError, "y", "read-only")


def test_result_over_an_input(device):
    case = make_case(GemmSparse24Descriptor(n=N, m=K, k=K, element="f32"), device)
    rejected(case, replace(case.args, y=case.args.x), InvalidProblemError, "y", "x", "overlap")


def test_column_windows_of_one_buffer_do_not_overlap(device):
    case = make_case(GemmSparse24Descriptor(n=N, m=M, k=K, element="f32"), device)
    whole = Guarded((N, K + M), F32, device).view
    size = F32.itemsize
    x = TensorView(whole.address, (N, K), F32, whole.device, strides=(K + M, 1), owner=whole)
    y = TensorView(whole.address + K * size, (N, M), F32, whole.device, strides=(K + M, 1), owner=whole)
    assert case.plan.can_implement(replace(case.args, x=x, y=y))
    late = TensorView(whole.address + (K - 1) * size, (N, M), F32, whole.device, strides=(K + M, 1))
    assert not case.plan.can_implement(replace(case.args, x=x, y=late))


def test_arguments_of_the_other_op(case):
    args = DgradSparse24Args(case.args.weight, case.args.y, case.args.x)
    rejected(case, args, InvalidProblemError, "args", "GemmSparse24Args", "DgradSparse24Args")
    rejected(case, None, InvalidProblemError, "args", "NoneType")


# Weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k", "element"), [(M + 1, K, F32), (M, K + 8, F32), (M, K, F16)])
def test_weight_of_another_problem(case, device, m, k, element):
    weight = random_weight(np.random.default_rng(0), m, k, element, device)
    words = ("weight", "f32[16, 32]", f"{element}[{m}, {k}]")
    rejected(case, replace(case.args, weight=weight), InvalidProblemError, *words)
    with pytest.raises(InvalidProblemError, match="weight"):
        case.plan.pack(weight)


def test_weight_of_another_layout(case):
    weight = replace(case.args.weight, layout_id="sm90a_16bit_v1")
    rejected(case, replace(case.args, weight=weight), InvalidProblemError, "canonical", "plan.pack")


@gpu
class TestMmaSp:
    @pytest.fixture
    def case(self):
        desc = GemmSparse24Descriptor(n=N, m=M, k=K, element="f16")
        return make_case(desc, 0, PlanPreference(prefer_backend="mma_sp"))

    def test_canonical_weight(self, case):
        weight = random_weight(np.random.default_rng(0), M, K, F16, 0)
        rejected(case, replace(case.args, weight=weight), InvalidProblemError, "weight", "plan.pack")
        canonical = PackedWeight.canonical(weight)
        rejected(case, replace(case.args, weight=canonical), InvalidProblemError, "canonical", "plan.pack")

    def test_row_stride_off_16_bytes(self, case):
        wide = Guarded((N, K), F16, 0, K + 4).view
        rejected(case, replace(case.args, x=wide), MisalignedOperandError, "x row stride", "16")

    def test_misaligned_x(self, case):
        view = case.args.x
        wrong = TensorView(view.address + 8, view.shape, F16, view.device, owner=view.owner)
        rejected(case, replace(case.args, x=wrong), MisalignedOperandError, "x", "16")


def test_weight_that_is_none(case):
    rejected(case, replace(case.args, weight=None), InvalidProblemError, "weight", "Sparse24Weight")
    with pytest.raises(InvalidProblemError, match="Sparse24Weight"):
        case.plan.pack(np.zeros((M, K)))


@gpu
def test_misaligned_weight():
    case = make_case(GemmSparse24Descriptor(n=N, m=M, k=K, element="f32"), 0)
    values, metadata = case.args.weight.buffers
    shifted = TensorView(values.address + 4, values.shape, F32, values.device)
    wrong = replace(case.args.weight, buffers=(shifted, metadata))
    rejected(case, replace(case.args, weight=wrong), MisalignedOperandError, "weight", "16")


@pytest.mark.parametrize(
    ("byte", "complaint"),
    [
        (0x00, "increasing"),
        (0x05, "increasing"),
        (0x0A, "increasing"),
        (0x0F, "increasing"),
        (0x01, "increasing"),
        (0x06, "increasing"),
        (0x14, "bits 4-7"),
        (0x84, "bits 4-7"),
    ],
)
def test_bad_metadata_is_named_by_row_and_group(device, byte, complaint):
    weight = random_weight(np.random.default_rng(0), M, K, F32, "host")
    metadata = weight.metadata.copy()
    metadata.view(np.uint8)[11, 5] = byte
    metadata.view(np.uint8)[12, 0] = 0xFF
    broken = Sparse24Weight(weight.values, metadata, validate=False)
    moved = broken.to(device if device == "host" else 0)
    with pytest.raises(FormatError, match=complaint) as caught:
        moved.validate()
    assert (caught.value.row, caught.value.group) == (11, 5)
    with pytest.raises(FormatError):
        Sparse24Weight(moved.values_view, moved.metadata_view)


@pytest.mark.parametrize(
    ("values", "metadata", "word"),
    [
        ((4, 6), (4, 1), "values"),
        ((4,), (4, 1), "values"),
        ((4, 8), (4, 1), "metadata"),
        ((4, 8), (3, 2), "metadata"),
    ],
)
def test_weight_shapes(values, metadata, word):
    with pytest.raises(InvalidProblemError, match=word):
        Sparse24Weight(np.zeros(values, np.float32), np.zeros(metadata, np.uint16))


def test_weight_parts_that_do_not_fit():
    good = np.full((4, 2), 0x4444, np.uint16)
    with pytest.raises(InvalidProblemError, match="metadata"):
        Sparse24Weight(np.zeros((4, 8), np.float32), good.astype(np.float64))
    with pytest.raises(InvalidProblemError, match="contiguous"):
        Sparse24Weight(np.zeros((4, 16), np.float32)[:, ::2], good)
    with pytest.raises(InvalidProblemError, match="values"):
        Sparse24Weight(np.zeros((4, 8), np.complex64), good)


# Problems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": 12}, "k"),
        ({"k": -8}, "k"),
        ({"n": -1}, "n"),
        ({"m": 1.5}, "m"),
        ({"m": 2**63}, "m"),
        ({"n": 2**40, "k": 2**40}, "2^63"),
        ({"element": "f64"}, "element"),
        ({"epilogue": "bias_tanh"}, "epilogue"),
        ({"op": "wgrad"}, "op"),
        ({"op": "dgrad", "epilogue": "bias"}, "epilogue"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 1e39}, "alpha"),
        ({"out_element": "f16"}, "out_element"),
        ({"bias_element": "bf16"}, "bias_element"),
        ({"typo": 1}, "typo"),
        ({"x_order": "diagonal"}, "x_order"),
        ({"scale_w": "block"}, "scale_w"),
        ({"op": "dgrad", "y_order": "column"}, "y_order"),
        ({"op": "dgrad", "scale_x": "tensor"}, "scale_x"),
    ],
)
def test_descriptor(change, word):
    good = {"n": 1, "m": 8, "k": 8, "element": "f32"}
    with pytest.raises(InvalidProblemError, match=word.replace("^", r"\^")):
        GemmSparse24Descriptor(**{**good, **change})


def test_json_that_is_not_a_descriptor():
    for text in ("", "[]", "{", '{"n":1}'):
        with pytest.raises(InvalidProblemError):
            GemmSparse24Descriptor.model_validate_json(text)


@pytest.mark.parametrize("device", [-1, 1.5, "gpu", True])
def test_device_argument(device):
    with pytest.raises(InvalidProblemError, match="device"):
        GemmSparse24Plan.select(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"), device=device)


def test_absent_device():
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    with pytest.raises(BackendUnavailableError):
        GemmSparse24Plan.select(desc, device=cuda_device_count() + 1)


@pytest.mark.parametrize("backend", ["mma_sp", "wgmma_sp", "cusparselt"])
def test_a_forced_backend_that_cannot_serve(device, backend):
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    with pytest.raises(UnsupportedError) as caught:
        GemmSparse24Plan.select(desc, device=device, preference=PlanPreference(prefer_backend=backend))
    for row in ("inflate_cublas", "inflate_strict", "host_blas", "host_strict"):
        assert row in str(caught.value)


@pytest.mark.parametrize("element", ["fp8_e5m2", "u8", "i32"])
def test_an_element_that_no_row_serves(device, element):
    with pytest.raises(UnsupportedError, match=element):
        GemmSparse24Plan.select(
            GemmSparse24Descriptor(n=1, m=8, k=8, element=element, out_element=element), device=device
        )


def test_contradictory_preference(device):
    tier = "inflate" if device == "host" else "host"
    with pytest.raises(UnsupportedError):
        GemmSparse24Plan.select(
            GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"),
            device=device,
            preference=PlanPreference(tier=tier),
        )


# Workspaces and streams ---------------------------------------------------------------------------


@gpu
class TestWorkspace:
    @pytest.fixture
    def case(self):
        return make_case(
            GemmSparse24Descriptor(n=N, m=M, k=K, element="f16", epilogue="bias"),
            0,
            PlanPreference(prefer_backend="inflate_cublas"),
        )

    def test_absent(self, case):
        error = rejected(case, case.args, WorkspaceTooSmallError, "workspace", workspace=None)
        assert (error.needed, error.got) == (case.plan.workspace_size(), 0)

    def test_too_small(self, case):
        view = case.workspace.view
        space = Workspace(view.address, view.shape[0] - 1, view.device)
        error = rejected(case, case.args, WorkspaceTooSmallError, workspace=space)
        assert (error.needed, error.got) == (view.shape[0], view.shape[0] - 1)

    def test_misaligned(self, case):
        view = case.workspace.view
        space = Workspace(view.address + 16, view.shape[0], view.device)
        rejected(case, case.args, MisalignedOperandError, "workspace", "256", workspace=space)

    def test_on_the_host_or_another_device(self, case):
        size = case.plan.workspace_size()
        rejected(case, case.args, InvalidProblemError, "workspace", "host", workspace=np.zeros(size, "u1"))
        space = Workspace(case.workspace.view.address, size, Device("cuda", 1))
        rejected(case, case.args, InvalidProblemError, "workspace", "cuda:1", workspace=space)

    def test_not_memory(self, case):
        for thing in (12345, "w", object()):
            rejected(case, case.args, InvalidProblemError, "workspace", workspace=thing)

    def test_limit_at_selection(self, case):
        desc = GemmSparse24Descriptor(n=N, m=M, k=K, element="f32")
        none = PlanPreference(max_workspace_bytes=0)
        assert GemmSparse24Plan.select(desc, device=0, preference=none).sku.backend == "inflate_strict"
        with pytest.raises(UnsupportedError, match="max_workspace_bytes"):
            GemmSparse24Plan.select(
                desc,
                device=0,
                preference=PlanPreference(max_workspace_bytes=0, prefer_backend="inflate_cublas"),
            )

    def test_limit_is_kept(self, case):
        for limit in (case.plan.workspace_size(), 1 << 20, 5000):
            plan = GemmSparse24Plan.select(
                case.plan.descriptor, device=0, preference=PlanPreference(max_workspace_bytes=limit)
            )
            assert plan.workspace_size() <= limit


class ClosedStream:
    ptr = None


class ForeignStream:
    handle = 1


class OldProtocol:
    def __cuda_stream__(self):
        return (9, 1)


def test_a_host_plan_takes_no_stream(case, device):
    if device == "host":
        rejected(case, case.args, InvalidProblemError, "stream", stream=0)


@gpu
@pytest.mark.parametrize("stream", [ClosedStream(), ForeignStream(), OldProtocol(), -1, 1.0, "s", True])
def test_a_stream_that_is_none(stream):
    case = make_case(GemmSparse24Descriptor(n=N, m=M, k=K, element="f32"), 0)
    rejected(case, case.args, InvalidProblemError, "stream", stream=stream)


def test_packed_weight_is_immutable(case):
    with pytest.raises(AttributeError):
        case.args.weight.m = 3
    assert isinstance(case.args.weight, PackedWeight)
