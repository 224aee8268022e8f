"""Under autocast each op moves its operands to the dtype that its weight allows, and gradients move back."""

from __future__ import annotations

import pytest
import torch

from .cases import DEVICE, S, close, integers, randn, wanting, weight
from .dispatching import CHOSEN


@pytest.mark.parametrize("form", ["float32 weight", "bfloat16 weight", "packed bfloat16 weight"])
def test_autocast_moves_x_and_float32_weights(form):
    """A weight of 16 bits keeps its element, and x goes there; a float32 one goes where autocast says."""
    values, meta, _ = weight(dtype=torch.float32 if form.startswith("float32") else torch.bfloat16)
    arguments = (S.pack(values, meta), None, None, 96) if form.startswith("packed") else (values, meta)
    x = randn(5, 64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = S.linear(x, *arguments)
        dx = S.dgrad(randn(5, 96), arguments[0], arguments[1], 96, 64)
    halves = values.bfloat16()
    assert torch.equal(y, S.linear(x.bfloat16(), halves, meta))
    assert torch.equal(dx, S.dgrad(randn(5, 96).bfloat16(), halves, meta))


def _into_out(x, w, meta, bias):
    out = x.new_empty(5, 64, dtype=torch.bfloat16)
    S.linear_out(x, w, meta, bias, out)
    return out


BY_GROUPS = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
MIXED = {
    "linear_out": _into_out,
    "bmm": lambda x, w, meta, bias: S.bmm(x[None], w, meta, bias),
    "bmm by name": lambda x, w, meta, bias: S.bmm(x=x[None], weight=w, meta=meta, bias=bias),
    "grouped_mm": lambda x, w, meta, bias: S.grouped_mm(x, w, meta, BY_GROUPS, bias),
    "experts_mm": lambda x, w, meta, bias: S.experts_mm(x, w, meta, CHOSEN, 2, gather=True, bias=bias),
}


@pytest.mark.parametrize("op", MIXED)
@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_moves_the_operands_of_every_product(op, form):
    values, meta = S.prune_compress(randn(64, 64, dtype=form))
    x, bias = randn(5, 64), randn(64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = MIXED[op](x, values, meta, bias)
    wanted = MIXED[op](*(x.bfloat16(), values.bfloat16()), meta, bias.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["weight_only_linear", "packed", "grouped_mm", "bmm"])
def test_autocast_moves_x_to_16_bit_scales(op, scale_dtype, x_dtype):
    """With float32 scales the weight has any dtype of 16 bits, so an x of 16 bits stays."""
    _, meta = (one.cpu() for one in S.prune_compress(randn(64, 64)))
    bytes_, scales = integers(64, 32).cpu(), randn(64, 1).cpu().abs().to(scale_dtype)
    x, bias = randn(5, 64).cpu().to(x_dtype), randn(64).cpu()

    def product(x, bias):
        if op == "weight_only_linear":
            return S.weight_only_linear(x, bytes_, meta, scales, bias, 64)
        if op == "packed":
            tiles = S.pack_quantized(bytes_, meta, scales, 64)
            return S.weight_only_linear(x, tiles, None, None, bias, 64, m=64, scale_dtype=scale_dtype)
        if op == "bmm":
            return S.bmm(x[None], bytes_, meta, bias, scales=scales, group=64)
        return S.grouped_mm(x, bytes_, meta, BY_GROUPS.cpu(), bias, scales=scales, group=64)

    stays = torch.float16 in (scale_dtype, x_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = product(x, bias)
    dtype = torch.float16 if stays else torch.bfloat16
    assert y.dtype == dtype
    assert torch.equal(y, product(x.to(dtype), bias.to(dtype)))


def test_autocast_leaves_the_bias_of_8_bit_operands():
    values, meta = S.prune_compress(integers(64, 64))
    x, bias = integers(5, 64), randn(64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = S.linear(x, values, meta, bias, out_dtype=torch.float32)
    assert torch.equal(y, S.linear(x, values, meta, bias, out_dtype=torch.float32))


def test_autocast_gradients_have_the_operands_dtypes():
    values, meta, dense = weight()
    x, v = wanting(randn(5, 64)), wanting(values)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = S.linear(x, v, meta)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, v.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    close(x.grad, dense.double().sum(0).expand(5, 64), torch.bfloat16)
