"""``sparse24`` as a process: its streams, terminals, signals, and what it asks before it overwrites."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from sparse24_plans.checkpoints.weights_file import load_weight
from sparse24_plans.cli import app

from ..forks import HUNG, Fork
from . import page

SPARSE24 = (sys.executable, "-m", "sparse24_plans")
EXPLAIN = ("explain", "--n", "16", "--m", "4096", "--k", "4096", "--arch", "sm90a")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "dense.safetensors"
    array = np.random.default_rng(0).standard_normal((24, 32), np.float32)
    safetensors.numpy.save_file({"encoder.é.weight": array}, path)
    return path


def sparse24(*arguments: object, **options: Any) -> Fork:
    """The command in a process of its own, for tests of anything but Python's start."""
    return Fork("-m", "sparse24_plans", *arguments, **options)


def test_the_module_runs_as_a_command():
    done = subprocess.run([*SPARSE24, *EXPLAIN, "--json"], capture_output=True, text=True, timeout=HUNG)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["chosen"] == "wgmma_sp"


# Streams ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [EXPLAIN, (*EXPLAIN, "--json"), ("--help",)])
def test_a_full_disk_behind_stdout_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = sparse24(*words, stdout=full).wait()
    assert (done.returncode, done.stderr) == (1, b"error: standard output: No space left on device\n")


def test_a_closed_stdout_takes_nothing_from_the_work(checkpoint):
    out = checkpoint.with_name("out")
    command = f"{' '.join(SPARSE24)} compress {checkpoint} -o {out} >&- 2>&-"
    assert subprocess.run(command, shell=True, timeout=HUNG).returncode == 0
    assert load_weight(out, "encoder.é.weight").m == 24


def test_a_reader_that_has_read_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        done = sparse24(*EXPLAIN, stdout=pipe).wait()
    assert done.stderr == b""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_any_name_can_be_written_in_any_encoding(checkpoint, encoding):
    command = ("compress", checkpoint.name, "-o", "out", "--device", "host")
    done = sparse24(*command, cwd=checkpoint.parent, encoding=encoding).wait()
    assert (done.returncode, done.stderr) == (0, b"")
    name = "encoder.é.weight".encode(encoding, errors="backslashreplace")
    assert name in done.stdout


# A terminal ---------------------------------------------------------------------------------------


