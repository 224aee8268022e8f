"""Prunes a weight to 2:4 by what its layer's inputs are. The arrays are NumPy's or PyTorch's, on any device.

A layer computes Y = X W^T. All that is used of its inputs X [N, K] is their moment X^T X [K, K]. The methods
are reimplemented from the publications that VENDOR.md names:

- ``magnitude`` keeps the two largest |w| of every four.
- ``wanda`` keeps the two largest |w| * ||x||, where ||x|| is the norm of the weight's input channel.
- ``sparsegpt`` goes through the columns in order. It keeps the two of every four whose loss would cost the
  output most, and moves the error of the other two to later columns. Then the kept weights are refined by
  conjugate gradients on ||X (W - W')^T||, which cannot raise that error.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

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


def pruned_together(weights: Sequence[Any], moment: Any, method: str) -> list[Any]:
    """Copies of weights that multiply the same inputs, pruned as the rows of one by :func:`pruned_for`."""
    rows = pruned_for(_namespace(moment).concatenate(list(weights)), moment, method)
    starts = itertools.accumulate((len(weight) for weight in weights), initial=0)
    return [rows[start : start + len(weight)] for start, weight in zip(starts, weights, strict=False)]


def output_error(weight: Any, pruned: Any, moment: Any) -> float:
    """||X (W - W')^T|| / ||X W^T|| in the Frobenius norm; 0 if both are 0."""
    lost, whole = (float(((part @ moment) * part).sum()) for part in (weight - pruned, weight))
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
    xp = _namespace(weight)
    k = weight.shape[1]
    level = float(moment.diagonal().mean()) * DAMPING or 1.0
    damped = moment + level * xp.eye(k, dtype=moment.dtype, device=moment.device)
    # U is upper triangular with U^T U = damped^-1, from a Cholesky factor of the reversed matrix.
    # It is computed in float64, in which damping makes every moment positive definite.
    wide = xp.asarray(xp.flip(damped, (0, 1)), dtype=xp.float64)
    inverse = xp.linalg.inv(xp.flip(xp.linalg.cholesky(wide), (0, 1)))
    u = xp.asarray(inverse, dtype=weight.dtype)
    scale = u.diagonal()
    rest, kept = weight + 0, xp.zeros_like(weight)
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        errors = xp.zeros_like(weight[:, start:stop])
        for group in range(start, stop, 4):
            end = group + 4
            kept[:, group:end] = _largest_two((rest[:, group:end] / scale[group:end]) ** 2)
            for j in range(group, end):
                lost = (rest[:, j] * (1 - kept[:, j]) / scale[j])[:, None]
                errors[:, j - start : j - start + 1] = lost
                rest[:, j:end] -= lost * u[j, j:end]
            rest[:, end:stop] -= errors[:, group - start : end - start] @ u[group:end, end:stop]
        rest[:, stop:] -= errors @ u[start:stop, stop:]
    return _refined(weight, rest * kept, kept, damped)


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
