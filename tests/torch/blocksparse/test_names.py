"""Torch-Blocksparse's names and call forms besides products: each computes, or is refused by name."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError
from sparse24_plans.torch import blocksparse as bs

from .cases import layout_of, randn

ORDERS = {"NCHW": 3, "NHWC": 1, "CHWN": 0}
"""The dimension whose elements are adjacent."""


@pytest.mark.parametrize("order", ORDERS)
def test_permute_changes_memory_alone(order):
    x = randn(2, 3, 4, 5).requires_grad_()
    for y in (bs.Permute("NCHW", order)(x), bs._permute.apply(x, "NCHW", order)):
        assert torch.equal(y, x)
        assert y.stride(ORDERS[order]) == 1
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with pytest.raises(InvalidProblemError, match="out_order: expected one of NCHW, NHWC, CHWN, got 'WHCN'"):
        bs.Permute("NCHW", "WHCN")


@pytest.mark.parametrize("order", ORDERS)
def test_the_strides_of_an_order(order):
    found = bs._permute.strides(2, 3, 4, 5, order)
    assert found == list(bs.Permute("NCHW", order)(randn(2, 3, 4, 5)).stride())
    with pytest.raises(InvalidProblemError, match="order: expected one of NCHW, NHWC, CHWN, got 'CHW'"):
        bs._permute.strides(2, 3, 4, 5, "CHW")


def test_relu_scales_shifts_and_adds():
    x, residual = randn(2, 3, 4, 5), randn(2, 3, 4, 5, seed=1)
    found = bs.ReLU()(x, torch.tensor([0.5]), torch.tensor([-0.25]), residual)
    torch.testing.assert_close(found, (0.5 * x - 0.25 + residual).clamp(min=0))


@pytest.mark.parametrize("wrong", [torch.ones(5), 0.5], ids=["columns", "number"])
@pytest.mark.parametrize("name", ["scale", "bias"])
def test_relus_scale_and_bias_have_one_element(name, wrong):
    x, given = randn(2, 3, 4, 5), {"scale": torch.ones(1), "bias": torch.ones(1), name: wrong}
    with pytest.raises(InvalidProblemError, match=f"^{name}: expected a tensor of one element, got"):
        bs.ReLU()(x, residual=x, **given)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_is_pytorchs_with_images_adjacent(training):
    ours, theirs, x = bs.BatchNorm2d(3).train(training), nn.BatchNorm2d(3).train(training), randn(2, 3, 4, 5)
    y = ours(x)
    assert torch.equal(y, theirs(x))
    assert torch.equal(ours.running_var, theirs.running_var)
    assert y.stride(0) == 1


@pytest.mark.parametrize("order", [*ORDERS, None])
def test_a_convolution_in_every_order(order):
    mask = torch.tensor([[[[1, 0]], [[1, 1]]], [[[0, 1]], [[0, 0]]]])
    conv = bs.Conv2d(32, 32, (1, 2), mask, 16, order=order)
    x = randn(2, 32, 4, 5)
    y = conv(x)
    torch.testing.assert_close(y, nn.functional.conv2d(x, conv.dense_weight()), rtol=1e-4, atol=1e-5)
    assert y.stride(ORDERS[order or "NHWC"]) == 1
    moved = bs.Conv2d.nchw_to_chwn(y)
    assert moved.stride(0) == 1
    assert bs.Conv2d.chwn_to_nchw(moved).is_contiguous()
    assert torch.equal(bs.Conv2d.chwn_to_nchw(moved), y)
    conv.clear_cache()
    assert torch.equal(conv(x), y)


@pytest.mark.parametrize("more", [(), (False,), (True,)])
def test_a_convolutions_order_may_be_in_dilations_place(more):
    """Torch-Blocksparse's arguments are padding, stride, order and bias."""
    mask = torch.ones(2, 2, 3, 3).long()
    conv = bs.Conv2d(32, 32, (3, 3), mask, 16, (1, 1), (2, 2), "CHWN", *more)
    assert (conv.order, conv.dilation, conv.bias is not None) == ("CHWN", (1, 1), more == (True,))
    assert (conv.block, conv.num_blocks) == (16, 36)
    x = randn(2, 32, 5, 5)
    wanted = nn.functional.conv2d(x, conv.dense_weight(), conv.bias, 2, 1)
    torch.testing.assert_close(conv(x), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidProblemError, match="order: expected one of NCHW, NHWC, CHWN, got 'same'"):
        bs.Conv2d(32, 32, (3, 3), mask, 16, 1, 1, "same")
    with pytest.raises(
        InvalidProblemError, match="dilation: expected integers beside order 'NHWC', got 'CHW"
    ):
        bs.Conv2d(32, 32, (3, 3), mask, 16, 1, 1, "CHWN", order="NHWC")


