"""``calibrate`` prunes stacked experts, each for the tokens that are sent to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError
from sparse24_plans.torch import CalibrationReport, Sparse24Experts, calibrate, calibrated_block, to_sparse24
from sparse24_plans.weights.calibrated import METHODS, pruned_for

from .calibration_cases import token_batches, transformer, weight_of, weights
from .saved_models import same_state
from .test_calibration_passes import never_left

MODELS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
STACKS = ("gate_up_proj", "down_proj")


def experts_in(report: CalibrationReport) -> dict[str, calibrated_block.CalibratedLayer]:
    return {layer.name: layer for layer in report.layers if ".experts." in layer.name}


class Experts(nn.Module):
    """Return what transformers' experts compute, by the parameters that they have."""

    def __init__(self, experts: int = 4, hidden: int = 64, width: int = 96) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden) / 8)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width) / 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("tkmh,th->tkm", self.gate_up_proj[index], x).chunk(2, -1)
        each = torch.einsum("tkhm,tkm->tkh", self.down_proj[index], self.act_fn(gate) * up)
        return (each * factors[..., None]).sum(1)


class Block(nn.Module):
    """Experts beside a layer with the same input. Tokens go to the first ``used`` experts."""

    def __init__(self, used: int = 3) -> None:
        super().__init__()
        self.shared, self.experts, self.used = nn.Linear(64, 64, bias=False), Experts(), used

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.flatten(0, -2)
        index = torch.stack([torch.arange(len(rows)) % self.used, torch.zeros(len(rows)).long()], 1)
        index[:, 1] = (index[:, 0] + 1) % self.used
        routed = self.experts(rows, index, torch.full(index.shape, 0.5))
        return self.shared(hidden_states) + routed.view(hidden_states.shape)


def blocks(used: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(used), Block(used))


def hidden_states(count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(40, 64) @ torch.randn(64, 64) / 8 for _ in range(count)]


@pytest.mark.parametrize("method", METHODS)
def test_each_matrix_is_pruned_for_the_rows_that_reach_it(method):
    model, dense = blocks(), blocks()
    report = experts_in(calibrate(model, hidden_states(), method=method))
    ours, theirs = model[0].experts, dense[0].experts
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in STACKS}
    for expert in range(3):
        rows = torch.cat([x[(torch.arange(40) - expert) % 3 != 1] for x in hidden_states()])
        for name in STACKS:
            was, now = getattr(theirs, name)[expert].detach(), getattr(ours, name)[expert].detach()
            wanted = pruned_for(was, rows.T @ rows, method)
            torch.testing.assert_close(now, wanted, rtol=1e-3, atol=1e-4)
            errors[name].append(torch.stack([(rows @ (was - now).T).norm(), (rows @ was.T).norm()]))
            gate, up = (rows @ now.T).chunk(2, -1)
            rows = nn.functional.silu(gate) * up if name == "gate_up_proj" else rows
    for name in STACKS:
        lost, whole = torch.stack(errors[name]).square().sum(0).sqrt()
        assert report[f"0.experts.{name}"].output_error == pytest.approx(float(lost / whole), rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_experts_without_tokens_are_pruned_by_magnitude_and_named(method):
    model, dense = blocks(used=2), blocks(used=2)
    whole = calibrate(model, hidden_states(), method=method)
    for name, layer in experts_in(whole).items():
        assert layer.experts_without_tokens == (2, 3)
        assert f"{layer}".endswith("2 experts had no tokens and are pruned by magnitude")
        assert str(layer) in str(whole).splitlines()
        for expert in (2, 3):
            was = dense.get_parameter(name)[expert].detach()
            wanted = pruned_for(was, torch.zeros(was.shape[1], was.shape[1]), "magnitude")
            assert torch.equal(model.get_parameter(name)[expert], wanted)


def test_positions_that_a_mask_excludes_reach_no_expert():
    batch = token_batches(1)[0]["input_ids"]
    mask = torch.ones_like(batch)
    mask[:, 16:] = 0
    found = []
    for given in ({"input_ids": batch, "attention_mask": mask}, {"input_ids": batch[:, :16]}):
        found.append(experts_in(calibrate(transformer(MODELS[0]), [given], method="wanda")))
    first = "model.layers.0.mlp.experts.gate_up_proj"
    assert found[0][first].output_error == pytest.approx(found[1][first].output_error, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"weights": "s4", "group": 32}], ids=["dense", "s4"])
