"""``sparse24 info`` and ``explain``: what can serve here, and what would serve a problem."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from ..gemm.descriptor import GemmSparse24Descriptor
from ..vocab import DeviceProperties, ElementKind, EpilogueKind, GemmOp
from . import inspection, rendering
from .options import AsJson, BackendOption, DeviceOption, RequireOption, device_of, preference_of
from .output import emit, reported

_ABSENT_GPUS = {
    "sm80": ("A100", (8, 0), 108),
    "sm86": ("A10", (8, 6), 72),
    "sm89": ("L40S", (8, 9), 142),
    "sm90a": ("H100", (9, 0), 132),
    "sm100": ("B200", (10, 0), 148),
    "sm120": ("RTX 5090", (12, 0), 170),
}
Arch = Enum("Arch", {name.upper(): name for name in _ABSENT_GPUS}, type=str)  # type: ignore[misc]


def info(as_json: AsJson = False) -> None:
    """Versions, devices, and which backends can serve here (and what the others lack)."""
    with reported(as_json):
        emit(inspection.environment(), rendering.show_environment, as_json=as_json)


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
    place: Any = device_of(device) if arch is None else absent_gpu(arch)
    preference = preference_of(require, backend)
    with reported(as_json):
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element, epilogue=epilogue, op=op)
        answer = inspection.explain_problem(desc, preference, place)
        emit(answer, rendering.show_explanation, as_json=as_json)
    raise typer.Exit(0 if answer["chosen"] else 1)


def absent_gpu(arch: Any) -> DeviceProperties:
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
