"""``Sparse24Experts``: the feed-forward experts of a mixture, whose weights are 2:4."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackendUnavailableError, InvalidProblemError, UnsupportedError
from ..plan.preference import PlanPreference
from ..vocab import ElementKind, Tier
from ..vocab.fields import checked_integer
from .activations import FORWARD, GATED_BY, GRADIENTS, called, is_gated, name_of
from .library import autocasts, refuse_in_transforms
from .linear import DTYPES, PreferenceLike, RequirementLike, Sparse24Linear
from .origin import noted_origin
from .weight_only_linear import Sparse24WeightOnlyLinear

_ops: Any = torch.ops.sparse24
STACKS = GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of the stacked weights, in transformers' modules and in ours."""
_ROWS = 64
"""Rows of an expert's weights come in multiples of the kernels' tiles."""
_PROBES, _LARGE = 4, 16.0
"""Tokens on which a module is tried, and the standard deviation of their gates, which shows clamps."""
_LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
"""Attributes that transformers' modules of experts have if they are [E, 2I, H] and [E, H, I]."""


class ExpertsWeight(Sparse24Linear):
    """One weight of all experts, [E, M, K] stacked to [E*M, K], which a Sparse24Experts multiplies.

    If its activation is gated, rows come from a matrix with the gates of all experts before all of their up
    rows. This makes the rows of one expert adjacent, in the order of gates.
    """

    def __init__(self, *sizes: Any, num_experts: int = 1, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.num_experts = num_experts

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Raise UnsupportedError: each token is multiplied by the experts of its own."""
        raise UnsupportedError("x: expected a call of the Sparse24Experts module, got a call of its weight")

    def _problem(self, n: int) -> dict[str, Any]:
        groups = self.num_experts
        return {**super()._problem(n), "m": self.out_features // groups, "groups": groups}

    def grouped(self, x: Tensor, offsets: Tensor, activation: str) -> Tensor:
        """The product of x [N, K] by groups with the given offsets, int32 [E + 1], and its activation."""
        y: Tensor = _ops.grouped_mm(x, *self.stored(), offsets, **self._arguments(activation))
        return y

    def of_experts(self, x: Tensor, experts: Tensor, activation: str, **routing: Any) -> Tensor:
        """The product of x by the experts, int32 [T, top_k], that each row chose, and its activation.

        ``routing`` are the op's ``gather``, ``add_up`` and ``y_weights``.
        """
        options = {**self._arguments(activation), **routing}
        y: Tensor = _ops.experts_mm(x, *self.stored(), experts, self.num_experts, **options)
        return y

    def _arguments(self, activation: str) -> dict[str, Any]:
        about = {"m": self.out_features, "activation": activation, "preference": self.preference_json}
        return {**about, **self._quantized()}

    def _quantized(self) -> dict[str, Any]:
        """The op's arguments for a quantized weight."""
        return {}

    def input_gradient(self, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        """The gradient of x, where dy is that of ``grouped``. It waits for the device."""
        if is_gated(self.activation):
            dy = GRADIENTS[self.activation](dy, self.grouped(x, offsets, "none"))
        values, meta = self.canonical()
        dx, rows = torch.zeros_like(x), self.out_features // self.num_experts
        for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
            if end > begin:
                own = slice(rows * expert, rows * (expert + 1))
                kept = self.kept_values(values[own].detach(), own)
                dx[begin:end] = dy[begin:end] @ _ops.decompress(kept, meta[own])
        return dx


class StoredExpertsWeight(ExpertsWeight, Sparse24WeightOnlyLinear):
    """An ExpertsWeight whose values are stored in 4 or 8 bits."""

    def _quantized(self) -> dict[str, Any]:
        return {"scales": self.scales, "group": self.group}


class _Product(torch.autograd.Function):
    """``ExpertsWeight.grouped`` with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ExpertsWeight, offsets: Tensor) -> Tensor:  # type: ignore[override]
        ctx.weight = weight
        ctx.save_for_backward(x, offsets)
        return weight.grouped(x, offsets, weight.activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.weight.input_gradient(dy.contiguous(), *ctx.saved_tensors), None, None


class Sparse24Experts(nn.Module):
    """Experts ``down(act(gate(x)) * up(x))``, each token by the ones that a router chose for it.

    It takes the place of transformers' modules of experts (Mixtral, Qwen3-MoE, DeepSeek-V3): called with
    ``hidden_states`` [T, H], ``top_k_index`` [T, k] and ``top_k_weights`` [T, k], it gives [T, H]. All
    experts are two grouped products, gate and up in one, with the activation in its epilogue. Their results
    are multiplied by the router's weights and added in the order of ``top_k_index``, in float32, so a token's
    bits don't depend on the other tokens. The forward pass never waits for the device. ``hidden_states`` and
    ``top_k_weights`` have gradients; the backward pass multiplies one decompressed expert after the other.

    ``gate_up_proj`` [E*2I, H] and ``down_proj`` [E*H, I] hold the stacked weights. A negative index
    and one of E or more, which expert parallelism uses for other ranks' experts, add nothing. New experts are
    zero.

    Parameters
    ----------
    num_experts, hidden_features, features : int
        E, H and I. H and 2I are multiples of 64.
    activation : str
        ``swiglu``, ``geglu`` or ``geglu_tanh``.
    stored, group, scale_dtype
        Arguments of Sparse24WeightOnlyLinear; without ``stored`` values have the weights' dtype.
    require, preference, device, dtype
        Arguments of Sparse24Linear, or with ``stored`` of Sparse24WeightOnlyLinear.

    Raises InvalidProblemError naming the argument, UnsupportedError for other dtypes.
    """

    gate_up_proj: ExpertsWeight
    down_proj: ExpertsWeight

    def __init__(
        self,
        num_experts: int,
        hidden_features: int,
        features: int,
        *,
        activation: str = "swiglu",
        stored: ElementKind | str | None = None,
        group: int = 128,
        scale_dtype: torch.dtype | None = None,
        require: RequirementLike = None,
        preference: PreferenceLike = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_experts = checked_integer("num_experts", num_experts, least=1)
        hidden_features = checked_integer("hidden_features", hidden_features)
        features = checked_integer("features", features)
        if (reason := _size_obstacle(2 * features, hidden_features)) is not None:
            raise InvalidProblemError(f"features: {reason}")
        if not is_gated(activation):
            raise InvalidProblemError(f"activation: expected a gated one, got {activation!r}")
        self.num_experts = num_experts
        options: dict[str, Any] = {"num_experts": num_experts, "require": require, "preference": preference}
        options |= {"device": device}
        kind: type[ExpertsWeight] = ExpertsWeight
        if stored is not None:
            kind, by = StoredExpertsWeight, {"stored": stored, "group": group, "scale_dtype": scale_dtype}
            options |= {**by, "dtype": dtype or torch.bfloat16}
        else:
            options["dtype"] = dtype
        rows = num_experts * 2 * features, num_experts * hidden_features
        self.gate_up_proj = kind(hidden_features, rows[0], False, activation=activation, **options)
        self.down_proj = kind(features, rows[1], False, **options)

    @classmethod
    def from_experts(
        cls,
        module: nn.Module,
        *,
        scores: Mapping[str, Tensor] | None = None,
        stored: ElementKind | str | None = None,
        group: int = 128,
        scale_dtype: torch.dtype | None = None,
        require: RequirementLike = None,
        preference: PreferenceLike = None,
        **options: Any,
    ) -> Sparse24Experts:
        """The experts of a module that computes the same with dense weights, pruned to 2:4.

        ``scores`` has those of ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I] by these names.
        ``options`` are ``method`` and ``rule`` of ``Sparse24Linear.from_linear``, and with ``stored``
        ``scale_rule`` of ``Sparse24WeightOnlyLinear.from_linear``. Raises InvalidProblemError, which says
        why, for a module that isn't one of gated experts with SiLU or GELU, or whose sizes no kernel serves;
        FormatError for weights that ``method="compress"`` can't take; UnsupportedError for ``stored`` values
        of float32 weights.
        """
        if (reason := obstacle(module) or other_meaning(module)) is not None:
            raise InvalidProblemError(f"module: {reason}")
        form = {"stored": stored, "group": group, "scale_dtype": scale_dtype}
        found = cls.like(module, require=require, preference=preference, device="meta", **form)
        if stored is not None:
            options |= form
        origin = noted_origin(module)
        for name in STACKS:
            layer, stack = getattr(found, name), getattr(module, name).detach()
            ranks = None if scores is None else scores.get(name)
            if ranks is not None and ranks.shape != stack.shape:
                raise InvalidProblemError(
                    f"scores: expected {list(stack.shape)} for {name}, got {list(ranks.shape)}"
                )
            whole = type(layer).from_linear(
                as_linear(as_rows(name, stack)),
                scores=None if ranks is None else as_rows(name, ranks),
                num_experts=found.num_experts,
                activation=layer.activation,
                preference=layer.preference,
                **options,
            )
            whole.origin = origin
            setattr(found, name, whole)
        found.train(module.training)
        return found

    @classmethod
    def like(cls, module: Any, **options: Any) -> Sparse24Experts:
        """Experts of zeros with a dense module's sizes, dtype and activation, by default on its device.

        ``options`` are those of the constructor.
        """
        count, hidden, features = module.down_proj.shape
        about = {"device": module.down_proj.device, "dtype": module.down_proj.dtype}
        if "activation" not in options:
            about["activation"] = GATED_BY[str(name_of(module.act_fn))]
        found = cls(count, hidden, features, **{**about, **options})
        found.train(module.training)
        return found

    @property
    def activation(self) -> str:
        """The gated activation."""
        return self.gate_up_proj.activation

    def dense_weights(self) -> dict[str, Tensor]:
        """``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I], as a dense module holds them."""
        return {name: as_stack(name, getattr(self, name).dense_weight(), self.num_experts) for name in STACKS}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        _check_routing(hidden_states, self.gate_up_proj.in_features, top_k_index, top_k_weights)
        kind = hidden_states.device.type
        if autocasts(kind):
            with torch.autocast(kind, enabled=False):
                own = hidden_states.to(self.gate_up_proj.weight.dtype)
                return self.forward(own, top_k_index, top_k_weights).to(hidden_states.dtype)
        if torch.is_grad_enabled():
            self._refuse_training()
            if hidden_states.requires_grad or top_k_weights.requires_grad:
                return self._differentiable(hidden_states, top_k_index, top_k_weights)
        experts = top_k_index
        if experts.dtype == torch.int64:  # an index beyond int32 would wrap to that of some expert
            experts = experts.clamp(-1, self.num_experts).int()
        rows = self.gate_up_proj.of_experts(hidden_states, experts, self.activation, gather=True)
        weights = top_k_weights.float()
        return self.down_proj.of_experts(rows, experts, "none", add_up=True, y_weights=weights)

    def _refuse_training(self) -> None:
        """Raise UnsupportedError for weights that require gradients, since no pass would give them any."""
        for name in STACKS:
            values = getattr(self, name).values
            if values is not None and values.requires_grad:
                raise UnsupportedError(
                    f"{name}: expected frozen weights, which alone Sparse24Experts multiply, got values that "
                    "require gradients; call requires_grad_(False) of the experts"
                )

    def _differentiable(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute what ``forward`` does, with the same bits, by operations that have gradients."""
        refuse_in_transforms("Sparse24Experts")
        experts, order = index.flatten().sort(stable=True)
        bounds = torch.arange(self.num_experts + 1, device=experts.device, dtype=experts.dtype)
        offsets = torch.searchsorted(experts, bounds, out_int32=True)
        rows = x[order // index.shape[-1]]
        y = _Product.apply(_Product.apply(rows, self.gate_up_proj, offsets), self.down_proj, offsets)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=order.device)
        # Rows of other ranks' experts were not written.
        elsewhere = ((index < 0) | (index >= self.num_experts)).unsqueeze(-1)
        each = y[places].view(*index.shape, y.shape[1]).masked_fill(elsewhere, 0)
        each = each.float() * weights.float().unsqueeze(-1)
        total = torch.zeros_like(each[:, 0])
        for one in each.unbind(1):
            total = total + one
        return total.to(x.dtype)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, activation={self.activation}"


