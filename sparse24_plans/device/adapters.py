"""Zero-copy views of any framework's tensors, and the locations that key caches of launches.

This module imports no framework. It reads a tensor through the first interface that the tensor has: NumPy or
CuPy array, ``data_ptr()`` (PyTorch), ``__cuda_array_interface__``, ``__dlpack__``, ``__array_interface__``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
from typing_extensions import Self

from .._vendor import dlpack_abi
from ..errors import InvalidProblemError
from ..vocab import IN_MEMORY, ElementKind
from .dlpack import ELEMENT_OF_TYPE
from .install import import_cupy
from .tensors import (
    ELEMENT_NAMES,
    HOST,
    LOCATION_OF_TYPE,
    MAX_DIMENSIONS,
    READ_OF_TYPE,
    Adapter,
    Device,
    TensorView,
    checked_view,
    contiguous_strides,
    element_of,
    honest_view,
    register,
)

_CUDA = [Device("cuda", i) for i in range(64)]
_BY_NAME = {kind.dtype.name: kind for kind in IN_MEMORY}
_BY_FOREIGN_DTYPE: dict[Any, ElementKind] = {}
_BY_FOREIGN_DEVICE: dict[Any, Device] = {}


def _element_strides(
    shape: tuple[int, ...], byte_strides: tuple[int, ...] | None, itemsize: int, argument: str
) -> tuple[int, ...]:
    if byte_strides is None:
        return contiguous_strides(shape)
    strides = tuple([stride // itemsize for stride in byte_strides])
    for size, stride, nbytes in zip(shape, strides, byte_strides):  # noqa: B905 - on the path of every run
        if stride * itemsize != nbytes and size > 1:
            raise InvalidProblemError(
                f"{argument}: expected strides that are multiples of {itemsize} bytes, got {byte_strides}"
            )
    return strides


def _from_numpy(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    kind = element_of(obj.dtype, element, argument)
    strides = _element_strides(obj.shape, obj.strides, kind.itemsize, argument)
    address, readonly = obj.__array_interface__["data"]
    return honest_view(address, obj.shape, kind, HOST, strides, readonly, obj, argument)


def _from_masked(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    raise InvalidProblemError(f"{argument}: expected a tensor without a mask, got {type(obj).__name__}")


def _from_cupy(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    kind = element_of(obj.dtype, element, argument)
    strides = _element_strides(obj.shape, obj.strides, kind.itemsize, argument)
    memory = obj.data
    return honest_view(memory.ptr, obj.shape, kind, _CUDA[memory.device_id], strides, False, obj, argument)


def _foreign_element(foreign: Any, element: ElementKind | None, argument: str) -> ElementKind:
    """The element of a framework's own dtype, by the name that it prints: torch.bfloat16."""
    name = str(foreign).rpartition(".")[2]
    try:
        dtype = _BY_NAME[name].dtype if name in _BY_NAME else np.dtype(name)
    except TypeError:
        raise InvalidProblemError(f"{argument}: expected one of {ELEMENT_NAMES}, got {foreign}") from None
    return element_of(dtype, element, argument)


