"""Operands that the tests of the PyTorch layer share, and references computed with PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sparse24_plans.torch  # noqa: F401 - registers the ops
from tests.support import HAS_GPU

S = torch.ops.sparse24
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DEVICE = "cuda" if HAS_GPU and torch.cuda.is_available() else "cpu"
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def defined_ops() -> set[str]:
    """The names of our ops."""
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {name for space, _, name in names if space == "sparse24"}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same numbers for every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def integers(*shape: int, most: int = 9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-most, most + 1, shape, generator=generator, dtype=torch.int8).to(DEVICE)


def wanting(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that wants a gradient."""
    return tensor.detach().clone().requires_grad_()


def pruned(dense: torch.Tensor) -> torch.Tensor:
    """The two largest |values| of every four, found by sorting: independent of the package."""
    groups = dense.reshape(dense.shape[0], dense.shape[1] // 4, 4)
    order = groups.abs().float().argsort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return torch.where(keep, groups, torch.zeros_like(groups)).reshape(dense.shape)


def weight(
    m: int = 96, k: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, metadata, and the dense matrix that they stand for."""
    dense = randn(m, k, dtype=dtype, seed=7)
    values, meta = S.prune_compress(dense)
    return values, meta, pruned(dense)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same shape, dtype and bits, wherever their elements lie."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, other)))


def close(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """``result`` is the float64 ``exact`` up to what a product of a hundred terms may lose."""
    loss = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype or result.dtype]
    torch.testing.assert_close(result.double(), exact.double(), rtol=loss, atol=loss * 10)


def assert_on_the_current_stream(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Assert that ``call`` enqueues its work behind a long kernel, and before what reads the result."""
    stream, wanted = torch.cuda.Stream(), call(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        y = call(late)
    stream.synchronize()
    assert torch.equal(y, wanted)


def captured(
    call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of the call, which has run before, and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x)
    return graph, y


def assert_replays(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """A captured call follows what x holds at replay."""
    graph, y = captured(call, x)
    for seed in range(3):
        x.copy_(randn(*x.shape, seed=seed))
        graph.replay()
        assert torch.equal(y, call(x))