class Terminal:
    """A command in a terminal of its own; what it shows."""

    def __init__(
        self, *arguments: object, folder: Path, columns: int = 80, ignored: Collection[int] = ()
    ) -> None:
        self._mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = sparse24(
            *arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**environment, "TERM": "xterm"},
            ignored=ignored,
        )
        os.close(theirs)
        self._shown = b""

    @property
    def text(self) -> str:
        """All that was shown so far. One read may end within a character, or within the end of a line."""
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def read(self, until: str | None = None) -> str:
        """All that is shown up to the text, or to the end."""
        deadline = time.monotonic() + HUNG
        while until is None or until not in self.text:
            assert time.monotonic() < deadline, self.text
            if not select.select([self._mine], [], [], 1)[0]:
                continue
            try:
                piece = os.read(self._mine, 65536)
            except OSError:  # Linux's end of a terminal
                piece = b""
            if not piece:
                assert until is None, self.text
                break
            self._shown += piece
        return self.text

    def answer(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def end(self) -> tuple[int, str]:
        """The exit code and all that was shown."""
        self.read()
        os.close(self._mine)
        return self.process.wait().returncode, self.text


def test_a_real_terminal_shows_what_the_page_shows(tmp_path):
    code, text = Terminal(*EXPLAIN, folder=tmp_path).end()
    assert code == 0
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == page.blocks(page.PAGE.read_text())[" ".join(EXPLAIN)]
    assert "\x1b[" in text, "colours"


@pytest.mark.parametrize("columns", [40, 132])
def test_lines_fit_the_terminal_that_there_is(tmp_path, columns):
    code, text = Terminal(*EXPLAIN, folder=tmp_path, columns=columns).end()
    assert code == 0, text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert columns - 40 < max(map(len, plain.splitlines())) <= columns


@pytest.mark.parametrize(
    ("answer", "code", "replaced"), [("y\n", 0, True), ("n\n", 1, False), ("\n", 1, False), ("\4", 1, False)]
)
def test_a_terminal_is_asked_before_a_file_is_replaced(checkpoint, answer, code, replaced):
    out = checkpoint.with_name("out")
    out.write_bytes(b"precious")
    command = ("compress", checkpoint.name, "-o", out.name, "--device", "host")
    terminal = Terminal(*command, folder=checkpoint.parent)
    terminal.read(until="out exists. Replace it? [y/N]")
    terminal.answer(answer)
    assert terminal.end()[0] == code
    assert (out.read_bytes() != b"precious") == replaced


def test_an_answer_in_json_is_never_a_question(checkpoint):
    out = checkpoint.with_name("out")
    out.write_bytes(b"precious")
    code, text = Terminal("compress", checkpoint, "-o", out, "--json", folder=checkpoint.parent).end()
    assert code == 1
    assert "--force" in json.loads(text)["error"]["message"]
    assert out.read_bytes() == b"precious"


# Signals ------------------------------------------------------------------------------------------

FATAL = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGXCPU"]


def zeros(path: Path, gigabytes: int) -> Path:
    """A model of one matrix that takes no room on the disk."""
    columns, nbytes = 4096, gigabytes * 2**30
    entry = {"dtype": "F32", "shape": [nbytes // columns // 4, columns], "data_offsets": [0, nbytes]}
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, path.stat().st_size + nbytes)
    return path


def wait_for_a_temporary_file(folder: Path, process: Fork) -> None:
    deadline = time.monotonic() + HUNG
    while not list(folder.glob(".sparse24-*.tmp")):
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, "the run has not begun to write"
        time.sleep(0.005)


def test_every_signal_that_would_end_the_run_is_caught(monkeypatch):
    caught: dict[signal.Signals, object] = {}
    monkeypatch.setattr(app.signal, "getsignal", lambda number: signal.SIG_DFL)
    monkeypatch.setattr(app.signal, "signal", caught.__setitem__)
    app._catch_signals()
    assert {number.name for number in caught} >= set(FATAL)
    assert set(caught.values()) == {app._terminate}


@pytest.mark.parametrize(("name", "times"), [("SIGINT", 1), ("SIGXCPU", 1), ("SIGINT", 3), ("SIGTERM", 3)])
def test_a_killed_run_leaves_nothing(tmp_path, name, times):
    """The signal may come several times, and this process may ignore it, as one in the background does."""
    number, source = getattr(signal, name), zeros(tmp_path / "source", 4)
    process = sparse24("compress", source, "-o", tmp_path / "out", default=[number])
    wait_for_a_temporary_file(tmp_path, process)
    for _ in range(times):
        process.send_signal(number)
    assert process.wait().returncode not in (0, -number)
    assert list(tmp_path.iterdir()) == [source]


ENDS_AMID_SIGNALS = """
import os, signal, sys
from sparse24_plans.cli import app

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)  # Python has given signals their default action back

last = Last()
app._catch_signals()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_signal_at_pythons_own_end_leaves_the_exit_status():
    """This process may ignore the signal, as one in the background does."""
    command = [sys.executable, "-c", ENDS_AMID_SIGNALS]
    done = subprocess.run(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert done.returncode == 7


@pytest.mark.parametrize("names", [("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM"), ("SIGALRM", "SIGINT")])
def test_two_signals_at_once_are_no_traceback(tmp_path, names):
    source = zeros(tmp_path / "source", 4)
    process = sparse24("compress", source, "-o", tmp_path / "out")
    wait_for_a_temporary_file(tmp_path, process)
    os.kill(process.pid, signal.SIGSTOP)  # so that both arrive before Python looks
    for name in names:
        process.send_signal(getattr(signal, name))
    os.kill(process.pid, signal.SIGCONT)
    done = process.wait()
    assert done.returncode != 0
    assert b"Traceback" not in done.stderr
    assert b"Error" not in done.stderr
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_that_the_caller_ignores_stays_ignored(checkpoint, name):
    """The signal comes while the run waits for an answer, so it can't come too late."""
    number, out = getattr(signal, name), checkpoint.with_name("out")
    out.write_bytes(b"precious")
    command = ("compress", checkpoint.name, "-o", out.name, "--device", "host")
    terminal = Terminal(*command, folder=checkpoint.parent, ignored=[number])
    terminal.read(until="out exists. Replace it? [y/N]")
    terminal.process.send_signal(number)
    terminal.answer("y\n")
    assert terminal.end()[0] == 0
    assert load_weight(out, "encoder.é.weight").m == 24