def _from_torch(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    kind = _BY_FOREIGN_DTYPE.get(obj.dtype)
    if kind is None or element not in (None, kind):
        kind = _foreign_element(obj.dtype, element, argument)
        if kind is _BY_NAME.get(str(obj.dtype).rpartition(".")[2]):  # not raw bits of another type
            _BY_FOREIGN_DTYPE[obj.dtype] = kind
    if obj.is_neg():
        raise InvalidProblemError(f"{argument}: expected materialised values, got PyTorch's lazy negative")
    device = _BY_FOREIGN_DEVICE.get(obj.device)
    if device is None:
        device = _BY_FOREIGN_DEVICE[obj.device] = _foreign_device(obj.device, argument)
    try:
        address = obj.data_ptr()
    except RuntimeError as error:
        raise InvalidProblemError(f"{argument}: expected a tensor with storage: {error}") from error
    if address == obj.storage_offset() * kind.itemsize:  # its storage was resized to nothing
        address = 0
    return honest_view(address, tuple(obj.shape), kind, device, obj.stride(), False, obj, argument)


def _from_data_ptr(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    kind = _foreign_element(obj.dtype, element, argument)
    device = _foreign_device(obj.device, argument)
    try:
        address = obj.data_ptr()
    except RuntimeError as error:
        raise InvalidProblemError(f"{argument}: expected a tensor with storage: {error}") from error
    return checked_view(address, obj.shape, kind, device, obj.stride(), False, obj, argument)


def _foreign_device(home: Any, argument: str) -> Device:
    if home.type not in ("cpu", "cuda"):
        raise InvalidProblemError(f"{argument}: expected a tensor in cpu or cuda memory, got {home.type}")
    return HOST if home.type == "cpu" else Device("cuda", home.index or 0)


_CUDA_MEMORY_DEVICE, _CUDA_MEMORY_MANAGED = 2, 3  # cudaMemoryType


def _cuda_ordinal_of(address: int, argument: str) -> int:
    cupy = import_cupy()
    if address == 0:
        return int(cupy.cuda.runtime.getDevice())
    try:
        about = cupy.cuda.runtime.pointerGetAttributes(address)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidProblemError(
            f"{argument}: expected device memory, got {address:#x} ({error})"
        ) from error
    if about.type not in (_CUDA_MEMORY_DEVICE, _CUDA_MEMORY_MANAGED):
        raise InvalidProblemError(f"{argument}: expected device memory, got host memory {address:#x}")
    return int(about.device)


def _from_cuda_array_interface(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    view = _from_protocol(obj.__cuda_array_interface__, element, argument, obj)
    view.device = Device("cuda", _cuda_ordinal_of(view.address, argument))
    return view


def _from_array_interface(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    return _from_protocol(obj.__array_interface__, element, argument, obj)


def _from_protocol(about: Any, element: ElementKind | None, argument: str, owner: object) -> TensorView:
    """A view from an array interface's dictionary. It is on the host until the caller says otherwise."""
    try:
        dtype, shape = np.dtype(about["typestr"]), about["shape"]
        address, readonly = about["data"]
    except (TypeError, ValueError, KeyError) as error:
        fault = f"it has no {error.args[0]}" if isinstance(error, KeyError) else error
        raise InvalidProblemError(
            f"{argument}: expected an array interface with typestr, shape and data, an address and a flag: "
            f"{fault}"
        ) from error
    if about.get("mask") is not None:
        raise InvalidProblemError(f"{argument}: expected a tensor without a mask")
    kind = element_of(dtype, element, argument)
    view = checked_view(address, shape, kind, HOST, about.get("strides"), bool(readonly), owner, argument)
    # The interface counts strides in bytes.
    view.strides = _element_strides(view.shape, about.get("strides"), kind.itemsize, argument)
    return view


_DL_HOST = (dlpack_abi.CPU, dlpack_abi.CUDA_HOST)
_DL_DEVICES = (*_DL_HOST, dlpack_abi.CUDA, dlpack_abi.CUDA_MANAGED)


def _from_dlpack(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    # -1 asks a CUDA producer not to synchronise: ordering is the caller's, through `stream`.
    order = {} if obj.__dlpack_device__()[0] in _DL_HOST else {"stream": -1}
    try:
        try:
            capsule = obj.__dlpack__(max_version=dlpack_abi.VERSION, **order)
        except TypeError:  # the producer is older than DLPack 1
            capsule = obj.__dlpack__(**order)
    except Exception as error:
        raise InvalidProblemError(f"{argument}: the producer refused DLPack export: {error}") from error
    try:
        tensor = dlpack_abi.read(capsule)
    except dlpack_abi.CapsuleError as error:
        raise InvalidProblemError(f"{argument}: {error}") from error
    if tensor.device_type not in _DL_DEVICES:
        raise InvalidProblemError(
            f"{argument}: expected cpu or cuda memory, got DLPack device type {tensor.device_type}"
        )
    kind = ELEMENT_OF_TYPE.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if element is not None and kind is not element:
        whole = tensor.code in (dlpack_abi.INT, dlpack_abi.UINT) and tensor.lanes == 1
        if not whole or tensor.bits != 8 * element.itemsize:
            raise InvalidProblemError(f"{argument}: expected {element}, got DLPack type code {tensor.code}")
        kind = element
    if kind is None:
        raise InvalidProblemError(
            f"{argument}: expected one of {ELEMENT_NAMES}, got DLPack type "
            f"(code {tensor.code}, bits {tensor.bits}, lanes {tensor.lanes})"
        )
    home = HOST if tensor.device_type in _DL_HOST else Device("cuda", tensor.device_id)
    # The capsule stays unconsumed: when it is collected, the producer's own destructor frees it.
    owner = (obj, capsule)
    return checked_view(
        tensor.address, tensor.shape, kind, home, tensor.strides, tensor.readonly, owner, argument
    )


def _from_jax(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    """A read-only view, because JAX's compiler relies on arrays that never change."""
    on_gpu = hasattr(obj, "__cuda_array_interface__")
    view = (_from_cuda_array_interface if on_gpu else _from_dlpack)(obj, element, argument)
    view.readonly = True
    return view


def _comes_from(obj: Any, framework: str) -> bool:
    """Whether the framework defines the object's class or one of its bases."""
    return any(kind.__module__.partition(".")[0] == framework for kind in type(obj).__mro__)


def _is_masked(obj: Any) -> bool:
    masked = sys.modules.get("numpy.ma")  # NumPy imports it when first needed
    return masked is not None and isinstance(obj, masked.MaskedArray)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda obj: all(hasattr(obj, name) for name in names)


_is_cupy_array, _is_torch_tensor = (
    _has("__cuda_array_interface__", "data"),
    _has("data_ptr", "storage_offset"),
)


def _location_of_cupy(array: Any) -> object:
    memory = array.data
    return memory.ptr, array.shape, array.strides, array.dtype, memory.device_id


def _location_of_torch(tensor: Any) -> object:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()


def _location_of_data_ptr(tensor: Any) -> object:
    home = tensor.device
    shape, strides = (
        tuple(islice(sizes, MAX_DIMENSIONS + 1))  # a hostile object may give sizes without an end
        for sizes in (tensor.shape, tensor.stride())
    )
    return tensor.data_ptr(), shape, strides, str(tensor.dtype), home.type, home.index


class Unmoving:
    """Base of objects whose memory never moves. An identity stands for them in keys, so that caches hold no
    memory."""

    __slots__ = ("_identity",)

    def __new__(cls, *given: Any, **more: Any) -> Self:
        made = object.__new__(cls)
        object.__setattr__(made, "_identity", object())
        return made

    def __copy__(self) -> Self:
        """The object itself: a copy of the object would be another name of the same memory."""
        return self

    def __init_subclass__(cls) -> None:
        LOCATION_OF_TYPE[cls] = attrgetter("_identity")


READ_OF_TYPE[np.ndarray] = _from_numpy
register(
    (
        Adapter(_is_masked, _from_masked, lasting=True),
        Adapter(lambda obj: isinstance(obj, np.ndarray), _from_numpy, lasting=True),
        Adapter(
            lambda obj: _comes_from(obj, "cupy") and _is_cupy_array(obj), _from_cupy, True, _location_of_cupy
        ),
        Adapter(
            lambda obj: _comes_from(obj, "torch") and _is_torch_tensor(obj),
            _from_torch,
            True,
            _location_of_torch,
        ),
        Adapter(lambda obj: _comes_from(obj, "jax") or _comes_from(obj, "jaxlib"), _from_jax, lasting=False),
        Adapter(_has("data_ptr"), _from_data_ptr, True, _location_of_data_ptr),
        Adapter(_has("__cuda_array_interface__"), _from_cuda_array_interface, lasting=False),
        Adapter(_has("__dlpack__"), _from_dlpack, lasting=False),
        Adapter(_has("__array_interface__"), _from_array_interface, lasting=False),
    )
)
