"""``Sparse24Linear``: the layer's mathematics, its moves, and what it refuses."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from torch import nn

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.torch import (
    Sparse24Experts,
    Sparse24Linear,
    Sparse24QuantizedLinear,
    Sparse24WeightOnlyLinear,
    blocksparse,
    calibrate,
    from_pretrained,
    to_sparse24,
)

from .cases import DEVICE, FLOATS, S, close, pruned, randn
from .layers import KINDS, dense_layer, every_kind, filled, same, state
from .test_ops import ACTIVATIONS

F = nn.functional


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [64, 60, 3])
def test_it_is_the_linear_layer_with_a_pruned_weight(dtype, bias, k):
    """K is padded with zeros to a multiple of 8 where it is none."""
    dense = dense_layer(k, 97, bias, dtype)
    layer = Sparse24Linear.from_linear(dense)
    padded = F.pad(dense.weight.detach(), (0, -k % 8))
    assert torch.equal(layer.dense_weight(), pruned(padded)[:, :k])
    x = randn(2, 3, k, dtype=dtype)
    wanted = F.linear(x.double(), layer.dense_weight().double(), dense.bias.double() if bias else None)
    close(layer(x), wanted)
    assert layer(x).shape == (2, 3, 97)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_is_part_of_the_layer(name):
    if name == "gelu_tanh" and DEVICE == "cuda":
        pytest.skip("the device's kernels have no tanh GELU for float32")
    layer = Sparse24Linear.from_linear(dense_layer(), activation=name)
    x = randn(5, 64)
    wanted = F.linear(x.double(), layer.dense_weight().double(), layer.bias.double())
    close(layer(x), ACTIVATIONS[name](wanted))


def test_results_in_float32():
    layer = Sparse24Linear.from_linear(dense_layer(dtype=torch.bfloat16), out_dtype=torch.float32)
    assert layer(randn(5, 64, dtype=torch.bfloat16)).dtype == torch.float32


def test_methods_prune_or_refuse_dense_weights():
    dense = dense_layer()
    with pytest.raises(FormatError):
        Sparse24Linear.from_linear(dense, method="compress")
    dense.weight.data = pruned(dense.weight.data)
    compressed = Sparse24Linear.from_linear(dense, method="compress")
    assert torch.equal(compressed.dense_weight(), dense.weight)
    tiles = Sparse24Linear.from_linear(dense, method="tiles").dense_weight()
    S.compress(tiles.t().contiguous())  # the transpose is 2:4 too
    scores = randn(96, 64, seed=3)
    ranked = Sparse24Linear.from_linear(dense_layer(), scores=scores)
    assert torch.equal(ranked.dense_weight(), S.prune(dense_layer().weight.detach(), scores))
    with pytest.raises(InvalidProblemError, match=r"scores: expected None for tiles, .*, got a Tensor"):
        Sparse24Linear.from_linear(dense_layer(), method="tiles", scores=scores)


def test_requirements_choose_the_row():
    layer = Sparse24Linear.from_linear(dense_layer(), require={"batch_invariant": True})
    assert layer.plan(5).guarantee.batch_invariant
    x = randn(9, 64)
    assert torch.equal(layer(x), torch.cat([layer(x[i : i + 1]) for i in range(9)]))
    impossible = Sparse24Linear.from_linear(dense_layer(), require={"max_error_bound": 1e-30})
    with pytest.raises(UnsupportedError, match="error_bound"):
        impossible(x)


@pytest.mark.parametrize(("k", "m"), [(0, 8), (8, 0), (0, 0)])
def test_empty_layers(k, m):
    layer = Sparse24Linear(k, m, device=DEVICE)
    assert layer(randn(3, k)).shape == (3, m)
    layer.load_state_dict(layer.state_dict())
    assert layer.dense_weight().shape == (m, k)


def test_layers_stand_in_pytorchs_own_modules():
    """In evaluation, PyTorch's modules have fast paths that read weights."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, device=DEVICE).eval()
    for name in ("linear1", "linear2"):
        dense = getattr(encoder, name)
        dense.weight.data = pruned(dense.weight.data)
    x = randn(2, 5, 64)
    with torch.no_grad():
        wanted = encoder(x)
        for name in ("linear1", "linear2"):
            setattr(encoder, name, Sparse24Linear.from_linear(getattr(encoder, name), method="compress"))
        torch.testing.assert_close(encoder.eval()(x), wanted, rtol=1e-4, atol=1e-5)


