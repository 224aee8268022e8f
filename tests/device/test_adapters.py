"""Tensors of any framework are read as they are: no copy, no framework imported."""

from __future__ import annotations

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from sparse24_plans import Device, ElementKind, InvalidProblemError, Sparse24Error, TensorView
from sparse24_plans.vocab import IN_MEMORY

from .tensor_likes import (
    BF16,
    F16,
    F32,
    U16,
    OnlyArrayInterface,
    OnlyCudaArrayInterface,
    OnlyDlpack,
    Torchlike,
    assert_views,
    numbers,
)

gpu = pytest.mark.gpu
every_element = pytest.mark.parametrize("element", IN_MEMORY)


# NumPy --------------------------------------------------------------------------------------------


@every_element
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 8), (2, 3, 4), (0,), (0, 8), (4, 0)])
def test_numpy(element, shape):
    array = numbers(shape, element)
    view = TensorView.of(array)
    assert_views(view, array, element)
    assert view.is_contiguous
    assert not view.readonly


@every_element
@pytest.mark.parametrize(
    "index",
    [np.s_[:, ::2], np.s_[::3], np.s_[1:, 3:], np.s_[:, ::-1], np.s_[::-2, 1:5], np.s_[2], np.s_[:, 1]],
    ids=str,
)
def test_numpy_strides(element, index):
    array = numbers((6, 16), element)[index]
    assert_views(TensorView.of(array), array, element)


def test_numpy_transposed_and_broadcast():
    array = numbers((4, 6), ElementKind.F32)
    assert TensorView.of(array.T).strides == (1, 6)
    assert not TensorView.of(array.T).is_contiguous
    spread = np.broadcast_to(array[:1], (5, 6))
    assert TensorView.of(spread).strides == (0, 1)


def test_numpy_read_only():
    array = numbers((4, 8), ElementKind.F32)
    array.flags.writeable = False
    view = TensorView.of(array)
    assert view.readonly
    assert_views(view, array, ElementKind.F32)
    with pytest.raises(ValueError, match="read-only"):
        view.bits()[0, 0] = 1


@pytest.mark.parametrize("hint", [None, ElementKind.BF16, ElementKind.U16])
def test_another_byte_order_is_rejected(hint):
    array = np.arange(8, dtype=">u2" if hint else ">f4")
    with pytest.raises(InvalidProblemError, match="operand"):
        TensorView.of(array, element=hint, argument="operand")


@pytest.mark.parametrize("dtype", ["f8", "i8", "u4", "i2", "?", "c8", "S4", "M8[s]", "V2", "O", "i4,f4"])
def test_a_type_that_is_no_element_is_rejected_by_name(dtype):
    array = np.zeros(4, dtype)
    with pytest.raises(InvalidProblemError, match="operand") as caught:
        TensorView.of(array, argument="operand")
    assert str(array.dtype) in str(caught.value)


def test_strides_that_split_elements_are_rejected():
    packed = np.zeros(4, dtype=[("tag", "u1"), ("value", "<f4")])
    with pytest.raises(InvalidProblemError, match="x: expected strides that are multiples of 4 bytes"):
        TensorView.of(packed["value"], argument="x")


def test_strides_that_nothing_steps_along_do_not_matter():
    row = np.zeros(1, dtype=[("tag", "u1"), ("values", "<f4", (8,))])["values"]
    assert row.strides == (33, 4)
    assert TensorView.of(row).is_contiguous
    empty = np.lib.stride_tricks.as_strided(np.zeros(4, np.uint16), (0, 0), (1, 2))
    assert TensorView.of(empty).is_contiguous


# Reinterpretation ---------------------------------------------------------------------------------

CARRIERS = {1: ("u1", "i1", "V1"), 2: ("u2", "i2", "V2"), 4: ("u4", "i4", "V4")}


@every_element
def test_integers_and_opaque_bytes_of_same_size_pass_as_element(element):
    array = numbers((4, 8), element)
    for carrier in CARRIERS[element.itemsize]:
        view = TensorView.of(array.view(carrier), element=element)
        assert_views(view, array, element)


