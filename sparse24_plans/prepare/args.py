"""Arguments of plans that prepare weights: the operands that callers pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.operands import Args
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import PackedWeight, Sparse24Weight


@dataclass(frozen=True, slots=True)
class PruneSparse24Args(Args):
    """``dense`` [M, K] is read. Written: ``pruned`` [M, K], ``mask`` uint8 [M, K/8], or both.

    ``pruned`` is +0 where nothing is kept, and may be ``dense`` itself. Cell 8j + i of a row is bit i of byte
    j of the mask. ``scores`` [M, K] exactly when the descriptor has them.
    """

    dense: Any
    pruned: Any = None
    mask: Any = None
    scores: Any = None


@dataclass(frozen=True, slots=True)
class CompressSparse24Args(Args):
    """``dense`` [M, K] is 2:4. Written: ``values`` [M, K/2], ``metadata`` uint16 [M, K/8], ``status``.

    ``status``, uint8 [8], lies at a multiple of 8 bytes; ``plan.check`` reads it.
    """

    dense: Any
    values: Any
    metadata: Any
    status: Any


@dataclass(frozen=True, slots=True)
class PruneCompressSparse24Args(Args):
    """``dense`` [M, K], and ``scores`` [M, K] exactly when the descriptor has them, are read.

    Written: ``values`` [M, K/2] and ``metadata`` uint16 [M, K/8].
    """

    dense: Any
    values: Any
    metadata: Any
    scores: Any = None


@dataclass(frozen=True, slots=True)
class DecompressSparse24Args(Args):
    """``weight`` is a Sparse24Weight; ``dense`` [M, K] is written, +0 at the pruned positions."""

    weight: Sparse24Weight
    dense: Any


@dataclass(frozen=True, slots=True)
class PackSparse24Args(Args):
    """``weight`` is a Sparse24Weight; ``packed`` uint8 [Mt, Kt, tile bytes] is written (packing.py)."""

    weight: Sparse24Weight
    packed: Any


@dataclass(frozen=True, slots=True)
class UnpackSparse24Args(Args):
    """``packed`` is a PackedWeight. Written: ``values`` [M, K/2], ``metadata`` uint16 [M, K/8], ``status``.

    ``status``, uint8 [8], lies at a multiple of 8 bytes; ``plan.check`` reads it.
    """

    packed: PackedWeight
    values: Any
    metadata: Any
    status: Any


@dataclass(frozen=True, slots=True)
class TilePruneSparse24Args(Args):
    """``dense`` [M, K] is read; all else is written.

    ``values`` [M, K/2] and ``metadata`` uint16 [M, K/8] of W; ``values_t`` [K, M/2] and ``metadata_t`` uint16
    [K, M/8] of W^T; ``mask`` uint8 [M/8, K/8, 8] in the layout ``tiles``.
    """

    dense: Any
    values: Any
    metadata: Any
    values_t: Any
    metadata_t: Any
    mask: Any


@dataclass(frozen=True, slots=True)
class QuantizeSparse24Args(Args):
    """``x`` [M, K] is read, and ``quantized`` [M, K] written; their rows may lie apart.

    ``scale``, float32, is written as [M], or read as [1] if the descriptor has a static scale.
    """

    x: Any
    quantized: Any
    scale: Any


@dataclass(frozen=True, slots=True)
class PruneQuantizeSparse24Args(Args):
    """``dense`` [M, K], and ``scores`` [M, K] exactly when the descriptor has them, are read.

    Written: ``values``, uint8 [M, K/4] for ``s4``, else [M, K/2]; ``metadata`` uint16 [M, K/8]; ``scales``
    [M, groups]. ``status``, uint8 [8] at a multiple of 8 bytes, exactly when W is 2:4 already;
    ``plan.check`` reads it.
    """

    dense: Any
    values: Any
    metadata: Any
    scales: Any
    scores: Any = None
    status: Any = None


@dataclass(frozen=True, slots=True)
class DequantizeSparse24Args(Args):
    """``weight`` is a Sparse24QuantizedWeight; ``dequantized`` [M, K/2], its kept values, is written."""

    weight: Sparse24QuantizedWeight
    dequantized: Any


@dataclass(frozen=True, slots=True)
class MaskSparse24Args(Args):
    """``masked`` [M, K] = ``dense`` [M, K] (a gradient, say) where ``mask`` has a one, +0 elsewhere.

    ``mask`` is uint8, [M, K/8] or [M/8, K/8, 8] by the descriptor's layout. ``masked`` may be ``dense``
    itself.
    """

    dense: Any
    mask: Any
    masked: Any