def test_the_weight_is_no_operand():
    layer = Sparse24Linear.from_linear(dense_layer())
    with pytest.raises(UnsupportedError, match="weight: expected a tensor for linear"):
        F.linear(randn(5, 64), layer.weight)


@pytest.mark.parametrize("name", ["data", "requires_grad", "shape"])
def test_the_weight_refuses_what_would_be_lost(name):
    layer = Sparse24Linear.from_linear(dense_layer())
    with pytest.raises(UnsupportedError, match=rf"weight\.{name}: a Sparse24Linear holds no dense weight"):
        setattr(layer.weight, name, None)


# Moves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
def test_a_change_of_dtype_converts_the_kept_values(to):
    layer = Sparse24Linear.from_linear(dense_layer())
    wanted = layer.dense_weight().to(to)
    moved = layer.to(to)
    assert moved is layer
    assert torch.equal(layer.dense_weight(), wanted)
    assert layer.bias.dtype == to
    close(
        layer(randn(5, 64, dtype=to)),
        F.linear(randn(5, 64, dtype=to).double(), wanted.double(), layer.bias.double()),
    )


@every_kind
@pytest.mark.parametrize("shape", [(2, 64), (57,), ()], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_another_width_of_x_is_named_as_it_was_given(kind, shape, mode):
    """The layer pads x to 64 columns."""
    cls, options = KINDS[kind]
    layer = cls.from_linear(nn.Linear(60, 96, dtype=torch.bfloat16), **options)
    with mode(), pytest.raises(InvalidProblemError) as found:
        layer(randn(*shape, dtype=torch.bfloat16).cpu())
    assert str(found.value) == f"x: expected [..., 60], got {list(shape)}"


def _replica(layer: Sparse24Linear) -> Sparse24Linear:
    """A copy for one device, as nn.DataParallel makes it; FSDP keeps parameters as attributes, too."""
    found = layer._replicate_for_data_parallel()
    for name, parameter in layer._parameters.items():
        setattr(found, name, parameter.detach().clone())
    return found


def _with_parametrized_bias(layer: Sparse24Linear) -> Sparse24Linear:
    return nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity())


@every_kind
@pytest.mark.parametrize("way", [_replica, _with_parametrized_bias])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_parameters_may_be_plain_attributes(kind, way, mode):
    layer, x = filled(kind), torch.randn(3, 64, dtype=torch.bfloat16)
    with mode():
        wanted = layer(x)
        assert torch.equal(way(layer)(x), wanted)


@every_kind
def test_a_scalar_is_refused(kind):
    with pytest.raises(InvalidProblemError, match="x: expected"):
        filled(kind)(torch.tensor(1.0, dtype=torch.bfloat16))


def test_dtypes_that_no_kernel_has_are_refused():
    layer = Sparse24Linear.from_linear(dense_layer())
    before = state(layer)
    for change in (lambda: layer.double(), lambda: layer.to(torch.float64)):
        with pytest.raises(UnsupportedError, match="dtype: expected one of"):
            change()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    with pytest.raises(UnsupportedError, match="float64"):
        Sparse24Linear(64, 96, dtype=torch.float64)


def test_the_meta_device_and_back():
    layer = Sparse24Linear(64, 96, device="meta", dtype=torch.bfloat16)
    assert layer(torch.empty(5, 64, device="meta", dtype=torch.bfloat16)).shape == (5, 96)
    layer.load_state_dict(
        Sparse24Linear.from_linear(dense_layer(dtype=torch.bfloat16)).state_dict(), assign=True
    )
    assert same(layer, Sparse24Linear.from_linear(dense_layer(dtype=torch.bfloat16)))


