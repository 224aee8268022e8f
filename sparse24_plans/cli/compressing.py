"""``sparse24 compress`` and ``convert``: models written anew, in one file or in shards."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.checkpoint_format import READ_FORMATS, checkpoint_formats
from ..checkpoints.compress import SPARSE_ALREADY, CalibratedWeights, TensorReport, compress_checkpoint
from ..checkpoints.conversion import ConversionReport, convert_checkpoint
from ..checkpoints.folder import stored_bytes
from ..checkpoints.selection import families_of
from ..errors import InvalidProblemError
from ..formats.table import QUANTIZED_FORMATS
from ..vocab import ElementKind, ScaleRule
from ..weights.quantize import LARGEST
from .calibrating import OUTPUT_ERROR, CalibrateOption, MethodOption, calibration
from .options import (
    A_MODEL,
    AsJson,
    DenseArgument,
    DeviceOption,
    Everything,
    ExcludeOption,
    Force,
    GroupOption,
    IncludeOption,
    OutOption,
    ScaleRuleOption,
    WeightsOption,
    named,
    one_of,
    word_option,
)
from .output import emit, progress, reported
from .tables import (
    Column,
    Json,
    counted,
    grouped,
    printable,
    shape_text,
    share_text,
    show_line,
    show_table,
    size_text,
)

FEW = 5
"""Number of tensors that are shown if not all are."""


def compress(
    source: DenseArgument,
    out: OutOption,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    element: Annotated[
        ElementKind | None,
        word_option(
            "--element",
            known=LARGEST,
            meaning="Quantize weights to 8 bits, for layers that quantize their input too.",
        ),
    ] = None,
    weights: WeightsOption = None,
    group: GroupOption = None,
    scale_rule: ScaleRuleOption = None,
    device: DeviceOption = "auto",
    calibrate: CalibrateOption = None,
    method: MethodOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be compressed, and write nothing.")
    ] = False,
    force: Force = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Prune a dense model to 2:4 and write it compressed.

    Compresses f32, f16 and bf16 matrices whose K is a multiple of 8. Everything else is copied unchanged, and
    so are embeddings, output heads, routers and adapters unless --include names them.
    """
    with reported(as_json):
        _check_quantization(element, weights, {"--group": group, "--scale-rule": scale_rule})
        overwrite = dry_run or may_replace(out, source, force, as_json)
        quantized: Json = {"weights": weights, "group": group, "scale_rule": scale_rule}
        chosen: Json = {"include": include or (), "exclude": exclude or (), "quiet": as_json}
        run = None
        if calibrate is not None:
            if dry_run:
                raise typer.BadParameter("--dry-run: expected no --calibrate, which has to run the model")
            run = calibration(source, calibrate, out, method or "sparsegpt", device, **chosen, **quantized)
        elif method is not None:
            raise typer.BadParameter(f"--method: expected --calibrate with it, got {method} alone")
        document = compressed(
            source,
            out,
            device,
            element=element,
            overwrite=overwrite,
            dry_run=dry_run,
            calibrated=None if run is None else run.weights,
            **chosen,
            **quantized,
        )
        if run is not None:
            run.finish(document)
        emit(document, partial(_show_compression, everything=everything), as_json=as_json)


def _check_quantization(
    element: ElementKind | None, weights: ElementKind | None, beside: Mapping[str, object]
) -> None:
    """Raise typer.BadParameter, naming an option, for options of weights that don't go together."""
    if weights is not None and element is not None:
        raise typer.BadParameter(f"--weights: expected no --element with it, got {element}")
    for option, value in beside.items():
        if weights is None and value is not None:
            raise typer.BadParameter(f"{option}: expected --weights with it, got {value} alone")


def format_name(text: str) -> str:
    """Parse the name of a format that is written: built-in, registered, or of an installed package."""
    return one_of(checkpoint_formats())(text)


