"""``Sparse24Tensor``: functions of each cell, their gradients, and tables of a program's own operations."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Tensor

from .cases import DEVICE, FLOATS, close, integers, pruned, randn

F = torch.nn.functional
aten = torch.ops.aten
M, K = 32, 64
ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
}
MADE = {
    "one side": lambda dense: Sparse24Tensor.from_dense(pruned(dense)),
    "tiles": Sparse24Tensor.prune_dense_static_sort,
    "its transpose": lambda dense: Sparse24Tensor.prune_dense_static_sort(dense.t().contiguous()).t(),
    "a transpose alone": lambda dense: Sparse24Tensor.from_dense(pruned(dense.t().contiguous())).t(),
}
activations = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
made = pytest.mark.parametrize("make", MADE.values(), ids=MADE)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def kept_of(tensor: Sparse24Tensor) -> torch.Tensor:
    """The kept cells, for a tensor of which none is zero."""
    return tensor.to_dense() != 0


def assert_is(tensor: torch.Tensor, dense: torch.Tensor) -> None:
    """Assert that the tensor is a sparse one whose parts all hold this matrix."""
    assert type(tensor) is Sparse24Tensor
    torch.testing.assert_close(tensor.to_dense(), dense)
    if tensor.packed is not None and tensor.packed_t is not None:
        other = Sparse24Tensor(tensor.shape, None, None, tensor.packed_t, tensor.meta_t, None)
        assert torch.equal(other.to_dense(), tensor.to_dense())


# Results --------------------------------------------------------------------------------------------


@floats
@activations
@made
def test_an_activation_is_that_of_the_dense_matrix(make, act, dtype):
    a = make(randn(M, K, dtype=dtype))
    assert_is(act(a), act(a.to_dense()))


@made
def test_products_of_cells(make):
    a, other = make(randn(M, K)), randn(M, K, seed=3)
    w = a.to_dense()
    for factor in (
        other,
        other[0],
        other[:, :1],
        torch.tensor(1.5, device=DEVICE),
        2,
        make(other),
        other.t().contiguous().t(),
    ):
        dense = factor.to_dense() if isinstance(factor, Sparse24Tensor) else factor
        assert_is(a * factor, w * dense)
        assert_is(factor * a, w * dense)
    b = torch.relu(a)
    assert (b * a).meta is a.meta
    assert_is(b * a, b.to_dense() * w)


def test_a_factor_counts_at_kept_cells_alone():
    a = MADE["one side"](randn(M, K))
    factor = torch.where(kept_of(a), 2.0, torch.inf)
    assert_is(a * factor, 2 * a.to_dense())


@made
def test_sums_of_tensors_that_keep_the_same_cells(make):
    a = make(randn(M, K))
    b, w = F.silu(a), a.to_dense()
    assert_is(a + b, w + F.silu(w))
    assert_is(torch.add(a, b, alpha=-2), w - 2 * F.silu(w))
    assert_is(a + make(randn(M, K)), 2 * w)  # equal metadata in other memory
    assert a.add_(b) is a
    assert_is(a, w + F.silu(w))
    with pytest.raises(UnsupportedError, match="add: expected"):
        a.add_(1)


REFUSED = {
    "add: expected two Sparse24Tensors that keep the same cells": lambda a: a + 1,
    "add: expected two Sparse24Tensors that keep .* to_dense": lambda a: a + randn(M, K),
    "add: expected two .* the same cells, whose": lambda a: a + MADE["one side"](randn(M, K, seed=8)),
    "add: expected two .* whose sum is 2:4": lambda a: a + a.t(),
    r"mul.Tensor: expected an operand that broadcasts to \[32, 64\].* got \[2, 32, 64\]": lambda a: (
        a * randn(2, M, K)
    ),
    "mul.Tensor: expected a result of torch.float32, got torch.complex64": lambda a: a * 1j,
    "mul.Tensor: expected torch.float32 on .* got torch.float16": lambda a: a * randn(M, K).half(),
    "mul.Tensor: .* got torch.float32 on meta": lambda a: a * randn(M, K).to("meta"),
    "relu.default: expected float32, float16 or bfloat16, got torch.int8": lambda a: torch.relu(
        Sparse24Tensor.from_dense(pruned(integers(M, K)))
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_operations_without_a_2_4_result_are_refused(message):
    with pytest.raises(UnsupportedError, match=message):
        REFUSED[message](MADE["one side"](randn(M, K)))


# Gradients ------------------------------------------------------------------------------------------


@activations
@made
@pytest.mark.parametrize("dense_gradient", [False, True])
def test_gradients_of_activations_are_those_of_the_kept_cells(make, act, dense_gradient):
    a, x = make(randn(M, K)), randn(5, K, seed=2)
    kept, w = kept_of(a), a.to_dense().double().requires_grad_()
    a.requires_grad_()
    dy = randn(M, K, seed=7)
    if dense_gradient:
        (found,) = torch.autograd.grad(act(a), a, dy)
        (wanted,) = torch.autograd.grad(act(w), w, dy.double())
    else:  # that of a product, through two functions
        F.linear(x, act(act(a))).sum().backward()
        F.linear(x.double(), act(act(w))).sum().backward()
        found, wanted = a.grad, w.grad
    assert_is(found, (wanted * kept).float())


@made
def test_gradients_of_a_gate(make):
    """SwiGLU's product, whose gradients come in dense and leave sparse."""
    a = make(randn(M, K))
    b = (a * randn(M, K, seed=9)).detach()
    kept, operands = kept_of(a), [one.to_dense().double().requires_grad_() for one in (a, b)]
    a.requires_grad_(), b.requires_grad_()
    dy = randn(M, K, seed=4)
    found = torch.autograd.grad(F.silu(a) * b, (a, b), dy)
    wanted = torch.autograd.grad(F.silu(operands[0]) * operands[1], operands, dy.double())
    for one, other in zip(found, wanted, strict=True):
        assert_is(one, (other * kept).float())


