"""Ours where code expects PyTorch's: its parts, its metadata, its functions, and its way to cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.sparse import to_sparse_semi_structured
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError, to_foreign
from sparse24_plans.torch import Sparse24Tensor, use_as_default
from sparse24_plans.torch.elements import canonical_weight, tensor_of
from sparse24_plans.vocab import ElementKind

from .cases import DEVICE, S, close, integers, pruned, randn

HALVES = (torch.float16, torch.bfloat16)
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
served = pytest.mark.parametrize("dtype", [*HALVES, torch.int8], ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


def matrix(dtype: torch.dtype, m: int = 64, k: int = 128) -> torch.Tensor:
    return pruned(integers(m, k) if dtype == torch.int8 else randn(m, k, dtype=dtype, seed=5))


@pytest.fixture
def functions():
    with use_as_default(functions=True):
        yield


# PyTorch's metadata and parts -----------------------------------------------------------------------


@served
def test_values_and_indices_are_what_pytorchs_cutlass_functions_take(dtype):
    dense = matrix(dtype)
    cells = pruned(torch.rand(64, 128, device=DEVICE) + 1) != 0
    dense = torch.where(cells, dense + (dense == 0), torch.zeros_like(dense))  # two of every four, no zeros
    tensor = Sparse24Tensor.from_dense(dense)
    values, meta = sparse_semi_structured_from_dense_cutlass(dense)
    assert torch.equal(tensor.values(), values)
    assert tensor.indices().dtype == meta.dtype
    assert torch.equal(tensor.indices(), meta)


@served
def test_pytorch_reads_groups_of_fewer_non_zeros_back(dtype):
    """Implementations put spare values in different places, so that dense matrices are compared."""
    dense = matrix(dtype)
    dense[:, ::3] = 0
    tensor = Sparse24Tensor.from_dense(dense)
    back = sparse_semi_structured_to_dense_cutlass(tensor.values(), tensor.indices())
    assert torch.equal(back, dense)


NO_INDICES = {
    "1:2": lambda: pruned(randn(64, 128)),
    "got fp8_e4m3": lambda: pruned(integers(64, 128)).to(torch.float8_e4m3fn),
    "multiple of 32": lambda: matrix(torch.float16, 8, 128),
}


@pytest.mark.parametrize("message", NO_INDICES)
def test_metadata_that_pytorch_has_no_layout_for_is_refused(message):
    tensor = Sparse24Tensor.from_dense(NO_INDICES[message]())
    with pytest.raises((UnsupportedError, InvalidProblemError), match=message):
        tensor.indices()


@served
def test_parts_of_pytorchs_cutlass_class_are_taken(dtype):
    dense = matrix(dtype)
    parts = sparse_semi_structured_from_dense_cutlass(dense)
    one = Sparse24Tensor(dense.shape, *parts, None, None, None)
    assert torch.equal(one.to_dense(), dense)
    transposed = Sparse24Tensor(dense.t().shape, None, None, *parts, None)
    assert torch.equal(transposed.to_dense(), dense.t())
    x = integers(128, 5) if dtype == torch.int8 else randn(128, 5, dtype=dtype)
    close((one @ x).float(), (dense.double() @ x.double()).clamp(-128, 127), torch.bfloat16)


@halves
def test_parts_of_pytorchs_tile_packer_are_taken(dtype):
    """With their padding, which is dropped, and with both matrices."""
    ours = Sparse24Tensor.prune_dense_static_sort(randn(40, 72, dtype=dtype))
    theirs = to_foreign("torch_tile", canonical_weight(ours.packed, ours.meta))
    kinds = {
        "packed": ElementKind.F16 if dtype == torch.float16 else ElementKind.BF16,
        "meta": ElementKind.U16,
    }
    names = ("packed", "meta", "packed_t", "meta_t")
    parts = [
        tensor_of(theirs[n].view("u2") if n[:4] == "meta" else theirs[n], kinds[n.removesuffix("_t")])
        for n in names
    ]
    assert parts[0].shape == (64, 64)
    one = Sparse24Tensor(torch.Size([40, 72]), *parts, None)
    assert torch.equal(one.to_dense(), ours.to_dense())
    assert torch.equal(one.t().to_dense(), ours.to_dense().t())
    assert (one.packed_t.shape, one.meta_t.shape) == ((72, 20), (72, 5))


def test_a_blob_does_not_say_for_which_device_it_is():
    blob = torch.zeros(128 * 64 + 128 * 8, dtype=torch.float16, device=DEVICE)
    with pytest.raises(InvalidProblemError, match="from_semi_structured"):
        Sparse24Tensor(torch.Size([128, 128]), blob, None, None, None, None)


# Cutting --------------------------------------------------------------------------------------------


@served
def test_a_matrix_is_cut_as_pytorch_cuts_it(dtype):
    """Every pattern of zeros; which value is larger doesn't matter."""
    flags = torch.tensor(list(itertools.product([0, 1], repeat=4)), device=DEVICE)
    groups = torch.cat([flags * torch.tensor(row, device=DEVICE) for row in ([1, 2, 3, 4], [9, -7, 5, -3])])
    dense = groups.reshape(1, -1).expand(64, -1).contiguous().to(dtype)
    theirs = sparse_semi_structured_to_dense_cutlass(*sparse_semi_structured_from_dense_cutlass(dense))
    with pytest.raises(FormatError), use_as_default():
        to_sparse_semi_structured(dense)
    with use_as_default(cut=True):
        tensor = to_sparse_semi_structured(dense)
    assert type(tensor) is Sparse24Tensor
    assert torch.equal(tensor.to_dense(), theirs)
    assert torch.equal(tensor.to_dense()[0, -4:], torch.tensor([9, -7, 0, 0], device=DEVICE).to(dtype))


