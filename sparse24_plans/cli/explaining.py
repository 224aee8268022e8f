"""``sparse24 info`` and ``explain``: the kernels that can serve here, and the one for a problem."""

from __future__ import annotations

import inspect
import json
import math
import platform
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import _version
from ..device.devices import GPUS, HOST_PROPERTIES, absent_gpu, cuda_device_count, cuda_properties
from ..device.install import import_cupy
from ..errors import BackendUnavailableError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.kernel_table import ENTRIES, GemmEntry
from ..gemm.plan import GemmSparse24Plan
from ..gemm.tuned import TuningTable
from ..plan import plan as planning
from ..plan.arithmetic import Arithmetic
from ..plan.kernel import Choice
from ..plan.preference import PlanPreference
from ..vocab import DeviceProperties, ElementKind, EpilogueKind, GemmOp, MatrixOrder, ScaleKind, Tier
from ..weights import host_code
from .options import (
    ELEMENTS,
    AsJson,
    BackendOption,
    DeviceOption,
    RequireOption,
    hint,
    preference_of,
    put_once,
    usage_checked,
    word_option,
)
from .output import emit, reported
from .tables import Column, Json, grouped, plain, show_line, show_table

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
Beta = Annotated[float, typer.Option("--beta", metavar="X", help="Factor of C, which is added; 0: no C.")]
CElement = Annotated[
    Any,
    word_option("--c-element", known=ELEMENTS, meaning="Type of C; by default the result's.", metavar="TYPE"),
]
ReluThreshold = Annotated[
    float, typer.Option("--relu-threshold", metavar="X", help="Below it, and at it, relu gives 0.")
]
ReluUpperBound = Annotated[
    float | None, typer.Option("--relu-upper-bound", metavar="X", help="The most that relu gives.")
]
ScaleX = Annotated[Any, word_option("--scale-x", known=ScaleKind, meaning="Factors of X.")]
ScaleW = Annotated[Any, word_option("--scale-w", known=ScaleKind, meaning="Factors of W.")]
XOrder = Annotated[Any, word_option("--x-order", known=MatrixOrder, meaning="What is contiguous in X.")]
YOrder = Annotated[Any, word_option("--y-order", known=MatrixOrder, meaning="What is contiguous in Y.")]
Groups = Annotated[
    int, typer.Option("--groups", min=0, metavar="G", help="Groups of tokens with weights of their own.")
]
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
        emit(environment(), _show_environment, as_json=as_json)


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
    beta: Beta = 0.0,
    c_element: CElement = None,
    relu_threshold: ReluThreshold = 0.0,
    relu_upper_bound: ReluUpperBound = None,
    scale_x: ScaleX = "none",
    scale_w: ScaleW = "none",
    x_order: XOrder = "row",
    y_order: YOrder = "row",
    groups: Groups = 0,
    field: Fields = None,
    device: DeviceOption = "auto",
    arch: Arch = None,
    require: RequireOption = None,
    prefer_backend: BackendOption = None,
    tier: TierOption = None,
    max_workspace_bytes: MaxWorkspace = None,
    allow_sm90a: Sm90a = True,
    tuning: Tuning = None,
    as_json: AsJson = False,
) -> None:
    """Say which kernel would serve a problem, and why.

    Shows its guarantees, error bound and workspace. The exit code is 1 if no kernel can serve.
    """
    if arch is not None and device is not None:
        raise typer.BadParameter("--arch and --device exclude each other")
    problem: dict[str, Any] = {"n": n, "m": m, "k": k, "element": element, "epilogue": epilogue, "op": op}
    problem |= {"alpha": alpha, "beta": beta, "groups": groups}
    problem |= {"relu_threshold": relu_threshold, "relu_upper_bound": relu_upper_bound}
    problem |= {"scale_x": scale_x, "scale_w": scale_w, "x_order": x_order, "y_order": y_order}
    chosen = {"out_element": out_element, "bias_element": bias_element, "c_element": c_element}
    problem |= {name: word for name, word in chosen.items() if word is not None}
    fields, wishes = (_fields_of(kind, field) for kind in _OTHER_FIELDS)
    with usage_checked():
        desc = GemmSparse24Descriptor(**problem, **fields)
        preference = preference_of(
            require,
            prefer_backend,
            tier=tier,
            max_workspace_bytes=max_workspace_bytes,
            allow_sm90a=allow_sm90a,
            **wishes,
        )
    with reported(as_json):
        table = None if tuning is None else TuningTable.load(tuning)
        place = device if arch is None else absent_gpu(arch)
        answer = _explain_problem(desc, preference, place, table)
        emit(answer, _show_explanation, as_json=as_json)
    raise typer.Exit(0 if answer["chosen"] else 1)