def test_gradients_add_up_over_backward_passes():
    a, x = MADE["tiles"](randn(M, K)).requires_grad_(), randn(5, K)
    for _ in range(2):
        F.linear(x, torch.relu(a)).sum().backward()
    w = a.to_dense().requires_grad_()
    F.linear(x, torch.relu(w)).sum().backward()
    assert_is(a.grad, 2 * w.grad)


def test_compiled_functions_of_cells():
    torch._dynamo.reset()
    a, x = MADE["tiles"](randn(M, K)), randn(5, K)

    def layer(x, a):
        return F.linear(x, F.silu(a) * a * 2)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(x, a), layer(x.double(), a.to_dense().double()))


# Tables of a program's own --------------------------------------------------------------------------


class Own(Sparse24Tensor):
    """A program's subclass."""


def negative(func, types, args, kwargs):
    a = args[0]
    return type(a)(a.shape, -a.packed, a.meta, None, None, None)


def test_a_custom_table_serves_its_class_and_subclasses(monkeypatch):
    class Heir(Own):
        pass

    monkeypatch.setattr(Own, "SPARSE_DISPATCH", Own.SPARSE_DISPATCH)
    Own._load_dispatch_table({aten.neg: negative, aten.relu: negative})
    dense = pruned(randn(M, K))
    for kind in (Own, Heir):
        assert torch.equal((-kind.from_dense(dense)).to_dense(), -dense)
        assert torch.equal(torch.relu(kind.from_dense(dense)).to_dense(), -dense)
        assert torch.equal(F.silu(kind.from_dense(dense)).to_dense(), F.silu(dense))
    plain = Sparse24Tensor.from_dense(dense)
    assert torch.equal(torch.relu(plain).to_dense(), torch.relu(dense))
    with pytest.raises(NotImplementedError, match="neg"):
        torch.neg(plain)


def test_a_table_of_pytorchs_kind_is_taken(monkeypatch):
    """Functions of the table are called as by torchao's training code, with each part and the constructor."""

    def like_torchaos(func, types, args=(), kwargs=None):
        (a,) = args
        parts = func(a.packed), a.meta, func(a.packed_t), a.meta_t, a.compressed_swizzled_bitmask
        return a.__class__(a.shape, *parts)

    monkeypatch.setattr(Sparse24Tensor, "SPARSE_DISPATCH", Sparse24Tensor.SPARSE_DISPATCH)
    Sparse24Tensor._load_dispatch_table({aten.tanh: like_torchaos})
    a = MADE["tiles"](randn(M, K))
    assert_is(torch.tanh(a), torch.tanh(a.to_dense()))
    before = Sparse24Tensor.SPARSE_DISPATCH
    Sparse24Tensor._load_dispatch_table()
    assert before == Sparse24Tensor.SPARSE_DISPATCH


@pytest.mark.parametrize(
    "table",
    [[aten.neg], {"neg": negative}, {aten.neg.default: negative}, {aten.neg: None}],
    ids=["a list", "a name", "an overload", "no function"],
)
def test_what_is_no_table_is_refused(table):
    with pytest.raises(InvalidProblemError, match="custom_dispatch_table: expected"):
        Own._load_dispatch_table(table)
