"""What callers pass to the functions on checkpoints, checked before a file is touched."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..errors import InvalidProblemError, shown


def patterns_of(argument: str, value: Collection[str]) -> tuple[str, ...]:
    """Shell patterns. Raises InvalidProblemError for anything but a sequence of strings."""
    found: list[str] = []
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        len(value)  # what has no end has none
        for pattern in value:
            if not isinstance(pattern, str):
                raise TypeError
            found.append(pattern)
    except Exception:  # noqa: BLE001 - whatever a broken object raises
        raise InvalidProblemError(
            f"{argument}: expected a sequence of patterns, got {shown(value)}"
        ) from None
    return tuple(found)


def check_callback(argument: str, value: Any) -> None:
    """Raise InvalidProblemError for anything but a callable or None."""
    if value is not None and not callable(value):
        raise InvalidProblemError(f"{argument}: expected a callable, got {shown(value)}")
