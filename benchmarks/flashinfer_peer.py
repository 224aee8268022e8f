"""FlashInfer's attention over kept blocks, a peer of forward passes, if flashinfer-python is installed.

Its wrapper for heads with blocks of their own has three kernels. ``fa2`` and ``fa3`` gather single tokens.
``cake``, which the wrapper never chooses by itself, serves blocks of 64, and few of them in a row. Version
0.7.4 was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from sparse24_plans.bench.peers import torch

try:
    flashinfer: Any = import_module("flashinfer")
    import_module("flashinfer.sparse")
except ImportError:
    flashinfer = None

BACKENDS = ("fa2", "fa3", "cake")
HEAD_SIZE = 128
"""The only head size that is timed, which is that of the published times."""
_CAKE_BLOCK = 64
_WORKSPACE_BYTES = 384 << 20


def forward(
    backend: str, read: Mapping[str, Any], bitmap: np.ndarray[Any, np.dtype[np.bool_]], block: int
) -> tuple[Callable[[], object], Any] | None:
    """A pass over ``q``, ``k`` and ``v`` [1, heads, tokens, head_size], and its result.

    None if ``cake`` refuses a row of many blocks, for another head size, and for a layout with an empty block
    row, whose result FlashInfer doesn't define.
    """
    q, k, v = (read[name][0] for name in "qkv")
    heads, _, head_size = q.shape
    if flashinfer is None or head_size != HEAD_SIZE or not bitmap.any(-1).all():
        return None
    if backend == "cake" and block > _CAKE_BLOCK:
        bitmap = bitmap.repeat(block // _CAKE_BLOCK, 1).repeat(block // _CAKE_BLOCK, 2)
        block = _CAKE_BLOCK
    sizes = torch.full(bitmap.shape[:2], block, dtype=torch.int32, device=q.device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.sparse.VariableBlockSparseAttentionWrapper(workspace, backend=backend)
    kept = torch.tensor(bitmap, device=q.device)
    try:
        wrapper.plan(kept, sizes, sizes, heads, heads, head_size, q_data_type=q.dtype)
    except ValueError as error:
        if backend != "cake" or "blocks" not in str(error):
            raise
        return None  # a row has too many blocks
    out = torch.full_like(q, float("nan"))
    return lambda: wrapper.run(q, k, v, out=out.view(-1, 1, head_size)), out
