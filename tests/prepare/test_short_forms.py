"""The short forms of preparing weights: ``stream=`` as plans take it, and on a GPU the plans' own kernels.

``prepare/short_forms.py`` is what they do on a GPU; it runs on the host too, and gives the array code's bits.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from sparse24_plans import (
    ElementKind,
    FormatError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PackedWeight,
    Sparse24Weight,
    TensorView,
    UnsupportedError,
    prune,
)
from sparse24_plans.device import streams
from sparse24_plans.plan import plan as plans
from sparse24_plans.prepare import short_forms
from sparse24_plans.prepare.kernel_table import PACKED_ELEMENTS
from sparse24_plans.weights import canonical, device_code, packing

from ..device.tensor_likes import CUDA
from ..support import same_bits
from .prepare_cases import ELEMENTS, MOODS, matrix

every_element = pytest.mark.parametrize("element", ELEMENTS)
SHAPES = ((5, 40), (65, 264), (0, 8), (3, 0))
ARRAY_CODE_ALONE = (ElementKind.U16, ElementKind.I32)


def dense_of(element: ElementKind, mood: str = "any_bits", shape: tuple[int, int] = (65, 264)) -> TensorView:
    bits = matrix(np.random.default_rng(1), shape, element, mood)
    return TensorView.of(np.ascontiguousarray(bits), element=element)


def assert_made(parts: tuple[TensorView, TensorView] | None, weight: Sparse24Weight) -> None:
    assert parts is not None
    for made, right in zip(parts, (weight.values_view, weight.metadata_view), strict=True):
        assert made.element is right.element
        assert same_bits(made.bits(), right.bits())


# The kernels' forms, on the host ------------------------------------------------------------------


@every_element
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mood", MOODS)
def test_the_plans_give_the_bits_of_the_array_code(element, shape, mood):
    dense = dense_of(element, mood, shape)
    weight = Sparse24Weight.prune_compress(dense)
    assert_made(short_forms.prune_compress(dense, None), weight)
    scores = dense_of(ElementKind.BF16, mood, shape)
    assert_made(
        short_forms.prune_compress(dense, scores), Sparse24Weight.prune_compress(dense, scores=scores)
    )
    expanded = TensorView.of(weight.decompress(), element=element)
    assert same_bits(short_forms.decompress(weight).bits(), expanded.bits())
    assert_made(short_forms.compress(expanded), Sparse24Weight.compress(expanded))
    if element in PACKED_ELEMENTS:
        made, right = short_forms.pack(weight), packing.pack(weight)
        assert (made.layout_id, made.m, made.k, made.element) == (right.layout_id, right.m, right.k, element)
        assert same_bits(made.buffers[0].bits(), right.buffers[0].bits())


def test_matrix_that_breaks_2_4_is_refused_with_its_place():
    dense = np.zeros((9, 32), np.float16)
    dense[7, 12:15] = 1
    for compress in (short_forms.compress, Sparse24Weight.compress):
        with pytest.raises(FormatError, match="at most 2 non-zeros") as caught:
            compress(TensorView.of(dense))
        assert (caught.value.row, caught.value.group) == (7, 3)


@pytest.mark.parametrize("element", ARRAY_CODE_ALONE)
def test_what_no_kernel_prepares_is_left_to_the_array_code(element):
    dense = dense_of(element)
    weight = Sparse24Weight.prune_compress(dense)
    assert short_forms.prune_compress(dense, None) is None
    assert short_forms.compress(dense) is None
    assert short_forms.decompress(weight) is None
    with pytest.raises(UnsupportedError, match="no tile layout holds"):
        packing.pack(weight)
    assert short_forms.prune_compress(dense_of(ElementKind.F16), dense_of(ElementKind.S8)) is None


def test_strided_and_misaligned_matrices_are_copied():
    buffer = np.random.default_rng(0).standard_normal((9, 80)).astype(np.float32)
    flat = np.zeros(9 * 32 * 4 + 64, np.uint8)
    start = -flat.ctypes.data % 16 + 4
    shifted = flat[start : start + 9 * 32 * 4].view(np.float32).reshape(9, 32)
    shifted[...] = buffer[:, :32]
    for dense in (buffer[:, 8:40], buffer[::2, :32], shifted, np.asfortranarray(buffer[:, :32])):
        right = Sparse24Weight.prune_compress(np.ascontiguousarray(dense))
        assert_made(short_forms.prune_compress(TensorView.of(dense), TensorView.of(abs(dense))), right)


# Streams ------------------------------------------------------------------------------------------


def forms(weight: Sparse24Weight, dense: object, device: int | str) -> dict[str, object]:
    """Every short form, as functions of ``stream``."""
    problem = GemmSparse24Descriptor(n=4, m=weight.m, k=weight.k, element=weight.element)
    plan = GemmSparse24Plan.select(problem, device=device)
    return {
        "prune": lambda stream: prune(dense, element=weight.element, stream=stream),
        "prune_compress": lambda stream: Sparse24Weight.prune_compress(
            dense, element=weight.element, stream=stream
        ),
        "compress": lambda stream: Sparse24Weight.compress(
            weight.decompress(), element=weight.element, stream=stream
        ),
        "decompress": lambda stream: weight.decompress(stream=stream),
        "validate": lambda stream: weight.validate(stream=stream),
        "pack": lambda stream: plan.pack(weight, stream=stream),
    }


@pytest.mark.parametrize("stream", [0, 1, "stream", object(), 10**5000], ids=lambda it: type(it).__name__)
def test_the_host_has_no_streams(stream):
    dense = np.ones((16, 32), np.float32)
    for form in forms(Sparse24Weight.prune_compress(dense), dense, "host").values():
        form(None)
        with pytest.raises(InvalidProblemError, match="stream: expected None for a host plan"):
            form(stream)


@pytest.fixture
def device_stand_in(monkeypatch):
    """Kernels' forms that note on which device's stream they were called, and what with."""
    calls: list[tuple[object, ...]] = []

    class Stand:
        def __getattr__(self, name: str) -> object:
            def form(*given: object) -> object:
                calls.append((name, *given))
                raise UnsupportedError("as far as a host can see")

            return form

    monkeypatch.setattr(device_code, "short_forms", Stand)

    class Cuda:
        class Device:
            def __init__(self, ordinal: int) -> None:
                calls.append(("device", ordinal))

            def __enter__(self) -> None: ...
            def __exit__(self, *error: object) -> None: ...

        class ExternalStream(Device):
            def __init__(self, handle: int, ordinal: int) -> None:
                calls.append(("stream", handle, ordinal))

    monkeypatch.setattr(streams, "import_cupy", lambda: type("cupy", (), {"cuda": Cuda}))
    return calls


def test_device_arrays_go_to_the_kernels_on_the_callers_stream(device_stand_in):
    dense = TensorView(4096, (16, 32), "f16", CUDA)
    values = TensorView(8192, (16, 16), "f16", CUDA)
    weight = Sparse24Weight(values, TensorView(16384, (16, 4), "u16", CUDA), validate=False)
    for call, want in (
        (lambda: prune(dense, stream=77), ("prune_compress", dense, None)),
        (
            lambda: Sparse24Weight.prune_compress(dense, scores=dense, stream=77),
            ("prune_compress", dense, dense),
        ),
        (lambda: Sparse24Weight.compress(dense, stream=77), ("compress", dense)),
        (lambda: weight.decompress(stream=77), ("decompress", weight)),
    ):
        device_stand_in.clear()
        with suppress(UnsupportedError):
            call()
        assert device_stand_in == [("device", 0), ("stream", 77, 0), want]


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_element
def test_on_a_gpu_the_kernels_run_on_the_callers_stream(element, monkeypatch):
    import cupy

    host = dense_of(element)
    right = Sparse24Weight.prune_compress(host)
    dense = cupy.asarray(host.bits())
    weight = right.to(0)
    expanded = weight.decompress()
    used: list[int] = []
    launch = plans.launch_on
    monkeypatch.setattr(plans, "launch_on", lambda *given: (used.append(given[2]), launch(*given))[1])

    def no_array_code(*_: object) -> None:
        raise AssertionError("array code")

    for name in ("rank_codes", "occupancy_codes", "magnitude_codes", "gather", "scatter"):
        monkeypatch.setattr(canonical, name, no_array_code)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()
    before = cupy.cuda.get_current_stream().ptr
    pruned = prune(dense, element=element, stream=stream)
    compressed = Sparse24Weight.prune_compress(dense, element=element, stream=stream.ptr)
    sound = Sparse24Weight.compress(expanded, element=element, stream=stream)
    again = weight.decompress(stream=stream)
    weight.validate(stream=stream)
    stream.synchronize()
    assert used
    assert set(used) == {stream.ptr}
    assert cupy.cuda.get_current_stream().ptr == before
    monkeypatch.undo()
    for made in (compressed, sound):
        back = made.to("host", stream=stream)
        assert same_bits(back.metadata, right.metadata) or made is sound
        assert same_bits(back.decompress(), right.decompress())
    for made in (pruned, again):
        assert same_bits(
            cupy.asnumpy(made.view(element.bits_dtype)), right.decompress().view(element.bits_dtype)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("element", PACKED_ELEMENTS)
def test_on_gpu_packing_is_plans_kernel_on_callers_stream(element, monkeypatch):
    import cupy

    right = Sparse24Weight.prune_compress(dense_of(element, shape=(65, 272)))
    weight = right.to(0)
    plan = GemmSparse24Plan.select(GemmSparse24Descriptor(n=1, m=65, k=272, element=element), device=0)
    used: list[int] = []
    launch = plans.launch_on
    monkeypatch.setattr(plans, "launch_on", lambda *given: (used.append(given[2]), launch(*given))[1])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()
    packed = plan.pack(weight, stream=stream)
    stream.synchronize()
    if packed.layout_id == "canonical":
        assert used == []
        return
    assert set(used) == {stream.ptr}
    want = packing.pack(right)
    assert isinstance(packed, PackedWeight)
    assert same_bits(cupy.asnumpy(packed.buffers[0].bits()), want.buffers[0].bits())


@pytest.mark.gpu
@pytest.mark.parametrize("element", ARRAY_CODE_ALONE)
def test_on_a_gpu_array_code_runs_on_the_callers_stream(element):
    import cupy

    host = dense_of(element)
    right = Sparse24Weight.prune_compress(host)
    stream = cupy.cuda.Stream(non_blocking=True)
    dense = cupy.asarray(host.bits())
    cupy.cuda.Device(0).synchronize()
    made = Sparse24Weight.prune_compress(dense, element=element, stream=stream)
    expanded = made.decompress(stream=stream)
    stream.synchronize()
    assert same_bits(cupy.asnumpy(made.values), right.values)
    assert same_bits(cupy.asnumpy(expanded), right.decompress())


@pytest.mark.gpu
def test_on_a_gpu_strided_and_misaligned_matrices_are_copied():
    import cupy

    whole = cupy.asarray(np.random.default_rng(0).standard_normal((9, 80)).astype(np.float32))
    flat = cupy.zeros(9 * 32 + 4, cupy.float32)
    for dense in (whole[:, 8:40], whole[::2, :32], flat[1 : 1 + 9 * 32].reshape(9, 32)):
        right = Sparse24Weight.prune_compress(cupy.asnumpy(dense))
        made = Sparse24Weight.prune_compress(dense).to("host")
        assert same_bits(made.values, right.values)
        assert same_bits(made.metadata, right.metadata)
