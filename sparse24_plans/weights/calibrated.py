"""Prunes a weight to 2:4 by what its layer's inputs are. The arrays are NumPy's or PyTorch's, on any device.

A layer computes Y = X W^T. All that is used of its inputs X [N, K] is their moment X^T X [K, K]. The methods
are reimplemented from the publications that VENDOR.md names:

- ``magnitude`` keeps the two largest |w| of every four.
- ``wanda`` keeps the two largest |w| * ||x||, where ||x|| is the norm of the weight's input channel.
- ``sparsegpt`` goes through the columns in order. It keeps the two of every four whose loss would cost the
  output most, and moves the error of the other two to later columns. Then the kept weights are refined by
  conjugate gradients on ||X (W - W')^T||, which cannot raise that error.

Weights are quantized by rounding to nearest, or after ``sparsegpt`` as in GPTQ: in a second pass, each column
is rounded, and its error moves to later columns. The scale of a group of columns is chosen when its first
column is reached, for the values that are kept there. A joint pass, as SparseGPT's paper proposes, leaves no
unrounded weights to refine, and costs twice as much of the accuracy: the demo's encoder at 4 bits keeps a
cosine of 0.87 that way, and 0.89 in two passes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..vocab import ElementKind, ScaleRule
from . import canonical, threads
from .cutting import split_weight
from .packed_layouts import Quantization
from .quantize import LARGEST_STORED, quantized_groups
from .quantized_weight import Sparse24QuantizedWeight, nibbles_of
from .weight import Sparse24Weight

METHODS = ("magnitude", "wanda", "sparsegpt")
DAMPING = 0.01
"""The share of the moment's mean diagonal that is added to its diagonal."""
_BLOCK = 128
"""Columns whose errors are moved to the later blocks together."""
_REFINEMENTS = 8
"""Steps of conjugate gradients. More of them lower the output error by less than a hundredth of it."""


def pruned_for(weight: Any, moment: Any, method: str) -> Any:
    """A copy of ``weight`` [M, K] that is 2:4, for inputs with the moment X^T X [K, K] of the same dtype.

    float32 or float64; K is a multiple of 4. Channels that are always zero are ranked by |w|.
    """
    if method == "sparsegpt":
        return _sparsegpt(weight, moment)
    scores = abs(weight)
    if method == "wanda":
        scores = scores * (moment.diagonal() ** 0.5)
    return weight * _largest_two(scores)


class Rounding(NamedTuple):
    """How calibrated weights are quantized."""

    element: ElementKind
    """Type of the weight when it is multiplied."""
    by: Quantization
    """Types of stored values and scales, and the group."""
    rule: ScaleRule
    """Rule that gives a group its scale."""


def quantized_together(
    weights: Sequence[Any], moment: Any, method: str, to: Rounding
) -> list[Sparse24QuantizedWeight]:
    """Weights that multiply the same inputs, pruned and quantized, in host memory.

    They and ``moment`` are as for :func:`pruned_together`; K is a multiple of 8.
    """
    rows = _namespace(moment).concatenate(list(weights))
    if method == "sparsegpt":
        whole = _sparsegpt_quantized(rows, moment, to)
    else:
        pruned = _on_host(pruned_for(rows, moment, method)).astype(to.element.dtype)
        whole = Sparse24QuantizedWeight.quantize(
            Sparse24Weight.compress(pruned), **to.by.arguments, rule=to.rule
        )
    return list(split_weight(whole, [len(weight) for weight in weights]))


def pruned_together(weights: Sequence[Any], moment: Any, method: str) -> list[Any]:
    """Copies of weights that multiply the same inputs, pruned as the rows of one by :func:`pruned_for`."""
    rows = pruned_for(_namespace(moment).concatenate(list(weights)), moment, method)
    ends = itertools.accumulate(map(len, weights), initial=0)
    return [rows[start:stop] for start, stop in itertools.pairwise(ends)]


