"""Convolution with block-sparse filters in PyTorch, against dense filters in float64, and its gradients."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from sparse24_plans import BlockSparseLayout, InvalidProblemError, PlanPreference, UnsupportedError
from sparse24_plans.torch.blocksparse import Conv2d, Layout, conv2d, conv_ops
from tests.torch.cases import wanting

from .cases import FLOATS, close, dense_of, randn

F = torch.nn.functional
WALKS = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "1x1": {"kernel_size": 1},
    "strided": {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0)},
    "dilated": {"kernel_size": (2, 3), "stride": (1, 3), "dilation": (3, 1), "padding": 2},
}
every_walk = pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)


def layout_of(walk, block=16, density=0.5):
    taps = tuple(np.broadcast_to(walk["kernel_size"], 2))
    bitmap = np.random.default_rng(0).random((3, 2, *taps)) < density
    return bitmap, Layout(bitmap.reshape(1, 3, -1), block)


def operands(layout, walk, channels=2, dtype=torch.float32):
    one = layout.shape
    x = randn(2, channels * one.block, 9, 8, dtype=dtype)
    return wanting(x), wanting(randn(one.blocks, one.block, one.block, dtype=dtype, seed=1) / 4)


def filter_of(weight, layout, walk):
    """[K, C, R, S] in float64: independent of the package but for the bitmap."""
    one, (rows, columns) = layout.shape, np.broadcast_to(walk["kernel_size"], 2)
    dense = dense_of(weight[None], layout)[0, 0]
    tiles = dense.view(one.rows, -1, rows, columns, one.block)
    return tiles.permute(0, 1, 4, 2, 3).reshape(one.rows, -1, rows, columns)


def exact(x, weight, layout, walk, bias=None):
    more = {name: one for name, one in walk.items() if name != "kernel_size"}
    wide = None if bias is None else bias.double()
    return F.conv2d(x.double(), filter_of(weight, layout, walk), wide, **more)


@every_walk
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_convolution_is_that_of_a_dense_filter(walk, dtype, with_bias):
    _, layout = layout_of(walk)
    x, weight = operands(layout, walk, dtype=dtype)
    bias = randn(48, dtype=dtype) if with_bias else None
    y = conv2d(x, weight, layout, bias=bias, **walk)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(y, exact(x, weight, layout, walk, bias), dtype)


@every_walk
def test_gradients_are_those_of_a_dense_filter(walk):
    _, layout = layout_of(walk)
    x, weight = operands(layout, walk)
    bias = wanting(randn(48))
    y = conv2d(x, weight, layout, bias=bias, **walk)
    dy = randn(*y.shape, seed=3)
    ours = torch.autograd.grad(y, (x, weight, bias), dy)
    wide = [wanting(t.double()) for t in (x, weight, bias)]
    theirs = torch.autograd.grad(exact(wide[0], wide[1], layout, walk, wide[2]), wide, dy.double())
    for found, wanted in zip(ours, theirs, strict=True):
        close(found, wanted)


@every_walk
def test_gradients_of_gradients(walk):
    """A convolution is linear in x and in its filter, so each op's gradients are the other two."""
    _, layout = layout_of(walk)

    def second(convolve, x, weight):
        y = convolve(x, weight)
        dx, dw = torch.autograd.grad((y**2).sum(), (x, weight), create_graph=True)
        mixed = (dx * randn(*dx.shape, seed=5)).sum() + (dw * randn(*dw.shape, seed=6)).sum()
        return torch.autograd.grad(mixed, (x, weight))

    x, weight = operands(layout, walk)
    ours = second(lambda x, w: conv2d(x, w, layout, **walk), x, weight)
    wide = [wanting(t.double()) for t in (x, weight)]
    theirs = second(lambda x, w: exact(x, w, layout, walk), *wide)
    for found, wanted in zip(ours, theirs, strict=True):
        close(found / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
@every_walk
def test_where_no_kernel_serves_pytorch_convolves_with_a_dense_filter(walk, op, monkeypatch):
    """Results are those of the kernels. A preference is refused instead."""
    _, layout = layout_of(walk)
    x, weight = operands(layout, walk)
    bias = wanting(randn(48))
    inputs = (x, weight, bias)

    def found(preference=""):
        y = conv2d(*inputs[:2], layout, bias=bias, preference=preference, **walk)
        return (y, *torch.autograd.grad(y, inputs, randn(*y.shape, seed=3)))

    wanted = found()
    run = conv_ops.run

    def refusing(problem):
        if problem.fields["op"] == op:
            raise UnsupportedError("none")
        return run(problem)

    monkeypatch.setattr(conv_ops, "run", refusing)
    for ours, theirs in zip(found(), wanted, strict=True):
        close(ours, theirs)
    with pytest.raises(UnsupportedError, match="none"):
        found(PlanPreference(require={"deterministic": True}).model_dump_json())


# The module -----------------------------------------------------------------------------------------


def module(**options):
    walk = WALKS["strided"]
    bitmap, _ = layout_of(walk)
    return Conv2d(32, 48, layout=bitmap, block=16, **walk, **options)


def test_a_module_of_a_dense_one():
    bitmap, layout = layout_of(WALKS["strided"])
    dense = torch.nn.Conv2d(32, 48, **WALKS["strided"])
    ours = Conv2d.from_conv2d(dense, bitmap, 16)
    kept = torch.from_numpy(np.kron(bitmap, np.ones((16, 16, 1, 1), bool)))
    assert torch.equal(ours.dense_weight(), dense.weight * kept)
    x = randn(2, 32, 9, 8)
    close(ours(x), F.conv2d(x, dense.weight * kept, dense.bias, 2, (1, 0)))
    assert ours.layout.layout == layout.layout
    shared = Conv2d.from_conv2d(dense, ours.layout)
    assert shared.layout is ours.layout


def test_a_module_is_saved_copied_and_trained():
    ours = module(bias=True)
    other = module(bias=True)
    other.load_state_dict(ours.state_dict())
    x = randn(2, 32, 9, 8)
    assert torch.equal(other(x), ours(x))
    assert torch.equal(pickle.loads(pickle.dumps(ours))(x), ours(x))
    before = ours(x).square().mean()
    before.backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter -= 0.01 * parameter.grad
    assert ours(x).square().mean() < before


def test_a_compiled_module():
    ours = module(bias=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        x = wanting(randn(batch, 32, 9, 8))
        assert torch.equal(compiled(x), ours(x))
        (found,) = torch.autograd.grad(compiled(x).sum(), x)
        assert torch.equal(found, *torch.autograd.grad(ours(x).sum(), x))


def test_autocast():
    ours = module(bias=True)
    x = randn(2, 32, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    close(y, ours(x), torch.bfloat16)


# Refusals -------------------------------------------------------------------------------------------


def test_integers_of_numpy_are_integers():
    walk = {name: np.int64(one) for name, one in WALKS["3x3"].items()}
    _, layout = layout_of(WALKS["3x3"])
    x, weight = operands(layout, WALKS["3x3"])
    assert torch.equal(conv2d(x, weight, layout, **walk), conv2d(x, weight, layout, **WALKS["3x3"]))


def test_wrong_arguments():
    walk = WALKS["3x3"]
    bitmap, layout = layout_of(walk)
    x, weight = operands(layout, walk)
    with pytest.raises(InvalidProblemError, match=r"x: expected \[N, C, height, width\], got \[32, 9, 8\]"):
        conv2d(x[0], weight, layout, **walk)
    with pytest.raises(InvalidProblemError, match=r"x: expected shape \[2, 9, 8, 32\], got \[2, 9, 8, 16\]"):
        conv2d(x[:, :16], weight, layout, **walk)
    with pytest.raises(InvalidProblemError, match="filter: expected shape"):
        conv2d(x, weight[1:], layout, **walk)
    with pytest.raises(InvalidProblemError, match=r"filter: expected torch\.float32, got torch\.float16"):
        conv2d(x, weight.half(), layout, **walk)
    with pytest.raises(InvalidProblemError, match=r"stride: expected an integer or two, got 1\.5"):
        conv2d(x, weight, layout, 3, stride=1.5)
    with pytest.raises(InvalidProblemError, match="stride"):
        conv2d(x, weight, layout, 3, stride=0)
    with pytest.raises(InvalidProblemError, match=r"layout: expected \[K/block, C/block, 1, 1\], got"):
        Conv2d(32, 48, 1, bitmap, 16)
    with pytest.raises(InvalidProblemError, match=r"layout: expected 1 head of \[48, 64 \* 9\], got 1 of"):
        Conv2d(64, 48, 3, bitmap, 16)
    with pytest.raises(InvalidProblemError, match="layout: expected 1 head"):
        Conv2d(32, 48, 3, BlockSparseLayout(np.ones((2, 3, 18), bool), 16))
    with pytest.raises(InvalidProblemError, match="block: expected 16, 32, 64 or 128 beside a bitmap"):
        Conv2d(32, 48, 3, bitmap)
    for options in ({"groups": 2}, {"padding_mode": "circular", "padding": 1}, {"padding": "same"}):
        dense = torch.nn.Conv2d(32, 48, 3, **options)
        with pytest.raises(
            InvalidProblemError, match="conv: expected one group and padding by a number of zeros"
        ):
            Conv2d.from_conv2d(dense, bitmap, 16)
    with pytest.raises(InvalidProblemError, match=r"conv: expected an nn.Conv2d, got a Linear"):
        Conv2d.from_conv2d(torch.nn.Linear(2, 2), bitmap, 16)