@every_element
def test_an_array_of_the_element_itself_passes(element):
    array = numbers((4, 8), element)
    assert_views(TensorView.of(array, element=element), array, element)


@pytest.mark.parametrize(
    ("dtype", "element"),
    [
        ("f2", BF16),
        ("f4", ElementKind.I32),
        ("u1", BF16),
        ("u4", BF16),
        ("?", ElementKind.U8),
        ("c8", F32),
        (ml_dtypes.bfloat16, ElementKind.F16),
        (ml_dtypes.float8_e4m3fn, ElementKind.FP8_E5M2),
        (ml_dtypes.float8_e4m3fnuz, ElementKind.FP8_E4M3),
        (ml_dtypes.float8_e4m3fn, ElementKind.S8),
        ([("low", "u1"), ("high", "u1")], BF16),
    ],
)
def test_other_numbers_are_never_reinterpreted(dtype, element):
    with pytest.raises(InvalidProblemError, match=re.escape(f"w: expected {element}, got {np.dtype(dtype)}")):
        TensorView.of(np.zeros((4, 8), dtype), element=element, argument="w")


def test_a_view_of_integers_is_reinterpreted_too():
    array = numbers((4, 8), U16)
    again = TensorView.of(TensorView.of(array), element=BF16)
    assert_views(again, array.view(ml_dtypes.bfloat16), BF16)


@pytest.mark.parametrize("source", [F32, F16])
def test_a_view_of_other_numbers_is_not(source):
    view = TensorView.of(numbers((4, 8), source))
    with pytest.raises(InvalidProblemError, match="metadata: expected u16"):
        TensorView.of(view, element=U16, argument="metadata")


def test_a_view_is_its_own_view():
    view = TensorView.of(numbers((4, 8), F32))
    assert TensorView.of(view) is view
    assert TensorView.of(view, element=F32) is view


# data_ptr() (PyTorch) -----------------------------------------------------------------------------


TORCH_NAMES = {
    "torch.float32": "f32",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.int8": "s8",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int32": "i32",
    "torch.uint16": "u16",
    "torch.uint8": "u8",
}


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_data_ptr(name):
    element = ElementKind(TORCH_NAMES[name])
    array = numbers((6, 8), element)[::2, 1:]
    for _ in range(2):  # the second time from the cache of types
        assert_views(TensorView.of(Torchlike(array, name)), array, element)


def test_data_ptr_knows_every_element():
    assert set(TORCH_NAMES.values()) == set(IN_MEMORY)


@pytest.mark.parametrize(("kind", "index", "device"), [("cuda", 3, "cuda:3"), ("cuda", None, "cuda:0")])
def test_data_ptr_on_gpu_needs_no_gpu_to_be_described(kind, index, device):
    view = TensorView.of(Torchlike(numbers((2, 8), BF16), "torch.bfloat16", kind, index))
    assert str(view.device) == device


def test_data_ptr_reinterpreted():
    array = numbers((2, 8), BF16)
    plain = Torchlike(array, "torch.int16")
    assert_views(TensorView.of(plain, element=BF16), array, BF16)
    with pytest.raises(InvalidProblemError, match="int16"):
        TensorView.of(plain)
    with pytest.raises(InvalidProblemError, match="x: expected bf16, got float16"):
        TensorView.of(Torchlike(array, "torch.float16"), element=BF16, argument="x")


@pytest.mark.parametrize("name", ["float64", "int64", "bool", "complex64", "quint8"])
def test_data_ptr_of_another_type(name):
    with pytest.raises(InvalidProblemError, match="operand") as caught:
        TensorView.of(Torchlike(numbers((2, 8), F32), f"torch.{name}"), argument="operand")
    assert name in str(caught.value)


@pytest.mark.parametrize("kind", ["meta", "mps", "xpu"])
def test_data_ptr_elsewhere(kind):
    with pytest.raises(InvalidProblemError, match=f"x: expected a tensor in cpu or cuda memory, got {kind}"):
        TensorView.of(Torchlike(numbers((2, 8), F32), "torch.float32", kind), argument="x")