_OTHER_FIELDS = {
    kind: tuple(name for name in kind.model_fields if name not in inspect.signature(explain).parameters)
    for kind in (GemmSparse24Descriptor, PlanPreference)
}
"""The fields of a problem and of a preference that have no option of their own in ``explain``."""
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=VALUE",
        help="Any other field of a problem or a preference; repeatable. Names: "
        + ", ".join(name for names in _OTHER_FIELDS.values() for name in names)
        + ".",
    ),
]


def _fields_of(
    kind: type[GemmSparse24Descriptor] | type[PlanPreference], given: list[str] | None
) -> dict[str, Any]:
    """The fields of a problem, or of a preference, among the values of ``--field``."""
    found: dict[str, Any] = {}
    known = [name for names in _OTHER_FIELDS.values() for name in names]
    for item in given or ():
        name, _, text = item.partition("=")
        if name not in known or not text:
            raise typer.BadParameter(
                f"expected NAME=VALUE with one of {', '.join(known)}, got {item!r:.80}"
                + ("" if name in known else hint(name, known)),
                param_hint="'--field'",
            )
        if name in _OTHER_FIELDS[kind]:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):  # a word
                value = text
            put_once(found, name, value, "--field")
    return found


# The machine --------------------------------------------------------------------------------------

# A kernel may serve only some sizes. It is available if it serves one of these.
_PROBE_TOKENS = (16, 1, 512)
_PROBE_SIDE = 512


def environment() -> Json:
    """Versions, devices, and for every kernel whether it can serve here, or why not."""
    try:
        cupy, obstacle = import_cupy().__version__, None
    except BackendUnavailableError as error:
        cupy, obstacle = None, str(error)
    gpus = [cuda_properties(ordinal) for ordinal in range(cuda_device_count())] if cupy else []
    if cupy and not gpus:
        try:
            cuda_properties(0)
        except BackendUnavailableError as error:
            obstacle = str(error)
    return {
        "version": _version.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": cupy,
        **host_code.versions(),
        "devices": [gpu.model_dump(mode="json", exclude={"kind"}) for gpu in gpus],
        "no_device": obstacle,
        "kernels": [_availability(spec, gpus, obstacle) for spec in ENTRIES],
    }


def _availability(spec: GemmEntry, gpus: list[DeviceProperties], obstacle: str | None) -> Json:
    places = [HOST_PROPERTIES] if spec.on_host else gpus
    reason = _obstacle_on(spec, places) if places else obstacle
    return {
        "kernel": spec.name,
        "backend": spec.backend,
        "tier": spec.tier.value,
        "arch": spec.arch.value,
        "elements": [element.value for element in spec.elements],
        "available": reason is None,
        "reason": reason,
    }


def _obstacle_on(spec: GemmEntry, places: list[DeviceProperties]) -> str | None:
    """None if the kernel serves some problem on one of the places; else the first reason found."""
    reasons: list[str] = []
    first = spec.elements[0]
    require: dict[str, object] = {"arithmetic": str(Arithmetic.hopper(first, 1))} if spec.on_request else {}
    if spec.for_a_bound:
        require["max_error_bound"] = 1.0
    for place in places:
        for n in _PROBE_TOKENS:
            side, groups = _PROBE_SIDE, spec.least_groups
            desc = GemmSparse24Descriptor(n=n, m=side, k=side, element=first, op=spec.ops[0], groups=groups)
            rows = planning.explain(desc, preference={"require": require}, device=place).rows
            reason = next(why for name, _, why in rows if name == spec.name)
            if reason is None:
                return None
            reasons.append(reason)
    return reasons[0]


