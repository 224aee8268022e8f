"""The operands of products, as callers give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.operands import Args
from ..weights.weight import PackedWeight, Sparse24Weight


@dataclass(frozen=True, slots=True)
class GemmSparse24Args(Args):
    """Operands of a ``forward`` plan. Tensors of any framework, on the plan's device.

    ``weight``: what ``plan.pack`` returned, or a canonical Sparse24Weight where the plan reads that.
    ``x`` [N, K] of the element; ``y`` [N, M], of a gated epilogue [N, M/2], of ``out_element``, written;
    ``bias`` [M] of ``bias_element`` exactly when the epilogue has one. Rows of x and y may be further apart
    than their width; in a ``column`` order it is their columns that are contiguous. ``scale_x``,
    ``scale_w``: f32, [1] for a scale of the tensor, [N] and [M] for one a row, exactly when the descriptor
    has them.
    """

    weight: Sparse24Weight | PackedWeight
    x: Any
    y: Any
    bias: Any = None
    scale_x: Any = None
    scale_w: Any = None


@dataclass(frozen=True, slots=True)
class DgradSparse24Args(Args):
    """Operands of a ``dgrad`` plan: ``dy`` [N, M] of the element is read, ``dx`` [N, K] is written.

    ``weight``: a canonical Sparse24Weight, or what ``plan.pack`` returned.

    A class of its own: where M == K, swapped operands would otherwise pass.
    """

    weight: Sparse24Weight | PackedWeight
    dy: Any
    dx: Any
