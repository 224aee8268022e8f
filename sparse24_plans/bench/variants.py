"""The ``variants`` rows of a record: beta * C, and a single batch, beside the plain product, each alone."""

from __future__ import annotations

from typing import Any

from ..tuning.data import Matrix
from ..vocab import ElementKind
from .gemm import Row, rounded
from .own import contender
from .scope import LLAMA_8B
from .steady import MANY_TOKENS, time_alone

SHAPES = LLAMA_8B
TOKENS = (64, 256, 2048, 8192)
ELEMENTS = (ElementKind.BF16, ElementKind.FP8_E4M3)
VARIANTS: dict[str, dict[str, Any]] = {"beta": {"beta": 1.0}, "batch": {"batches": 1}}
"""Fields of each variant's descriptor."""


def measured(matrix: Matrix, n: int, sources: set[str]) -> list[Row]:
    """The rows of one shape and n. Adds to ``sources`` what was timed."""
    plain = contender(matrix, n, "plain", sources)
    others = [contender(matrix, n, name, sources, **fields) for name, fields in VARIANTS.items()]
    times = time_alone([plain, *others])
    about = {"m": matrix.m, "k": matrix.k, "n": n, "element": matrix.element.value}
    rows = []
    for one in others:
        row = {"variant": one.name, **about, "us": rounded(times[one.name].us)}
        row["plain_us"] = rounded(times[plain.name].us)
        if n >= MANY_TOKENS:
            row |= times[one.name].fields() | times[plain.name].fields("plain_us")
        rows.append(row)
    return rows