@pytest.mark.parametrize("given", ["biasa", "biasb", "biasa biasb"])
def test_a_convolutions_shifts_and_their_gradients(given):
    """Torch-Blocksparse convolves relu(input + biasa) + biasb; padding stays zero."""
    conv = bs.Conv2d(32, 32, (3, 2), torch.tensor([[[[1], [0], [1]]] * 2] * 2).expand(2, 2, 3, 2), 16, 1)
    shifts = {name: torch.tensor([0.5 - at]).requires_grad_() for at, name in enumerate(given.split())}
    x = randn(2, 32, 4, 5).requires_grad_()
    shifted = torch.relu(x + shifts["biasa"]) if "biasa" in shifts else x
    shifted = shifted + shifts["biasb"] if "biasb" in shifts else shifted
    y, wanted = conv(x, **shifts), nn.functional.conv2d(shifted, conv.dense_weight(), padding=1)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    inputs, dy = (x, *shifts.values()), randn(*y.shape, seed=2)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["biasa", "biasb"])
@pytest.mark.parametrize("wrong", [torch.zeros(5), 0.5])
def test_a_convolutions_shift_has_one_element(name, wrong):
    conv = bs.Conv2d(32, 32, 1, torch.ones(2, 2, 1, 1).long(), 16)
    with pytest.raises(InvalidProblemError, match=f"^{name}: expected a tensor of one element, got"):
        conv(randn(2, 32, 4, 5), **{name: wrong})


def test_values_move_to_another_mask():
    before, after = torch.rand(3, 2, 1, 2) < 0.5, torch.rand(3, 2, 1, 2) < 0.5
    values = randn(int(before.sum()), 16, 16)
    found = bs.Conv2d.update_layout(before.long(), values, after.long(), -1.0)
    dense = torch.full((*before.shape, 16, 16), -1.0)
    dense[before] = values
    assert torch.equal(found, dense[after])


