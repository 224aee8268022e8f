"""The ``variants`` rows of a record: beta * C, and a single batch, beside the plain product, each alone."""

from __future__ import annotations

from typing import Any

from ..tuning.data import Matrix
from ..vocab import ElementKind
from .gemm import Row
from .own import contender, rows_beside
from .scope import LLAMA_8B

SHAPES = LLAMA_8B
TOKENS = (64, 256, 2048, 8192)
ELEMENTS = (ElementKind.BF16, ElementKind.FP8_E4M3)
VARIANTS: dict[str, dict[str, Any]] = {"beta": {"beta": 1.0}, "batch": {"batches": 1}}
"""Fields of each variant's descriptor."""


def measured(matrix: Matrix, n: int, sources: set[str]) -> list[Row]:
    """The rows of one shape and n. Adds to ``sources`` what was timed."""
    plain = contender(matrix, n, "plain", sources)
    others = [contender(matrix, n, name, sources, **fields) for name, fields in VARIANTS.items()]
    about = {"m": matrix.m, "k": matrix.k, "n": n, "element": matrix.element.value}
    return rows_beside(plain, others, about, "variant", "plain_us")
