"""DLPack types, and capsules of views, including elements that neither NumPy nor CuPy can export."""

from __future__ import annotations

from typing import Any

from .._vendor import dlpack_abi
from ..errors import InvalidProblemError
from ..vocab import ElementKind

ELEMENT_OF_TYPE = {
    (dlpack_abi.INT, 8): ElementKind.S8,
    (dlpack_abi.INT, 32): ElementKind.I32,
    (dlpack_abi.UINT, 8): ElementKind.U8,
    (dlpack_abi.UINT, 16): ElementKind.U16,
    (dlpack_abi.FLOAT, 16): ElementKind.F16,
    (dlpack_abi.FLOAT, 32): ElementKind.F32,
    (dlpack_abi.BFLOAT, 16): ElementKind.BF16,
    (dlpack_abi.FLOAT8_E4M3FN, 8): ElementKind.FP8_E4M3,
    (dlpack_abi.FLOAT8_E5M2, 8): ElementKind.FP8_E5M2,
}
"""Elements by DLDataTypeCode and bits."""
_TYPE_OF_ELEMENT = {element: code for (code, _), element in ELEMENT_OF_TYPE.items()}


def capsule_of(bits: Any, element: ElementKind, options: dict[str, Any]) -> Any:
    """A capsule of an array of unsigned integers that says they are ``element``.

    ``options`` are those of ``__dlpack__``. Raises InvalidProblemError where the array refuses.
    """
    try:
        capsule = bits.__dlpack__(**options)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidProblemError(f"TensorView: expected what DLPack can export: {error}") from error
    dlpack_abi.retype(capsule, _TYPE_OF_ELEMENT[element])
    return capsule
