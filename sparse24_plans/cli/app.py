"""The ``sparse24`` command.

``info``, ``compress``, ``convert``, ``verify``, ``explain``, ``demo``, ``bench``, ``tune``.

Results go to stdout, as tables or (``--json``) as one JSON document; progress and errors go to stderr.
Exit codes: 0 done and sound; 1 an error, or something that didn't verify; 2 wrong usage.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .. import __version__
from ..checkpoints.checkpoint_format import CHECKPOINT_FORMATS
from ..checkpoints.compress import TensorReport, compress_checkpoint
from ..checkpoints.convert import ConversionReport, convert_checkpoint
from ..checkpoints.folder import ModelReader, stored_bytes
from ..checkpoints.layers import compressed_names
from ..checkpoints.verify import Verification, verify_checkpoint
from ..device.devices import resolve
from ..device.files import storage_errors
from ..errors import InvalidProblemError, Sparse24Error
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.tuned import TuningTable
from ..plan.guarantee import GuaranteeRequirement
from ..plan.preference import PlanPreference
from ..tuning import search as tuning
from ..tuning.search import Trials
from ..vocab import BackendKind, DeviceProperties, ElementKind, EpilogueKind, GemmOp
from . import inspection, rendering
from .rendering import Json, console, print_json

app = typer.Typer(
    name="sparse24",
    help="2:4 structured-sparse weights: compress checkpoints, verify them, see which kernel serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_ABSENT_GPUS = {
    "sm80": ("A100", (8, 0), 108),
    "sm86": ("A10", (8, 6), 72),
    "sm89": ("L40S", (8, 9), 142),
    "sm90a": ("H100", (9, 0), 132),
    "sm100": ("B200", (10, 0), 148),
    "sm120": ("RTX 5090", (12, 0), 170),
}
Arch = Enum("Arch", {name.upper(): name for name in _ABSENT_GPUS}, type=str)  # type: ignore[misc]

Format = Enum("Format", {name.upper(): name for name in CHECKPOINT_FORMATS}, type=str)  # type: ignore[misc]
_PARTS = ("gemm", "prepare", "host")
BenchPart = Enum("BenchPart", {name.upper(): name for name in _PARTS}, type=str)  # type: ignore[misc]

# Options that several commands share.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="auto|host|N", help="auto: the GPU if there is one, else the host.")
]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="NAME[=VALUE]",
        help="Guarantees that the kernel must give, comma-separated or repeated: "
        + ", ".join(GuaranteeRequirement.model_fields)
        + ".",
    ),
]
BackendOption = Annotated[BackendKind | None, typer.Option("--backend", help="Force this backend.")]
TokensOption = Annotated[int, typer.Option("--tokens", min=1, help="Rows of random activations.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random activations.")]
CheckpointArgument = Annotated[Path, typer.Argument(metavar="CKPT", help="A dense safetensors file.")]


# Commands -----------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, devices, and which backends can serve here (and what the others lack)."""
    with _reported(as_json):
        about = inspection.environment()
        print_json(about) if as_json else rendering.show_environment(about)


