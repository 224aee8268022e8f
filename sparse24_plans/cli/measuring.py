"""``sparse24 bench`` and ``tune``: times on the GPU that is here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench import record as bench_record
from ..bench.scope import BACKENDS, PARTS, SHAPES, TOKENS, Scope
from ..device.devices import resolve
from ..device.files import check_writable
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.kernel_table import ENTRIES
from ..gemm.tuned import TuningTable
from ..tuning import search as tuning
from ..tuning.search import Trials
from ..vocab import ElementKind
from . import times
from .options import (
    AsJson,
    DeviceOption,
    ElementsOption,
    WeightShapesOption,
    one_of,
    shape_of,
    tokens_of,
    usage_checked,
    word_option,
)
from .output import emit, progress, reported
from .tables import Json, show_line

_ALL_SHAPES = len(SHAPES)

RecordOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="The record (JSON) to write, or to add to."),
]
TokensOption = Annotated[
    str, typer.Option("--n", metavar="N,N,...", help="Tokens; all of the record's by default.")
]
ShapesOption = Annotated[
    int, typer.Option("--shapes", min=1, max=_ALL_SHAPES, metavar="N", help="How many of the Llama shapes.")
]
BackendsOption = Annotated[
    list[str] | None,
    word_option(
        known=BACKENDS,
        meaning="Force only this backend beside what select chooses; repeatable, all by default.",
    ),
]
PartsOption = Annotated[
    list[str] | None,
    word_option(
        known=PARTS, meaning="Only this part of the record; repeatable, all by default.", metavar="PART"
    ),
]
SecondsOption = Annotated[
    float | None,
    typer.Option(
        "--seconds", min=0, metavar="S", help="Begin nothing new after S seconds; the next run goes on."
    ),
]


def bench(
    out: RecordOption = None,
    n: TokensOption = "",
    shapes: ShapesOption = _ALL_SHAPES,
    element: ElementsOption = None,
    backend: BackendsOption = None,
    only: PartsOption = None,
    seconds: SecondsOption = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels against dense cuBLAS and cuSPARSELt.

    The preparation of weights is timed against a device copy. Needs a GPU.

    If a record of this machine and of the same kernels exists, only what it lacks is measured.
    PyTorch, where it is installed, gives the times of cuBLAS.
    """
    scope = _scope(n, shapes, element, backend, only)
    with reported(as_json):
        emit(_measure(scope, out, seconds, quiet=as_json), times.show_benchmark, as_json=as_json)


def _scope(
    n: str,
    shapes: int,
    element: list[ElementKind] | None,
    backend: list[str] | None,
    only: list[str] | None,
) -> Scope:
    with usage_checked("--"):
        return Scope(
            elements=element or (ElementKind.BF16,),
            tokens=tokens_of(n) if n else TOKENS,
            shapes=SHAPES[:shapes],
            parts=only or PARTS,
            backends=backend or (),
        )


def _measure(scope: Scope, out: Path | None, seconds: float | None, *, quiet: bool) -> Json:
    """Writes the record as it grows: an interrupted run leaves what it has."""
    if out is not None:
        check_writable(out)
        bench_record.to_extend(out)  # raises before a GPU is asked for
    about = bench_record.machine()  # raises without a GPU, before anything is shown
    from ..bench import run  # PyTorch comes with it

    steps = run.steps(scope)
    with progress("measuring", len(steps), quiet) as advance:
        record: Json = bench_record.take(
            steps, about, path=out, seconds=seconds, on_step=lambda step: advance(1)
        )
    return record


def _tunable(name: str) -> str:
    return one_of(entry.name for entry in ENTRIES if entry.kernel.tunable)(name)


def tune(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The table (JSON) to write.")],
    n: Annotated[str, typer.Option("--n", metavar="N,N,...", help="Tokens: the n that you serve.")],
    shape: WeightShapesOption,
    element: ElementsOption = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            parser=_tunable,
            help="A kernel, as sparse24 info names it; repeatable, all that can be tuned by default.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Find the fastest configurations for this GPU.

    Times every configuration of the tunable kernels, and keeps the fastest with right results. Takes
    minutes. A table of this GPU and driver that exists already is extended.
    """
    problems = _problems(n, shape, element or [ElementKind.BF16])
    with reported(as_json):
        document = _tune(problems, kernel, device, out, quiet=as_json)
        emit(document, times.show_tuning, as_json=as_json)
        if not as_json:
            show_line(f"{document['gpu']}, driver {document['driver']}: written to {out}")


def _problems(tokens: str, shapes: list[str], elements: list[ElementKind]) -> list[GemmSparse24Descriptor]:
    chosen, sizes = tokens_of(tokens), [shape_of(shape) for shape in shapes]
    with usage_checked("--n, --shape: "):
        return [
            GemmSparse24Descriptor(n=n, m=m, k=k, element=element)
            for element, (m, k), n in product(elements, sizes, chosen)
        ]


def _tune(
    problems: list[GemmSparse24Descriptor], kernels: list[str] | None, device: Any, out: Path, *, quiet: bool
) -> Json:
    """Writes the table as it grows: an interrupted search leaves what it has."""
    trials: list[Trials] = []
    check_writable(out)
    known = TuningTable.load(out) if out.exists() else None
    about = resolve("cuda" if device is None else device)
    before = TuningTable(about.name, about.driver or "", ())
    if known is not None:
        before = before.merged(known)
    with progress("tuning", len(problems), quiet) as advance:

        def on_trials(found: Trials) -> None:
            trials.append(found)
            chosen = [one.chosen for one in trials if one.chosen is not None]
            before.merged(TuningTable(before.gpu, before.driver, chosen)).save(out)
            advance(1)

        table = tuning.tune(problems, kernels=kernels, device=device, on_trials=on_trials)
    before.merged(table).save(out)
    return _tuning_document(table, trials)


def _tuning_document(table: TuningTable, trials: Sequence[Trials]) -> Json:
    return {
        "gpu": table.gpu,
        "driver": table.driver,
        "results": [
            {
                "kernel": one.kernel,
                "problem": one.problem.model_dump(mode="json"),
                "right": one.right,
                "refused_or_wrong": one.refused_or_wrong,
                "fatal": one.fatal,
                "chosen": None if one.chosen is None else one.chosen.model_dump(mode="json"),
            }
            for one in trials
        ],
    }
