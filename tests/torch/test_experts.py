"""``Sparse24Experts`` computes what dense experts do, also copied, compiled and exported, or refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Experts
from sparse24_plans.torch.experts import ExpertsWeight, kernel_obstacle

from ..support import HAS_GPU
from .cases import DEVICES
from .expert_cases import DenseExperts, case, pickled, pruned, randn, routed, same_experts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_compute_what_dense_ones_with_the_pruned_weights_do(device, dtype):
    dense, sparse, x = case(device, dtype)
    index, weights = routed(len(x), 6, 2, device)
    got = sparse(x, index, weights)
    wanted = pruned(dense, sparse)(x, index, weights)
    assert got.dtype == dtype
    assert (got.double() - wanted).norm() / wanted.norm() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("device", DEVICES)
def test_a_tokens_bits_do_not_depend_on_the_others(device):
    _, sparse, x = case(device, require={"batch_invariant": True})
    index, weights = routed(len(x), 6, 2, device)
    whole = sparse(x, index, weights)
    for token in (0, 17, 36):
        part = slice(token, token + 1)
        assert torch.equal(sparse(x[part], index[part], weights[part]), whole[part])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elsewhere", [None, 6, -1, 1 << 32])
def test_a_training_pass_has_the_bits_of_inference(device, elsewhere):
    """Gradients need other operations, which round in the same order."""
    _, sparse, x = case(device)
    index, weights = routed(len(x), 6, 3, device)
    if elsewhere is not None:
        index[::3, 1] = elsewhere
    wanted = sparse(x, index, weights)
    assert not wanted.requires_grad
    trained = sparse(x.requires_grad_(), index, weights)
    assert trained.requires_grad
    assert torch.equal(trained, wanted)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("own", ["gate_up_proj", "down_proj"])
def test_weights_that_require_gradients_are_refused_instead_of_never_trained(trains, own):
    _, sparse, x = case("cpu")
    getattr(sparse, own).requires_grad_(True)
    index, weights = routed(len(x), 6, 3, "cpu")
    with pytest.raises(UnsupportedError, match=f"{own}: expected frozen weights"):
        sparse(x.requires_grad_(trains), index, weights)
    with torch.no_grad():
        sparse(x, index, weights)


@pytest.fixture
def filled_memory():
    """New memory holds NaN, so that rows which nothing wrote show in a result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elsewhere", [6, 9, -1, -7, 1 << 32, (1 << 33) + 5, -(1 << 32), -(1 << 40) + 3])
@pytest.mark.parametrize("stored", [None, "s4"])
def test_experts_of_other_ranks_add_nothing(device, elsewhere, stored, filled_memory):
    _, sparse, x = case(device, stored=stored, group=64)
    index, weights = routed(len(x), 6, 2, device)
    away = index.clone()
    away[::3, 1] = elsewhere
    none = weights.clone()
    none[::3, 1] = 0
    assert torch.equal(sparse(x, away, weights), sparse(x, index, none))
    assert not sparse(x, torch.full_like(index, elsewhere), weights).any()


X, INDEX, WEIGHTS = randn(4, 128), torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("operands", "words"),
    [
        ((X[None], INDEX, WEIGHTS), r"hidden_states: expected \[T, 128\], got \[1, 4, 128\]"),
        ((X[:, :64], INDEX, WEIGHTS), r"hidden_states: expected \[T, 128\], got \[4, 64\]"),
        ((X[:3], INDEX, WEIGHTS), r"top_k_index: expected int32 or int64 \[3, top_k\], got .* \[4, 3\]"),
        ((X, INDEX[:3], WEIGHTS[:3]), r"top_k_index: expected .* \[4, top_k\], got torch.int64 \[3, 3\]"),
        ((X, INDEX[:, 0], WEIGHTS[:, 0]), r"top_k_index: expected .* \[4, top_k\], got torch.int64 \[4\]"),
        ((X, INDEX[:, :0], WEIGHTS[:, :0]), r"top_k_index: expected at least 1 expert a token.* \[4, 0\]"),
        ((X, WEIGHTS, INDEX), r"top_k_index: expected .*, got torch.float32"),
        ((X, INDEX > 0, WEIGHTS), r"top_k_index: expected .*, got torch.bool"),
        ((X, INDEX, WEIGHTS[:, :2]), r"top_k_weights: expected floating point \[4, 3\], got .* \[4, 2\]"),
        ((X, INDEX, WEIGHTS[:, :1]), r"top_k_weights: expected floating point \[4, 3\], got .* \[4, 1\]"),
        ((X, INDEX, INDEX), r"top_k_weights: expected floating point .*, got torch.int64"),
    ],
)
def test_routing_that_does_not_fit_is_refused(trains, operands, words):
    _, sparse, _ = case("cpu")
    x, index, weights = operands
    with pytest.raises(InvalidProblemError, match=words):
        sparse(x.clone().requires_grad_(trains), index, weights)