def read_format_name(text: str) -> str:
    """Parse the name of a format that is read."""
    return one_of(checkpoint_formats(read=True))(text)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help=A_MODEL)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file, or the new folder, to write.")],
    from_format: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            parser=read_format_name,
            help=f"The format of IN. {named(READ_FORMATS)[:-1]}, or a registered one.",
        ),
    ],
    to_format: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            parser=format_name,
            help=f"The format to write: any but {', '.join(QUANTIZED_FORMATS)}, which are read alone.",
        ),
    ],
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    tile_k: Annotated[
        int | None,
        typer.Option(
            "--tile-k", min=8, metavar="N", help="For cutlass_sm90, the mainloop's tile K; 128 by default."
        ),
    ] = None,
    force: Force = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Write the 2:4 weights of a model in another format.

    Nothing is pruned, and everything else is copied. --include and --exclude choose matrices of dense models.
    """
    with reported(as_json):
        overwrite = may_replace(out, source, force, as_json)
        before = stored_bytes(source)
        with progress("converting", before, as_json) as advance:
            reports = convert_checkpoint(
                source,
                out,
                from_format=from_format,
                to_format=to_format,
                include=include or (),
                exclude=exclude or (),
                tile_k=tile_k,
                overwrite=overwrite,
                on_tensor=lambda report: advance(report.bytes_before),
            )
        document = _rewrite_document(source, out, before, _written_bytes(out), reports)
        emit(document, partial(_show_conversion, everything=everything), as_json=as_json)


def may_replace(out: Path, source: Path | None, force: bool, as_json: bool) -> bool:
    """Whether an existing file may be replaced: with --force, or if the user at the terminal agrees.

    Raises InvalidProblemError if it may not.
    """
    if force or not os.path.isfile(out) or (source is not None and _same(source, out)):
        return force
    asks = not as_json and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if asks and typer.confirm(f"{printable(str(out))} exists. Replace it?", err=True):
        return True
    raise InvalidProblemError(f"OUT: expected a new file, got {out}, which exists; replace it by --force")


def _same(source: Path, out: Path) -> bool:
    return os.path.exists(source) and os.path.samefile(source, out)


def compressed(
    source: Path,
    out: Path,
    device: int | str | None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    element: ElementKind | None = None,
    weights: ElementKind | None = None,
    group: int | None = None,
    scale_rule: ScaleRule | None = None,
    overwrite: bool,
    dry_run: bool = False,
    calibrated: CalibratedWeights | None = None,
    quiet: bool,
) -> Json:
    before = stored_bytes(source)
    with progress("compressing", before, quiet) as advance:
        reports = compress_checkpoint(
            source,
            out,
            include=include,
            exclude=exclude,
            element=element,
            weights=weights,
            group=group,
            scale_rule=scale_rule,
            device=device,
            overwrite=overwrite,
            dry_run=dry_run,
            calibrated=calibrated,
            on_tensor=lambda report: advance(report.bytes_before),
        )
    after = sum(one.bytes_after for one in reports) if dry_run else _written_bytes(out)
    document = _rewrite_document(source, out, before, after, reports)
    document["sparse_share"] = reports.sparse_share
    return {**document, "dry_run": True} if dry_run else document


def _written_bytes(out: Path) -> int:
    """Bytes of the file, or of the folder's shards, that was written. A file may have any name."""
    return out.stat().st_size if out.is_file() else stored_bytes(out)


def _rewrite_document(
    source: Path, out: Path, before: int, after: int, reports: Sequence[TensorReport | ConversionReport]
) -> Json:
    return {
        "source": str(source),
        "destination": str(out),
        "source_bytes": before,
        "destination_bytes": after,
        "tensors": [asdict(report) for report in reports],
    }


# Tables -------------------------------------------------------------------------------------------

_BEFORE = Column("before", lambda row: size_text(row["bytes_before"]), right=True)
_AFTER = Column("after", lambda row: size_text(row["bytes_after"]), right=True)
_ROUNDING = Column("quantized", lambda row: share_text(row["quantization_error"]), right=True)
_SHAPE = Column("shape", lambda row: shape_text(row["shape"]), optional=True)
_ELEMENT = Column("element", "element", optional=True)
_NAME = Column("tensor", "name")


