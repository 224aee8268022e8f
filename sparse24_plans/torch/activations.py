"""The activations of a product's epilogue: names, functions, gradients, and the row order of gated ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidProblemError
from ..vocab import EpilogueKind
from ..weights.gates import GATE_GROUP, GATE_ROWS, gated_rows

F = torch.nn.functional
ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu")
GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh")
"""Gated activations halve the width. W's rows alternate: eight of the gate, then eight that it scales."""


def check_activation(activation: str, *, gates: bool = True) -> None:
    """Raise InvalidProblemError for an unknown activation, and without ``gates`` for a gated one."""
    known = ACTIVATIONS + GATED_ACTIVATIONS * gates
    if activation not in known:
        raise InvalidProblemError(f"activation: expected one of {', '.join(known)}, got {activation!r}")


def epilogue_of(activation: str, has_bias: bool, *, gates: bool = False) -> EpilogueKind:
    """The epilogue. Raises InvalidProblemError for an unknown activation."""
    check_activation(activation, gates=gates)
    if activation == "none":
        return EpilogueKind.BIAS if has_bias else EpilogueKind.IDENTITY
    return EpilogueKind(f"bias_{activation}" if has_bias else activation)


def is_gated(activation: str) -> bool:
    return activation in GATED_ACTIVATIONS


def check_rows(activation: str, rows: int, units: int = 1) -> None:
    """Raise InvalidProblemError if ``units`` equal shares of the rows don't hold whole groups of a gate."""
    if is_gated(activation) and rows % (GATE_GROUP * units):
        of = f"{GATE_GROUP} times {units} ranks" if units > 1 else GATE_GROUP
        raise InvalidProblemError(f"out_features: expected a multiple of {of} for {activation}, got {rows}")


def row_order(activation: str, rows: int, device: torch.device) -> Any:
    """An index into a matrix whose first half is the gate, which puts its rows in the order of W."""
    return torch.from_numpy(gated_rows(rows)).to(device) if is_gated(activation) else slice(None)


def rows_in_order(tensors: Mapping[str, Tensor], order: Any, rows: int) -> dict[str, Tensor]:
    """Tensors with their ``rows`` in another order, which :func:`row_order` gives; others as they are."""
    return {
        key: movable(one)[order].view(one.dtype) if one.shape[:1] == (rows,) else one
        for key, one in tensors.items()
    }


def movable(tensor: Tensor) -> Tensor:
    """The tensor's bits in a dtype that PyTorch indexes and concatenates on every device."""
    kinds = {torch.uint16: torch.int16, torch.float8_e4m3fn: torch.int8}
    return tensor.view(kinds.get(tensor.dtype, tensor.dtype))


FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "relu": F.relu,
    "relu2": lambda v: F.relu(v).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
}
"""The activations that aren't gated."""
GATED_BY = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
"""The gated activations, by the activation of their gates."""
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dy, v: torch.ops.aten.threshold_backward(dy, v, 0),
    "relu2": lambda dy, v: dy * (2 * F.relu(v)),
    "gelu": lambda dy, v: torch.ops.aten.gelu_backward(dy, v, approximate="none"),
    "gelu_tanh": lambda dy, v: torch.ops.aten.gelu_backward(dy, v, approximate="tanh"),
    "silu": lambda dy, v: _through_silu(dy, v),
    "swiglu": lambda dy, v: _through_a_gate(dy, v, "silu"),
    "geglu": lambda dy, v: _through_a_gate(dy, v, "gelu"),
    "geglu_tanh": lambda dy, v: _through_a_gate(dy, v, "gelu_tanh"),
}
"""Functions of the result's gradient and of the activation's argument."""


def _through_silu(dy: Tensor, v: Tensor) -> Tensor:
    """The gradient of silu, by a formula if a second one may follow: PyTorch's op for it has none."""
    if not torch.is_grad_enabled():
        fused: Tensor = torch.ops.aten.silu_backward(dy, v)
        return fused
    share = torch.sigmoid(v)
    return dy * share * (1 + v * (1 - share))


def _through_a_gate(dy: Tensor, v: Tensor, name: str) -> Tensor:
    """The gradient of activation(gate) * up."""
    gate, up = v.unflatten(-1, (-1, 2, GATE_ROWS)).unbind(-2)
    dy = dy.unflatten(-1, (-1, GATE_ROWS))
    return torch.stack((GRADIENTS[name](dy * up, gate), dy * FORWARD[name](gate)), -2).flatten(-3)


def called(call: Any, x: Tensor, argument: str) -> Any:
    """The result of the model's own code. Any error that it raises becomes an InvalidProblemError."""
    try:
        with torch.no_grad():
            return call(x)
    except Exception as error:
        raise InvalidProblemError(
            f"{argument}: expected it to take one tensor, got {type(error).__name__}: {error}"
        ) from error


def name_of(activation: Any) -> str | None:
    """The name of the activation that has the same values, or None."""
    v = torch.linspace(-6, 6, 49, dtype=torch.float32)
    found = called(activation, v, "activation")
    if type(found) is not Tensor or (found.shape, found.dtype) != (v.shape, v.dtype):
        return None
    return next((word for word in GATED_BY if torch.allclose(found, FORWARD[word](v), atol=1e-6)), None)
