"""``sparse24 export`` writes plans for programs that have no Python."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoints.compressed_form import DEFAULT_GROUP
from ..device.devices import GPUS
from ..device.files import read_whole
from ..errors import FormatError, InvalidProblemError, StorageError
from ..export import export_plans
from ..export.folder import Problem, name_of
from ..gemm.descriptor import GemmSparse24Descriptor
from ..prepare.descriptor import PackSparse24Descriptor
from ..prepare.kernel_table import PACKED_ELEMENTS
from ..vocab import DeviceProperties, ElementKind, EpilogueKind
from .options import (
    AsJson,
    BackendOption,
    ElementsOption,
    EpiloguesOption,
    GroupOption,
    RequireOption,
    WeightShapesOption,
    WeightsOption,
    hint,
    named,
    preference_of,
    shape_of,
    tokens_of,
    usage_checked,
)
from .output import emit, progress, reported
from .tables import Json, show_line, size_text

_MAX_PROPERTIES = 1 << 16
"""Bytes of a file of DeviceProperties, which has a few hundred."""


def export(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write.")],
    n: Annotated[str, typer.Option("--n", metavar="N", help="The most tokens; all from 1 on are exported.")],
    shape: WeightShapesOption,
    element: ElementsOption = None,
    weights: WeightsOption = None,
    group: GroupOption = None,
    epilogue: EpiloguesOption = None,
    device: Annotated[
        Any,
        typer.Option(
            "--device",
            metavar="GPU",
            parser=lambda text: _gpu(text),
            help=f"The GPU that will run the plans. {named(GPUS)} Or a JSON file of DeviceProperties.",
        ),
    ] = "h200",
    require: RequireOption = None,
    backend: BackendOption = None,
    as_json: AsJson = False,
) -> None:
    """Write plans for C programs: kernels, tables and the code.

    Exports the product of each combination and, without --weights, the plan that packs its weight. Needs
    NVRTC, and no GPU.
    """
    most = tokens_of(n)
    if len(most) != 1 or most[0] == 0:
        raise typer.BadParameter(f"--n: expected one number of tokens, at least 1, got {n:.80}")
    stored: dict[str, Any] = {}
    if weights is not None:
        stored = {"weight_element": weights, "weight_group": DEFAULT_GROUP if group is None else group}
    elif group is not None:
        raise typer.BadParameter(f"--group: expected --weights with it, got {group} alone")
    descriptors = _descriptors(
        most[0], shape, element or [ElementKind.BF16], epilogue or [EpilogueKind.IDENTITY], stored
    )
    with reported(as_json):
        products = sum(isinstance(one, GemmSparse24Descriptor) for one in descriptors.values())
        with progress("exporting", products * most[0], as_json) as advance:
            found = export_plans(
                descriptors,
                output,
                preference=preference_of(require, backend),
                device=device,
                on_steps=advance,
            )
        document = {**found._asdict(), "problems": list(found.problems)}
        emit(document, _show, as_json=as_json)


def _gpu(text: str) -> str | DeviceProperties:
    """A known GPU's name, or the properties in a file."""
    if text in GPUS:
        return text
    try:
        return DeviceProperties.model_validate_json(read_whole(text, _MAX_PROPERTIES))
    except (StorageError, FormatError, InvalidProblemError) as error:
        raise typer.BadParameter(
            f"expected a file of DeviceProperties or one of {', '.join(GPUS)}, got {text!r:.80}"
            f"{hint(text, GPUS)}: {error}"
        ) from error


def _descriptors(
    most: int,
    shapes: list[str],
    elements: list[ElementKind],
    epilogues: list[EpilogueKind],
    stored: dict[str, Any],
) -> dict[str, Problem]:
    """The products, and what packs their weights if these aren't quantized: ``stored`` says how they are."""
    found: dict[str, Problem] = {}
    with usage_checked("--n, --shape, --element, --weights, --group, --epilogue: "):
        for (m, k), element in product(map(shape_of, shapes), elements):
            problems: list[Problem] = [
                GemmSparse24Descriptor(n=most, m=m, k=k, element=element, epilogue=one, **stored)
                for one in epilogues
            ]
            if element in PACKED_ELEMENTS and not stored:
                problems.append(PackSparse24Descriptor(m=m, k=k, element=element))
            found |= {name_of(one): one for one in problems}
    return found


def _show(document: Json) -> None:
    for name in document["problems"]:
        show_line(name)
    show_line(
        f"{document['plans']} plans of {document['cubins']} kernels, {size_text(document['nbytes'])} in "
        f"{document['folder']}"
    )