def _show_environment(about: Json) -> None:
    cupy = about["cupy"] or "not installed"
    numba = f"numba {about['numba']}" if about["numba"] else about["no_numba"]
    versions = f"python {about['python']}, numpy {about['numpy']}, cupy {cupy}, {numba}"
    show_line(f"sparse24_plans {about['version']} ({versions})")
    for gpu in about["devices"]:
        major, minor = gpu["compute_capability"]
        show_line(
            f"cuda:{gpu['ordinal']}: {gpu['name']}, compute capability {major}.{minor}, "
            f"{gpu['multiprocessors']} SMs, driver {gpu['driver']}, "
            f"cuBLASLt {gpu['cublaslt'] or 'not found'}, cuSPARSELt {gpu['cusparselt'] or 'not found'}"
        )
    reasons = dict.fromkeys(row["reason"] for row in about["kernels"] if row["reason"] is not None)
    notes = {reason: number for number, reason in enumerate(reasons, 1)}
    if not about["devices"]:
        show_line(f"no GPU ({notes[about['no_device']]})")

    def here(row: Json) -> object:
        return plain("yes", "green") if row["available"] else f"no ({notes[row['reason']]})"

    def elements(row: Json) -> str:
        return ", ".join(row["elements"]).replace("fp8_e4m3, fp8_e5m2", "fp8")

    columns = (
        Column("kernel", "kernel"),
        Column("tier", "tier"),
        Column("arch", "arch"),
        Column("here", here),
        Column("elements", elements, prose=True),
    )
    show_line()
    show_table(columns, about["kernels"])
    for reason, number in notes.items():
        show_line(f"({number}) {reason}")


# Problems -----------------------------------------------------------------------------------------


def _explain_problem(
    desc: GemmSparse24Descriptor,
    preference: PlanPreference,
    device: int | str | DeviceProperties | None,
    tuning: TuningTable | None = None,
) -> Json:
    """The choice for a problem, with guarantee, bound and workspace.

    On a device that is here the plan is made, so that a library's details and workspace are exact, too.
    """
    about = planning.explain(desc, preference=preference, device=device, tuning=tuning)
    answer: Json = {
        "descriptor": desc.model_dump(mode="json"),
        "device": about.device,
        "chosen": about.chosen,
        "details": about.details,
        "guarantee": None,
        "error_bound": None,
        "workspace_size": about.workspace_size,
        "workspace_is_exact": about.workspace_is_exact,
        "rows": [{"kernel": name, "backend": backend, "reason": why} for name, backend, why in about.rows],
    }
    if about.chosen is None:
        return answer
    if isinstance(device, DeviceProperties):
        entry = next(one for one in ENTRIES if one.name == about.chosen)
        guarantee = entry.promises(Choice(desc, device, entry, preference, {}))
    else:
        plan = GemmSparse24Plan.select(desc, preference=preference, device=device, tuning=tuning)
        guarantee = plan.guarantee
        answer["details"] = plan.explain().details
        answer["workspace_size"], answer["workspace_is_exact"] = plan.workspace_size(), True
    answer["guarantee"] = guarantee.model_dump(mode="json")
    answer["error_bound"] = guarantee.error_bound(desc.reduction)
    return answer


