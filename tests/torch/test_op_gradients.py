"""Gradients of the ops are those of dense products, and where there is none the ops say so."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import UnsupportedError

from .cases import S, close, integers, randn, wanting, weight
from .test_ops import ACTIVATIONS

F = torch.nn.functional


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_dense_layer(name, dtype):
    """Gradients of x, bias and the kept values are compared; pruned cells have none."""
    values, meta, dense = weight(dtype=dtype)
    x, values, bias = wanting(randn(2, 5, 64, dtype=dtype)), wanting(values), wanting(randn(96, dtype=dtype))
    dy = randn(2, 5, 96, dtype=dtype, seed=5)
    if name == "relu2":  # its slope is 2v, about 16
        dy = dy / 16
    ours = torch.autograd.grad(S.linear(x, values, meta, bias, None, name), (x, values, bias), dy)
    wide = [wanting(t.double()) for t in (x, dense, bias)]
    theirs = torch.autograd.grad(ACTIVATIONS[name](F.linear(*wide)), wide, dy.double())
    close(ours[0], theirs[0])
    close(S.decompress(ours[1], meta), torch.where(dense != 0, theirs[1], 0.0), dtype)
    close(ours[2], theirs[2])
    assert [g.dtype for g in ours] == [dtype] * 3


def test_a_gradient_of_a_gradient():
    values, meta, dense = weight()
    x, v = wanting(randn(5, 64)), randn(5, 64, seed=9)
    (dx,) = torch.autograd.grad((S.linear(x, values, meta) ** 2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx, x, v)
    close(ddx, 2 * (v.double() @ dense.double().t()) @ dense.double())


def test_gradients_of_mm_and_dgrad():
    values, meta, dense = weight()
    for product, reference, operand in (
        (lambda v, b: S.mm(v, meta, b, may_transpose=True), lambda w, b: w @ b, randn(64, 5)),
        (lambda v, dy: S.dgrad(dy, v, meta), lambda w, dy: dy @ w, randn(5, 96)),
    ):
        v, b, w, c = wanting(values), wanting(operand), wanting(dense.double()), wanting(operand.double())
        y, z = product(v, b), reference(w, c)
        dy = randn(*y.shape, seed=4)
        dv, db = torch.autograd.grad(y, (v, b), dy)
        dw, dc = torch.autograd.grad(z, (w, c), dy.double())
        close(db, dc)
        close(S.decompress(dv, meta), torch.where(dense != 0, dw, 0.0))


def test_preparing_is_differentiated_where_it_keeps():
    dense = randn(32, 64)
    grad = randn(32, 64, seed=2)
    for op in (
        S.prune,
        lambda d: S.decompress(*S.prune_compress(d)),
        lambda d: S.decompress(*S.tile_prune(d)[:2]),
    ):
        d = wanting(dense)
        kept = op(d)
        (found,) = torch.autograd.grad(kept, d, grad)
        assert torch.equal(found, torch.where(kept != 0, grad, 0.0))


def test_ops_without_a_gradient_say_so():
    bytes_, meta = S.prune_compress(integers(96, 64))
    bias = wanting(randn(96))
    with pytest.raises(UnsupportedError, match="scaled_linear has no gradient"):
        S.scaled_linear(integers(5, 64), bytes_, meta, None, None, bias, out_dtype=torch.float32)
    values, meta, _ = weight(dtype=torch.bfloat16)
    packed = wanting(S.pack(values, meta))
    y = S.linear(randn(5, 64, dtype=torch.bfloat16), packed, None, None, 96)
    with pytest.raises(UnsupportedError, match="packed weight has no gradient"):
        y.sum().backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_transforms_that_take_gradients_are_refused(transform):
    values, meta, _ = weight()
    with pytest.raises(UnsupportedError, match=r"sparse24::linear has no .*torch\.func"):
        transform(lambda v: S.linear(v, values, meta).sum())(randn(5, 64))


def test_forward_mode_is_refused_instead_of_giving_no_tangent():
    values, meta, _ = weight()
    x, tangent = randn(5, 64), randn(5, 64, seed=3)
    with pytest.raises(UnsupportedError, match="sparse24::linear has no forward-mode derivative"):
        torch.func.jvp(lambda v: S.linear(v, values, meta), (x,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        S.linear(x, values, meta)  # of constants
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        with pytest.raises(UnsupportedError, match="no forward-mode"):
            S.linear(dual, values, meta)
        with pytest.raises(UnsupportedError, match="no forward-mode"):
            S.prune(dual)
