"""``Linear`` and ``MultiheadAttention`` over blocks, and the pattern ``fixed``."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

from sparse24_plans import BlockSparseLayout, InvalidProblemError
from sparse24_plans.torch import blocksparse
from sparse24_plans.torch.blocksparse import Layout, Linear, MatMul, MultiheadAttention, SparsityInfo
from tests.torch.cases import wanting

from .cases import FLOATS, close, randn

BITMAP = [[1, 0, 1], [0, 1, 0]]
F = nn.functional


def test_the_references_older_names():
    assert blocksparse.SparseMatMul is blocksparse.MatMul
    assert blocksparse.SparseSoftmax is blocksparse.Softmax


def test_a_mode_is_one_of_three():
    with pytest.raises(InvalidProblemError, match="mode: expected one of sdd, dsd, dds, got 'ssd'"):
        MatMul(BITMAP, 16, "ssd")


# Linear -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_layer_is_that_of_its_dense_weight(leading, dtype):
    layer = Linear(32, 48, 16, BITMAP, bias=True, activation="silu").to(dtype)
    x = randn(*leading, 32, dtype=dtype)
    y = layer(x)
    dense, bias = layer.dense_weight().double(), layer.bias.double()
    assert (y.shape, y.dtype) == ((*leading, 48), dtype)
    assert dense.shape == (48, 32)
    close(y, F.silu(F.linear(x.double(), dense, bias)))


def test_a_layer_trains_its_kept_cells():
    layer = Linear(32, 48, 16, BITMAP, bias=True)
    dense = wanting(layer.dense_weight().double())
    x, y = wanting(randn(5, 32)), randn(5, 48, seed=2)
    (layer(x) - y).square().sum().backward()
    wide = wanting(x.double())
    (F.linear(wide, dense, layer.bias.double()) - y).square().sum().backward()
    close(x.grad / 10, wide.grad / 10)
    close(layer.layout.to_dense(layer.weight.grad[None])[0, 0].t() / 10,
          dense.grad * (layer.dense_weight() != 0) / 10)  # fmt: skip
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    before = (layer(x) - y).square().sum()
    optimizer.step()
    assert (layer(x) - y).square().sum() < before


def test_a_layer_without_inputs_is_its_bias():
    layer = Linear(0, 32, 16, np.zeros((0, 2), bool), bias=True)
    assert torch.equal(layer(torch.empty(2, 3, 0)), layer.bias.expand(2, 3, 32))


def test_a_layer_of_a_dense_one():
    dense = nn.Linear(32, 48)
    layer = Linear.from_linear(dense, 16, BITMAP)
    mask = torch.tensor(BITMAP).repeat_interleave(16, 0).repeat_interleave(16, 1).t()
    assert torch.equal(layer.dense_weight(), dense.weight * mask)
    assert torch.equal(layer.bias, dense.bias)
    assert Linear.from_linear(nn.Linear(32, 48, bias=False).half(), 16, BITMAP).weight.dtype == torch.float16
    with pytest.raises(InvalidProblemError, match=r"linear: expected an nn\.Linear"):
        Linear.from_linear(layer, 16, BITMAP)


def test_layers_are_copied_and_start_within_bounds():
    torch.manual_seed(0)
    layer = Linear(32, 48, 16, BITMAP, bias=True)
    bound = (3 * 256 / 48) ** -0.5
    assert layer.weight.shape == (3, 16, 16)
    assert bound * 0.9 < layer.weight.abs().max() <= bound
    x = randn(5, 32)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    empty = Linear(32, 48, 16, np.zeros((2, 3), bool), bias=True)
    assert not empty(x).any()
    assert "in_features=32, out_features=48, bias=True" in repr(layer)


def test_layers_that_cannot_be():
    with pytest.raises(
        InvalidProblemError, match=r"layout: expected 1 head of \[48, 32\], got 1 of \[32, 48\]"
    ):
        Linear(48, 32, 16, BITMAP)
    with pytest.raises(InvalidProblemError, match="layout: expected 1 head"):
        Linear(32, 48, 16, [BITMAP, BITMAP])
    with pytest.raises(InvalidProblemError, match="activation: expected one of"):
        Linear(32, 48, 16, BITMAP, activation="tanh")
    layer = Linear(32, 48, 16, BITMAP)
    with pytest.raises(InvalidProblemError, match=r"input: expected \[..., 32\], got \[5, 31\]"):
        layer(randn(5, 31))
    with pytest.raises(InvalidProblemError, match=r"expected torch\.float16, got torch\.float32"):
        layer(randn(5, 32).half())


# Patterns -----------------------------------------------------------------------------------------


def as_the_reference_says(heads, side, step, unidirectional, numverts, vertsize):
    """Block by block: each stride's own blocks, then its last columns for the rows that may see them."""
    kept = np.zeros((heads, side, side), bool)
    for h in range(heads):
        first = step - (1 + h % numverts) * vertsize
        for row in range(side):
            for column in range(side):
                begins = column - (column - first) % step  # the first column of its group
                own = row // step == column // step and (column <= row or not unidirectional)
                group = begins >= 0 and column - begins < vertsize
                kept[h, row, column] = own or (group and (begins < row or not unidirectional))
    return kept


