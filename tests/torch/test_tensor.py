"""A ``Sparse24Tensor`` holds a 2:4 matrix bit for bit, or one that it prunes, and refuses any other."""

from __future__ import annotations

import pytest
import torch
from torch.sparse.semi_structured import SparseSemiStructuredTensor

from sparse24_plans import FormatError, InvalidProblemError
from sparse24_plans.torch import SemiStructuredError, Sparse24Tensor

from .cases import DEVICE, FLOATS, S, integers, pruned, randn


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.float8_e4m3fn], ids=str)
def test_it_holds_the_matrix_bit_for_bit(dtype):
    matrix = pruned(integers(64, 128)).to(dtype)
    tensor = Sparse24Tensor.from_dense(matrix)
    assert isinstance(tensor, SparseSemiStructuredTensor)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (matrix.shape, dtype, DEVICE)
    assert torch.equal(tensor.to_dense().float(), matrix.float())
    assert torch.equal(tensor.t().to_dense().float(), matrix.float().t())
    assert repr(tensor) == "Sparse24Tensor(shape=torch.Size([64, 128]))"
    assert (tensor.values().shape, tensor.meta.shape) == ((64, 64), (64, 16))


REFUSED = {
    "Error original_tensor.dim": lambda: torch.zeros(2, 8, 16),
    "Error original_tensor is not contiguous": lambda: torch.zeros(16, 8).t(),
    "Error original_tensor.dtype torch.float64": lambda: torch.zeros(8, 16, dtype=torch.float64),
    "Error original_tensor.shape": lambda: torch.zeros(2, 2),
    "multiple of": lambda: torch.zeros(8, 12),
}


def test_what_is_no_tensor_is_refused():
    with pytest.raises(SemiStructuredError, match="original_tensor: expected a tensor, got a list"):
        Sparse24Tensor.from_dense([[1, 2]])


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("make", [Sparse24Tensor.from_dense, Sparse24Tensor.prune_dense_static_sort])
def test_what_cannot_be_sparse_is_refused_as_pytorch_does(make, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        make(REFUSED[message]().to(DEVICE))
    assert isinstance(caught.value, SemiStructuredError)


def test_a_dense_matrix_is_refused_instead_of_cut():
    with pytest.raises(FormatError, match="row 0"):
        Sparse24Tensor.from_dense(torch.ones(8, 16, device=DEVICE))


@pytest.mark.parametrize(
    "algorithm", ["", "largest_abs_values_greedy", "largest_values_greedy", "causal1122", "optimal"]
)
def test_tiles_give_the_matrix_and_its_transpose(algorithm):
    tensor = Sparse24Tensor.prune_dense_static_sort(randn(64, 128), algorithm)
    kept = tensor.to_dense()
    assert torch.equal(tensor.t().to_dense(), kept.t())
    assert torch.equal(S.apply_mask(randn(64, 128), tensor.compressed_swizzled_bitmask), kept)
    assert ((kept != 0).view(16, 4, 128).sum(dim=1) <= 2).all()
    with pytest.raises(InvalidProblemError, match="algorithm"):
        Sparse24Tensor.prune_dense_static_sort(randn(64, 128), "best")


def test_by_default_tiles_are_pruned_as_pytorchs_are():
    """From the largest value, not the largest magnitude."""
    from torch.sparse._semi_structured_conversions import _sparse_semi_structured_tile

    matrix = randn(32, 64)
    by_default = Sparse24Tensor.prune_dense_static_sort(matrix).to_dense()
    assert torch.equal(by_default, _sparse_semi_structured_tile(matrix.clone()))
    named = [
        Sparse24Tensor.prune_dense_static_sort(matrix, f"largest_{which}_greedy").to_dense()
        for which in ("values", "abs_values")
    ]
    assert torch.equal(by_default, named[0])
    assert not torch.equal(*named)


def test_parts_must_be_there():
    with pytest.raises(ValueError, match="packed"):
        Sparse24Tensor(torch.Size([8, 16]), None, None, None, None, None)