@pytest.mark.parametrize("kind", [Sparse24Linear, Sparse24WeightOnlyLinear])
@pytest.mark.parametrize(
    ("weight", "bias"), [(torch.float32, torch.float16), (torch.float16, torch.bfloat16)], ids=str
)
def test_a_bias_that_no_product_adds_is_refused_at_once(kind, weight, bias):
    if kind is Sparse24WeightOnlyLinear and weight == torch.float32:
        return
    layer = kind.from_linear(dense_layer(dtype=weight))
    before, x = state(layer), randn(5, 64, dtype=weight)
    wrong = nn.Parameter(torch.zeros(96, dtype=bias, device=DEVICE), requires_grad=False)
    with pytest.raises(InvalidProblemError, match=f"bias: expected .*torch.float32, got {bias}"):
        layer.bias = wrong
    with pytest.raises(RuntimeError, match=f"bias: expected .*torch.float32, got {bias}"):
        layer.load_state_dict({**before, "bias": wrong}, assign=True)
    assert state(layer).keys() == before.keys()
    assert layer(x).dtype == weight
    layer.load_state_dict({**before, "bias": wrong})  # the layer's own bias takes the values
    layer.bias = nn.Parameter(wrong.float(), requires_grad=False)
    assert layer(x).dtype == weight


def test_a_dense_layer_whose_bias_no_product_adds_stays_dense():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].bias = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    report = to_sparse24(model)
    assert type(model[0]) is nn.Linear
    assert "bias: expected torch.float32, got torch.float16" in str(report.left_dense)


@pytest.mark.gpu
def test_on_a_gpu_the_weight_is_held_packed_alone():
    layer = Sparse24Linear.from_linear(dense_layer(dtype=torch.bfloat16).cpu())
    before = state(layer)
    layer.to("cuda")
    assert layer.values is None
    assert layer.packed is not None
    after = layer.state_dict()
    assert all(
        torch.equal(after[name].cpu().view(torch.int16), t.view(torch.int16)) for name, t in before.items()
    )
    assert torch.equal(layer.half().cpu().state_dict()["weight.values24"], before["weight.values24"].half())


def test_a_fresh_layer_is_zero():
    layer = Sparse24Linear(64, 96, device=DEVICE)
    assert not layer(randn(5, 64)).any()


# Training -------------------------------------------------------------------------------------------


