"""Stand-ins for other frameworks' tensors, each with one protocol only, and the bytes to fill them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from sparse24_plans import Device, ElementKind, TensorView
from sparse24_plans.device.tensors import HOST

BF16, F16, F32, U16 = ElementKind.BF16, ElementKind.F16, ElementKind.F32, ElementKind.U16


CUDA = Device("cuda", 0)


def numbers(shape: tuple[int, ...], element: ElementKind) -> np.ndarray:
    """An array whose every byte is different (up to 251)."""
    size = math.prod(shape) * element.itemsize
    return (np.arange(size) % 251).astype(np.uint8).view(element.dtype).reshape(shape)


def assert_views(view: TensorView, array: np.ndarray, element: ElementKind) -> None:
    """``view`` is ``array``: address, shape, strides, element, and its bytes in both directions."""
    assert view.address == array.ctypes.data
    assert view.shape == array.shape
    assert view.element is element
    assert view.device == HOST
    for size, stride, nbytes in zip(view.shape, view.strides, array.strides, strict=True):
        assert size <= 1 or stride * element.itemsize == nbytes
    source = array.view(element.bits_dtype)
    np.testing.assert_array_equal(view.bits(), source)
    assert view.bits().dtype == element.bits_dtype
    assert view.array().dtype == element.dtype
    assert view.array().tobytes() == source.tobytes()
    if array.flags.writeable and array.size:
        at = (-1,) * array.ndim
        view.bits()[at] ^= 1
        assert view.bits()[at] == source[at], "a copy was made"


class Torchlike:
    """A torch.Tensor with only the attributes that are read."""

    def __init__(self, array: np.ndarray, dtype: str, kind: str = "cpu", index: int | None = None) -> None:
        self.array, self.dtype, self.shape = array, dtype, array.shape
        self.device = SimpleNamespace(type=kind, index=index)

    def stride(self) -> tuple[int, ...]:
        return tuple(nbytes // self.array.itemsize for nbytes in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class OnlyArrayInterface:
    def __init__(self, array: np.ndarray, **change: object) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **change}


class OnlyDlpack:
    """A NumPy array that shows nothing but the DLPack protocol, of today or of before DLPack 1.0."""

    def __init__(self, array: np.ndarray, old: bool = False) -> None:
        self.array, self.old = array, old

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: object = None, **options: object) -> object:
        if self.old and options:
            raise TypeError(f"__dlpack__() got an unexpected keyword argument {next(iter(options))!r}")
        return self.array.__dlpack__(stream=stream, **options)


class OnlyCudaArrayInterface:
    def __init__(self, array: object) -> None:
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


def jax_like(array: np.ndarray) -> object:
    """A JAX array on the host: immutable, although DLPack, all that it has, doesn't say so."""
    kind = type("ArrayImpl", (OnlyDlpack,), {"__module__": "jaxlib._jax"})
    return kind(array, old=True)
