"""The record of whole layers of experts: ``python -m benchmarks.measure experts``.

A layer is the part of a model after its router: the choices sorted, both products, the gate, and each token's
weighted sum. Ours is Sparse24Experts. The dense one has the same pruned weights, two calls of
``torch._grouped_mm``, and is eager or compiled, whichever takes less time. Each cycles through several
routings, in a CUDA graph, alone in a steady state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparse24_plans.bench.gemm import rounded
from sparse24_plans.bench.record import Lists, Record, Step, sources_of
from sparse24_plans.bench.steady import Work
from sparse24_plans.errors import UnsupportedError
from sparse24_plans.torch import Sparse24Experts

from .torch_end_to_end import alone, captured

LISTS: Lists = {"layers": ("model", "experts", "hidden", "features", "top_k", "tokens")}
TOKENS = (1, 8, 64, 512, 4096)
"""Tokens before routing."""
_RANDOM = 8
"""Number of random layers, each with some random numbers of tokens."""
_OF_RANDOM = 3
_MAX_BYTES = 8 << 30
"""Bytes of a random layer's dense weights."""
_ROUTINGS, _ROUNDS = 8, 4
"""Inputs that the launches cycle through, and the number of cycles in a graph."""
_WORST_ERROR = 0.02
"""Relative error of a layer above which it is not timed."""


class Layer(NamedTuple):
    """A layer of a model, by the fields of its rows."""

    model: str
    experts: int
    hidden: int
    features: int
    top_k: int


LAYERS = (
    Layer("Mixtral-8x7B", 8, 4096, 14336, 2),
    Layer("Qwen3-30B-A3B", 128, 2048, 768, 8),
    Layer("DeepSeek-V3", 256, 7168, 2048, 8),
    Layer("Llama-4-Scout", 16, 5120, 8192, 1),
)


def drawn(seed: int) -> Iterator[tuple[Layer, tuple[int, ...]]]:
    """Random layers, each with numbers of tokens."""
    rng = random.Random(seed)
    for _ in range(_RANDOM):
        while True:
            experts = int(2 ** rng.uniform(2, 8.01))
            hidden, features = 64 * int(2 ** rng.uniform(4, 7)), 64 * int(2 ** rng.uniform(3, 8))
            if experts * 6 * hidden * features < _MAX_BYTES:
                break
        tokens = {int(2 ** rng.uniform(0, 12)) for _ in range(_OF_RANDOM)}
        yield (
            Layer("random", experts, hidden, features, rng.randint(1, min(8, experts))),
            tuple(sorted(tokens)),
        )


def steps(seed: int, device: str = "cuda", **options: Any) -> list[Step]:
    """The measurements. ``options`` are those of ``steady``."""
    cells = [(layer, tokens) for layer in LAYERS for tokens in TOKENS]
    cells += [(layer, tokens) for layer, numbers in drawn(seed) for tokens in numbers]
    return [
        Step(
            "layers",
            {**layer._asdict(), "tokens": tokens},
            partial(_measured, layer, tokens, torch.device(device), options),
        )
        for layer, tokens in cells
    ]


def _measured(
    layer: Layer, tokens: int, device: torch.device, options: Mapping[str, Any], sources: set[str]
) -> Record:
    """The row of a layer. Raises UnsupportedError where its result is wrong."""
    experts, dense = _modules(layer, device)
    inputs = [_routed(layer, tokens, seed, device) for seed in range(_ROUTINGS)]
    with torch.inference_mode():
        wanted = dense(*inputs[0]).float()
        error = ((experts(*inputs[0]).float() - wanted).norm() / wanted.norm()).item()
        if not error <= _WORST_ERROR:
            raise UnsupportedError(f"{layer}: expected a relative error of {_WORST_ERROR}, got {error}")
        torch._dynamo.reset()
        others = {"eager": dense, "compiled": torch.compile(dense, dynamic=False)}
        us = _us(experts, inputs, device, options)
        dense_us = {name: _us(call, inputs, device, options) for name, call in others.items()}
    best = min(dense_us, key=dense_us.__getitem__)
    row = {**layer._asdict(), "tokens": tokens, "us": rounded(us), "dense_us": rounded(dense_us[best])}
    for part in (experts.gate_up_proj, experts.down_proj):
        sources.update(sources_of(part.plan(tokens * layer.top_k)))
    return {"layers": [{**row, "dense": best, "rel_error": float(f"{error:.3g}")}]}


def _us(call: Any, inputs: Any, device: torch.device, options: Mapping[str, Any]) -> float:
    """Microseconds of one call."""

    def around() -> None:
        for one in inputs * _ROUNDS:
            call(*one)

    around()
    work = Work(captured(around) if device.type == "cuda" else around, _ROUNDS * len(inputs))
    return alone({"": work}, device, **options)[""].us


class DenseExperts(nn.Module):
    """The layer of dense weights: ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I]."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        experts, order = index.flatten().sort(stable=True)
        numbers = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        gate, up = _grouped(x[order // index.shape[1]], self.gate_up_proj, ends).chunk(2, -1)
        y = _grouped(self.act_fn(gate) * up, self.down_proj, ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=x.device)
        each = y[places].view(*index.shape, -1) * weights.unsqueeze(-1)
        return each.sum(1)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The product of each group's rows with its weight."""
    if rows.is_cuda:
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])


@lru_cache(maxsize=1)
def _modules(layer: Layer, device: torch.device) -> tuple[Sparse24Experts, DenseExperts]:
    """Our layer with random weights, and a dense layer with the same weights."""
    torch.manual_seed(0)
    _, count, hidden, features, _ = layer
    shapes = (count, 2 * features, hidden), (count, hidden, features)
    dense = DenseExperts(
        *(torch.randn(one, device=device, dtype=torch.bfloat16) / one[-1] ** 0.5 for one in shapes)
    )
    sparse = Sparse24Experts.from_experts(dense)
    for name, weight in sparse.dense_weights().items():
        getattr(dense, name).copy_(weight)
    return sparse, dense


def _routed(layer: Layer, tokens: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, their experts, and the router's weights."""
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device}
    x = torch.randn(tokens, layer.hidden, dtype=torch.bfloat16, **options)
    scores = torch.randn(tokens, layer.experts, **options).softmax(-1)
    weights, index = scores.topk(layer.top_k)
    return x, index, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
