"""Checks that every op does what PyTorch's dispatcher requires.

A sample is an op and arguments.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse24_plans import UnsupportedError

from .cases import DEVICE

Sample = tuple[Any, ...]
CHOSEN = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0], [0, 1]], dtype=torch.int32, device=DEVICE)
"""The two choices of two experts by each of five rows."""


def names_of(samples: dict[str, Sample]) -> set[str]:
    return {op.__name__ for op, *_ in samples.values()}


def tensors(result: Any) -> list[torch.Tensor]:
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)


def assert_opcheck(sample: Sample) -> None:
    """PyTorch's own checks: the schema, autograd's registration, fakes against results, symbolic shapes."""
    op, *args = sample
    assert set(torch.library.opcheck(op.default, tuple(args)).values()) == {"SUCCESS"}


def assert_fakes(sample: Sample, mode: str) -> None:
    """Tensors without values (``meta`` or ``fake``) have the results' shapes, dtypes and strides."""
    op, *args = sample
    with torch.no_grad():
        real = tensors(op(*args))
        if mode == "meta":
            empty = tensors(op(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]))
        else:
            with FakeTensorMode() as fakes:
                copies = [fakes.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
                empty = tensors(op(*copies))
    assert [(t.shape, t.dtype, t.stride()) for t in empty] == [(t.shape, t.dtype, t.stride()) for t in real]


def assert_no_vmap(sample: Sample) -> None:
    op, first, *args = sample
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"torch\.vmap"):
        torch.vmap(lambda one: op(one, *args))(first[None])
