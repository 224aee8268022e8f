"""``Sparse24Tensor``: what PyTorch's semi-structured tensors do, it does, on any device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.sparse import to_sparse_semi_structured
from torch.sparse.semi_structured import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.torch import (
    SemiStructuredError,
    Sparse24Tensor,
    from_semi_structured,
    to_semi_structured,
    use_as_default,
)

from .cases import DEVICE, FLOATS, S, close, integers, pruned, randn

floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


def dense(m: int = 64, k: int = 128, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pruned(randn(m, k, dtype=dtype, seed=3))


def sparse(m: int = 64, k: int = 128, dtype: torch.dtype = torch.float32) -> Sparse24Tensor:
    return Sparse24Tensor.from_dense(dense(m, k, dtype))


# Making one -----------------------------------------------------------------------------------------


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


# Products -------------------------------------------------------------------------------------------


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


# Other operations of a tensor -----------------------------------------------------------------------


def test_detach_clone_view_t_and_sizes():
    a = sparse().requires_grad_()
    assert not a.detach().requires_grad
    assert a.detach().packed is a.packed
    clone = a.detach().clone()
    assert clone.packed.data_ptr() != a.packed.data_ptr()
    assert torch.equal(clone.to_dense(), a.to_dense())
    assert a.detach().view(64, 128).shape == a.shape
    assert torch.equal(a.detach().t().t().to_dense(), a.to_dense())
    assert a.is_same_size(sparse())
    assert not a.is_same_size(sparse().t())
    copied = copy.deepcopy(nn.Parameter(a.detach(), requires_grad=False))
    assert torch.equal(copied.to_dense(), a.to_dense())


TRANSPOSES = {
    "t": lambda a: a.t(),
    "T": lambda a: a.T,
    "mT": lambda a: a.mT,
    "H": lambda a: a.H,
    "adjoint": lambda a: a.adjoint(),
    "permute": lambda a: a.permute(1, 0),
    "negative": lambda a: a.permute(-1, 0),
    "transpose": lambda a: a.transpose(0, 1),
    "swapdims": lambda a: torch.swapdims(a, -1, -2),
}


@pytest.mark.parametrize("how", TRANSPOSES)
@pytest.mark.parametrize(("leading", "compiled"), [((5,), False), ((2, 3), False), ((2, 3), True)], ids=str)
def test_a_weight_is_transposed_in_any_way(how, leading, compiled):
    def product(x, a):
        return x @ TRANSPOSES[how](a)

    torch._dynamo.reset()
    call = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    a, x, dy = sparse().requires_grad_(), randn(*leading, 128).requires_grad_(), randn(*leading, 64, seed=4)
    y = call(x, a)
    close(y, x.double() @ a.to_dense().double().t())
    dx, da = torch.autograd.grad(y, (x, a), dy)
    close(dx, dy.double() @ a.to_dense().double())
    close(da, dy.flatten(0, -2).double().t() @ x.flatten(0, -2).double())


VIEWS = {
    **TRANSPOSES,
    "detach": lambda a: a.detach(),
    "view": lambda a: a.view(64, -1),
    "reshape": lambda a: a.reshape(64, -1),
    "same permute": lambda a: a.permute(0, 1),
}


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("made", ["from_dense", "tiles"])
def test_views_in_inference_mode_are_those_outside_it(how, made_inside, made):
    with torch.inference_mode(made_inside):
        a = sparse() if made == "from_dense" else Sparse24Tensor.prune_dense_static_sort(dense())
    wanted = VIEWS[how](a).to_dense()
    with torch.inference_mode():
        found = VIEWS[how](a)
        assert found.is_inference() == made_inside
        assert torch.equal(found.to_dense(), wanted)
    assert torch.equal(VIEWS[how](found).to_dense(), VIEWS[how](VIEWS[how](a)).to_dense())


@pytest.mark.parametrize("leading", [(128,), (5, 128), (2, 3, 128)], ids=str)
def test_products_with_a_transpose_in_inference_mode(leading):
    a, x, bias = sparse(), randn(*leading), randn(64)
    with torch.inference_mode():
        close(x @ a.t(), x.double() @ a.to_dense().double().t())
        if len(leading) == 2:
            close(torch.addmm(bias, x, a.t()), bias.double() + x.double() @ a.to_dense().double().t())


UNFOLDED = {
    "transposed": lambda: randn(4, 3, 128).transpose(0, 1),
    "permuted": lambda: randn(2, 3, 4, 128).permute(2, 0, 1, 3),
    "expanded": lambda: randn(1, 3, 128).expand(4, 3, 128),
    "of one row": lambda: randn(3, 1, 128).transpose(0, 1),
    "empty": lambda: randn(3, 0, 128).transpose(0, 1),
}
"""Values x [..., 128] that can't all be viewed as a matrix."""
PRODUCTS = {
    "matmul": lambda x, a, _: x @ a.t(),
    "linear": lambda x, a, _: nn.functional.linear(x, a),
    "linear with a bias": nn.functional.linear,
    "of a transpose": lambda x, a, _: (x @ a.t()) @ a,
}