@app.command()
def compress(
    source: CheckpointArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    include: Annotated[
        list[str] | None, typer.Option(help="Compress only names that match this pattern; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Copy names that match this pattern; repeatable.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Prune a dense checkpoint to 2:4 and write it compressed. Everything else is copied unchanged."""
    place = _device(device)
    with _reported(as_json):
        reports = _compress(source, out, include or (), exclude or (), place, quiet=as_json)
        if as_json:
            print_json(_compression_document(source, out, reports))
        else:
            rendering.show_compression(reports, stored_bytes(source), stored_bytes(out))


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A safetensors file, or a folder of them with its index.")
    ],
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
    """Write the 2:4 weights of a checkpoint in another format. Nothing is pruned; all else is copied."""
    with _reported(as_json):
        before = stored_bytes(source)
        with _progress("converting", before, as_json) as advance:
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
        after = stored_bytes(out)
        if as_json:
            print_json(_conversion_document(source, out, before, after, reports))
        else:
            rendering.show_conversion(reports, before, after)


@app.command()
def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A compressed checkpoint.")],
    against: Annotated[Path, typer.Option("--against", metavar="CKPT", help="The dense file it came from.")],
    tokens: TokensOption = 8,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    require: RequireOption = None,
    backend: BackendOption = None,
    as_json: AsJson = False,
) -> None:
    """Check a compressed checkpoint: weights exactly, products against the kernel's guaranteed bound."""
    place, preference = _device(device), _preference(require, backend)
    with _reported(as_json):
        found = _verify(out, against, tokens, place, seed, preference, quiet=as_json)
        print_json(_verification_document(found)) if as_json else rendering.show_verification(found)
    raise typer.Exit(0 if found.passed else 1)


@app.command()
def explain(
    n: Annotated[int, typer.Option("--n", min=0, help="Tokens.")],
    m: Annotated[int, typer.Option("--m", min=0, help="Out features.")],
    k: Annotated[int, typer.Option("--k", min=0, help="In features, a multiple of 8.")],
    element: Annotated[ElementKind, typer.Option(help="Type of W and X.")] = ElementKind.BF16,
    epilogue: Annotated[EpilogueKind, typer.Option(help="What follows the product.")] = EpilogueKind.IDENTITY,
    op: Annotated[GemmOp, typer.Option(help="Forward product, or the gradient of X.")] = GemmOp.FORWARD,
    device: DeviceOption = "auto",
    arch: Annotated[
        Arch | None, typer.Option("--arch", help="A GPU that needn't be here, instead of --device.")
    ] = None,
    require: RequireOption = None,
    backend: BackendOption = None,
    as_json: AsJson = False,
) -> None:
    """Which kernel would serve a problem and why, with its guarantees, error bound and workspace."""
    if arch is not None and device != "auto":
        raise typer.BadParameter("--arch and --device exclude each other")
    place: Any = _device(device) if arch is None else _absent_gpu(arch)
    preference = _preference(require, backend)
    with _reported(as_json):
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element, epilogue=epilogue, op=op)
        answer = inspection.explain_problem(desc, preference, place)
        print_json(answer) if as_json else rendering.show_explanation(answer)
    raise typer.Exit(0 if answer["chosen"] else 1)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Keep the files in this folder.")] = None,
    tokens: TokensOption = 4,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: AsJson = False,
) -> None:
    """Compress and verify a real checkpoint (of the [demo] extra) or else a small random one."""
    place = _device(device)
    with (
        _reported(as_json),
        tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as folder,
    ):
        target = Path(folder)
        with storage_errors(target):
            target.mkdir(parents=True, exist_ok=True)
        source = inspection.packaged_checkpoint()
        origin = f"{inspection.MODEL_PACKAGE}'s model.safetensors"
        if source is None:
            source = target / "random.safetensors"
            inspection.write_random_checkpoint(source, seed)
            origin = f"random weights ({inspection.MODEL_PACKAGE} is not installed)"
        if not as_json:
            console().print(f"checkpoint: {origin}", highlight=False)
        compressed = target / "sparse24.safetensors"
        reports = _compress(source, compressed, (), (), place, quiet=as_json)
        found = _verify(compressed, source, tokens, place, seed, PlanPreference(), quiet=as_json)
        if as_json:
            document = {
                "origin": origin,
                "compress": _compression_document(source, compressed, reports),
                "verify": _verification_document(found),
            }
            print_json(document)
        else:
            rendering.show_demo(reports, found, stored_bytes(source), stored_bytes(compressed))
    raise typer.Exit(0 if found.passed else 1)


