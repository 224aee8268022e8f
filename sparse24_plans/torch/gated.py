"""``fuse_gated`` puts gate and up projection of gated feed-forward blocks into one sparse product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.layers import origin_of_all
from ..errors import FormatError, InvalidProblemError, check_type
from .activations import FORWARD, GATED_BY, called, is_gated, movable, name_of, row_order, rows_in_order
from .linear import Sparse24Linear
from .module_places import aliases_of, has_hooks, is_held_once, owners_of, put
from .origin import note_origin, noted_origin
from .quantized_linear import Sparse24QuantizedLinear
from .swap import Sparse24Recipe, obstacle_of
from .weight_only_linear import Sparse24WeightOnlyLinear

_PROBES = 2
"""Tokens on which a block is tried."""
_TF32 = 2.0**-9
"""Relative difference of two float32 products if PyTorch may use TF32."""


class Sparse24GatedMLP(nn.Module):
    """``down_proj(act(gate) * up)``. One product with its epilogue, ``gate_up_proj``, makes act(gate) * up.

    x may have any leading dimensions. ``down_proj`` is the block's own layer, dense or sparse. ``parts`` are
    the names of the layers that ``gate_up_proj`` replaces, under which it is saved.
    """

    def __init__(
        self, gate_up_proj: Sparse24Linear, down_proj: nn.Module, parts: Sequence[str] = ("gate_up_proj",)
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.parts = gate_up_proj, down_proj, tuple(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to [..., hidden]. Raises InvalidProblemError for another width."""
        y: Tensor = self.down_proj(self.gate_up_proj(x))
        return y


@dataclass(frozen=True)
class GatedBlock:
    """The result of :func:`fuse_gated` for a block: it has an activation or a reason, never both."""

    activation: str | None = None
    """The epilogue of the product that replaced gate and up: ``swiglu``, ``geglu`` or ``geglu_tanh``."""
    reason: str | None = None
    """Why the block stays as it is."""

    @property
    def fused(self) -> bool:
        """Whether the block was replaced."""
        return self.activation is not None


