"""The rows of the table under test: each is run as itself, whatever select would prefer to it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from sparse24_plans import ElementKind, GemmSparse24Descriptor, GemmSparse24Plan
from sparse24_plans.gemm.kernel_table import ENTRIES, GemmEntry

from ..support import Case, device_of_row, make_case, plan_of_row

gpu = pytest.mark.gpu
OWN = tuple(
    row.name for row in ENTRIES if row.backend != "cusparselt" and not row.on_request and not row.only_groups
)
"""The package's own kernels. The library's have sizes of their own: test_cusparselt.py; what runs on
request has test_named_arithmetics.py, and what serves groups alone test_grouped.py."""
MAX_TOKENS = {"mma_sp": 128}
"""The largest n of kernels that leave larger ones to others."""
BOTH_OPS = ("forward", "dgrad")
ELEMENTS = tuple(ElementKind(name) for name in ("f32", "f16", "bf16", "s8", "fp8_e4m3", "fp8_e5m2"))
FLOATS = tuple(element for element in ELEMENTS if element.unit_roundoff)


def row_of(name: str) -> GemmEntry:
    (row,) = (row for row in ENTRIES if row.name == name)
    return row


def plan_of(row: str, **problem: object) -> GemmSparse24Plan:
    """The row's plan of the problem with these fields."""
    plan = plan_of_row(row).select(GemmSparse24Descriptor(**problem), device=device_of_row(row))
    assert plan.kernel == row
    return plan


def on_host(name: str) -> bool:
    return device_of_row(name) == "host"


def marked(name: str, *values: object) -> object:
    """A parameter: the row's name and more values."""
    return pytest.param(name, *values, marks=[] if on_host(name) else [gpu])


every_row = pytest.mark.parametrize("row", [marked(name) for name in OWN])


def serves(name: str, desc: GemmSparse24Descriptor) -> bool:
    """Whether the row takes such a problem, whatever its size."""
    return desc.element in row_of(name).elements and row_of(name).refusal(desc) is None


def promising(
    flag: str,
    value: object = True,
    *,
    elements: Iterable[str] = ELEMENTS,
    ops: Iterable[str] = BOTH_OPS,
    epilogues: Iterable[str] = ("identity",),
) -> pytest.MarkDecorator:
    """Every row, element, op and epilogue for which the table promises this value."""
    found = []
    for name in OWN:
        for element in elements:
            for op in ops:
                for epilogue in epilogues if op == "forward" else ["identity"]:
                    fields = {"element": element, "op": op, "epilogue": epilogue}
                    desc = GemmSparse24Descriptor(n=1, m=8, k=16, **fields)
                    if serves(name, desc) and getattr(row_of(name).guarantee(desc), flag) == value:
                        found.append(marked(name, element, op, epilogue))
    assert found, f"no row promises {flag} = {value}"
    return pytest.mark.parametrize(("row", "element", "op", "epilogue"), found)


def case_of(
    row: str,
    *,
    seed: int = 0,
    pad: int = 0,
    dense: np.ndarray | None = None,
    x: np.ndarray | None = None,
    **problem: object,
) -> Case:
    """A case that this row runs, and no other."""
    case = make_case(GemmSparse24Descriptor(**problem), row=row, seed=seed, pad=pad, dense=dense, x=x)
    assert case.plan.explain().chosen == row
    assert case.plan.sku.backend == row_of(row).backend
    return case


def tokens(row: str, n: int) -> int:
    return min(n, MAX_TOKENS.get(row, n))


def medium(row: str) -> dict[str, int]:
    """Sizes at which a kernel has many CTAs, and the host is done soon."""
    return {"n": 6, "m": 48, "k": 96} if on_host(row) else {"n": tokens(row, 96), "m": 1024, "k": 2048}