def output_error(weight: Any, pruned: Any, moment: Any) -> float:
    """||X (W - W')^T|| / ||X W^T|| in the Frobenius norm; 0 if both are 0."""
    return relative_error(output_energy(weight - pruned, moment), output_energy(weight, moment))


def output_energy(weight: Any, moment: Any) -> float:
    """||X W^T||^2 in the Frobenius norm."""
    return float(((weight @ moment) * weight).sum())


def relative_error(lost: float, whole: float) -> float:
    """The norm of an error over that of the whole, of their squares; 0 if the whole is 0."""
    return max(lost, 0.0) ** 0.5 / whole**0.5 if whole > 0 else 0.0


def _largest_two(scores: Any) -> Any:
    """The mask [M, K] of the two largest of every four. Ties keep the first."""
    xp = _namespace(scores)
    groups = scores.reshape(scores.shape[0], -1, 4)
    kept = []
    for i in range(4):
        ahead: Any = 0
        for j in range(4):
            if j != i:
                one, other = groups[..., j], groups[..., i]
                ahead = ahead + (one >= other if j < i else one > other)
        kept.append(ahead < 2)
    return xp.stack(kept, -1).reshape(scores.shape)


def _sparsegpt(weight: Any, moment: Any) -> Any:
    damped, u = _damped(moment)
    return _pruned_and_refined(weight, damped, u)[0]


def _sparsegpt_quantized(weight: Any, moment: Any, to: Rounding) -> Sparse24QuantizedWeight:
    damped, u = _damped(moment)
    pruned, kept = _pruned_and_refined(weight, damped, u)
    rounding = _Rounded(kept, to)
    _sweep(pruned, u, rounding)
    return rounding.weight()


def _damped(moment: Any) -> tuple[Any, Any]:
    """The moment with a larger diagonal, and the upper triangular U with U^T U = its inverse."""
    xp = _namespace(moment)
    level = float(moment.diagonal().mean()) * DAMPING or 1.0
    damped = moment + level * xp.eye(len(moment), dtype=moment.dtype, device=moment.device)
    # U comes from a Cholesky factor of the reversed matrix. It is computed in float64, in which damping makes
    # every moment positive definite.
    wide = xp.asarray(xp.flip(damped, (0, 1)), dtype=xp.float64)
    inverse = xp.linalg.inv(xp.flip(xp.linalg.cholesky(wide), (0, 1)))
    return damped, xp.asarray(inverse, dtype=moment.dtype)


def _pruned_and_refined(weight: Any, damped: Any, u: Any) -> tuple[Any, Any]:
    """The pruned weight, and the mask of what is kept."""
    pruning = _Pruned(weight, u.diagonal())
    pruned = _sweep(weight, u, pruning)
    return _refined(weight, pruned, pruning.kept, damped), pruning.kept


def _sweep(weight: Any, u: Any, constraint: _Pruned | _Rounded) -> Any:
    """The weight with its columns constrained in order. The error of each moves to the later columns."""
    scale, k = u.diagonal(), weight.shape[1]
    rest, result = weight + 0, weight + 0
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        errors = _namespace(weight).zeros_like(weight[:, start:stop])
        for group in range(start, stop, 4):
            end = group + 4
            constraint.reach(rest, group)
            for j in range(group, end):
                result[:, j] = constraint.nearest(rest[:, j], j)
                lost = ((rest[:, j] - result[:, j]) / scale[j])[:, None]
                errors[:, j - start : j - start + 1] = lost
                rest[:, j:end] -= lost * u[j, j:end]
            rest[:, end:stop] -= errors[:, group - start : end - start] @ u[group:end, end:stop]
        rest[:, stop:] -= errors @ u[start:stop, stop:]
    return result


class _Pruned:
    """Keeps the two of every four columns whose loss would cost the output most."""

    def __init__(self, weight: Any, scale: Any) -> None:
        self.kept, self._scale = _namespace(weight).zeros_like(weight), scale

    def reach(self, rest: Any, group: int) -> None:
        """Choose what is kept of the four columns from ``group`` on, whose weights are in ``rest``."""
        four = slice(group, group + 4)
        self.kept[:, four] = _largest_two((rest[:, four] / self._scale[four]) ** 2)

    def nearest(self, column: Any, j: int) -> Any:
        return column * self.kept[:, j]


