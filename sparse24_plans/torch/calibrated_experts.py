"""Prunes stacked experts by what each of them multiplies: the rows that a router sends to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..weights.calibrated import output_energy, relative_error
from ..weights.quantized_weight import Sparse24QuantizedWeight
from .calibration_inputs import Moment
from .experts import STACKS

Pruner = Callable[[Tensor, Tensor, str], Sparse24QuantizedWeight | None]
"""Prunes a weight [M, K] in place by a moment and a method. It returns the quantized weight, or None."""


class Routed(NamedTuple):
    """The arguments of a call of experts: rows [T, H], and the experts [T, k] that each row goes to."""

    rows: Tensor
    experts: Tensor

    @classmethod
    def of(cls, x: Tensor, experts: Tensor, counted: Tensor | None) -> Routed:
        """A copy of the rows that count. ``counted`` are positions [batch, tokens]; None is all of them."""
        rows, experts = x.reshape(-1, x.shape[-1]), experts.reshape(-1, experts.shape[-1])
        if counted is not None and counted.numel() == len(rows):
            return cls(rows[counted.flatten()], experts[counted.flatten()])
        return cls(rows.clone(), experts.clone())


class PrunedStack(NamedTuple):
    """The result for one stack of matrices."""

    output_error: float
    without_tokens: tuple[int, ...]
    """The experts that no row was sent to."""
    parts: list[Sparse24QuantizedWeight]
    """The experts' quantized weights; empty if they aren't quantized."""


def prune_experts(
    name: str, module: Any, seen: Sequence[Routed], method: str, prune: Pruner
) -> dict[str, PrunedStack]:
    """Prune the stacks of experts in place, one expert after the other, and return results by their names.

    An expert's second matrix is pruned for what its first one, pruned, gives. Both of an expert without rows
    are pruned by magnitude.
    """
    gate_up, down = stacks = [getattr(module, own).detach() for own in STACKS]
    lost, whole = [0.0, 0.0], [0.0, 0.0]
    quantized: list[list[Sparse24QuantizedWeight]] = [[], []]
    idle = []
    for expert in range(len(down)):
        parts = [one.rows[(one.experts == expert).any(-1)] for one in seen]
        is_idle = not any(map(len, parts))
        if is_idle:
            idle.append(expert)
        for at, stack in enumerate(stacks):
            if at == 1:
                parts = [_activated(rows, gate_up[expert], module.act_fn) for rows in parts]
            weight = stack[expert]
            inputs = Moment(weight)
            for rows in parts:
                inputs.add(rows)
            moment = inputs.finite(f"{name}.{STACKS[at]}")
            dense = weight.to(torch.float32, copy=True)
            found = prune(weight, moment, "magnitude" if is_idle else method)
            quantized[at] += [] if found is None else [found]
            lost[at] += output_energy(dense - weight.float(), moment)
            whole[at] += output_energy(dense, moment)
    return {
        f"{name}.{own}": PrunedStack(relative_error(lost[at], whole[at]), tuple(idle), quantized[at])
        for at, own in enumerate(STACKS)
    }


def _activated(rows: Tensor, gate_up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(gate) * up of an expert's rows, as transformers' experts compute it."""
    gate, up = nn.functional.linear(rows, gate_up).chunk(2, dim=-1)
    return act(gate) * up
