"""Tables and lines of text, for a terminal of any width and for a pipe.

Names are never broken or cut. A long name stands last in its row and continues on the terminal's next line.
A narrow terminal omits optional columns, and prose wraps at words. In a pipe or a file every column is shown
and a row is one line.
"""

from __future__ import annotations

import re
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
_COMMAND = re.compile(r"pip install [^;()]*")
"""A command in a text, which stays on one line so that it can be copied."""
_SPACE = "\0"
"""A space within a command while lines are wrapped. No printable text has this character."""
_MIN_PROSE = 16
"""Characters that prose needs beside a table's other columns; with fewer it is put below them."""


def console(*, stderr: bool = False) -> Console:
    """A console on the current stdout or stderr."""
    made = Console(file=sys.stderr if stderr else sys.stdout, highlight=False)
    if made.width < 1:  # some shells set COLUMNS=0 for an unknown width, with which rich prints nothing
        made.width = shutil.get_terminal_size().columns
    return made


def terminal_width() -> int | None:
    """The width of the terminal, or None if stdout isn't one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


# Lines --------------------------------------------------------------------------------------------


def show_line(text: str = "", style: str = "", indent: int = 0) -> None:
    """Print a line, wrapped at words in a terminal."""
    for line in _wrapped(printable(text), terminal_width(), " " * indent, " " * (indent + _INDENT)):
        _put(Text(line, style))


def printable(text: str) -> str:
    """The text with control characters escaped, line breaks included."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def plain(value: object, style: str = "") -> Text:
    """A value as text without markup and control characters, which names from files may hold."""
    return Text(printable(str(value)), style)


def _wrapped(text: str, width: int | None, first: str, others: str) -> list[str]:
    if width is None or cell_len(first + text) <= width:
        return [first + text]
    lines = textwrap.wrap(
        _COMMAND.sub(lambda found: found[0].replace(" ", _SPACE), text),
        max(width, _MIN_PROSE + len(others)),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_SPACE, " ") for line in lines]


def _put(line: Text) -> None:
    line.rstrip()
    console().print(line, soft_wrap=True)


# Tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of documents: its title, and a key of a document or a function of it.

    A narrow terminal omits ``optional`` columns. ``prose`` lets the last column's text wrap.
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
    """Print a title, the columns' titles and one line for each row; nothing without rows."""
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
    """A column with its cells and its width in characters."""

    column: Column
    texts: list[Text]
    width: int

    @classmethod
    def of(cls, column: Column, texts: list[Text]) -> _Laid:
        return cls(column, texts, max(cell_len(text.plain) for text in (Text(column.title), *texts)))


def _total(shown: Sequence[_Laid]) -> int:
    """The width of a table, with the least width of prose."""
    last = shown[-1]
    widths = [laid.width for laid in shown[:-1]]
    widths.append(min(last.width, _MIN_PROSE) if last.column.prose else last.width)
    return _INDENT + sum(widths) + len(_GAP) * (len(widths) - 1)


def _row(shown: Sequence[_Laid], texts: Sequence[Text]) -> Text:
    line = Text(" " * _INDENT)
    for laid, text in zip(shown, texts, strict=True):
        padding = " " * (laid.width - cell_len(text.plain))
        line += Text(padding) + text if laid.column.right else text + Text(padding)
        line += Text(_GAP)
    return line


def _show_row(shown: Sequence[_Laid], texts: list[Text], room: int | None) -> None:
    """Print a row, with prose beside the other columns, or below them if there is no room."""
    last, start = texts[-1], _INDENT + sum(laid.width + len(_GAP) for laid in shown[:-1])
    if not shown[-1].column.prose or room is None or start + cell_len(last.plain) <= room:
        _put(_row(shown, texts))
        return
    if room - start < _MIN_PROSE:
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
    """A number of bytes with a suitable unit."""
    amount, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def share_text(value: float | None) -> str:
    """A ratio as a percentage, or as ``<0.01%``."""
    if value is None:
        return "-"
    return "<0.01%" if 0 < value < 1e-4 else f"{value:.2%}"


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def time_text(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.2f}"


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``1 layer``, ``37 layers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def grouped(rows: Iterable[Json], key: str) -> dict[Any, list[Json]]:
    """Rows by the value under ``key``, in the order of each value's first row."""
    groups: dict[Any, list[Json]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups
