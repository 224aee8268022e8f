"""Epilogues of the tensor cores round step by step: the compiler contracts nothing and flushes nothing.

In PTX, since that is where contraction is decided: a ``mul.rn`` is never part of an fma.
"""

from __future__ import annotations

import re

import pytest

from sparse24_plans import GemmSparse24Descriptor, PlanPreference
from sparse24_plans.device.jit import compiler
from sparse24_plans.plan.kernel import Choice

from ..gemm.kernel_entries import row_of
from .requests import device_of, recorded_loads

ARITHMETIC = re.compile(r"^\s*(?:@!?%p\d+\s+)?((?:fma|mad|mul|div|add|sub)\.[a-z.0-9]*f32)", re.MULTILINE)
CASES = [
    *((row, "bf16") for row in ("wgmma_sp", "wgmma_sp_invariant", "mma_sp_many")),
    ("wgmma_sp_s8", "s8"),
    ("wgmma_sp_fp8", "fp8_e4m3"),
    ("wgmma_sp_fp8_promoted", "fp8_e4m3"),
]


@pytest.mark.parametrize(("row", "element", "n"), [*((*case, 16) for case in CASES), (*CASES[0], 300)])
def test_no_step_is_contracted(row, element, n):
    scales = {"scale_x": "row", "scale_w": "row"} if row_of(row).scales else {}
    problem = {"n": n, "m": 4096, "k": 4096, "element": element, "out_element": "f32", "alpha": 0.7}
    desc = GemmSparse24Descriptor(**problem, **scales, epilogue="bias_relu")
    kernel = row_of(row).kernel
    with recorded_loads(kernel) as requests:
        kernel(Choice(desc, device_of((9, 0)), row_of(row), PlanPreference(), {}))
    (request,) = requests
    flags = [
        flag
        for flag in compiler.options(request.arch, dict(request.defines))
        if not flag.startswith("--ptxas")
    ]
    ptx, _ = compiler._compile(compiler.closure(request.source), flags, "getPTX", row)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    found = set(ARITHMETIC.findall(text))
    assert found <= {"add.f32", "add.rn.f32", "mul.rn.f32"}
    assert "mul.rn.f32" in found
    assert ".ftz" not in text
