"""The op that quantizes the rows of X to 8 bits: its results, its compiled form, what it refuses."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch.quantized_linear import quantize, scale_of

from .cases import DEVICE
from .test_quantized_linear import F8, each_dtype, quantized_layer

op = torch.ops.sparse24.quantize
SOURCES = {
    "matrix": lambda: torch.randn(5, 72),
    "leading dimensions, ragged": lambda: torch.randn(2, 3, 75).bfloat16(),
    "vector": lambda: torch.randn(72).half(),
    "no rows": lambda: torch.randn(0, 16),
    "no columns": lambda: torch.randn(3, 0),
    "columns": lambda: torch.randn(64, 9).t(),
    "rows apart": lambda: torch.randn(9, 100)[:, 3:67],
    "one row again and again": lambda: torch.randn(1, 16).expand(4, 16),
    "long": lambda: torch.randn(3, 5000).bfloat16(),
}


@each_dtype
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_the_op_gives_what_the_layers_expression_gives(dtype, static, name):
    """The definition is computed on the host, because CUDA divides by a number as it likes."""
    x = SOURCES[name]()
    scale = torch.tensor([0.02]) if static else None
    columns = -(-x.shape[-1] // 16) * 16
    place = [None if one is None else one.to(DEVICE) for one in (x, scale)]
    for found in (
        op(place[0], dtype, place[1], columns),
        torch.compile(op)(place[0], dtype, place[1], columns),
    ):
        rows, scales = (one.cpu() for one in found)
        by = scale_of(x, dtype) if scale is None else scale
        assert rows.shape == (*x.shape[:-1], columns)
        assert torch.equal(rows[..., : x.shape[-1]].float(), quantize(x, dtype, by).float())
        assert not rows[..., x.shape[-1] :].float().any()
        assert torch.equal(scales, by) if scale is None else scales.shape == (0,)


def test_what_the_op_refuses():
    x = torch.randn(3, 16)
    for args, message in (
        ((x, F8, torch.ones(3), 16), r"scale: expected one float32 on cpu, got torch.float32 \[3\]"),
        ((x, F8, None, 8), "columns: expected at least 16, got 8"),
        ((x, torch.float16, None, 16), "out_element: expected fp8_e4m3 or s8, got f16"),
        ((x.double(), F8, None, 16), "x: expected one of .*, got torch.float64"),
        ((x[0, 0], F8, None, 16), r"x: expected \[..., K\]"),
    ):
        with pytest.raises(InvalidProblemError, match=message):
            op(*args)
    with pytest.raises(UnsupportedError, match="quantize has no gradient"):
        op(x.requires_grad_(), F8, None, 16)


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("k", [72, 75, 4096])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_a_layer_on_a_gpu_quantizes_as_on_the_host(dtype, k, input_scale):
    """Quantizing takes one kernel, and a graph of the layer replays it."""
    layer, x = quantized_layer(dtype, k, input_scale=input_scale), torch.randn(7, k)
    wanted, by = layer._quantized(x)
    result = layer(x).double()
    layer, on_gpu = layer.cuda(), x.cuda()
    with torch.no_grad():
        found, scale = layer._quantized(on_gpu)
        assert torch.equal(found.cpu().float(), wanted.float())
        assert torch.equal(scale.cpu(), by)
        y = layer(on_gpu)
        assert float((y.cpu().double() - result).norm() / result.norm()) < 1e-3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = layer(on_gpu)
        on_gpu.copy_(x.flip(0))
        graph.replay()
        assert torch.equal(again.flip(0), y)
