"""How the ops of block-sparse matrices stand in PyTorch's dispatcher: fakes, autograd, modes, compilation."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sparse24_plans import UnsupportedError
from sparse24_plans.torch.blocksparse import (
    DeepSpeedSparseSelfAttention,
    Layout,
    Linear,
    MultiheadAttention,
    SparsityInfo,
    attention,
    matmul,
    softmax,
)
from tests.torch.cases import S, defined_ops, wanting
from tests.torch.dispatching import assert_fakes, assert_no_vmap, assert_opcheck, names_of, tensors

from .cases import close, layout_of, operands, product, randn


def samples() -> dict[str, tuple]:
    """An op and arguments for each way in which it is called."""
    layout = layout_of()
    about, one = (layout.tables, layout.sizes), layout.shape
    x = randn(2, one.blocks, 16, 16)
    found = {
        mode: (S.blocksparse_matmul, *map(wanting, operands(mode, layout)), *about, mode)
        for mode in ("sdd", "dsd", "dds")
    }
    short = operands("dds", layout, trans_a=True, dtype=torch.bfloat16)
    found["dds, all options"] = (
        *(S.blocksparse_matmul, *map(wanting, short), *about, "dds", True, False),
        *(wanting(randn(2, 48)), "silu", 0.5, torch.float32),
    )
    found["an activation alone"] = (*found["dsd"], False, False, None, "relu")
    masks = wanting(randn(2, 32, 48)), randn(2, 48), randn(32, 48)
    found["softmax"] = (S.blocksparse_softmax, wanting(x), *about, 0.5)
    found["softmax with masks"] = (*found["softmax"], *masks, "add", "mul", True)
    found["softmax backward"] = (S.blocksparse_softmax_backward, x.softmax(-1), x, *about, 0.5)
    q, k, v = randn(2, 2, 32, 8), randn(2, 1, 48, 8), randn(2, 1, 48, 8, seed=1)
    lengths = tuple(torch.tensor(t, dtype=torch.int32) for t in ([32, 7], [9, 48]))
    found["attention"] = (S.blocksparse_attention, *map(wanting, (q, k, v)), *about)
    found["attention with lengths"] = (*found["attention"], 0.5, True, *lengths)
    with torch.no_grad():
        o, lse = S.blocksparse_attention(q, k, v, *about)
    found["attention backward"] = (S.blocksparse_attention_backward, q + 1, o, lse, q, k, v, *about)
    return found | convolutions()


def convolutions() -> dict[str, tuple]:
    filter = Layout(torch.ones(1, 2, 8, dtype=torch.bool), 16)
    about, walk = (filter.tables, filter.sizes), ((2, 2), (2, 1), (1, 0), (1, 1))
    x, weight, dy = randn(2, 5, 6, 32), randn(1, 16, 16, 16), randn(2, 3, 5, 32)
    bias = wanting(randn(32))
    return {
        "conv2d": (S.blocksparse_conv2d, wanting(x), wanting(weight), *about, *walk),
        "conv2d with bias": (S.blocksparse_conv2d, wanting(x), wanting(weight), *about, *walk, bias),
        "conv2d input": (S.blocksparse_conv2d_input, wanting(dy), wanting(weight), *about, (5, 6), *walk),
        "conv2d filter": (S.blocksparse_conv2d_filter, wanting(x), wanting(dy), *about, *walk),
    }


SAMPLES = samples()
every_op = pytest.mark.parametrize("name", SAMPLES)


def test_every_op_has_a_sample():
    ours = {name for name in defined_ops() if name.startswith("blocksparse_")}
    assert names_of(SAMPLES) == ours


@every_op
def test_opcheck(name):
    assert_opcheck(SAMPLES[name])


@every_op
@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_tensors_without_values_have_the_results_shape_dtype_and_strides(name, mode):
    assert_fakes(SAMPLES[name], mode)


@every_op
def test_results_are_new_and_contiguous(name):
    op, *args = SAMPLES[name]
    with torch.no_grad():
        first, again = tensors(op(*args)), tensors(op(*args))
    taken = {a.data_ptr() for a in args if isinstance(a, torch.Tensor)}
    assert all(t.is_contiguous() and t.data_ptr() not in taken for t in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_op
def test_vmap_is_refused(name):
    assert_no_vmap(SAMPLES[name])


def test_forward_mode_is_refused_instead_of_giving_no_tangent():
    layout = layout_of()
    a, b = operands("dsd", layout)
    with pytest.raises(UnsupportedError, match="blocksparse_matmul has no forward-mode derivative"):
        torch.func.jvp(lambda t: matmul(t, b, layout, "dsd"), (a,), (a,))


@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_autocast_moves_the_operands_of_products(mode):
    layout = layout_of()
    a, b = map(wanting, operands(mode, layout))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = matmul(a, b, layout, mode)
    assert torch.equal(y, matmul(a.bfloat16(), b.bfloat16(), layout, mode))
    y.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


def test_autocast_of_biases_attention_and_softmax():
    layout = layout_of()
    a, b = operands("dds", layout)
    bias, q, k = randn(2, 48), randn(2, 2, 32, 8), randn(2, 2, 48, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = matmul(a, b, layout, "dds", bias=bias)
        o = attention(q, k, k, layout)
        p = softmax(b, layout)
    short = [t.bfloat16() for t in (a, b, bias)]
    assert torch.equal(y, matmul(*short[:2], layout, "dds", bias=short[2]))
    assert torch.equal(o, attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), layout))
    assert p.dtype == torch.float32


def test_inference_mode_gives_the_same_bits():
    layout = layout_of()
    a, b = operands("dsd", layout)
    with torch.inference_mode():
        inside = matmul(a, b, layout, "dsd")
    assert inside.is_inference()
    assert torch.equal(inside, matmul(a, b, layout, "dsd"))


# Compilation --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@backends
def test_compiled_products_softmax_and_attention(backend):
    """One graph, forward and backward, with the bits of eager code."""
    layout = layout_of()

    def model(q, k, v):
        scores = matmul(q, k, layout, "sdd", trans_b=True)
        o = matmul(softmax(scores * 0.5, layout, 0.3, causal=True), v, layout, "dsd")
        return o + attention(q, k, v, layout, causal=True)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = []
    for call in (model, compiled):
        leaves = [wanting(randn(2, 2, n, 8, seed=n)) for n in (32, 48, 48)]
        y = call(*leaves)
        y.square().sum().backward()
        found.append([y, *(leaf.grad for leaf in leaves)])
    assert all(map(torch.equal, *found))


@backends
def test_a_dynamic_batch_is_one_graph(backend):
    layout = layout_of()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda a, b: matmul(a, b, layout, "dsd") + 1, fullgraph=True, dynamic=True, backend=counter
    )
    counts = []
    for batch, n in ((3, 20), (4, 36), (5, 12)):
        a, b = operands("dsd", layout, batch=batch, n=n)
        close(compiled(a, b) - 1, product(a, b, layout, "dsd", False, False))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]  # the first may have been begun again, for the float alpha


@backends
def test_compiled_modules_follow_an_updated_mask(backend):
    layer = Linear(32, 48, 16, [[1, 0, 1], [0, 1, 0]], bias=True, activation="gelu")
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    x = randn(3, 5, 32)
    assert torch.equal(compiled(x), layer(x))
    panels = layer.layout.panels
    layer.layout.update([[0, 1, 1], [0, 0, 1]])
    assert layer.layout.panels != panels
    close(compiled(x), torch.nn.functional.gelu(x @ layer.dense_weight().t() + layer.bias))
    assert counter.frame_count == 1


@backends
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_attention_modules(backend, masked):
    module = MultiheadAttention(16, 2, SparsityInfo("fixed", 16, 32), attn_mask_mode="add")
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = randn(64, 2, 16)
    mask = randn(64, 64) if masked else None
    if not masked:
        with pytest.raises(Exception, match="call layout_for"):
            compiled(x, x, x)
    module.layout_for(64)
    torch._dynamo.reset()
    assert torch.equal(compiled(x, x, x, attn_mask=mask)[0], module(x, x, x, attn_mask=mask)[0])


SELF_ATTENTION = {
    "layout_for": lambda: (MultiheadAttention(16, 2, SparsityInfo("fixed", 16, 32)), randn(64, 2, 16)),
    "the module": lambda: (DeepSpeedSparseSelfAttention(16, 2, stride=32), randn(2, 2, 64, 8)),
}


@pytest.mark.parametrize("first", SELF_ATTENTION)
def test_a_rule_makes_its_layout_between_graphs(first):
    """A single graph cannot hold the making of a layout, and the error says what to call before."""
    module, x = SELF_ATTENTION[first]()
    with pytest.raises(Exception, match=f"64 tokens have no layout yet; call {first}"):
        torch.compile(module, backend="eager", fullgraph=True)(x, x, x)
    torch._dynamo.reset()
    found = torch.compile(module, backend="eager")(x, x, x)
    wanted = SELF_ATTENTION[first]()[0]
    wanted.load_state_dict(module.state_dict())
    assert torch.equal(found[0], wanted(x, x, x)[0])


@backends
def test_compiled_conversions(backend):
    """Tracing reaches neither a layout's NumPy arrays nor its shape's properties."""
    layout, layer = layout_of(), Linear(32, 48, 16, [[1, 0, 1], [0, 1, 0]])

    def call(values, dense):
        return layout.to_dense(values), layout.kept_blocks(dense), layer.dense_weight()

    values = randn(2, layout.shape.blocks, 16, 16)
    given = values, layout.to_dense(values) + 1
    assert all(map(torch.equal, torch.compile(call, fullgraph=True, backend=backend)(*given), call(*given)))
    assert torch.equal(torch.compile(layout.values_of, backend=backend)(layout.to_dense(values)), values)


def test_an_exported_program():
    layer = Linear(32, 48, 16, [[1, 0, 1], [0, 1, 0]])
    x = randn(3, 32)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},))
    y = randn(7, 32)
    assert torch.equal(program.module()(y), layer(y))
