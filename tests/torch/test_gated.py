"""Gated activations: silu(gate) * up and gelu(gate) * up in a product's epilogue, and in models."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError, gated_rows
from sparse24_plans.torch import (
    GatedBlock,
    Sparse24GatedMLP,
    Sparse24Linear,
    Sparse24Recipe,
    fuse_gated,
    semi_structured,
    to_sparse24,
)
from sparse24_plans.torch.prepare_ops import kept_values

from .cases import DEVICE, close, pruned, randn

F = torch.nn.functional
S = torch.ops.sparse24
OF = {"swiglu": F.silu, "geglu": F.gelu}
words = pytest.mark.parametrize("word", OF)


def halves(product: torch.Tensor, word: str) -> torch.Tensor:
    gate, up = product.chunk(2, -1)
    return OF[word](gate) * up


def layer_of(word: str, k: int = 64, bias: bool = True, **options):
    torch.manual_seed(1)
    dense = nn.Linear(k, 96, bias, device=DEVICE, dtype=options.pop("dtype", torch.float32))
    return dense, Sparse24Linear.from_linear(dense, activation=word, **options)


@words
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [64, 60])
def test_a_layer_multiplies_what_its_rows_gate(word, dtype, bias, k):
    dense, layer = layer_of(word, k, bias=bias, dtype=dtype)
    weight = pruned(F.pad(dense.weight.detach(), (0, -k % 8)))[:, :k]
    assert torch.equal(layer.dense_weight(), weight)
    x = randn(2, 3, k, dtype=dtype)
    product = F.linear(x.double(), weight.double(), dense.bias.double() if bias else None)
    y = layer(x)
    assert y.shape == (2, 3, 48)
    assert y.dtype == dtype
    close(y, halves(product, word))


@words
def test_the_op_takes_interleaved_rows_and_has_gradients(word):
    torch.manual_seed(2)
    order = torch.from_numpy(gated_rows(96))
    dense = pruned(randn(96, 64)).double().requires_grad_()
    x, bias = (randn(*size).double().requires_grad_() for size in ((5, 64), (96,)))
    dy = randn(5, 48).double()
    wanted = halves(F.linear(x, dense, bias), word)
    theirs = torch.autograd.grad(wanted, (x, bias, dense), dy)

    values, meta = S.compress(dense.detach().float()[order])
    narrow = x.detach().float().requires_grad_()
    values.requires_grad_()
    narrow_bias = bias.detach().float()[order].requires_grad_()
    y = S.linear(narrow, values, meta, narrow_bias, activation=word)
    close(y, wanted)
    dx, db, dw = torch.autograd.grad(y, (narrow, narrow_bias, values), dy.float())
    close(dx, theirs[0])
    close(db, theirs[1][order])
    close(dw, kept_values(theirs[2][order], meta))


@words
def test_opcheck(word):
    values, meta = S.compress(pruned(randn(96, 64)))
    arguments = randn(5, 64).requires_grad_(), values.requires_grad_(), meta, randn(96).requires_grad_()
    torch.library.opcheck(S.linear.default, arguments, {"activation": word})


@words
def test_a_compiled_layer_takes_any_number_of_tokens(word):
    _, layer = layer_of(word)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for n in (1, 3, 17):
        x = randn(n, 64)
        assert torch.equal(compiled(x), layer(x))


@words
def test_a_state_dict_loads_into_another_layer(word):
    _, layer = layer_of(word)
    other = Sparse24Linear(64, 96, activation=word, device=DEVICE)
    other.load_state_dict(layer.state_dict())
    x = randn(4, 64)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_rows_must_be_whole_groups():
    with pytest.raises(
        InvalidProblemError, match="out_features: expected a multiple of 16 for swiglu, got 24"
    ):
        Sparse24Linear(64, 24, activation="swiglu")
    with pytest.raises(InvalidProblemError, match=r"activation: expected one of .*swiglu.*, got 'glu'"):
        Sparse24Linear(64, 32, activation="glu")


# Models -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """An MLP like that of transformers for Llama."""

    def __init__(self, act: nn.Module | str, features: int = 48, extra: float = 0.0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, features, bias=False)
        self.up_proj = nn.Linear(64, features, bias=False)
        self.down_proj = nn.Linear(features, 64, bias=False)
        self.act_fn, self.extra = act, extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + self.extra


class FusedBlock(nn.Module):
    """An MLP like that of transformers for Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(48, 64, bias=False)
        self.activation_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(up * self.activation_fn(gate))


