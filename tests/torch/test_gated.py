"""Gated activations: silu(gate) * up and gelu(gate) * up in a product's epilogue, and in models."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparse24_plans import InvalidProblemError, gated_rows
from sparse24_plans.torch import Sparse24GatedMLP, Sparse24Linear, Sparse24Recipe, fuse_gated, to_sparse24

from .cases import DEVICE, close, pruned, randn

F = torch.nn.functional
S = torch.ops.sparse24
OF = {"swiglu": F.silu, "geglu": F.gelu}
words = pytest.mark.parametrize("word", OF)


def halves(product: torch.Tensor, word: str) -> torch.Tensor:
    gate, up = product.chunk(2, -1)
    return OF[word](gate) * up


def layer_of(word: str, k: int = 64, features: int = 48, bias: bool = True, **options):
    torch.manual_seed(1)
    dense = nn.Linear(k, 2 * features, bias, device=DEVICE, dtype=options.pop("dtype", torch.float32))
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
def test_the_op_takes_rows_in_turn_and_has_its_gradients(word):
    torch.manual_seed(2)
    order = torch.from_numpy(gated_rows(96))
    dense = pruned(randn(96, 64)).double().requires_grad_()
    x, bias = (randn(*size).double().requires_grad_() for size in ((5, 64), (96,)))
    dy = randn(5, 48).double()
    wanted = halves(F.linear(x, dense, bias), word)
    theirs = torch.autograd.grad(wanted, (x, bias), dy)

    values, meta = S.compress(dense.detach().float()[order])
    narrow = x.detach().float().requires_grad_()
    values.requires_grad_()
    narrow_bias = bias.detach().float()[order].requires_grad_()
    y = S.linear(narrow, values, meta, narrow_bias, activation=word)
    close(y, wanted)
    dx, db, dw = torch.autograd.grad(y, (narrow, narrow_bias, values), dy.float())
    close(dx, theirs[0])
    close(db, theirs[1][order])
    assert dw.shape == values.shape


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


def test_rows_must_come_in_whole_groups():
    with pytest.raises(
        InvalidProblemError, match="out_features: expected a multiple of 16 for swiglu, got 24"
    ):
        Sparse24Linear(64, 24, activation="swiglu")
    with pytest.raises(InvalidProblemError, match=r"activation: expected one of .*swiglu.*, got 'glu'"):
        Sparse24Linear(64, 32, activation="glu")


# Models -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """As transformers has it for Llama."""

    def __init__(self, act: nn.Module, features: int = 48, extra: float = 0.0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, features, bias=False)
        self.up_proj = nn.Linear(64, features, bias=False)
        self.down_proj = nn.Linear(features, 64, bias=False)
        self.act_fn, self.extra = act, extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + self.extra


class FusedBlock(nn.Module):
    """As transformers has it for Phi-3."""

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
        "odd": Block(nn.SiLU(), features=44),
        "more": Block(nn.SiLU(), extra=1.0),
        "plain": nn.Linear(64, 64),
    }
    return nn.ModuleDict(blocks).to(DEVICE).eval()


def test_blocks_of_a_model_are_fused_and_others_say_why_not():
    whole, fused = model(), model()
    for parameter in (*whole.parameters(), *fused.parameters()):
        parameter.data = pruned(parameter.data) if parameter.dim() == 2 else parameter.data
    report = fuse_gated(fused, "compress")
    assert {name: report[name] for name in ("llama", "gelu", "phi")} == {
        "llama": "swiglu",
        "gelu": "geglu",
        "phi": "swiglu",
    }
    for name, word in {
        "tanh": "exact GELU",
        "odd": "multiple of 16",
        "more": "down(act(gate(x)) * up(x))",
    }.items():
        assert word in report[name]
        assert type(fused[name]) is Block
    assert report.keys() == set(whole) - {"plain"}
    x = randn(2, 5, 64)
    for name in ("llama", "gelu", "phi"):
        assert type(fused[name]) is Sparse24GatedMLP
        assert not fused[name].training
        close(fused[name](x), whole.double()[name](x.double()))
        whole.float()


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
