"""The ``epilogues`` rows of a record: a gate and some activations beside the plain product, each alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ..arithmetic.epilogue import apply_epilogue
from ..device.install import import_cupy
from ..errors import UnsupportedError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..tuning.data import Matrix, Problem, random_bits, typed, widened
from ..tuning.timing import Contender
from ..vocab import ElementKind, EpilogueKind
from .gemm import Row, rounded
from .record import sources_of
from .steady import MANY_TOKENS, time_alone

SHAPE = (28672, 4096)
"""(M, K) of gate and up of Llama-3.1-8B."""
TOKENS = (1, 16, 64, 256, 2048, 8192)
ELEMENTS = (ElementKind.F16, ElementKind.BF16, ElementKind.FP8_E4M3)
EPILOGUES = (
    EpilogueKind.BIAS_SWIGLU,
    EpilogueKind.BIAS_SILU,
    EpilogueKind.BIAS_GELU,
    EpilogueKind.BIAS_RELU,
)
_WORST_ERROR = 0.02
_CHECKED = 4
"""Rows of a result that are compared with float64."""


def _contender(matrix: Matrix, n: int, epilogue: EpilogueKind, sources: set[str]) -> Contender:
    """The contender that select chooses, its result checked. Raises UnsupportedError for a wrong result."""
    desc = GemmSparse24Descriptor(n=n, m=matrix.m, k=matrix.k, element=matrix.element, epilogue=epilogue)
    problem, plan = Problem(desc, matrix), GemmSparse24Plan.select(desc, device=0)
    bits = random_bits((1, matrix.m), desc.bias_element, seed=n)[0] if epilogue.has_bias else None
    bias = None if bits is None else typed(bits, desc.bias_element)
    space = problem.workspace(plan)
    bound = [
        plan.bind(replace(problem.arguments(packed), bias=bias), workspace=space)
        for packed in matrix.packed(plan)
    ]
    cupy = import_cupy()
    problem.poison()
    bound[0].launch(cupy.cuda.Stream.null.ptr)
    cupy.cuda.Device().synchronize()
    rows = slice(0, _CHECKED)
    sums = widened(problem.x[rows], desc.element) @ widened(matrix.dense[0], desc.element).T
    added = None if bits is None else cupy.asnumpy(widened(bits, desc.bias_element, np.float32))
    exact = apply_epilogue(cupy.asnumpy(sums).astype(np.float32), 1.0, added, epilogue)
    got = cupy.asnumpy(widened(problem.y[rows], desc.out_element))
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    if not error <= _WORST_ERROR:
        raise UnsupportedError(f"{epilogue} {desc}: relative error {error:.3g}, not recorded")
    sources.update(sources_of(plan))
    return Contender(epilogue.value, [one.launch for one in bound])


def measured(matrix: Matrix, n: int, sources: set[str]) -> list[Row]:
    """The rows of one shape and n. Adds to ``sources`` what was timed."""
    make = partial(_contender, matrix, n, sources=sources)
    plain, *others = (make(kind) for kind in (EpilogueKind.IDENTITY, *EPILOGUES))
    times = time_alone([plain, *others])
    about = {"m": matrix.m, "k": matrix.k, "n": n, "element": matrix.element.value}
    identity = times[plain.name]
    rows = []
    for one in others:
        row = {**about, "epilogue": one.name, "us": rounded(times[one.name].us)}
        row["identity_us"] = rounded(identity.us)
        if n >= MANY_TOKENS:
            row |= times[one.name].fields() | identity.fields("identity_us")
        rows.append(row)
    return rows
