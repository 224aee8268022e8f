"""Products with a ``Sparse24Tensor`` are those of its dense matrix, or refused as PyTorch refuses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Tensor

from .cases import DEVICE, FLOATS, close, integers, pruned, randn
from .tensor_cases import dense, sparse

floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@floats
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("other_transposed", [False, True])
@pytest.mark.parametrize("made", ["from_dense", "tiles"])
def test_mm_on_either_side(dtype, transposed, other_transposed, made):
    """Products of the tensor and of its transpose, with a row-major or column-major dense operand."""
    a = (
        sparse(dtype=dtype)
        if made == "from_dense"
        else Sparse24Tensor.prune_dense_static_sort(dense(dtype=dtype))
    )
    w = a.to_dense().double()
    if transposed:
        a, w = a.t(), w.t()
    m, k = a.shape
    right = randn(5, k, dtype=dtype).t() if other_transposed else randn(k, 5, dtype=dtype)
    left = randn(m, 5, dtype=dtype).t() if other_transposed else randn(5, m, dtype=dtype)
    close(torch.mm(a, right), w @ right.double())
    close(torch.mm(left, a), left.double() @ w)
    close(a @ right, w @ right.double())


@pytest.mark.parametrize("n", [1, 3, 8, 65])
def test_odd_sizes_need_no_padding(n):
    a = sparse(7, 24)
    close(a @ randn(24, n), a.to_dense().double() @ randn(24, n).double())
    close(randn(n, 24) @ a.t(), randn(n, 24).double() @ a.to_dense().double().t())


@floats
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_linear(dtype, leading, with_bias, inference):
    weight = sparse(dtype=dtype)
    x, bias = randn(*leading, 128, dtype=dtype), randn(64, dtype=dtype) if with_bias else None
    with torch.inference_mode(inference):
        y = nn.functional.linear(x, weight, bias)
    wanted = nn.functional.linear(
        x.double(), weight.to_dense().double(), None if bias is None else bias.double()
    )
    assert y.shape == (*leading, 64)
    close(y, wanted)


def test_addmm():
    a, x, bias = sparse(), randn(5, 128), randn(64)
    close(torch.addmm(bias, x, a.t()), bias.double() + x.double() @ a.to_dense().double().t())


@pytest.mark.parametrize("beta", [1, 0, -0.5])
@pytest.mark.parametrize("shape", [(5, 0), (1, 0), (5, 1), (0,), (1,), ()])
@pytest.mark.parametrize("transposed", [False, True])
def test_addmm_adds_beta_times_whatever_broadcasts(beta, shape, transposed):
    """0 stands for the width of the result."""
    a = sparse()
    second = a if transposed else a.t()
    x, added = randn(5, second.shape[0]), randn(*(size or second.shape[1] for size in shape))
    dense = a.to_dense().double() if transposed else a.to_dense().double().t()
    close(torch.addmm(added, x, second, beta=beta), beta * added.double() + x.double() @ dense)


@pytest.mark.parametrize("most", [2, 9])
def test_int8_products_are_exact_and_clamped_to_int8(most):
    """Results are int8 as in PyTorch: small sums fit, large ones are clamped."""
    matrix = pruned(integers(64, 128, most=most))
    a, b = Sparse24Tensor.from_dense(matrix), integers(128, 16, most=most)
    exact = matrix.cpu().long() @ b.cpu().long()
    assert (exact.abs().max() > 127) == (most == 9)
    for y in (torch.mm(a, b), torch.mm(b.t(), a.t()).t(), nn.functional.linear(b.t(), a).t()):
        assert y.dtype == torch.int8
        assert torch.equal(y.cpu().long(), exact.clamp(-128, 127))


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scaled_mm_of_float8(out):
    matrix = pruned(integers(64, 128)).to(torch.float8_e4m3fn)
    a, b = Sparse24Tensor.from_dense(matrix), integers(16, 128).to(torch.float8_e4m3fn).t()
    scales = torch.tensor([0.5], device=DEVICE), torch.tensor([0.25], device=DEVICE)
    y = torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=out)
    close(y, 0.125 * matrix.double() @ b.double(), torch.bfloat16)
    z = torch._scaled_mm(b.t(), a.t(), scale_a=scales[1], scale_b=scales[0], out_dtype=out)
    close(z, y.t().double(), torch.bfloat16)
    with pytest.raises(UnsupportedError, match="out_dtype"):
        torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.int32)


@pytest.mark.parametrize("out", [None, torch.float8_e4m3fn], ids=str)
def test_scaled_mm_into_float8_saturates(out):
    """The result has the operands' dtype by default, like that of torch._scaled_mm."""
    matrix = pruned(integers(64, 128)).to(torch.float8_e4m3fn)
    a, b = Sparse24Tensor.from_dense(matrix), integers(16, 128).to(torch.float8_e4m3fn).t()
    y = torch._scaled_mm(
        a, b, torch.tensor(1.0, device=DEVICE), torch.tensor(1.0, device=DEVICE), out_dtype=out
    )
    exact = (matrix.double() @ b.double()).clamp(-448, 448)
    assert exact.abs().max() == 448
    assert y.dtype == torch.float8_e4m3fn
    assert torch.equal(y.double(), exact.float().to(torch.float8_e4m3fn).double())


