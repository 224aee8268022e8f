"""The op of batched products: each batch is the product of ``linear`` with its rows of the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.gemm.backends import host
from sparse24_plans.plan import plan
from sparse24_plans.plan.operands import Alignment
from sparse24_plans.torch import plan_cache

from .cases import DEVICES, same_bits

S = torch.ops.sparse24
BATCHES, ROWS, OUT, IN = 3, 5, 64, 128


def randn(*shape: int, device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def stacked(device: str) -> tuple[Tensor, Tensor]:
    return S.prune_compress(randn(BATCHES * OUT, IN, device=device, seed=1, dtype=torch.bfloat16))


def singles(x: Tensor, values: Tensor, meta: Tensor, **options: list[Tensor] | object) -> Tensor:
    """``linear`` of each batch. Options that are lists have an entry for each of them."""
    found = []
    for batch, rows in enumerate(torch.arange(len(values)).chunk(len(x))):
        own = {name: one[batch] if isinstance(one, list) else one for name, one in options.items()}
        found.append(S.linear(x[batch].contiguous(), values[rows], meta[rows], **own))
    return torch.stack(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preference", ["", '{"prefer_backend": "inflate_strict"}'])
def test_each_batch_is_multiplied_by_its_rows_of_the_weight(device, preference):
    preference = preference if device == "cuda" else '{"prefer_kernel": "host_strict"}'
    values, meta = stacked(device)
    x = randn(BATCHES, ROWS, IN, device=device)
    bias, residual = (
        randn(BATCHES, OUT, device=device, seed=2),
        randn(BATCHES, ROWS, OUT, device=device, seed=3),
    )
    options = {"activation": "silu", "preference": preference}
    found = S.bmm(x, values, meta, bias, residual=residual, beta=0.5, **options)
    wanted = singles(x, values, meta, bias=list(bias), residual=list(residual), beta=0.5, **options)
    assert same_bits(found, wanted)
    shared = S.bmm(x, values, meta, bias[0], **options)
    assert same_bits(shared, singles(x, values, meta, bias=bias[0], **options))


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_x_and_of_the_residual_change_no_bit(device):
    values, meta = stacked(device)
    x, residual = randn(BATCHES, ROWS, IN, device=device), randn(BATCHES, ROWS, OUT, device=device, seed=3)
    wanted = S.bmm(x, values, meta, residual=residual)
    rows_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    padded = torch.zeros(BATCHES, ROWS + 1, IN + 8, device=device, dtype=x.dtype)
    padded[:, :ROWS, :IN] = x
    columns = x.transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.zeros(x.numel() + 1, device=device, dtype=x.dtype)[1:].view_as(x).copy_(x)
    for other in (rows_first, padded[:, :ROWS, :IN], columns, odd):
        assert same_bits(S.bmm(other, values, meta, residual=residual), wanted)
    assert same_bits(S.bmm(x, values, meta, residual=residual.mT.contiguous().mT), wanted)
    shared = x[:1].expand(BATCHES, -1, -1)
    assert same_bits(S.bmm(shared, values, meta), S.bmm(shared.contiguous(), values, meta))


@pytest.fixture
def demanding_host(monkeypatch):
    """Plans of the host ask for an X of aligned rows, as those of tensor cores do."""

    def forget() -> None:
        plan._select.cache_clear()
        plan_cache.plans.clear()

    monkeypatch.setattr(host.Kernel, "alignments", {"source": Alignment(16, 16)})
    forget()
    yield
    forget()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("aligned_first", [False, True])
@pytest.mark.parametrize("op", ["bmm", "bmm of rows with gaps", "grouped_mm"])
def test_a_misaligned_x_is_copied(device, aligned_first, op, demanding_host):
    """Its copy has no gaps between rows, whatever strides the plan of an aligned x was made for."""
    values, meta = stacked(device)
    x = randn(BATCHES, ROWS, IN, device=device)
    gap = 8 * (op == "bmm of rows with gaps")
    memory = torch.zeros(BATCHES * (ROWS + 1) * (IN + gap) + 8, device=device, dtype=x.dtype)

    def product(offset: int) -> Tensor:
        own = memory[offset:][: BATCHES * (ROWS + 1) * (IN + gap)].view(BATCHES, ROWS + 1, IN + gap)
        own = own[:, :ROWS, :IN]
        own.copy_(x)
        assert own.data_ptr() % 16 == 2 * offset
        if op != "grouped_mm":
            return S.bmm(own, values, meta)
        offsets = torch.tensor([0, 1, 3, ROWS], dtype=torch.int32, device=device)
        return S.grouped_mm(own[0], values, meta, offsets)

    if aligned_first:
        assert same_bits(product(0), product(1))
    else:
        found = product(1)
        assert same_bits(found, product(0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_x_of_either_fp8_type(dtype):
    values, meta = stacked("cpu")
    values, x = values.to(torch.float8_e4m3fn), randn(BATCHES, ROWS, IN, dtype=dtype)
    assert same_bits(S.bmm(x, values, meta), singles(x, values, meta))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_and_quantized_weights(device):
    values, meta = stacked(device)
    x = randn(BATCHES, ROWS, IN, device=device)
    packed = S.pack(values, meta)
    assert same_bits(S.bmm(x, packed, None, m=BATCHES * OUT), S.bmm(x, values, meta))
    stored = (
        torch.arange(BATCHES * OUT * IN // 4).remainder(251).to(torch.uint8).reshape(-1, IN // 4).to(device),
        meta,
        randn(BATCHES * OUT, IN // 32, device=device, seed=4).abs(),
    )
    found = S.bmm(x, stored[0], meta, scales=stored[2], group=32)
    for batch, rows in enumerate(torch.arange(BATCHES * OUT).chunk(BATCHES)):
        own = S.weight_only_linear(x[batch], *(one[rows] for one in stored), None, 32)
        assert torch.allclose(found[batch].float(), own.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_eight_bits(device):
    values, meta = S.prune_compress(
        torch.randint(-128, 128, (BATCHES * OUT, IN), dtype=torch.int8, generator=torch.Generator()).to(
            device
        )
    )
    x = torch.randint(-128, 128, (BATCHES, ROWS, IN), dtype=torch.int8, device=device)
    rows, outputs = torch.rand(BATCHES, ROWS, device=device), torch.rand(BATCHES, OUT, device=device)
    found = S.bmm(x, values, meta, None, rows, outputs, out_dtype=torch.bfloat16)
    for batch, at in enumerate(torch.arange(BATCHES * OUT).chunk(BATCHES)):
        own = S.scaled_linear(
            x[batch], values[at], meta[at], rows[batch], outputs[batch], None, None, "none", torch.bfloat16
        )
        assert same_bits(found[batch], own)
    one = torch.rand(1, device=device)
    assert S.bmm(x, values, meta, None, one, one, out_dtype=torch.float32).shape == (BATCHES, ROWS, OUT)


@pytest.mark.parametrize("device", DEVICES)
def test_one_batch_and_empty_batches(device):
    values, meta = stacked(device)
    x = randn(1, ROWS, IN, device=device)
    assert same_bits(S.bmm(x, values, meta)[0], S.linear(x[0], values, meta))
    assert S.bmm(x[:, :0].expand(BATCHES, 0, IN), values, meta, activation="swiglu").shape == (3, 0, OUT // 2)
    assert S.bmm(x.expand(2, -1, -1), values[:0], meta[:0]).shape == (2, ROWS, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(ROWS, IN, dtype=torch.bfloat16)}, r"x: expected batches \[B, N, K\]"),
        ({"x": torch.zeros(0, ROWS, IN, dtype=torch.bfloat16)}, "with B from 1"),
        ({"x": torch.zeros(BATCHES, ROWS, IN)}, "x: expected torch.bfloat16, as the weight"),
        (
            {"x": torch.zeros(5, ROWS, IN, dtype=torch.bfloat16)},
            "weight: expected rows in 5 batches of one size",
        ),
        (
            {"x": torch.zeros(BATCHES, ROWS, 64, dtype=torch.bfloat16)},
            "k: expected 128, like the weight, got 64",
        ),
        ({"bias": torch.zeros(2, OUT, dtype=torch.bfloat16)}, r"bias: expected \[3, 64\] or \[64\]"),
        ({"residual": torch.zeros(ROWS, OUT, dtype=torch.bfloat16)}, r"residual: expected \[3, 5, 64\]"),
        (
            {"residual": torch.zeros(BATCHES, ROWS, OUT, dtype=torch.float16)},
            "residual: expected bf16 or f32",
        ),
        ({"scale_x": torch.ones(4)}, "scale_x: expected 1 or 15 elements"),
        ({"activation": "tanh"}, "activation: expected one of"),
        ({"preference": "{"}, "JSON"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, words):
    values, meta = stacked("cpu")
    given = {"x": randn(BATCHES, ROWS, IN), "weight": values, "meta": meta, **change}
    with pytest.raises(InvalidProblemError, match=words):
        S.bmm(**given)


def test_there_is_no_gradient():
    with pytest.raises(UnsupportedError, match=r"bmm.* has no gradient"):
        S.bmm(randn(BATCHES, ROWS, IN).requires_grad_(), *stacked("cpu"))


def test_fake_results_have_the_shape_and_dtype():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(BATCHES, ROWS, IN, dtype=torch.bfloat16)
        values = torch.empty(BATCHES * OUT, IN // 2, dtype=torch.bfloat16)
        meta = torch.empty(BATCHES * OUT, IN // 8, dtype=torch.int16)
        y = S.bmm(x, values, meta, activation="swiglu", out_dtype=torch.float32)
    assert (y.shape, y.dtype) == ((BATCHES, ROWS, OUT // 2), torch.float32)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    values, meta = stacked("cuda")
    packed, x = S.pack(values, meta), randn(BATCHES, ROWS, IN, device="cuda")
    want = S.bmm(x, packed, None, m=BATCHES * OUT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = S.bmm(x, packed, None, m=BATCHES * OUT)
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(y, want)
