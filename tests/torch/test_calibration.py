"""``calibrate`` prunes block after block, for the outputs of pruned ones, and refuses what it can't prune."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError
from sparse24_plans.torch import Sparse24Linear, calibrate, calibrated_block, to_sparse24
from sparse24_plans.weights.calibrated import METHODS, output_error, pruned_for

from .calibration_cases import MODELS, Twice, inputs, stack, token_batches, transformer, weight_of, weights
from .saved_models import same_state


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_blocks_becomes_24_and_loads_as_sparse(name):
    model = transformer(name)
    before = weights(model)
    report = calibrate(model, token_batches())
    assert report.layers
    for layer in report.layers:
        weight = weight_of(model, layer.name)
        assert weight.shape == (layer.m, layer.k)
        assert ((weight.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
        assert 0 < layer.output_error < 1
    pruned = {name for layer in report.layers for name in (layer.name, f"{layer.name}.weight")}
    assert all(
        torch.equal(before[key], value) for key, value in model.state_dict().items() if key not in pruned
    )
    dense = model(**token_batches(1)[0])[0]
    swapped = to_sparse24(model, recipe="compress")
    assert {layer.name for layer in swapped.layers} == {layer.name for layer in report.layers}
    assert torch.allclose(model(**token_batches(1)[0])[0], dense, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_blocks_are_pruned_for_outputs_of_earlier_pruned_blocks(method):
    model, batches = stack(), inputs()
    expected = copy.deepcopy(model)
    hidden, errors = batches, []
    for layer in expected:
        if isinstance(layer, nn.Linear):
            moment = torch.zeros(32, 32)
            for x in hidden:
                moment.addmm_(x.T, x)
            pruned = pruned_for(layer.weight.detach(), moment, method)
            errors.append(output_error(layer.weight.detach(), pruned, moment))
            layer.weight.data = pruned
        hidden = [layer(x).detach() for x in hidden]
    report = calibrate(model, batches, method=method)
    assert [layer.output_error for layer in report.layers] == pytest.approx(errors)
    assert same_state(model, expected)


def test_calibration_costs_the_models_output_less():
    errors = {}
    for method in METHODS:
        model, batches = stack(width=64), inputs(width=64, count=20)
        fresh = torch.cat(inputs(width=64, count=20)) + 0.1
        dense = model(fresh).detach()
        calibrate(model, batches, method=method)
        errors[method] = float((model(fresh).detach() - dense).norm() / dense.norm())
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pytorchs_default_dtype_changes_nothing(dtype, monkeypatch):
    """Code that builds models in 16 bits often sets it, and leaves it so."""
    linear = torch.nn.Linear(32, 64, dtype=torch.float32)
    batches = [torch.randn(4, 32) for _ in range(3)]
    found = []
    for default in (torch.float32, dtype):
        model = torch.nn.Sequential(copy.deepcopy(linear), torch.nn.ReLU())
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            calibrate(model, batches)
        finally:
            torch.set_default_dtype(before)
        found.append(model[0].weight)
    assert torch.equal(*found)


def test_layers_with_one_input_count_as_one_group(monkeypatch):
    seen = []
    together = calibrated_block.pruned_together

    def noted(weights, moment, method):
        seen.append(len(weights))
        return together(weights, moment, method)

    monkeypatch.setattr(calibrated_block, "pruned_together", noted)
    calibrate(transformer("LlamaForCausalLM"), token_batches())
    assert seen == 3 * [3, 1, 2, 1]  # q, k and v; o; gate and up; down


def test_padding_does_not_count():
    padded = transformer("BertModel")
    mask = torch.ones(4, 24, dtype=torch.int64)
    ids = token_batches(1)[0]["input_ids"]
    mask[:, 16:] = 0
    report = calibrate(padded, [{"input_ids": ids, "attention_mask": mask}])
    plain = calibrate(transformer("BertModel"), [{"input_ids": ids[:, :16]}])
    first = slice(0, 3)  # the mask changes sums of later layers' inputs in their last bits
    for ours, theirs in zip(report.layers[first], plain.layers[first], strict=True):
        assert ours.output_error == pytest.approx(theirs.output_error, rel=1e-4)


def test_batches_may_be_tensors_tuples_or_mappings():
    found = []
    for wrap in (lambda x: x, lambda x: (x,), lambda x: {"input": x}):
        model = stack()
        calibrate(model, [wrap(x) for x in inputs()])
        found.append(model)
    assert same_state(found[0], found[1])
    assert same_state(found[0], found[2])


def test_blocks_may_change_their_inputs_in_place():
    found = []
    for inplace in (False, True):
        model = stack()
        model[1] = nn.SiLU(inplace=inplace)
        model[3] = nn.Sequential(nn.SiLU(inplace=inplace), nn.Linear(32, 32))
        torch.manual_seed(7)
        nn.init.normal_(model[3][1].weight)
        nn.init.zeros_(model[3][1].bias)
        calibrate(nn.Sequential(nn.SiLU(inplace=inplace), *model), inputs())
        found.append(list(weights(model).values()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_the_model_is_left_in_its_modes_and_without_hooks():
    model = transformer("BertModel").train()
    model.encoder.layer[1].eval()
    modes = [module.training for module in model.modules()]
    calibrate(model, token_batches(), device="cpu")
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


class ByName(nn.Module):
    """A layer that is called with a keyword, or with its only argument."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.layer, self.named = nn.Linear(32, 32), named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(input=x) if self.named else self.layer(x)


