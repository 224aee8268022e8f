"""The ``epilogues`` rows of a record: a gate and some activations beside the plain product, each alone."""

from __future__ import annotations

from ..tuning.data import Matrix
from ..vocab import ElementKind, EpilogueKind
from .gemm import Row
from .own import contender, rows_beside

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


def measured(matrix: Matrix, n: int, sources: set[str]) -> list[Row]:
    """The rows of one shape and n. Adds to ``sources`` what was timed."""
    kinds = (EpilogueKind.IDENTITY, *EPILOGUES)
    plain, *others = (contender(matrix, n, kind.value, sources, epilogue=kind) for kind in kinds)
    about = {"m": matrix.m, "k": matrix.k, "n": n, "element": matrix.element.value}
    return rows_beside(plain, others, about, "epilogue", "identity_us")
