"""The softmax over kept cells in PyTorch, against a dense one in float64, and its gradients."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch.blocksparse import Softmax, softmax
from tests.torch.cases import wanting

from .cases import BITMAPS, FLOATS, close, dense_of, layout_of, mask_of, randn

SCALE = 0.3
ADDED = ("rpe", "key_padding_mask", "attn_mask")


def scores(layout, batch=2, dtype=torch.float32):
    one = layout.shape
    return randn(batch, one.blocks, one.block, one.block, dtype=dtype, seed=1)


def added(layout, batch=2, dtype=torch.float32):
    """Return what is added to the scores, by operand."""
    one = layout.shape
    shapes = ((one.heads, one.rows, one.cols), (batch, one.cols), (one.rows, one.cols))
    return {
        name: randn(*shape, dtype=dtype, seed=at)
        for at, (name, shape) in enumerate(zip(ADDED, shapes, strict=True))
    }


def exact_softmax(x, layout, scale=1.0, rpe=None, key_padding_mask=None, attn_mask=None, seen=True):
    """Dense [Z, heads, rows, cols], with what is added; ``seen`` says which kept cells count."""
    v = scale * dense_of(x, layout)
    for one, index in ((rpe, None), (key_padding_mask, (slice(None), None, None)), (attn_mask, None)):
        if one is not None:
            v = v + (one.double() if index is None else one.double()[index])
    v = v.masked_fill(~(mask_of(layout) & seen), -torch.inf)
    return torch.nan_to_num(v.softmax(-1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BITMAPS)
def test_a_softmax_is_that_of_the_dense_matrix(name, dtype):
    layout = layout_of(name)
    x = scores(layout, dtype=dtype)
    before = x.clone()
    y = softmax(x, layout, SCALE)
    assert torch.equal(x, before)
    assert y.dtype == dtype
    close(dense_of(y, layout), exact_softmax(x, layout, SCALE), dtype)


@pytest.mark.parametrize("given", [("rpe",), ("key_padding_mask",), ("attn_mask",), ADDED], ids="+".join)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_added(given, dtype):
    layout = layout_of()
    x, masks = scores(layout, dtype=dtype), added(layout, dtype=dtype)
    masks = {name: masks[name] for name in given}
    y = Softmax(layout)(x, SCALE, **masks)
    close(dense_of(y, layout), exact_softmax(x, layout, SCALE, **masks), dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_embedding_of_each_batch_and_its_gradient(dtype, masked):
    """Torch-Blocksparse's ``rpe`` has a batch dimension."""
    layout = layout_of()
    one, x = layout.shape, wanting(scores(layout, dtype=dtype))
    rpe = wanting(randn(2, one.heads, one.rows, one.cols, dtype=dtype, seed=5))
    masks = {**added(layout, dtype=dtype), "rpe": rpe} if masked else {"rpe": rpe}
    y = Softmax(layout)(x, SCALE, **masks)
    assert y.dtype == dtype
    wide = [wanting(x.double()), wanting(rpe.double())]
    exact = exact_softmax(wide[0], layout, SCALE, **{**masks, "rpe": wide[1]})
    close(dense_of(y, layout), exact, dtype)
    dy = randn(*y.shape, dtype=dtype, seed=3)
    theirs = torch.autograd.grad(exact, wide, dense_of(dy, layout))
    for found, wanted in zip(torch.autograd.grad(y, (x, rpe), dy), theirs, strict=True):
        close(found, torch.nan_to_num(wanted), dtype)
    assert torch.equal(softmax(x, layout, rpe=rpe[:1]), softmax(x, layout, rpe=rpe[0]))


@pytest.mark.parametrize("change", [lambda x: x[0], lambda x: x[:, 1:], lambda x: x.to(torch.int8)])
def test_scores_beside_an_embedding_of_each_batch_are_checked(change):
    with pytest.raises(
        InvalidProblemError, match=r"^x: expected .*\[.*blocks, block|^x: expected float32, .*"
    ):
        softmax(change(scores(layout_of())), layout_of(), rpe=randn(2, 2, 32, 48))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_masks_that_multiply_drop_cells_where_they_are_zero(dtype):
    layout = layout_of()
    one, x = layout.shape, scores(layout)
    keys, cells = randn(2, one.cols) > -0.5, randn(one.rows, one.cols) > -0.5
    y = softmax(
        x,
        layout,
        SCALE,
        None,
        keys.to(dtype),
        cells.to(dtype),
        key_padding_mask_mode="mul",
        attn_mask_mode="mul",
    )
    close(dense_of(y, layout), exact_softmax(x, layout, SCALE, seen=keys[:, None, None] & cells))


def test_a_tiny_number_is_no_zero_of_a_mask():
    """The dtype of x would round the number to zero."""
    layout = layout_of("all blocks")
    x, keys = scores(layout, dtype=torch.float16), torch.full((2, 32), 1e-30)
    y = softmax(x, layout, key_padding_mask=keys, key_padding_mask_mode="mul")
    close(dense_of(y, layout), exact_softmax(x, layout), torch.float16)


def test_causal():
    layout = layout_of()
    x, one = scores(layout), layout.shape
    y = Softmax(layout, 16, causal=True)(x, SCALE)
    close(
        dense_of(y, layout), exact_softmax(x, layout, SCALE, seen=torch.ones(one.rows, one.cols).tril() > 0)
    )