@pytest.mark.parametrize("trains", [False, True])
def test_no_tokens_give_no_results(trains):
    _, sparse, x = case("cpu")
    index, weights = routed(1, 6, 2, "cpu")
    y = sparse(none := x[:0].requires_grad_(trains), index[:0], weights[:0])
    assert y.shape == (0, 128)
    if trains:
        y.sum().backward()
        assert none.grad.shape == (0, 128)


def test_the_meta_device_gives_shapes():
    sparse = Sparse24Experts(6, 128, 64, device="meta")
    assert sparse(*(one.to("meta") for one in (X, INDEX, WEIGHTS))).shape == (4, 128)


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")])
@pytest.mark.parametrize("elsewhere", [6, -1])
def test_inputs_and_routing_weights_have_the_gradients_of_dense_experts(activation, elsewhere, filled_memory):
    dense = DenseExperts(6, 128, 64, torch.float32, "cpu")
    dense.act_fn = activation
    sparse = Sparse24Experts.from_experts(dense)
    index, weights = routed(20, 6, 2, "cpu")
    index[::3, 1] = elsewhere
    grads = []
    for module in (sparse, pruned(dense, sparse)):
        x, factors = randn(20, 128).requires_grad_(), weights.clone().requires_grad_()
        (module(x, index, factors).double() * randn(20, 128, seed=2)).sum().backward()
        grads.append((x.grad, factors.grad))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_that_take_gradients_are_refused(transform):
    _, experts, _ = case("cpu")
    with pytest.raises(UnsupportedError, match=r"Sparse24Experts has no gradient in .*torch\.func"):
        transform(lambda x: experts(x, INDEX, WEIGHTS).sum())(X.clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_under_autocast_inputs_take_the_weights_dtype(dtype):
    _, sparse, x = case("cpu", dtype)
    routing, wide = routed(len(x), 6, 2, "cpu"), x.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = sparse(wide, *routing)
    assert got.dtype == torch.float32
    assert torch.equal(got.to(dtype), sparse(x, *routing))
    got.sum().backward()
    assert wide.grad.any()


def loaded(module: Sparse24Experts, **options) -> Sparse24Experts:
    """New experts with the module's state."""
    new = Sparse24Experts(6, 128, 64, dtype=module.down_proj.weight.dtype, **options)
    new.load_state_dict(module.state_dict(), assign="device" in options)
    return new


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        pickled,
        loaded,
        lambda one: loaded(one, device="meta"),
        lambda one: copy.deepcopy(one).float().to(torch.bfloat16),
    ],
    ids=["deepcopy", "pickle", "state_dict", "state_dict on meta", "to"],
)
def test_a_copy_of_experts_is_like_them(copied):
    _, sparse, _ = case("cpu")
    other = copied(sparse)
    assert other.down_proj.values is not sparse.down_proj.values
    assert same_experts(other, sparse)


def test_experts_compile_whole_and_train_compiled():
    _, sparse, x = case("cpu")
    routing = routed(len(x), 6, 2, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, *routing), sparse(x, *routing))
    grads = []
    for module in (sparse, torch.compile(sparse, backend="aot_eager")):
        wanted = x.clone().requires_grad_()
        module(wanted, *routing).float().square().sum().backward()
        grads.append(wanted.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("strict", [False, True])
def test_experts_are_exported_for_any_number_of_tokens(strict):
    _, sparse, x = case("cpu")
    routing = routed(len(x), 6, 2, "cpu")
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(
        sparse.eval(),
        (x[:3], *(one[:3] for one in routing)),
        dynamic_shapes=({0: tokens},) * 3,
        strict=strict,
    ).module()
    assert torch.equal(exported(x, *routing), sparse(x, *routing))


def test_new_experts_are_zero():
    x = randn(5, 128)
    assert not Sparse24Experts(6, 128, 64)(x, *routed(5, 6, 2, "cpu")).any()


def test_dense_weights_are_the_pruned_ones():
    dense, sparse, _ = case("cpu")
    for name, weight in sparse.dense_weights().items():
        stack = getattr(dense, name)
        assert torch.equal(weight, torch.ops.sparse24.prune(stack.flatten(0, 1)).view(stack.shape))


def test_scores_rank_each_matrix_in_its_own_place():
    dense, _, _ = case("cpu", torch.float32)
    scores = {name: randn(*getattr(dense, name).shape, seed=3) for name in ("gate_up_proj", "down_proj")}
    for name, weight in Sparse24Experts.from_experts(dense, scores=scores).dense_weights().items():
        stack, ranks = getattr(dense, name), scores[name]
        wanted = torch.ops.sparse24.prune(stack.flatten(0, 1), ranks.flatten(0, 1))
        assert torch.equal(weight, wanted.view(stack.shape))


def test_the_plan_is_that_of_the_grouped_product():
    _, sparse, _ = case("cpu", require={"batch_invariant": True})
    desc = sparse.gate_up_proj.plan(5).descriptor
    assert (desc.n, desc.m, desc.k, desc.groups) == (5, 128, 128, 6)
    assert sparse.down_proj.plan().guarantee.batch_invariant


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Sparse24Experts(2, 96, 64), InvalidProblemError, "features: expected 2I and H in multiples"),
        (
            lambda: Sparse24Experts(2, 64, 64, activation="silu"),
            InvalidProblemError,
            "activation: expected a gated one, got 'silu'",
        ),
        (lambda: Sparse24Experts(2, 64, 64, dtype=torch.int8), UnsupportedError, "dtype: expected one of"),
        (
            lambda: Sparse24Experts(2, 64, 64).down_proj(torch.zeros(1, 64)),
            UnsupportedError,
            "x: expected a call of the Sparse24Experts",
        ),
        (
            lambda: case("cpu", scores={"down_proj": torch.zeros(6, 64, 128)}),
            InvalidProblemError,
            r"scores: expected \[6, 128, 64\] for down_proj",
        ),
        (lambda: case("cpu", method="compress"), FormatError, "row 0"),
    ],
)
def test_arguments_that_no_experts_have_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


