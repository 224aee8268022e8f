"""The tables in docs/guarantees.md that show what each kernel promises, read from the kernel table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from sparse24_plans.device.devices import HOST_PROPERTIES
from sparse24_plans.gemm.descriptor import GemmSparse24Descriptor
from sparse24_plans.gemm.kernel_table import ENTRIES, GemmEntry
from sparse24_plans.plan.arithmetic import Arithmetic
from sparse24_plans.plan.guarantee import PrecisionGuarantee
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.preference import PlanPreference
from sparse24_plans.vocab import FP8, DeviceProperties, ElementKind, EpilogueKind, GemmOp, MathPrecision

BITS = {
    "deterministic": "deterministic",
    "bit_stable_on_same_hardware": "same GPU",
    "batch_invariant": "batch",
    "bit_stable_across_hardware": "any device",
    "nonfinite": "nonfinite",
    "arithmetic": "arithmetic",
}
"""Fields about bits, with the heads of their columns."""
ERRORS = {
    "math_precision": "precision",
    "accumulator": "accumulator",
    "subnormals": "subnormals",
    "unit_roundoff": "u",
    "terms_per_k": "terms per k",
    "promoted_every": "promoted",
    "product_roundoff": "product",
    "tanh_error": "tanh",
}
"""Fields about errors, with the heads of their columns."""
_HOPPER = DeviceProperties(kind="cuda", compute_capability=(9, 0), multiprocessors=132)
_SHORT = dict.fromkeys(FP8, "fp8")
_Problem = tuple[ElementKind, GemmOp, EpilogueKind]


def guarantee_table() -> list[str]:
    """Return the lines of two Markdown tables: one about bits, and one about errors."""
    return [*_table(BITS), "", *_table(ERRORS)]


def _table(fields: dict[str, str]) -> list[str]:
    """Return a table with a row for each set of kernels that promise the same, grouped by tier."""
    lines = [_line(("kernel", *fields.values())), _line(["---"] * (len(fields) + 1))]
    for tier in dict.fromkeys(entry.tier for entry in ENTRIES):
        lines.append(_line((f"**{tier.replace('_', ' ')}**", *[""] * len(fields))))
        promises: dict[tuple[str, ...], list[str]] = {}
        for entry in (entry for entry in ENTRIES if entry.tier is tier):
            promises.setdefault(tuple(_cell(entry, field) for field in fields), []).append(f"`{entry.name}`")
        lines += [_line((", ".join(names), *cells)) for cells, names in promises.items()]
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(entry: GemmEntry, field: str) -> str:
    """Return the field's usual value, then the problems for which it has another value."""
    if field == "math_precision" and len(entry.elements) > 1:
        found = {element: _promise(entry, (element, *_PLAIN)).math_precision for element in entry.elements}
        if all(value is MathPrecision.of(element) for element, value in found.items()):
            return "the element's"
    first = ElementKind.BF16 if ElementKind.BF16 in entry.elements else entry.elements[0]
    usual = _text(entry, (first, *_PLAIN), field)
    parts = [usual]
    for where, problem in _variations(entry, first):
        if (other := _text(entry, problem, field)) == usual:
            continue
        if (where, other) == (_NOT_EXACT, "none"):
            parts[0] += "\\*"  # the page explains the star once for all kernels
        else:
            parts.append(f"{where}: {other}")
    return "; ".join(dict.fromkeys(parts))


_NOT_EXACT = "GELU and SiLU"
_PLAIN = (GemmOp.FORWARD, EpilogueKind.IDENTITY)


def _variations(entry: GemmEntry, first: ElementKind) -> Iterator[tuple[str, _Problem]]:
    """Yield problems that differ from the plain one in one respect, each with the name of that respect."""
    for element in entry.elements:
        if element is not first:
            yield _SHORT.get(element, str(element)), (element, *_PLAIN)
    if GemmOp.DGRAD in entry.ops:
        yield "`dgrad`", (first, GemmOp.DGRAD, EpilogueKind.IDENTITY)
    if EpilogueKind.BIAS_SILU in entry.epilogues:
        yield _NOT_EXACT, (first, GemmOp.FORWARD, EpilogueKind.BIAS_SILU)


def _text(entry: GemmEntry, problem: _Problem, field: str) -> str:
    value = getattr(_promise(entry, problem), field)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field == "math_precision" and len(entry.elements) > 1 and value.value in FP8:
        return "the element's"
    if field in ("unit_roundoff", "tanh_error") and value:
        mantissa, exponent = math.frexp(value)
        times = "" if mantissa == 0.5 else f"{4 * mantissa:g} * "
        return f"{times}2^-{(1 if not times else 2) - exponent}"
    if field == "product_roundoff":
        return f"{value:.3g}"
    if field == "arithmetic" and value is not None:
        return f"`{re.sub('slices=[0-9]+', 'slices=S', value)}`"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _promise(entry: GemmEntry, problem: _Problem) -> PrecisionGuarantee:
    """Return the promise on Hopper or the host. A kernel on request gets an arithmetic that it has."""
    element, op, epilogue = problem
    desc = GemmSparse24Descriptor(
        n=16, m=4096, k=4096, element=element, op=op, epilogue=epilogue, groups=entry.least_groups
    )
    name = str(Arithmetic.hopper(element, 1)) if entry.on_request else None
    preference = PlanPreference(require={"arithmetic": name})
    return entry.promises(Choice(desc, HOST_PROPERTIES if entry.on_host else _HOPPER, entry, preference, {}))
