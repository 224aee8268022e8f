"""``to_sparse24``: which layers of a model are swapped, and what the report says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparse24_plans import FormatError, InvalidProblemError, UnsupportedError
from sparse24_plans.torch import Sparse24Experts, Sparse24Linear, Sparse24Recipe, to_sparse24

from .cases import DEVICE, pruned, randn


class Hooked(nn.Linear):
    """A class of its own: what it does beside, nobody knows."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 64)
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        self.tied = nn.Linear(64, 32, bias=False)
        self.tied.weight = self.embed.weight
        self.own = Hooked(64, 8)
        self.wide = nn.Linear(64, 8, dtype=torch.float64)
        self.heard = nn.Linear(64, 8)
        self.heard.register_forward_hook(lambda *_: None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tied(self.body(self.embed(tokens)))


def model() -> Model:
    return Model().to(DEVICE)


def test_linear_layers_are_swapped_and_others_skipped_with_a_reason():
    m = model()
    m.eval()
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["body.0", "body.2"]
    assert all(type(m.get_submodule(layer.name)) is Sparse24Linear for layer in report.layers)
    assert not m.body[0].training
    reasons = {
        "tied": "shared",
        "own": "Hooked",
        "wide": "float64",
        "heard": "hooks",
        "embed": "embedding table",
    }
    assert report.skipped.keys() == reasons.keys()
    assert all(word in report.skipped[name] for name, word in reasons.items())
    assert m(torch.arange(5, device=DEVICE)).shape == (5, 32)


def test_the_report_counts_energy_and_bytes():
    m = model()
    weight = m.body[0].weight.detach().double()
    report = to_sparse24(m, include=["body.0"])
    (layer,) = report.layers
    kept = pruned(weight.float()).double().square().sum() / weight.square().sum()
    assert layer.kept_energy == pytest.approx(kept.item(), rel=1e-6)
    assert (layer.dense_bytes, layer.sparse_bytes) == (96 * 64 * 4, 96 * 32 * 4 + 96 * 8 * 2)
    assert (layer.m, layer.k, layer.padded_k) == (96, 64, 64)
    assert report.least_kept_energy == layer.kept_energy
    text = str(report)
    assert "body.0: [96, 64] float32, kept" in text
    assert "not included: body.2" in text
    assert "24576 -> 13824 bytes of weights; 37.1% of the model's bytes is 2:4" in text
    total = sum(p.nbytes for p in model().parameters())
    assert report.model_bytes == total
    assert report.sparse_share == pytest.approx(24576 / total)
    biases = sum(p.nbytes for p in model().parameters() if p.dim() == 1)
    assert sum(one.nbytes for one in report.left_dense) == total - 24576 - biases


def test_patterns_choose_and_recipes_go_by_pattern():
    m = model()
    recipes = {"body.0": Sparse24Recipe("tiles", trainable=True), "body.*": "prune"}
    to_sparse24(m, include=["body*"], exclude=["*.7", "*.2"][1:], recipe=recipes)
    assert type(m.body[2]) is nn.Linear
    assert m.body[0].values.requires_grad
    other = model()
    to_sparse24(other, recipe={"body.2": "prune"})
    assert type(other.body[0]) is nn.Linear
    assert type(other.body[2]) is Sparse24Linear


def test_scores_are_asked_for_by_name():
    m = model()
    weight, scores = m.body[0].weight.detach().clone(), randn(96, 64, seed=5)
    to_sparse24(m, include=["body.0"], recipe=Sparse24Recipe(scores=lambda name, linear: scores))
    assert torch.equal(m.body[0].dense_weight(), torch.ops.sparse24.prune(weight, scores))


@pytest.mark.parametrize(
    ("found", "got"),
    [
        (lambda weight: weight.numpy(), "ndarray"),
        (lambda weight: 3, "int"),
        (lambda weight: weight[:8], r"torch.float32 \[8, 64\]"),
        (lambda weight: weight.double(), r"torch.float64 \[96, 64\]"),
    ],
    ids=["numpy", "int", "rows", "dtype"],
)
def test_wrong_scores_are_refused_with_the_layers_name(found, got):
    recipe = Sparse24Recipe(scores=lambda name, linear: found(linear.weight.detach().cpu()))
    message = rf"scores: expected None or a tensor \[96, 64\] of one of .* for body.0, got {got}"
    with pytest.raises(InvalidProblemError, match=message):
        to_sparse24(model(), recipe=recipe)


def test_compress_takes_what_is_2_4_and_skips_the_rest():
    m = model()
    m.body[0].weight.data = pruned(m.body[0].weight.data)
    report = to_sparse24(m, recipe="compress")
    assert [layer.name for layer in report.layers] == ["body.0"]
    assert report.layers[0].kept_energy == 1
    assert "row" in report.skipped["body.2"]


def test_a_2_4_weight_keeps_its_cells_whatever_its_scores():
    m = model()
    sparse = pruned(m.body[0].weight.data)
    m.body[0].weight.data = sparse.clone()
    asked = []

    def backwards(name: str, linear: nn.Linear) -> torch.Tensor:
        asked.append(name)
        return -linear.weight.abs()

    first, second = to_sparse24(m, recipe=Sparse24Recipe(scores=backwards)).layers
    assert asked == ["body.2"]
    assert (first.was_sparse, first.kept_energy) == (True, 1.0)
    assert not second.was_sparse
    assert second.kept_energy < 0.5
    assert torch.equal(m.body[0].dense_weight(), sparse)


def test_a_swapped_model_is_counted_and_not_swapped_again():
    m = model()
    before = to_sparse24(m)
    body = m.body[0]
    again = to_sparse24(m)
    assert again.layers == ()
    assert m.body[0] is body
    assert again.earlier == {layer.name: layer.dense_bytes for layer in before.layers}
    assert (again.sparse_share, again.model_bytes) == (before.sparse_share, before.model_bytes)
    assert "2 layers were swapped before" in str(again)


def twice() -> nn.Sequential:
    """One layer under two names, in a container that has two names as well."""
    layer = nn.Linear(64, 64)
    body = nn.Sequential(layer, nn.ReLU(), layer)
    return nn.Sequential(body, body).to(DEVICE)


def test_layer_under_several_names_is_replaced_under_all_of_them():
    m = twice()
    dense = m[0][0].weight.detach().clone()
    report = to_sparse24(m)
    assert m[0][0] is m[0][2] is m[1][2]
    assert m[0] is m[1]
    assert torch.equal(m[0][2].dense_weight(), pruned(dense))
    assert [layer.name for layer in report.layers] == ["0.0"]
    assert report.skipped == {}
    assert report.sparse_share == pytest.approx(1 - 64 * 4 / report.model_bytes)


@pytest.mark.parametrize("name", ["0.0", "0.2", "1.2", "1.0.weight"])
def test_patterns_may_use_any_name_of_a_layer(name):
    m = twice()
    assert [layer.name for layer in to_sparse24(m, include=[name]).layers] == ["0.0"]
    assert type(m[0][0]) is type(m[0][2]) is Sparse24Linear
    assert to_sparse24(m := twice(), exclude=[name]).skipped == {"0.0": f"excluded by pattern {name!r}"}
    assert type(m[0][0]) is type(m[0][2]) is nn.Linear
    place = name.removesuffix(".weight")
    assert len(to_sparse24(twice(), recipe={place: Sparse24Recipe("tiles")}).layers) == 1


HOOKS = {
    "forward": nn.Module.register_forward_hook,
    "forward before": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward before": nn.Module.register_full_backward_pre_hook,
    "state": nn.Module.register_state_dict_post_hook,
    "state before": nn.Module.register_state_dict_pre_hook,
    "load": nn.Module.register_load_state_dict_post_hook,
    "load before": nn.Module.register_load_state_dict_pre_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_layers_with_any_kind_of_hook_are_skipped(kind):
    m = model()
    HOOKS[kind](m.body[0], lambda *_: None)
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["body.2"]
    assert report.skipped["body.0"] == "it has hooks, which a swap would lose"
    assert type(m.body[0]) is nn.Linear


HELD = {
    "buffer": lambda layer: layer.register_buffer("mask", torch.ones(1)),
    "module": lambda layer: layer.add_module("mask", nn.Linear(8, 8)),
    "parameter": lambda layer: layer.register_parameter("mask", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("kind", HELD)
def test_layers_that_hold_more_than_a_layer_does_are_skipped(kind):
    m = model()
    HELD[kind](m.body[0])
    report = to_sparse24(m, exclude=["*.mask"] if kind == "module" else [])
    assert [layer.name for layer in report.layers] == ["body.2"]
    assert report.skipped["body.0"] == "it holds mask, which a swap would lose"


@pytest.mark.parametrize("trainable", [False, True])
def test_a_bias_of_two_layers_is_not_trained_as_two(trainable):
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    m[1].bias = m[0].bias
    report = to_sparse24(m, recipe=Sparse24Recipe(trainable=trainable))
    shared = "its bias is shared with another module"
    assert report.skipped == (dict.fromkeys(("0", "1"), shared) if trainable else {})


def test_layers_without_sizes_are_refused():
    m = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(InvalidProblemError, match=r"model: expected sizes .* 1\.weight of a LazyLinear"):
        to_sparse24(m)
    assert type(m[0]) is nn.Linear
    m(torch.ones(1, 64))
    assert len(to_sparse24(m).layers) == 2


def test_out_dtype_that_layer_cannot_give_leaves_it_dense():
    halves = Sparse24Recipe(out_dtype=torch.float16)

    def mixed() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64, dtype=torch.float16), nn.Linear(64, 64)).to(DEVICE)

    m, words = mixed(), "out_dtype: expected torch.float32, got torch.float16"
    report = to_sparse24(m, recipe=halves)
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.skipped == {"1": words}
    m = mixed()
    with pytest.raises(InvalidProblemError, match=f"1: expected a layer that can be swapped: {words}"):
        to_sparse24(m, include=["*"], recipe=halves)
    assert type(m[0]) is nn.Linear


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"trainable": 1}, InvalidProblemError, "trainable: expected"),
        ({"trainable": True, "stored": "s4"}, UnsupportedError, "trainable: expected False"),
        ({"trainable": True, "weight_dtype": torch.int8}, UnsupportedError, "trainable: expected False"),
        ({"out_dtype": torch.int8}, InvalidProblemError, "out_dtype: expected one of torch.float32"),
        ({"out_dtype": "float16"}, InvalidProblemError, "out_dtype: expected one of torch.float32"),
        ({"rule": "best"}, InvalidProblemError, "rule: expected one of .*optimal, got 'best'"),
        (
            {"rule": "greedy_value"},
            InvalidProblemError,
            "rule: expected optimal, .* for method prune, got greedy_value: method tiles alone",
        ),
        ({"require": {"fast": True}}, InvalidProblemError, "require: expected fields of"),
        ({"preference": 3}, InvalidProblemError, "preference: expected PlanPreference or a mapping"),
        ({"group": 32}, InvalidProblemError, "group: expected 128, the default, without stored, got 32"),
        (
            {"group": "32", "weight_dtype": torch.int8},
            InvalidProblemError,
            "group: expected 128, .* got '32'",
        ),
        (
            {"method": "tiles", "scores": lambda name, linear: None},
            InvalidProblemError,
            "scores: expected None for tiles, which are pruned by rule, got a function",
        ),
    ],
)
def test_recipes_that_no_layer_takes_are_refused_at_once(fields, error, message):
    with pytest.raises(error, match=message):
        Sparse24Recipe(**fields)