def test_cutting_keeps_requires_grad_and_refuses_what_ours_refuses():
    with use_as_default(cut=True):
        assert to_sparse_semi_structured(randn(8, 16).requires_grad_()).requires_grad
        assert not to_sparse_semi_structured(randn(8, 16)).requires_grad
        with pytest.raises(RuntimeError, match=r"Error original_tensor\.shape"):
            to_sparse_semi_structured(torch.zeros(8, 12, device=DEVICE))


# PyTorch's functions --------------------------------------------------------------------------------


def test_functions_replace_pytorchs_only_while_asked_to():
    before = torch._sparse_semi_structured_linear
    with use_as_default():
        assert torch._sparse_semi_structured_linear is before
    with use_as_default(functions=True):
        assert torch._sparse_semi_structured_linear is not before
    assert torch._sparse_semi_structured_linear is before


@halves
def test_tiles_are_pruned_and_masks_applied(dtype, functions):
    """Some tiles keep fewer than eight cells, and some kept cells are zeros."""
    dense = randn(64, 128, dtype=dtype)
    dense[:, ::3] = 0
    packed, meta, packed_t, meta_t, mask = torch._sparse_semi_structured_tile(dense, "largest_values_greedy")
    kept = S.decompress(packed, meta)
    assert torch.equal(S.decompress(packed_t, meta_t), kept.t())
    assert torch.equal(torch._sparse_semi_structured_apply_dense(dense, mask), kept)
    for one, other in zip(torch._sparse_semi_structured_apply(dense, mask), (packed, packed_t), strict=True):
        assert torch.equal(one, other)
    new = randn(64, 128, dtype=dtype, seed=9)
    values, values_t = torch._sparse_semi_structured_apply(new, mask)
    wanted = torch._sparse_semi_structured_apply_dense(new, mask)
    assert torch.equal(S.decompress(values, meta), wanted)
    assert torch.equal(S.decompress(values_t, meta_t), wanted.t())
    assert ((wanted != 0) <= (mask_of(mask))).all()


