"""A ``Sparse24Tensor`` is copied, viewed, moved, differentiated and compiled as a dense matrix is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse24_plans import UnsupportedError
from sparse24_plans.torch import SemiStructuredError, Sparse24Tensor

from .cases import DEVICE, close, integers, pruned, randn
from .tensor_cases import dense, sparse


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
