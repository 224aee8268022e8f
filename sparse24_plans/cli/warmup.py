"""``sparse24 warmup`` fills the kernel cache, so that plans needn't compile when they serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Any

import typer

from ..device.devices import GPUS, HOST_PROPERTIES, absent_gpu, resolve
from ..device.jit.cache import CompiledKernel, cache_folder
from ..device.jit.compiler import load_nvrtc
from ..errors import BackendUnavailableError, UnsupportedError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..plan.descriptor import Descriptor
from ..plan.plan import Plan
from ..plan.preference import PlanPreference
from ..prepare import descriptor as prepare_descriptors
from ..prepare import plan as prepare_plans
from ..prepare.kernel_table import PACKED_ELEMENTS
from ..vocab import DeviceProperties, ElementKind, EpilogueKind, GemmOp
from .options import (
    AsJson,
    BackendOption,
    DeviceOption,
    ElementsOption,
    EpiloguesOption,
    RequireOption,
    WeightShapesOption,
    preference_of,
    shape_of,
    tokens_of,
    usage_checked,
    word_option,
)
from .output import emit, progress, reported
from .tables import Column, Json, show_line, show_table, size_text

Job = tuple[type[Plan], Descriptor, PlanPreference]
_PREPARING = (
    (prepare_plans.PruneSparse24Plan, prepare_descriptors.PruneSparse24Descriptor),
    (prepare_plans.CompressSparse24Plan, prepare_descriptors.CompressSparse24Descriptor),
    (prepare_plans.PruneCompressSparse24Plan, prepare_descriptors.PruneCompressSparse24Descriptor),
    (prepare_plans.DecompressSparse24Plan, prepare_descriptors.DecompressSparse24Descriptor),
    (prepare_plans.PackSparse24Plan, prepare_descriptors.PackSparse24Descriptor),
)


def warmup(
    n: Annotated[str, typer.Option("--n", metavar="N,N,...", help="Numbers of tokens that you serve.")],
    shape: WeightShapesOption,
    element: ElementsOption = None,
    epilogue: EpiloguesOption = None,
    op: Annotated[
        list[GemmOp] | None,
        word_option(
            known=GemmOp, meaning="The product, or the gradient of X; repeatable, forward by default."
        ),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Also the kernels that prune, compress, decompress and pack.")
    ] = False,
    device: DeviceOption = "auto",
    arch: Annotated[
        list[str] | None,
        word_option(
            "--arch", known=GPUS, meaning="A GPU that needn't be here, instead of --device; repeatable."
        ),
    ] = None,
    require: RequireOption = None,
    backend: BackendOption = None,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels that plans would use into the kernel cache.

    Needs NVRTC, and a GPU unless --arch names one. The exit code is 1 if a problem has no kernel.
    """
    if arch and device is not None:
        raise typer.BadParameter("--arch and --device exclude each other")
    jobs = _jobs(n, shape, element or [ElementKind.BF16], epilogue, op, preference_of(require, backend))
    if prepare:
        jobs += list(_preparing(shape, element or [ElementKind.BF16]))
    with reported(as_json):
        places = [absent_gpu(one) for one in arch] if arch else [_here(device)]
        load_nvrtc()
        document = _warm_up(list(product(places, jobs)), quiet=as_json)
        emit(document, _show, as_json=as_json)
    if any(one["kernel"] is None for one in document["results"]):
        raise typer.Exit(1)


def _here(device: int | str | None) -> DeviceProperties:
    properties = resolve("cuda" if device is None else device)
    if properties == HOST_PROPERTIES:
        raise UnsupportedError(
            "device: expected a CUDA device, got the host, which compiles nothing; "
            "name a GPU that isn't here by --arch"
        )
    return properties


