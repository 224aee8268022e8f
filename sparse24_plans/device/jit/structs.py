"""Parameter structs of kernels, each declared once.

A class derived from :class:`KernelParams` is the structure that the host fills. ``python -m
tests.kernels.parameter_headers`` writes the C++ header of the class, which the kernel includes.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, NamedTuple

from ..._vendor.cuda_driver_abi import TENSOR_MAP_BYTES

_CTYPES: dict[str, Any] = {
    "int": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "TensorMap": ctypes.c_char * TENSOR_MAP_BYTES,
}
_MAP_ALIGNMENT = 64
"""Bytes that the address of a tensor map, and so the size of a struct with one, is a multiple of."""


class Field(NamedTuple):
    """One field of a struct, as :func:`field` declares it."""

    cxx: str
    """Type in C++."""
    ctype: Any
    """Type in ctypes."""
    about: str
    """Description: a comment in the header."""
    count: int
    """Number of elements of an array; 0 for a single value."""


def field(cxx: str | type[KernelParams], about: str, count: int = 0) -> Any:
    """Declare a field by its C++ type, or by the class of a nested struct. An array has ``count`` elements.

    Returns a :class:`Field`, typed as Any because instances hold a value under the same name.
    """
    if not isinstance(cxx, str):
        ctype, cxx = cxx, cxx.__name__
    else:
        ctype = ctypes.c_void_p if cxx.endswith("*") else _CTYPES[cxx]
    return Field(cxx, ctype * count if count else ctype, about, count)


class _Struct(type(ctypes.Structure)):  # type: ignore[misc]
    """Makes ctypes fields of the fields that a class declares."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        declared = {key: one for key, one in namespace.items() if isinstance(one, Field)}
        fields = [(key, one.ctype) for key, one in declared.items()]
        if any(one.cxx == "TensorMap" for one in declared.values()):
            unpadded = type(name, (ctypes.Structure,), {"_fields_": fields})
            fields.append(("padding", ctypes.c_char * (-ctypes.sizeof(unpadded) % _MAP_ALIGNMENT)))
        rest = {key: one for key, one in namespace.items() if key not in declared}
        return super().__new__(cls, name, bases, {**rest, "_fields_": fields, "declared": declared})


class KernelParams(ctypes.Structure, metaclass=_Struct):
    """A struct that the host passes to a kernel by value. The C++ struct has the name of the class."""

    header: ClassVar[str]
    """File below kernels_cu/ that declares the struct to the kernel."""
    declared: ClassVar[dict[str, Field]]
    """The fields by their names, in the order of their offsets."""