class Clamped(DenseExperts):
    """Experts that clamp their results, as some models clamp their gates."""

    def forward(self, x, index, weights):
        return super().forward(x, index, weights).clamp(-2, 2)


def test_experts_that_compute_something_else_are_refused():
    with pytest.raises(InvalidProblemError, match=r"expected it to give down\(act\(gate\(x\)\) \* up\(x\)\)"):
        Sparse24Experts.from_experts(Clamped(6, 128, 64, torch.bfloat16, "cpu"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: delattr(m, "gate_up_proj"), "expected gate_up_proj"),
        (lambda m: delattr(m, "act_fn"), "its activation is neither SiLU nor GELU"),
        (lambda m: setattr(m, "is_transposed", True), "expected is_transposed=False"),
        (lambda m: m.to("meta"), "on the meta device, where it can't be tried"),
        (lambda m: m.double(), "the dtype of its gate_up_proj is torch.float64"),
        (lambda m: setattr(m, "act_fn", nn.Tanh()), "its activation is neither SiLU nor GELU"),
        (
            lambda m: setattr(m, "bias", nn.Parameter(torch.zeros(6, 128))),
            "expected no other parameters, got bias",
        ),
        (
            lambda m: setattr(m, "down_proj", nn.Parameter(torch.zeros(6, 64, 128))),
            r"expected down_proj \[6, 128, 64\]",
        ),
    ],
)
def test_modules_that_are_something_else_are_refused(change, words):
    dense = DenseExperts(6, 128, 64, torch.bfloat16, "cpu")
    change(dense)
    with pytest.raises(InvalidProblemError, match=words):
        Sparse24Experts.from_experts(dense)


def test_sizes_that_no_kernel_serves_are_refused():
    with pytest.raises(InvalidProblemError, match="expected 2I and H in multiples of 64, got 48 and 96"):
        Sparse24Experts.from_experts(DenseExperts(2, 96, 24, torch.bfloat16, "cpu"))


def test_experts_stay_pytorchs_if_only_strict_kernels_have_groups(monkeypatch):
    """Asked of assumed GPUs. Whoever requires its bits gets it."""
    plan_on, strict = ExpertsWeight.plan_on, {"bit_stable_across_hardware": True}
    for name, dtype, require, kernel in (
        ("h200", torch.bfloat16, None, "wgmma_sp_grouped"),
        ("h200", torch.bfloat16, strict, "inflate_strict"),
        ("h200", torch.float32, None, None),
        ("a100", torch.bfloat16, None, None),
    ):
        monkeypatch.setattr(ExpertsWeight, "plan_on", lambda self, _, name=name: plan_on(self, name))
        layer = Sparse24Experts(4, 64, 64, dtype=dtype, require=require).down_proj
        reason = kernel_obstacle(layer, torch.device("cuda:0"))
        if kernel is None:
            assert reason == "dense experts are faster than its kernel there, inflate_strict"
        else:
            assert (reason, layer.plan_on(0).kernel) == (None, kernel)


@pytest.mark.gpu
def test_experts_can_be_captured_and_follow_new_tokens():
    assert HAS_GPU
    _, sparse, x = case("cuda")
    index, weights = routed(len(x), 6, 2, "cuda")
    sparse(x, index, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(x, index, weights)
    for seed in (3, 4):
        new_index, new_weights = routed(len(x), 6, 2, "cuda", seed)
        index.copy_(new_index)
        weights.copy_(new_weights)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, sparse(x, new_index, new_weights))
