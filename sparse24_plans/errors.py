"""The error tree. Every error a public call raises on purpose derives from :class:`Sparse24Error`.

Messages name the argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_SHOWN_CHARACTERS = 80
_MESSAGE_CHARACTERS = 4000


def shown(value: object) -> str:
    """A short ``repr`` for a message, of anything that a caller may pass, even if it can't be printed."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"{type(value).__name__} that is too long to print"
    except Exception:  # noqa: BLE001 - whatever a broken object raises
        return f"{type(value).__name__} that can't be printed"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _rebuild(kind: type[Sparse24Error], args: tuple[Any, ...], state: dict[str, Any]) -> Sparse24Error:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class Sparse24Error(Exception):
    """Base of all errors raised by sparse24_plans. Errors survive pickling, with their attributes."""

    def __str__(self) -> str:
        """The message, which any log can hold: of bounded length, and with lone surrogates escaped."""
        text = super().__str__()
        if len(text) > _MESSAGE_CHARACTERS:
            half = _MESSAGE_CHARACTERS // 2
            text = f"{text[:half]} [...] {text[-half:]}"
        return text.encode(errors="backslashreplace").decode()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class InvalidProblemError(Sparse24Error, ValueError):
    """An argument is wrong: a shape, dtype, device, stream or a combination of them."""


class UnsupportedError(Sparse24Error, NotImplementedError):
    """The problem is valid, but no kernel (or not the one asked for) can serve it."""


class MisalignedOperandError(Sparse24Error, ValueError):
    """An address or a row stride is not a multiple of what the kernel needs."""

    def __init__(self, argument: str, needed: int, address: int) -> None:
        super().__init__(
            f"{argument}: expected a multiple of {needed} bytes, got {address:#x} "
            f"(remainder {address % needed})"
        )
        self.argument, self.needed, self.address = argument, needed, address


class _TooSmallError(Sparse24Error, ValueError):
    def __init__(self, argument: str, needed: int, got: int) -> None:
        super().__init__(f"{argument}: expected at least {needed} bytes, got {got}")
        self.argument, self.needed, self.got = argument, needed, got


class WorkspaceTooSmallError(_TooSmallError):
    """The workspace holds fewer bytes than ``plan.workspace_size()``. Carries ``needed`` and ``got``."""

    def __init__(self, needed: int, got: int) -> None:
        super().__init__("workspace", needed, got)


class BufferTooSmallError(_TooSmallError):
    """A caller's buffer holds fewer bytes than the data put into it. Carries ``needed`` and ``got``."""


class BackendUnavailableError(Sparse24Error, RuntimeError):
    """A device, driver or library is missing. The message says what to install."""


class FormatError(Sparse24Error, ValueError):
    """Compressed data or a file breaks its format. ``row`` and ``group`` locate it, where they apply."""

    def __init__(self, message: str, *, row: int | None = None, group: int | None = None) -> None:
        where = "" if row is None else f" (row {row}, group {group})"
        super().__init__(message + where)
        self.row, self.group = row, group


class StorageError(Sparse24Error, OSError):
    """A file could not be read or written: a full disk, a missing folder. Has ``errno``, ``filename``."""

    def __reduce__(self) -> Any:
        return OSError.__reduce__(self)  # knows that filename is no member of args


class DriverError(Sparse24Error, RuntimeError):
    """A CUDA library or the driver answered with an error ``code``."""

    def __init__(self, call: str, code: int, detail: str = "") -> None:
        super().__init__(f"{call} failed with code {code}{': ' + detail if detail else ''}")
        self.call, self.code = call, code


def check_choice(argument: str, value: object, known: Iterable[object]) -> None:
    """Raise InvalidProblemError unless the value, which an array never is, is one of those known."""
    choices = tuple(known)
    with refusing(argument, f"one of {', '.join(map(str, choices))}", value):
        choices.index(value)


def check_type(argument: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise InvalidProblemError unless the value is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise InvalidProblemError(f"{argument}: expected {expected}, got {type(value).__name__}")


@contextmanager
def refusing(argument: str, expected: str, got: object) -> Iterator[None]:
    """Raise InvalidProblemError for whatever a broken object raises in the block; our own errors pass."""
    try:
        yield
    except Sparse24Error:
        raise
    except Exception as error:
        raise InvalidProblemError(f"{argument}: expected {expected}, got {shown(got)}") from error