@pytest.mark.parametrize("unidirectional", [False, True])
@pytest.mark.parametrize(("numverts", "vertsize"), [(1, 1), (4, 1), (2, 2), (1, 3)])
def test_the_fixed_pattern(unidirectional, numverts, vertsize):
    info = SparsityInfo("fixed", 16, 64, unidirectional, numverts, vertsize)
    layout = info.layout(3, 192)
    wanted = as_the_reference_says(3, 12, 4, unidirectional, numverts, vertsize)
    assert np.array_equal(layout.bitmap, wanted)
    assert layout.shape.block == 16
    assert SparsityInfo("dense", 16).layout(2, 48).shape.density == 1


def test_patterns_that_cannot_be():
    for options, message in (
        ({"mode": "random"}, "mode: expected dense or fixed"),
        ({"block": 8}, "block: expected 16"),
        ({"block": 64, "stride": 96}, "stride: expected a multiple of block 64"),
        ({"block": 64, "vertsize": 3}, "numverts, vertsize: expected at most 2"),
        ({"numverts": 0}, "numverts, vertsize"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            SparsityInfo(**options)
    with pytest.raises(InvalidProblemError, match="tokens: expected a multiple of 128, got 64"):
        SparsityInfo().layout(1, 64)


# Attention ----------------------------------------------------------------------------------------


def pair(sparsity, **options):
    """Ours, and PyTorch's with the same parameters."""
    torch.manual_seed(0)
    shared = ("kdim", "vdim", "bias", "batch_first", "add_bias_kv", "add_zero_attn")
    kinds = {name: options[name] for name in shared if name in options}
    theirs = nn.MultiheadAttention(16, 2, **kinds)
    ours = MultiheadAttention(16, 2, sparsity, **options)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert unexpected == []
    assert all(name.endswith("bitmap") for name in missing)
    return ours, theirs


def dropped(layout, heads, batch):
    """PyTorch's mask [Z * heads, tokens, tokens] of the cells that aren't kept."""
    block = layout.shape.block
    kept = torch.from_numpy(np.kron(layout.bitmap, np.ones((1, block, block), bool)))
    return ~kept.repeat(batch, 1, 1)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_is_pytorchs_with_the_layout_for_a_mask(batch_first, bias):
    info = SparsityInfo("fixed", 16, 32, numverts=2)
    ours, theirs = pair(info, batch_first=batch_first, bias=bias)
    x = wanting(randn(3, 64, 16) if batch_first else randn(64, 3, 16))
    y, none = ours(x, x, x)
    assert none is None
    wanted, _ = theirs(x, x, x, attn_mask=dropped(info.layout(2, 64), 2, 3))
    close(y, wanted)
    dy = randn(*y.shape, seed=1)
    found = torch.autograd.grad(y, (x, *ours.parameters()), dy)
    exact = torch.autograd.grad(wanted, (x, *theirs.parameters()), dy)
    names = [name for name, _ in theirs.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    for a, b in zip(found, exact, strict=True):
        close(a / 10, b / 10)


def test_masks_and_an_embedding():
    info = SparsityInfo("dense", 16)
    ours, theirs = pair(info, key_padding_mask_mode="mul", attn_mask_mode="add")
    x = randn(32, 3, 16)
    padding = torch.arange(32) < torch.tensor([[32], [20], [7]])
    bias, rpe = randn(32, 32), randn(2, 32, 32)
    y, _ = ours(x, x, x, padding, attn_mask=bias, rpe=rpe)
    whole = (bias + rpe).repeat(3, 1, 1).masked_fill(~padding.repeat_interleave(2, 0)[:, None], -torch.inf)
    close(y, theirs(x, x, x, attn_mask=whole)[0])
    ours, _ = pair(info)  # the reference's modes
    y, _ = ours(x, x, x, torch.where(padding, 0.0, -torch.inf), attn_mask=torch.ones(32, 32).tril())
    whole = dropped(info.layout(2, 32), 2, 3) | torch.ones(32, 32).triu(1).bool()
    close(y, theirs(x, x, x, attn_mask=whole | ~padding.repeat_interleave(2, 0)[:, None])[0])


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_bools_to_add_drop_cells_as_pytorchs_do(extra):
    ours, theirs = pair(SparsityInfo("dense", 16), attn_mask_mode="add", **extra)
    x = randn(32, 3, 16)
    padding = torch.arange(32) >= torch.tensor([[32], [20], [7]])
    later = torch.ones(32, 32).triu(1).bool()
    wanted = theirs(x, x, x, padding, attn_mask=later)[0]
    close(ours(x, x, x, padding, attn_mask=later)[0], wanted)
    close(ours(x, x, x, padding, attn_mask=later, average_attn_weights=False)[0], wanted)


def test_causal_attention():
    ours, theirs = pair(SparsityInfo("dense", 16), causal=True)
    x = randn(32, 3, 16)
    wanted, _ = theirs(x, x, x, attn_mask=torch.ones(32, 32).triu(1).bool())
    close(ours(x, x, x)[0], wanted)


EXTRA = ({"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True})


@pytest.mark.parametrize("extra", EXTRA, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_extra_keys_are_pytorchs(extra, causal):
    """Every query sees them, also one that sees nothing else."""
    kept = np.tril(np.ones((2, 3, 3), bool))
    kept[1, 1] = False
    ours, theirs = pair(BlockSparseLayout(kept, 16), **extra)
    x = wanting(randn(48, 3, 16))
    hidden = dropped(BlockSparseLayout(kept, 16), 2, 3)
    hidden = hidden | torch.ones(48, 48).triu(1).bool() if causal else hidden
    y, wanted = ours(x, x, x, is_causal=causal)[0], theirs(x, x, x, attn_mask=hidden)[0]
    close(y, wanted)
    dy = randn(*y.shape, seed=1)
    found = torch.autograd.grad(y, (x, *ours.parameters()), dy)
    exact = torch.autograd.grad(wanted, (x, *theirs.parameters()), dy)
    for a, b in zip(found, exact, strict=True):
        close(a / 10, b / 10)


@pytest.mark.parametrize("extra", EXTRA, ids=str)
@pytest.mark.parametrize("mode", ["add", "mul"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_do_not_hide_extra_keys(extra, mode, causal):
    ours, theirs = pair(SparsityInfo("dense", 16), key_padding_mask_mode=mode, attn_mask_mode=mode, **extra)
    x, rpe = randn(32, 3, 16), randn(2, 32, 32, seed=3)
    padding = torch.arange(32) < torch.tensor([[32], [20], [7]])
    seen = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.5
    both = [padding, seen]
    if mode == "add":
        both = [torch.where(one, 0.0, -torch.inf) for one in both]
    y, _ = ours(x, x, x, both[0], attn_mask=both[1], rpe=rpe)
    hidden = ~padding.repeat_interleave(2, 0)[:, None] | ~seen
    close(y, theirs(x, x, x, attn_mask=rpe.repeat(3, 1, 1).masked_fill(hidden, -torch.inf))[0])
    ours.causal = causal
    y, _ = ours(x, x, x, both[0])
    hidden = ~padding.repeat_interleave(2, 0)[:, None].expand(6, 32, 32)
    hidden = hidden | torch.ones(32, 32).triu(1).bool() if causal else hidden
    close(y, theirs(x, x, x, attn_mask=hidden)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("which", "wrong", "wanted"),
    [
        ("key_padding_mask", [3, 16], [3, 32]),
        ("key_padding_mask", [1, 32], [3, 32]),
        ("attn_mask", [1, 32], [32, 32]),
        ("attn_mask", [6, 32, 32], [32, 32]),
        ("rpe", [2, 32, 16], [2, 32, 32]),
        ("rpe", [3, 1, 32, 32], [2, 32, 32]),
    ],
)
def test_masks_beside_extra_keys_have_the_callers_sizes(which, wrong, wanted, causal):
    ours, x = pair(SparsityInfo("dense", 16), add_zero_attn=True)[0], randn(32, 3, 16)
    message = f"^{which}: expected shape {re.escape(f'{wanted}, got {wrong}')}$"
    with pytest.raises(InvalidProblemError, match=message):
        ours(x, x, x, is_causal=causal and which != "attn_mask", **{which: torch.ones(wrong)})
    ours.causal = causal
    with pytest.raises(InvalidProblemError, match=message):
        ours(x, x, x, **{which: torch.ones(wrong)})


@pytest.mark.parametrize("extra", [{}, *EXTRA], ids=str)
@pytest.mark.parametrize("which", ["key_padding_mask", "attn_mask"])
def test_integers_are_added_as_floats(extra, which):
    ours, x = pair(SparsityInfo("dense", 16), attn_mask_mode="add", **extra)[0], randn(32, 3, 16)
    mask = torch.arange(32).expand(3 if which == "key_padding_mask" else 32, 32) % 3
    assert torch.equal(ours(x, x, x, **{which: mask})[0], ours(x, x, x, **{which: mask.float()})[0])


def load(layout, bitmap):
    layout.load_state_dict({"bitmap": torch.from_numpy(bitmap)})


@pytest.mark.parametrize("extra", EXTRA, ids=str)
@pytest.mark.parametrize("change", [Layout.update, load])
def test_extra_keys_follow_the_given_layout(extra, change):
    before, after = np.tril(np.ones((2, 3, 3), bool)), np.triu(np.ones((2, 3, 3), bool))
    given = Layout(before, 16)
    ours, theirs = pair(given, **extra)
    x = randn(48, 3, 16)
    for bitmap in (before, after, before):
        change(given, bitmap)
        hidden = dropped(BlockSparseLayout(bitmap, 16), 2, 3)
        close(ours(x, x, x)[0], theirs(x, x, x, attn_mask=hidden)[0])
        assert torch.equal(copy.deepcopy(ours)(x, x, x)[0], ours(x, x, x)[0])
    assert ours.layouts["given"] is given
    assert [name for name in ours.state_dict() if "bitmap" in name] == ["layouts.given.bitmap"]


def test_compiled_extra_keys_need_layout_for_after_an_update():
    given = Layout(np.tril(np.ones((2, 2, 2), bool)), 16)
    ours, _ = pair(given, add_zero_attn=True)
    compiled, x = torch.compile(ours, fullgraph=True, backend="eager"), randn(32, 3, 16)
    assert torch.equal(compiled(x, x, x)[0], ours(x, x, x)[0])
    given.update(np.triu(np.ones((2, 2, 2), bool)))
    with pytest.raises(Exception, match="mask of the given layout has changed"):
        compiled(x, x, x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(ours, backend="eager")(x, x, x)[0], ours(x, x, x)[0])  # several graphs
    given.update(np.tril(np.ones((2, 2, 2), bool)))
    ours.layout_for(32)
    torch._dynamo.reset()
    assert torch.equal(compiled(x, x, x)[0], ours(x, x, x)[0])


def test_dropout_in_training_alone():
    ours, theirs = pair(SparsityInfo("dense", 16), dropout=0.4)
    x = randn(32, 3, 16)
    for options in ({}, {"attn_mask": torch.ones(32, 32)}):
        first, second = (ours.train()(x, x, x, **options)[0] for _ in range(2))
        assert not torch.equal(first, second)
        close(ours.eval()(x, x, x, **options)[0], theirs(x, x, x)[0])


def test_dropout_keeps_the_mean_of_a_modules_softmax():
    """Values are 1, so each result is the sum of the kept cells."""
    module = MultiheadAttention(16, 2, SparsityInfo("dense", 16), dropout=0.25)
    with torch.no_grad():
        module.in_proj_weight[32:] = 0
        module.in_proj_bias[32:] = 1
        module.out_proj.weight.copy_(torch.eye(16))
    torch.manual_seed(0)
    x = randn(64, 64, 16)
    for options in ({}, {"attn_mask": torch.ones(64, 64)}):
        y = module(x, x, x, **options)[0].detach()
        assert abs(float(y.mean()) - 1) < 5e-3
        assert float(y.std()) > 0.02


def test_keys_of_other_lengths_and_widths():
    layout = BlockSparseLayout(np.array([BITMAP, [[0, 1, 1], [1, 1, 1]]]), 16)
    ours, theirs = pair(layout, kdim=12, vdim=10)
    q, k, v = randn(32, 3, 16), randn(48, 3, 12), randn(48, 3, 10)
    close(ours(q, k, v)[0], theirs(q, k, v, attn_mask=dropped(layout, 2, 3))[0])
    ours, theirs = pair(layout)
    k, v = randn(48, 3, 16), randn(48, 3, 16, seed=1)
    close(ours(q, k, v)[0], theirs(q, k, v, attn_mask=dropped(layout, 2, 3))[0])


def test_layouts_are_made_once_and_follow_the_module():
    module = MultiheadAttention(16, 2, SparsityInfo("fixed", 16, 32))
    x = randn(64, 2, 16)
    module(x, x, x)
    first = module.layout_for(64)
    module(x, x, x, attn_mask=torch.ones(64, 64))
    assert module.layout_for(64) is first
    assert module.layout_for(32) is not first
    assert not [name for name in module.state_dict() if "bitmap" in name]
    assert torch.equal(copy.deepcopy(module)(x, x, x)[0], module(x, x, x)[0])
    y = module.bfloat16()(*[x.bfloat16()] * 3)[0]
    assert y.dtype == torch.bfloat16
    given = Layout(np.ones((2, 4, 4), bool), 16)
    module = MultiheadAttention(16, 2, given)
    assert module.layout_for(64) is given
    assert "layouts.given.bitmap" in module.state_dict()


def test_an_encoder_layer_does_not_pass_it_by():
    """In evaluation PyTorch's layer may take the parameters and attend to everything."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True).eval()
    info = SparsityInfo("fixed", 16, 32)
    ours, layer.self_attn = pair(info, batch_first=True)
    x = randn(3, 64, 16)
    with torch.no_grad():
        wanted = layer(x, src_mask=dropped(info.layout(2, 64), 2, 3))
        layer.self_attn = ours
        close(layer(x), wanted)


def test_attention_that_cannot_be():
    info = SparsityInfo("fixed", 16, 32)
    for p in (1.0, -0.1, float("nan")):
        with pytest.raises(InvalidProblemError, match="dropout: expected a probability"):
            MultiheadAttention(16, 2, info, p)
    with pytest.raises(InvalidProblemError, match="num_heads: expected a divisor of 16, got 3"):
        MultiheadAttention(16, 3, info)
    with pytest.raises(InvalidProblemError, match="sparsity: expected a SparsityInfo"):
        MultiheadAttention(16, 2, "fixed")
    with pytest.raises(InvalidProblemError, match="sparsity: expected 2 heads, got 1"):
        MultiheadAttention(16, 2, BlockSparseLayout(np.ones((1, 2, 2), bool), 16))
    with pytest.raises(InvalidProblemError, match="attn_mask_mode: expected add or mul"):
        MultiheadAttention(16, 2, info, attn_mask_mode="and")
    module = MultiheadAttention(16, 2, info)
    x = randn(48, 2, 16)
    with pytest.raises(InvalidProblemError, match="tokens: expected a multiple of 32, got 48"):
        module(x, x, x)
    with pytest.raises(InvalidProblemError, match="query: expected three dimensions"):
        module(x[:, 0], x, x)
    y = randn(64, 2, 16)
    for message, options in {
        r"attn_mask: expected shape \[64, 64\]": {"attn_mask": torch.ones(4, 64, 64)},
        "rpe: expected a Tensor or None, got bool": {"rpe": False},
    }.items():
        with pytest.raises(InvalidProblemError, match=message):
            module(y, y, y, **options)
    with pytest.raises(InvalidProblemError, match=r"query, key: expected 64 and 64 tokens.*got 64 and 32"):
        module(y, y[:32], y[:32])


FLAGS = {
    "trans_a": lambda **flag: MatMul(BITMAP, 16, "dsd", **flag),
    "trans_b": lambda **flag: MatMul(BITMAP, 16, "dsd", **flag),
    "bias": lambda **flag: Linear(32, 48, 16, BITMAP, **flag),
    **{
        name: lambda **flag: MultiheadAttention(16, 2, SparsityInfo("dense", 16), **flag)
        for name in ("bias ", "add_bias_kv", "add_zero_attn", "causal", "batch_first")
    },
    "bias  ": lambda **flag: blocksparse.Conv2d(32, 32, 1, np.ones((2, 2, 1, 1), bool), 16, **flag),
    "causal ": lambda **flag: blocksparse.Softmax(BITMAP, 16, **flag),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_no_words(name):
    """Words are true, so that ``"no"`` would mean yes."""
    flag = name.strip()
    with pytest.raises(InvalidProblemError, match=f"^{flag}: expected True or False, got 'no'"):
        FLAGS[name](**{flag: "no"})
    FLAGS[name](**{flag: True})


SIZES = {
    "embed_dim: expected an integer from 1 to 2147483647, got '16'": ("16", 2),
    "embed_dim: expected an integer from 1 to 2147483647, got 0": (0, 2),
    "num_heads: expected an integer from 1 to 2147483647, got 2.0": (16, 2.0),
    "num_heads: expected an integer from 1 to 2147483647, got 0": (16, 0),
    "kdim: expected an integer from 0 to 2147483647, got -1": (16, 2, None, 0.0, True, False, False, -1),
    "vdim: expected an integer from 0": (16, 2, None, 0.0, True, False, False, None, True),
    "dropout: expected a probability from 0 to 1 - 2^-16, got 'x'": (16, 2, None, "x"),
}


@pytest.mark.parametrize("message", SIZES)
def test_sizes_of_attention_are_integers(message):
    first, rest = SIZES[message][:2], SIZES[message][3:]
    with pytest.raises(InvalidProblemError, match="^" + re.escape(message)):
        MultiheadAttention(*first, SparsityInfo("dense", 16), *rest)


WIDTHS = {"query": 16, "key": 24, "value": 8}
OTHERS = {
    "{width} columns, got [16, 3, 5]": lambda x: x[..., :5],
    "torch.float32, as the weights, got torch.float16": lambda x: x.half(),
    "torch.float32, as the weights, got torch.int64": lambda x: x.long(),
    "a tensor on cpu, as the weights, got meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("message", OTHERS)
def test_inputs_that_do_not_fit_the_weights(name, message):
    module = MultiheadAttention(16, 2, SparsityInfo("dense", 16), kdim=24, vdim=8)
    given = {one: randn(16, 3, width) for one, width in WIDTHS.items()}
    given[name] = OTHERS[message](given[name])
    wanted = f"{name}: expected {message.format(width=WIDTHS[name])}"
    with pytest.raises(InvalidProblemError, match=re.escape(wanted)):
        module(**given)


def test_autocast_takes_inputs_of_another_dtype():
    module, x = MultiheadAttention(16, 2, SparsityInfo("dense", 16)), randn(16, 3, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x, x, x)[0], module(x.float(), x.float(), x.float())[0])
