"""``linear(x, weight, residual=)`` adds a tensor inside of the product, with gradients and compiled code."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import InvalidProblemError
from sparse24_plans.torch import Sparse24Linear, Sparse24QuantizedLinear, Sparse24WeightOnlyLinear
from sparse24_plans.torch.library import only_dispatches

from .cases import DEVICE, FLOATS, S, close, randn, wanting, weight

F = torch.nn.functional
WAYS = {
    "contiguous": lambda n, m, dtype: randn(n, m, dtype=dtype),
    "every other row": lambda n, m, dtype: randn(2 * n, m, dtype=dtype)[::2],
    "at an odd address": lambda n, m, dtype: randn(n * m + 1, dtype=dtype)[1:].view(n, m),
    "a transpose": lambda n, m, dtype: randn(m, n, dtype=dtype).t(),
    "one row, expanded": lambda n, m, dtype: randn(1, m, dtype=dtype).expand(n, m),
}


def wanted(x, dense, bias, residual, beta=1.0):
    return F.linear(x.double(), dense.double(), bias.double()) + beta * residual.double()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("residual_dtype", ["own", torch.float32], ids=str)
def test_a_residual_may_lie_in_any_way(way, dtype, residual_dtype):
    values, meta, dense = weight(dtype=dtype)
    x, bias = randn(5, 64, dtype=dtype), randn(96, dtype=dtype)
    residual = way(5, 96, dtype if residual_dtype == "own" else residual_dtype)
    before = residual.clone()
    for _ in range(2):  # the second call finds the first one's plan
        y = S.linear(x, values, meta, bias, residual=residual)
        assert y.dtype == dtype
        close(y, wanted(x, dense, bias, residual))
    assert torch.equal(residual, before)


def test_leading_dimensions_activations_and_beta():
    values, meta, dense = weight()
    x, bias, residual = randn(2, 3, 64), randn(96), randn(2, 3, 96)
    y = S.linear(x, values, meta, bias, activation="silu", residual=residual, beta=-0.5)
    close(y, F.silu(wanted(x, dense, bias, residual, -0.5)))
    assert torch.equal(
        S.linear(x, values, meta, bias, residual=residual, beta=0.0), S.linear(x, values, meta, bias)
    )


def test_a_factor_without_a_residual_is_refused():
    values, meta, _ = weight()
    x = randn(5, 64)
    for device in (x.device, "meta"):
        given = [one.to(device) for one in (x, values, meta)]
        with pytest.raises(InvalidProblemError, match=r"beta: expected 1, .* without a residual, got 2\.0"):
            S.linear(*given, beta=2.0)
        with pytest.raises(InvalidProblemError, match=r"beta: expected 1, .* without a residual, got 3\.0"):
            S.bmm(given[0][None], *given[1:], beta=3.0)
    assert torch.equal(S.linear(x, values, meta, beta=0.0), S.linear(x, values, meta))


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (lambda: randn(96), r"residual: expected \[5, 96\], got \[96\]"),
        (lambda: randn(5, 48), "residual: expected"),
        (lambda: randn(5, 96).half(), "residual: expected f32, got f16"),
    ],
)
def test_residuals_that_do_not_fit_are_refused(residual, message):
    values, meta, _ = weight()
    with pytest.raises(InvalidProblemError, match=message):
        S.linear(randn(5, 64), values, meta, residual=residual())


def test_gated_products_take_none():
    values, meta, _ = weight()
    with pytest.raises(InvalidProblemError, match="beta: expected 0 for epilogue swiglu"):
        S.linear(randn(5, 64), values, meta, activation="swiglu", residual=randn(5, 96))


@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("beta", [1.0, -0.5])
def test_gradients(activation, beta):
    values, meta, dense = weight()
    x, bias, residual = wanting(randn(5, 64)), wanting(randn(96)), wanting(randn(5, 96))
    act = {
        "none": lambda v: v,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu2": lambda v: F.relu(v).square(),
    }[activation]
    dy = randn(5, 96, seed=3)
    S.linear(x, values, meta, bias, activation=activation, residual=residual, beta=beta).backward(dy)
    others = [wanting(one.double()) for one in (x, bias, residual)]
    act(F.linear(others[0], dense.double(), others[1]) + beta * others[2]).backward(dy.double())
    for one, other in zip((x, bias, residual), others, strict=True):
        close(one.grad, other.grad)


def test_fake_tensors_and_compiled_code():
    values, meta, dense = weight()
    bias = randn(96)

    def block(x: torch.Tensor) -> torch.Tensor:
        return S.linear(x[:, :64], values, meta, bias, residual=x) + 1

    x = randn(5, 96)
    close(torch.compile(block)(x), wanted(x[:, :64], dense, bias, x) + 1)
    torch.library.opcheck(S.linear.default, (x[:, :64], values, meta, bias), {"residual": x, "beta": 0.5})


LAYERS = {
    "16 bits": lambda linear, **options: Sparse24Linear.from_linear(linear, **options),
    "float8": lambda linear, **options: Sparse24QuantizedLinear.from_linear(
        linear, dtype=torch.float8_e4m3fn, **options
    ),
    "s4": lambda linear, **options: Sparse24WeightOnlyLinear.from_linear(linear, group=32, **options),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@layers
@pytest.mark.parametrize("learns", [False, True], ids=["direct", "dispatched"])
def test_layers_add_a_residual_before_they_round(make, learns):
    linear = torch.nn.Linear(64, 96, bias=False, device=DEVICE, dtype=torch.bfloat16)
    layer, unrounded = make(linear), make(linear, out_dtype=torch.float32)
    x, residual = randn(5, 64, dtype=torch.bfloat16), randn(5, 96, dtype=torch.bfloat16)
    with torch.set_grad_enabled(learns):
        assert only_dispatches(x, residual, None) != learns
        y = layer(x, residual=residual)
        assert torch.equal(y, (unrounded(x) + residual.float()).to(torch.bfloat16))


@layers
def test_a_layers_residual_is_checked_as_the_ops_is(make):
    layer = make(torch.nn.Linear(64, 96, device=DEVICE, dtype=torch.bfloat16))
    with pytest.raises(InvalidProblemError, match=r"residual: expected \[5, 96\], got \[96\]"):
        layer(randn(5, 64, dtype=torch.bfloat16), residual=randn(96, dtype=torch.bfloat16))


def test_a_weight_only_layers_residual_has_gradients():
    linear = torch.nn.Linear(64, 96, device=DEVICE, dtype=torch.bfloat16)
    layer = Sparse24WeightOnlyLinear.from_linear(linear, activation="silu")
    x, residual = (wanting(randn(5, width, dtype=torch.bfloat16)) for width in (64, 96))
    layer(x, residual=residual).sum().backward()
    others = [wanting(one.detach().double()) for one in (x, residual)]
    before = F.linear(others[0], layer.dense_weight().double(), layer.bias.double()) + others[1]
    F.silu(before).sum().backward()
    for one, other in zip((x, residual), others, strict=True):
        close(one.grad, other.grad)


def test_the_gradient_of_a_residual_that_beta_leaves_out_is_zeros():
    values, meta, _ = weight()
    residual = randn(3, 3).requires_grad_()
    y = S.linear(randn(5, 64), values, meta, None, residual=residual, beta=0.0)
    y.backward(torch.full_like(y, torch.inf))
    assert torch.equal(residual.grad, torch.zeros_like(residual))
