"""Fields of models that pydantic alone would take True, "8" or 8.0 for."""

from __future__ import annotations

import json
import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from ..errors import InvalidProblemError, shown


def integer(value: object) -> int | None:
    """``value`` as an int where it is one, of Python, NumPy or a tensor of one; else, or a bool, None."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a tensor of several, or without data; a broken object
        return None


def checked_flag(argument: str, value: object) -> bool:
    """``value``. Raises InvalidProblemError for anything but True or False."""
    if type(value) is not bool:
        raise InvalidProblemError(f"{argument}: expected True or False, got {shown(value)}")
    return value


def _listed(value: object) -> object:
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"expected a tuple, got {shown(value)}")
    return value


Listed = BeforeValidator(_listed)
"""Of a field that is a tuple: what Python or JSON lists; anything else may have no end."""
INT64_MAX = 2**63 - 1  # the largest size of a dimension


@dataclass(frozen=True)
class Integer:
    """An integer, Python's or NumPy's, from ``least`` to ``most``, both included."""

    least: int = 0
    most: int | None = None
    multiple_of: int | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain = core_schema.int_schema(strict=True, ge=self.least, le=self.most, multiple_of=self.multiple_of)
        return core_schema.with_info_before_validator_function(_unboxed, plain)


@dataclass(frozen=True)
class Number:
    """A real number, Python's or NumPy's; the names that JSON has for what isn't finite are numbers too."""

    finite: bool = False
    above: float | None = None
    least: float | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain = core_schema.float_schema(
            strict=True, allow_inf_nan=not self.finite, gt=self.above, ge=self.least
        )
        return core_schema.with_info_before_validator_function(_unboxed_number, plain)


@dataclass(frozen=True)
class _Boolean:
    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(_unboxed, core_schema.bool_schema(strict=True))


Flag = Annotated[bool, _Boolean()]
"""True or False, Python's or NumPy's; nothing that merely sounds like it."""
Size = Annotated[int, Integer(most=INT64_MAX)]
"""Of a dimension."""
Eights = Annotated[int, Integer(most=INT64_MAX, multiple_of=8)]
"""Of a dimension that is a multiple of 8."""


def _unboxed(value: Any, info: ValidationInfo) -> Any:
    """A NumPy scalar as Python's; of ``model_validate_strings`` what the string says."""
    if type(value) is str and str(info.mode) == "string":
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value.item() if issubclass(type(value), np.generic) else value


def _unboxed_number(value: Any, info: ValidationInfo) -> Any:
    if type(value) is str and value in ("Infinity", "-Infinity", "NaN"):
        return float(value)
    return _unboxed(value, info)