@app.command()
def bench(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the record (JSON) here.")] = None,
    n: Annotated[
        str, typer.Option("--n", help="Tokens, comma-separated; all of the record's by default.")
    ] = "",
    shapes: Annotated[int, typer.Option("--shapes", min=1, help="How many of the Llama shapes.")] = 8,
    element: Annotated[
        list[ElementKind] | None, typer.Option(help="Type of W and X; repeatable. bf16 by default.")
    ] = None,
    backend: Annotated[
        list[BackendKind] | None, typer.Option(help="Only this backend; repeatable. All by default.")
    ] = None,
    only: Annotated[
        list[BenchPart] | None, typer.Option(help="Only this part of the record; repeatable. All by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time backends beside dense cuBLAS and cuSPARSELt, and preparing weights. Needs a checkout and a GPU."""
    with _reported(as_json):
        parts = [part.value for part in only or BenchPart]
        record = _measure(n, shapes, element or [ElementKind.BF16], backend or [], parts, quiet=as_json)
        if out is not None:
            with storage_errors(out):
                out.write_text(json.dumps(record, indent=1) + "\n")
        print_json(record) if as_json else rendering.show_benchmark(record)


@app.command()
def tune(
    out: Annotated[Path, typer.Option("--out", "-o", help="The table (JSON) to write.")],
    n: Annotated[str, typer.Option("--n", help="Tokens, comma-separated: the n that you serve.")],
    shape: Annotated[list[str], typer.Option("--shape", metavar="MxK", help="Weight shape; repeatable.")],
    element: Annotated[
        list[ElementKind] | None, typer.Option(help="Type of W and X; repeatable. bf16 by default.")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Row of the registry; repeatable. All that can be tuned.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Search the fastest right configurations of the kernels that can be tuned, for this GPU: minutes.

    Adds to a table of this GPU and driver that is there already.
    """
    place = _device(device)
    problems = _problems(n, shape, element or [ElementKind.BF16])
    with _reported(as_json):
        table, trials = _tune(problems, kernel, place, out, quiet=as_json)
        document = rendering.tuning_document(table, trials)
        print_json(document) if as_json else rendering.show_tuning(document, out)


# Their parts --------------------------------------------------------------------------------------


@contextmanager
def _reported(as_json: bool) -> Iterator[None]:
    """Turn the package's errors into one line (or document) and exit code 1."""
    try:
        yield
    except Sparse24Error as error:
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        else:
            console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@contextmanager
def _progress(title: str, total: float, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A bar on stderr where that is a terminal, gone when done; yields what moves it."""
    quiet = quiet or not sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.advance(task, step)


def _compress(
    source: Path, out: Path, include: Any, exclude: Any, device: int | str | None, *, quiet: bool
) -> list[TensorReport]:
    with _progress("compressing", stored_bytes(source), quiet) as advance:
        return compress_checkpoint(
            source,
            out,
            include=include,
            exclude=exclude,
            device=device,
            on_tensor=lambda report: advance(report.bytes_before),
        )


def _verify(
    out: Path,
    against: Path,
    tokens: int,
    device: int | str | None,
    seed: int,
    preference: PlanPreference,
    *,
    quiet: bool,
) -> Verification:
    with ModelReader(out) as model:
        layers = len(compressed_names(model))
    with _progress("verifying", layers, quiet) as advance:
        return verify_checkpoint(
            out,
            against,
            tokens=tokens,
            device=device,
            seed=seed,
            preference=preference,
            on_layer=lambda layer: advance(1),
        )


def _measure(
    tokens: str,
    shapes: int,
    elements: list[ElementKind],
    backends: list[BackendKind],
    parts: list[str],
    *,
    quiet: bool,
) -> dict[str, Any]:
    benchmarks = inspection.benchmarks()
    chosen = [int(n) for n in tokens.split(",")] if tokens else benchmarks.problems.TOKENS
    matrices = benchmarks.problems.SHAPES[:shapes]
    cells = len(matrices) * len(chosen) * ("gemm" in parts)
    ops = 6 * sum(shape in matrices for shape in benchmarks.problems.PREPARE_SHAPES) * ("prepare" in parts)
    with _progress("measuring", len(elements) * (cells + ops), quiet) as advance:
        record: dict[str, Any] = benchmarks.run.measure(
            matrices, chosen, elements, lambda: advance(1), backends, parts
        )
    return record


def _problems(tokens: str, shapes: list[str], elements: list[ElementKind]) -> list[GemmSparse24Descriptor]:
    try:
        sizes = [tuple(int(side) for side in shape.split("x")) for shape in shapes]
        chosen = [int(n) for n in tokens.split(",")]
        return [
            GemmSparse24Descriptor(n=n, m=m, k=k, element=element)
            for element in elements
            for m, k in sizes
            for n in chosen
        ]
    except (ValueError, InvalidProblemError) as error:
        raise typer.BadParameter(f"--n, --shape: expected 1,16 and 4096x4096 or such: {error}") from error


def _tune(
    problems: list[GemmSparse24Descriptor], kernels: list[str] | None, device: Any, out: Path, *, quiet: bool
) -> tuple[TuningTable, list[Trials]]:
    """Writes the table as it grows: an interrupted search leaves what it has."""
    trials: list[Trials] = []
    about = resolve(device)
    before = TuningTable(about.name, about.driver or "", ())
    if out.exists():
        before = before.merged(TuningTable.load(out))
    with _progress("tuning", len(problems), quiet) as advance:

        def on_trials(found: Trials) -> None:
            trials.append(found)
            chosen = [one.chosen for one in trials if one.chosen is not None]
            before.merged(TuningTable(before.gpu, before.driver, chosen)).save(out)
            advance(1)

        table = tuning.tune(problems, kernels=kernels, device=device, on_trials=on_trials)
    before.merged(table).save(out)
    return table, trials


def _compression_document(source: Path, out: Path, reports: list[TensorReport]) -> Json:
    return {
        "source": str(source),
        "destination": str(out),
        "source_bytes": stored_bytes(source),
        "destination_bytes": stored_bytes(out),
        "tensors": [asdict(report) for report in reports],
    }


def _conversion_document(
    source: Path, out: Path, before: int, after: int, reports: list[ConversionReport]
) -> Json:
    return {
        "source": str(source),
        "destination": str(out),
        "source_bytes": before,
        "destination_bytes": after,
        "tensors": [asdict(report) for report in reports],
    }


def _verification_document(found: Verification) -> Json:
    layers = [{**asdict(layer), "passed": layer.passed} for layer in found.layers]
    return {**asdict(found), "layers": layers, "passed": found.passed}


def _device(text: str) -> int | str | None:
    if text == "auto":
        return None
    if text == "host":
        return text
    ordinal = text.removeprefix("cuda:")
    if ordinal.isascii() and ordinal.isdigit():
        return int(ordinal)
    raise typer.BadParameter(f"--device: expected auto, host or a CUDA ordinal, got {text!r}")


def _preference(require: list[str] | None, backend: BackendKind | None) -> PlanPreference:
    wanted: dict[str, Any] = {}
    for item in ",".join(require or ()).split(","):
        name, has_value, value = item.strip().partition("=")
        if name:
            wanted[name] = value if has_value else True
    try:
        return PlanPreference(prefer_backend=backend, require=GuaranteeRequirement(**wanted))
    except InvalidProblemError as error:
        raise typer.BadParameter(f"--require: {error}") from error


def _absent_gpu(arch: Any) -> DeviceProperties:
    """Properties of a GPU of the architecture, with every library installed."""
    name, capability, multiprocessors = _ABSENT_GPUS[arch.value]
    return DeviceProperties(
        kind="cuda",
        name=f"{name}, assumed",
        compute_capability=capability,
        multiprocessors=multiprocessors,
        cublaslt="assumed",
        cusparselt="0.8.0",
    )


def _terminate(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


def main() -> None:
    """Entry point of the ``sparse24`` command."""
    # As an exception, so that a killed run removes its temporary file.
    signal.signal(signal.SIGTERM, _terminate)
    app()


if __name__ == "__main__":
    main()
