"""docs/guarantees.md's table of what each row promises, from the table of kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ..device.devices import HOST_PROPERTIES
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.kernel_table import ENTRIES, GemmEntry
from ..plan.arithmetic import Arithmetic
from ..plan.guarantee import PrecisionGuarantee
from ..plan.kernel import Choice
from ..plan.preference import PlanPreference
from ..vocab import DeviceProperties, ElementKind, EpilogueKind, GemmOp, MathPrecision

_BITS = "`test_bit_stable_in_other_processes`, `test_bit_stable_under_load_and_on_every_stream`"
_TESTS = {
    "math_precision": "`test_error_bound`: the bound that follows from it",
    "accumulator": "the same; i32 for s8",
    "deterministic": "`test_deterministic`",
    "bit_stable_on_same_hardware": _BITS,
    "batch_invariant": "`test_batch_invariant`",
    "bit_stable_across_hardware": "`test_bit_stable_across_hardware`; `test_gpu_equals_host...`",
    "subnormals": "`test_subnormals_are_preserved`",
    "nonfinite": "`test_nonfinite_at_pruned_positions_...`",
    "unit_roundoff": "`test_error_bound`",
    "terms_per_k": "`test_error_bound`; `test_the_bound_is_gamma_of_the_steps` in `tests/plan/`",
    "promoted_every": "`test_the_promoted_bound_hardly_grows_with_k`",
    "product_roundoff": "`test_error_bound`; `test_the_parts_of_a_number`",
    "arithmetic": "`test_on_hopper`, `test_the_slices_that_a_row_names_are_those_that_it_is_compiled_for`",
}
_HOPPER = DeviceProperties(kind="cuda", compute_capability=(9, 0), multiprocessors=132)
_SHORT = {ElementKind.FP8_E4M3: "fp8"}
_Problem = tuple[ElementKind, GemmOp, EpilogueKind]


def guarantee_table() -> list[str]:
    """Lines of Markdown: fields by rows; rows that promise the same share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for row in ENTRIES:
        columns.setdefault(tuple(_cell(row, field) for field in _TESTS), []).append(f"`{row.name}`")
    heads = [", ".join(names) for names in columns.values()]
    lines = [("", *heads, "test in `tests/gemm/`"), ("---",) * (len(heads) + 2)]
    for at, (field, test) in enumerate(_TESTS.items()):
        lines.append((f"`{field}`", *(cells[at] for cells in columns), test))
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(row: GemmEntry, field: str) -> str:
    """The field's value, and where it is another one."""
    if field == "math_precision" and len(row.elements) > 1:
        found = {element: _promise(row, (element, *_PLAIN)).math_precision for element in row.elements}
        if all(value is MathPrecision.of(element) for element, value in found.items()):
            return "the element's"
    first = ElementKind.BF16 if ElementKind.BF16 in row.elements else row.elements[0]
    usual = _text(row, (first, *_PLAIN), field)
    parts = [usual]
    for where, problem in _variations(row, first):
        if (other := _text(row, problem, field)) != usual:
            parts.append(f"{where}: {other}")
    return "; ".join(parts)


_PLAIN = (GemmOp.FORWARD, EpilogueKind.IDENTITY)


def _variations(row: GemmEntry, first: ElementKind) -> Iterator[tuple[str, _Problem]]:
    """Problems that differ from the plain one in one thing, and the word for it."""
    for element in row.elements:
        if element is not first:
            yield _SHORT.get(element, str(element)), (element, *_PLAIN)
    if GemmOp.DGRAD in row.ops:
        yield "`dgrad`", (first, GemmOp.DGRAD, EpilogueKind.IDENTITY)
    if EpilogueKind.BIAS_SILU in row.epilogues:
        yield "GELU and SiLU", (first, GemmOp.FORWARD, EpilogueKind.BIAS_SILU)


def _text(row: GemmEntry, problem: _Problem, field: str) -> str:
    value = getattr(_promise(row, problem), field)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field == "unit_roundoff" and value:
        mantissa, exponent = math.frexp(value)
        times = "" if mantissa == 0.5 else f"{4 * mantissa:g} * "
        return f"{times}2^-{(1 if not times else 2) - exponent}"
    if field == "product_roundoff":
        return f"{value:.3g}"
    if field == "arithmetic" and value is not None:
        return f"`{re.sub('slices=[0-9]+', 'slices=S', value)}`"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _promise(row: GemmEntry, problem: _Problem) -> PrecisionGuarantee:
    """On Hopper, or the host. Of a row on request: with an arithmetic that it runs."""
    element, op, epilogue = problem
    desc = GemmSparse24Descriptor(n=16, m=4096, k=4096, element=element, op=op, epilogue=epilogue)
    name = str(Arithmetic.hopper(element, 1)) if row.on_request else None
    preference = PlanPreference(require={"arithmetic": name})
    return row.promises(Choice(desc, HOST_PROPERTIES if row.on_host else _HOPPER, row, preference, {}))
