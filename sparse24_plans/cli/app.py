"""The ``sparse24`` command.

``info``, ``compress``, ``convert``, ``verify``, ``explain``, ``demo``, ``bench``, ``tune``, ``warmup``.

Results go to stdout, as tables or (``--json``) as one JSON document; progress and errors go to stderr.
Exit codes: 0 done and sound; 1 an error, or something that didn't verify; 2 wrong usage.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer

from .._version import __version__
from . import compressing, explaining, measuring, warmup

app = typer.Typer(
    name="sparse24",
    help="2:4 structured-sparse weights: compress checkpoints, verify them, see which kernel serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


for command in (
    explaining.info,
    compressing.compress,
    compressing.convert,
    compressing.verify,
    explaining.explain,
    compressing.demo,
    measuring.bench,
    measuring.tune,
    warmup.warmup,
):
    app.command()(command)


_FATAL = ("SIGHUP", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals that end a process by default, beside SIGINT, which Python turns into an exception itself."""


def _terminate(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


def _catch_signals() -> None:
    """Signals end the run by an exception, so that it removes its temporary files."""
    for name in _FATAL:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, _terminate)


def _open_streams() -> None:
    """Streams that the caller has closed swallow what is written to them."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def main() -> None:
    """Entry point of the ``sparse24`` command."""
    _catch_signals()
    _open_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes again at its end
        with suppress(OSError):
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
        sys.exit(1)
