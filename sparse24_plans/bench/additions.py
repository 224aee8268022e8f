"""Products with something added, beside the plain product: a record's ``epilogues`` and ``variants``.

``epilogues`` has every activation and gate, and a bias; ``variants`` has beta * C, and a single batch. Each
is what select chooses, alone in a steady state, its result checked before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from .scope import LLAMA_8B
from .steady import MANY_TOKENS, time_alone

SHAPES = LLAMA_8B
TOKENS = (64, 256, 2048, 8192)
ELEMENTS = (ElementKind.BF16, ElementKind.FP8_E4M3)
EPILOGUES = tuple(
    kind
    for kind in EpilogueKind
    if kind is EpilogueKind.BIAS or not (kind is EpilogueKind.IDENTITY or kind.has_bias)
)
ADDITIONS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "epilogues": ("epilogue", "identity_us", {kind.value: {"epilogue": kind} for kind in EPILOGUES}),
    "variants": ("variant", "plain_us", {"beta": {"beta": 1.0}, "batch": {"batches": 1}}),
}
"""For each list of a record: the field with an addition's name, the field with the plain product's time, and
the descriptor's fields of each addition by its name."""
_WORST_ERROR = 0.02
_CHECKED = 4
"""Rows of a result that are compared with float64."""


def measured(part: str, matrix: Matrix, n: int, sources: set[str]) -> list[Row]:
    """Return a row for each addition of a list, for one shape and n. Adds to ``sources`` what was timed."""
    field, plain_us, additions = ADDITIONS[part]
    plain = _contender(matrix, n, "plain", sources)
    others = [_contender(matrix, n, name, sources, **fields) for name, fields in additions.items()]
    times = time_alone([plain, *others])
    rows = []
    for name in additions:
        row: Row = {"m": matrix.m, "k": matrix.k, "n": n, "element": matrix.element.value, field: name}
        row |= {"us": rounded(times[name].us), plain_us: rounded(times["plain"].us)}
        if n >= MANY_TOKENS:
            row |= times[name].fields() | times["plain"].fields(plain_us)
        rows.append(row)
    return rows


def _contender(matrix: Matrix, n: int, name: str, sources: set[str], **fields: Any) -> Contender:
    """The contender ``name``, whose descriptor has ``fields``: an epilogue, beta, a single batch.

    Adds to ``sources`` what it launches. Raises UnsupportedError for a wrong result.
    """
    desc = GemmSparse24Descriptor(n=n, m=matrix.m, k=matrix.k, element=matrix.element, **fields)
    problem, plan = Problem(desc, matrix), GemmSparse24Plan.select(desc, device=0)
    bias = random_bits((1, matrix.m), desc.bias_element, seed=~n - 1)[0] if desc.epilogue.has_bias else None
    c = random_bits((n, desc.outputs), desc.c_element, seed=~n - 2) if desc.has_c else None
    space = problem.workspace(plan)
    bound = [
        plan.bind(_arguments(problem, packed, bias, c), workspace=space) for packed in matrix.packed(plan)
    ]
    cupy = import_cupy()
    problem.poison()
    bound[0].launch(cupy.cuda.Stream.null.ptr)
    cupy.cuda.Device().synchronize()
    rows = slice(0, _CHECKED)
    sums = widened(problem.x[rows], desc.element) @ widened(matrix.dense[0], desc.element).T
    exact = cupy.asnumpy(sums).astype(np.float32)
    if c is not None:
        exact += np.float32(desc.beta) * cupy.asnumpy(widened(c[rows], desc.c_element, np.float32))
    added = None if bias is None else cupy.asnumpy(widened(bias, desc.bias_element, np.float32))
    exact = apply_epilogue(exact, 1.0, added, desc.epilogue)
    got = cupy.asnumpy(widened(problem.y[rows], desc.out_element))
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    if not error <= _WORST_ERROR:
        raise UnsupportedError(f"{name} {desc}: relative error {error:.3g}, not recorded")
    sources.update(sources_of(plan))
    return Contender(name, [one.launch for one in bound])


def _arguments(problem: Problem, packed: Any, bias: Any, c: Any) -> Any:
    """Arguments with a bias and C, in batches if the problem has them."""
    desc, given = problem.desc, problem.arguments(packed)
    bits = {"x": (problem.x, desc.element), "y": (problem.y, desc.out_element)}
    bits |= {"bias": (bias, desc.bias_element), "c": (c, desc.c_element)}
    found: dict[str, Any] = {}
    for name, (one, element) in bits.items():
        if one is not None:
            found[name] = typed(one if desc.batches is None else one[None], element)
    return replace(given, **found)
