"""The part of DLPack's C ABI that describes a tensor in a capsule. Provenance: VENDOR.md."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

VERSION = (1, 1)
"""The newest that a producer may answer with."""
# DLDeviceType: kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
# DLDataTypeCode: kDLInt, kDLUInt, kDLFloat, kDLBfloat; kDLFloat8_e4m3fn and kDLFloat8_e5m2 of DLPack 1.1
INT, UINT, FLOAT, BFLOAT, FLOAT8_E4M3FN, FLOAT8_E5M2 = 0, 1, 2, 4, 10, 12

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_MAJOR = 1
_MOST_DIMENSIONS = 64  # DLPack sets no bound; more than any producer has mean a broken capsule


class _DLTensor(ctypes.Structure):
    """DLTensor, its DLDevice and DLDataType spelled out."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    ]


class CapsuleError(Exception):
    """The object is no capsule, or a consumed or broken one, or one of another version."""


class Tensor(NamedTuple):
    """The contents of a capsule. ``strides`` in elements, None where the tensor is compact and row-major."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device_type: int
    device_id: int
    code: int
    bits: int
    lanes: int
    readonly: bool


def read(capsule: Any) -> Tensor:
    """Read an unconsumed ``capsule`` of either form, which stays unconsumed. Raises CapsuleError."""
    tensor, readonly = _tensor_in(capsule)
    if not 0 <= tensor.ndim <= _MOST_DIMENSIONS or (tensor.ndim and not tensor.shape):
        raise CapsuleError(
            f"expected a shape of at most {_MOST_DIMENSIONS} sizes, got {tensor.ndim} dimensions"
        )
    dimensions = range(tensor.ndim)
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[i] for i in dimensions),
        tuple(tensor.strides[i] for i in dimensions) if tensor.strides else None,
        tensor.device_type,
        tensor.device_id,
        tensor.code,
        tensor.bits,
        tensor.lanes,
        readonly,
    )


def retype(capsule: Any, code: int) -> None:
    """Give the elements of an unconsumed ``capsule`` another type of the same size. Raises CapsuleError.

    For producers without a name for the type: nothing but a consumer reads it, also not the deleter.
    """
    _tensor_in(capsule)[0].code = code


def _tensor_in(capsule: Any) -> tuple[_DLTensor, bool]:
    """The tensor that a capsule holds, and whether it is read-only."""
    if (pointer := _pointer(capsule, b"dltensor_versioned")) is not None:
        managed = _DLManagedTensorVersioned.from_address(pointer)
        if managed.major != _MAJOR:
            raise CapsuleError(f"expected DLPack {_MAJOR}, got version {managed.major}")
        return managed.dl_tensor, bool(managed.flags & _READ_ONLY)
    if (pointer := _pointer(capsule, b"dltensor")) is not None:
        return _DLTensor.from_address(pointer), False  # the first member of DLManagedTensor
    raise CapsuleError("__dlpack__ returned no unused DLPack capsule")


def _pointer(capsule: Any, name: bytes) -> int | None:
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    return api.PyCapsule_GetPointer(capsule, name) if api.PyCapsule_IsValid(capsule, name) else None