class _Rounded:
    """Rounds what is ``kept`` to the stored values and scales of a quantized weight."""

    def __init__(self, kept: Any, to: Rounding) -> None:
        self._kept, self._to = kept, to
        self._stored = _namespace(kept).zeros_like(kept)
        self._scales: list[np.ndarray[Any, Any]] = []

    def reach(self, rest: Any, group: int) -> None:
        """Choose the scale of the columns from ``group`` on if they begin a group of the scales."""
        k = rest.shape[1]
        columns = self._to.by.group or k
        if group % columns:
            return
        own = slice(group, min(group + columns, k))
        chosen = _on_host(rest[:, own][self._kept[:, own] > 0]).reshape(len(rest), (own.stop - group) // 2)
        self._scales.append(_scales_of_rows(chosen.astype(np.float32), self._to))
        held = self._scales[-1].astype(np.float32)[:, 0]
        self._scale = _namespace(rest).asarray(held, dtype=rest.dtype, device=rest.device)

    def nearest(self, column: Any, j: int) -> Any:
        largest = LARGEST_STORED[self._to.by.element]
        scaled = (column / self._scale).clip(-largest, largest) * self._kept[:, j]
        stored = scaled.round() if self._to.by.element.is_integer else _cast(scaled, self._to.by.element)
        self._stored[:, j] = stored
        return _cast(stored * self._scale, self._to.element)

    def weight(self) -> Sparse24QuantizedWeight:
        """The weight, after all columns."""
        by = self._to.by
        held = ElementKind.S8 if by.element is ElementKind.S4 else by.element
        parts = Sparse24Weight.compress(_on_host(self._stored).astype(held.dtype))
        values = nibbles_of(parts.values) if by.element is ElementKind.S4 else parts.values
        scales = np.concatenate(self._scales, axis=1)
        return Sparse24QuantizedWeight(
            values, parts.metadata, scales, element=self._to.element, **by.arguments, validate=False
        )


def _scales_of_rows(chosen: np.ndarray[Any, Any], to: Rounding) -> np.ndarray[Any, Any]:
    """The scales [M, 1] of float32 rows."""
    by = to.by._replace(group=0)
    scales = np.empty((len(chosen), 1), by.scale_element.dtype)

    def fill(rows: slice) -> None:
        scales[rows] = quantized_groups(chosen[rows], to.element, by, to.rule)[1]

    rows, width = chosen.shape
    threads.for_each(fill, canonical.row_steps(rows, width, True))
    return scales


def _cast(array: Any, element: ElementKind) -> Any:
    """An array rounded to an element, as an array of the given type."""
    xp = _namespace(array)
    dtype = element.dtype if xp is np else getattr(xp, element.dtype.name)
    return xp.asarray(xp.asarray(array, dtype=dtype), dtype=array.dtype)


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    """An array of PyTorch or NumPy as one of NumPy."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.cpu())


def _refined(weight: Any, pruned: Any, kept: Any, damped: Any) -> Any:
    """The kept weights after steps of conjugate gradients, preconditioned by the diagonal, for each row."""
    scale = damped.diagonal()
    residual = (weight - pruned) @ damped * kept
    step = residual / scale
    power = (residual * step).sum(1)[:, None]
    for _ in range(_REFINEMENTS):
        image = step @ damped * kept
        curvature = (step * image).sum(1)[:, None]
        length = power / (curvature + (curvature <= 0))  # a row that is solved has no step left
        pruned = pruned + length * step
        residual = residual - length * image
        better = (residual * residual / scale).sum(1)[:, None]
        step = residual / scale + better / (power + (power <= 0)) * step
        power = better
    return pruned


def _namespace(array: Any) -> Any:
    """The module of the array's functions: numpy, or torch, which a caller with its tensors has imported."""
    return sys.modules[type(array).__module__.partition(".")[0]]