def model() -> nn.Module:
    torch.manual_seed(3)
    blocks = {
        "llama": Block(nn.SiLU()),
        "gelu": Block(nn.GELU()),
        "phi": FusedBlock(),
        "tanh": Block(nn.GELU(approximate="tanh")),
        "mish": Block(nn.Mish()),
        "odd": Block(nn.SiLU(), features=44),
        "more": Block(nn.SiLU(), extra=1.0),
        "plain": nn.Linear(64, 64),
    }
    return nn.ModuleDict(blocks).to(DEVICE).eval()


FUSED = {"llama": "swiglu", "gelu": "geglu", "phi": "swiglu", "tanh": "geglu_tanh"}


def test_blocks_of_model_are_fused_and_others_say_why_not():
    whole, fused = model(), model()
    for parameter in (*whole.parameters(), *fused.parameters()):
        parameter.data = pruned(parameter.data) if parameter.dim() == 2 else parameter.data
    report = fuse_gated(fused, "compress")
    for name, word in FUSED.items():
        assert report[name] == GatedBlock(activation=word)
        assert report[name].fused
    for name, word in {
        "mish": "neither SiLU nor GELU",
        "odd": "multiple of 16",
        "more": "down(act(gate(x)) * up(x))",
    }.items():
        assert word in report[name].reason
        assert (report[name].activation, report[name].fused) == (None, False)
        assert type(fused[name]) is Block
    assert report.keys() == set(whole) - {"plain"}
    x = randn(2, 5, 64)
    for name in FUSED:
        assert type(fused[name]) is Sparse24GatedMLP
        assert not fused[name].training
        close(fused[name](x), whole.double()[name](x.double()))
        whole.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_block_that_gives_something_else_stays(dtype):
    """Whatever the dtype rounds off: a tenth more is another block."""

    class Scaled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.1 * super().forward(x)

    m = nn.ModuleDict({"plain": Block(nn.SiLU()), "scaled": Scaled(nn.SiLU())}).to(DEVICE, dtype)
    report = fuse_gated(m)
    assert report["plain"].activation == "swiglu"
    assert "got a relative error of 0.1" in report["scaled"].reason
    assert type(m["scaled"]) is Scaled


def test_what_a_swap_would_lose_stays():
    m = nn.ModuleDict({name: Block(nn.SiLU()) for name in ("one", "two", "hooked", "act")}).to(DEVICE)
    m["one"].gate_proj.weight = m["two"].gate_proj.weight
    m["hooked"].register_forward_hook(lambda *_: None)
    m["act"].act_fn.register_forward_pre_hook(lambda *_: None)
    shared, hooks = "its weight is shared with another module", "it has hooks, which a swap would lose"
    reasons = {"one": shared, "two": shared, "hooked": hooks, "act": hooks}
    assert fuse_gated(m) == {name: GatedBlock(reason=reason) for name, reason in reasons.items()}


