"""Problems that cuSPARSELt takes: n a multiple of 8 (16 for 8-bit elements), m and k of 16 (32)."""

from __future__ import annotations

import pytest

from sparse24_plans import GemmSparse24Descriptor, PlanPreference
from sparse24_plans._vendor import cusparselt_abi as abi

from ..support import Case, make_case

needs_cusparselt = [
    pytest.mark.gpu,
    pytest.mark.skipif(abi.version() is None, reason="cuSPARSELt is not installed"),
]
FORCED = PlanPreference(prefer_backend="cusparselt")
RESULTS = {"f16": ("f16",), "bf16": ("bf16",), "s8": ("i32", "s8", "f16", "bf16")}
RESULTS["fp8_e4m3"] = ("bf16", "f16", "f32")
PAIRS = [(element, out) for element, results in RESULTS.items() for out in results]
pairs = pytest.mark.parametrize(("element", "out"), PAIRS)
elements = pytest.mark.parametrize("element", RESULTS)


def row_for(element: str) -> str:
    return "cusparselt_fp8" if element == "fp8_e4m3" else "cusparselt"


def descriptor(element: str, out: str | None = None, **change: object) -> GemmSparse24Descriptor:
    """n=48, m=96, k=160; a bias of the type that the library takes; s8 results that round and saturate."""
    out = out or RESULTS[element][0]
    alpha = {"f16": 1 / 64, "s8": 1 / 256}.get(out, 0.75) if element == "s8" else 0.75
    fields = {"n": 48, "m": 96, "k": 160, "element": element, "out_element": out, "alpha": alpha}
    fields["bias_element"] = "f32" if out in ("i32", "s8") else out
    return GemmSparse24Descriptor(**{**fields, **change})


def case_of(desc: GemmSparse24Descriptor, **options: object) -> Case:
    """A case that the library's row runs, and no other."""
    return make_case(desc, row=row_for(desc.element), **options)


def medium(element: str = "bf16", **change: object) -> Case:
    return case_of(descriptor(element, n=96, m=1024, k=512, epilogue="bias_relu", **change))