def test_layers_may_be_called_with_keywords():
    found = []
    for named in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(ByName(named), ByName(named))
        report = calibrate(model, inputs())
        found.append((report, model))
    assert found[0][0] == found[1][0]
    assert same_state(found[0][1], found[1][1])


def test_a_blocks_own_forward_is_used_and_stays():
    """A compiled forward, for one, is an attribute of the block."""
    plain, model = (nn.Sequential(stack(), stack(seed=1)) for _ in range(2))
    forward, ran = model[0].forward, []
    own = model[0].forward = lambda x: ran.append(len(x)) or forward(x)
    for one in (plain, model):
        calibrate(one, inputs(count=2))
    assert vars(model[0])["forward"] is own
    assert ran
    assert same_state(plain, model)


def test_patterns_and_places_choose_layers():
    report = calibrate(transformer("BertModel"), token_batches(), exclude=["*.query", "*layer.0*"])
    names = {layer.name for layer in report.layers}
    assert len(names) == 2 * 5
    assert report.left_dense["encoder.layer.1.attention.self.query"].startswith("excluded by pattern")
    assert report.left_dense["pooler.dense"] == "it is outside of the blocks encoder.layer.*"
    assert str(report).splitlines()[-1].startswith("10 layers pruned by sparsegpt, output error at most ")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_quantized_model_holds_what_its_report_has(method, dtype, tmp_path):
    options = {"method": method, "weights": "s4", "group": 32, "resume": tmp_path}
    model, again = stack().to(dtype), stack().to(dtype)
    batches = [one.to(dtype) for one in inputs()]
    report, resumed = calibrate(model, batches, **options), calibrate(again, batches, **options)
    element = "f16" if dtype == torch.float16 else "bf16"
    for layer, read in zip(report.layers, resumed.layers, strict=True):
        assert (layer.weight.element, layer.weight.quantization) == (element, ("s4", 32, element))
        held = model.get_submodule(layer.name).weight.detach()
        assert torch.equal(held.float(), torch.from_numpy(layer.weight.decompress().astype("float32")))
        for there, here in zip(read.weight.views, layer.weight.views, strict=True):
            assert (there.bits() == here.bits()).all()
    assert same_state(model, again)


def test_quantized_layers_pass_on_errors_of_their_outputs():
    """Each block is calibrated for the outputs of the quantized blocks before it."""
    model = stack()
    report = calibrate(model, inputs(), weights="s4")
    hidden = inputs()
    for layer in report.layers:
        module, before = model.get_submodule(layer.name), stack().get_submodule(layer.name)
        x = torch.cat(hidden)
        lost = x @ (before.weight - module.weight).T
        assert layer.output_error == pytest.approx(
            float(lost.norm() / (x @ before.weight.T).norm()), rel=1e-3
        )
        hidden = [nn.functional.gelu(module(one)) for one in hidden]


