"""Tensors that show the DLPack protocol and nothing else, of today or of before DLPack 1.0."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from sparse24_plans import ElementKind, InvalidProblemError, TensorView

from .tensor_likes import BF16, F32, OnlyDlpack, assert_views, numbers

gpu = pytest.mark.gpu


DLPACK_NUMPY = [element for element in ElementKind if element.dtype.isbuiltin == 1]


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
