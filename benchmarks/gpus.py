"""GPUs of a machine share a run: each has a process, a share of the steps, and a file of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sparse24_plans.bench import record
from sparse24_plans.bench.record import Lists, Step
from sparse24_plans.device.install import import_cupy

_NOT_OF_A_MATRIX = {"n", "tokens", "backend", "epilogue", "variant"}
"""Fields in which steps of the same matrix differ."""


def visible_gpus() -> list[str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    return [str(gpu) for gpu in range(import_cupy().cuda.runtime.getDeviceCount())]


def share_of(steps: Sequence[Step], share: str) -> list[Step]:
    """The steps of share ``I/N``. Steps of one matrix stay together, because preparing it takes long."""

    def matrix(step: Step) -> list[Any]:
        return sorted(item for item in step.fields.items() if item[0] not in _NOT_OF_A_MATRIX)

    number, count = map(int, share.split("/"))
    groups = [list(group) for _, group in groupby(steps, key=matrix)]
    return [step for group in groups[number - 1 :: count] for step in group]


def run_shares(module: str, words: Sequence[str], out: Path, lists: Lists, gpus: Sequence[str]) -> int:
    """Run the module once a GPU, with ``--share`` and a file beside ``out``; then put the files together.

    A file that an interrupted run has left counts too. The greatest exit status is returned.
    """
    gather(out, lists)
    running = []
    for number, gpu in enumerate(gpus, 1):
        part = _part(out, str(number))
        if out.exists():
            shutil.copy(out, part)
        given = [str(part) if word == str(out) else word for word in words]
        command = [sys.executable, "-m", module, *given, f"--share={number}/{len(gpus)}"]
        running.append(subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}))
    status = max(process.wait() for process in running)
    gather(out, lists)
    return status


def gather(out: Path, lists: Lists) -> None:
    """Add to ``out`` the rows of the files that shares have written, and remove these."""
    parts = sorted(out.parent.glob(_part(out, "*").name))
    for path in parts:
        found = record.load(path, lists)
        record.save(record.merged(record.load(out, lists), found, lists) if out.exists() else found, out)
        path.unlink()


def _part(out: Path, number: str) -> Path:
    return out.with_name(f"{out.stem}.share{number}{out.suffix}")