class Gelu(nn.Module):
    """An activation with a parameter that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.beta * x)


class Beside(Block):
    """A block with more than a trial shows: parts that do nothing in evaluation, or in the beginning."""

    def __init__(self, act: nn.Module, p: float = 0.0, **parts: nn.Module) -> None:
        super().__init__(act)
        self.drop = nn.Dropout(p)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x)) + getattr(self, "scale", 0) * x


BESIDE = {
    "dropout": (lambda: Beside(nn.SiLU(), 0.5), "drop"),
    "parameter": (lambda: Beside(nn.SiLU(), scale=nn.Parameter(torch.zeros(64))), "scale"),
    "buffer": (lambda: Beside(nn.SiLU(), scale=nn.Buffer(torch.zeros(64))), "scale"),
    "module": (lambda: Beside(nn.SiLU(), norm=nn.LayerNorm(64)), "norm.weight, norm.bias, norm"),
    "activation": (lambda: Beside(Gelu()), "act_fn.beta"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_trial_cannot_show_stays(name):
    make, others = BESIDE[name]
    m = nn.ModuleDict({"mlp": make()}).to(DEVICE).eval()
    reason = f"it has more than its layers and its activation: {others}"
    assert fuse_gated(m) == {"mlp": GatedBlock(reason=reason)}
    assert type(m["mlp"]) is Beside


def test_modules_that_never_do_anything_may_be_in_a_block():
    m = nn.ModuleDict({"mlp": Beside(nn.SiLU(), rest=nn.Identity())}).to(DEVICE)
    assert fuse_gated(m)["mlp"].fused


@pytest.mark.parametrize("register", ["register_full_backward_pre_hook", "register_state_dict_pre_hook"])
@pytest.mark.parametrize("part", ["", "gate_proj", "act_fn"])
def test_hooks_of_any_kind_keep_a_block(register, part):
    m = nn.ModuleDict({"mlp": Block(nn.SiLU())}).to(DEVICE)
    getattr(m["mlp"].get_submodule(part), register)(lambda *_: None)
    assert fuse_gated(m) == {"mlp": GatedBlock(reason="it has hooks, which a swap would lose")}


def test_block_under_several_names_is_replaced_under_all_of_them():
    block = Block(nn.SiLU())
    m = nn.Sequential(block, block).to(DEVICE)
    assert fuse_gated(m) == {"0": GatedBlock(activation="swiglu")}
    assert type(m[0]) is Sparse24GatedMLP
    assert m[0] is m[1]


def test_a_layer_that_another_module_holds_keeps_its_block():
    m = nn.ModuleDict({"mlp": Block(nn.SiLU()), "same": Block(nn.SiLU())}).to(DEVICE)
    m["also"] = m["mlp"].gate_proj
    m["same"].up_proj = m["same"].gate_proj
    m["down"] = Block(nn.SiLU()).to(DEVICE)
    m["kept"] = m["down"].down_proj
    report = fuse_gated(m)
    reason = "a layer that a fused one would replace belongs to another module, too"
    assert report.pop("down").fused
    assert report == {name: GatedBlock(reason=reason) for name in ("mlp", "same")}
    to_sparse24(m)
    assert m["also"] is m["mlp"].gate_proj
    assert m["kept"] is m["down"].down_proj
    assert {type(m[name]) for name in ("also", "kept")} == {Sparse24Linear}


def test_odd_blocks_stay_and_the_others_are_fused():
    class Masked(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * mask

    m = nn.ModuleDict(
        {name: Block(nn.SiLU()) for name in ("first", "sizes", "dtypes", "word", "prelu", "last")}
    )
    m["masked"] = Masked(nn.SiLU())
    m["sizes"].up_proj = nn.Linear(64, 32, bias=False)
    m["dtypes"].up_proj = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    m["word"], m["prelu"] = Block("silu"), Block(nn.PReLU(3))
    before = torch.random.get_rng_state()
    report = fuse_gated(m.to(DEVICE))
    assert report["first"].fused
    assert report["last"].fused
    for name, said in {
        "masked": "block: expected it to take one tensor, got TypeError",
        "sizes": "gate_proj: expected {'sizes': (32, 64)",
        "dtypes": "torch.bfloat16",
        "word": "activation: expected it to take one tensor, got TypeError",
        "prelu": "activation: expected it to take one tensor, got RuntimeError",
    }.items():
        assert said in report[name].reason
        assert isinstance(m[name], Block)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_fused_block_keeps_its_bias_and_what_it_learns(bias, trainable):
    block = Block(nn.SiLU())
    for name in ("gate_proj", "up_proj"):
        setattr(block, name, nn.Linear(64, 48, bias))
    whole = nn.ModuleDict({"mlp": block}).to(DEVICE)
    for name in ("gate_proj", "up_proj"):
        layer = getattr(block, name)
        layer.weight.data = pruned(layer.weight.data)
    wanted = copy.deepcopy(block)
    assert fuse_gated(whole, Sparse24Recipe("compress", trainable=trainable))["mlp"].fused
    x = randn(3, 64)
    close(whole["mlp"](x), wanted.double()(x.double()))
    assert any(p.requires_grad for p in whole["mlp"].gate_up_proj.parameters()) == trainable


def test_blocks_on_the_meta_device_stay():
    m = nn.ModuleDict({"mlp": Block(nn.SiLU())}).to("meta")
    assert fuse_gated(m) == {"mlp": GatedBlock(reason="its weights are on the meta device")}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Phi3"])
def test_blocks_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    m = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes, **heads)).eval()
    assert fuse_gated(m.to(DEVICE)) == {"layers.0.mlp": GatedBlock(activation="swiglu")}
    assert m(torch.arange(6, device=DEVICE)[None])[0].shape == (1, 6, 64)


def test_a_recipe_with_a_gate():
    m = nn.ModuleDict({"wide": nn.Linear(64, 96), "odd": nn.Linear(64, 24)}).to(DEVICE)
    report = to_sparse24(m, recipe=Sparse24Recipe("prune", activation="swiglu"))
    assert [layer.name for layer in report.layers] == ["wide"]
    assert m["wide"](randn(2, 64)).shape == (2, 48)
    assert report.skipped == {"odd": "out_features: expected a multiple of 16 for swiglu, got 24"}


@pytest.mark.parametrize("rows", [16, 48])
def test_scores_are_of_the_weights_shape(rows):
    linear = nn.Linear(64, 32, device=DEVICE)
    for word in ("none", "swiglu"):
        with pytest.raises(InvalidProblemError, match=rf"scores: expected \[32, 64\], got \[{rows}, 64\]"):
            Sparse24Linear.from_linear(linear, activation=word, scores=randn(rows, 64))


def test_gates_are_refused_where_there_are_none():
    linear = Sparse24Linear.from_linear(nn.Linear(64, 32, device=DEVICE))
    weight, meta = linear.canonical()
    x = randn(3, 64)
    with pytest.raises(InvalidProblemError, match=r"activation: expected one of none, relu.*, got 'swiglu'"):
        semi_structured.sparse_semi_structured_linear(x, weight, meta, activation="swiglu")


def test_other_layers_are_swapped_afterwards():
    m = model()
    fuse_gated(m, Sparse24Recipe("prune", require={"batch_invariant": True}))
    report = to_sparse24(m)
    assert {"llama.down_proj", "plain", "odd.gate_proj"} <= {layer.name for layer in report.layers}
    assert isinstance(m["llama"].down_proj, Sparse24Linear)
    assert m["llama"].gate_up_proj.plan(3).guarantee.batch_invariant


def test_models_and_recipes_that_cannot_be_meant():
    with pytest.raises(InvalidProblemError, match="model: expected a module, got SimpleNamespace"):
        fuse_gated(SimpleNamespace())
    with pytest.raises(InvalidProblemError, match="recipe: expected a recipe without an activation"):
        fuse_gated(model(), Sparse24Recipe("prune", activation="swiglu"))
    with pytest.raises(InvalidProblemError, match="recipe"):
        fuse_gated(model(), "squash")