UNSERVED = {
    "not supported by the hardware": lambda a: a @ a.t(),
    "specific set of operations, can't perform requested op \\(mv": lambda a: a @ randn(128),
    "specific set of operations, can't perform requested op \\(sub": lambda a: a - a,
    "specific set of operations, can't perform requested op \\(sum": lambda a: a.sum(),
    "same data type": lambda a: a @ randn(128, 8).half(),
    "only operand B": lambda a: torch.addmm(randn(8), a, randn(128, 8)),
    "expected alpha 1, got 2": lambda a: torch.addmm(randn(64), randn(5, 128), a.t(), alpha=2),
    "except for the dummy case": lambda a: a.view(128, 64),
    "_scaled_mm": lambda a: (
        Sparse24Tensor.from_dense(a.to_dense().to(torch.float8_e4m3fn))
        @ randn(128, 8).to(torch.float8_e4m3fn)
    ),
    "isn't a transpose": lambda a: a.t().values(),
    "not supported, expected 128 summands": lambda a: a @ randn(64, 8),
    "not supported, expected 64 summands": lambda a: randn(5, 128) @ a,
    "Broadcasting is not implemented": lambda a: a @ randn(3, 128, 5),
    "expand: expected sizes that end with": lambda a: a.expand(3, 64, 64),
    "`view` is not implemented .*int32": lambda a: a.view(torch.int32),
    "mm: expected no out_dtype, got torch.float32": lambda a: torch.mm(a, randn(128, 5), torch.float32),
    "addmm: expected no out_dtype": lambda a: torch.addmm(randn(64), randn(5, 128), a.t(), torch.float32),
    "got bmm.dtype": lambda a: torch.bmm(randn(2, 5, 64), a.expand(2, 64, 128), torch.float32),
}


@pytest.mark.parametrize("message", UNSERVED)
def test_unserved_operations_raise_pytorchs_kind_of_error(message):
    kind = ValueError if "hardware" in message else NotImplementedError
    with pytest.raises(kind, match=message):
        UNSERVED[message](sparse())


INTO_MEMORY = {
    "mm": lambda a, out: torch.mm(a, randn(128, 5), out=out(64, 5)),
    "mm on the right": lambda a, out: torch.mm(randn(5, 64), a, out=out(5, 128)),
    "mm into it": lambda a, out: torch.mm(randn(64, 5), randn(5, 128), out=a),
    "matmul": lambda a, out: torch.matmul(randn(2, 5, 64), a, out=out(2, 5, 128)),
    "addmm": lambda a, out: torch.addmm(randn(128), randn(5, 64), a, out=out(5, 128)),
    "linear": lambda a, out: torch.ops.aten.linear.out(randn(5, 128), a, out=out(5, 64)),
    "bmm": lambda a, out: torch.bmm(randn(2, 5, 64), a.expand(2, 64, 128), out=out(2, 5, 128)),
    "mul": lambda a, out: torch.mul(a, 2, out=out(64, 128)),
    "add": lambda a, out: torch.add(a, a, out=out(64, 128)),
    "relu": lambda a, out: torch.ops.aten.relu.out(a, out=out(64, 128)),
    "add into another": lambda a, out: torch.add(a, a, out=a.clone()),
}


@pytest.mark.parametrize("how", INTO_MEMORY)
@pytest.mark.parametrize("inference", [False, True])
def test_results_in_given_memory_are_refused_instead_of_lost(how, inference):
    held = []

    def out(*sizes):
        held.append(torch.full(sizes, 7.0, device=DEVICE))
        return held[0]

    a = sparse()
    with torch.inference_mode(inference), pytest.raises(UnsupportedError, match=r"\bout\b"):
        INTO_MEMORY[how](a, out)
    assert all((one == 7).all() for one in held)


@pytest.mark.parametrize("shape", [(5,), (3, 64), (1, 5, 64)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_what_addmm_cannot_add_is_refused(shape, transposed):
    a = sparse(64, 64)
    with pytest.raises(InvalidProblemError, match=r"(bias|input): expected .* broadcasts to \[5, 64\]"):
        torch.addmm(randn(*shape), randn(5, 64), a if transposed else a.t())


def test_a_scalar_has_no_features():
    with torch.inference_mode(), pytest.raises(InvalidProblemError, match=r"input: expected \[..., 128\]"):
        nn.functional.linear(torch.tensor(1.0, device=DEVICE), sparse())
