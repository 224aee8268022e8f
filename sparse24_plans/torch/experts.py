"""``Sparse24Experts``: the feed-forward experts of a mixture, whose weights are 2:4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidProblemError
from .activations import GATED_BY, name_of, row_order
from .linear import Sparse24Linear

_ops: Any = torch.ops.sparse24
_ROWS = 64
"""Rows of an expert's weights come in multiples of the kernels' tiles."""


class Sparse24Experts(nn.Module):
    """Experts ``down(act(gate(x)) * up(x))``, each token by the ones that a router chose for it.

    It takes the place of transformers' modules of experts (Mixtral, Qwen3-MoE, DeepSeek-V3): called with
    ``hidden_states`` [T, H], ``top_k_index`` [T, k] and ``top_k_weights`` [T, k], it gives [T, H]. All
    experts are two grouped products, gate and up in one, with the activation in its epilogue. Their results
    are multiplied by the router's weights and added in the order of ``top_k_index``, in float32, so a token's
    bits don't depend on the other tokens. It never waits for the device, and has no gradients.

    ``gate_up_proj`` [E*2I, H] and ``down_proj`` [E*H, I] are Sparse24Linear layers that hold the stacked
    weights. An index of E or more, which expert parallelism uses for other ranks' experts, adds nothing.
    """

    def __init__(
        self, num_experts: int, gate_up_proj: Sparse24Linear, down_proj: Sparse24Linear, activation: str
    ) -> None:
        super().__init__()
        self.num_experts, self.activation = num_experts, activation
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    @classmethod
    def from_experts(cls, module: nn.Module, **options: Any) -> Sparse24Experts:
        """The experts of a module that computes the same with dense weights, pruned to 2:4.

        ``options`` are those of ``Sparse24Linear.from_linear``. Raises InvalidProblemError, which says why,
        for a module that isn't one of gated experts with SiLU or GELU, or whose sizes no kernel serves.
        """
        if (reason := obstacle(module)) is not None:
            raise InvalidProblemError(f"module: {reason}")
        experts: Any = module
        gate_up, down = (getattr(experts, name).detach() for name in ("gate_up_proj", "down_proj"))
        activation = GATED_BY[str(name_of(experts.act_fn))]
        order = row_order(activation, gate_up.shape[1], gate_up.device)
        first, second = (_stacked(weight, options) for weight in (gate_up[:, order], down))
        found = cls(gate_up.shape[0], first, second, activation)
        found.train(module.training)
        return found

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = top_k_index.shape[-1]
        experts, order = top_k_index.flatten().sort(stable=True)
        bounds = torch.arange(self.num_experts + 1, device=experts.device, dtype=experts.dtype)
        offsets = torch.searchsorted(experts, bounds, out_int32=True)
        rows = hidden_states[order // chosen]
        hidden = self._product(self.gate_up_proj, rows, offsets, self.activation)
        y = self._product(self.down_proj, hidden, offsets, "none")
        here = torch.empty_like(order)
        here[order] = torch.arange(len(order), device=order.device)
        # Rows of other ranks' experts were not written.
        weights = top_k_weights.float().unsqueeze(-1)
        scaled = y[here].view(*top_k_index.shape, hidden_states.shape[-1]).float() * weights
        scaled = scaled.masked_fill((top_k_index >= self.num_experts).unsqueeze(-1), 0)
        return scaled.sum(-2).to(hidden_states.dtype)

    @staticmethod
    def _product(layer: Sparse24Linear, x: Tensor, offsets: Tensor, activation: str) -> Tensor:
        weight, meta = layer.stored()
        y: Tensor = _ops.grouped_mm(
            x, weight, meta, offsets, m=layer.out_features, activation=activation, preference=layer.wishes
        )
        return y

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, activation={self.activation}"


def obstacle(module: nn.Module) -> str | None:
    """Why Sparse24Experts can't take the module's place, or None."""
    found = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(one, Tensor) and one.dim() == 3 for one in found) or not hasattr(module, "act_fn"):
        return "expected gate_up_proj [E, 2I, H], down_proj [E, H, I] and act_fn"
    gate_up, down = found
    assert gate_up is not None
    assert down is not None
    count, rows, width = gate_up.shape
    if tuple(down.shape) != (count, width, rows // 2):
        return f"expected down_proj {[count, width, rows // 2]}, got {list(down.shape)}"
    others = [name for name, _ in module.named_parameters() if name not in ("gate_up_proj", "down_proj")]
    if others:
        return f"expected no other parameters, got {', '.join(others)}"
    if rows % _ROWS or width % _ROWS:
        return f"expected 2I and H in multiples of {_ROWS}, got {rows} and {width}"
    if gate_up.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"its dtype is {gate_up.dtype}"
    if name_of(module.act_fn) is None:
        return "its activation is neither SiLU nor GELU"
    return None


def _stacked(weight: Tensor, options: dict[str, Any]) -> Sparse24Linear:
    """A layer that holds the weights [E, M, K] as [E*M, K]."""
    rows, k = weight.shape[0] * weight.shape[1], weight.shape[2]
    linear = nn.Linear(k, rows, False, device="meta")
    linear.weight = nn.Parameter(weight.reshape(rows, k), requires_grad=False)
    return Sparse24Linear.from_linear(linear, **options)
