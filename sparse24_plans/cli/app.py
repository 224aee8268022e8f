"""The ``sparse24`` command.

``info``, ``compress``, ``convert``, ``verify``, ``explain``, ``replay``, ``demo``, ``bench``, ``tune``,
``warmup``, ``export``.

Results go to stdout, as tables or (``--json``) as one JSON document; progress and errors go to stderr.
Exit codes are 0 for success, 1 for an error or a failed check, 2 for wrong usage.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .._version import __version__

_UsageError: Any = typer.BadParameter.__base__  # Typer exports it under no name of its own

_MODULE_OF = {
    "info": "explaining",
    "compress": "compressing",
    "convert": "compressing",
    "verify": "verifying",
    "explain": "explaining",
    "replay": "replaying",
    "demo": "verifying",
    "bench": "measuring",
    "tune": "measuring",
    "warmup": "warmup",
    "export": "exporting",
}
"""The commands, in the order of the help, and the modules of the functions with their names."""


class _Commands(TyperGroup):
    """The commands. With --json, wrong usage is reported as a JSON document on stdout too.

    A command is made when it is asked for, because to import and make all takes longer than most take to run.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = dict.fromkeys(_MODULE_OF)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _command(cmd_name)
        return self.commands.get(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if not as_json:
                raise
            from .output import print_json  # Rich comes with it, which --version needn't wait for

            print_json({"error": {"type": "UsageError", "message": error.format_message()}})
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    name="sparse24",
    help="2:4 structured-sparse weights: compress checkpoints, verify them, see which kernel serves.\n\n"
    "Exit codes: 0 done and sound, 1 an error or something that didn't verify, 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: nothing in a text is markup, and it fits in 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _command(name: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(getattr(import_module(f".{_MODULE_OF[name]}", __package__), name))
    return typer.main.get_command(single)


def _show_warning(message: Warning | str, *about: object, **more: object) -> None:
    from .output import show_warning

    show_warning(message)


_FATAL = (
    *("SIGINT", "SIGHUP", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"),
    *("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU"),
)
"""Signals that end a process by default."""


def _fatal_signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _FATAL if hasattr(signal, name)]


def _ignore_signals() -> None:
    """Keep the exit status: Python's own end gives signals their default action back, which is to kill."""
    for number in _fatal_signals():
        signal.signal(number, signal.SIG_IGN)


def _terminate(signum: int, frame: object) -> None:
    # A second signal mustn't interrupt the cleaning up. With SIG_IGN Python would print a traceback for one
    # that has arrived already.
    for number in _fatal_signals():
        signal.signal(number, lambda *_: None)
    atexit.register(_ignore_signals)
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + signum)


def _catch_signals() -> None:
    """Make signals raise an exception, so that the run removes its temporary files.

    A signal that the caller ignores, like under nohup, stays ignored.
    """
    for number in _fatal_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _terminate)


def _open_streams() -> None:
    """Replace streams that the caller has closed, and make all streams take any character."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point of the ``sparse24`` command."""
    _catch_signals()
    _open_streams()
    warnings.showwarning = _show_warning
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes again at its end
        if error.errno != errno.EPIPE:  # a reader that closes a pipe early, like head, needs no message
            with suppress(OSError):
                print(f"error: standard output: {error.strerror}", file=sys.stderr)
        sys.exit(1)
