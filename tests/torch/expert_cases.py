"""Dense experts, the 2:4 ones made of them, and routed tokens, for the tests of experts."""

from __future__ import annotations

import io

import torch
from torch import nn

from sparse24_plans.torch import Sparse24Experts

from .cases import same_bits


class DenseExperts(nn.Module):
    """Return what transformers' experts compute, in float64 (MixtralExperts)."""

    def __init__(self, experts: int, hidden: int, width: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(experts)
        for name, shape in (
            ("gate_up_proj", (experts, 2 * width, hidden)),
            ("down_proj", (experts, hidden, width)),
        ):
            weight = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            setattr(self, name, nn.Parameter(weight.to(device, dtype), requires_grad=False))
        self.act_fn = nn.SiLU()

    def forward(self, x, index, weights):
        wide, result = x.double(), torch.zeros_like(x, dtype=torch.float64)
        for token in range(len(x)):
            for expert, factor in zip(index[token].tolist(), weights[token], strict=True):
                if 0 <= expert < len(self.gate_up_proj):
                    gate, up = (self.gate_up_proj[expert].double() @ wide[token]).chunk(2)
                    result[token] += factor * (self.down_proj[expert].double() @ (self.act_fn(gate) * up))
        return result


def routed(tokens: int, experts: int, chosen: int, device: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, experts, generator=generator)
    weights, index = scores.softmax(-1).topk(chosen)
    return index.to(device), weights.to(device)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(device: str, dtype=torch.bfloat16, tokens: int = 37, **options):
    dense = DenseExperts(6, 128, 64, dtype, device)
    sparse = Sparse24Experts.from_experts(dense, **options)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return dense, sparse, x


def pruned(dense: DenseExperts, sparse: Sparse24Experts) -> DenseExperts:
    """The dense experts with the weights that the sparse ones keep."""
    with torch.no_grad():
        for name, weight in sparse.dense_weights().items():
            getattr(dense, name).copy_(weight)
    return dense


def same_experts(one: Sparse24Experts, other: Sparse24Experts) -> bool:
    """Whether both have the same state and results."""
    state, wanted = one.state_dict(), other.state_dict()
    x, routing = randn(20, 128).to(one.down_proj.weight.dtype), routed(20, 6, 2, "cpu")
    return (
        state.keys() == wanted.keys()
        and all(same_bits(state[key], wanted[key]) for key in wanted)
        and same_bits(one(x, *routing), other(x, *routing))
    )


def pickled(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
