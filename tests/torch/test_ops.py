"""Results and refusals of the ops of ``torch.ops.sparse24``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    PlanPreference,
    Sparse24Weight,
    UnsupportedError,
)

from .cases import DEVICE, FLOATS, S, close, integers, pruned, randn, weight

F = torch.nn.functional
floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)
LEADING = {"one row": (), "rows": (5,), "batches": (2, 3), "nothing": (0,), "one": (1, 1)}
ACTIVATIONS = {
    "none": lambda v: v,
    "relu": torch.relu,
    "relu2": lambda v: torch.relu(v).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
}


def preference(**fields) -> str:
    return PlanPreference(**fields).model_dump_json(exclude_defaults=True)


# Linear -------------------------------------------------------------------------------------------


@floats
@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_that_of_the_dense_weight(dtype, leading, with_bias):
    values, meta, dense = weight(dtype=dtype)
    x = randn(*leading, 64, dtype=dtype)
    bias = randn(96, dtype=dtype) if with_bias else None
    y = S.linear(x, values, meta, bias)
    wanted = F.linear(x.double(), dense.double(), None if bias is None else bias.double())
    assert y.shape == (*leading, 96)
    assert y.dtype == dtype
    assert y.is_contiguous()
    close(y, wanted)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_activations_follow_the_bias(name, with_bias):
    values, meta, dense = weight()
    x, bias = randn(5, 64), randn(96) if with_bias else None
    y = S.linear(x, values, meta, bias, activation=name)
    close(y, ACTIVATIONS[name](F.linear(x.double(), dense.double(), None if bias is None else bias.double())))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_a_packed_weight_gives_the_same_bits(dtype):
    values, meta, _ = weight(dtype=dtype)
    x, bias = randn(5, 64, dtype=dtype), randn(96, dtype=dtype)
    packed = S.pack(values, meta)
    assert torch.equal(S.linear(x, packed, None, bias, 96), S.linear(x, values, meta, bias))
    restored, found = S.unpack(packed, 96, 64)
    assert torch.equal(restored, values)
    assert torch.equal(found, meta)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_results_may_be_float32(dtype):
    values, meta, dense = weight(dtype=dtype)
    x = randn(5, 64, dtype=dtype)
    y = S.linear(x, values, meta, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    close(y, F.linear(x.double(), dense.double()))


WAYS = {
    "every other row": lambda n, k: randn(2 * n, k)[::2],
    "columns of a wider matrix": lambda n, k: randn(n, 2 * k)[:, k:],
    "a transpose": lambda n, k: randn(k, n).t(),
    "one row, expanded": lambda n, k: randn(1, k).expand(n, k),
    "at an odd address": lambda n, k: randn(n * k + 1)[1:].view(n, k),
    "every other column": lambda n, k: randn(n, 2 * k)[:, ::2],
    "a batch that can't be flattened": lambda n, k: randn(n, 3, k).transpose(0, 1),
    "backwards in memory": lambda n, k: randn(n, k).flip(0),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_x_may_lie_in_any_way(way):
    values, meta, dense = weight()
    x = way(4, 64)
    before = x.clone()
    y = S.linear(x, values, meta)
    close(y, F.linear(x.double(), dense.double()))
    assert y.is_contiguous()
    assert torch.equal(x, before)


def test_the_same_form_at_other_addresses():
    """The second call looks at addresses alone, also where they became unaligned."""
    values, meta, dense = weight()
    memory = randn(5 * 64 + 64)
    for start in (0, 16, 1, 3, 0):
        x = memory[start : start + 5 * 64].view(5, 64)
        close(S.linear(x, values, meta), F.linear(x.double(), dense.double()))


def test_a_weight_changed_in_place_is_read_again():
    values, meta, dense = weight(dtype=torch.bfloat16)
    x = randn(5, 64, dtype=torch.bfloat16)
    S.linear(x, values, meta)
    values.mul_(2)
    close(S.linear(x, values, meta), F.linear(x.double(), 2 * dense.double()))


def test_uint16_and_int16_metadata_mean_the_same():
    values, meta, _ = weight()
    x = randn(5, 64)
    assert torch.equal(S.linear(x, values, meta.view(torch.uint16)), S.linear(x, values, meta))


@given(n=st.integers(0, 9), m=st.integers(1, 70), groups=st.integers(1, 9), dtype=st.sampled_from(FLOATS))
@settings(max_examples=40)
def test_every_size(n, m, groups, dtype):
    values, meta, dense = weight(m, 8 * groups, dtype)
    x = randn(n, 8 * groups, dtype=dtype)
    close(S.linear(x, values, meta), F.linear(x.double(), dense.double()))


def test_out_is_written_and_nothing_else():
    values, meta, dense = weight()
    x, bias = randn(5, 64), randn(96)
    memory = torch.full((7, 96), float("nan"), device=DEVICE)
    S.linear_out(x, values, meta, bias, memory[1:6])
    close(memory[1:6], F.linear(x.double(), dense.double(), bias.double()))
    assert memory[[0, 6]].isnan().all()


def test_out_that_overlaps_is_refused():
    values, meta, _ = weight(64, 64)
    memory = randn(6, 64)
    S.linear_out(memory[:2], values, meta, None, memory[2:4])
    with pytest.raises(InvalidProblemError, match="apart"):
        S.linear_out(memory[:2], values, meta, None, memory[1:3])


def test_requirements_choose_the_kernel():
    """batch_invariant is promised by the strict kernels alone on the host: the same bits for every n."""
    values, meta, _ = weight()
    x = randn(33, 64)
    strict = preference(require={"batch_invariant": True, "bit_stable_across_hardware": True})
    whole = S.linear(x, values, meta, preference=strict)
    rows = [S.linear(x[i : i + 1], values, meta, preference=strict) for i in range(33)]
    assert torch.equal(whole, torch.cat(rows))
    with pytest.raises(UnsupportedError, match="error_bound"):
        S.linear(x, values, meta, preference=preference(require={"max_error_bound": 1e-30}))


# Scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [torch.int32, torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_int8_products_are_exact(out):
    dense = integers(96, 64)
    values, meta = S.prune_compress(dense)
    x = integers(5, 64)
    y = S.scaled_linear(x, values, meta, out_dtype=out)
    exact = x.long().cpu() @ pruned(dense).long().t().cpu()
    wanted = exact.clamp(-128, 127) if out == torch.int8 else exact
    assert y.dtype == out
    assert torch.equal(y.cpu(), wanted.to(out))


@pytest.mark.parametrize("rows_x", [1, 6])
@pytest.mark.parametrize("rows_w", [1, 96])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_of_tensors_and_of_rows(dtype, rows_x, rows_w):
    dense = integers(96, 64)
    values, meta = S.prune_compress(dense.to(dtype))
    x = integers(2, 3, 64).to(dtype)
    scale_x, scale_w, bias = randn(rows_x).abs(), randn(rows_w).abs(), randn(96)
    y = S.scaled_linear(x, values, meta, scale_x, scale_w, bias, out_dtype=torch.float32)
    product = x.double() @ pruned(dense).double().t()
    wanted = product * scale_x.double().view(*((1, 1) if rows_x == 1 else (2, 3)), 1) * scale_w.double()
    close(y, wanted + bias.double())


def test_scales_of_rows_may_lie_in_another_order():
    values, meta = S.prune_compress(integers(96, 64))
    x, scale = integers(2, 3, 64), randn(3, 2).abs().t()
    wanted = S.scaled_linear(x, values, meta, scale.contiguous(), out_dtype=torch.float32)
    for _ in range(2):
        assert torch.equal(S.scaled_linear(x, values, meta, scale, out_dtype=torch.float32), wanted)


def test_scaled_linear_refuses_what_has_no_scales():
    values, meta, _ = weight()
    with pytest.raises(InvalidProblemError, match="weight: expected int8, float8_e4m3fn or float8_e5m2"):
        S.scaled_linear(randn(2, 64), values, meta)
    values, meta = S.prune_compress(integers(96, 64))
    for bad in (torch.ones(3, device=DEVICE), torch.ones(1, dtype=torch.float64, device=DEVICE)):
        with pytest.raises(InvalidProblemError, match="scale_x"):
            S.scaled_linear(integers(2, 64), values, meta, bad)


# The sparse operand on the left -------------------------------------------------------------------


@floats
@pytest.mark.parametrize("lies", ["rows", "columns", "apart"])
@pytest.mark.parametrize("n", [1, 5, 16])
def test_mm_takes_b_as_it_lies(dtype, lies, n):
    values, meta, dense = weight(dtype=dtype)
    b = {
        "rows": randn(64, n, dtype=dtype),
        "columns": randn(n, 64, dtype=dtype).t(),
        "apart": randn(64, 2 * n, dtype=dtype)[:, ::2],
    }[lies]
    y = S.mm(values, meta, b)
    assert y.shape == (96, n)
    assert y.is_contiguous()
    close(y, dense.double() @ b.double())


def test_mm_of_unreadable_columns_raises_unless_it_may_transpose():
    """float32 on wishes that only kernels of rows could meet."""
    values, meta, dense = weight()
    b = randn(64, 5)
    none = preference(prefer_backend="mma_sp")
    with pytest.raises(UnsupportedError, match="no kernel can serve"):
        S.mm(values, meta, b, preference=none)
    with pytest.raises(UnsupportedError, match="no kernel can serve"):
        S.mm(values, meta, b, preference=none, may_transpose=True)
    close(S.mm(values, meta, b, may_transpose=True), dense.double() @ b.double())


# The gradient's product ---------------------------------------------------------------------------


@floats
@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
def test_dgrad_is_the_product_with_the_weight(dtype, leading):
    values, meta, dense = weight(dtype=dtype)
    dy = randn(*leading, 96, dtype=dtype)
    dx = S.dgrad(dy, values, meta)
    assert dx.shape == (*leading, 64)
    close(dx, dy.double() @ dense.double())
    if dtype != torch.float32:
        assert torch.equal(S.dgrad(dy, S.pack(values, meta), None, 96, 64), dx)


# Preparing ----------------------------------------------------------------------------------------


def test_ops_trust_metadata_that_a_weight_refuses():
    values, meta = S.prune_compress(randn(8, 64))
    meta[3, 1] = 0  # a group's two values at position 0
    with pytest.raises(FormatError) as caught:
        Sparse24Weight(values.cpu(), meta.cpu().view(torch.uint16))
    assert (caught.value.row, caught.value.group) == (3, 2)
    assert S.decompress(values, meta).shape == (8, 64)


@floats
def test_prune_compress_decompress(dtype):
    dense = randn(32, 64, dtype=dtype)
    assert torch.equal(S.prune(dense), pruned(dense))
    values, meta = S.prune_compress(dense)
    assert (values.shape, meta.shape) == ((32, 32), (32, 8))
    assert torch.equal(S.decompress(values, meta), pruned(dense))
    for one, other in zip(S.compress(pruned(dense)), (values, meta), strict=True):
        assert torch.equal(one, other)


def test_scores_rank_instead_of_magnitudes():
    dense, scores = randn(32, 64), randn(32, 64, seed=3)
    order = scores.view(32, 16, 4).argsort(dim=-1, descending=True)[..., :2]
    keep = torch.zeros(32, 16, 4, dtype=torch.bool, device=DEVICE).scatter_(-1, order, True)
    wanted = torch.where(keep, dense.view(32, 16, 4), 0).view(32, 64)
    assert torch.equal(S.prune(dense, scores), wanted)
    assert torch.equal(S.decompress(*S.prune_compress(dense, scores)), wanted)


def test_compress_refuses_what_is_not_2_4():
    dense = pruned(randn(8, 16))
    dense[3, 4:7] = 1
    with pytest.raises(FormatError) as caught:
        S.compress(dense)
    assert (caught.value.row, caught.value.group) == (3, 1)


def test_tiles_keep_two_of_every_row_and_column():
    dense = randn(32, 64)
    values, meta, values_t, meta_t, mask = S.tile_prune(dense, "optimal")
    kept = S.decompress(values, meta)
    assert torch.equal(S.decompress(values_t, meta_t), kept.t())
    assert torch.equal(S.apply_mask(dense, mask), kept)
    tiles = (kept != 0).view(8, 4, 16, 4)
    assert (tiles.sum(dim=1) == 2).all()
    assert (tiles.sum(dim=3) == 2).all()


def test_the_weight_is_the_packages_own():
    """The tensors are what Sparse24Weight holds: no format of its own."""
    dense = randn(32, 64)
    values, meta = S.prune_compress(dense)
    theirs = Sparse24Weight.prune_compress(dense.cpu().numpy())
    assert np.array_equal(values.cpu().numpy(), theirs.values)
    assert np.array_equal(meta.cpu().numpy().view(np.uint16), theirs.metadata)


# Refusals -----------------------------------------------------------------------------------------

VALUES, META, _ = weight()
X = randn(5, 64)
WRONG = {
    "x: expected \\[..., 64\\]": lambda: S.linear(randn(5, 56), VALUES, META),
    "x: expected torch.float32, as the weight": lambda: S.linear(X.half(), VALUES, META),
    "x: expected at least one dimension": lambda: S.linear(randn(), VALUES, META),
    "bias: expected \\[96\\]": lambda: S.linear(X, VALUES, META, randn(5)),
    "bias_element: expected f32": lambda: S.linear(X, VALUES, META, randn(96).half()),
    "m: expected the rows of a packed weight": lambda: S.linear(X, VALUES),
    "m: expected 96": lambda: S.linear(X, VALUES, META, None, 95),
    "meta: expected int16 or uint16": lambda: S.linear(X, VALUES, META.int()),
    "meta: expected int16 or uint16 \\[96, 8\\]": lambda: S.linear(X, VALUES, META[:5]),
    "weight: expected values \\[M, K/2\\]": lambda: S.linear(X, VALUES[0], META),
    "weight: expected tiles \\[2, 1, 4608\\]": lambda: S.linear(X.half(), VALUES.half(), None, None, 96),
    "activation: expected one of": lambda: S.linear(X, VALUES, META, activation="tanh"),
    "out_element: expected f32": lambda: S.linear(X, VALUES, META, out_dtype=torch.float16),
    "out_dtype: expected one of": lambda: S.linear(X, VALUES, META, out_dtype=torch.float64),
    "PlanPreference": lambda: S.linear(X, VALUES, META, preference='{"requires": 1}'),
    "out: expected torch.float32 \\[5, 96\\]": lambda: S.linear_out(X, VALUES, META, None, randn(5, 95)),
    "out: expected a contiguous": lambda: S.linear_out(X, VALUES, META, None, randn(96, 5).t()),
    "b: expected a matrix": lambda: S.mm(VALUES, META, randn(64)),
    "dense: expected a matrix": lambda: S.prune(randn(8)),
    "k: ": lambda: S.prune(randn(8, 12)),
    "scores: expected \\[8, 16\\]": lambda: S.prune(randn(8, 16), randn(8, 8)),
    "rule: ": lambda: S.tile_prune(randn(8, 16), "best"),
    "weight: no tile layout holds i32": lambda: S.pack(VALUES.to(torch.int32), META),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_operands_are_refused_by_name(message):
    kind = UnsupportedError if "no tile layout" in message else InvalidProblemError
    with pytest.raises(kind, match=message):
        WRONG[message]()


def test_operands_on_meta_beside_others_are_refused():
    """PyTorch calls an op without values if one operand has none."""
    values, meta, _ = weight(dtype=torch.bfloat16)
    x, out = randn(5, 64, dtype=torch.bfloat16), torch.empty(5, 96, device="meta", dtype=torch.bfloat16)
    packed, words = S.pack(values, meta), S.to_cutlass(values, meta)
    mask = torch.ones(96, 64, dtype=torch.bool, device="meta")
    dense, scales = randn(96, 64), torch.ones(96, 1, device="meta")
    stored = torch.zeros(96, 32, dtype=torch.int8, device=DEVICE)
    for argument, call in {
        "out": lambda: S.linear_out(x, values, meta, None, out),
        "weight": lambda: S.linear(x, packed.to("meta"), None, m=96),
        "mask": lambda: S.apply_mask(dense, mask),
        "scales": lambda: S.pack_quantized(stored, meta, scales),
        "meta": lambda: S.from_cutlass(values, words.to("meta"), 96, 64),
    }.items():
        with pytest.raises(
            InvalidProblemError, match=f"{argument}: expected a tensor on {x.device}, got meta"
        ):
            call()


def test_packed_weights_need_their_rows_and_contiguous_memory():
    values, meta, _ = weight()
    x, packed = randn(5, 64), S.pack(values, meta)
    for device in (DEVICE, "meta"):
        for op, operand in ((S.linear, x), (S.dgrad, randn(5, 96))):
            with pytest.raises(InvalidProblemError, match="m: expected the rows of a packed weight"):
                op(operand.to(device), packed.to(device))
    apart = packed.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(InvalidProblemError, match="weight: expected contiguous memory, got strides"):
        S.linear(x, apart, None, m=96)