def test_kept_values_are_trained_and_pruned_cells_stay_zero():
    torch.manual_seed(0)
    layer = Sparse24Linear.from_linear(dense_layer(), trainable=True)
    zeros = layer.dense_weight() == 0
    target, x = randn(32, 96, seed=8), randn(32, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert not layer.dense_weight()[zeros].any()


def test_a_frozen_layer_lets_gradients_through():
    layer = Sparse24Linear.from_linear(dense_layer())
    x = randn(5, 64).requires_grad_()
    layer(x).sum().backward()
    close(x.grad, layer.dense_weight().double().sum(0).expand(5, 64))
    assert not any(p.requires_grad for p in layer.parameters())


# Words ----------------------------------------------------------------------------------------------


def test_the_repr_names_kernel_bytes_and_guarantee():
    text = repr(Sparse24Linear.from_linear(dense_layer(60), require={"batch_invariant": True}))
    for part in ("in_features=60", "padded_to=64", "bytes=13824", "kernel=host_strict", "batch_invariant"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tanh"}, "activation: expected one of"),
        ({"out_dtype": torch.float16}, "out_dtype: expected torch.float32"),
        ({"require": {"fast": True}}, "fast"),
        ({"preference": 3}, "preference: expected PlanPreference"),
        ({"method": "magnitude"}, "method: expected one of"),
        ({"rule": "greedy_value"}, "rule: expected optimal, the default, for method prune, got greedy_value"),
        ({"method": "tiles", "rule": "best"}, "rule: expected one of .*optimal, got 'best'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(InvalidProblemError, match=message):
        Sparse24Linear.from_linear(dense_layer(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sparse24Linear(-8, 8), "in_features: expected an integer from 0, got -8"),
        (lambda: Sparse24Linear(8, 8.5), "out_features: expected an integer from 0, got 8.5"),
        (lambda: Sparse24Experts(True, 64, 64), "num_experts: expected an integer from 1, got True"),
        (lambda: Sparse24Experts(0, 64, 64), "num_experts: expected an integer from 1, got 0"),
        (lambda: Sparse24Experts(2, None, 64), "hidden_features: expected an integer from 0, got None"),
        (lambda: Sparse24Experts(2, 64, "x"), "features: expected an integer from 0, got 'x'"),
        (
            lambda: Sparse24Linear.from_linear(nn.Conv1d(8, 8, 1)),
            "linear: expected an nn.Linear, got a Conv1d",
        ),
        (
            lambda: Sparse24Linear.from_linear(torch.zeros(8, 8)),
            "linear: expected an nn.Linear, got a Tensor",
        ),
    ],
)
def test_what_no_layer_can_be_is_refused(make, message):
    with pytest.raises(InvalidProblemError, match=message):
        make()


@pytest.mark.parametrize("of", [np.int64, torch.tensor], ids=["NumPy", "PyTorch"])
def test_sizes_may_be_integers_of_other_libraries(of):
    layer, experts = Sparse24Linear(of(64), of(96)), Sparse24Experts(of(2), of(64), of(64))
    sizes = layer.in_features, layer.out_features, experts.num_experts, experts.down_proj.out_features
    assert (sizes, {*map(type, sizes)}) == ((64, 96, 2, 128), {int})
    assert layer.plan(3).descriptor.k == 64


def test_it_compiles_in_one_graph():
    torch._dynamo.reset()
    layer = Sparse24Linear.from_linear(dense_layer(60))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 3, 17):
        x = randn(n, 60)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@every_kind
@pytest.mark.parametrize("learns", [False, True])
def test_a_traced_layer_gives_the_same_bits_for_other_batches(kind, learns):
    layer, file = filled(kind).to(DEVICE).requires_grad_(learns and kind == "plain"), io.BytesIO()
    x = randn(3, 64, dtype=torch.bfloat16)
    torch.jit.save(torch.jit.trace(nn.Sequential(layer), x[:2]), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), layer(x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@every_kind
def test_scripting_is_refused_with_what_to_use_instead(kind):
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script: .* use torch\.jit\.trace or"):
        torch.jit.script(nn.Sequential(filled(kind)))


@pytest.mark.parametrize(
    "x", [None, [1.0], np.ones((2, 16), np.float32)], ids=["nothing", "a list", "NumPy's"]
)
@pytest.mark.parametrize("kind", [Sparse24Linear, Sparse24QuantizedLinear, Sparse24WeightOnlyLinear])
def test_an_x_that_is_no_tensor_is_refused(kind, x):
    layer = kind(16, 16, device=DEVICE)
    with pytest.raises(InvalidProblemError, match=f"x: expected a tensor, got {type(x).__name__}"):
        layer(x)


PLACES = {
    "Sparse24Linear": lambda _, device: Sparse24Linear(16, 16, device=device),
    "Sparse24QuantizedLinear": lambda _, device: Sparse24QuantizedLinear(16, 16, device=device),
    "Sparse24WeightOnlyLinear": lambda _, device: Sparse24WeightOnlyLinear(16, 16, device=device),
    "Sparse24Experts": lambda _, device: Sparse24Experts(2, 64, 64, device=device),
    "from_pretrained": lambda folder, device: from_pretrained(folder, device=device),
    "calibrate": lambda _, device: calibrate(
        nn.Sequential(nn.ModuleList([nn.Linear(16, 16)])), [torch.ones(1, 16)], device=device
    ),
    "Layout": lambda _, device: blocksparse.Layout(torch.ones(1, 2, 2, dtype=torch.bool), 16, device=device),
    "tables_on": lambda _, device: blocksparse.Layout(torch.ones(1, 2, 2, dtype=torch.bool), 16).tables_on(
        device
    ),
    "blocks": lambda _, device: blocksparse.Linear(
        32, 32, 16, torch.ones(1, 2, 2, dtype=torch.bool), device=device
    ),
    "blocks of a layout": lambda _, device: blocksparse.Linear(
        32, 32, 16, blocksparse.Layout(torch.ones(1, 2, 2, dtype=torch.bool), 16), device=device
    ),
    "attention": lambda _, device: blocksparse.MultiheadAttention(
        32, 2, blocksparse.SparsityInfo("dense", 16), device=device
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("device", ["nope", "cuda:99", "cpu:x", 1.5, []], ids=str)
def test_a_device_that_pytorch_does_not_find_is_named(tmp_path, place, device):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        InvalidProblemError, match=re.escape(f"such as cpu or cuda:0, got {device!r}")
    ) as found:
        PLACES[place](tmp_path, device)
    assert str(found.value).startswith("device: expected one that PyTorch finds")
