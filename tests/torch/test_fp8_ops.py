"""The op fp8_linear: results in fp8, their scale, and the largest magnitude that it writes."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import InvalidProblemError, UnsupportedError

from .cases import DEVICE, S, integers, randn, weight

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def operands(w: torch.dtype, x: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Values, metadata, X, and what X W^T is in float64, which is exact in float32, too."""
    dense = integers(96, 64).clamp(-3, 3)
    values, meta = S.prune_compress(dense.to(w))
    given = integers(2, 3, 64).clamp(-3, 3).to(x)
    kept = S.decompress(values, meta).double()
    return values, meta, given, given.double() @ kept.t()


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return exact.float().clamp(-most, most).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("out", [None, E4, E5], ids=str)
@pytest.mark.parametrize(
    ("w", "x"), [(E4, E4), (E5, E4), (E4, E5), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_results_are_scaled_and_rounded_and_the_largest_is_written(w, x, out):
    values, meta, given, exact = operands(w, x)
    scale_y, amax = torch.tensor([0.75], device=DEVICE), torch.zeros((), device=DEVICE)
    y = S.fp8_linear(given, values, meta, None, None, scale_y, amax, out_dtype=out)
    assert equal(y, rounded(exact.float() * scale_y, out or E4))
    assert amax == exact.abs().max()
    amax.fill_(1e9)
    again = S.fp8_linear(given, values, meta, None, None, scale_y, amax, out_dtype=out)
    assert equal(again, y)
    assert amax == 1e9
    assert equal(S.fp8_linear(given, values, meta, out_dtype=out), rounded(exact, out or E4))


def test_scales_bias_and_gates_come_before_scale_y():
    values, meta, given, exact = operands(E4, E4)
    scale_x, scale_w = torch.full((1,), 0.5, device=DEVICE), torch.full((96,), 0.25, device=DEVICE)
    bias, amax = randn(96).bfloat16(), torch.zeros(1, device=DEVICE)
    y = S.fp8_linear(given, values, meta, scale_x, scale_w, None, amax, bias, activation="relu")
    want = (exact / 8 + bias.double()).relu()
    assert equal(y, rounded(want, E4))
    assert amax == want.abs().max().float()
    gated = S.fp8_linear(given, values, meta, scale_x, scale_w, activation="swiglu")
    assert gated.shape == (2, 3, 48)


def test_a_packed_weight_and_x_that_begins_anywhere():
    values, meta, given, exact = operands(E5, E5)
    packed = S.pack(values, meta)
    whole = torch.cat([given.flatten()[:3], given.flatten()])
    for x in (given, whole[3:].view(given.shape)):
        assert equal(S.fp8_linear(x, packed, None, m=96), rounded(exact, E4))


def test_other_ops_give_fp8_without_a_scale():
    values, meta, given, exact = operands(E4, E5)
    assert equal(S.scaled_linear(given, values, meta, out_dtype=E5), rounded(exact, E5))
    assert equal(S.linear(given, values, meta, out_dtype=E4), rounded(exact, E4))


def test_what_does_not_fit_is_named():
    values, meta, given, _ = operands(E4, E4)
    one = torch.ones(1, device=DEVICE)
    for name, wrong in (("scale_y", torch.ones(2, device=DEVICE)), ("amax", one.double())):
        with pytest.raises(InvalidProblemError, match=f"{name}: expected one torch.float32, got"):
            S.fp8_linear(given, values, meta, **{name: wrong})
    with pytest.raises(InvalidProblemError, match="scale_y: expected none for out_element bf16"):
        S.fp8_linear(given, values, meta, scale_y=one, out_dtype=torch.bfloat16)
    with pytest.raises(InvalidProblemError, match=r"x: expected torch\.float8_e4m3fn or torch\.float8_e5m2"):
        S.fp8_linear(given.bfloat16(), values, meta)
    ints, words = S.prune_compress(integers(96, 64))
    with pytest.raises(InvalidProblemError, match="out_element: expected i32 or s8"):
        S.fp8_linear(integers(2, 64), ints, words)


def test_there_is_no_gradient():
    values, meta, _ = weight(dtype=torch.bfloat16)
    x = randn(2, 64).bfloat16().requires_grad_()
    with pytest.raises(UnsupportedError, match="fp8_linear has no gradient"):
        S.fp8_linear(x, values, meta)


def test_compiled_code_writes_the_largest_too():
    values, meta, given, exact = operands(E4, E4)

    def step(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        return S.fp8_linear(x, values, meta, amax=amax).float() + amax

    amax = torch.zeros(1, device=DEVICE)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(given, amax)
    assert torch.equal(got, rounded(exact, E4).float() + amax)
    assert amax == exact.abs().max()


@pytest.mark.gpu
def test_a_graph_writes_the_largest_at_each_replay():
    values, meta, given, exact = operands(E4, E4)
    amax = torch.zeros(1, device=DEVICE)
    S.fp8_linear(given, values, meta, amax=amax)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amax.zero_()
        S.fp8_linear(given, values, meta, amax=amax)
    for factor in (1, 2):
        given.copy_((given.float() * factor).to(E4))
        graph.replay()
        assert amax == exact.abs().max() * factor
