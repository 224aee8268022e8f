"""``sparse24 compress``, ``convert``, ``verify`` and ``demo``: models, in one file or in shards."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.checkpoint_format import CHECKPOINT_FORMATS
from ..checkpoints.compress import TensorReport, compress_checkpoint
from ..checkpoints.convert import ConversionReport, convert_checkpoint
from ..checkpoints.folder import ModelReader, stored_bytes
from ..checkpoints.layers import compressed_names
from ..checkpoints.verify import verify_checkpoint
from ..device.files import storage_errors
from ..plan.preference import PlanPreference
from . import inspection, rendering
from .options import (
    A_MODEL,
    AsJson,
    BackendOption,
    DenseArgument,
    DeviceOption,
    OutOption,
    RequireOption,
    SeedOption,
    TokensOption,
    device_of,
    preference_of,
)
from .output import Json, emit, progress, reported, show_line

Format = Enum("Format", {name.upper(): name for name in CHECKPOINT_FORMATS}, type=str)  # type: ignore[misc]


def compress(
    source: DenseArgument,
    out: OutOption,
    include: Annotated[
        list[str] | None, typer.Option(help="Compress only names that match this pattern; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Copy names that match this pattern; repeatable.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Prune a dense model to 2:4 and write it compressed. Everything else is copied unchanged."""
    place = device_of(device)
    with reported(as_json):
        document = _compress(source, out, place, include=include or (), exclude=exclude or (), quiet=as_json)
        emit(document, rendering.show_compression, as_json=as_json)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help=A_MODEL)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file, or the new folder, to write.")],
    from_format: Annotated[Format, typer.Option("--from", help="What IN holds.")],
    to_format: Annotated[Format, typer.Option("--to", help="What to write.")],
    include: Annotated[
        list[str] | None,
        typer.Option(help="From dense: convert only names that match this pattern; repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="From dense: copy names that match this pattern; repeatable.")
    ] = None,
    tile_k: Annotated[
        int | None,
        typer.Option("--tile-k", min=8, help="cutlass_sm90: tile K of the mainloop; 128 by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the 2:4 weights of a model in another format. Nothing is pruned; all else is copied."""
    with reported(as_json):
        before = stored_bytes(source)
        with progress("converting", before, as_json) as advance:
            reports = convert_checkpoint(
                source,
                out,
                from_format=from_format.value,
                to_format=to_format.value,
                include=include or (),
                exclude=exclude or (),
                tile_k=tile_k,
                on_tensor=lambda report: advance(report.bytes_before),
            )
        document = _rewrite_document(source, out, before, reports)
        emit(document, rendering.show_conversion, as_json=as_json)


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help=f"A compressed model. {A_MODEL}")],
    against: Annotated[Path, typer.Option("--against", metavar="CKPT", help="The dense model it came from.")],
    tokens: TokensOption = 8,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    require: RequireOption = None,
    backend: BackendOption = None,
    as_json: AsJson = False,
) -> None:
    """Check a compressed model: weights exactly, products against the kernel's guaranteed bound.

    OUT and CKPT needn't spread their tensors over shards alike.
    """
    place, preference = device_of(device), preference_of(require, backend)
    with reported(as_json):
        found = _verify(out, against, tokens, place, seed, preference, quiet=as_json)
        emit(found, rendering.show_verification, as_json=as_json)
    raise typer.Exit(0 if found["passed"] else 1)


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Keep the files in this folder.")] = None,
    tokens: TokensOption = 4,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: AsJson = False,
) -> None:
    """Compress and verify a real checkpoint (of the [demo] extra) or else a small random one."""
    place = device_of(device)
    with (
        reported(as_json),
        tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as folder,
    ):
        target = Path(folder)
        with storage_errors(target):
            target.mkdir(parents=True, exist_ok=True)
        source, origin = _demo_model(target, seed)
        if not as_json:
            show_line(f"checkpoint: {origin}")
        compressed = target / "sparse24.safetensors"
        document: Json = {
            "origin": origin,
            "compress": _compress(source, compressed, place, quiet=as_json),
            "verify": _verify(compressed, source, tokens, place, seed, PlanPreference(), quiet=as_json),
        }
        emit(document, rendering.show_demo, as_json=as_json)
    raise typer.Exit(0 if document["verify"]["passed"] else 1)


def _demo_model(folder: Path, seed: int) -> tuple[Path, str]:
    """A dense model and where it comes from; a random one is written to ``folder``."""
    source = inspection.packaged_checkpoint()
    if source is not None:
        return source, f"{inspection.MODEL_PACKAGE}'s model.safetensors"
    source = folder / "random.safetensors"
    inspection.write_random_checkpoint(source, seed)
    return source, f"random weights ({inspection.MODEL_PACKAGE} is not installed)"


def _compress(
    source: Path,
    out: Path,
    device: int | str | None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
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
            on_tensor=lambda report: advance(report.bytes_before),
        )
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
