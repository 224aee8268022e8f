"""``to_sparse24`` swaps a mixture's stacked experts as one, and reports each of their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError
from sparse24_plans.torch import Sparse24Experts, Sparse24Recipe, to_sparse24

from .cases import pruned, randn
from .swap_models import Experts

STACKS = {"experts.gate_up_proj", "experts.down_proj"}


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 3, bias=False)
        self.experts = Experts()
        self.project = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.experts(x, index, weights) + self.project(x)


def mixture() -> Mixture:
    """On the host, where float32 experts have a kernel."""
    torch.manual_seed(0)
    return Mixture()


def pruned_stack(stack: torch.Tensor) -> torch.Tensor:
    return pruned(stack.flatten(0, 1)).view(stack.shape)


def test_experts_are_swapped_and_reported_with_both_weights():
    m = mixture()
    dense = {name: getattr(m.experts, name).detach().clone() for name in ("gate_up_proj", "down_proj")}
    report = to_sparse24(m)
    assert type(m.experts) is Sparse24Experts
    assert set(report.skipped) == {"router"}
    sizes = {layer.name: (layer.m, layer.k, layer.dense_bytes) for layer in report.layers}
    assert sizes.keys() == STACKS | {"project"}
    assert sizes["experts.down_proj"] == (192, 32, 192 * 32 * 4)
    kept = {layer.name: layer.kept_energy for layer in report.layers}
    for name, weight in m.experts.dense_weights().items():
        assert torch.equal(weight, pruned_stack(dense[name]))
        energy = weight.double().square().sum() / dense[name].double().square().sum()
        assert kept[f"experts.{name}"] == pytest.approx(energy.item())
    assert report.sparse_share == pytest.approx(1 - (3 * 64 + 64) * 4 / report.model_bytes)
    again = to_sparse24(m)
    assert (again.layers, again.sparse_share) == ((), report.sparse_share)
    assert again.earlier.keys() == sizes.keys()


def test_swapped_experts_give_what_dense_ones_with_their_weights_give():
    m = mixture()
    for stack in m.experts.parameters():
        stack.data = pruned_stack(stack.data)
    m.project.weight.data = pruned(m.project.weight.data)
    x = randn(9, 64).cpu()
    with torch.no_grad():
        wanted = m(x)
        report = to_sparse24(m, recipe="compress")
        assert all(layer.was_sparse for layer in report.layers)
        torch.testing.assert_close(m(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_on_gpu_experts_are_swapped_if_kernel_serves_them():
    m = mixture().to("cuda")
    assert "kernel" in to_sparse24(m).skipped["experts.down_proj"]
    m = mixture().to("cuda", torch.bfloat16)
    x, dense = (
        randn(9, 64).bfloat16(),
        {name: one.detach().clone() for name, one in m.experts.named_parameters()},
    )
    to_sparse24(m, include=["experts"])
    sparse = m(x)
    m.experts = Experts().to("cuda", torch.bfloat16)
    for name, stack in dense.items():
        getattr(m.experts, name).data = pruned_stack(stack)
    torch.testing.assert_close(sparse, m(x), rtol=2e-2, atol=2e-2)


def test_experts_under_several_names_are_replaced_under_all_of_them():
    m = mixture()
    m.others = m.experts
    report = to_sparse24(m, include=["others"])
    assert type(m.experts) is Sparse24Experts
    assert m.others is m.experts
    assert {layer.name for layer in report.layers} == STACKS


@pytest.mark.parametrize("pattern", ["experts", "experts.down_proj", "exp*"])
def test_patterns_name_experts_or_one_of_their_weights(pattern):
    left = to_sparse24(m := mixture(), exclude=[pattern]).skipped
    assert type(m.experts) is Experts
    assert {name for name, why in left.items() if why == f"excluded by pattern {pattern!r}"} == STACKS
    assert {layer.name for layer in to_sparse24(m, include=[pattern]).layers} == STACKS


def test_recipe_goes_by_experts_name_and_scores_by_weights():
    m, asked = mixture(), {}

    def scores(name: str, linear: nn.Linear) -> torch.Tensor:
        asked[name] = -linear.weight.detach().abs()
        return asked[name]

    dense = {name: getattr(m.experts, name).detach() for name in ("gate_up_proj", "down_proj")}
    recipe = Sparse24Recipe(scores=scores, require={"batch_invariant": True})
    to_sparse24(m, recipe={"experts": recipe})
    assert asked.keys() == STACKS
    for name, weight in m.experts.dense_weights().items():
        wanted = torch.ops.sparse24.prune(dense[name].flatten(0, 1), asked[f"experts.{name}"])
        assert torch.equal(weight, wanted.view(weight.shape))
    assert m.experts.down_proj.plan().guarantee.batch_invariant
    assert type(m.project) is nn.Linear


def shares(m: Mixture) -> None:
    m.other = nn.ParameterList([m.experts.down_proj])


def widens(m: Mixture) -> None:
    m.experts.down_proj = nn.Parameter(m.experts.down_proj.detach()[:, :, :16])


def biases(m: Mixture) -> None:
    m.experts.down_proj_bias = nn.Parameter(torch.zeros(3, 64))


class Doubled(Experts):
    def forward(self, *args):
        return 2 * super().forward(*args)


class Other(torch.Tensor):
    """A tensor of another library, such as one that is cut over ranks."""


def changes_class(m: Mixture) -> None:
    m.experts.down_proj = nn.Parameter(m.experts.down_proj.detach().as_subclass(Other))


LEFT_DENSE = {
    "hooks": (lambda m: m.experts.register_forward_hook(lambda *_: None), {}, "it has hooks"),
    "hooks inside": (lambda m: m.experts.act_fn.register_forward_hook(lambda *_: None), {}, "it has hooks"),
    "shared": (shares, {}, "its weights are shared"),
    "biases": (biases, {}, "expected no other parameters, got down_proj_bias"),
    "sizes": (widens, {}, "expected down_proj [3, 64, 32], got [3, 64, 16]"),
    "activation": (lambda m: setattr(m.experts, "act_fn", nn.Tanh()), {}, "neither SiLU nor GELU"),
    "dtype": (lambda m: m.double(), {}, "the dtype of its gate_up_proj is torch.float64"),
    "class": (changes_class, {}, "its down_proj is a Other"),
    "meaning": (
        lambda m: setattr(m.experts, "__class__", Doubled),
        {},
        "expected it to give down(act(gate(x)) * up(x)), got a relative error of 1",
    ),
    "8 bits": (None, {"weight_dtype": torch.int8}, "inputs can't be quantized in Sparse24Experts"),
    "4 bits": (None, {"stored": "s4"}, "values in s4 need a weight of float16 or bfloat16"),
    "training": (None, {"trainable": True}, "can't be trained in Sparse24Experts"),
    "an activation": (None, {"activation": "relu"}, "have an activation and an out_dtype of their own"),
    "compress": (None, {"method": "compress"}, "row 0"),
}


@pytest.mark.parametrize("name", LEFT_DENSE)
def test_experts_that_stay_dense_are_reported_with_a_reason(name):
    change, options, words = LEFT_DENSE[name]
    m = mixture()
    if change is not None:
        change(m)
    kept = m.experts
    report = to_sparse24(m, recipe=Sparse24Recipe(**options))
    assert m.experts is kept
    nbytes = {one.name: one.nbytes for one in report.left_dense}
    for stack in ("gate_up_proj", "down_proj"):
        assert words in report.skipped[f"experts.{stack}"]
        assert nbytes[f"experts.{stack}"] == getattr(kept, stack).nbytes
    with pytest.raises(InvalidProblemError, match="experts: expected a layer that can be swapped"):
        to_sparse24(m, include=["experts"], recipe=Sparse24Recipe(**options))


def test_a_model_with_experts_beside_layers_keeps_them():
    m = Experts()
    m.project = nn.Linear(64, 64)
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["project"]
    assert "expected no other parameters" in report.skipped["down_proj"]
