"""Kernels, streams and captures of a GPU behind the ops of block-sparse matrices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sparse24_plans import (
    BlockSparseAttentionPlan,
    BlockSparseLayout,
    InvalidProblemError,
    UnsupportedError,
)
from sparse24_plans.blocksparse.kernel_table import MATMUL_ENTRIES, SOFTMAX_ENTRIES
from sparse24_plans.torch.blocksparse import (
    Conv2d,
    Layout,
    Linear,
    MultiheadAttention,
    attention,
    matmul,
    plan_dispatch,
    softmax,
)
from sparse24_plans.torch.plan_cache import PlanCache
from tests.torch.cases import assert_on_the_current_stream, captured, wanting

from .cases import FLOATS, close, layout_of, operands


def needs_a_kernel(rows):
    """Return a mark that skips tests if the table has no kernel of a GPU."""
    there = any(row.backend != "host" for row in rows)
    return pytest.mark.skipif(not there, reason="the table has no kernel for this GPU")


pytestmark = [pytest.mark.gpu, needs_a_kernel(MATMUL_ENTRIES)]
softmaxes = needs_a_kernel(SOFTMAX_ENTRIES)


def moved(*tensors):
    return [t.detach().cuda().requires_grad_(t.requires_grad) for t in tensors]


@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
@pytest.mark.parametrize("trans", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [16, 128])
def test_products_and_gradients_are_the_hosts(mode, trans, dtype, block):
    layout = layout_of(block=block)
    host = list(map(wanting, operands(mode, layout, trans_a=trans[0], trans_b=trans[1], n=64, dtype=dtype)))
    there = moved(*host)
    y = matmul(*host, layout, mode, *trans)
    dy = torch.randn_like(y)
    wanted = [y, *torch.autograd.grad(y, host, dy)]
    other = layout_of(block=block).cuda()
    z = matmul(*there, other, mode, *trans)
    found = [z, *torch.autograd.grad(z, there, dy.cuda())]
    assert all(t.is_cuda and t.dtype == dtype for t in found)
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours.cpu() / block, theirs / block, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_and_its_gradients_are_the_hosts(dtype, block, stride):
    """The kernel computes them, or PyTorch if there is none."""
    bitmap = np.random.default_rng(0).random((3, 2, 3, 2)) < 0.5
    host = Conv2d(2 * block, 3 * block, (3, 2), bitmap, block, 1, stride, bias=True, dtype=dtype)
    there = Conv2d(2 * block, 3 * block, (3, 2), bitmap, block, 1, stride, bias=True, dtype=dtype).cuda()
    there.load_state_dict(host.state_dict())
    x = wanting(torch.randn(2, 2 * block, 11, 8).to(dtype))
    (z,) = moved(x)
    y, found = host(x), there(z)
    assert found.is_contiguous(memory_format=torch.channels_last)
    dy = torch.randn_like(y)
    wanted = [y, *torch.autograd.grad(y, (x, *host.parameters()), dy)]
    ours = [found, *torch.autograd.grad(found, (z, *there.parameters()), dy.cuda())]
    loss = torch.float16 if dtype is torch.float32 else dtype  # TF32 is PyTorch's to choose
    for one, other in zip(ours, wanted, strict=True):
        assert one.dtype == dtype
        close(one.cpu(), other, loss)


@softmaxes
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_and_its_gradient_are_the_hosts(dtype, masked):
    layout = layout_of(block=32)
    x = wanting(torch.randn(2, 7, 32, 32).to(dtype))
    masks = (torch.randn(2, 64, 96), torch.randn(2, 96), torch.rand(64, 96) > 0.3) if masked else ()
    modes = {"attn_mask_mode": "mul"} if masked else {}
    y = softmax(x, layout, 0.3, *masks, **modes)
    dy = torch.randn_like(y)
    (there,) = moved(x)
    z = softmax(there, layout_of(block=32).cuda(), 0.3, *moved(*masks), **modes)
    close(z.cpu(), y, dtype)
    (dx,), (dz,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(z, there, dy.cuda())
    close(dz.cpu(), dx, dtype)


@softmaxes
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("block", "size"), [(16, 16), (64, 64), (128, 128)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_and_its_gradients_are_the_hosts(dtype, block, size, kv_heads):
    """Fused where there is a kernel, else by products and softmax."""
    layout = layout_of(block=block)
    shapes = (2, 2 * block), (kv_heads, 3 * block), (kv_heads, 3 * block)
    host = [wanting(torch.randn(2, heads, n, size).to(dtype)) for heads, n in shapes]
    there = moved(*host)
    lengths = [torch.tensor(t, dtype=torch.int32) for t in ([2 * block, 5], [3 * block, block + 3])]
    o, lse = attention(
        *host, layout, causal=True, q_lengths=lengths[0], kv_lengths=lengths[1], return_lse=True
    )
    do = torch.randn_like(o)
    lengths = moved(*lengths)
    other = layout_of(block=block).cuda()
    p, found = attention(
        *there, other, causal=True, q_lengths=lengths[0], kv_lengths=lengths[1], return_lse=True
    )
    close(p.cpu(), o, dtype)
    close(found.cpu(), lse, dtype)
    for ours, theirs in zip(
        torch.autograd.grad(p, there, do.cuda()), torch.autograd.grad(o, host, do), strict=True
    ):
        close(ours.cpu(), theirs, dtype)


@softmaxes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [64, 128])
def test_fused_gradients_are_the_unfused_ones(dtype, block, monkeypatch):
    """Gradients that are computed again have the same bits."""
    layout = layout_of(block=block).cuda()
    heads, rows, cols = layout.shape.heads, layout.shape.rows, layout.shape.cols
    shapes = (heads, rows), (1, cols), (1, cols)
    given = [wanting(torch.randn(2, *shape, 64).to(dtype).cuda()) for shape in shapes]
    do = torch.randn(2, heads, rows, 64, device="cuda").to(dtype)

    def gradients():
        return torch.autograd.grad(attention(*given, layout, causal=True), given, do)

    fused = gradients()
    assert all(torch.equal(one, again) for one, again in zip(fused, gradients(), strict=True))

    def refuse(cls, desc, **options):
        raise UnsupportedError("no kernel for attention here")

    monkeypatch.setattr(plan_dispatch, "plans", PlanCache())
    monkeypatch.setattr(BlockSparseAttentionPlan, "select", classmethod(refuse))
    for ours, theirs in zip(fused, gradients(), strict=True):
        close(ours, theirs, dtype)


@softmaxes
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("block", "size"), [(16, 16), (64, 96), (128, 256)])
def test_dropout_and_its_gradients_are_the_hosts(dtype, block, size):
    layout, seed_offset = layout_of(block=block), torch.tensor([1 << 33, 7])
    shapes = (2, 2 * block), (1, 3 * block), (1, 3 * block)
    host = [wanting(torch.randn(2, heads, n, size).to(dtype)) for heads, n in shapes]
    there = moved(*host)
    o = attention(*host, layout, dropout_p=0.2, seed_offset=seed_offset)
    p = attention(*there, layout_of(block=block).cuda(), dropout_p=0.2, seed_offset=seed_offset.cuda())
    close(p.cpu(), o, dtype)
    do = torch.randn_like(o)
    for ours, theirs in zip(
        torch.autograd.grad(p, there, do.cuda()), torch.autograd.grad(o, host, do), strict=True
    ):
        close(ours.cpu(), theirs, dtype)


@softmaxes
@pytest.mark.parametrize("block", [16, 64])
def test_replays_drop_other_cells(block):
    layout = Layout(np.ones((2, 2, 2), bool), block, device="cuda")
    q, k, v = (torch.randn(1, 2, 2 * block, 64, device="cuda").half() for _ in range(3))
    attention(q, k, v, layout, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, layout, dropout_p=0.5)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(o.clone())
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(seen, 2))


@softmaxes
def test_a_module_is_moved_as_a_whole():
    layout = Layout(np.tri(4, dtype=bool)[None].repeat(2, 0), 64)
    module = MultiheadAttention(128, 2, layout, causal=True).half()
    x = torch.randn(256, 3, 128).half()
    wanted = module(x, x, x)[0]
    module.cuda()
    y = x.cuda()
    close(module(y, y, y)[0].cpu(), wanted, torch.float16)


def linear():
    torch.manual_seed(0)
    return Linear(256, 192, 64, torch.rand(4, 3) > 0.4, bias=True, device="cuda", dtype=torch.bfloat16)


def test_work_is_enqueued_on_the_current_stream():
    assert_on_the_current_stream(linear(), torch.randn(64, 256, device="cuda").bfloat16())


def test_a_captured_product_follows_inputs_and_mask():
    layer = linear().requires_grad_(False)
    x = torch.randn(64, 256, device="cuda").bfloat16()
    layer(x)
    graph, y = captured(layer, x)
    bitmap = layer.layout.layout.bitmap
    for mask in (bitmap, bitmap[:, ::-1], bitmap[:, :, ::-1]):
        layer.layout.update(mask)
        x.copy_(torch.randn(64, 256, device="cuda"))
        graph.replay()
        assert torch.equal(y, layer(x))
        exact = x.double() @ layer.dense_weight().double().t() + layer.bias.double()
        close(y.double(), exact, torch.bfloat16)


@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_a_layout_on_the_cpu_serves_a_gpu(mode):
    """The reference library makes its layouts on the CPU, too."""
    layout, there = layout_of(), layout_of().cuda()
    a, b = (one.cuda().requires_grad_() for one in operands(mode, layout))
    for mask in (layout.layout, BlockSparseLayout(layout.layout.bitmap[::-1, ::-1], 16)):
        layout.update(mask)
        there.update(mask)
        ours, theirs = matmul(a, b, layout, mode), matmul(a, b, there, mode)
        assert torch.equal(ours, theirs)
        dy = torch.randn_like(ours)
        for found, wanted in zip(
            torch.autograd.grad(ours, (a, b), dy), torch.autograd.grad(theirs, (a, b), dy), strict=True
        ):
            assert torch.equal(found, wanted)
    assert layout.tables.device.type == "cpu"


def test_attention_and_softmax_take_a_layout_on_the_cpu():
    layout = Layout(np.tri(4, dtype=bool)[None].repeat(2, 0), 64)
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda").half() for _ in range(3))
    scores = matmul(q, k, layout, "sdd", trans_b=True)
    softmax(scores, layout)
    got = attention(q, k, v, layout, causal=True)
    assert torch.equal(got, attention(q, k, v, Layout(layout.layout, device="cuda"), causal=True))


def test_tables_are_not_copied_inside_a_capture():
    layout = layout_of()
    a, b = (one.cuda() for one in operands("dsd", layout))
    with pytest.raises(UnsupportedError, match=r"call layout\.tables_on\('cuda:0'\) before"):
        captured(lambda x: matmul(a, x, layout, "dsd"), b)
    layout.tables_on("cuda")
    matmul(a, b, layout, "dsd")
    graph, y = captured(lambda x: matmul(a, x, layout, "dsd"), b)
    layout.update(layout.layout.bitmap[::-1, ::-1])
    graph.replay()
    assert torch.equal(y, matmul(a, b, layout, "dsd"))


def test_operands_beside_the_layout_are_refused():
    layout = layout_of()
    a, b = operands("dsd", layout)
    with pytest.raises(InvalidProblemError, match="b: expected a tensor on cuda:0, as the layout, got cpu"):
        matmul(a.cuda(), b, layout, "dsd")
    op = torch.ops.sparse24.blocksparse_matmul
    with pytest.raises(InvalidProblemError, match=r"a: expected a tensor on cpu, .*; take layout\.tables_on"):
        op(a.cuda(), b.cuda(), layout.tables, layout.sizes, "dsd")


def test_mask_made_on_gpu_is_taken_in_graph():
    """Products with both layouts, the second updated by the host, are the same."""
    layout, other = layout_of(block=64).cuda(), layout_of(block=64).cuda()
    a, b = (one.cuda() for one in operands("dsd", layout))
    mask = layout.bitmap.clone()
    layout.update_on_device(mask)
    assert layout.panels == (0, 0)
    matmul(a, b, layout, "dsd")

    def step(x):
        layout.update_on_device(mask)
        return matmul(a, x, layout, "dsd")

    graph, y = captured(step, b)
    for flipped in (layout.bitmap.flip(1), layout.bitmap.flip(2), layout.bitmap.flip(0)):
        mask.copy_(flipped)
        graph.replay()
        assert torch.equal(layout.bitmap, mask)
        other.update(mask.cpu())
        assert torch.equal(layout.tables, other.tables)
        assert torch.equal(y, matmul(a, b, other, "dsd"))
        assert layout.layout == other.layout
        assert layout.is_behind  # as the next replay does not say so


def test_no_backward_pass_reads_another_mask_than_its_forward_pass():
    layout = layout_of(block=64).cuda()
    a, b = moved(*map(wanting, operands("dsd", layout)))
    y = matmul(a, b, layout, "dsd")
    layout.update_on_device(layout.bitmap.flip(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_masks_that_the_gpu_does_not_take():
    layout = layout_of(block=64).cuda()
    for mask in (layout.bitmap.cpu(), layout.bitmap.int(), layout.bitmap[:, :1], None):
        with pytest.raises(InvalidProblemError, match=r"bitmap: expected torch\.bool"):
            layout.update_on_device(mask)
    layout.update_on_device(torch.ones_like(layout.bitmap))
    with pytest.raises(InvalidProblemError, match=r"bitmap: expected .*, got "):
        layout.layout  # noqa: B018
    small = layout_of(block=16).cuda()
    with pytest.raises(UnsupportedError, match="call update"):
        small.update_on_device(small.bitmap)
