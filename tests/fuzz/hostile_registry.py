"""The list of public calls that hostile arguments are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH_ARGUMENTS = {"path", "source", "destination", "compressed", "dense_path"}


@dataclass
class Prepared:
    """A call that works with its ``arguments``; ``check`` looks at what it may have written."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Call:
    """How to prepare a call in a folder, and the names of its arguments."""

    prepare: Callable[[Path], Prepared]
    arguments: tuple[str, ...] = field(default=())


CALLS: dict[str, Call] = {}


def add_call(name: str, function: Callable[..., Any], /, **arguments: Any) -> None:
    """A call whose arguments any number of calls may share."""
    CALLS[name] = Call(lambda folder: Prepared(function, dict(arguments)), tuple(arguments))