def mask_of(mask: torch.Tensor) -> torch.Tensor:
    """Which cells a mask [M/8, K/8, 8] keeps."""
    m, k = 8 * mask.shape[0], 8 * mask.shape[1]
    return S.apply_mask(torch.ones(m, k, device=mask.device), mask) != 0


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "cutlass"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
@halves
def test_linear_of_parts(dtype, activation, with_bias, theirs, functions):
    dense, x = matrix(dtype), randn(3, 5, 128, dtype=dtype)
    tensor = Sparse24Tensor.from_dense(dense)
    meta = tensor.indices() if theirs else tensor.meta
    bias = randn(64, dtype=dtype) if with_bias else None
    y = torch._sparse_semi_structured_linear(x, tensor.values(), meta, bias=bias, activation=activation)
    wanted = torch.nn.functional.linear(x.double(), dense.double(), None if bias is None else bias.double())
    if activation is not None:
        wanted = getattr(torch.nn.functional, activation)(wanted)
    assert (y.dtype, y.shape) == (dtype, (3, 5, 64))
    close(y, wanted)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("out", [None, torch.int32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_of_int8_parts_is_exact(activation, out, with_bias, functions):
    dense, x = matrix(torch.int8), integers(5, 128)
    tensor = Sparse24Tensor.from_dense(dense)
    bias = torch.arange(-(2**30), 2**30, 2**25, dtype=torch.int32, device=DEVICE) if with_bias else None
    y = torch._sparse_semi_structured_linear(
        x, tensor.values(), tensor.indices(), bias=bias, activation=activation, out_dtype=out
    )
    wanted = x.cpu().long() @ dense.cpu().long().t() + (0 if bias is None else bias.cpu().long())
    wanted = wanted.relu() if activation else wanted
    limits = torch.iinfo(out or torch.int8)
    assert y.dtype == (out or torch.int8)
    assert torch.equal(y.cpu().long(), wanted.clamp(limits.min, limits.max))


@pytest.mark.parametrize("transposed", [False, True])
@served
def test_mm_and_addmm_of_parts(dtype, transposed, functions):
    dense, whole = matrix(dtype), dtype == torch.int8
    tensor = Sparse24Tensor.from_dense(dense)
    b = (integers(16, 128) if whole else randn(16, 128, dtype=dtype)).t()
    b = b if transposed else b.contiguous()
    out = torch.int32 if whole else dtype
    added = torch.arange(64, device=DEVICE).to(out)
    y = torch._sparse_semi_structured_mm(tensor.values(), tensor.indices(), b, out_dtype=out)
    exact = dense.double() @ b.double()
    z = torch._sparse_semi_structured_addmm(
        added, tensor.values(), tensor.meta, b, alpha=2, beta=-3, out_dtype=out
    )
    assert (y.dtype, z.dtype) == (out, out)
    if whole:
        assert torch.equal(y.double(), exact)
        assert torch.equal(z.double(), 2 * exact - 3 * added.double()[:, None])
    else:
        close(y, exact)
        close(z, 2 * exact - 3 * added.double()[:, None])


def test_compiled_functions_of_parts(functions):
    """Metadata of either kind, converted inside of the graph."""
    torch._dynamo.reset()
    tensor, x = Sparse24Tensor.from_dense(matrix(torch.float16)), randn(5, 128, dtype=torch.float16)
    for meta in (tensor.meta, tensor.indices()):

        def layer(x, meta=meta):
            return torch._sparse_semi_structured_linear(x * 2, tensor.values(), meta, activation="relu") + 1

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))


WRONG = {
    "input: expected \\[64\\]": lambda v, meta: torch._sparse_semi_structured_addmm(
        randn(63), v, meta, randn(128, 8, dtype=v.dtype)
    ),
    "activation": lambda v, meta: torch._sparse_semi_structured_linear(
        randn(5, 128, dtype=v.dtype), v, meta, activation="tanh"
    ),
    "integers, got 'silu'": lambda v, meta: torch._sparse_semi_structured_linear(
        randn(5, 128, dtype=v.dtype), v, meta, bias=integers(64), activation="silu"
    ),
    "algorithm": lambda v, meta: torch._sparse_semi_structured_tile(randn(8, 8), "best"),
    "meta: expected": lambda v, meta: torch._sparse_semi_structured_mm(
        v, meta[:, :7], randn(128, 8, dtype=v.dtype)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_functions_refuse_what_they_cannot_mean(message, functions):
    tensor = Sparse24Tensor.from_dense(matrix(torch.float16))
    with pytest.raises((InvalidProblemError, UnsupportedError), match=message):
        WRONG[message](tensor.values(), tensor.meta)
