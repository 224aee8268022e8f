"""Products with an empty side have the results and gradients of dense ones, however it lies in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from sparse24_plans.torch import Sparse24Linear, Sparse24QuantizedLinear, Sparse24Tensor

from .cases import DEVICE, S, randn, wanting, weight

F = torch.nn.functional
SIZES = [sizes for sizes in itertools.product((0, 3), (0, 16), (0, 8)) if 0 in sizes]
LEADING = {"rows": lambda n: (n,), "batches of none": lambda n: (n, 0), "empty batches": lambda n: (2, n)}
sizes = pytest.mark.parametrize(("n", "m", "k"), SIZES)


def gradients(call, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result, and the operands' gradients."""
    operands = [wanting(one) for one in operands]
    y = call(*operands)
    return (y.detach(), *torch.autograd.grad(y, operands, torch.ones_like(y)))


def assert_same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@sizes
@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_linear(n, m, k, leading, activation):
    values, meta, _ = weight(m, k)
    function = torch.relu if activation == "relu" else lambda y: y

    def wanted(x, values, bias):
        return function(F.linear(x, S.decompress(values, meta), bias))

    operands = randn(*leading(n), k), values, randn(m)
    found = gradients(lambda x, v, b: S.linear(x, v, meta, b, activation=activation), *operands)
    assert found[0].shape == (*leading(n), m)
    assert_same(found, gradients(wanted, *operands))


@sizes
def test_mm_and_dgrad(n, m, k):
    values, meta, _ = weight(m, k)
    b, dy = randn(k, n), randn(n, m)
    assert_same(
        gradients(lambda v, b: S.mm(v, meta, b), values, b),
        gradients(lambda v, b: S.decompress(v, meta) @ b, values, b),
    )
    assert_same(
        gradients(lambda dy, v: S.dgrad(dy, v, meta), dy, values),
        gradients(lambda dy, v: dy @ S.decompress(v, meta), dy, values),
    )


NO_TOKENS = {
    "columns of a transpose": lambda: randn(64, 5)[:, :0].t(),
    "every second row": lambda: randn(6, 64)[:0:2],
    "every second column": lambda: randn(0, 128)[:, ::2],
    "a repeated row": lambda: randn(1, 64).expand(3, 64)[:0],
    "batches that were moved": lambda: randn(64, 3, 0).permute(2, 1, 0),
}


@pytest.mark.parametrize("lies", NO_TOKENS)
def test_no_tokens_may_lie_in_any_way(lies):
    values, meta, dense = weight(32, 64)
    x = NO_TOKENS[lies]()
    layers = {
        "op": lambda x: S.linear(x, values, meta),
        "layer": Sparse24Linear.from_linear(nn.Linear(64, 32, device=DEVICE)),
        "gated layer": Sparse24Linear.from_linear(nn.Linear(64, 64, device=DEVICE), activation="swiglu"),
        "quantized layer": Sparse24QuantizedLinear.from_linear(nn.Linear(64, 32, device=DEVICE)),
        "tensor": lambda x: F.linear(x, Sparse24Tensor(torch.Size([32, 64]), values, meta, None, None, None)),
    }
    for name, layer in layers.items():
        with torch.no_grad():
            assert layer(x).shape == (*x.shape[:-1], 32), name
    assert_same(gradients(layers["op"], x), gradients(lambda x: F.linear(x, dense), x))
    if x.dim() == 2:
        assert S.mm(values, meta, x.t()).shape == (32, 0)


@sizes
@pytest.mark.parametrize("compiled", [False, True])
def test_a_trained_layer(n, m, k, compiled):
    """A compiled training step traces its backward without values."""
    torch._dynamo.reset()
    layer = Sparse24Linear.from_linear(nn.Linear(k, m, device=DEVICE), trainable=True)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x = wanting(randn(n, k))
    call(x).sum().backward()
    assert x.grad.shape == (n, k)
    torch.testing.assert_close(x.grad, layer.dense_weight().sum(0).expand(n, k))
    assert [one.grad is not None for one in layer.parameters()] == [True] * len(list(layer.parameters()))