def _show_explanation(answer: Json) -> None:
    show_line(problem_text(answer["descriptor"]))
    show_line(f"device: {answer['device']}")
    chosen = next((row for row in answer["rows"] if row["kernel"] == answer["chosen"]), None)
    if chosen is None:
        show_line("no kernel can serve this problem", "bold red")
    else:
        show_line(f"chosen: {chosen['kernel']} (backend {chosen['backend']})", "bold green")
        show_line()
        show_table((Column("guarantee", "name"), Column("value", "value", prose=True)), _facts(answer))
    others = [row for row in answer["rows"] if row is not chosen]
    willing = [row["kernel"] for row in others if row["reason"] is None]
    show_line()
    if willing:
        show_line(f"these can serve it too, in order of preference: {', '.join(willing)}")
    refused = [
        {"reason": reason, "kernels": ", ".join(row["kernel"] for row in rows)}
        for reason, rows in grouped(others, "reason").items()
        if reason is not None
    ]
    if refused:
        show_line("these can't:")
    for row in refused:
        show_line(f"{row['kernels']}: {row['reason']}", indent=2)


_TOLD = (
    *("alpha", "beta", "relu_threshold", "relu_upper_bound", "x_order", "y_order"),
    *("groups", "group_tokens", "x_rows", "y_rows", "top_k"),
    *("batches", "shared_weight", "scale_y", "amax", "weight_group"),
)
_DEFAULTS: Json = {name: GemmSparse24Descriptor.model_fields[name].default for name in _TOLD}
_AS_ELEMENT = "x_element", "weight_element", "weight_scale_element"


def problem_text(desc: Json) -> str:
    """The problem in words, without fields that have their defaults."""
    words = [
        f"{desc['op']}: n={desc['n']} m={desc['m']} k={desc['k']}",
        f"{desc['element']} to {desc['out_element']}",
        f"epilogue {desc['epilogue']}",
    ]
    if EpilogueKind(desc["epilogue"]).has_bias:
        words[-1] += f" (bias {desc['bias_element']})"
    for name, default in _DEFAULTS.items():
        if desc[name] != default:
            words.append(f"{name} {desc[name]}")
    words += [f"{name} {desc[name]}" for name in _AS_ELEMENT if desc[name] != desc["element"]]
    if desc["beta"]:
        words.append(f"C {desc['c_element']}")
    words += [f"{name} {desc[name]}" for name in ("scale_x", "scale_w") if desc[name] != "none"]
    return ", ".join(words)


_SHOWN_APART = ("unit_roundoff", "terms_per_k", "promoted_every", "product_roundoff", "tanh_error")


def _facts(answer: Json) -> list[Json]:
    """The guarantee and the workspace of the chosen kernel, in words."""
    guarantee = answer["guarantee"]
    facts = {name: _words(value) for name, value in guarantee.items() if name not in _SHOWN_APART}
    facts["arithmetic"] = guarantee["arithmetic"] or "has no name"
    if answer["error_bound"] == 0:
        facts["error"] = "none but rounding y: the sum is exact"
    else:
        facts["error bound c"] = f"{answer['error_bound']:.2e}: |y - exact| <= c * sum|x||w|, and rounding y"
        facts["rounding errors"] = _steps(guarantee)
    more = "" if answer["workspace_is_exact"] else " at most: the plan on the GPU itself says"
    unknown = answer["workspace_size"] is None
    facts["workspace"] = "unknown" if unknown else f"{answer['workspace_size']} bytes{more}"
    if answer["details"]:
        facts["details"] = answer["details"]
    return [{"name": name, "value": value} for name, value in facts.items()]


def _steps(guarantee: Json) -> str:
    often = f"{guarantee['terms_per_k']:g} for each column of K"
    if guarantee["promoted_every"]:
        often += f"; every {guarantee['promoted_every']} columns are added up in float32"
    if guarantee["product_roundoff"]:
        often += f"; of {power_of_two(guarantee['product_roundoff'])}, once a product"
    if guarantee["tanh_error"]:
        often += f"; of {power_of_two(guarantee['tanh_error'])}, once a tanh"
    return f"of {power_of_two(guarantee['unit_roundoff'])}, {often}"


def power_of_two(value: float) -> str:
    """A power of two as ``2^-24``, any other number in three digits."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{value:.3g}"


def _words(value: object) -> object:
    return ("no", "yes")[value] if isinstance(value, bool) else value
