"""Processes of Python that have imported the command line already: forks of one process that waits for tests.

Starting Python and importing the package takes a second, which is most of what a test of a process costs. A
fork is a process of its own, with its own streams, folder, environment and signals, and ends as Python ends.
Tests of how Python starts (its options, closed streams) need a new process instead.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

HUNG = 300
"""Seconds after which a command hangs: many times what a busy machine makes it wait."""

_SERVER = """
import gc, json, os, runpy, signal, socket, sys
import numpy
from sparse24_plans import Sparse24Weight
from sparse24_plans.cli import compressing, explaining, exporting, measuring, replaying, verifying, warmup

Sparse24Weight.prune_compress(numpy.zeros((256, 4096), "f4"))  # where numba is, it compiles once
gc.freeze()  # otherwise each fork's end goes through, and so copies, all of this process's memory
channel = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, streams, _, _ = socket.recv_fds(channel, 1 << 20, 3)
    if not request:
        os._exit(0)
    pid = os.fork()
    if not pid:
        break
    for stream in streams:
        os.close(stream)
    channel.send(b"%d" % pid)
    channel.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

channel.close()
arguments, folder, environment, encoding, ignored, default = json.loads(request)
for standard, stream in enumerate(streams):
    os.dup2(stream, standard)
    os.close(stream)
options = {"encoding": encoding, "closefd": False}
sys.stdin = sys.__stdin__ = open(0, **options)
sys.stdout = sys.__stdout__ = open(1, "w", **options)
sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", **options)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
for number in default:  # Python handles SIGINT by itself where the process doesn't ignore it
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
if arguments[0] == "-m":
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
elif arguments[0] == "-c":
    sys.argv = ["-c", *arguments[2:]]
    exec(arguments[1], {"__name__": "__main__"})
else:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
"""


class Done(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


class Fork:
    """``python ARGUMENTS``, which begin with a script, ``-c`` or ``-m``. Only one runs at a time."""

    def __init__(
        self,
        *arguments: object,
        stdin: int | IO | None = None,
        stdout: int | IO | None = None,
        stderr: int | IO | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
        encoding: str | None = None,
        ignored: Collection[int] = (),
        default: Collection[int] = (),
    ) -> None:
        """Without ``stdin`` there is no input. Signals that are named are ignored, or do what Python does."""
        self._channel = _channel()
        self._files = [TemporaryFile() for _ in range(3)]  # noqa: SIM115 - open as long as the process's
        given = zip((stdin, stdout, stderr), self._files, strict=True)
        streams = [file if stream is None else stream for stream, file in given]
        words = list(map(str, arguments))
        request = (words, str(cwd or Path.cwd()), dict(env), encoding, list(ignored), list(default))
        numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        socket.send_fds(self._channel, [json.dumps(request).encode()], numbers)
        self.pid = int(self._channel.recv(64))
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, as subprocess gives it, or None while the process runs."""
        return self._ended(0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Done:
        """The exit status, and what went to streams that were not given. A process that hangs is killed."""
        returncode = self._ended(HUNG)
        if returncode is None:
            self.send_signal(signal.SIGKILL)
            raise AssertionError(f"the process did not end in {HUNG} seconds: {self._ended(HUNG)}")
        for file in self._files:
            file.seek(0)
        return Done(returncode, *(file.read() for file in self._files[1:]))

    def _ended(self, seconds: float) -> int | None:
        if self._returncode is None and select.select([self._channel], [], [], seconds)[0]:
            self._returncode = int(self._channel.recv(64))
        return self._returncode


@cache
def _channel() -> socket.socket:
    """The socket whose messages are requests to the process and its answers."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    atexit.register(server.wait)
    atexit.register(mine.close)  # runs first, and ends the process
    return mine
