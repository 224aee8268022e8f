"""The part of the cuBLASLt C ABI that a pinned matrix product needs, through ctypes.

cuBLASLt rather than cuBLAS, because its call is stateless: stream, workspace and algorithm are arguments,
so a plan can fix the algorithm once and launch from any thread without a lock. Provenance: VENDOR.md.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from .library_error import LibraryError

# cudaDataType_t (library_types.h)
R_32F, R_16F, R_16BF = 0, 2, 14
# cublasComputeType_t: float32 products and sums, no TF32
COMPUTE_32F = 68
# cublasLtMatmulDescAttributes_t; cublasOperation_t
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_OP_T = 1
# cublasLtMatrixLayoutAttribute_t
_LAYOUT_BATCH_COUNT, _LAYOUT_STRIDED_BATCH_OFFSET = 5, 6
# cublasLtMatmulPreferenceAttributes_t
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3
_PREF_MIN_ALIGNMENT = (5, 6, 7, 8)
# cublasLtReductionScheme_t: split-K partial sums only in the compute type, in the workspace
_REDUCTION_COMPUTE_TYPE = 2


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; ``algo`` is the opaque cublasLtMatmulAlgo_t."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


_P, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [_P],
    "cublasLtMatmulDescCreate": [_P, _INT, _INT],
    "cublasLtMatmulDescDestroy": [_P],
    "cublasLtMatmulDescSetAttribute": [_P, _INT, _P, _SIZE],
    "cublasLtMatrixLayoutCreate": [_P, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutDestroy": [_P],
    "cublasLtMatrixLayoutSetAttribute": [_P, _INT, _P, _SIZE],
    "cublasLtMatmulPreferenceCreate": [_P],
    "cublasLtMatmulPreferenceDestroy": [_P],
    "cublasLtMatmulPreferenceSetAttribute": [_P, _INT, _P, _SIZE],
    "cublasLtMatmulAlgoGetHeuristic": [_P] * 7 + [_INT, _P, _P],
    "cublasLtMatmul": [_P] * 14 + [_SIZE, _P],
}


@cache
def load(major: int) -> ctypes.CDLL | None:
    """The library for a CUDA major version, from the system or NVIDIA's wheels; None if absent."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib

            library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
        except Exception:  # noqa: BLE001 - pathfinder has one exception type per way of not finding it
            return None
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = signature, ctypes.c_int
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


def version(major: int) -> str | None:
    """The library's own version number, or None where it doesn't load."""
    library = load(major)
    return None if library is None else str(library.cublasLtGetVersion())


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise LibraryError(name, status)


@cache
def handle(library: ctypes.CDLL, ordinal: int) -> int:
    """One handle a device, made with that device current and kept for the life of the process."""
    out = ctypes.c_void_p()
    _call(library, "cublasLtCreate", ctypes.byref(out))
    assert out.value is not None
    return out.value


class Matmul:
    """A pinned column-major product D[m,n] = alpha * op(A) @ op(B), op(A)[m,k], op(B)[k,n], beta = 0.

    ``batch`` such products, where above 1, have their matrices one behind the other, without gaps. Finds the
    algorithm on construction, within ``max_workspace`` bytes. ``types`` are the cudaDataType_t of A, B and D;
    ``alignments`` the bytes their addresses are multiples of. Needs the device current.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: int,
        *,
        shape: tuple[int, int, int],
        transpose_a: bool,
        leading: tuple[int, int, int],
        types: tuple[int, int, int],
        alignments: tuple[int, int, int],
        alpha: float,
        max_workspace: int,
        transpose_b: bool = False,
        batch: int = 1,
    ) -> None:
        self._library, self._handle = library, handle
        self._alpha, self._beta = ctypes.c_float(alpha), ctypes.c_float(0.0)
        m, n, k = shape
        self._desc = self._create("MatmulDesc", COMPUTE_32F, R_32F)
        if transpose_a:
            self._set("MatmulDesc", self._desc, _DESC_TRANSA, ctypes.c_int32(_OP_T))
        if transpose_b:
            self._set("MatmulDesc", self._desc, _DESC_TRANSB, ctypes.c_int32(_OP_T))
        shapes = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n)), (m, n)
        self._a, self._b, self._d = (
            self._matrices(kind, one, stride, batch)
            for kind, one, stride in zip(types, shapes, leading, strict=True)
        )
        self._result = self._find_algorithm(alignments, max_workspace)

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch that the pinned algorithm uses."""
        return int(self._result.workspace_size)

    def _create(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        _call(self._library, f"cublasLt{kind}Create", ctypes.byref(out), *arguments)
        weakref.finalize(self, getattr(self._library, f"cublasLt{kind}Destroy"), out)
        return out

    def _matrices(self, kind: int, shape: tuple[int, int], leading: int, batch: int) -> ctypes.c_void_p:
        found = self._create("MatrixLayout", kind, *shape, leading)
        if batch > 1:
            offset = ctypes.c_int64(leading * shape[1])
            self._set("MatrixLayout", found, _LAYOUT_BATCH_COUNT, ctypes.c_int32(batch))
            self._set("MatrixLayout", found, _LAYOUT_STRIDED_BATCH_OFFSET, offset)
        return found

    def _set(self, kind: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        _call(
            self._library,
            f"cublasLt{kind}SetAttribute",
            target,
            attribute,
            ctypes.byref(value),
            ctypes.sizeof(value),
        )

    def _find_algorithm(self, alignments: tuple[int, int, int], max_workspace: int) -> _HeuristicResult:
        preference = self._create("MatmulPreference")
        self._set("MatmulPreference", preference, _PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(max_workspace))
        self._set(
            "MatmulPreference",
            preference,
            _PREF_REDUCTION_SCHEME_MASK,
            ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE),
        )
        a, b, d = alignments
        for attribute, alignment in zip(_PREF_MIN_ALIGNMENT, (a, b, d, d), strict=True):
            self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(alignment))
        result, count = _HeuristicResult(), ctypes.c_int()
        _call(
            self._library,
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._desc,
            self._a,
            self._b,
            self._d,
            self._d,
            preference,
            1,
            ctypes.byref(result),
            ctypes.byref(count),
        )
        if count.value < 1 or result.state:
            raise LibraryError("cublasLtMatmulAlgoGetHeuristic", result.state or -1)
        return result

    def bind(self, a: int, b: int, d: int, workspace: int) -> Callable[[int], None]:
        """A launcher for fixed addresses: call it with a stream handle."""
        matmul = self._library.cublasLtMatmul
        fixed = (
            self._handle,
            self._desc.value,
            ctypes.addressof(self._alpha),
            a,
            self._a.value,
            b,
            self._b.value,
            ctypes.addressof(self._beta),
            d,
            self._d.value,
            d,
            self._d.value,
            ctypes.addressof(self._result),
            workspace,
            self._result.workspace_size,
        )

        def launch(stream: int, _keep: Any = self) -> None:  # the layouts must outlive the launcher
            status = matmul(*fixed, stream)
            if status:
                raise LibraryError("cublasLtMatmul", status)

        return launch
