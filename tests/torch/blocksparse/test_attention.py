"""Attention over kept cells in PyTorch, fused and unfused, against a dense one in float64; its gradients."""

from __future__ import annotations

import pytest
import torch

from sparse24_plans import BlockSparseAttentionPlan, InvalidProblemError, UnsupportedError
from sparse24_plans.blocksparse.dropout import dropped
from sparse24_plans.torch.blocksparse import attention, plan_dispatch
from sparse24_plans.torch.plan_cache import PlanCache
from tests.torch.cases import wanting

from .cases import BITMAPS, FLOATS, close, layout_of, mask_of, randn


@pytest.fixture(params=["fused", "unfused"])
def form(request, monkeypatch):
    """Run as on a device with a kernel for attention, and as on one without."""
    if request.param == "unfused":

        def refuse(*_, **__):
            raise UnsupportedError("no kernel for attention here")

        monkeypatch.setattr(BlockSparseAttentionPlan, "select", refuse)
    monkeypatch.setattr(plan_dispatch, "plans", PlanCache())
    return request.param


def tokens(layout, batch=2, kv_heads=None, size=8, dtype=torch.float32):
    one = layout.shape
    heads = (one.heads, kv_heads or one.heads, kv_heads or one.heads)
    lengths = one.rows, one.cols, one.cols
    return [
        wanting(randn(batch, h, n, size, dtype=dtype, seed=at))
        for at, (h, n) in enumerate(zip(heads, lengths, strict=True))
    ]