def test_a_resumed_run_gives_the_bits_of_a_whole_one(name, options, tmp_path):
    batches = token_batches(2)
    options |= {"method": "wanda"}
    whole, first, resumed = (transformer(name) for _ in range(3))
    expected = calibrate(whole, batches, **options)
    calibrate(first, batches, **options, resume=tmp_path)
    (tmp_path / "block-0002.safetensors").unlink()
    report = calibrate(resumed, batches, **options, resume=tmp_path)
    assert same_state(resumed, whole)
    assert len(experts_in(report)) == 2 * 3
    for ours, theirs in zip(report.layers, expected.layers, strict=True):
        assert ours.output_error == theirs.output_error
        assert ours.experts_without_tokens == theirs.experts_without_tokens
        assert (ours.weight is None) == (not options.get("weights"))
        if ours.weight is not None:
            held = weight_of(resumed, ours.name).detach()
            assert torch.equal(held, torch.from_numpy(ours.weight.decompress().astype("float32")))
            for here, there in zip(ours.weight.views, theirs.weight.views, strict=True):
                assert (here.bits() == there.bits()).all()


def test_experts_without_tokens_are_remembered_in_the_folder(tmp_path):
    found = [calibrate(blocks(used=2), hidden_states(), resume=tmp_path) for _ in range(2)]
    assert found[0] == found[1]
    assert all(layer.experts_without_tokens for layer in experts_in(found[1]).values())


@pytest.mark.parametrize("name", MODELS)
def test_calls_left_early_give_the_bits_of_complete_calls(name, monkeypatch):
    model, whole = transformer(name), transformer(name)
    report = calibrate(model, token_batches(), method="wanda")
    never_left(monkeypatch)
    assert calibrate(whole, token_batches(), method="wanda") == report
    assert same_state(model, whole)


@pytest.mark.parametrize("name", MODELS)
def test_calibration_costs_the_models_output_less_than_magnitude(name):
    (fresh,) = token_batches(1, seed=7)
    errors = {}
    for method in ("magnitude", "sparsegpt"):
        model = transformer(name)
        dense = model(**fresh)[0].detach()
        calibrate(model, token_batches(6), method=method)
        errors[method] = float((model(**fresh)[0].detach() - dense).norm() / dense.norm())
        swapped = to_sparse24(model, recipe="compress")
        assert all(layer.was_sparse for layer in swapped.layers)
        assert sum(isinstance(one, Sparse24Experts) for one in model.modules()) == 3
    assert errors["sparsegpt"] < 0.8 * errors["magnitude"]


def test_a_pattern_leaves_both_stacks_dense():
    model = transformer(MODELS[0])
    before = weights(model)
    report = calibrate(model, token_batches(), method="wanda", exclude=["*.layers.1.mlp.experts"])
    left = [f"model.layers.1.mlp.experts.{own}" for own in STACKS]
    assert all(report.left_dense[name].startswith("excluded by pattern") for name in left)
    assert all(torch.equal(before[name], model.get_parameter(name)) for name in left)
    assert len(experts_in(report)) == 2 * 2


def test_experts_with_weights_that_are_not_finite_are_refused():
    model = blocks()
    model[1].experts = Experts(6)
    model[1].experts.down_proj.data[5, 3, 5] = torch.nan
    with pytest.raises(InvalidProblemError, match=r"1\.experts: expected a finite weight in memory"):
        calibrate(model, hidden_states())


def test_tokens_that_are_not_finite_are_refused():
    with pytest.raises(InvalidProblemError, match="expected finite inputs, got a moment with NaN"):
        calibrate(blocks(), [torch.full((8, 64), torch.inf)], exclude=["*shared"])
