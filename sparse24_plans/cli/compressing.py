"""``sparse24 compress``, ``convert``, ``verify`` and ``demo``: models, in one file or in shards."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.checkpoint_format import CHECKPOINT_FORMATS, checkpoint_formats
from ..checkpoints.compress import TensorReport, compress_checkpoint
from ..checkpoints.conversion import ConversionReport, convert_checkpoint
from ..checkpoints.folder import ModelReader, stored_bytes
from ..checkpoints.layers import compressed_names
from ..checkpoints.verify import verify_checkpoint
from ..device.files import storage_errors
from ..errors import InvalidProblemError
from ..plan.preference import PlanPreference
from . import inspection, rendering
from .options import (
    A_MODEL,
    AsJson,
    BackendOption,
    DenseArgument,
    DeviceOption,
    Everything,
    ExcludeOption,
    Force,
    IncludeOption,
    OutOption,
    RequireOption,
    SeedOption,
    TokensOption,
    named,
    one_of,
    preference_of,
)
from .output import emit, progress, reported
from .tables import Json, printable, show_line


def compress(
    source: DenseArgument,
    out: OutOption,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    device: DeviceOption = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be compressed, and write nothing.")
    ] = False,
    force: Force = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Prune a dense model to 2:4 and write it compressed.

    Compressed are matrices of f32, f16 and bf16 whose K is a multiple of 8. All else is copied unchanged.
    """
    with reported(as_json):
        overwrite = dry_run or _may_replace(out, source, force, as_json)
        document = _compress(
            source,
            out,
            device,
            include=include or (),
            exclude=exclude or (),
            overwrite=overwrite,
            dry_run=dry_run,
            quiet=as_json,
        )
        emit(document, partial(rendering.show_compression, everything=everything), as_json=as_json)


def format_name(text: str) -> str:
    """A parser: the built-in formats', those that this process has registered, and installed packages'."""
    return one_of(checkpoint_formats())(text)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help=A_MODEL)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file, or the new folder, to write.")],
    from_format: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            parser=format_name,
            help=f"What IN holds. {named(CHECKPOINT_FORMATS)[:-1]}, or a registered one.",
        ),
    ],
    to_format: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", parser=format_name, help="What to write; as --from."),
    ],
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    tile_k: Annotated[
        int | None,
        typer.Option(
            "--tile-k", min=8, metavar="N", help="Of cutlass_sm90: tile K of the mainloop; 128 by default."
        ),
    ] = None,
    force: Force = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Write the 2:4 weights of a model in another format.

    Nothing is pruned; all else is copied. --include and --exclude choose among the matrices of a dense model.
    """
    with reported(as_json):
        overwrite = _may_replace(out, source, force, as_json)
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
        document = _rewrite_document(source, out, before, reports)
        emit(document, partial(rendering.show_conversion, everything=everything), as_json=as_json)


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help=f"A compressed model. {A_MODEL}")],
    against: Annotated[Path, typer.Option("--against", metavar="CKPT", help="The dense model it came from.")],
    tokens: TokensOption = 8,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    require: RequireOption = None,
    backend: BackendOption = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Check a compressed model against its dense one.

    Weights exactly, products against the error bound that the kernel guarantees. OUT and CKPT needn't spread
    their tensors over shards alike. Exit code 1 where something is wrong.
    """
    preference = preference_of(require, backend)
    with reported(as_json):
        found = _verify(out, against, tokens, device, seed, preference, quiet=as_json)
        emit(found, partial(rendering.show_verification, everything=everything), as_json=as_json)
    raise typer.Exit(0 if found["passed"] else 1)


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Keep the files in this folder.")
    ] = None,
    tokens: TokensOption = 4,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    require: RequireOption = None,
    backend: BackendOption = None,
    force: Force = False,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Compress and verify a small checkpoint.

    That of the extra [demo] where it is installed, else random weights.
    """
    preference = preference_of(require, backend)
    with (
        reported(as_json),
        tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as folder,
    ):
        target = Path(folder)
        with storage_errors(target):
            target.mkdir(parents=True, exist_ok=True)
        compressed = target / "sparse24.safetensors"
        overwrite = _may_replace(compressed, None, force, as_json)
        source, origin = _demo_model(target, seed, force, as_json)
        if not as_json:
            show_line(f"checkpoint: {origin}")
        document: Json = {
            "origin": origin,
            "compress": _compress(source, compressed, device, overwrite=overwrite, quiet=as_json),
            "verify": _verify(compressed, source, tokens, device, seed, preference, quiet=as_json),
        }
        emit(document, partial(rendering.show_demo, everything=everything), as_json=as_json)
    raise typer.Exit(0 if document["verify"]["passed"] else 1)


def _demo_model(folder: Path, seed: int, force: bool, as_json: bool) -> tuple[Path, str]:
    """A dense model and where it comes from; a random one is written to ``folder``."""
    source = inspection.packaged_checkpoint()
    if source is not None:
        return source, f"{inspection.MODEL_PACKAGE}'s model.safetensors"
    source = folder / "random.safetensors"
    _may_replace(source, None, force, as_json)
    inspection.write_random_checkpoint(source, seed)
    return source, f"random weights ({inspection.MODEL_PACKAGE} is not installed)"


def _may_replace(out: Path, source: Path | None, force: bool, as_json: bool) -> bool:
    """Whether a file that is there may be replaced: with --force, or if the user at the terminal says so.

    Raises InvalidProblemError where it may not.
    """
    if force or not os.path.isfile(out) or (source is not None and _same(source, out)):
        return force
    asks = not as_json and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if asks and typer.confirm(f"{printable(str(out))} exists. Replace it?", err=True):
        return True
    raise InvalidProblemError(f"OUT: {out} exists and was left as it is; --force replaces it")


def _same(source: Path, out: Path) -> bool:
    return os.path.exists(source) and os.path.samefile(source, out)


def _compress(
    source: Path,
    out: Path,
    device: int | str | None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overwrite: bool,
    dry_run: bool = False,
    quiet: bool,
) -> Json:
    before = stored_bytes(source)
    with progress("compressing", before, quiet) as advance:
        reports = compress_checkpoint(
            source,
            out,
            include=include,
            exclude=exclude,
            device=device,
            overwrite=overwrite,
            dry_run=dry_run,
            on_tensor=lambda report: advance(report.bytes_before),
        )
    if dry_run:
        after = sum(report.bytes_after for report in reports)
        return {
            **_rewrite_document(source, out, before, reports),
            "destination_bytes": after,
            "dry_run": True,
        }
    return _rewrite_document(source, out, before, reports)


def _verify(
    out: Path,
    against: Path,
    tokens: int,
    device: int | str | None,
    seed: int,
    preference: PlanPreference,
    *,
    quiet: bool,
) -> Json:
    with ModelReader(out) as model:
        layers = len(compressed_names(model))
    with progress("verifying", layers, quiet) as advance:
        found = verify_checkpoint(
            out,
            against,
            tokens=tokens,
            device=device,
            seed=seed,
            preference=preference,
            on_layer=lambda layer: advance(1),
        )
    shown = [{**asdict(layer), "passed": layer.passed} for layer in found.layers]
    return {**asdict(found), "layers": shown, "passed": found.passed}


def _rewrite_document(
    source: Path, out: Path, before: int, reports: Sequence[TensorReport | ConversionReport]
) -> Json:
    return {
        "source": str(source),
        "destination": str(out),
        "source_bytes": before,
        "destination_bytes": stored_bytes(out),
        "tensors": [asdict(report) for report in reports],
    }
