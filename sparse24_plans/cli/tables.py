"""Tables and lines of text, for a terminal of any width and for a pipe.

A name is never broken or cut: long ones stand last in their row, and the terminal goes on with them in the
next line. In a terminal, columns that may be left out are where it is too narrow, and prose wraps at words.
In a pipe or a file, every column is there and a row is one line.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

Json = dict[str, Any]
_GAP = "  "
_INDENT = 2
_LEAST_PROSE = 16
"""Columns below which prose isn't wrapped beside a table's other columns."""


def console(*, stderr: bool = False) -> Console:
    """A console on today's stdout or stderr."""
    return Console(file=sys.stderr if stderr else sys.stdout, highlight=False)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, or None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


# Lines --------------------------------------------------------------------------------------------


def show_line(text: str = "", style: str = "", indent: int = 0) -> None:
    """A line; in a terminal wrapped at words."""
    for line in _wrapped(printable(text), terminal_width(), " " * indent, " " * (indent + _INDENT)):
        _put(Text(line, style))


def printable(text: str) -> str:
    """The text with the characters escaped that would drive a terminal or start a new line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def plain(value: object, style: str = "") -> Text:
    """Plain text: names from a file can hold neither markup nor control characters for the terminal."""
    return Text(printable(str(value)), style)


def _wrapped(text: str, width: int | None, first: str, others: str) -> list[str]:
    if width is None or cell_len(first + text) <= width:
        return [first + text]
    return textwrap.wrap(
        text,
        max(width, _LEAST_PROSE + len(others)),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _put(line: Text) -> None:
    line.rstrip()
    console().print(line, soft_wrap=True)


# Tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of documents: its title, and what it shows of one (a key, or a function of it).

    ``optional``: left out where the terminal is too narrow. ``prose``: the last column's text wraps.
    """

    title: str
    cell: str | Callable[[Json], object]
    right: bool = False
    optional: bool = False
    prose: bool = False

    def of(self, row: Json) -> Text:
        value = row[self.cell] if isinstance(self.cell, str) else self.cell(row)
        return value if isinstance(value, Text) else plain(value)


def show_table(columns: Sequence[Column], rows: Iterable[Json], *, title: str = "") -> None:
    """A title, the columns' titles, one line a row. Nothing where there are no rows."""
    documents = list(rows)
    if not documents:
        return
    if title:
        show_line(title)
    room = terminal_width()
    shown = [_Laid.of(column, [column.of(row) for row in documents]) for column in columns]
    while room is not None and _total(shown) > room and any(laid.column.optional for laid in shown):
        shown.remove(next(laid for laid in reversed(shown) if laid.column.optional))
    _show_row(shown, [Text(laid.column.title, "bold") for laid in shown], room)
    for texts in zip(*(laid.texts for laid in shown), strict=True):
        _show_row(shown, list(texts), room)


@dataclass(slots=True)
class _Laid:
    """A column with its cells and its width."""

    column: Column
    texts: list[Text]
    width: int

    @classmethod
    def of(cls, column: Column, texts: list[Text]) -> _Laid:
        return cls(column, texts, max(cell_len(text.plain) for text in (Text(column.title), *texts)))


def _total(shown: Sequence[_Laid]) -> int:
    """Columns that a table takes; prose needs only a few."""
    last = shown[-1]
    widths = [laid.width for laid in shown[:-1]]
    widths.append(min(last.width, _LEAST_PROSE) if last.column.prose else last.width)
    return _INDENT + sum(widths) + len(_GAP) * (len(widths) - 1)


def _row(shown: Sequence[_Laid], texts: Sequence[Text]) -> Text:
    line = Text(" " * _INDENT)
    for laid, text in zip(shown, texts, strict=True):
        padding = " " * (laid.width - cell_len(text.plain))
        line += Text(padding) + text if laid.column.right else text + Text(padding)
        line += Text(_GAP)
    return line


def _show_row(shown: Sequence[_Laid], texts: list[Text], room: int | None) -> None:
    """A row; prose beside the other columns, or below them where there is no room."""
    last, start = texts[-1], _INDENT + sum(laid.width + len(_GAP) for laid in shown[:-1])
    if not shown[-1].column.prose or room is None or start + cell_len(last.plain) <= room:
        _put(_row(shown, texts))
        return
    if room - start < _LEAST_PROSE:
        _put(_row(shown[:-1], texts[:-1]))
        indent = " " * 2 * _INDENT
        lines = _wrapped(last.plain, room, indent, indent)
    else:
        first, *lines = _wrapped(last.plain, room - start, "", "") or [""]
        _put(_row(shown, [*texts[:-1], Text(first, last.style)]))
        lines = [" " * start + line for line in lines]
    for line in lines:
        _put(Text(line, last.style))


# Cells --------------------------------------------------------------------------------------------


def size_text(nbytes: int) -> str:
    """Bytes in a unit that suits them."""
    amount, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def share_text(value: float | None) -> str:
    """A ratio as a percentage; a tiny one as what it is below."""
    if value is None:
        return "-"
    return "<0.01%" if 0 < value < 1e-4 else f"{value:.2%}"


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def time_text(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.2f}"


def counted(count: int, noun: str) -> str:
    """``1 layer``, ``37 layers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