def _jobs(
    tokens: str,
    shapes: Sequence[str],
    elements: Sequence[ElementKind],
    epilogues: Sequence[EpilogueKind] | None,
    ops: Sequence[GemmOp] | None,
    preference: PlanPreference,
) -> list[Job]:
    """One product for each combination. The gradient has no epilogue."""
    cases = product(
        elements,
        ops or (GemmOp.FORWARD,),
        epilogues or (EpilogueKind.IDENTITY,),
        (shape_of(shape) for shape in shapes),
        tokens_of(tokens),
    )
    with usage_checked("--n, --shape, --element, --epilogue, --op: "):
        problems = dict.fromkeys(
            GemmSparse24Descriptor(
                n=n,
                m=m,
                k=k,
                element=element,
                op=op,
                epilogue=epilogue if op is GemmOp.FORWARD else EpilogueKind.IDENTITY,
            )
            for element, op, epilogue, (m, k), n in cases
        )
    return [(GemmSparse24Plan, problem, preference) for problem in problems]


def _preparing(shapes: Sequence[str], elements: Sequence[ElementKind]) -> Iterator[Job]:
    for element, shape, (plan, descriptor) in product(elements, shapes, _PREPARING):
        if plan is prepare_plans.PackSparse24Plan and element not in PACKED_ELEMENTS:
            continue
        m, k = shape_of(shape)
        yield plan, descriptor(m=m, k=k, element=element), PlanPreference()


def _warm_up(work: Sequence[tuple[DeviceProperties, Job]], *, quiet: bool) -> Json:
    results, seen = [], dict[Any, CompiledKernel]()
    with progress("compiling", len(work), quiet) as advance:
        for device, (plan, descriptor, preference) in work:
            result: Json = {
                "device": str(device),
                "op": descriptor.op_name,
                "problem": descriptor.model_dump(mode="json"),
                "kernel": None,
                "reason": None,
                "compiled": [],
            }
            try:
                kernels = plan.compile(descriptor, preference=preference, device=device)
                explanation = plan.explain_choice(descriptor, preference=preference, device=device)
                result["kernel"] = explanation.chosen
                result["compiled"] = [_document(kernel) for kernel in kernels]
                for kernel in kernels:
                    seen.setdefault(kernel.path, kernel)
            except (UnsupportedError, BackendUnavailableError) as error:
                result["reason"] = str(error)
            results.append(result)
            advance(1)
    fresh = [kernel.seconds for kernel in seen.values() if kernel.seconds is not None]
    return {
        "folder": str(cache_folder()),
        "kernels": len(seen),
        "compiled": len(fresh),
        "seconds": sum(fresh),
        "nbytes": sum(kernel.nbytes for kernel in seen.values()),
        "results": results,
    }


def _document(kernel: CompiledKernel) -> Json:
    return {
        "source": kernel.source,
        "arch": kernel.arch,
        "file": kernel.path.name,
        "nbytes": kernel.nbytes,
        "seconds": kernel.seconds,
    }


def _show(document: Json) -> None:
    """Show each compiled kernel, the total, and each problem that no kernel serves."""
    kernels = {
        (one["arch"], one["file"]): {**one, "kernel": result["kernel"]}
        for result in reversed(document["results"])
        for one in result["compiled"]
        if one["seconds"] is not None
    }
    columns = (
        Column("kernel", "kernel"),
        Column("source", "source"),
        Column("for", "arch"),
        Column("size", lambda one: size_text(one["nbytes"]), right=True),
        Column("seconds", lambda one: f"{one['seconds']:.2f}", right=True),
    )
    show_table(columns, sorted(kernels.values(), key=lambda one: (one["arch"], one["source"], one["file"])))
    there = document["kernels"] - document["compiled"]
    show_line(
        f"{document['compiled']} kernels compiled in {document['seconds']:.1f} s, {there} were there: "
        f"{size_text(document['nbytes'])} in {document['folder']}"
    )
    for result in document["results"]:
        if result["reason"] is not None:
            problem = result["problem"]
            sizes = " ".join(f"{name}={problem[name]}" for name in ("n", "m", "k") if name in problem)
            show_line(
                f"not served on {result['device']}: {result['op']} {problem['element']} {sizes}: "
                f"{result['reason']}",
                "red",
            )