def _check_routing(x: Tensor, width: int, index: Tensor, weights: Tensor) -> None:
    """Raise InvalidProblemError unless each token has experts and their weights."""
    if x.dim() != 2 or x.shape[1] != width:
        raise InvalidProblemError(f"hidden_states: expected [T, {width}], got {list(x.shape)}")
    tokens = x.shape[0]
    if index.dim() != 2 or index.shape[0] != tokens or index.dtype not in (torch.int32, torch.int64):
        raise InvalidProblemError(
            f"top_k_index: expected int32 or int64 [{tokens}, top_k], got {index.dtype} {list(index.shape)}"
        )
    if not index.shape[1]:
        raise InvalidProblemError(f"top_k_index: expected at least 1 expert a token, got {[tokens, 0]}")
    if weights.shape != index.shape or not weights.is_floating_point():
        raise InvalidProblemError(
            f"top_k_weights: expected floating point {list(index.shape)}, "
            f"got {weights.dtype} {list(weights.shape)}"
        )


# Forms of the weights -----------------------------------------------------------------------------


def as_rows(name: str, stack: Tensor) -> Tensor:
    """The stack [E, M, K] as the matrix [E*M, K] that :class:`ExpertsWeight` is made of."""
    parts = stack.unflatten(1, (2, -1)).transpose(0, 1) if name == GATE_UP else stack
    return parts.reshape(-1, stack.shape[-1])


