"""``sparse24 replay`` computes a recorded run again, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.recorded_run import RecordedRun, load_run
from ..gemm.replay import Replay, ReplayDifference
from .explaining import problem_text
from .options import AsJson
from .output import emit, progress, reported
from .tables import Json, show_line


def replay(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="A file that save_run wrote.")],
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, metavar="N", help="Compare N random results, not all."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, metavar="N", help="With --samples: seed that draws the results, 0 by default."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a recorded run again on the host, and compare its bits.

    Says that they are equal, or shows the first difference: both values, and the step that may explain it.
    The exit code is 1 if something differs.
    """
    if seed is not None and samples is None:
        raise typer.BadParameter(f"--seed: expected --samples with it, got {seed} alone")
    with reported(as_json):
        run = load_run(record)
        total = run.descriptor.result_rows * run.descriptor.outputs
        with progress("replaying", min(total, samples or total), quiet=as_json) as advance:
            found = run.replay(samples, seed=seed or 0, on_block=advance)
        emit(_document(run, found), partial(_show, found=found), as_json=as_json)
    raise typer.Exit(0 if found.equal else 1)


def _document(run: RecordedRun, found: Replay) -> Json:
    return {
        "descriptor": run.descriptor.model_dump(mode="json"),
        "device": run.device,
        "kernel": run.kernel,
        "version": run.version,
        "equal": found.equal,
        **found.model_dump(mode="json"),
    }


def _show(document: Json, found: Replay) -> None:
    show_line(problem_text(document["descriptor"]))
    show_line(f"recorded: {document['kernel']} on {document['device']}, version {document['version']}")
    show_line(f"arithmetic: {found.arithmetic}")
    counts = f"{found.compared:,} of {found.results:,} results computed again"
    if found.first is None:
        show_line(f"{counts}: all bits are equal", "bold green")
        return
    show_line(f"{counts}: {found.differing:,} differ", "bold red")
    _show_difference(found.first)


def _show_difference(first: ReplayDifference) -> None:
    show_line(f"the first: token {first.token}, output {first.output}")
    show_line(f"recorded   {first.recorded!r} (bits {first.recorded_bits:#x})", indent=2)
    show_line(f"computed   {first.recomputed!r} (bits {first.recomputed_bits:#x})", indent=2)
    show_line(f"diverged   {first.divergence or 'no one step explains it'}", indent=2)
