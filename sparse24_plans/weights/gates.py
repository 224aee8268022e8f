"""The order of W's rows for gated epilogues, which make one result of two rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device.tensors import wrong
from ..vocab import integer

GATE_ROWS = 8
"""Number of adjacent rows of gates, which alternate with as many rows of ``up``."""
GATE_GROUP = 2 * GATE_ROWS
"""Adjacent rows of gate and of up together; M is a multiple."""
MAX_ROWS = (1 << 31) - GATE_GROUP
"""Largest M, because kernels count rows in 31 bits."""


def gated_rows(m: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of rows of ``[gate, up]``, one matrix below the other, in W of a gated epilogue: int64 [M].

    ``m``: M, the rows of both together, a multiple of 16. ``np.concatenate([gate, up])[gated_rows(m)]`` is W;
    bias and row scales are reordered alike. Any array type that takes NumPy's index arrays will do, and so
    will a checkpoint's ``gate_up_proj``. Rows 16 j to 16 j + 7 of W are rows 8 j to 8 j + 7 of gate, rows
    16 j + 8 to 16 j + 15 are rows 8 j to 8 j + 7 of up. A shard of W, cut along M at multiples of 16, so
    has a range of the features.

    Raises InvalidProblemError naming ``m``.
    """
    rows = integer(m)
    if rows is None or not 0 <= rows <= MAX_ROWS or rows % GATE_GROUP:
        raise wrong("m", f"a multiple of {GATE_GROUP} below 2^31", m)
    features = np.arange(rows // 2, dtype=np.int64).reshape(-1, GATE_ROWS)
    return np.stack([features, features + rows // 2], axis=1).reshape(rows)
