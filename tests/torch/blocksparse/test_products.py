"""Products of block-sparse matrices in PyTorch, against dense ones in float64, and their gradients."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sparse24_plans import (
    BlockSparseLayout,
    BlockSparseMatmulDescriptor,
    InvalidProblemError,
    PlanPreference,
    UnsupportedError,
    compress_blocks,
)
from sparse24_plans.torch.activations import GRADIENTS, is_gated
from sparse24_plans.torch.blocksparse import Layout, MatMul, attention, conv2d, matmul, plan_dispatch, softmax
from tests.torch.cases import wanting

from .cases import BITMAPS, FLOATS, SPARSE, close, dense_of, layout_of, operands, product, randn

F = torch.nn.functional
modes = pytest.mark.parametrize("mode", SPARSE)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)
ways = pytest.mark.parametrize(
    ("trans_a", "trans_b"), list(itertools.product((False, True), repeat=2)), ids=["nn", "nt", "tn", "tt"]
)


def as_dense(result, layout, mode):
    return dense_of(result, layout) if mode == "sdd" else result


@modes
@ways
@floats
def test_products_are_those_of_dense_matrices(mode, trans_a, trans_b, dtype):
    layout = layout_of()
    a, b = operands(mode, layout, trans_a=trans_a, trans_b=trans_b, dtype=dtype)
    y = matmul(a, b, layout, mode, trans_a, trans_b)
    assert y.dtype == dtype
    assert y.is_contiguous()
    close(as_dense(y, layout, mode), product(a, b, layout, mode, trans_a, trans_b), dtype)


@modes
@ways
def test_gradients_are_those_of_dense_matrices(mode, trans_a, trans_b):
    layout = layout_of()
    a, b = map(wanting, operands(mode, layout, trans_a=trans_a, trans_b=trans_b))
    y = matmul(a, b, layout, mode, trans_a, trans_b)
    dy = randn(*y.shape, seed=3)
    ours = torch.autograd.grad(y, (a, b), dy)
    wide = [wanting(t.double()) for t in (a, b)]
    exact = product(*wide, layout, mode, trans_a, trans_b)
    theirs = torch.autograd.grad(exact, wide, as_dense(dy, layout, mode).double())
    for found, wanted in zip(ours, theirs, strict=True):
        close(found, wanted)


@modes
@pytest.mark.parametrize("name", BITMAPS)
def test_every_layout_has_results_and_gradients(mode, name):
    layout = layout_of(name)
    a, b = map(wanting, operands(mode, layout))
    y = matmul(a, b, layout, mode)
    close(as_dense(y, layout, mode), product(a, b, layout, mode, False, False))
    y.sum().backward()
    assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)
    assert a.grad.isfinite().all()


@modes
@pytest.mark.parametrize("block", [32, 64, 128])
def test_blocks_of_every_size(mode, block):
    layout = layout_of(block=block)
    a, b = operands(mode, layout, batch=1, n=8)
    close(
        as_dense(matmul(a, b, layout, mode), layout, mode),
        product(a, b, layout, mode, False, False),
        torch.float32 if block < 128 else torch.float16,
    )


@modes
@ways
@pytest.mark.filterwarnings("ignore:Input #")  # float64 isn't served
def test_gradcheck(mode, trans_a, trans_b):
    """A product is linear in each operand, so that large steps are exact but for rounding."""
    layout = layout_of("empty rows and columns")
    assert torch.autograd.gradcheck(
        lambda *t: matmul(*t, layout, mode, trans_a, trans_b),
        tuple(map(wanting, operands(mode, layout, trans_a=trans_a, trans_b=trans_b, batch=1, n=1))),
        eps=0.5,
        atol=1e-3,
        rtol=1e-3,
        fast_mode=True,
        nondet_tol=0,
        raise_exception=True,
    )


@modes
def test_a_gradient_of_a_gradient(mode):
    layout = layout_of()
    a, b = map(wanting, operands(mode, layout))
    (da,) = torch.autograd.grad((matmul(a, b, layout, mode) ** 2).sum(), a, create_graph=True)
    v = randn(*a.shape, seed=8)
    (dda,) = torch.autograd.grad(da, a, v)
    wide = wanting(a.double())
    (da,) = torch.autograd.grad(
        (product(wide, b, layout, mode, False, False) ** 2).sum(), wide, create_graph=True
    )
    (exact,) = torch.autograd.grad(da, wide, v.double())
    close(dda / exact.abs().max(), exact / exact.abs().max())


ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("mode", ["dsd", "dds"])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_epilogues_and_their_gradients(mode, name, with_bias):
    layout = layout_of()
    a, b = map(wanting, operands(mode, layout))
    width = layout.shape.rows if mode == "dsd" else layout.shape.cols
    bias = wanting(randn(2, width)) if with_bias else None
    y = matmul(a, b, layout, mode, bias=bias, activation=name, alpha=0.5)
    wide = [wanting(t.double()) for t in (a, b, *([bias] if with_bias else []))]
    v = 0.5 * product(*wide[:2], layout, mode, False, False)
    if with_bias:
        v = v + (wide[2][None, :, :, None] if mode == "dsd" else wide[2][None, :, None])
    exact = ACTIVATIONS[name](v)
    close(y, exact)
    dy = randn(*y.shape, seed=2)
    ours = torch.autograd.grad(y, [t for t in (a, b, bias) if t is not None], dy)
    for found, wanted in zip(ours, torch.autograd.grad(exact, wide, dy.double()), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("mode", ["dsd", "dds"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_an_epilogues_gradients(mode, name):
    layout = layout_of()

    def second(y, a, b):
        da, db = torch.autograd.grad((y**2).sum(), (a, b), create_graph=True)
        mixed = (da * randn(*da.shape, seed=5)).sum() + (db * randn(*db.shape, seed=6)).sum()
        return torch.autograd.grad(mixed, (a, b))

    a, b = map(wanting, operands(mode, layout))
    ours = second(matmul(a, b, layout, mode, activation=name, alpha=0.5), a, b)
    wide = [wanting(t.double()) for t in (a, b)]
    exact = ACTIVATIONS[name](0.5 * product(*wide, layout, mode, False, False))
    for found, wanted in zip(ours, second(exact, *wide), strict=True):
        close(found / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_activations_have_gradients(name):
    """A gradient is a function of the result's gradient and of the argument, whose rows a gate halves."""
    v = wanting(torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    dy = wanting(randn(3, 16 if is_gated(name) else 32).double())
    assert torch.autograd.gradcheck(GRADIENTS[name], (dy, v))
    with torch.no_grad():
        wanted = GRADIENTS[name](dy, v)
    torch.testing.assert_close(GRADIENTS[name](dy, v).detach(), wanted)


@modes
def test_results_of_float32_and_their_gradients_in_the_operands_dtype(mode):
    layout = layout_of()
    a, b = map(wanting, operands(mode, layout, dtype=torch.bfloat16))
    y = matmul(a, b, layout, mode, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    close(as_dense(y, layout, mode), product(a, b, layout, mode, False, False))
    y.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.bfloat16


@modes
def test_operands_that_are_not_contiguous(mode):
    layout = layout_of()
    a, b = operands(mode, layout)
    spread = [t.mT.contiguous().mT for t in (a, b)]
    assert not spread[0].is_contiguous()
    assert torch.equal(matmul(*spread, layout, mode), matmul(a, b, layout, mode))


@modes
@pytest.mark.parametrize(("batch", "n"), [(0, 4), (1, 0)])
def test_nothing_is_a_size(mode, batch, n):
    layout = layout_of()
    a, b = map(wanting, operands(mode, layout, batch=batch, n=n))
    y = matmul(a, b, layout, mode)
    close(as_dense(y, layout, mode), product(a, b, layout, mode, False, False))
    y.sum().backward()
    assert not a.grad.any()


def test_integers_are_exact():
    layout = layout_of()
    a, b = (torch.randint(-9, 10, t.shape, dtype=torch.int8) for t in operands("dsd", layout))
    y = matmul(a, b, layout, "dsd", out_dtype=torch.float32)
    assert torch.equal(y.double(), product(a, b, layout, "dsd", False, False))


def test_a_preference_reaches_the_plan():
    layout = layout_of()
    a, b = map(wanting, operands("dsd", layout))
    strict = PlanPreference(require={"deterministic": True}).model_dump_json(exclude_defaults=True)
    y = matmul(a, b, layout, "dsd", preference=strict)
    close(y, product(a, b, layout, "dsd", False, False))
    y.sum().backward()
    with pytest.raises(InvalidProblemError, match="row"):
        matmul(a, b, layout, "dsd", preference='{"row": 1}')


def test_an_updated_layout_serves_the_new_mask():
    layout = layout_of()
    a, b = operands("dsd", layout)
    before = matmul(a, b, layout, "dsd")
    address = layout.tables.data_ptr()
    layout.update(layout.layout.bitmap[::-1])
    assert layout.tables.data_ptr() == address
    after = matmul(a, b, layout, "dsd")
    close(after, product(a, b, layout, "dsd", False, False))
    assert not torch.equal(after, before)


@modes
@ways
def test_plans_know_how_long_the_layouts_rows_are(mode, trans_a, trans_b):
    kept = np.zeros((40, 12), bool)
    kept[3], kept[:, 5], kept[20:, 7] = True, True, True
    layout = Layout(BlockSparseLayout(kept[None], 16))
    assert layout.panels == (12, 40)
    a, b = (wanting(one) for one in operands(mode, layout, trans_a=trans_a, trans_b=trans_b, n=23))
    with (
        mock.patch.object(plan_dispatch, "plans", type(plan_dispatch.plans)()),
        mock.patch.object(plan_dispatch, "descriptor", wraps=plan_dispatch.descriptor) as made,
    ):
        matmul(a, b, layout, mode, trans_a, trans_b).sum().backward()
    asked = [one.kwargs for one in made.call_args_list if one.kwargs["batch"] == 2 and one.kwargs["n"] > 2]
    assert {mode, "sdd"} <= {one["op"] for one in asked}
    assert any(one.get("longest_panel") for one in asked)
    for one in asked:
        known = BlockSparseMatmulDescriptor(
            **{name: one[name] for name in ("op", "n", "element", "trans_a", "trans_b")}, layout=layout.layout
        )
        assert one.get("longest_panel", 0) == known.longest_panel


def test_panels_are_those_of_a_layout():
    layout, op = layout_of(), torch.ops.sparse24.blocksparse_matmul
    about = layout.tables, layout.sizes, "dsd"
    with pytest.raises(InvalidProblemError, match=r"panels: expected Layout.panels or \[\], got \[3\]"):
        op(*operands("dsd", layout), *about, panels=[3])


def test_the_module_pads_leading_dimensions():
    layout = layout_of("all blocks")
    a, b = operands("dsd", layout, batch=1)
    wanted = matmul(a, b, layout, "dsd")
    assert torch.equal(MatMul(layout, 16, "dsd")(a[0], b[0, 0]), wanted)
    assert torch.equal(MatMul(torch.ones(1, 2, 2, dtype=torch.int64), 16, "dsd")(a[0], b[0]), wanted)
    a, b = operands("dds", layout, batch=1)
    transposed = MatMul(layout, mode="dds", trans_a=True)
    assert torch.equal(transposed(a.mT[0, 0], b[0]), matmul(a, b, layout, "dds"))


# Mismatches ---------------------------------------------------------------------------------------


def mistakes():
    """Arguments that can't be, and what the error says."""
    layout = layout_of()
    a, b = operands("dsd", layout)
    d, v = operands("dds", layout)
    left, right = operands("sdd", layout)
    return {
        "K of dsd": ((a, b[:, :, :-16], layout, "dsd"), r"b: expected shape \[2, 2, 48, 20\]"),
        "K of dds": ((d[..., :-1], v, layout, "dds"), r"a: expected shape \[2, 2, 20, 32\]"),
        "K of sdd": ((left, right[:, :, 1:], layout, "sdd"), r"b: expected shape \[2, 2, 20, 48\]"),
        "ragged rows": ((left[:, :, :-1], right, layout, "sdd"), r"a: expected shape \[2, 2, 32, 20\]"),
        "batch": ((a[:1], b, layout, "dsd"), r"b: expected shape \[1, 2, 48, 20\]"),
        "heads": ((a, b[:, :1], layout, "dsd"), "b: expected shape"),
        "blocks": ((a[:, :-1], b, layout, "dsd"), "a: expected shape"),
        "dimensions": ((a[0], b, layout, "dsd"), r"a: expected \[Z, blocks, block, block\]"),
        "dense dimensions": ((a, b[0], layout, "dsd"), r"b: expected \[Z, H, rows, cols\]"),
        "dtypes": ((a, b.half(), layout, "dsd"), "b: expected torch.float32, got torch.float16"),
        "float64": ((a.double(), b.double(), layout, "dsd"), "a: expected one of"),
        "op": ((a, b, layout, "dss"), "op: expected sdd, dsd or dds, got 'dss'"),
    }


@pytest.mark.parametrize("name", mistakes())
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_refused_by_name(name, device):
    (a, b, layout, mode), message = mistakes()[name]
    with pytest.raises(InvalidProblemError, match=message):
        matmul(a.to(device), b.to(device), layout.to(device), mode)


CALLS = {
    "matmul": lambda layout: matmul(randn(1, 4, 16, 16), randn(1, 1, 32, 8), layout, "dsd"),
    "softmax": lambda layout: softmax(randn(1, 4, 16, 16), layout),
    "attention": lambda layout: attention(*[randn(1, 1, 32, 16)] * 3, layout, dropout_p=0.5),
    "conv2d": lambda layout: conv2d(randn(1, 32, 4, 4), randn(4, 16, 16), layout, 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", ["Tensor", "BlockSparseLayout", "NoneType"])
def test_functions_take_layouts_alone(call, kind):
    layout = layout_of("all blocks")
    call(layout)
    given = {"Tensor": layout.bitmap, "BlockSparseLayout": layout.layout, "NoneType": None}[kind]
    message = f"layout: expected a Layout, got a {kind}; Layout\\(bitmap, block\\) makes one"
    with pytest.raises(InvalidProblemError, match=message):
        call(given)


def test_epilogues_that_cannot_be_are_refused():
    layout = layout_of()
    with pytest.raises(InvalidProblemError, match="epilogue: expected identity for op sdd"):
        matmul(*operands("sdd", layout), layout, "sdd", activation="relu")
    with pytest.raises(InvalidProblemError, match=r"bias: expected shape \[2, 32\]"):
        matmul(*operands("dsd", layout), layout, "dsd", bias=randn(2, 48))
    with pytest.raises(InvalidProblemError, match="activation: expected one of"):
        matmul(*operands("dsd", layout), layout, "dsd", activation="tanh")


def test_tables_that_are_not_the_layouts_are_refused():
    layout, op = layout_of(), torch.ops.sparse24.blocksparse_matmul
    a, b = operands("dsd", layout)
    with pytest.raises(InvalidProblemError, match="layout: expected shape"):
        op(a, b, layout.tables[1:], layout.sizes, "dsd")
    with pytest.raises(InvalidProblemError, match=r"layout: expected torch\.int32"):
        op(a, b, layout.tables.long(), layout.sizes, "dsd")
    with pytest.raises(InvalidProblemError, match="shape: expected heads, rows, cols, block, blocks"):
        op(a, b, layout.tables, layout.sizes[:4], "dsd")
    with pytest.raises(InvalidProblemError, match="block: expected one of 16"):
        op(a, b, layout.tables, [2, 32, 48, 8, 7], "dsd")


# Blocks that are 2:4 inside -----------------------------------------------------------------------


def two_of_four(layout: Layout, along: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random blocks, and the same blocks pruned to 2:4."""
    one = layout.shape
    cells = randn(2, one.blocks, one.block, one.block, dtype=torch.float16)
    quads = cells if along == "columns" else cells.mT
    quads[..., 1::4], quads[..., 2::4] = 0, 0
    values, metadata = map(torch.from_numpy, compress_blocks(layout.layout, cells.numpy(), along=along))
    return cells.to(dtype), values.to(dtype), metadata


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("mode", "transposed"), [("dsd", False), ("dsd", True), ("dds", False), ("dds", True)]
)
def test_blocks_that_are_2_4(mode, transposed, dtype):
    layout = layout_of(block=64)
    along = "columns" if (mode == "dsd") != transposed else "rows"
    whole, values, metadata = two_of_four(layout, along, dtype)
    rows, cols = layout.shape.rows, layout.shape.cols
    inner = (cols if mode == "dsd" else rows) if not transposed else (rows if mode == "dsd" else cols)
    x = randn(2, 2, *((inner, 24) if mode == "dsd" else (24, inner)), dtype=dtype)
    order = (lambda s: (s, x)) if mode == "dsd" else (lambda s: (x, s))
    flags = {"trans_a" if mode == "dsd" else "trans_b": transposed}
    exact = matmul(*order(whole), layout, mode, **flags, out_dtype=torch.float32)
    found = matmul(*order(values), layout, mode, **flags, out_dtype=torch.float32, metadata=metadata)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)


def test_blocks_that_are_2_4_have_no_gradient():
    layout = layout_of(block=64)
    _, values, metadata = two_of_four(layout, "columns", torch.float16)
    x = randn(2, 2, layout.shape.cols, 8, dtype=torch.float16)
    for a, b in ((values, wanting(x)), (wanting(values), x)):
        with pytest.raises(UnsupportedError, match="metadata: expected operands that need no gradient"):
            matmul(a, b, layout, "dsd", metadata=metadata)
    with pytest.raises(InvalidProblemError, match=r"metadata: expected shape \[2, 7, 64, 8\]"):
        matmul(values, x, layout, "dsd", metadata=metadata[:, :, :32])
    with pytest.raises(InvalidProblemError, match="inner: expected dense for op sdd"):
        matmul(x.mT, x, layout, "sdd", metadata=metadata)


def test_2_4_blocks_pass_opcheck():
    layout = layout_of(block=64)
    _, values, metadata = two_of_four(layout, "columns", torch.float16)
    x = randn(2, 2, layout.shape.cols, 8, dtype=torch.float16)
    op = torch.ops.sparse24.blocksparse_matmul
    torch.library.opcheck(op, (values, x, layout.tables, layout.sizes, "dsd"), {"metadata": metadata})
