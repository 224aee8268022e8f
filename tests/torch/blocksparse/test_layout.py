"""``Layout``: what it holds, how it moves, is copied, stored and loaded, and what it converts."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from sparse24_plans import BlockSparseLayout, FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.torch.blocksparse import (
    DeepSpeedSparseSelfAttention,
    Layout,
    Linear,
    MatMul,
    Softmax,
    SparsityInfo,
    matmul,
    softmax,
)
from tests.torch.cases import wanting

from .cases import BITMAPS, close, dense_of, layout_of, operands, product, randn

OTHER = [[[0, 1, 1], [0, 0, 1]], [[1, 1, 1], [1, 0, 0]]]
"""A layout with as many blocks as "two heads"."""


def test_a_layout_is_made_from_bitmaps_and_layouts():
    wanted = layout_of()
    bitmap = BITMAPS["two heads"]
    for given in (bitmap, np.array(bitmap), torch.tensor(bitmap), torch.tensor(bitmap) > 0):
        assert Layout(given, 16).layout == wanted.layout
    for given in (wanted.layout, wanted):
        assert Layout(given).layout == wanted.layout
    assert wanted.sizes == (2, 32, 48, 16, 7)
    assert wanted.shape == wanted.layout.shape
    assert torch.equal(wanted.bitmap, torch.tensor(bitmap) > 0)


def test_mistakes_are_named():
    with pytest.raises(
        InvalidProblemError, match="block: expected 16, 32, 64 or 128 beside a bitmap, got None"
    ):
        Layout(BITMAPS["all blocks"])
    with pytest.raises(InvalidProblemError, match="block: expected 16, as the layout's, got 32"):
        Layout(layout_of(), 32)
    with pytest.raises(InvalidProblemError, match="block: expected one of 16"):
        Layout(BITMAPS["all blocks"], 8)
    with pytest.raises(InvalidProblemError, match="bitmap: expected 0 or 1, got 2 at"):
        Layout([[2]], 16)
    with pytest.raises(InvalidProblemError, match="layout: expected BlockSparseShape"):
        layout_of().update([[1]])


def same(ours: Layout, theirs: Layout) -> bool:
    return (
        ours.layout == theirs.layout
        and torch.equal(ours.bitmap, theirs.bitmap)
        and torch.equal(ours.tables, theirs.tables)
    )


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_copies_stand_for_themselves(copied):
    first = layout_of()
    layer = MatMul(first, mode="dsd")
    other = copied(layer)
    assert same(other.layout, first)
    assert other.layout.tables.data_ptr() != first.tables.data_ptr()
    a, b = operands("dsd", first)
    assert torch.equal(other(a, b), layer(a, b))
    other.layout.update(OTHER)
    assert first.layout == layout_of().layout


def test_a_layout_serves_operands_on_other_devices():
    """One on the meta device stands for one that is elsewhere."""
    here, elsewhere = layout_of(), Layout(layout_of().layout, device="meta")
    a, b = operands("dsd", here)
    for mask in (here.layout, BlockSparseLayout(here.layout.bitmap[:, ::-1], 16)):
        here.update(mask)
        elsewhere.update(mask)
        assert torch.equal(matmul(a, b, elsewhere, "dsd"), matmul(a, b, here, "dsd"))
        assert torch.equal(elsewhere.to_dense(a), here.to_dense(a))
        assert torch.equal(elsewhere.kept_blocks(here.to_dense(a)), a)
        assert torch.equal(softmax(a, elsewhere), softmax(a, here))
    assert elsewhere.tables.is_meta


def test_tables_are_copied_where_the_first_call_is_compiled():
    here, elsewhere = layout_of(), Layout(layout_of().layout, device="meta")
    a, b = operands("dsd", here)

    def found(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(a, b, elsewhere, "dsd")

    torch._dynamo.reset()
    assert torch.equal(torch.compile(found, backend="eager")(a, b), matmul(a, b, here, "dsd"))
    assert torch.equal(torch.compile(found, backend="eager", fullgraph=True)(a, b), matmul(a, b, here, "dsd"))


def test_a_compiled_function_may_update_a_layout():
    layout, other = layout_of(), Layout(OTHER, 16)
    a, b = operands("dsd", layout)

    def updated(bitmap: torch.Tensor) -> torch.Tensor:
        layout.update(bitmap)
        return matmul(a, b, layout, "dsd")

    torch._dynamo.reset()
    for wanted in (other, layout_of()):
        found = torch.compile(updated, backend="eager")(wanted.bitmap)
        assert torch.equal(found, matmul(a, b, wanted, "dsd"))


def test_tables_are_copied_once_to_each_device():
    layout = Layout(layout_of().layout, device="meta")
    assert layout.tables_on("meta") is layout.tables
    start = threading.Barrier(8)

    def found(_: int) -> torch.Tensor:
        start.wait()
        return layout.tables_on("cpu")

    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(found, range(8)))
    assert all(one is copies[0] for one in copies)
    assert torch.equal(copies[0], layout_of().tables)
    layout.update(OTHER)
    assert torch.equal(copies[0], Layout(OTHER, 16).tables)
    other = copy.deepcopy(layout)
    assert other.tables_on("cpu") is not copies[0]
    assert torch.equal(other.tables_on("cpu"), copies[0])
    layout.to_empty(device="cpu")
    assert layout.tables_on("cpu") is layout.tables


def test_what_inference_mode_makes_serves_training():
    """Layouts of rules and copies of tables are made in the first call, which may be a validation."""
    meta, x = Layout(OTHER, 16, device="meta"), wanting(randn(1, 3, 48, 8))
    attend = DeepSpeedSparseSelfAttention(SparsityInfo("dense", 16))
    with torch.inference_mode():
        attend(x, x, x)
        meta.tables_on("cpu")
        made = layout_of()
    attend(x, x, x).sum().backward()
    for layout in (meta, made):
        layout.update(OTHER)
        a, b = (wanting(randn(1, 2, *sides)) for sides in ((32, 8), (8, 48)))
        matmul(a, b, layout, "sdd").sum().backward()


def test_a_mask_on_the_cpu_is_taken_by_update_alone():
    layout = layout_of(block=64)
    with pytest.raises(
        UnsupportedError, match="layout: expected tables on a GPU, got those on cpu; call update"
    ):
        layout.update_on_device(layout.bitmap)
    layout.is_behind = True
    assert layout.layout == layout_of(block=64).layout
    assert not layout.is_behind


def test_state_without_bitmap_keeps_mask_of_device():
    """The host does not know that mask, so it must not write its own again."""
    layout = layout_of(block=64)
    layout.is_behind = True
    layout.bitmap.copy_(torch.tensor(OTHER))
    layout.load_state_dict({}, strict=False)
    assert layout.is_behind
    assert layout.layout == BlockSparseLayout(OTHER, 64)


def test_floats_do_not_touch_it():
    layout = layout_of()
    for moved in (layout.half(), layout.double(), layout.to(torch.bfloat16), layout.to("cpu")):
        assert moved is layout
        assert same(layout, layout_of())


def test_the_meta_device_and_back():
    with torch.device("meta"):
        layer = Softmax(layout_of())
    layer = layer.to("meta")
    assert layer.layout.tables.is_meta
    layer.layout.update(OTHER)
    layer.to_empty(device="cpu")
    assert same(layer.layout, Layout(OTHER, 16))


def test_memory_that_holds_anything_is_filled_again():
    layout = layout_of()
    layout.to_empty(device="cpu")
    assert same(layout, layout_of())


def test_a_state_dict_has_the_bitmap_and_brings_another_mask():
    layer, other = Softmax(layout_of()), Softmax(OTHER, 16)
    state = layer.state_dict()
    assert list(state) == ["layout.bitmap"]
    for assign in (False, True):
        fresh = copy.deepcopy(other)
        address = fresh.layout.tables.data_ptr()
        assert str(fresh.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
        assert same(fresh.layout, layer.layout)
        assert fresh.layout.tables.data_ptr() == address
    assert list(Layout(OTHER, 16, persistent=False).state_dict()) == []


@pytest.mark.parametrize(
    ("bitmap", "message"),
    [
        (torch.ones(2, 2, 3, dtype=torch.bool), "layout.bitmap: expected BlockSparseShape"),
        (torch.ones(1, 2, 3, dtype=torch.bool), "layout.bitmap: expected BlockSparseShape"),
        (torch.full((2, 2, 3), 3), "expected 0 or 1, got 3 at block"),
        (torch.ones(3, dtype=torch.bool), r"expected \[heads, rows/block, cols/block\]"),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(bitmap, message):
    layer = Softmax(layout_of())
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict({"layout.bitmap": bitmap})
    assert same(layer.layout, layout_of())
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_state_may_have_bitmap_in_any_form_of_constructor(assign, dtype, dimensions):
    bitmap = torch.tensor(OTHER, dtype=dtype)[:1]
    layer, wanted = Layout(bitmap.flip(2), 16), Layout(bitmap, 16)
    layer.load_state_dict({"bitmap": bitmap[0] if dimensions == 2 else bitmap}, assign=assign)
    assert same(layer, wanted)
    assert layer.bitmap.dtype == torch.bool
    assert layer.bitmap.shape == (1, 2, 3)


@pytest.mark.parametrize("bitmap", ["text", torch.ones(2, 2, 3, dtype=torch.bool, device="meta")], ids=str)
def test_a_state_that_pytorch_refuses_changes_nothing(bitmap):
    layer = Layout(OTHER, 16)
    with pytest.raises(RuntimeError, match="bitmap"):
        layer.load_state_dict({"bitmap": bitmap})
    assert same(layer, Layout(OTHER, 16))


@pytest.mark.parametrize("strict", [False, True])
def test_layout_outside_of_state_dict_takes_no_mask_from_one(strict):
    layer = Layout(OTHER, 16, persistent=False)
    with pytest.raises(RuntimeError, match="Unexpected key") if strict else nullcontext():
        layer.load_state_dict({"bitmap": layout_of().bitmap}, strict=strict)
    assert same(layer, Layout(OTHER, 16))


def test_assigned_state_brings_tables_off_the_meta_device():
    layer, wanted = (Linear(32, 48, 16, BITMAPS["two heads"][0], device=one) for one in ("meta", "cpu"))
    layer.load_state_dict(wanted.state_dict(), assign=True)
    x = randn(5, 32)
    assert torch.equal(layer.to("cpu")(x), wanted(x))
    assert same(layer.layout, wanted.layout)


def test_a_linear_layers_state_goes_round():
    layer = Linear(32, 48, 16, BITMAPS["two heads"][0], bias=True)
    other = Linear(32, 48, 16, [[0, 0, 1], [1, 1, 0]], bias=True)
    other.load_state_dict(layer.state_dict())
    x = randn(5, 32)
    assert torch.equal(other(x), layer(x))


def test_modules_share_a_layout():
    layout = layout_of()
    first, second = MatMul(layout, mode="sdd"), MatMul(layout, 16, "dsd")
    assert first.layout is second.layout is layout
    layout.update(OTHER)
    a, b = operands("dsd", layout)
    close(second(a, b), product(a, b, layout, "dsd", False, False))


# Conversions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BITMAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_dense_matrices_both_ways(name, dtype):
    layout = layout_of(name)
    one = layout.shape
    values = randn(2, one.blocks, one.block, one.block).mul(3).to(dtype)
    dense = layout.to_dense(values)
    assert dense.dtype == dtype
    assert torch.equal(dense.double(), dense_of(values, layout))
    assert torch.equal(layout.kept_blocks(dense).double(), values.double())


def test_conversions_have_gradients():
    layout = layout_of()
    values, dense = wanting(randn(1, 7, 16, 16)), wanting(randn(1, 2, 32, 48))
    grad = randn(1, 2, 32, 48, seed=4)
    (found,) = torch.autograd.grad(layout.to_dense(values), values, grad)
    assert torch.equal(found, layout.kept_blocks(grad))
    (found,) = torch.autograd.grad(layout.kept_blocks(dense), dense, values)
    assert torch.equal(found, layout.to_dense(values))


def test_values_of_names_the_block_that_would_be_lost():
    layout = layout_of()
    values = randn(2, 7, 16, 16)
    dense = layout.to_dense(values)
    assert torch.equal(layout.values_of(dense), values)
    short = dense.to(torch.float8_e4m3fn)
    assert torch.equal(layout.values_of(short).float(), layout.kept_blocks(short.float()))
    dense[1, 1, 20, 17] = torch.nan
    with pytest.raises(FormatError, match=r"block \(1, 1\) of head 1"):
        layout.values_of(dense)
    with pytest.raises(InvalidProblemError, match=r"dense: expected \[Z, 2, 32, 48\]"):
        layout.values_of(dense[:, :, :16])
    with pytest.raises(InvalidProblemError, match=r"values: expected \[Z, 7, 16, 16\]"):
        layout.to_dense(values[:, :6])
    empty = Layout(np.zeros((1, 0, 2), bool), 16)
    assert empty.values_of(torch.zeros(2, 1, 0, 32)).shape == (2, 0, 16, 16)


@pytest.mark.parametrize("name", ["empty rows and columns", "all blocks"])
def test_bsr_both_ways(name):
    layout = layout_of(name)
    one = layout.shape
    values = randn(one.blocks, one.block, one.block)
    tensor = layout.to_torch_bsr(values)
    assert tensor.layout == torch.sparse_bsr
    assert torch.equal(tensor.to_dense(), layout.to_dense(values[None])[0, 0])
    found, again = Layout.from_torch_bsr(tensor)
    assert same(found, layout)
    assert torch.equal(again[0], values)
    assert again.data_ptr() == tensor.values().data_ptr()
    b = randn(1, 1, one.cols, 8)
    close(matmul(again, b, found, "dsd")[0, 0], tensor.to_dense().double() @ b[0, 0].double())


def test_bsr_of_what_pytorch_makes():
    dense = randn(64, 96) * (torch.rand(2, 3).repeat_interleave(32, 0).repeat_interleave(32, 1) > 0.4)
    layout, values = Layout.from_torch_bsr(dense.to_sparse_bsr((32, 32)))
    assert layout.layout == BlockSparseLayout.from_dense(dense.numpy(), 32)
    assert torch.equal(layout.to_dense(values)[0, 0], dense)


def test_bsr_of_several_heads():
    layout = Layout([[[1, 0, 1], [0, 1, 0]], [[1, 1, 0], [0, 0, 1]]], 16)
    values = randn(1, 6, 16, 16)
    tensor = layout.to_torch_bsr(values)
    assert tensor.shape == (2, 32, 48)
    assert torch.equal(tensor.to_dense(), layout.to_dense(values)[0])
    found, again = Layout.from_torch_bsr(tensor)
    assert same(found, layout)
    assert torch.equal(again, values)


def test_bsr_that_cannot_be():
    layout = layout_of()
    with pytest.raises(InvalidProblemError, match=r"layout: expected as many blocks in every head.*\[3, 4\]"):
        layout.to_torch_bsr(randn(7, 16, 16))
    with pytest.raises(InvalidProblemError, match=r"values: expected \[7, 16, 16\]"):
        layout.to_torch_bsr(randn(2, 7, 16, 16))
    with pytest.raises(InvalidProblemError, match="square blocks"):
        Layout.from_torch_bsr(torch.ones(32, 32).to_sparse_bsr((16, 32)))
    with pytest.raises(InvalidProblemError, match="tensor: expected"):
        Layout.from_torch_bsr(torch.ones(32, 32))