def test_data_ptr_of_a_tensor_without_storage():
    class Fake(Torchlike):
        def data_ptr(self) -> int:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    with pytest.raises(InvalidProblemError, match="x: expected a tensor with storage: Cannot access"):
        TensorView.of(Fake(numbers((2, 8), F32), "torch.float32"), argument="x")


# __array_interface__ ------------------------------------------------------------------------------


@every_element
def test_array_interface(element):
    array = numbers((6, 8), element)[::2]
    carrier = array if array.dtype.isbuiltin == 1 else array.view(f"V{element.itemsize}")
    assert_views(TensorView.of(OnlyArrayInterface(carrier), element=element), array, element)


def test_array_interface_without_strides():
    array = numbers((6, 8), F16)
    assert array.__array_interface__["strides"] is None
    assert_views(TensorView.of(OnlyArrayInterface(array)), array, F16)


def test_array_interface_of_an_extension_type_needs_the_element():
    """ml_dtypes arrays describe themselves as opaque '<V2'."""
    array = numbers((4, 8), BF16)
    thing = OnlyArrayInterface(array)
    assert thing.__array_interface__["typestr"] == "<V2"
    assert_views(TensorView.of(thing, element=BF16), array, BF16)
    with pytest.raises(InvalidProblemError, match=r"w: .*got \|V2; TensorView.of\(\.\.\., element=\.\.\.\)"):
        TensorView.of(thing, argument="w")


def test_array_interface_of_a_type_that_numpy_cannot_name():
    """ml_dtypes' float8_e5m2 calls itself '<f1', which NumPy doesn't take back."""
    thing = OnlyArrayInterface(numbers((4, 8), ElementKind.FP8_E5M2))
    assert thing.__array_interface__["typestr"] == "<f1"
    with pytest.raises(InvalidProblemError, match=r"w: .*<f1"):
        TensorView.of(thing, argument="w")


def test_array_interface_read_only():
    array = numbers((4, 8), F32)
    array.flags.writeable = False
    assert TensorView.of(OnlyArrayInterface(array)).readonly


@pytest.mark.parametrize("hint", [None, BF16])
def test_array_interface_of_another_byte_order(hint):
    thing = OnlyArrayInterface(np.zeros(8, ">u2"))
    with pytest.raises(InvalidProblemError, match="operand"):
        TensorView.of(thing, element=hint, argument="operand")


@pytest.mark.parametrize("data", [b"\0" * 128, None], ids=["bytes", "none"])
def test_array_interface_that_names_no_address(data):
    """The protocol also allows a buffer (Pillow's images give bytes): no memory to view without a copy."""
    with pytest.raises(InvalidProblemError, match="x"):
        TensorView.of(OnlyArrayInterface(numbers((4, 8), F32), data=data), argument="x")


@pytest.mark.parametrize("protocol", ["__array_interface__", "__cuda_array_interface__"])
@pytest.mark.parametrize("absent", ["typestr", "shape", "data"])
def test_an_array_interface_that_lacks_a_part_names_it(protocol, absent):
    about = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}
    thing = SimpleNamespace(**{protocol: {key: value for key, value in about.items() if key != absent}})
    with pytest.raises(
        InvalidProblemError, match=f"x: expected an array interface with .*: it has no {absent}$"
    ):
        TensorView.of(thing, argument="x")


# No tensor ----------------------------------------------------------------------------------------


NO_TENSORS = [None, 3, 1.5, "x", b"x", [1.0], (1, 2), object(), memoryview(b"x")]


@pytest.mark.parametrize("thing", NO_TENSORS, ids=lambda thing: type(thing).__name__)
def test_what_is_no_tensor(thing):
    with pytest.raises(InvalidProblemError, match="operand: expected a tensor") as caught:
        TensorView.of(thing, argument="operand")
    assert type(thing).__name__ in str(caught.value)


