"""Parameter structs of kernels, each declared once.

A class derived from :class:`KernelParams` is the structure that the host fills. ``python -m
tests.kernels.parameter_headers`` writes its C++ header, which the kernel includes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

from typing_extensions import Self

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


Params = TypeVar("Params", bound="KernelParams")


class Field(NamedTuple):
    """One field of a struct, as :func:`field` declares it."""

    cxx: str
    """Type in C++."""
    ctype: Any
    """Type in ctypes."""
    about: str
    """Description: a comment in the header."""
    length: int
    """Number of elements of an array; 0 for a single value."""


def field(cxx: str | type[KernelParams], about: str, length: int = 0) -> Any:
    """Declare a field by its C++ type, or by the class of a nested struct. An array has a ``length``.

    Returns a :class:`Field`, typed as Any because instances hold a value under the same name.
    """
    if isinstance(cxx, str):
        ctype = ctypes.c_void_p if cxx.endswith("*") else _CTYPES[cxx]
    else:
        ctype, cxx = cxx, cxx.__name__
    return Field(cxx, ctype * length if length else ctype, about, length)


class KernelParams(ctypes.Structure):
    """A struct that the host passes to a kernel by value. The C++ struct has the name of the class.

    Values are given by name; a name that is not declared raises AttributeError.
    """

    __slots__ = ()
    header: ClassVar[str]
    """File below kernels_cu/ that declares the struct to the kernel."""
    declared: ClassVar[dict[str, Field]]
    """The fields by their names, in the order of their offsets."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    def with_values(self, **values: Any) -> Self:
        """Return a copy with other values of these fields."""
        copy = type(self).from_buffer_copy(self)
        for name, value in values.items():
            setattr(copy, name, value)
        return copy


def kernel_params(header: str) -> Callable[[type[Params]], type[Params]]:
    """Decorate a class of fields: it becomes a ctypes structure, which ``header`` declares to the kernel."""

    def declare(struct: type[Params]) -> type[Params]:
        declared = {name: one for name, one in vars(struct).items() if isinstance(one, Field)}
        fields = [(name, one.ctype) for name, one in declared.items()]
        if any(one.cxx == "TensorMap" for one in declared.values()):
            unpadded = type("unpadded", (ctypes.Structure,), {"_fields_": fields})
            fields.append(("padding", ctypes.c_char * (-ctypes.sizeof(unpadded) % _MAP_ALIGNMENT)))
        # Only a new class can have slots, which make assignments to other names fail.
        left_out = {*declared, "__dict__", "__weakref__"}
        rest = {name: value for name, value in vars(struct).items() if name not in left_out}
        rest |= {"__slots__": (), "_fields_": fields, "header": header, "declared": declared}
        copy: Any = type(struct)
        made: type[Params] = copy(struct.__name__, struct.__bases__, rest)
        return made

    return declare