def exact_attention(q, k, v, seen, scale):
    """O and lse; ``seen`` [Z or 1, heads, rows, cols]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = (scale * q.double() @ k.double().mT).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.where(seen, (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp(), 0.0)
    return p @ v.double(), lse


def compare(layout, operands, seen, *, scale=None, dtype=torch.float32, **options):
    """Compare results and gradients of our attention and a dense one."""
    o, lse = attention(*operands, layout, scale=scale, return_lse=True, **options)
    wide = [wanting(t.double()) for t in operands]
    exact, exact_lse = exact_attention(*wide, seen, operands[0].shape[-1] ** -0.5 if scale is None else scale)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    close(o, exact)
    close(lse, exact_lse, dtype)
    do = randn(*o.shape, dtype=dtype, seed=9)
    ours = torch.autograd.grad(o, operands, do)
    for found, wanted in zip(ours, torch.autograd.grad(exact, wide, do.double()), strict=True):
        assert found.dtype == dtype
        close(found, torch.nan_to_num(wanted))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BITMAPS)
def test_attention_is_that_of_dense_scores(form, name, dtype):
    layout = layout_of(name)
    compare(layout, tokens(layout, dtype=dtype), mask_of(layout)[None], dtype=dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7, -0.5])
def test_options(form, causal, scale):
    layout = layout_of()
    seen = mask_of(layout)[None]
    if causal:
        seen = seen & (torch.ones(32, 48).tril() > 0)
    compare(layout, tokens(layout), seen, scale=scale, causal=causal)


def test_heads_that_share_keys(form):
    layout = layout_of()
    compare(layout, tokens(layout, kv_heads=1), mask_of(layout)[None])


def test_lengths(form):
    """Cells beyond the lengths are not read: they may be NaN."""
    layout = layout_of()
    q, k, v = tokens(layout, batch=3)
    of_q, of_kv = (torch.tensor(t, dtype=torch.int32) for t in ([32, 5, 0], [17, 48, 3]))
    rows, cols = (torch.arange(n) < t[:, None] for n, t in ((32, of_q), (48, of_kv)))
    seen = mask_of(layout)[None] & rows[:, None, :, None] & cols[:, None, None]
    compare(layout, [q, k, v], seen, q_lengths=of_q, kv_lengths=of_kv)
    whole = attention(q, k, v, layout, q_lengths=of_q, kv_lengths=of_kv)
    spoiled = [wanting(t) for t in (q, k, v)]
    with torch.no_grad():
        for tensor, kept in zip(spoiled, (rows, cols, cols), strict=True):
            tensor.masked_fill_(~kept[:, None, :, None], torch.nan)
    again = attention(*spoiled, layout, q_lengths=of_q, kv_lengths=of_kv)
    assert torch.equal(again, whole)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(again.sum(), spoiled))


@pytest.mark.filterwarnings("ignore:Input #")  # float64 isn't served
def test_gradcheck(form):
    layout = layout_of("all blocks")
    assert torch.autograd.gradcheck(
        lambda *t: attention(*t, layout, scale=0.5),
        tokens(layout, batch=1, size=2),
        eps=1e-2,
        atol=5e-3,
        rtol=2e-2,
        fast_mode=True,
    )


def test_the_logarithm_of_sums_has_no_gradient(form):
    layout = layout_of()
    o, lse = attention(*tokens(layout), layout, return_lse=True)
    assert o.requires_grad
    assert not lse.requires_grad


def test_both_forms_agree(monkeypatch):
    layout = layout_of()
    operands = tokens(layout)
    fused = attention(*operands, layout, return_lse=True)

    def refuse(*_, **__):
        raise UnsupportedError("no kernel for attention here")

    monkeypatch.setattr(plan_dispatch, "plans", PlanCache())
    monkeypatch.setattr(BlockSparseAttentionPlan, "select", refuse)
    for ours, theirs in zip(attention(*operands, layout, return_lse=True), fused, strict=True):
        close(ours, theirs)


def test_the_error_without_a_kernel_is_raised_unchanged():
    layout = layout_of()
    with pytest.raises(UnsupportedError, match="cusparselt"):
        attention(*tokens(layout), layout, preference='{"prefer_backend": "cusparselt"}')


def test_operands_that_are_not_contiguous(form):
    layout = layout_of()
    q, k, v = tokens(layout)
    spread = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(attention(*spread, layout), attention(q, k, v, layout))


def factors_of(layout, batch, seed_offset, p):
    """Dropout's factors of dense scores [Z, heads, rows, cols] by the host's generator."""
    one = layout.shape
    matrices = torch.arange(batch * one.heads).view(batch, one.heads, 1, 1)
    places = matrices, torch.arange(one.rows)[:, None], torch.arange(one.cols)
    return (~dropped(seed_offset.view(torch.int32).long(), p, *places)).double() / (1 - p)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_dropout_and_its_gradients_are_those_of_the_hosts_mask(form, causal, p):
    layout, seed_offset = layout_of(), torch.tensor([-5, 1 << 40])
    operands = tokens(layout, kv_heads=1)
    seen = mask_of(layout)[None]
    if causal:
        seen = seen & (torch.ones(32, 48).tril() > 0)
    o = attention(*operands, layout, causal=causal, dropout_p=p, seed_offset=seed_offset)
    q, k, v = wide = [wanting(t.double()) for t in operands]
    s = (8**-0.5 * q @ k.repeat_interleave(2, 1).mT).masked_fill(~seen, -torch.inf)
    probabilities = torch.nan_to_num(s.softmax(-1)) * factors_of(layout, 2, seed_offset, p)
    exact = probabilities @ v.repeat_interleave(2, 1)
    close(o, exact)
    do = randn(*o.shape, seed=9)
    found = torch.autograd.grad(o, operands, do)
    for ours, wanted in zip(found, torch.autograd.grad(exact, wide, do.double()), strict=True):
        close(ours, torch.nan_to_num(wanted))


def test_dropout_is_refused_where_batch_invariance_is_required(form):
    layout = layout_of()
    wanted = '{"require": {"batch_invariant": true}}'
    attention(*tokens(layout), layout, preference=wanted)
    with pytest.raises(UnsupportedError, match=r"batch.invarian"):
        attention(*tokens(layout), layout, dropout_p=0.5, preference=wanted)


def test_pytorchs_generator_draws_the_seed(form):
    layout = layout_of()
    operands = tokens(layout)

    def drawn(seed):
        torch.manual_seed(seed)
        return [attention(*operands, layout, dropout_p=0.5) for _ in range(2)]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(*first)
    assert not torch.equal(first[0], other[0])
    assert torch.equal(attention(*operands, layout, dropout_p=0.0), attention(*operands, layout))


MISTAKES = {
    "q": (lambda q, k, v, layout: attention(q[:, :, 1:], k, v, layout), r"q: expected shape \[2, 2, 32, 8\]"),
    "k": (lambda q, k, v, layout: attention(q, k[:, :, :32], v, layout), "k: expected shape"),
    "v": (lambda q, k, v, layout: attention(q, k, v[..., :4], layout), "v: expected shape"),
    "dimensions": (lambda q, k, v, layout: attention(q[0], k, v, layout), r"q: expected \[Z, H, tokens"),
    "dtypes": (lambda q, k, v, layout: attention(q, k.half(), v, layout), "k: expected torch.float32"),
    "one length": (
        lambda q, k, v, layout: attention(q, k, v, layout, q_lengths=torch.ones(2, dtype=torch.int32)),
        r"kv_lengths: expected torch.int32 \[2\], got None",
    ),
    "lengths": (
        lambda q, k, v, layout: attention(q, k, v, layout, q_lengths=torch.ones(2), kv_lengths=torch.ones(2)),
        "q_lengths: expected torch.int32",
    ),
    "dropout_p": (
        lambda q, k, v, layout: attention(q, k, v, layout, dropout_p=1.0),
        "dropout: expected a probability from 0 to 1",
    ),
    "seed_offset": (
        lambda q, k, v, layout: attention(q, k, v, layout, dropout_p=0.5, seed_offset=torch.ones(3)),
        r"seed_offset: expected torch.int64 \[2\], got torch.float32 \[3\]",
    ),
    "dropout without seed_offset": (
        lambda q, k, v, layout: torch.ops.sparse24.blocksparse_attention(
            q, k, v, layout.tables, layout.sizes, dropout_p=0.5
        ),
        r"seed_offset: expected torch.int64 \[2\], got None",
    ),
    "seed_offset without dropout": (
        lambda q, k, v, layout: attention(q, k, v, layout, seed_offset=torch.ones(2).long()),
        "seed_offset: expected None",
    ),
    "kv_heads": (
        lambda q, k, v, layout: attention(
            q, k.repeat(1, 2, 1, 1)[:, :3], v.repeat(1, 2, 1, 1)[:, :3], layout
        ),
        "kv_heads: expected a divisor of the layout's 2 heads, got 3",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_refused_by_name(name):
    call, message = MISTAKES[name]
    layout = layout_of()
    with pytest.raises(InvalidProblemError, match=message):
        call(*tokens(layout), layout)
