"""A layer calls its kernel past PyTorch's dispatcher exactly where the dispatcher would only come to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse24_plans import InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Linear, linear
from sparse24_plans.torch.library import only_dispatches

from .cases import DEVICE, randn

OP = torch.ops.sparse24.linear.default


def layer_of(bias: bool = True, **options: object) -> Sparse24Linear:
    torch.manual_seed(1)
    dense = torch.nn.Linear(64, 96, bias, device=DEVICE, dtype=torch.bfloat16)
    return Sparse24Linear.from_linear(dense, **options)


def inputs() -> torch.Tensor:
    return randn(5, 64, dtype=torch.bfloat16)


@pytest.fixture
def through_the_op(monkeypatch) -> list[bool]:
    """How often the layer called the op."""
    calls: list[bool] = []

    def counted(*args: object) -> torch.Tensor:
        calls.append(True)
        return OP(*args)

    monkeypatch.setattr(linear, "_linear", counted)
    return calls


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_result_is_the_ops_bit_for_bit(off, bias, activation, through_the_op):
    layer, x = layer_of(bias, activation=activation), inputs()
    wanted = layer(x)
    assert through_the_op, "with gradients enabled the op is called"
    through_the_op.clear()
    with off():
        direct = layer(x)
    assert not through_the_op
    assert torch.equal(direct, wanted)
    assert direct.is_inference() == (off is torch.inference_mode)
    assert not direct.requires_grad


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = func
        return func(*args, **(kwargs or {}))


class SeenFunction(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


ACTING: dict[str, Callable[[], AbstractContextManager]] = {
    "a dispatch mode": Seen,
    "a function mode": SeenFunction,
    "a default device": lambda: torch.device(DEVICE),
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "forward-mode differentiation": forward_ad.dual_level,
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("name", ACTING)
def test_what_acts_on_ops_sees_the_op(name, through_the_op):
    layer, x = layer_of(), inputs()
    with torch.no_grad(), ACTING[name]():
        layer(x)
    assert through_the_op


def test_a_dispatch_mode_gets_the_op():
    layer, x = layer_of(), inputs()
    with torch.no_grad(), Seen() as mode:
        layer(x)
    assert mode.seen is OP


def test_vmap_is_refused_as_by_the_op():
    with torch.no_grad(), pytest.raises(UnsupportedError, match="vmap"):
        torch.vmap(layer_of())(inputs())


def test_a_compiled_layer_calls_the_op(through_the_op):
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(layer_of(), backend=keep, fullgraph=True)(inputs())
    assert any(node.target is OP for node in graphs[0].graph.nodes)


class Wrapped(torch.Tensor):
    pass


def negated(x: torch.Tensor) -> torch.Tensor:
    """x with a bit that says to negate it when it is read."""
    return torch._neg_view(x)


OPERANDS = {
    "a subclass": lambda x: x.as_subclass(Wrapped),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a negated view": negated,
    "no value": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_unusual_tensors_go_through_the_dispatcher(name):
    x, weight = OPERANDS[name](inputs()), layer_of().dense_weight()
    with torch.no_grad():
        assert not only_dispatches(x, weight, None)


def test_a_negated_view_is_multiplied_as_it_reads():
    layer, x = layer_of(bias=False), inputs()
    with torch.no_grad():
        assert torch.equal(layer(negated(x)), -layer(x))


@pytest.mark.parametrize("elsewhere", ["weight", "bias"])
def test_every_operand_is_on_the_device(elsewhere):
    tensors = {"weight": layer_of().dense_weight(), "bias": randn(96)}
    tensors[elsewhere] = tensors[elsewhere].to("meta")
    with torch.no_grad():
        assert not only_dispatches(inputs(), **tensors)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda x: x[:, :32], "x"),
        (lambda x: x.float(), "x"),
        (lambda x: x.new_empty(()), "x"),
    ],
    ids=["width", "dtype", "scalar"],
)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_refusals_are_the_ops(change, argument, mode):
    layer, x = layer_of(), inputs()
    with mode():
        layer(x)
        with pytest.raises(InvalidProblemError, match=f"^{argument}:"):
            layer(change(x))


def test_packed_tiles_take_no_other_width_that_fills_as_many():
    layer = layer_of(bias=False)
    values, meta = layer.canonical()
    layer.packed, layer.values, layer.metadata = torch.ops.sparse24.pack(values.detach(), meta), None, None
    for mode in (torch.no_grad, nullcontext):
        with mode():
            layer(inputs())
            with pytest.raises(InvalidProblemError, match=r"^x: expected \[..., 64\], .* got \[5, 32\]"):
                layer(inputs()[:, :32])


def test_a_weight_that_changed_in_place_is_seen():
    layer, x = layer_of(bias=False), inputs()
    with torch.no_grad():
        assert layer(x).any()
        layer._weight.zero_()
        assert not layer(x).any()
