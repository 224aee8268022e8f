"""The operands that callers pass to gemm plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.operands import Args
from ..weights.weight import CanonicalWeight, PackedWeight


@dataclass(frozen=True, slots=True)
class GemmSparse24Args(Args):
    """Operands of a ``forward`` plan. Tensors of any framework, on the plan's device.

    ``weight`` is the result of ``plan.pack``, or a Sparse24Weight (a Sparse24QuantizedWeight for a quantized
    weight) if the plan reads the canonical form. ``x`` [N, K] has the type ``element``.
    ``y`` is written; it has the type ``out_element`` and the shape [N, M], or
    [N, M/2] for a gated epilogue. ``bias`` [M] has the type ``bias_element`` and is given exactly when the
    epilogue has a bias. Rows of x and y may be further apart than their width; in ``column`` order their
    columns are contiguous instead. ``scale_x`` and ``scale_w`` are f32: [1] for one scale of the tensor, [N]
    and [M] for one scale per row. They are given exactly when the descriptor has them. ``c`` [N, M] of the
    type ``c_element`` lies as y does, with a stride of its own, and is given exactly when beta isn't 0. It
    may be y itself: same address, strides and element size. With G groups the weight has G*M rows, as bias
    and a scale_w of rows have, and ``offsets`` i32[G+1] or ``counts`` i32[G] is given. ``scale_y`` and
    ``amax``, f32 [1], are given exactly when the descriptor has them; ``amax`` is raised, never lowered. If
    the descriptor has ``x_rows``, x is [x_rows, K], a scale_x of rows is [x_rows], and ``x_index`` i32[N] is
    given. If it has ``y_rows``, y is [y_rows, M] and ``y_index`` i32[y_rows, top_k] is given; ``y_weights``
    f32[y_rows, top_k] may be. For group_tokens ``experts``, the operand ``experts`` i32[n/top_k, top_k] takes
    the place of the offsets and of both indices.
    """

    weight: CanonicalWeight | PackedWeight
    x: Any
    y: Any
    bias: Any = None
    scale_x: Any = None
    scale_w: Any = None
    c: Any = None
    offsets: Any = None
    counts: Any = None
    experts: Any = None
    scale_y: Any = None
    amax: Any = None
    x_index: Any = None
    y_index: Any = None
    y_weights: Any = None


@dataclass(frozen=True, slots=True)
class DgradSparse24Args(Args):
    """Operands of a ``dgrad`` plan: ``dy`` [N, M] of the element is read, ``dx`` [N, K] is written.

    ``weight`` is a canonical Sparse24Weight, or the result of ``plan.pack``. The class differs from
    GemmSparse24Args because swapped operands would otherwise pass unnoticed if M == K. With G groups the
    weight has G*M rows, and ``offsets`` i32[G+1] or ``counts`` i32[G] is given. ``experts``, ``x_index``,
    ``y_index`` and ``y_weights`` are those of GemmSparse24Args, with dy as x and dx as y.
    """

    weight: CanonicalWeight | PackedWeight
    dy: Any
    dx: Any
    offsets: Any = None
    counts: Any = None
    experts: Any = None
    x_index: Any = None
    y_index: Any = None
    y_weights: Any = None