def test_rows_that_see_nothing_are_zeros_and_have_no_gradient():
    layout = layout_of()
    x = wanting(scores(layout))
    y = softmax(x, layout, attn_mask=torch.zeros(32, 48), attn_mask_mode="mul")
    assert not y.any()
    y.sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("name", ["two heads", "empty rows and columns", "no blocks"])
def test_gradients_of_x_and_of_all_that_is_added(name):
    layout = layout_of(name)
    x, masks = wanting(scores(layout)), {k: wanting(m) for k, m in added(layout).items()}
    y = softmax(x, layout, SCALE, **masks)
    dy = randn(*y.shape, seed=3)
    ours = torch.autograd.grad(y, (x, *masks.values()), dy)
    wide = [wanting(t.double()) for t in (x, *masks.values())]
    exact = exact_softmax(wide[0], layout, SCALE, *wide[1:])
    theirs = torch.autograd.grad(exact, wide, dense_of(dy, layout), allow_unused=True)
    for found, wanted, operand in zip(ours, theirs, wide, strict=True):
        # PyTorch's softmax of a row that is -Inf throughout has NaN for a gradient
        close(found, torch.zeros_like(operand) if wanted is None else torch.nan_to_num(wanted))


@pytest.mark.parametrize("name", ["two heads", "empty rows and columns"])
@pytest.mark.filterwarnings("ignore:Input #")  # float64 isn't served
def test_gradcheck(name):
    layout = layout_of(name)
    x = wanting(scores(layout, batch=1))
    masks = [wanting(m) for m in added(layout, batch=1).values()]
    assert torch.autograd.gradcheck(
        lambda *t: softmax(t[0], layout, SCALE, *t[1:]),
        (x, *masks),
        eps=1e-2,
        atol=2e-3,
        rtol=2e-2,
        fast_mode=True,
    )


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_gradients_of_short_types(dtype):
    layout = layout_of()
    x = wanting(scores(layout, dtype=dtype))
    y = softmax(x, layout, SCALE)
    dy = randn(*y.shape, dtype=dtype, seed=3)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = wanting(x.double())
    (exact,) = torch.autograd.grad(exact_softmax(wide, layout, SCALE), wide, dense_of(dy, layout))
    assert dx.dtype == dtype
    close(dx, exact)


def test_an_embedding_with_a_batch_of_one():
    layout = layout_of()
    x, rpe = scores(layout), added(layout)["rpe"]
    assert torch.equal(softmax(x, layout, rpe=rpe[None]), softmax(x, layout, rpe=rpe))


def test_what_has_no_gradient_says_so():
    layout = layout_of()
    x = wanting(scores(layout))
    keys = wanting(torch.ones(2, 48))
    with pytest.raises(
        UnsupportedError, match="key_padding_mask: expected a mask that needs no gradient in mode mul"
    ):
        softmax(x, layout, key_padding_mask=keys, key_padding_mask_mode="mul")
    (dx,) = torch.autograd.grad(softmax(x, layout).sum(), x)
    with pytest.raises(UnsupportedError, match="blocksparse_softmax_backward has no gradient"):
        torch.autograd.grad((softmax(x, layout) ** 2).sum(), x, create_graph=True)
    assert dx.shape == x.shape


MISTAKES = {
    "blocks": (lambda x, layout: softmax(x[:, 1:], layout), r"x: expected shape \[2, 7, 16, 16\]"),
    "dimensions": (lambda x, layout: softmax(x[0], layout), r"x: expected \[Z, blocks, block, block\]"),
    "dtype": (lambda x, layout: softmax(x.to(torch.int8), layout), "element: expected f32 or f16 or bf16"),
    "rpe": (lambda x, layout: softmax(x, layout, rpe=torch.ones(2, 48, 32)), "rpe: expected shape"),
    "bools as rpe": (
        lambda x, layout: softmax(x, layout, rpe=torch.ones(2, 32, 48) > 0),
        "^rpe: expected numbers to add, got torch.bool$",
    ),
    **{
        f"rpe of batches {name}": (
            lambda x, layout, rpe=rpe: softmax(x, layout, rpe=rpe),
            r"rpe: expected numbers \[2, 2, 32, 48\] on cpu, got torch\.",
        )
        for name, rpe in {
            "count": torch.ones(3, 2, 32, 48),
            "sides": torch.ones(2, 2, 48, 32),
            "bools": torch.ones(2, 2, 32, 48) > 0,
            "device": torch.ones(2, 2, 32, 48, device="meta"),
        }.items()
    },
    "keys": (
        lambda x, layout: softmax(x, layout, key_padding_mask=torch.ones(2, 32)),
        r"key_padding_mask: expected shape \[2, 48\], got \[2, 32\]",
    ),
    "cells": (
        lambda x, layout: softmax(x, layout, attn_mask=torch.ones(48, 32)),
        r"attn_mask: expected shape \[32, 48\]",
    ),
    "mode": (
        lambda x, layout: softmax(x, layout, attn_mask=torch.ones(32, 48), attn_mask_mode="and"),
        "attn_mask_mode: expected add or mul, got 'and'",
    ),
    "added bools": (
        lambda x, layout: softmax(x, layout, attn_mask=torch.ones(32, 48) > 0),
        "attn_mask: expected numbers to add, got torch.bool",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_refused_by_name(name):
    call, message = MISTAKES[name]
    layout = layout_of()
    with pytest.raises(InvalidProblemError, match=message):
        call(scores(layout), layout)
