"""The ops grouped_mm and experts_mm: each group of rows is multiplied by its own rows of the weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Linear

from .cases import DEVICES

grouped_mm, experts_mm = torch.ops.sparse24.grouped_mm, torch.ops.sparse24.experts_mm


def operands(device: str):
    layer = Sparse24Linear.from_linear(nn.Linear(64, 4 * 128, False).to(device, torch.bfloat16))
    x = torch.randn(20, 64, device=device, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 5, 5, 19, 20], dtype=torch.int32, device=device)
    weight, meta = layer.stored()
    return layer, x, offsets, weight, meta


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_each_group_is_multiplied_by_its_rows_of_the_weight(device, activation):
    layer, x, offsets, weight, meta = operands(device)
    y = grouped_mm(x, weight, meta, offsets, m=512, activation=activation)
    values, words = layer.canonical()
    for group, (begin, end) in enumerate([(0, 5), (5, 5), (5, 19), (19, 20)]):
        rows = slice(128 * group, 128 * (group + 1))
        own = torch.ops.sparse24.linear(
            x[begin:end], values[rows].detach(), words[rows], activation=activation
        )
        assert torch.allclose(y[begin:end].float(), own.float(), rtol=2**-6, atol=2**-6)


def test_pytorchs_offsets_behind_a_zero_are_ours():
    """torch._grouped_mm takes the end of each group, and weights [G, K, M]."""
    layer, x, offsets, weight, meta = operands("cpu")
    dense = layer.dense_weight().view(4, 128, 64).transpose(1, 2)
    wanted = torch._grouped_mm(x, dense, offs=offsets[1:])
    got = grouped_mm(x, weight, meta, nn.functional.pad(offsets[1:], (1, 0)), m=512)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(64, dtype=torch.bfloat16)}, "x: expected a matrix"),
        ({"x": torch.zeros(20, 64)}, "x: expected torch.bfloat16, as the weight"),
        ({"offsets": torch.zeros(5, dtype=torch.int64)}, r"offsets: expected torch.int32 \[G \+ 1\]"),
        (
            {"offsets": torch.zeros(4, dtype=torch.int32)},
            "weight: expected rows in 3 groups of one size, got 512",
        ),
        ({"bias": torch.zeros(128, dtype=torch.bfloat16)}, r"bias: expected \[512\]"),
        ({"activation": "tanh"}, "activation: expected one of"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, words):
    _, x, offsets, weight, meta = operands("cpu")
    given = {"x": x, "weight": weight, "meta": meta, "offsets": offsets, "m": 512, **change}
    with pytest.raises(InvalidProblemError, match=words):
        grouped_mm(**given)


def test_fake_results_have_the_shape_and_dtype():
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, *given = operands("cpu")
    plain = [one.detach() for one in given]
    with FakeTensorMode() as mode:
        x, offsets, weight, meta = (mode.from_tensor(one) for one in plain)
        y = grouped_mm(x, weight, meta, offsets, m=512, activation="swiglu", out_dtype=torch.float32)
        chosen = torch.empty(10, 2, dtype=torch.int32)
        sorted_rows = experts_mm(x, weight, meta, chosen, 4, m=512)
        summed = experts_mm(x[:10], weight, meta, chosen, 4, gather=True, add_up=True, m=512)
    assert (tuple(y.shape), y.dtype) == ((20, 64), torch.float32)
    assert (tuple(sorted_rows.shape), tuple(summed.shape)) == ((20, 128), (10, 128))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_pass_the_experts_that_they_chose(device, weighted):
    """A choice that names no expert has a place in no group, and adds nothing."""
    _, x, _, weight, meta = operands(device)
    x, chosen = x[:4], torch.tensor([[3, 0], [1, 4], [0, 0], [-1, 2]], dtype=torch.int32, device=device)
    order = chosen.clamp(-1, 4).flatten().sort(stable=True).indices
    offsets = torch.tensor([1, 4, 5, 6, 7], dtype=torch.int32, device=device)
    y = grouped_mm(x[order // 2], weight, meta, offsets, m=512)
    assert torch.equal(experts_mm(x, weight, meta, chosen, 4, gather=True, m=512)[1:7], y[1:7])
    factors = torch.rand(4, 2, device=device) if weighted else None
    got = experts_mm(x, weight, meta, chosen, 4, y_weights=factors, gather=True, add_up=True, m=512)
    terms = torch.zeros(8, 128, device=device)
    terms[order[1:7]] = y[1:7].float()
    terms = terms.view(4, 2, 128)
    if factors is not None:
        terms = terms * factors.unsqueeze(-1)
    assert torch.equal(got, (terms[:, 0] + terms[:, 1]).to(got.dtype))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experts": torch.zeros(10, 2, dtype=torch.int64)}, r"experts: expected torch.int32 \[T, top_k\]"),
        ({"experts": torch.zeros(20, dtype=torch.int32)}, r"experts: expected torch.int32 \[T, top_k\]"),
        ({"groups": 0}, "groups: expected a number of experts from 1, got 0"),
        ({"groups": 3}, "weight: expected rows in 3 groups of one size, got 512"),
        ({"gather": True}, "x: expected 10 rows, got 20"),
        ({"y_weights": torch.zeros(10, 2)}, "y_weights: expected None without add_up"),
        (
            {"add_up": True, "y_weights": torch.zeros(10, 3)},
            r"y_weights: expected torch.float32 \[10, 2\], got torch.float32 \[10, 3\]",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(change, words):
    _, x, _, weight, meta = operands("cpu")
    given = {"x": x, "weight": weight, "meta": meta, "m": 512, "groups": 4}
    given |= {"experts": torch.zeros(10, 2, dtype=torch.int32), **change}
    with pytest.raises(InvalidProblemError, match=words):
        experts_mm(**given)


def test_gradients_of_the_op_itself_are_refused():
    _, x, offsets, weight, meta = operands("cpu")
    with pytest.raises(UnsupportedError, match=r"grouped_mm.* has no gradient"):
        grouped_mm(x.requires_grad_(), weight, meta, offsets, m=512)