def test_layers_of_widths_not_multiples_of_8_stay_dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 16))
    report = calibrate(model, inputs(16), weights="s4")
    assert report.left_dense == {"1": "K=12 is not a multiple of 8"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 32}, "group: expected None without weights, got 32"),
        ({"weights": "s5"}, "weights: expected one of"),
        ({"weights": "s4", "scale_rule": "best"}, "scale_rule: expected largest or least_squares"),
    ],
)
def test_wrong_quantization_is_refused_by_name(options, message):
    with pytest.raises(InvalidProblemError, match=message):
        calibrate(stack(), inputs(), **options)


def holed(value: float) -> nn.Module:
    model = stack()
    model[2].weight.data[3, 5] = value
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("model", {}, "model: expected a module, got str"),
        (nn.Linear(8, 8), {}, "model: expected linear layers in an nn.ModuleList or nn.Sequential, got none"),
        (nn.Sequential(nn.ReLU()), {}, "model: expected linear layers in an nn.ModuleList"),
        (
            nn.Sequential(nn.Linear(30, 8)),
            {},
            "expected a layer to prune, got none: .*K=30 is not a multiple",
        ),
        (stack(), {"method": "best"}, "method: expected one of magnitude, wanda, sparsegpt, got 'best'"),
        (stack(), {"method": None}, "method: expected one of"),
        (stack(), {"batches": []}, r"batches: expected a list of inputs, got \[\]"),
        (stack(), {"batches": torch.ones(4, 32)}, "batches: expected a list of inputs"),
        (stack(), {"batches": "text"}, "batches: expected a list of inputs, got 'text'"),
        (stack(), {"batches": [torch.ones(0, 32)]}, "batches: expected tokens, got none in any of them"),
        (stack(), {"include": "*"}, "include: expected a sequence of patterns"),
        (stack(), {"exclude": ["*typo*"]}, r"exclude: pattern '\*typo\*' matches no linear layer"),
        (stack(), {"exclude": ["*"]}, "model: expected a layer to prune, got none"),
        (stack(), {"resume": 5}, "resume: expected a path, got 5"),
        (
            stack(),
            {"batches": [torch.full((4, 32), torch.inf)]},
            "expected finite inputs, got a moment with NaN",
        ),
        (stack(), {"batches": [torch.full((4, 32), torch.nan)]}, "0: expected finite inputs"),
        (holed(torch.nan), {}, "2: expected a finite weight in memory"),
        (holed(torch.inf), {}, "2: expected a finite weight in memory"),
        (stack().to("meta"), {}, "0: expected a finite weight in memory"),
        (Twice([0, 1, 1, 2]), {}, "expected blocks that pass a tensor on, called once each, in order"),
        (Twice([0, 2, 1]), {}, "expected blocks that pass a tensor on, called once each, in order"),
        (Twice([0, 1]), {}, "model: expected a model that calls each of its blocks"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_and_stays(model, options, message):
    before = weights(model) if isinstance(model, nn.Module) else {}
    with pytest.raises(InvalidProblemError, match=message):
        calibrate(**{"model": model, "batches": inputs(), **options})
    if isinstance(model, nn.Module) and not any(tensor.is_meta for tensor in before.values()):
        assert all(
            torch.equal(before[name].nan_to_num(), one.nan_to_num()) for name, one in weights(model).items()
        )
        assert not any("forward" in vars(module) for module in model.modules())


def test_inputs_that_are_always_zero_are_no_error():
    model = stack()
    report = calibrate(model, [torch.zeros(8, 32)])
    assert report.layers[0].output_error == 0
    assert to_sparse24(model, recipe="compress").least_kept_energy == 1
    assert isinstance(model[0], Sparse24Linear)


def test_a_progress_bar_is_shown_where_it_is_asked_for(capsys, tmp_path: Path):
    calibrate(stack(), inputs(), progress=True)
    assert "100%" in capsys.readouterr().err
    calibrate(stack(), inputs(), progress=False)
    assert capsys.readouterr() == ("", "")
