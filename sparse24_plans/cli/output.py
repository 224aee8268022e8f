"""Output of the command line: one JSON document or text on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..errors import Sparse24Error, StorageError
from .tables import Json, console, printable


def emit(document: Json, show: Callable[[Json], None], *, as_json: bool) -> None:
    """Print a command's result on stdout, as JSON or by ``show``."""
    if as_json:
        print_json(document)
    else:
        show(document)


def print_json(document: Json) -> None:
    """Print one document on stdout. NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(document), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Report the package's errors and MemoryError in one line (or document), with exit code 1."""
    try:
        yield
    except (Sparse24Error, MemoryError) as error:
        message = _message(error)
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": message}})
        else:
            console(stderr=True).print(Text(f"error: {printable(message)}"), soft_wrap=True)
        raise typer.Exit(1) from error


def _message(error: Exception) -> str:
    if isinstance(error, StorageError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, Sparse24Error) else f"out of memory: {error}".rstrip(": ")


def show_warning(message: Warning | str) -> None:
    """Print a warning as one line on stderr."""
    console(stderr=True).print(Text(f"warning: {printable(str(message))}"), soft_wrap=True)


@contextmanager
def progress(title: str, total: float, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Show a bar if stderr is a terminal, until the work is done. The context moves it."""
    quiet = quiet or not sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.advance(task, step)