class Experts(nn.Module):
    """Gated experts as transformers holds them: three of them, of 64 features and a width of 32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("gate_up_proj", (3, 64, 64)), ("down_proj", (3, 64, 32))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) / 8))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for place in range(top_k_index.shape[1]):
            index = top_k_index[:, place]
            gate, up = (self.gate_up_proj[index] @ hidden_states[..., None])[..., 0].chunk(2, -1)
            each = (self.down_proj[index] @ (self.act_fn(gate) * up)[..., None])[..., 0]
            result += top_k_weights[:, place, None] * each
        return result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 3, bias=False)
        self.experts = Experts()
        self.project = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.experts(x, index, weights) + self.project(x)


def test_experts_under_several_names_are_replaced_under_all_of_them():
    m = mixture()
    m.others = m.experts
    report = to_sparse24(m, include=["others"])
    assert type(m.experts) is Sparse24Experts
    assert m.others is m.experts
    assert {layer.name for layer in report.layers} == STACKS


STACKS = {"experts.gate_up_proj", "experts.down_proj"}


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


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16))


def test_what_stays_dense_by_default_and_why():
    m = nn.ModuleDict(
        {
            "lm_head": nn.Linear(16, 32),
            "router": nn.Linear(16, 8),
            "lora_A": nn.Linear(16, 8),
            "embed": nn.Linear(16, 8),
            "conv": nn.Conv2d(8, 8, 3),
            "moe": nn.ModuleDict({"gate": Router()}),
            "odd": nn.Bilinear(8, 8, 8),
            "proj": nn.Linear(16, 8),
        }
    )
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["proj"]
    beginnings = {
        "lm_head": "output head, excluded by default ('*lm_head*')",
        "router": "router, excluded",
        "lora_A": "adapter, excluded",
        "embed": "embedding table, excluded",
        "conv": "convolution",
        "moe.gate": "router, excluded by default ('*.gate.weight')",
        "odd": "3-d",
    }
    assert report.skipped.keys() == beginnings.keys()
    assert all(report.skipped[name].startswith(text) for name, text in beginnings.items())
    assert {one.name: one.nbytes for one in report.left_dense}["odd"] == 8 * 8 * 8 * 4
    named = to_sparse24(m, include=["lm_head", "router.weight"])
    assert [layer.name for layer in named.layers] == ["lm_head", "router"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["bdy*"]}, "include: pattern 'bdy\\*' matches no linear layer and no experts"),
        ({"exclude": "body*"}, "exclude: expected a sequence"),
        ({"include": ["tied"]}, "tied: expected a layer that can be swapped: its weight is shared"),
        ({"include": ["body.2"], "recipe": "compress"}, "body.2: expected a layer that can be swapped"),
        ({"recipe": "magnitude"}, "recipe: expected one of"),
        ({"recipe": 3}, "recipe: expected a Sparse24Recipe"),
        (
            {"recipe": {"bdy.0": "compress", "*": "prune"}},
            "recipe: pattern 'bdy.0' matches no linear layer and no experts",
        ),
        ({"recipe": {"body.0.weight": "prune", "*": "prune"}}, "recipe: pattern 'body.0.weight' matches no"),
        ({"recipe": {3: "prune"}}, "recipe: expected a sequence of patterns"),
        ({"include": 3}, "include: expected a sequence of patterns, got 3"),
        ({"include": [3]}, "include: expected a sequence"),
    ],
)
def test_impossible_requests_are_refused_before_any_swap(arguments, message):
    m = model()
    with pytest.raises((InvalidProblemError, FormatError), match=message):
        to_sparse24(m, **arguments)
    assert not any(isinstance(one, Sparse24Linear) for one in m.modules())


def test_a_model_without_memory_is_swapped_and_its_energy_unknown():
    m = nn.Sequential(nn.Linear(64, 96, device="meta"), nn.Linear(96, 64, device="meta"))
    report = to_sparse24(m)
    assert all(math.isnan(layer.kept_energy) for layer in report.layers)
    assert [type(layer) for layer in m] == [Sparse24Linear] * 2
    assert all(layer.values.is_meta for layer in m)


def test_scores_are_a_function():
    with pytest.raises(InvalidProblemError, match="scores: expected a callable, got 3"):
        Sparse24Recipe(scores=3)


@pytest.mark.parametrize("bare", [nn.Linear(64, 96), Experts()], ids=["linear", "experts"])
def test_a_bare_layer_has_no_place_to_be_swapped_in(bare):
    with pytest.raises(InvalidProblemError, match="model: expected a module that holds"):
        to_sparse24(bare)


def test_a_model_with_experts_beside_layers_keeps_them():
    m = Experts()
    m.project = nn.Linear(64, 64)
    report = to_sparse24(m)
    assert [layer.name for layer in report.layers] == ["project"]
    assert "expected no other parameters" in report.skipped["down_proj"]


def test_a_progress_bar_is_shown_where_it_is_asked_for(capsys):
    to_sparse24(model(), progress=False)
    assert capsys.readouterr().err == ""
    to_sparse24(model(), progress=True)
    assert "2:4" in capsys.readouterr().err


def test_a_swapped_model_keeps_its_state_and_compiles():
    m = model()
    to_sparse24(m)
    other = model()
    to_sparse24(other)
    other.load_state_dict(m.state_dict())
    tokens = torch.arange(5, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tokens), m(tokens))