def test_a_type_that_failed_once_may_come_back():
    """The cache of a type keeps how to read it, and not what an attempt gave."""
    for wrap in (OnlyArrayInterface, OnlyDlpack):
        with pytest.raises(InvalidProblemError):
            TensorView.of(wrap(np.zeros(4, "?")))
        good = np.zeros(4, np.float32)
        assert_views(TensorView.of(wrap(good)), good, F32)


# Real frameworks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_cpu(name):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(96, dtype=torch.uint8).view(getattr(torch, name.removeprefix("torch.")))
    view = TensorView.of(tensor)
    assert (view.address, view.shape) == (tensor.data_ptr(), (tensor.numel(),))
    assert view.element is ElementKind(TORCH_NAMES[name])
    assert view.bits().tobytes() == bytes(range(96))
    view.bits()[0] ^= 1
    assert tensor.view(torch.uint8)[0] == 1


def test_torch_without_storage():
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidProblemError, match="meta"):
        TensorView.of(torch.empty(4, device="meta"))
    with pytest.raises(InvalidProblemError, match="storage"):
        TensorView.of(torch.eye(4).to_sparse())


def on_gpu(element: ElementKind):
    """A CuPy array [6, 8] of the element's bits, and those bits on the host."""
    import cupy

    bits = numbers((6, 8), element).view(element.bits_dtype)
    return cupy.asarray(bits), bits


def assert_views_gpu(view: TensorView, device_array, bits: np.ndarray, element: ElementKind) -> None:
    import cupy

    assert (view.address, view.shape, view.element) == (device_array.data.ptr, bits.shape, element)
    assert view.device == Device("cuda", device_array.device.id)
    np.testing.assert_array_equal(cupy.asnumpy(view.bits()), bits)
    view.bits()[0, 0] = 200
    assert int(device_array[0, 0]) == 200


@gpu
@every_element
@pytest.mark.parametrize("form", ["cupy", "cuda_array_interface", "dlpack"])
@pytest.mark.parametrize("index", [np.s_[:], np.s_[::2, 1:]], ids=str)
def test_cupy(element, form, index):
    device_array, bits = (array[index] for array in on_gpu(element))
    wrap = {"cupy": lambda a: a, "cuda_array_interface": OnlyCudaArrayInterface, "dlpack": OnlyDlpack}[form]
    view = TensorView.of(wrap(device_array), element=element)
    assert_views_gpu(view, device_array, bits, element)


@gpu
def test_cuda_array_interface_of_an_empty_array():
    import cupy

    view = TensorView.of(OnlyCudaArrayInterface(cupy.empty((0, 8), cupy.float32)))
    assert (view.shape, view.nbytes_spanned, view.device.kind) == ((0, 8), 0, "cuda")


@gpu
def test_cuda_array_interface_of_host_memory():
    """An address that no CUDA device knows is refused, not taken for a device's."""
    array = numbers((4, 8), F32)
    about = {"shape": (4, 8), "typestr": "<f4", "data": (array.ctypes.data, False), "version": 3}
    with pytest.raises(InvalidProblemError, match="x: expected device memory"):
        TensorView.of(SimpleNamespace(__cuda_array_interface__=about), argument="x")


def test_cuda_array_interface_of_no_memory_at_all():
    about = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}
    with pytest.raises(Sparse24Error):
        TensorView.of(SimpleNamespace(__cuda_array_interface__=about), argument="x")


@gpu
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint16", "int8"])
def test_torch_cuda(name):
    torch = pytest.importorskip("torch")
    raw = torch.arange(96, dtype=torch.uint8, device="cuda")
    tensor = raw.view(getattr(torch, name))
    view = TensorView.of(tensor)
    assert (view.address, view.device) == (tensor.data_ptr(), Device("cuda", tensor.device.index))
    assert view.element.dtype.name == name
    view.bits().view("u1")[0] = 77
    assert int(raw[0]) == 77


def test_pytorchs_lazy_negative_is_refused():
    torch = pytest.importorskip("torch")
    lazy = torch.complex(torch.ones(4, 8), torch.ones(4, 8)).conj().imag
    assert lazy.is_neg()
    with pytest.raises(InvalidProblemError, match="negative"):
        TensorView.of(lazy)
