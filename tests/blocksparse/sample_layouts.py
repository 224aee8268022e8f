"""Layouts that the tests of the family share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from sparse24_plans import BlockSparseLayout


def random_layout(
    seed: int = 0, heads: int = 2, rows: int = 3, cols: int = 4, block: int = 16, density: float = 0.5
) -> BlockSparseLayout:
    """``rows`` and ``cols`` count blocks."""
    rng = np.random.default_rng(seed)
    return BlockSparseLayout(rng.random((heads, rows, cols)) < density, block)


def _edges() -> dict[str, np.ndarray]:
    some = np.random.default_rng(3).random((2, 4, 4)) < 0.4
    gaps = np.ones((2, 3, 5), bool)
    gaps[:, 1], gaps[:, :, 3], gaps[1, 0] = False, False, False
    return {
        "all": np.ones((2, 3, 4), bool),
        "none": np.zeros((2, 3, 4), bool),
        "one": np.ones((1, 1, 1), bool),
        "symmetric": some | some.transpose(0, 2, 1),
        "empty rows and columns": gaps,
        "no rows": np.zeros((2, 0, 4), bool),
        "no columns": np.zeros((2, 3, 0), bool),
        "no heads": np.zeros((0, 3, 4), bool),
        "uneven": np.triu(np.ones((3, 5, 6), bool)),
    }


EDGES = {name: BlockSparseLayout(bitmap, 16) for name, bitmap in _edges().items()}
"""Edge cases of layouts."""


@st.composite
def layouts(draw: st.DrawFn, most: int = 6) -> BlockSparseLayout:
    """Any layout of a few blocks."""
    shape = [draw(st.integers(0, size)) for size in (3, most, most)]
    seed, density = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    kept = np.random.default_rng(seed).random(shape) < density
    return BlockSparseLayout(kept, draw(st.sampled_from([16, 32, 64, 128])))
