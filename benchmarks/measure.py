"""Takes a record, or a part of one: ``python -m benchmarks.measure KIND OUT.json``. Needs a GPU and PyTorch.

A run measures what the file lacks and ends cleanly after ``--seconds``; the file is written after each step,
so any number of runs on the same machine and of the same kernels share a record. The GPUs that
CUDA_VISIBLE_DEVICES names share the steps, a process each. ``grid`` is what ``sparse24 bench`` measures. A
wrong result is reported, and the run goes on without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from sparse24_plans.bench import record
from sparse24_plans.bench.record import Lists, Record, Step
from sparse24_plans.errors import Sparse24Error
from sparse24_plans.vocab import ElementKind

from . import check, gpus, kinds

_SAY_EVERY_S = 15.0
_MAX_FAILURES = 3
"""Consecutive failed steps that end a run: the device has probably gone."""


def measure(
    steps: Sequence[Step], about: dict[str, Any], lists: Lists, out: Path, seconds: float | None
) -> tuple[Record, int]:
    """The record as it is then, and how many steps failed. Says on stderr how far it is."""
    begin = said = time.monotonic()
    done = failed = in_a_row = 0

    def report(step: Step) -> None:
        nonlocal said, done
        done += 1
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            print(f"{said - begin:4.0f} s, {done} of {len(steps)}: {step}", file=sys.stderr, flush=True)

    def guarded(step: Step) -> Step:
        def attempt(sources: set[str]) -> Record:
            nonlocal failed, in_a_row
            try:
                found = step.measure(sources)
            except (Sparse24Error, MemoryError, RuntimeError) as error:
                failed, in_a_row = failed + 1, in_a_row + 1
                print(f"{step}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                if in_a_row == _MAX_FAILURES:
                    raise
                return {}
            in_a_row = 0
            return found

        return replace(step, measure=attempt)

    found = record.take(
        [guarded(step) for step in steps], about, lists, path=out, seconds=seconds, on_step=report
    )
    left = sum(not step.is_done(found) for step in steps)
    spent = time.monotonic() - begin
    print(f"{out}: {len(steps) - left} of {len(steps)} steps are there, after {spent:.0f} s, {failed} failed")
    return found, failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=kinds.KINDS)
    parser.add_argument("out", type=Path, metavar="OUT.json", help="written, or added to")
    parser.add_argument("--part", action="append", help="a list of the record, or host; repeatable")
    parser.add_argument(
        "--element", action="append", type=ElementKind, help="grid, random, grouped, quantized; repeatable"
    )
    parser.add_argument("--n", action="append", type=int, help="grid, quantized: tokens; repeatable")
    parser.add_argument(
        "--seed", type=int, help="kinds with random cells: by default the file's, or the date of the run"
    )
    parser.add_argument("--gpus", type=int, default=1, help="torch: GPUs that share the decoder")
    parser.add_argument("--seconds", type=float, help="begin no step after this many seconds")
    parser.add_argument("--share", metavar="I/N", help="measure one of N shares of the steps")
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    kind = kinds.KINDS[options.kind]
    before = record.to_extend(options.out, kind.lists())
    about = record.machine()
    if kind.is_seeded:
        if options.seed is None:
            options.seed = before["seed"] if before else int(date.today().strftime("%Y%m%d"))
        about["seed"] = options.seed
    steps = kind.steps(options)
    known = sorted({step.part for step in steps})
    if unknown := set(options.part or ()) - set(known):
        parser.error(f"--part: expected one of {', '.join(known)}, got {', '.join(unknown)}")
    steps = [step for step in steps if not options.part or step.part in options.part]
    if kind.compile_all is not None and not options.share:
        kind.compile_all(options)
    if options.share:
        steps = gpus.share_of(steps, options.share)
    elif options.gpus == 1 and len(visible := gpus.visible_gpus()) > 1:
        words += [f"--seed={options.seed}"] if kind.is_seeded else []
        status = gpus.run_shares(f"{__package__}.measure", words, options.out, kind.lists(), visible)
        check.show_verdicts(check.verdicts(options.kind, record.load(options.out, kind.lists())))
        return status
    found, failed = measure(steps, about, kind.lists(), options.out, options.seconds)
    check.show_verdicts(check.verdicts(options.kind, found))
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
