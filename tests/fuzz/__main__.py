"""Fuzzing from a checkout's root: ``python -m tests.fuzz --seconds 60 --device host``.

Random problems of every family, element, order, stride, alignment, epilogue and preference, on poisoned
memory between guard bytes. Each is held against float64 or a slow model, and against what its plan promises.
On the host every fourth case is a public call with hostile arguments (hostile.py): it works, or raises an
error of ours, in a limited time. A failure comes with the command that runs it alone. Exit code 1: there
were failures.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from .problems import draw
from .worker import outcome

_SILENCE_S = 120.0
"""A case that takes longer hangs."""
_PROGRESS_S = 10.0
_MAX_FAILURES = 20


Said = queue.Queue[tuple[int, str]]
"""Lines, each with its worker's name; an empty one at its end."""


class Worker:
    """A process that runs every so manieth case from the first, and what it said last."""

    def __init__(self, name: int, said: Said, first: int, options: argparse.Namespace) -> None:
        arguments = f"{options.seed}, {first}, {options.processes}, {options.device!r}"
        seen = {"CUDA_VISIBLE_DEVICES": options.gpus[name % len(options.gpus)]} if options.gpus else {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.fuzz.worker import main; main({arguments})"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **seen},
        )
        self.case, self.heard = first, time.monotonic()
        threading.Thread(target=self._read, args=(name, said), daemon=True).start()

    def _read(self, name: int, said: Said) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said.put((name, line))
        said.put((name, ""))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Run:
    """A run, and what came of it."""

    options: argparse.Namespace
    cases: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def repeat(self, case: int) -> str:
        return f"python -m tests.fuzz --seed {self.options.seed} --device {self.options.device} --case {case}"

    def note(self, case: int, error: str, trace: str = "") -> None:
        problem = repr(draw(self.options.seed, case, self.options.device))
        self.failures.append({"case": case, "error": error, "repeat": self.repeat(case), "problem": problem})
        _say(f"FAILED {error}\n  {problem}\n  {self.repeat(case)}\n{trace}")

    def go(self) -> None:
        """Until the time is up, or there are many failures."""
        begin = time.monotonic()
        end, progress = begin + self.options.seconds, begin + _PROGRESS_S
        said: Said = queue.Queue()
        workers = {name: Worker(name, said, name, self.options) for name in range(self.options.processes)}
        try:
            while (now := time.monotonic()) < end and len(self.failures) < _MAX_FAILURES:
                if now > progress:
                    progress += _PROGRESS_S
                    _say(f"{now - begin:.0f} s: {self}")
                for worker in workers.values():
                    if now - worker.heard > _SILENCE_S:
                        self.note(worker.case, f"hangs for {_SILENCE_S:.0f} s")
                        worker.stop()  # its end is heard below
                        worker.heard = now
                try:
                    name, line = said.get(timeout=min(1.0, max(0.0, end - now)))
                except queue.Empty:
                    continue
                worker = workers[name]
                if not self._heard(worker, line):
                    worker.stop()
                    workers[name] = Worker(name, said, worker.case + len(workers), self.options)
        finally:
            for worker in workers.values():
                worker.stop()

    def _heard(self, worker: Worker, line: str) -> bool:
        """Whether the worker goes on."""
        worker.heard = time.monotonic()
        if not line:
            if not any(one["case"] == worker.case for one in self.failures):
                self.note(worker.case, f"the process ended with code {worker.process.wait()}")
            return False
        message = json.loads(line)
        worker.case = message.pop("case")
        if not message:
            return True
        self.cases += 1
        self.refused += message.get("served") is False
        if "error" in message:
            self.note(worker.case, message["error"], message["trace"])
        return True

    def __str__(self) -> str:
        return f"{self.cases} cases, {self.refused} of them refused, {len(self.failures)} failures"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _device(text: str) -> int | str:
    return text if text == "host" else int(text)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="Random problems of every family.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="a fresh one by default")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--device", type=_device, default="host", metavar="host|N")
    help_gpus = "names that CUDA_VISIBLE_DEVICES takes; the processes share them, and each sees one, as 0"
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[], help=help_gpus)
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    found = parser.parse_args(arguments)
    if found.seed is None:
        found.seed = secrets.randbelow(2**32)
    if found.processes < 1:
        parser.error("--processes: expected at least 1")
    return found


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.case is not None:
        _say(repr(draw(options.seed, options.case, options.device)))
        found = outcome(options.seed, options.case, options.device)
        print(found.get("trace") or ("served" if found["served"] else "refused"))
        return int("error" in found)
    run = Run(options)
    _say(f"seed {options.seed}, device {options.device}, {options.processes} processes")
    run.go()
    about = {"seed": options.seed, "device": options.device, "cases": run.cases, "refused": run.refused}
    print(json.dumps({**about, "failures": run.failures}) if options.json else run)
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main())
