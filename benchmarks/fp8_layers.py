"""The record of linear layers of 8 bits: the product of tokens that are quantized already, the pass that
quantizes them, both as the layer runs them, and the dense layer in bf16.

Each goes round copies of its weight, in a CUDA graph, alone in a steady state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparse24_plans.bench.gemm import rounded
from sparse24_plans.bench.record import Lists, Record, Step, sources_of
from sparse24_plans.bench.steady import Work
from sparse24_plans.errors import UnsupportedError
from sparse24_plans.prepare.descriptor import QuantizeSparse24Descriptor
from sparse24_plans.prepare.plan import QuantizeSparse24Plan
from sparse24_plans.torch.elements import element_of, plan_device
from sparse24_plans.torch.quantized_linear import Sparse24QuantizedLinear
from sparse24_plans.tuning.timing import copies_beyond_l2

from .torch_end_to_end import alone, captured

LISTS: Lists = {"layers": ("m", "k", "n", "dtype")}
SHAPES = ((4096, 4096), (11008, 4096))
TOKENS = (1, 16, 64, 256)
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
ROUNDS = 20
"""Times that one graph goes round the copies, so that launching graphs takes none of the time."""
_WORST_ERROR = 0.05
"""Relative error of a layer above which it is not timed: tokens of 8 bits are off by up to 0.03."""
_ops: Any = torch.ops.sparse24
Calls = list[Callable[[], object]]
"""One call for each copy of the operands, all with the same work."""


def steps(device: str = "cuda", **options: Any) -> list[Step]:
    """The measurements. ``options`` are those of ``steady``."""
    return [
        Step("layers", about, partial(_measured, about, torch.device(device), options))
        for m, k in SHAPES
        for dtype in DTYPES
        for about in ({"m": m, "k": k, "n": n, "dtype": dtype} for n in TOKENS)
    ]


def _measured(about: dict[str, Any], device: torch.device, options: Any, sources: set[str]) -> Record:
    """The row of a layer. Raises UnsupportedError where its result is wrong."""
    m, k, n, dtype = about["m"], about["k"], about["n"], DTYPES[about["dtype"]]
    torch.manual_seed(0)
    x = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    dense = nn.Linear(k, m, bias=False, dtype=torch.bfloat16, device=device).requires_grad_(False)
    layer = Sparse24QuantizedLinear.from_linear(dense, dtype=dtype)
    with torch.inference_mode():
        wanted = x.float() @ layer.dense_weight().T
        error = ((layer(x).float() - wanted).norm() / wanted.norm()).item()
        if not error <= _WORST_ERROR:
            raise UnsupportedError(f"layer {about}: expected a relative error of {_WORST_ERROR}, got {error}")
        calls = contenders(layer, dense, x)
        times = {name: rounded(_us(each, device, options)) for name, each in calls.items()}
    sources.update(sources_of(layer.plan(n)), sources_of(_quantizing(layer, x)))
    return {"layers": [{**about, **times, "rel_error": float(f"{error:.3g}")}]}


def contenders(layer: Sparse24QuantizedLinear, dense: nn.Linear, x: Tensor) -> dict[str, Calls]:
    """The calls that are timed, by their field in the record."""
    layers = _copies(layer, layer.weight_bytes, x.device)
    others = _copies(dense, dense.weight.nbytes, x.device)
    tokens = [x, *(x.clone() for _ in layers[1:])]
    dtype, columns, m = layer.weight_dtype, layer.k, layer.out_features
    rows, scale = _ops.quantize(x, dtype, None, columns)
    product = _ops.scaled_linear

    def multiplied(one: Any) -> Callable[[], object]:
        weight, meta = one.stored()
        return lambda: product(rows, weight, meta, scale, one.weight_scale, None, m, "none", x.dtype)

    return {
        "linear_us": [multiplied(one) for one in layers],
        "quantize_us": [partial(_ops.quantize, one, dtype, None, columns) for one in tokens],
        "layer_us": [partial(one, x) for one in layers],
        "dense_us": [partial(one, x) for one in others],
    }


def _copies(module: nn.Module, nbytes: int, device: torch.device) -> list[Any]:
    """The module, and copies of it, which together exceed twice the L2 cache."""
    count = copies_beyond_l2(nbytes) if device.type == "cuda" else 2
    return [module, *(copy.deepcopy(module) for _ in range(count - 1))]


def _us(calls: Calls, device: torch.device, options: Any) -> float:
    """Microseconds of one call."""

    def around() -> None:
        for call in calls * ROUNDS:
            call()

    around()
    work = Work(captured(around) if device.type == "cuda" else around, ROUNDS * len(calls))
    return alone({"": work}, device, **options)[""].us


def _quantizing(layer: Sparse24QuantizedLinear, x: Tensor) -> Any:
    """The plan of the pass that quantizes x."""
    (m, k), out = x.shape, element_of(layer.weight_dtype, "dtype")
    desc = QuantizeSparse24Descriptor(m=m, k=k, element=element_of(x.dtype, "x"), out_element=out)
    return QuantizeSparse24Plan.select(desc, device=plan_device(x))