MISFITS = {
    r"layout_b: expected shape \[3, 2, 1, 2\], as layout_a, got \[3, 2, 2, 1\]": ((3, 2, 2, 1), (12, 16, 16)),
    r"tensor_a: expected \[12, block, block\], as layout_a keeps, got \[11, 16, 16\]": (
        (3, 2, 1, 2),
        (11, 16, 16),
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_values_that_cannot_move(message):
    after, values = MISFITS[message]
    with pytest.raises(InvalidProblemError, match=message):
        bs.Conv2d.update_layout(torch.ones(3, 2, 1, 2).long(), torch.ones(values), torch.ones(after), 0.0)


@pytest.mark.parametrize("bench", [False, True])
def test_bench_does_nothing(bench):
    layout, a = layout_of(), randn(1, 2, 32, 48)
    product = bs.MatMul(layout, 16, "sdd", False, True, bench)
    scores = product(a, randn(1, 2, 48, 48))
    assert torch.equal(scores, bs.MatMul(layout, 16, "sdd", trans_b=True)(a, randn(1, 2, 48, 48)))
    assert torch.equal(bs.Softmax(layout, 16, bench)(scores), bs.Softmax(layout)(scores))
    assert bs.Linear(32, 32, 16, torch.ones(2, 2).bool(), bench=bench)(randn(3, 32)).shape == (3, 32)


def test_modules_have_the_references_attributes():
    product = bs.MatMul(layout_of(), 16, "sdd", bench=True)
    normal = bs.Softmax(layout_of(block=32))
    assert (product.block, product.spdims, product.bench) == (16, (2, 2, 3), True)
    assert (product.time_c, product.time_da, product.time_db) == (None, None, None)
    assert (normal.block, normal.spdims, normal.bench, normal.time_y) == (32, (2, 2, 3), False, None)
    assert bs.Linear(32, 32, 16, torch.ones(2, 2).bool()).block == 16
    given = bs.MultiheadAttention(32, 2, MASK, 16, add_zero_attn=True)
    assert (given.block, given.layout.bitmap.shape) == (16, MASK.shape)
    by_rule = bs.MultiheadAttention(32, 2, bs.SparsityInfo("dense", 32))
    assert (by_rule.block, by_rule.layout) == (32, None)


MASK = torch.ones(2, 3, 3).tril().long()
OPTIONS = {"dropout": 0.25, "bias": False, "add_bias_kv": True, "add_zero_attn": True, "kdim": 24, "vdim": 8}
MODES = {"key_padding_mask_mode": "mul", "attn_mask_mode": "add"}
FORMS = {
    "order": lambda: bs.MultiheadAttention(32, 2, MASK, 16, *OPTIONS.values(), *MODES.values()),
    "lists": lambda: bs.MultiheadAttention(32, 2, MASK.tolist(), 16, **OPTIONS, **MODES),
    "keywords": lambda: bs.MultiheadAttention(32, 2, layout=MASK, block=16, **OPTIONS, **MODES),
    "all by keyword": lambda: bs.MultiheadAttention(
        embed_dim=32, num_heads=2, layout=MASK, block=16, **OPTIONS, **MODES
    ),
    "block by keyword": lambda: bs.MultiheadAttention(
        32, 2, MASK.numpy(), *OPTIONS.values(), *MODES.values(), block=16
    ),
    "layout": lambda: bs.MultiheadAttention(
        32, 2, bs.Layout(MASK, 16), *OPTIONS.values(), *MODES.values(), block=16
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_attention_takes_a_bitmap_and_its_block(form):
    module, given = FORMS[form](), bs.MultiheadAttention(32, 2, bs.Layout(MASK, 16), **OPTIONS, **MODES)
    given.load_state_dict(module.state_dict())
    inputs = randn(48, 2, 32), randn(48, 2, 24), randn(48, 2, 8)
    assert (module.dropout, module.bias_k.shape, module.add_zero_attn) == (0.25, (1, 1, 32), True)
    assert (module.key_padding_mask_mode, module.attn_mask_mode) == ("mul", "add")
    assert torch.equal(module.eval()(*inputs)[0], given.eval()(*inputs)[0])
    assert bs.MultiheadAttention.SparsityInfo is bs.SparsityInfo


MISTAKES = {
    "block: expected 16, 32, 64 or 128 beside a bitmap, got None": ((MASK,), {}),
    "block: expected 16, 32, 64 or 128, got 16.5": ((MASK, 16.5), {}),
    "dropout: expected a probability from 0 to 1": ((MASK, 16, 2.0), {}),
    "layout: expected None beside sparsity": ((MASK, 16), {"layout": MASK}),
    "block: expected 16, as the rule's, got 32": ((bs.SparsityInfo("dense", 16),), {"block": 32}),
    "sparsity: expected a SparsityInfo, .* got NoneType": ((), {}),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_attention_of_a_wrong_block_or_layout(message):
    given, options = MISTAKES[message]
    with pytest.raises(InvalidProblemError, match=message):
        bs.MultiheadAttention(32, 2, *given, **options)


@pytest.mark.parametrize("masked", [False, True])
def test_deepspeeds_self_attention(masked):
    module = bs.DeepSpeedSparseSelfAttention(64, 2, stride=32, attn_mask_mode="mul")
    q, k, v = (randn(3, 2, 64, 32, seed=seed) for seed in range(3))
    kept = torch.tensor(module.sparsity.layout(2, 64).bitmap)
    mask = torch.ones(64, 64).tril() if masked else None
    found = module(q, k, v, attn_mask=mask)
    seen = kept.repeat_interleave(16, 1).repeat_interleave(16, 2)
    seen = seen & mask.bool() if masked else seen
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidProblemError, match=r"query: expected \[Z, 2, tokens, head_size\]"):
        module(q[0], k[0], v[0])
    module = bs.DeepSpeedSparseSelfAttention(64, 2, stride=32, attn_mask_mode="mul", dropout=0.5)
    assert not torch.equal(module(q, k, v, attn_mask=mask), module(q, k, v, attn_mask=mask))
    assert torch.equal(module.eval()(q, k, v, attn_mask=mask), found)


def test_scores_that_only_their_scale_brings_into_float16():
    """Sums reach 10^5, but an eighth of them is finite; a mask that drops nothing changes nothing."""
    module = bs.DeepSpeedSparseSelfAttention(bs.SparsityInfo("dense", 16))
    q, k, v = (
        randn(1, 2, 32, 64, dtype=torch.float16, seed=seed) * scale for seed, scale in enumerate((99, 99, 1))
    )
    assert (q.float() @ k.float().mT).abs().max() > torch.finfo(torch.float16).max
    wanted = module(q, k, v)
    torch.testing.assert_close(module(q, k, v, key_padding_mask=torch.zeros(1, 32)), wanted)


RULES = {
    "rule": bs.SparsityInfo("fixed", 16, 32),
    "configuration": bs.FixedSparsityConfig(2, num_local_blocks=2),
}
LAST_FORMS = {
    "order": lambda rule: bs.DeepSpeedSparseSelfAttention(rule, "mul", "add"),
    "keywords": lambda rule: bs.DeepSpeedSparseSelfAttention(
        sparsity_config=rule, key_padding_mask_mode="mul", attn_mask_mode="add"
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", LAST_FORMS)
@pytest.mark.parametrize("size", [32, 64])
def test_deepspeeds_self_attention_in_its_last_form(rule, form, size):
    """Keys may be transposed unless they are square, and masks may have dimensions of 1."""
    module = LAST_FORMS[form](RULES[rule])
    before = bs.DeepSpeedSparseSelfAttention(
        2 * size, 2, stride=32, key_padding_mask_mode="mul", attn_mask_mode="add"
    )
    q, k, v = (randn(3, 2, 64, size, seed=seed) for seed in range(3))
    padding, mask = (torch.arange(64) < torch.tensor([[64], [40], [7]])).float(), randn(64, 64)
    wanted = before(q, k, v, None, padding, mask)
    found = module(q, k if size == 64 else k.mT, v, None, padding[:, None, None], mask[None, None])
    assert torch.equal(found, wanted)
    assert torch.equal(module(q, k, v, key_padding_mask=padding, attn_mask=mask), wanted)


def test_deepspeeds_self_attention_has_a_default_rule():
    rule = bs.SparsityInfo("fixed", 16, 64, unidirectional=True)
    assert bs.DeepSpeedSparseSelfAttention().sparsity_config == rule
    module = bs.DeepSpeedSparseSelfAttention(attn_mask_mode="add")
    assert (module.sparsity, module.attn_mask_mode) == (rule, "add")
    module.sparsity.block = 32
    assert bs.DeepSpeedSparseSelfAttention().sparsity == rule


WRONG_FORMS = {
    "attn_mask_mode: expected add or mul, got 'MUL'": ((64, 2), {"attn_mask_mode": "MUL"}),
    "key_padding_mask_mode: expected add or mul, got 'and'": ((RULES["rule"], "and"), {}),
    "dropout: expected a probability from 0 to 1": ((64, 2), {"dropout": 2.0}),
    "sparsity_config: expected a SparsityInfo or SparsityConfig, got str": (("fixed",), {}),
    "num_heads: expected an integer from 1 to .* got '2'": ((64, "2"), {}),
    "num_heads: expected an integer from 1 to .* got 0": ((np.int64(64), 0), {}),
}


@pytest.mark.parametrize("message", WRONG_FORMS)
def test_self_attention_that_cannot_be(message):
    given, options = WRONG_FORMS[message]
    with pytest.raises(InvalidProblemError, match=message):
        bs.DeepSpeedSparseSelfAttention(*given, **options)


def test_inputs_that_self_attention_does_not_take():
    x, module = randn(2, 3, 64, 8), bs.DeepSpeedSparseSelfAttention(RULES["configuration"])
    with pytest.raises(InvalidProblemError, match=r"query: expected \[Z, 2, tokens, head_size\], got \[2, 3"):
        module(x, x, x)
    with pytest.raises(InvalidProblemError, match=r"query: expected \[Z, 2, tokens, head_size\], got .* 0\]"):
        module(*[x[:, :2, :, :0]] * 3, attn_mask=torch.ones(64, 64))
    with pytest.raises(
        InvalidProblemError, match=r"rpe: expected numbers \[2, 2, 64, 64\] on cpu, got .*\[3, 2"
    ):
        module(*[x[:, :2]] * 3, rpe=randn(3, 2, 64, 64))
    with pytest.raises(InvalidProblemError, match=r"k: expected shape .* got \[2, 2, 32, 8\]"):
        module(x[:, :2], x[:, :2, :32], x[:, :2])


def test_a_models_attention_is_replaced():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(3, 64, 32)
    with torch.no_grad():
        wanted = model(x)
        names = bs.replace_mha(model, bs.SparsityInfo("dense", 16))
        assert names == ["layers.0.self_attn", "layers.1.self_attn"]
        assert all(type(model.get_submodule(name)) is bs.MultiheadAttention for name in names)
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    with_dropout = nn.Sequential(nn.MultiheadAttention(32, 2, 0.3, add_bias_kv=True, add_zero_attn=True))
    theirs = with_dropout[0]
    bs.replace_mha(with_dropout, bs.SparsityInfo("dense", 16))
    assert (with_dropout[0].dropout, with_dropout[0].add_zero_attn) == (0.3, True)
    assert torch.equal(with_dropout[0].bias_k, theirs.bias_k)
    assert torch.equal(with_dropout[0].bias_v, theirs.bias_v)


def test_the_rule_of_a_replacement_has_two_names():
    rule, model = bs.SparsityInfo("dense", 16), nn.Sequential(nn.MultiheadAttention(32, 2))
    with pytest.raises(InvalidProblemError, match="info: expected None beside sparsity"):
        bs.replace_mha(model, rule, info=rule)
    with pytest.raises(InvalidProblemError, match=r"sparsity: expected a SparsityInfo, .* got NoneType"):
        bs.replace_mha(model)
    assert bs.replace_mha(model, info=rule) == ["0"]
    assert model[0].sparsity is rule


HIDDEN = torch.arange(32) >= torch.tensor([[16], [7]])
SRC_MASKS = {
    "bool mask": {"mask": torch.ones(32, 32).triu(1).bool()},
    "float mask": {"mask": randn(32, 32)},
    "mask of -inf": {"mask": torch.zeros(32, 32).masked_fill(torch.arange(32) >= 16, -torch.inf)},
    "bool padding": {"src_key_padding_mask": HIDDEN},
    "float padding": {"src_key_padding_mask": torch.zeros(2, 32).masked_fill(HIDDEN, -torch.inf)},
    "both": {"mask": torch.ones(32, 32).triu(1).bool(), "src_key_padding_mask": HIDDEN},
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SRC_MASKS)
def test_replaced_attention_keeps_the_meaning_of_masks(name, training):
    """Without gradients PyTorch's encoder would make nested tensors, and add float masks wrongly."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(training)
    ours, x = copy.deepcopy(model), randn(2, 32, 32)
    bs.replace_mha(ours, bs.SparsityInfo("dense", 16))
    wanted = model(x, **SRC_MASKS[name])
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(ours(x, **SRC_MASKS[name]), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_bool_masks_of_a_replaced_module(padded, masked):
    model = nn.ModuleList([nn.MultiheadAttention(32, 2, batch_first=True)])
    theirs, x = model[0], randn(2, 32, 32)
    bs.replace_mha(model, torch.ones(2, 2, 2).long(), block=16)
    options = {
        "key_padding_mask": HIDDEN if padded else None,
        "attn_mask": torch.ones(32, 32).triu(1).bool() if masked else None,
    }
    torch.testing.assert_close(model[0](x, x, x, **options)[0], theirs(x, x, x, **options)[0])


def test_replaced_attention_stays_shared_tied_and_frozen():
    first, second = nn.MultiheadAttention(32, 2), nn.MultiheadAttention(32, 2, bias=False).eval()
    second.in_proj_weight = first.in_proj_weight
    first.out_proj.weight.requires_grad_(False)
    model = nn.ModuleDict({"a": nn.Sequential(first, second), "b": first})
    model["c"] = model["a"]
    before = dict(model.named_parameters(remove_duplicate=False))
    names = bs.replace_mha(model, bs.SparsityInfo("dense", 16))
    assert names == ["a.0", "a.1", "b", "c.0", "c.1"]
    assert model["a"][0] is model["b"]
    assert type(model["b"]) is type(model["a"][1]) is bs.MultiheadAttention
    after = dict(model.named_parameters(remove_duplicate=False))
    assert {name: id(one) for name, one in after.items()} == {name: id(one) for name, one in before.items()}
    assert not model["b"].out_proj.weight.requires_grad
    assert model["b"].training
    assert not any(module.training for module in model["a"][1].modules())


def test_a_model_without_plain_parameters_is_left_as_it_is():
    model = nn.ModuleList([nn.MultiheadAttention(32, 2), nn.MultiheadAttention(32, 2)])
    nn.utils.parametrize.register_parametrization(model[1], "in_proj_weight", nn.Identity())
    with pytest.raises(InvalidProblemError, match="model: expected attention with the parameters"):
        bs.replace_mha(model, bs.SparsityInfo("dense", 16))
    assert type(model[0]) is nn.MultiheadAttention
