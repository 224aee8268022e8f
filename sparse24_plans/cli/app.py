"""The ``sparse24`` command.

``info``, ``compress``, ``convert``, ``verify``, ``explain``, ``demo``, ``bench``, ``tune``.

Results go to stdout, as tables or (``--json``) as one JSON document; progress and errors go to stderr.
Exit codes: 0 done and sound; 1 an error, or something that didn't verify; 2 wrong usage.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from .._version import __version__
from . import compressing, explaining, measuring

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
):
    app.command()(command)


def _terminate(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


def main() -> None:
    """Entry point of the ``sparse24`` command."""
    # As an exception, so that a killed run removes its temporary file.
    signal.signal(signal.SIGTERM, _terminate)
    app()