def _show_compression(document: Json, *, everything: bool = False) -> None:
    done = rows_of(document, "compressed")
    columns: tuple[Column, ...] = (_BEFORE, _AFTER, _SHAPE, _ELEMENT, _NAME)
    if "calibration" in document:
        how = document["calibration"]
        worst = sorted(done, key=lambda row: -row["output_error"])[:FEW]
        words = f"pruned by {how['method']} on {how['tokens']} tokens; the {{few}} whose outputs err most"
        shown, title = _selected(done, worst, words, everything)
        columns = (OUTPUT_ERROR, *columns)
    elif document.get("dry_run"):
        shown, title = _selected(done, _largest(done), "to compress; the {few} largest", everything)
    else:
        worst = sorted(done, key=_energy)[:FEW]
        shown, title = _selected(done, worst, "compressed; the {few} that keep the least energy", everything)
        if any(row["quantization_error"] is not None for row in done):
            columns = (_ROUNDING, *columns)
        columns = (Column("kept", lambda row: share_text(row["kept_energy"]), right=True), *columns)
    show_table(columns, shown, title=title)
    _show_rest(document, "compressed", everything)


def _energy(row: Json) -> float:
    kept: float = row["kept_energy"]
    return kept if math.isfinite(kept) else -1.0


def _largest(rows: list[Json]) -> list[Json]:
    return sorted(rows, key=lambda row: -row["bytes_before"])[:FEW]


def _show_conversion(document: Json, *, everything: bool = False) -> None:
    done = rows_of(document, "converted")
    shown, title = _selected(done, _largest(done), "converted; the {few} largest", everything)
    show_table((_BEFORE, _AFTER, _SHAPE, _ELEMENT, _NAME), shown, title=title)
    _show_rest(document, "converted", everything)


def _selected(rows: list[Json], few: list[Json], words: str, everything: bool) -> tuple[list[Json], str]:
    """The rows to show, and their title."""
    total = counted(len(rows), "tensor")
    if everything or len(few) == len(rows):
        return rows, f"{total} {words.partition(';')[0]}:"
    return few, f"{total} {words.format(few=len(few))} (--all shows the others):"


def rows_of(document: Json, action: str) -> list[Json]:
    return [row for row in document["tensors"] if row["action"] == action]


def _show_rest(document: Json, action: str, everything: bool) -> None:
    """Show the copied tensors by reason, and the total."""
    copied = rows_of(document, "copied")
    why = Column("why", lambda row: row["reason"] or "no weight of the format", prose=True)
    size = Column("size", _BEFORE.cell, right=True)
    title = f"{counted(len(copied), 'tensor')} copied:"
    if everything:
        show_table((size, _SHAPE, _ELEMENT, _NAME, why), copied, title=title)
    else:
        groups = [
            {
                "reason": f"{reason or 'no weight of the format'}: {_all_names(rows)}",
                "bytes_before": sum(row["bytes_before"] for row in rows),
                "count": len(rows),
            }
            for reason, rows in grouped(copied, "reason").items()
        ]
        show_table((Column("count", "count", right=True), size, why), groups, title=title)
    done = rows_of(document, action)
    none = "" if done else "nothing to do: "
    dry = "dry run, nothing was written: " if document.get("dry_run") else ""
    known = sum(row["reason"] == SPARSE_ALREADY for row in done)
    before = f" ({known} of them 2:4 already)" if known else ""
    show_line(
        f"{dry}{none}{len(done)} {action}{before}, {len(copied)} copied: {change_text(document)}", "bold"
    )


def _all_names(rows: list[Json]) -> str:
    return ", ".join(families_of(printable(row["name"]) for row in rows))


def change_text(document: Json) -> str:
    before, after = document["source_bytes"], document["destination_bytes"]
    became = "would become about" if document.get("dry_run") else "became"
    text = f"{size_text(before)} {became} {size_text(after)} ({after / before:.1%})"
    share = document.get("sparse_share")
    return text if share is None else f"{text}; {share:.1%} of the model's bytes is 2:4"