@pytest.mark.parametrize("how", PRODUCTS)
@pytest.mark.parametrize(
    ("made", "compiled"), [*((made, False) for made in UNFOLDED), ("transposed", True)], ids=str
)
@pytest.mark.parametrize("mode", ["gradients", "no_grad", "inference_mode"])
def test_x_that_cannot_be_folded_without_copy_is_multiplied(how, made, mode, compiled):
    """PyTorch's matmul asks for a batch of copies of a weight without gradients then."""
    torch._dynamo.reset()
    product = PRODUCTS[how]
    call = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    a, x, bias = sparse(), UNFOLDED[made](), randn(64)
    if mode == "gradients":
        x.requires_grad_()
        y = call(x, a, bias)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        (wanted,) = torch.autograd.grad(product(x, a.to_dense(), bias), x, torch.ones_like(y))
        close(dx, wanted.double())
    else:
        with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
            y = call(x, a, bias)
    close(y, product(x.double(), a.to_dense().double(), bias.double()))


@pytest.mark.parametrize("inference", [False, True])
def test_a_batch_of_one_weight_is_multiplied_as_one(inference):
    a, x = sparse(), randn(2, 5, 128)
    with torch.inference_mode(inference):
        close(torch.bmm(x, a.t().expand(2, 128, 64)), x.double() @ a.to_dense().double().t())


MOVES = {
    "device": lambda a: a.to(DEVICE),
    "dtype": lambda a: a.to(a.dtype),
    "device and dtype": lambda a: a.to(DEVICE, a.dtype),
    "other": lambda a: a.to(randn(2)),
    "named": lambda a: a.to(device=a.device, non_blocking=True),
}


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_move_that_changes_nothing_gives_the_tensor_itself(how, mode):
    a = sparse()
    with mode():
        assert MOVES[how](a) is a
        half = a.to(torch.bfloat16)
        assert (type(half), half.dtype) == (Sparse24Tensor, torch.bfloat16)


def test_other_permutations_leave_it_or_are_refused():
    a = sparse()
    for same in (a.permute(0, 1), a.transpose(1, 1), a.permute(0, -1)):
        assert same.shape == a.shape
        assert torch.equal(same.to_dense(), a.to_dense())
    for wrong in (lambda: a.permute(0, 0), lambda: a.permute(0, 1, 2), lambda: a.transpose(0, 2)):
        with pytest.raises((SemiStructuredError, IndexError, RuntimeError), match="dim"):
            wrong()


def test_moves_and_dtypes():
    a = sparse()
    half = a.to(torch.bfloat16)
    assert type(half) is Sparse24Tensor
    assert torch.equal(half.to_dense(), a.to_dense().bfloat16())
    with pytest.raises(NotImplementedError, match="float64"):
        a.to(torch.float64)
    with pytest.raises(NotImplementedError, match="int8"):
        a.to(torch.int8)
    with torch.inference_mode():
        assert type(a.to(torch.float16)) is Sparse24Tensor


@pytest.mark.gpu
def test_to_the_cpu_it_becomes_dense_as_pytorchs_does():
    a = sparse()
    assert type(a.to("cpu")) is torch.Tensor
    assert torch.equal(a.to("cpu"), a.to_dense().cpu())


def test_gradients_of_inputs_bias_and_weight():
    """The weight's gradient is dense, as in PyTorch."""
    a, x, bias = sparse().requires_grad_(), randn(5, 128).requires_grad_(), randn(64).requires_grad_()
    dy = randn(5, 64, seed=6)
    found = torch.autograd.grad(nn.functional.linear(x, a, bias), (x, a, bias), dy)
    w = a.to_dense().double().requires_grad_()
    operands = x.detach().double().requires_grad_(), w, bias.detach().double().requires_grad_()
    for ours, theirs in zip(
        found, torch.autograd.grad(nn.functional.linear(*operands), operands, dy.double()), strict=True
    ):
        close(ours, theirs)
    b = randn(128, 5).requires_grad_()
    (db,) = torch.autograd.grad(a.detach() @ b, b, randn(64, 5))
    close(db, w.detach().t() @ randn(64, 5).double())


def test_mismatched_sizes_raise_pytorchs_and_our_error():
    with pytest.raises(NotImplementedError, match="`SparseSemiStructuredTensor` matmul: operation") as caught:
        torch.mm(randn(1, 128), sparse())
    assert isinstance(caught.value, SemiStructuredError)


@pytest.mark.gpu
def test_transpose_that_no_kernel_multiplies_is_refused_as_pytorchs_is():
    a = Sparse24Tensor.from_dense(pruned(integers(64, 128)))
    message = r"`SparseSemiStructuredTensor` matmul: operation is not supported .*no kernel"
    for product in (lambda: a.t() @ integers(64, 8), lambda: integers(8, 64) @ a):
        with pytest.raises(UnsupportedError, match=message):
            product()


def test_pruning_in_compiled_function_has_gradients_of_eager_mode():
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ Sparse24Tensor.prune_dense_static_sort(x).t()

    torch._dynamo.reset()
    found = []
    for function in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        x = randn(64, 128).requires_grad_()
        y = function(x)
        y.backward(y.detach())
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].abs().max() > 0


def test_a_model_with_sparse_parameters_compiles():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32)).to(DEVICE).requires_grad_(False)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Sparse24Tensor.from_dense(pruned(layer.weight.data)), requires_grad=False)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 3, 16):
        torch.testing.assert_close(compiled(randn(n, 128)), model(randn(n, 128)))
        assert compiled(randn(2, n, 128)).stride() == model(randn(2, n, 128)).stride()


# PyTorch's own --------------------------------------------------------------------------------------


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
