"""``sparse24 bench`` and ``tune``: times on the GPU that is here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from ..device.devices import resolve
from ..device.files import storage_errors
from ..errors import InvalidProblemError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.tuned import TuningTable
from ..tuning import search as tuning
from ..tuning.search import Trials
from ..vocab import BackendKind, ElementKind
from . import inspection, rendering
from .options import AsJson, DeviceOption, ElementsOption, device_of, shape_of, tokens_of
from .output import Json, emit, progress, reported, show_line

_PARTS = ("gemm", "prepare", "host")
BenchPart = Enum("BenchPart", {name.upper(): name for name in _PARTS}, type=str)  # type: ignore[misc]


def bench(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the record (JSON) here.")] = None,
    n: Annotated[
        str, typer.Option("--n", help="Tokens, comma-separated; all of the record's by default.")
    ] = "",
    shapes: Annotated[int, typer.Option("--shapes", min=1, help="How many of the Llama shapes.")] = 8,
    element: ElementsOption = None,
    backend: Annotated[
        list[BackendKind] | None, typer.Option(help="Only this backend; repeatable. All by default.")
    ] = None,
    only: Annotated[
        list[BenchPart] | None, typer.Option(help="Only this part of the record; repeatable. All by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time backends beside dense cuBLAS and cuSPARSELt, and preparing weights. Needs a checkout and a GPU."""
    tokens = tokens_of(n) if n else []
    with reported(as_json):
        parts = [part.value for part in only or BenchPart]
        record = _measure(tokens, shapes, element or [ElementKind.BF16], backend or [], parts, quiet=as_json)
        if out is not None:
            with storage_errors(out):
                out.write_text(json.dumps(record, indent=1) + "\n")
        emit(record, rendering.show_benchmark, as_json=as_json)


def _measure(
    tokens: list[int],
    shapes: int,
    elements: list[ElementKind],
    backends: list[BackendKind],
    parts: list[str],
    *,
    quiet: bool,
) -> Json:
    benchmarks = inspection.benchmarks()
    chosen = tokens or benchmarks.problems.TOKENS
    matrices = benchmarks.problems.SHAPES[:shapes]
    cells = len(matrices) * len(chosen) * ("gemm" in parts)
    ops = 6 * sum(shape in matrices for shape in benchmarks.problems.PREPARE_SHAPES) * ("prepare" in parts)
    with progress("measuring", len(elements) * (cells + ops), quiet) as advance:
        record: Json = benchmarks.run.measure(matrices, chosen, elements, lambda: advance(1), backends, parts)
    return record


def tune(
    out: Annotated[Path, typer.Option("--out", "-o", help="The table (JSON) to write.")],
    n: Annotated[str, typer.Option("--n", help="Tokens, comma-separated: the n that you serve.")],
    shape: Annotated[list[str], typer.Option("--shape", metavar="MxK", help="Weight shape; repeatable.")],
    element: ElementsOption = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Row of the registry; repeatable. All that can be tuned.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Search the fastest right configurations of the kernels that can be tuned, for this GPU: minutes.

    Adds to a table of this GPU and driver that is there already.
    """
    place = device_of(device)
    problems = _problems(n, shape, element or [ElementKind.BF16])
    with reported(as_json):
        document = _tune(problems, kernel, place, out, quiet=as_json)
        emit(document, rendering.show_tuning, as_json=as_json)
        if not as_json:
            show_line(f"{document['gpu']}, driver {document['driver']}: written to {out}")


def _problems(tokens: str, shapes: list[str], elements: list[ElementKind]) -> list[GemmSparse24Descriptor]:
    chosen, sizes = tokens_of(tokens), [shape_of(shape) for shape in shapes]
    try:
        return [
            GemmSparse24Descriptor(n=n, m=m, k=k, element=element)
            for element, (m, k), n in product(elements, sizes, chosen)
        ]
    except InvalidProblemError as error:
        raise typer.BadParameter(f"--n, --shape: {error}") from error


def _tune(
    problems: list[GemmSparse24Descriptor], kernels: list[str] | None, device: Any, out: Path, *, quiet: bool
) -> Json:
    """Writes the table as it grows: an interrupted search leaves what it has."""
    trials: list[Trials] = []
    about = resolve(device)
    before = TuningTable(about.name, about.driver or "", ())
    if out.exists():
        before = before.merged(TuningTable.load(out))
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
