"""The benchmark of layers of 8 bits, on layers small enough for a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import check, fp8_layers
from benchmarks.bounds import BOUNDS
from benchmarks.fp8_layers import DTYPES, LISTS
from benchmarks.judging import judged
from sparse24_plans import UnsupportedError
from sparse24_plans.bench import record
from sparse24_plans.torch import Sparse24QuantizedLinear

from .cases import DEVICE, randn

ABOUT = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "versions": {}}
TIMES = ("linear_us", "quantize_us", "layer_us", "dense_us")
BLOCK_US = 2000.0


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(fp8_layers, "SHAPES", ((64, 128), (96, 72)))
    monkeypatch.setattr(fp8_layers, "TOKENS", (1, 5))
    monkeypatch.setattr(fp8_layers, "ROUNDS", 2)


def steps() -> list[record.Step]:
    return fp8_layers.steps(DEVICE, block_us=BLOCK_US, short_block_us=BLOCK_US)


def test_record_has_row_of_each_layer_and_number_of_tokens(small):
    found = record.take(steps(), ABOUT, LISTS)
    assert check.faults("layers", found) == []
    where = {(row["m"], row["k"], row["n"], row["dtype"]) for row in found["layers"]}
    assert where == {
        (m, k, n, dtype) for m, k in ((64, 128), (96, 72)) for n in (1, 5) for dtype in ("fp8", "int8")
    }
    assert len(found["layers"]) == len(where)
    assert all(row[name] > 0 for row in found["layers"] for name in TIMES)
    assert all(step.is_done(found) for step in steps())
    assert bool(found["kernel_files"]) == (DEVICE == "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_timed_is_the_layer_and_its_two_parts(dtype):
    dense = torch.nn.Linear(72, 96, bias=False, dtype=torch.bfloat16, device=DEVICE).requires_grad_(False)
    layer = Sparse24QuantizedLinear.from_linear(dense, dtype=DTYPES[dtype])
    x = randn(5, 72, dtype=torch.bfloat16)
    calls = fp8_layers.contenders(layer, dense, x)
    assert tuple(calls) == TIMES
    assert all(len(each) > 1 for each in calls.values())
    with torch.inference_mode():
        rows, scale = torch.ops.sparse24.quantize(x, DTYPES[dtype], None, layer.k)
        for call in calls["quantize_us"]:
            assert all(map(torch.equal, call(), (rows, scale)))
        for name in ("linear_us", "layer_us"):
            assert all(torch.equal(call(), layer(x)) for call in calls[name])
        assert all(torch.equal(call(), dense(x)) for call in calls["dense_us"])


def test_each_copy_has_a_weight_of_its_own():
    layer = Sparse24QuantizedLinear(64, 64, bias=False, device=DEVICE)
    copies = fp8_layers._copies(layer, layer.weight_bytes, torch.device(DEVICE))
    places = {one.stored()[0].data_ptr() for one in copies}
    assert copies[0] is layer
    assert len(places) == len(copies) > 1


def test_a_wrong_result_is_not_timed(small, monkeypatch):
    right = Sparse24QuantizedLinear.product
    monkeypatch.setattr(Sparse24QuantizedLinear, "product", lambda *given: -right(*given))
    with pytest.raises(UnsupportedError, match="expected a relative error"):
        record.take(steps(), ABOUT, LISTS)


@pytest.mark.parametrize(
    ("m", "us", "missed"), [(4096, 7.1, 0), (4096, 7.2, 1), (11008, 13.2, 0), (11008, 13.4, 1)]
)
def test_products_of_64_tokens_are_held_against_torchao(m, us, missed):
    row = {"m": m, "k": 4096, "dtype": "fp8", **dict.fromkeys(TIMES, us)}
    others = [{**row, "n": 256, "linear_us": 99.0}, {**row, "n": 64, "dtype": "int8", "linear_us": 99.0}]
    made = {"layers": [{**row, "n": 64}, *others]}
    assert sum(judged(one, made).is_missed for one in BOUNDS["layers"]) == missed
