"""The record of products of quantized weights: the grid's shapes, and random ones, with bf16 tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from sparse24_plans.bench import gemm
from sparse24_plans.bench.record import Lists, Record, Step
from sparse24_plans.bench.scope import SHAPES
from sparse24_plans.vocab import ElementKind
from sparse24_plans.weights.packed_layouts import Quantization
from sparse24_plans.weights.quantized_weight import STORED

_FIELDS = ("m", "k", "n", "element", "weight_element", "group", "backend")
LISTS: Lists = {"gemm": _FIELDS, "random": _FIELDS}
"""Products of the grid's shapes, and of random ones."""
TOKENS = (1, 8, 16, 32, 64, 128, 256, 2048)
GROUP = 128
RANDOM = 40
"""Random cells of each kind of stored values."""


def steps(seed: int, stored: Sequence[ElementKind] = STORED, tokens: Sequence[int] = TOKENS) -> list[Step]:
    """The measurements, the grid's first."""
    rng = random.Random(seed)
    grid = [step("gemm", one, m, k, n) for one in stored for m, k in SHAPES for n in tokens]
    return grid + [step("random", one, *drawn(rng)) for one in stored for _ in range(RANDOM)]


def drawn(rng: random.Random) -> tuple[int, int, int]:
    """M, K and N: ragged sizes, mostly of few tokens."""
    m, k = 8 * round(2 ** rng.uniform(6, 12)), 16 * round(2 ** rng.uniform(5, 10.5))
    return m, k, round(2 ** rng.uniform(0, 6 if rng.random() < 0.7 else 12))


def step(part: str, stored: ElementKind, m: int, k: int, n: int) -> Step:
    about = {"m": m, "k": k, "n": n, "weight_element": stored.value, "group": GROUP, "backend": "auto"}
    by = Quantization(stored, GROUP, ElementKind.BF16)
    return Step(part, about, partial(_measured, part, m, k, n, by))


def _measured(part: str, m: int, k: int, n: int, by: Quantization, sources: set[str]) -> Record:
    matrix = gemm.matrix_of(m, k, ElementKind.BF16, by)
    return {part: gemm.measured_quantized(matrix, n, sources)}
