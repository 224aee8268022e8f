"""Copies of weights in other layouts are shared by threads, follow writes, and go with their weights."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from .cases import DEVICE, S, close, integers, randn, weight

F = torch.nn.functional


def test_threads_share_weights_and_forms():
    values, meta, dense = weight()
    start = threading.Barrier(4, timeout=60)

    def work(seed: int) -> None:
        start.wait()
        for n in (1, 5, 9, 5, 1):
            x = randn(n, 64, seed=seed)
            close(S.linear(x, values, meta), F.linear(x.double(), dense.double()))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


CONVERTING = {
    "linear": lambda x, w: S.linear(x, w, None, m=64),
    "dgrad": lambda x, w: S.dgrad(x, w, None, 64, 64),
    "mm": lambda x, w: S.mm(w, None, x.t(), 64),
    "bmm": lambda x, w: S.bmm(x[None], w, None, m=64),
    "grouped_mm": lambda x, w: S.grouped_mm(
        x, w, None, torch.tensor([0, 5], dtype=torch.int32, device=DEVICE), m=64
    ),
    "weight_only_linear": lambda x, w: S.weight_only_linear(
        x, w, None, None, None, 64, m=64, scale_dtype=torch.bfloat16
    ),
}


def packed_by(op: str, seed: int) -> torch.Tensor:
    """A packed weight [64, 64] as the op takes it."""
    dense = randn(64, 64, dtype=torch.bfloat16, seed=seed)
    if op != "weight_only_linear":
        return S.pack(*S.prune_compress(dense))
    _, meta = S.prune_compress(dense)
    bytes_ = integers(64, 32).to(torch.int8) + seed
    return S.pack_quantized(bytes_, meta, torch.ones(64, 1, dtype=torch.bfloat16, device=DEVICE), 64)


@pytest.mark.parametrize("op", CONVERTING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_place_writes_reach_copies_in_other_layouts(op, mode):
    """PyTorch counts no writes to an inference tensor, so a copy of it can't be told from an old one."""
    x, call = randn(5, 64, dtype=torch.bfloat16), CONVERTING[op]
    with mode():
        weight, other = (packed_by(op, seed) for seed in (1, 2))
        before = call(x, weight)
        weight.copy_(other)
        assert torch.equal(call(x, weight), call(x, other))
        assert not torch.equal(call(x, weight), before)


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_writes_of_a_fused_optimizer_reach_the_product(kind, freezes):
    """PyTorch doesn't count them, so a weight that requires gradients has no copy that could be old."""
    values, meta, _ = weight()
    x = randn(5, 64)
    if freezes:
        S.linear(x, values, meta)
    values.requires_grad_()
    optimizer = kind([values], lr=0.1, fused=True)
    for _ in range(2):
        S.linear(x, values, meta).square().sum().backward()
        optimizer.step()
        close(S.linear(x, values, meta), x.double() @ S.decompress(values, meta).double().t())
    values.requires_grad_(not freezes)
    close(S.linear(x, values, meta), x.double() @ S.decompress(values, meta).double().t())


def test_a_weight_that_goes_takes_its_copies_along():
    """A weight in another layout is kept for as long as the weight lives, and no longer."""
    from sparse24_plans.torch import packed_weight_cache

    before = packed_weight_cache.kept_copies()
    values, meta, _ = weight(dtype=torch.bfloat16)
    packed = S.pack(values, meta)
    S.dgrad(randn(5, 96, dtype=torch.bfloat16), packed, None, 96, 64)
    assert packed_weight_cache.kept_copies() == before + 1
    del packed
    assert packed_weight_cache.kept_copies() == before


def test_many_calls_hold_no_memory():
    values, meta, _ = weight()
    x = randn(5, 64)
    alive = []
    for _ in range(3):
        for _ in range(200):
            S.linear(x, values, meta)
        alive.append(sum(type(one) is torch.Tensor for one in gc.get_objects()))
    assert alive[0] == alive[2]
