"""The part of the cuSPARSELt C ABI that a plan-held 2:4 product needs, through ctypes.

Everything that the library makes an object's life depend on is held here: the opaque structs never move,
descriptors outlive what points at them, and each object is destroyed once, in the reverse order of its
making, also when a later step fails. Provenance: VENDOR.md.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .library_error import LibraryError

# cudaDataType (library_types.h)
R_32F, R_16F, R_8I, R_32I, R_16BF, R_8F_E4M3 = 0, 2, 3, 10, 14, 28
# cusparseComputeType; cusparseOrder_t; cusparseOperation_t
COMPUTE_32I, COMPUTE_32F = 0, 2
ORDER_COL, ORDER_ROW = 1, 2
OP_N, OP_T = 0, 1
# cusparseLtMatmulDescAttribute_t
RELU, GELU, ALPHA_VECTOR, BIAS_POINTER = 0, 3, 5, 8
# cusparseLtMatmulAlgAttribute_t
CONFIG_ID, CONFIG_MAX_ID, SPLIT_K, SPLIT_K_MODE, SPLIT_K_BUFFERS = 0, 1, 3, 4, 5
# cusparseStatus_t
ARCH_MISMATCH, NOT_SUPPORTED = 4, 10

OLDEST = (0, 8, 0)
"""The first version with this layout: 512-byte structs, and a destructor for algorithm selections."""
BELOW = (0, 11, 0)
"""Versions from here on have headers that nobody has compared yet."""
_FILE = "libcusparseLt.so.0"
_WHEEL_FOLDERS = ("cusparselt/lib", "cu13/lib", "cu12/lib")
"""Below ``nvidia/``: of the wheels of 0.8, and of those from 0.9 on."""
_STRUCT_BYTES, _STRUCT_ALIGNMENT = 512, 16
_SPARSITY_50_PERCENT = 0
_ALG_DEFAULT = 0
ALIGNMENT = 16
"""Bytes that operands, and their leading dimensions, are multiples of."""

_P, _I32, _I64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32, ctypes.c_size_t
_SIGNATURES: dict[str, list[Any]] = {
    "GetProperty": [_I32, _P],
    "Init": [_P],
    "Destroy": [_P],
    "DenseDescriptorInit": [_P, _P, _I64, _I64, _I64, _U32, _I32, _I32],
    "StructuredDescriptorInit": [_P, _P, _I64, _I64, _I64, _U32, _I32, _I32, _I32],
    "MatDescriptorDestroy": [_P],
    "MatmulDescriptorInit": [_P, _P, _I32, _I32, _P, _P, _P, _P, _I32],
    "MatmulDescSetAttribute": [_P, _P, _I32, _P, _SIZE],
    "MatmulAlgSelectionInit": [_P, _P, _P, _I32],
    "MatmulAlgSelectionDestroy": [_P],
    "MatmulAlgSetAttribute": [_P, _P, _I32, _P, _SIZE],
    "MatmulAlgGetAttribute": [_P, _P, _I32, _P, _SIZE],
    "MatmulPlanInit": [_P, _P, _P, _P],
    "MatmulPlanDestroy": [_P],
    "MatmulGetWorkspace": [_P, _P, _P],
    "Matmul": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _I32],
    "SpMMACompressedSize2": [_P, _P, _P, _P],
    "SpMMACompress2": [_P, _P, _I32, _I32, _P, _P, _P, _P],
}


class Library:
    """A loaded library: its version, and its calls, which raise LibraryError."""

    def __init__(self, dll: Any, path: str) -> None:
        self.path, self._dll = path, dll
        get = dll.cusparseLtGetProperty
        number = ctypes.c_int()
        parts = []
        for which in range(3):  # libraryPropertyType: major, minor, patch
            if get(which, ctypes.byref(number)):
                raise LibraryError("cusparseLtGetProperty", -1)
            parts.append(number.value)
        self.version: tuple[int, int, int] = (parts[0], parts[1], parts[2])
        if not OLDEST <= self.version < BELOW:
            return  # another layout: nothing more may be called
        for name, signature in _SIGNATURES.items():
            function = getattr(dll, f"cusparseLt{name}")
            function.argtypes, function.restype = signature, ctypes.c_int
        dll.cusparseLtGetErrorName.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._dll, f"cusparseLt{name}")(*arguments)
        if status:
            self.fail(name, status)

    def fail(self, name: str, status: int) -> None:
        text = self._dll.cusparseLtGetErrorName(status) or b""
        raise LibraryError(f"cusparseLt{name}", status, text.decode())

    @property
    def matmul(self) -> Any:
        """The raw call, for the path of every launch."""
        return self._dll.cusparseLtMatmul


def candidates() -> list[str]:
    """Places where the library may lie: NVIDIA's wheels, then the system's loader."""
    found = []
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        paths = (Path(folder, part, _FILE) for part in _WHEEL_FOLDERS)
        found += [str(path) for path in paths if path.exists()]
    return [*found, _FILE]


@cache
def load() -> Library | None:
    """The first of :func:`candidates` that loads; None where none does. Its version may be a wrong one."""
    for path in candidates():
        try:
            return Library(ctypes.CDLL(path), path)
        except (OSError, AttributeError, LibraryError):
            continue
    return None


def version() -> str | None:
    """The version of the library that loads ("0.8.0"), or None. Needs no GPU."""
    library = load()
    return None if library is None else ".".join(map(str, library.version))


def _struct(keep: list[Any]) -> int:
    """The address of a zeroed opaque struct that lives, unmoved, as long as ``keep``."""
    memory = ctypes.create_string_buffer(_STRUCT_BYTES + _STRUCT_ALIGNMENT)
    keep.append(memory)
    address = ctypes.addressof(memory)
    return -(-address // _STRUCT_ALIGNMENT) * _STRUCT_ALIGNMENT


class Handle:
    """A library context of one device, for one thread at a time: ``lock`` is held around its calls.

    Needs its device current when it is made.
    """

    def __init__(self, library: Library) -> None:
        self.library, self.lock = library, threading.Lock()
        self._memory: list[Any] = []
        self.address = _struct(self._memory)
        library.call("Init", self.address)
        self._finalizer = weakref.finalize(self, _destroy, library, "Destroy", self.address, self._memory)


def _destroy(library: Library, name: str, address: int, memory: Any) -> None:
    """Best effort: what can't be destroyed any more (a context that died) must not hide the cause."""
    with suppress(LibraryError):
        library.call(name, address)