def fuse_gated(model: nn.Module, recipe: Sparse24Recipe | str = "prune") -> dict[str, GatedBlock]:
    """Replace each gated feed-forward block of the model by a Sparse24GatedMLP, in place.

    A block is a module with ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn`` (Llama, Qwen and Mistral
    in transformers), or with ``gate_up_proj``, ``down_proj`` and ``activation_fn`` (Phi-3). Its activation
    must be SiLU or GELU (exact or by tanh), and a trial must show that it computes down(act(gate(x)) *
    up(x)). A block with other parameters, buffers or modules, or with a dropout, stays, because a trial
    needn't show what they do. Other layers stay, and ``to_sparse24`` can swap them afterwards. A state_dict
    then has the block's weight under ``gate_up_proj``.

    ``recipe`` says how weights become 2:4; a string is a method. The result says by each block's name what
    became of it. A block under several names is replaced under all of them, and listed by the first. Raises
    InvalidProblemError for a wrong model or recipe.
    """
    check_type("model", model, nn.Module, "a module")
    how = Sparse24Recipe(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(how, Sparse24Recipe) or how.activation != "none":
        raise InvalidProblemError(f"recipe: expected a recipe without an activation, got {recipe!r}")
    owners, aliases = owners_of(model), aliases_of(model)
    blocks = [
        name
        for name, block in model.named_modules()
        if name and any(all(hasattr(block, one) for one in form) for form in _FORMS)
    ]
    return {name: _fused(model, name, how, owners, aliases) for name in blocks}


_FORMS = ({"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"})
"""Attributes that make a module a block."""


def _fused(
    model: nn.Module,
    name: str,
    recipe: Sparse24Recipe,
    owners: Counter[int],
    aliases: Mapping[str, Sequence[str]],
) -> GatedBlock:
    block: Any = model.get_submodule(name)
    fused = hasattr(block, "gate_up_proj")
    parts = _parts_of(block)
    layers = [getattr(block, part) for part in parts]
    activation = block.activation_fn if fused else block.act_fn
    if any(isinstance(one, nn.Module) and has_hooks(one) for one in (*block.modules(), activation)):
        return GatedBlock(reason="it has hooks, which a swap would lose")
    for layer in (*layers, block.down_proj):
        if (reason := obstacle_of(layer, recipe, owners)) is not None:
            return GatedBlock(reason=reason)
    if not all(is_held_once(model, aliases.get(f"{name}.{part}", ())) for part in parts):
        return GatedBlock(reason="a layer that a fused one would replace belongs to another module, too")
    if any(layer.weight.is_meta for layer in layers):
        return GatedBlock(reason="its weights are on the meta device")
    try:
        word = name_of(activation)
        if word is None:
            return GatedBlock(reason="its activation is neither SiLU nor GELU")
        if others := _unseen(block, activation, (*parts, "down_proj")):
            return GatedBlock(reason=f"it has more than its layers and its activation: {', '.join(others)}")
        whole = layers[0] if fused else _joined(*layers)
        _check_meaning(block, whole, word)
        one = replace(recipe, activation=GATED_BY[word]).layer(name, whole)
    except (FormatError, InvalidProblemError) as error:
        return GatedBlock(reason=str(error))
    put(model, aliases[name], Sparse24GatedMLP(one, block.down_proj, parts).train(block.training))
    return GatedBlock(activation=GATED_BY[word])


def _unseen(block: nn.Module, activation: Any, layers: Sequence[str]) -> list[str]:
    """The names of a block's tensors, modules and dropouts whose use a trial needn't show."""
    found = []
    for name, module in block.named_modules():
        if name in layers:
            continue
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        found += [f"{name}.{own}".lstrip(".") for own, _ in tensors]
        drops = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else None
        known = module is block or getattr(block, name.partition(".")[0]) is activation
        if drops or not (known or drops == 0 or type(module) is nn.Identity):
            found.append(name)
    return found


def fuse_saved(model: nn.Module, name: str, options: Mapping[str, Any]) -> None:
    """Fuse a block whose 2:4 layers were loaded from a checkpoint, as it was before it was saved.

    ``options`` are those of the fused layer. Raises InvalidProblemError unless the block's layers are 2:4 and
    fit together.
    """
    block: Any = model.get_submodule(name)
    parts = _parts_of(block)
    layers: list[Any] = [getattr(block, part, None) for part in parts]
    kinds = (Sparse24Linear, Sparse24QuantizedLinear, Sparse24WeightOnlyLinear)
    plain = [one for one in layers if type(one) in kinds and one.activation == "none"]
    alike = {
        (type(one), one.in_features, one.out_features, one.weight.dtype, one.bias is None) for one in plain
    }
    gates = is_gated(str(options.get("activation")))
    if not gates or len(plain) < len(parts) or len(alike) > 1 or not hasattr(block, "down_proj"):
        raise InvalidProblemError(
            f"gated_blocks: expected a gated activation, and a block with 2:4 layers {', '.join(parts)} of "
            f"one size and a down_proj, got {options.get('activation')} and {name}, a {type(block).__name__}"
        )
    first, rows = plain[0], sum(one.out_features for one in plain)
    whole: Sparse24Linear = type(first)(
        first.in_features,
        rows,
        first.bias is not None,
        device="meta",
        dtype=first.weight.dtype,
        **first.form(),
        **options,
    )
    state = _joined_state(name, [one.state_dict() for one in plain], first.out_features)
    order = row_order(whole.activation, rows, first.weight.device)
    whole.load_state_dict(rows_in_order(state, order, rows), assign=True)
    whole.origin = origin_of_all([one.origin for one in plain])
    fused = Sparse24GatedMLP(whole, block.down_proj, parts)
    put(model, aliases_of(model)[name], fused.train(block.training))


def _joined_state(name: str, states: Sequence[Mapping[str, Tensor]], rows: int) -> dict[str, Tensor]:
    """The state of one layer with the rows of several. Raises InvalidProblemError unless scales are alike."""
    joined = {}
    for key, first in states[0].items():
        same = [state[key] for state in states if key in state and state[key].dim() == first.dim()]
        if len(same) == len(states) and first.shape[:1] == (rows,):
            joined[key] = torch.cat([movable(one) for one in same]).view(first.dtype)
        elif len(same) == len(states) and all(torch.equal(one, first) for one in same):
            joined[key] = first
        else:
            raise InvalidProblemError(f"gated_blocks: expected one {key} in all parts of {name}, got several")
    return joined


def _parts_of(block: nn.Module) -> tuple[str, ...]:
    return ("gate_up_proj",) if hasattr(block, "gate_up_proj") else ("gate_proj", "up_proj")


def _joined(gate: nn.Linear, up: nn.Linear) -> nn.Linear:
    """One layer with the rows of both layers. Raises InvalidProblemError if they don't fit together."""
    wanted, got = (
        {"sizes": tuple(one.weight.shape), "dtype": one.weight.dtype, "bias": one.bias is not None}
        for one in (up, gate)
    )
    if wanted != got:
        raise InvalidProblemError(f"gate_proj: expected {wanted}, like up_proj, got {got}")
    rows, columns = gate.weight.shape
    whole = nn.Linear(columns, 2 * rows, gate.bias is not None, device="meta").train(gate.training)
    whole.weight = nn.Parameter(torch.cat((gate.weight, up.weight)).detach(), requires_grad=False)
    if gate.bias is not None:
        whole.bias = nn.Parameter(torch.cat((gate.bias, up.bias)).detach(), requires_grad=False)
    note_origin(whole, origin_of_all([noted_origin(one) for one in (gate, up)]))
    return whole


def _check_meaning(block: Any, whole: nn.Linear, word: str) -> None:
    """Raise InvalidProblemError if the block computes something else than its replacement."""

    def fused(x: Tensor) -> Tensor:
        gate, up = whole(x).chunk(2, -1)
        y: Tensor = block.down_proj(FORWARD[word](gate) * up)
        return y

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _PROBES, whole.in_features, generator=generator, dtype=torch.float32)
    x = x.to(whole.weight.device, whole.weight.dtype)
    wanted, found = called(fused, x, "down_proj"), called(block, x, "block")
    if type(found) is not Tensor or found.shape != wanted.shape:
        got = f"one {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidProblemError(f"block: expected a tensor {list(wanted.shape)}, got {got}")
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    most = max(4 * torch.finfo(x.dtype).eps, _TF32)
    if not error <= most:
        raise InvalidProblemError(
            f"block: expected it to give down(act(gate(x)) * up(x)), got a relative error of {error:.2g}"
        )
