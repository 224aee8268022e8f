"""A ``Sparse24Tensor`` becomes PyTorch's own tensor and back, bit for bit, or is made in its place."""

from __future__ import annotations

import pytest
import torch
from torch.sparse import to_sparse_semi_structured
from torch.sparse.semi_structured import (
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Tensor, from_semi_structured, to_semi_structured, use_as_default

from .cases import DEVICE, integers, pruned
from .tensor_cases import dense, sparse

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


@pytest.mark.parametrize(
    ("backend", "dtype", "shape"),
    [
        ("cutlass", torch.float16, (64, 128)),
        ("cutlass", torch.bfloat16, (32, 64)),
        ("cutlass", torch.int8, (32, 128)),
        ("cusparselt", torch.float16, (128, 128)),
        ("cusparselt", torch.int8, (64, 128)),
    ],
)
@pytest.mark.parametrize("capability", [8, 9])
def test_to_and_from_pytorchs_own_tensors(backend, dtype, shape, capability):
    if (backend, dtype, capability) == ("cusparselt", torch.int8, 8):
        with pytest.raises(UnsupportedError, match="s8"):
            to_semi_structured(Sparse24Tensor.from_dense(pruned(integers(*shape))), backend, capability=8)
        return
    ours = Sparse24Tensor.from_dense(pruned(integers(*shape)).to(dtype))
    theirs = to_semi_structured(ours, backend, capability=capability)
    kinds = {"cutlass": SparseSemiStructuredTensorCUTLASS, "cusparselt": SparseSemiStructuredTensorCUSPARSELT}
    assert type(theirs) is kinds[backend]
    back = from_semi_structured(theirs, capability=capability)
    assert torch.equal(back.to_dense(), ours.to_dense())
    if backend == "cutlass":
        assert torch.equal(theirs.to_dense(), ours.to_dense())
    transposed = from_semi_structured(theirs.t(), capability=capability)
    assert torch.equal(transposed.to_dense(), ours.to_dense().t())


def test_pytorchs_own_compression_is_read():
    """The metadata as PyTorch's CUTLASS path writes it, on the CPU."""
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    matrix = dense(64, 128, torch.float16)
    packed, meta = sparse_semi_structured_from_dense_cutlass(matrix)
    theirs = SparseSemiStructuredTensorCUTLASS(matrix.shape, packed, meta, None, None, None)
    assert torch.equal(from_semi_structured(theirs).to_dense(), matrix)


def test_conversions_refuse_what_they_cannot_read():
    with pytest.raises(InvalidProblemError, match="semi-structured"):
        from_semi_structured(sparse())
    with pytest.raises(InvalidProblemError, match="backend"):
        to_semi_structured(sparse(), "magma")
    if DEVICE == "cpu":
        with pytest.raises(UnsupportedError, match="capability"):
            to_semi_structured(sparse(128, 128, torch.float16), "cusparselt")


def test_use_as_default_and_back():
    matrix = dense()
    with use_as_default():
        tensor = to_sparse_semi_structured(matrix)
        assert type(tensor) is Sparse24Tensor
        assert torch.equal(tensor.to_dense(), matrix)
        with pytest.raises(RuntimeError, match=r"Error original_tensor\.shape"):
            to_sparse_semi_structured(torch.zeros(2, 2, device=DEVICE))
    assert torch.sparse.SparseSemiStructuredTensorCUTLASS is SparseSemiStructuredTensorCUTLASS
    assert torch.sparse.SparseSemiStructuredTensorCUSPARSELT is SparseSemiStructuredTensorCUSPARSELT
