"""Tensors that implement the DLPack protocol alone, in the form of DLPack 1.0 or the one before it."""

from __future__ import annotations

import ctypes
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from sparse24_plans import Device, InvalidProblemError, Sparse24Weight, TensorView
from sparse24_plans.vocab import IN_MEMORY

from .tensor_likes import BF16, F32, OnlyDlpack, assert_views, numbers

gpu = pytest.mark.gpu


DLPACK_NUMPY = [element for element in IN_MEMORY if element.dtype.isbuiltin == 1]


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
@pytest.mark.parametrize("element", DLPACK_NUMPY)
@pytest.mark.parametrize("index", [np.s_[:], np.s_[::2, 1:], np.s_[:, ::-1], np.s_[2], np.s_[:0]], ids=str)
def test_dlpack(element, old, index):
    array = numbers((6, 8), element)[index]
    assert_views(TensorView.of(OnlyDlpack(array, old)), array, element)


def test_dlpack_covers_numpys_own_elements():
    assert [str(element) for element in DLPACK_NUMPY] == ["f32", "f16", "s8", "i32", "u16", "u8"]


def test_dlpack_read_only_flag():
    array = numbers((4, 8), F32)
    assert not TensorView.of(OnlyDlpack(array)).readonly
    array.flags.writeable = False
    assert TensorView.of(OnlyDlpack(array)).readonly


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
def test_dlpack_reinterpreted(old):
    array = numbers((4, 8), BF16)
    assert_views(TensorView.of(OnlyDlpack(array.view("i2"), old), element=BF16), array, BF16)
    with pytest.raises(InvalidProblemError, match="w: expected bf16"):
        TensorView.of(OnlyDlpack(array.view("f2"), old), element=BF16, argument="w")
    with pytest.raises(InvalidProblemError, match="w: expected bf16"):
        TensorView.of(OnlyDlpack(array.view("u1"), old), element=BF16, argument="w")


@pytest.mark.parametrize("dtype", ["f8", "i8", "?", "c8"])
def test_dlpack_of_another_type(dtype):
    with pytest.raises(InvalidProblemError, match=r"x: expected one of .*DLPack type"):
        TensorView.of(OnlyDlpack(np.zeros(4, dtype)), argument="x")


def test_dlpack_refused_by_a_producer_of_today():
    class Refusing(OnlyDlpack):
        def __dlpack__(self, **options: object) -> object:
            raise BufferError("tensors that require grad can't be exported")

    with pytest.raises(InvalidProblemError, match=r"x: .*require grad"):
        TensorView.of(Refusing(numbers((4, 8), F32)), argument="x")


def test_dlpack_refused_by_a_producer_of_before():
    """NumPy 1 refuses read-only arrays so: the unversioned capsule has no flag to say it."""
    array = numbers((4, 8), F32)
    array.flags.writeable = False
    with pytest.raises(InvalidProblemError, match=r"x: .*readonly"):
        TensorView.of(OnlyDlpack(array, old=True), argument="x")


@pytest.mark.parametrize("thing", [None, 3, "capsule", object()])
def test_dlpack_that_is_no_capsule(thing):
    class Broken(OnlyDlpack):
        def __dlpack__(self, **options: object) -> object:
            return thing

    with pytest.raises(InvalidProblemError, match=r"x: .*capsule"):
        TensorView.of(Broken(numbers((4, 8), F32)), argument="x")


def test_dlpack_capsule_that_was_consumed():
    class Used(OnlyDlpack):
        def __dlpack__(self, **options: object) -> object:
            capsule = self.array.__dlpack__()
            consumer = SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0))
            self.taken = np.from_dlpack(consumer)
            return capsule

    with pytest.raises(InvalidProblemError, match=r"x: .*capsule"):
        TensorView.of(Used(numbers((4, 8), F32)), argument="x")


def test_dlpack_of_another_kind_of_device():
    """Device type 7 is Vulkan."""

    class Elsewhere(OnlyDlpack):
        def __dlpack__(self, **options: object) -> object:
            capsule = self.array.__dlpack__()
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
            device_type = get(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
            ctypes.c_int32.from_address(device_type).value = 7
            return capsule

    with pytest.raises(InvalidProblemError, match="x: expected cpu or cuda memory, got DLPack device type 7"):
        TensorView.of(Elsewhere(numbers((4, 8), F32)), argument="x")


# Out ----------------------------------------------------------------------------------------------


def exported(view: TensorView, old: bool = False) -> TensorView:
    """The view again, as another library reads it."""
    consumer = OnlyDlpack.__new__(OnlyDlpack)
    consumer.array, consumer.old = view, old
    return TensorView.of(consumer)


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
@pytest.mark.parametrize("element", IN_MEMORY)
@pytest.mark.parametrize("index", [np.s_[:], np.s_[::2, 1:], np.s_[:, ::-1], np.s_[:0]], ids=str)
def test_a_view_exports_every_element(element, old, index):
    array = numbers((6, 8), element)[index]
    found = exported(TensorView.of(array), old)
    assert (found.shape, found.strides) == (array.shape, TensorView.of(array).strides)
    assert found.element is element
    assert found.address == array.ctypes.data or not array.size
    assert found.array().tobytes() == array.tobytes()


@pytest.mark.parametrize("element", IN_MEMORY)
def test_pytorch_reads_weights_of_every_element(element):
    """Without ml_dtypes, and sharing the memory."""
    torch = pytest.importorskip("torch")
    bits = numbers((8, 16), element).view(element.bits_dtype)
    weight = Sparse24Weight.prune_compress(bits, element=element)
    found = torch.from_dlpack(weight.values_view)
    assert found.data_ptr() == weight.values_view.address
    assert found.shape == (8, 8)
    assert TensorView.of(found).element is element
    assert found.view(torch.uint8).numpy().tobytes() == weight.values.tobytes()
    assert torch.from_dlpack(weight.metadata_view).dtype is torch.uint16


@pytest.mark.parametrize("element", IN_MEMORY)
def test_numpy_reads_a_view(element):
    array = numbers((6, 8), element)[::2]
    found = np.asarray(TensorView.of(array))
    assert found.dtype == element.dtype
    assert np.shares_memory(found, array)
    assert found.tobytes() == array.tobytes()
    assert not np.shares_memory(np.array(TensorView.of(array)), array)
    assert np.asarray(TensorView.of(array), np.float64).dtype == np.float64


def test_the_memory_lives_as_long_as_what_was_exported():
    array = numbers((4, 8), BF16)
    alive = weakref.ref(array)
    made = [np.asarray(TensorView.of(array)), TensorView.of(array).__dlpack__()]
    del array
    while made:
        assert alive() is not None
        made.pop()
    assert alive() is None


def test_what_cannot_be_exported_is_refused():
    array = numbers((4, 8), F32)
    array.flags.writeable = False
    view = TensorView.of(array)
    assert exported(view).readonly
    with pytest.raises(InvalidProblemError, match=r"TensorView: expected what DLPack can export: .*readonly"):
        view.__dlpack__()
    with pytest.raises(InvalidProblemError, match="TensorView: expected what DLPack can export"):
        view.__dlpack__(colour="red")
    with pytest.raises(InvalidProblemError, match="TensorView: expected host memory, got cuda:3"):
        np.asarray(TensorView(4096, (4,), "f32", Device("cuda", 3)))
    assert TensorView(4096, (4,), "f32", Device("cuda", 3)).__dlpack_device__() == (2, 3)