_handles = threading.local()


def handle(ordinal: int) -> Handle:
    """This thread's handle of a device, made at first use with that device current.

    It is destroyed when the thread has ended and no product holds it any more.
    """
    mine: dict[int, Handle] = _handles.__dict__.setdefault("by_device", {})
    if ordinal not in mine:
        library = load()
        assert library is not None  # selection saw it load
        mine[ordinal] = Handle(library)
    return mine[ordinal]


class Operand(NamedTuple):
    """A matrix as it lies in memory: ``leading`` elements between its rows (ROW) or its columns (COL)."""

    rows: int
    columns: int
    leading: int
    type: int
    order: int
    transpose: bool = False
    sparse: bool = False


class _Objects:
    """Opaque objects, destroyed once: when the last reference goes, or at once if making them fails."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._memory: list[Any] = [handle]
        self._undo = ExitStack()
        self._finalizer = weakref.finalize(self, _close, self._undo, self._memory)

    def _make(self, init: str, destroy: str | None, *arguments: Any, first: bool = False) -> int:
        address = _struct(self._memory)
        library = self._handle.library
        library.call(init, self._handle.address, address, *arguments)
        if destroy is not None:
            self._undo.callback(_destroy, library, destroy, address, None)
        return address

    def _matrix(self, matrix: Operand) -> int:
        shape = (matrix.rows, matrix.columns, matrix.leading, ALIGNMENT, matrix.type, matrix.order)
        if matrix.sparse:
            return self._make(
                "StructuredDescriptorInit", "MatDescriptorDestroy", *shape, _SPARSITY_50_PERCENT
            )
        return self._make("DenseDescriptorInit", "MatDescriptorDestroy", *shape)

    def close(self) -> None:
        """Destroy now; a second call does nothing."""
        self._finalizer()


def _close(undo: ExitStack, memory: list[Any]) -> None:
    undo.close()
    memory.clear()


class Compressor(_Objects):
    """Turns dense matrices of one shape, 2:4 along their reduction, into the library's blob.

    ``size`` and ``scratch`` are the blob's bytes and those needed while it is made.
    """

    def __init__(self, handle: Handle, matrix: Operand, *, first_operand: bool) -> None:
        super().__init__(handle)
        self._op, self._first = (OP_T if matrix.transpose else OP_N), first_operand
        try:
            self._matrix_address = self._matrix(matrix)
            size, scratch = ctypes.c_size_t(), ctypes.c_size_t()
            handle.library.call(
                "SpMMACompressedSize2",
                handle.address,
                self._matrix_address,
                ctypes.byref(size),
                ctypes.byref(scratch),
            )
        except BaseException:
            self.close()
            raise
        self.size, self.scratch = size.value, scratch.value

    def compress(self, dense: int, blob: int, scratch: int, stream: int) -> None:
        """Enqueue the compression. ``blob`` and ``scratch`` have the sizes that this object says."""
        with self._handle.lock:
            self._handle.library.call(
                "SpMMACompress2",
                self._handle.address,
                self._matrix_address,
                int(self._first),
                self._op,
                dense,
                blob,
                scratch,
                stream,
            )


class Matmul(_Objects):
    """A pinned product D = epilogue(alpha * op(A) @ op(B)), one of A and B sparse, beta = 0.

    ``algorithm`` holds cusparseLtMatmulAlgAttribute_t -> int to set; what it leaves out is the library's
    default. With ``alpha`` None the launches take a device vector of one float a row of D. ``attributes`` are
    cusparseLtMatmulDescAttribute_t -> ctypes value. Needs the device current.
    """

    def __init__(
        self,
        handle: Handle,
        a: Operand,
        b: Operand,
        c: Operand,
        d: Operand,
        *,
        compute: int,
        alpha: float | None,
        attributes: Mapping[int, Any],
        algorithm: Mapping[int, int],
    ) -> None:
        super().__init__(handle)
        self._alpha, self._beta = ctypes.c_float(1.0 if alpha is None else alpha), ctypes.c_float(0.0)
        self._library = handle.library
        self._bias: int | None = None
        try:
            with handle.lock:
                self._build(a, b, c, d, compute, attributes, algorithm)
        except BaseException:
            self.close()
            raise

    def _build(
        self,
        a: Operand,
        b: Operand,
        c: Operand,
        d: Operand,
        compute: int,
        attributes: Mapping[int, Any],
        algorithm: Mapping[int, int],
    ) -> None:
        matrices = [self._matrix(operand) for operand in (a, b, c, d)]
        ops = [OP_T if operand.transpose else OP_N for operand in (a, b)]
        self._desc = self._make("MatmulDescriptorInit", None, *ops, *matrices, compute)
        for attribute, value in attributes.items():
            self.set(attribute, value)
        self._selection = self._make(
            "MatmulAlgSelectionInit", "MatmulAlgSelectionDestroy", self._desc, _ALG_DEFAULT
        )
        for attribute, number in algorithm.items():
            value = ctypes.c_int(number)
            self._library.call(
                "MatmulAlgSetAttribute",
                self._handle.address,
                self._selection,
                attribute,
                ctypes.byref(value),
                ctypes.sizeof(value),
            )
        self._plan = self._make("MatmulPlanInit", "MatmulPlanDestroy", self._desc, self._selection)
        size = ctypes.c_size_t()
        self._library.call("MatmulGetWorkspace", self._handle.address, self._plan, ctypes.byref(size))
        self.workspace_size = size.value

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute of the product's descriptor: a ctypes value."""
        self._library.call(
            "MatmulDescSetAttribute",
            self._handle.address,
            self._desc,
            attribute,
            ctypes.byref(value),
            ctypes.sizeof(value),
        )

    def algorithm(self, attribute: int) -> int:
        """An attribute of the algorithm that the plan was made with."""
        value = ctypes.c_int()
        self._library.call(
            "MatmulAlgGetAttribute",
            self._handle.address,
            self._selection,
            attribute,
            ctypes.byref(value),
            ctypes.sizeof(value),
        )
        return value.value

    def bind(
        self, a: int, b: int, d: int, workspace: int, *, alpha: int | None = None, bias: int | None = None
    ) -> Callable[[int], None]:
        """A launcher for fixed addresses: call it with a stream handle. ``alpha`` is a device vector.

        The library keeps the bias's address in the descriptor, so that is set before a launch where another
        launcher left another one; the handle's lock covers both.
        """
        matmul, lock, fail = self._library.matmul, self._handle.lock, self._library.fail
        fixed = (
            self._handle.address,
            self._plan,
            ctypes.addressof(self._alpha) if alpha is None else alpha,
            a,
            b,
            ctypes.addressof(self._beta),
            d,
            d,
            workspace,
        )
        one_stream = ctypes.c_void_p * 1

        def launch(stream: int, _keep: Any = self) -> None:  # the descriptors must outlive the launcher
            streams = one_stream(stream)
            with lock:
                if bias != self._bias:
                    self.set(BIAS_POINTER, ctypes.c_void_p(bias))
                    self._bias = bias
                status = matmul(*fixed, streams, 1)
            if status:
                fail("Matmul", status)

        return launch
