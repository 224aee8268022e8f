"""The activations of a product's epilogue: their words, their gradients, and what gated ones ask of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..vocab import EpilogueKind
from ..weights.gates import GATE_GROUP, GATE_ROWS, gated_rows

F = torch.nn.functional
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
GATED_ACTIVATIONS = ("swiglu", "geglu")
"""Their results are half as wide: of W's rows eight are the gate's and eight are what it opens, in turn."""


def check_activation(activation: str, *, gates: bool = True) -> None:
    """Raises InvalidProblemError for one that no epilogue has; without ``gates`` also for gated ones."""
    known = ACTIVATIONS + GATED_ACTIVATIONS * gates
    if activation not in known:
        raise InvalidProblemError(f"activation: expected one of {', '.join(known)}, got {activation!r}")


def epilogue_of(activation: str, has_bias: bool, *, gates: bool = False) -> EpilogueKind:
    """Raises InvalidProblemError."""
    check_activation(activation, gates=gates)
    if activation != "none":
        return EpilogueKind(f"bias_{activation}")
    return EpilogueKind.BIAS if has_bias else EpilogueKind.IDENTITY


def is_gated(activation: str) -> bool:
    return activation in GATED_ACTIVATIONS


def check_rows(activation: str, rows: int, units: int = 1) -> None:
    """Raises InvalidProblemError where so many of ``units`` don't hold whole groups of a gate's rows."""
    if is_gated(activation) and rows % (GATE_GROUP * units):
        of = f"{GATE_GROUP} times {units} ranks" if units > 1 else GATE_GROUP
        raise InvalidProblemError(f"out_features: expected a multiple of {of} for {activation}, got {rows}")


def row_order(activation: str, rows: int, device: torch.device) -> Any:
    """Where W's rows are in a matrix whose first half is the gate, to index that with."""
    return torch.from_numpy(gated_rows(rows)).to(device) if is_gated(activation) else slice(None)


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
}
"""Of those that aren't gated."""
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dy, v: torch.ops.aten.threshold_backward(dy, v, 0),
    "gelu": lambda dy, v: torch.ops.aten.gelu_backward(dy, v, approximate="none"),
    "gelu_tanh": lambda dy, v: torch.ops.aten.gelu_backward(dy, v, approximate="tanh"),
    "silu": lambda dy, v: torch.ops.aten.silu_backward(dy, v),
    "swiglu": lambda dy, v: _through_a_gate(dy, v, "silu"),
    "geglu": lambda dy, v: _through_a_gate(dy, v, "gelu"),
}
"""From the gradient of a result and the activation's argument."""


def _through_a_gate(dy: Tensor, v: Tensor, name: str) -> Tensor:
    """Of activation(gate) * up."""
    gate, up = v.unflatten(-1, (-1, 2, GATE_ROWS)).unbind(-2)
    dy = dy.unflatten(-1, (-1, GATE_ROWS))
    return torch.stack((GRADIENTS[name](dy * up, gate), dy * FORWARD[name](gate)), -2).flatten(-3)
