"""Strict types for models' fields: pydantic alone takes True, "8" or 8.0 for an integer."""

from __future__ import annotations

import json
import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from ..errors import InvalidProblemError, shown


def integer(value: object) -> int | None:
    """``value`` as an int, if it is an integer of Python or NumPy or a tensor of one. A bool is refused."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a tensor of several, or without data; a broken object
        return None


def unboxed(value: Any) -> Any:
    """A NumPy scalar as a Python one, anything else as it is."""
    return value.item() if issubclass(type(value), np.generic) else value


def checked_integer(argument: str, value: object, least: int = 0, most: int | None = None) -> int:
    """``value`` as an int. Raises InvalidProblemError unless it is an integer from ``least`` to ``most``."""
    found = integer(value)
    if found is None or found < least or (most is not None and found > most):
        end = "" if most is None else f" to {most}"
        raise InvalidProblemError(f"{argument}: expected an integer from {least}{end}, got {shown(value)}")
    return found


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
"""Validator of a tuple's field. It takes tuples and lists alone, because other iterables may have no end."""


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected text that UTF-8 can encode, got {shown(value)}") from None
    return value


Text = Annotated[str, AfterValidator(_encodable)]
"""A string without lone surrogates, which JSON can't hold."""
INT32_MAX = 2**31 - 1  # the largest C int
INT64_MAX = 2**63 - 1  # the largest size of a dimension


@dataclass(frozen=True)
class Integer:
    """An integer of Python or NumPy from ``least`` to ``most``, both included."""

    least: int = 0
    most: int | None = None
    multiple_of: int | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        plain = core_schema.int_schema(strict=True, ge=self.least, le=self.most, multiple_of=self.multiple_of)
        return core_schema.with_info_before_validator_function(_unboxed, plain)


@dataclass(frozen=True)
class Number:
    """A real number of Python or NumPy, or JSON's name of one that isn't finite."""

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
"""True or False, of Python or NumPy; no other value counts as one of them."""
Size = Annotated[int, Integer(most=INT64_MAX)]
"""The size of a dimension."""
Eights = Annotated[int, Integer(most=INT64_MAX, multiple_of=8)]
"""The size of a dimension, a multiple of 8."""
DriverInt = Annotated[int, Integer(most=INT32_MAX)]
"""A number that the CUDA driver gives as an int. Exported folders compare it with the driver's."""


def _unboxed(value: Any, info: ValidationInfo) -> Any:
    """A NumPy scalar as a Python one; a string of ``model_validate_strings`` as the value that it spells."""
    if type(value) is str and str(info.mode) == "string":
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return unboxed(value)


def _unboxed_number(value: Any, info: ValidationInfo) -> Any:
    if type(value) is str and value in ("Infinity", "-Infinity", "NaN"):
        return float(value)
    return _unboxed(value, info)