def as_stack(name: str, rows: Tensor, count: int) -> Tensor:
    """The stack [E, M, K] of E = ``count`` matrices, the inverse of :func:`as_rows`."""
    columns = rows.shape[-1]
    if name != GATE_UP:
        return rows.reshape(count, -1, columns)
    return rows.reshape(2, count, -1, columns).transpose(0, 1).reshape(count, -1, columns)


def as_linear(weight: Tensor) -> nn.Linear:
    """An nn.Linear without bias that holds the weight [M, K]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


# Modules that can be replaced -----------------------------------------------------------------------------


def holds_stacks(module: nn.Module) -> bool:
    """Whether the module has both stacked weights of gated experts."""
    found = dict(module.named_parameters(recurse=False))
    return all(name in found and found[name].dim() == 3 for name in STACKS)


def obstacle(module: nn.Module) -> str | None:
    """Why Sparse24Experts can't take the module's place, or None. Values of weights don't matter."""
    if not holds_stacks(module):
        return "expected gate_up_proj [E, 2I, H] and down_proj [E, H, I]"
    others = [name for name, _ in module.named_parameters() if name not in STACKS]
    if others:
        return f"expected no other parameters, got {', '.join(others)}"
    for name, wanted in _LAYOUT.items():
        if getattr(module, name, wanted) != wanted:
            return f"expected {name}={wanted} of its class, got {not wanted}"
    gate_up, down = (getattr(module, name) for name in STACKS)
    count, rows, width = gate_up.shape
    if tuple(down.shape) != (count, width, rows // 2):
        return f"expected down_proj {[count, width, rows // 2]}, got {list(down.shape)}"
    for name, stack in zip(STACKS, (gate_up, down), strict=True):
        if type(stack) not in (nn.Parameter, Tensor):
            return f"its {name} is a {type(stack).__name__}"
        if stack.dtype not in DTYPES or stack.dtype != down.dtype:
            return f"the dtype of its {name} is {stack.dtype}"
    if (reason := _size_obstacle(rows, width)) is not None:
        return reason
    own_gate = getattr(type(module), "_apply_gate", None)
    if own_gate is not None and own_gate is not _transformers_gate():
        return f"{type(module).__name__} has a gate of its own, _apply_gate"
    return "its activation is neither SiLU nor GELU" if _activation(module) is None else None


def is_known(module: nn.Module) -> bool:
    """Whether transformers computes the module by its own gate, so that its class says what it computes."""
    own_gate = getattr(type(module), "_apply_gate", None)
    return own_gate is not None and own_gate is _transformers_gate()


def no_kernel(module: nn.Module, device: torch.device, **options: Any) -> str | None:
    """Why no kernel serves the module's experts on a CUDA device; None if one does, or for the CPU.

    ``options`` are arguments of Sparse24Experts.
    """
    if device.type != "cuda":
        return None
    found = Sparse24Experts.like(module, **{**options, "device": "meta"})
    return next(filter(None, (kernel_obstacle(getattr(found, name), device) for name in STACKS)), None)


def kernel_obstacle(layer: Sparse24Linear, device: torch.device) -> str | None:
    """Why no kernel serves the layer on a CUDA device; None if one does, or for the CPU.

    Experts without a preference are left to PyTorch where only the strict kernel multiplies by groups.
    """
    if device.type != "cuda":
        return None
    try:
        plan = layer.plan_on(torch.cuda.current_device() if device.index is None else device.index)
    except (UnsupportedError, BackendUnavailableError) as error:
        return str(error)
    if (
        isinstance(layer, ExpertsWeight)
        and plan.tier is Tier.INFLATE
        and layer.preference == PlanPreference()
    ):
        return f"dense experts are faster than its kernel there, {plan.kernel}"
    return None


def _size_obstacle(rows: int, width: int) -> str | None:
    if rows % _ROWS or width % _ROWS:
        return f"expected 2I and H in multiples of {_ROWS}, got {rows} and {width}"
    return None


def _transformers_gate() -> Any:
    """The function by which transformers' experts apply their gates. Doesn't import transformers."""
    home = sys.modules.get("transformers.integrations.moe")
    return getattr(home, "_default_apply_gate", None)


def _activation(module: nn.Module) -> str | None:
    """The name of the activation of the module's gates, or None for one that no kernel has."""
    try:
        return name_of(getattr(module, "act_fn", None))
    except InvalidProblemError:
        return None


def other_meaning(module: Any) -> str | None:
    """Why the module computes something else than its replacement, or None; found by a trial."""
    gate_up, down = (getattr(module, name).detach() for name in STACKS)
    if gate_up.is_meta:
        return None if is_known(module) else "its weights are on the meta device, where it can't be tried"
    act = FORWARD[str(name_of(module.act_fn))]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBES, gate_up.shape[2], generator=generator, dtype=torch.float32).to(gate_up.device)
    spread = (x.double() @ gate_up[0].double().T).std().item() or 1.0
    index = torch.arange(_PROBES, device=x.device)[:, None] % gate_up.shape[0]
    weights = torch.ones_like(index, dtype=gate_up.dtype)
    for scale in (1.0, _LARGE):
        probes = (x * (scale / spread)).to(gate_up.dtype)
        try:
            found = called(lambda x: module(x, index, weights), probes, "module")
        except InvalidProblemError as error:
            return str(error)
        wanted = torch.empty_like(probes, dtype=torch.float64)
        for token, expert in enumerate(index[:, 0].tolist()):
            gate, up = (gate_up[expert].double() @ probes[token].double()).chunk(2)
            wanted[token] = down[expert].double() @ (act(gate) * up)
        if type(found) is not Tensor or found.shape != probes.shape:
            return f"expected a tensor {list(probes.shape)} of it, got {type(found).__name__}"
        off = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        if not off <= max(8 * torch.finfo(gate_up.dtype).eps, 2.0**-9):
            return f"expected it to give down(act(gate(x)) * up(x)), got a relative error of {off:.2g}"
    return None
