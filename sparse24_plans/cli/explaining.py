"""``sparse24 info`` and ``explain``: what can serve here, and what would serve a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.tuned import TuningTable
from ..vocab import DeviceProperties, ElementKind, EpilogueKind, GemmOp, MatrixOrder, ScaleKind, Tier
from . import inspection, rendering
from .options import (
    ELEMENTS,
    AsJson,
    BackendOption,
    DeviceOption,
    RequireOption,
    preference_of,
    word_option,
)
from .output import emit, reported

GPUS = {
    "sm80": ("A100", (8, 0), 108),
    "sm86": ("A10", (8, 6), 72),
    "sm89": ("L40S", (8, 9), 142),
    "sm90a": ("H100", (9, 0), 132),
    "sm100": ("B200", (10, 0), 148),
    "sm120": ("RTX 5090", (12, 0), 170),
}
_RESULTS = tuple(kind for kind in ElementKind if kind in (*ELEMENTS, ElementKind.I32))


def _size(name: str, meaning: str) -> Any:
    return typer.Option(name, min=0, metavar="N", help=meaning)


Tokens = Annotated[int, _size("--n", "Tokens.")]
OutFeatures = Annotated[int, _size("--m", "Out features.")]
InFeatures = Annotated[int, _size("--k", "In features, a multiple of 8.")]
Element = Annotated[Any, word_option("--element", known=ELEMENTS, meaning="Type of W and X.", metavar="TYPE")]
OutElement = Annotated[
    Any,
    word_option(
        "--out-element",
        known=_RESULTS,
        meaning="Type of the result; by default X's, i32 of s8, bf16 of fp8.",
        metavar="TYPE",
    ),
]
BiasElement = Annotated[
    Any,
    word_option(
        "--bias-element",
        known=ELEMENTS,
        meaning="Type of the bias; by default the result's, or f32.",
        metavar="TYPE",
    ),
]
Epilogue = Annotated[Any, word_option("--epilogue", known=EpilogueKind, meaning="What follows the product.")]
Op = Annotated[Any, word_option("--op", known=GemmOp, meaning="The product, or the gradient of X.")]
Alpha = Annotated[float, typer.Option("--alpha", metavar="X", help="Factor of the product.")]
ScaleX = Annotated[Any, word_option("--scale-x", known=ScaleKind, meaning="Factors of X.")]
ScaleW = Annotated[Any, word_option("--scale-w", known=ScaleKind, meaning="Factors of W.")]
XOrder = Annotated[Any, word_option("--x-order", known=MatrixOrder, meaning="What is contiguous in X.")]
YOrder = Annotated[Any, word_option("--y-order", known=MatrixOrder, meaning="What is contiguous in Y.")]
Arch = Annotated[
    Any, word_option("--arch", known=GPUS, meaning="A GPU that needn't be here, instead of --device.")
]
TierOption = Annotated[Any, word_option("--tier", known=Tier, meaning="Force a kernel of this tier.")]
MaxWorkspace = Annotated[
    int | None,
    typer.Option("--max-workspace", min=0, metavar="BYTES", help="The most workspace that there is."),
]
Sm90a = Annotated[
    bool, typer.Option("--sm90a/--no-sm90a", help="Whether kernels for sm_90a alone may serve.")
]
Tuning = Annotated[
    Path | None,
    typer.Option("--tuning", metavar="FILE", help="A table of sparse24 tune, instead of the package's."),
]


def info(as_json: AsJson = False) -> None:
    """Show versions, devices, and which kernels can serve here."""
    with reported(as_json):
        emit(inspection.environment(), rendering.show_environment, as_json=as_json)


def explain(
    n: Tokens,
    m: OutFeatures,
    k: InFeatures,
    element: Element = "bf16",
    out_element: OutElement = None,
    bias_element: BiasElement = None,
    epilogue: Epilogue = "identity",
    op: Op = "forward",
    alpha: Alpha = 1.0,
    scale_x: ScaleX = "none",
    scale_w: ScaleW = "none",
    x_order: XOrder = "row",
    y_order: YOrder = "row",
    device: DeviceOption = "auto",
    arch: Arch = None,
    require: RequireOption = None,
    backend: BackendOption = None,
    tier: TierOption = None,
    max_workspace: MaxWorkspace = None,
    sm90a: Sm90a = True,
    tuning: Tuning = None,
    as_json: AsJson = False,
) -> None:
    """Say which kernel would serve a problem, and why.

    With its guarantees, error bound and workspace. Exit code 1 where none can serve it.
    """
    if arch is not None and device is not None:
        raise typer.BadParameter("--arch and --device exclude each other")
    preference = preference_of(
        require, backend, tier=tier, max_workspace_bytes=max_workspace, allow_sm90a=sm90a
    )
    chosen = {"out_element": out_element, "bias_element": bias_element}
    problem: dict[str, Any] = {
        "n": n,
        "m": m,
        "k": k,
        "element": element,
        "epilogue": epilogue,
        "op": op,
        "alpha": alpha,
        "scale_x": scale_x,
        "scale_w": scale_w,
        "x_order": x_order,
        "y_order": y_order,
        **{name: word for name, word in chosen.items() if word is not None},
    }
    with reported(as_json):
        table = None if tuning is None else TuningTable.load(tuning)
        place = device if arch is None else absent_gpu(arch)
        answer = inspection.explain_problem(GemmSparse24Descriptor(**problem), preference, place, table)
        emit(answer, rendering.show_explanation, as_json=as_json)
    raise typer.Exit(0 if answer["chosen"] else 1)


def absent_gpu(arch: str) -> DeviceProperties:
    """Properties of a GPU of the architecture, with every library installed."""
    name, capability, multiprocessors = GPUS[arch]
    return DeviceProperties(
        kind="cuda",
        name=f"{name}, assumed",
        compute_capability=capability,
        multiprocessors=multiprocessors,
        cublaslt="assumed",
        cusparselt="0.8.0",
    )
