"""``to_sparse24`` swaps the linear layers of a model for 2:4 ones, in place, and reports what it did."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..checkpoints.selection import check_callback, patterns_of, reason_to_leave
from ..errors import FormatError, InvalidProblemError, check_choice
from ..vocab import ElementKind, TileRule
from ..weights.quantized_weight import quantization_of
from .activations import check_activation, check_rows
from .conv1d import is_conv1d, is_linear, is_swappable, linear_of
from .experts import (
    STACKS,
    Sparse24Experts,
    as_linear,
    holds_stacks,
    no_kernel,
    obstacle,
    other_meaning,
)
from .linear import DTYPES, PreferenceLike, RequirementLike, Sparse24Linear, check_bias
from .methods import METHODS, check_rule, check_scores
from .module_places import aliases_of, has_hooks, has_merged_adapter, others_in, owners_of, put
from .quantized_linear import LARGEST, Sparse24QuantizedLinear
from .swap_report import DenseMatrix, SwappedLayer, SwapReport
from .weight_only_linear import Sparse24WeightOnlyLinear

_BLOCK = 1 << 24
"""Elements whose squares are summed at a time."""
_MIN_SIZE = 16
"""Columns and rows of the smallest layer that takes every activation."""


@dataclass(frozen=True)
class Sparse24Recipe:
    """How a layer's weight becomes 2:4. The fields are arguments of Sparse24Linear and ``from_linear``.

    ``weight_dtype`` is float8_e4m3fn or int8 for a Sparse24QuantizedLinear, with a scale for each row.
    ``stored`` is ``s4``, ``s8`` or ``fp8_e4m3`` for a Sparse24WeightOnlyLinear or Sparse24Experts, with a
    scale for each ``group`` of columns. By default weights keep their dtype.

    ``activation`` is for models that don't apply it themselves. ``scores`` is called with a layer's name and
    the layer, a Conv1D as an nn.Linear; it returns scores [M, K], or None to rank by |value|. Stacked experts
    [E, M, K] come as an nn.Linear [E*M, K]. A weight that is 2:4 already is taken as it is, whatever its
    scores.

    Raises InvalidProblemError naming the field; UnsupportedError for weights of 8 bits or less that would
    have to be trained.
    """

    method: str = "prune"
    rule: TileRule | str = TileRule.OPTIMAL
    scores: Callable[[str, nn.Linear], Tensor | None] | None = None
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    trainable: bool = False
    require: RequirementLike = None
    preference: PreferenceLike = None
    weight_dtype: torch.dtype | None = None
    stored: ElementKind | str | None = None
    group: int = 128

    def __post_init__(self) -> None:
        check_choice("recipe", self.method, METHODS)
        check_callback("scores", self.scores)
        check_scores(self.method, self.scores)
        check_activation(self.activation)
        check_rule(self.method, self.rule)
        if self.out_dtype is not None:
            check_choice("out_dtype", self.out_dtype, DTYPES)
        if self.weight_dtype is not None:
            check_choice("weight_dtype", self.weight_dtype, LARGEST)
        if self.stored is not None:
            quantization_of(ElementKind.BF16, self.stored, self.group, None)
            if self.weight_dtype is not None:
                raise InvalidProblemError(f"stored: expected None with a weight_dtype, got {self.stored}")
        elif self.group != Sparse24Recipe.group:
            raise InvalidProblemError(
                f"group: expected {Sparse24Recipe.group}, the default, without stored, got {self.group!r}"
            )
        kind, quantized = self._kind
        wishes = {"require": self.require, "preference": self.preference, "trainable": self.trainable}
        # A layer on the meta device refuses what no layer takes before any layer of a model is swapped.
        kind(_MIN_SIZE, _MIN_SIZE, device="meta", **{"dtype": torch.bfloat16, **quantized, **wishes})

    def layer(self, name: str, module: nn.Module) -> Sparse24Linear:
        """The Sparse24Linear that replaces an nn.Linear or a Conv1D."""
        linear = linear_of(module)
        kind, quantized = self._kind
        layer: Sparse24Linear = kind.from_linear(
            linear,
            method=self.method,
            rule=self.rule,
            scores=self._scores(name, linear),
            activation=self.activation,
            out_dtype=self.out_dtype,
            trainable=self.trainable,
            require=self.require,
            preference=self.preference,
            **quantized,
        )
        layer.transposed = is_conv1d(module)
        return layer

    def experts(self, name: str, module: nn.Module) -> Sparse24Experts:
        """The Sparse24Experts that replace a module of stacked experts."""
        scores = {}
        for own, linear in stacks_of(module).items():
            found = self._scores(f"{name}.{own}", linear)
            if found is not None:
                scores[own] = found.reshape(getattr(module, own).shape)
        return Sparse24Experts.from_experts(
            module, method=self.method, rule=self.rule, scores=scores, **self.of_experts
        )

    @property
    def of_experts(self) -> dict[str, Any]:
        """The arguments of Sparse24Experts."""
        return {
            "stored": self.stored,
            "group": self.group,
            "require": self.require,
            "preference": self.preference,
        }

    @property
    def _kind(self) -> tuple[Any, dict[str, Any]]:
        """The class of the layers, and the arguments that it has beyond Sparse24Linear's."""
        if self.weight_dtype is not None:
            return Sparse24QuantizedLinear, {"dtype": self.weight_dtype}
        if self.stored is not None:
            return Sparse24WeightOnlyLinear, {"stored": self.stored, "group": self.group}
        return Sparse24Linear, {}

    def _scores(self, name: str, linear: nn.Linear) -> Tensor | None:
        """The scores of a weight, which is ranked by |value| without any."""
        if self.scores is None or _is_sparse(linear.weight.detach()):
            return None
        found: Any = self.scores(name, linear)
        wanted = linear.weight.shape
        if found is None or (isinstance(found, Tensor) and found.shape == wanted and found.dtype in DTYPES):
            return found
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidProblemError(
            f"scores: expected None or a tensor {list(wanted)} of one of {', '.join(map(str, DTYPES))} "
            f"for {name}, got {got}"
        )


RecipeLike = Sparse24Recipe | str | Mapping[str, "Sparse24Recipe | str"]


def to_sparse24(
    model: nn.Module,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    recipe: RecipeLike = "prune",
    progress: bool | None = None,
) -> SwapReport:
    """Swap the model's nn.Linear, and transformers' Conv1D and FalconLinear, for Sparse24Linear, in place.

    Stacked experts, as transformers holds them, become Sparse24Experts if these compute the same. They stay
    dense with a reason in the report if the recipe asks for trainable weights or a ``weight_dtype``, or if
    their CUDA device has no kernel for them.

    Parameters
    ----------
    model : torch.nn.Module
        A module that holds linear layers, on any device.
    include, exclude : sequences of str
        Patterns (``fnmatch``) of layers' and experts' qualified names, or of their weights'. Without
        ``include`` all are taken except output heads, routers and adapters (``compress_checkpoint`` has the
        same defaults). A layer that ``include`` names must be swappable; others that aren't are skipped.
    recipe : Sparse24Recipe, str or mapping
        A recipe, a method of ``Sparse24Linear.from_linear``, or a mapping from patterns of names to either.
        The first pattern that matches counts; layers that no pattern matches are skipped. Every pattern must
        match a layer.
    progress : bool, optional
        Whether to show a progress bar on stderr. The default is whether stderr is a terminal.

    A layer that the model holds under several names is one layer: patterns may use any of them, the report
    has the first, and the layer is replaced under all.

    Raises InvalidProblemError for a wrong model, pattern or recipe, and before anything is swapped for an
    included layer that can't be swapped. ``scores`` alone are asked for while layers are swapped: if they are
    wrong, earlier layers stay swapped.
    """
    if not isinstance(model, nn.Module) or _has_no_place(model):
        raise InvalidProblemError(
            f"model: expected a module that holds linear layers or experts, got {type(model).__name__}"
        )
    choice = Choice(model, include, exclude, recipe)
    census = _Census(model)
    layers: list[SwappedLayer] = []
    with progress_bar(len(choice.chosen) + len(choice.experts), progress) as advance:
        for name, how in {**choice.chosen, **choice.experts}.items():
            try:
                swapped, entries = _swapped(name, model.get_submodule(name), how)
            except FormatError as error:  # included layers were checked by Choice
                choice.skip(name, str(error))
            else:
                put(model, choice.aliases[name], swapped)
                layers += entries
            advance()
    done = {layer.name for layer in layers}
    left = [
        replace(one, reason=choice.skipped.get(one.name, one.reason))
        for one in census.matrices
        if one.name not in done
    ]
    return SwapReport(tuple(layers), tuple(left), census.earlier, census.total)


def _has_no_place(model: nn.Module) -> bool:
    """Whether the model is itself what a swap would replace."""
    return is_linear(model) or (holds_stacks(model) and obstacle(model) is None)


def _swapped(
    name: str, module: nn.Module, how: Sparse24Recipe
) -> tuple[Sparse24Linear | Sparse24Experts, list[SwappedLayer]]:
    """Return what replaces a linear layer or experts, and its entries in the report."""
    if is_linear(module):
        layer = how.layer(name, module)
        return layer, [_entry(name, linear_of(module), layer)]
    experts = how.experts(name, module)
    stacks = stacks_of(module)
    return experts, [_entry(f"{name}.{own}", one, getattr(experts, own)) for own, one in stacks.items()]


class _Census:
    """Every matrix of a model before it is swapped, and the model's bytes."""

    def __init__(self, model: nn.Module) -> None:
        self.matrices: list[DenseMatrix] = []
        self.earlier: dict[str, int] = {}
        self.total = 0
        seen: set[int] = set()
        for name, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                if is_lazy(parameter):
                    raise InvalidProblemError(
                        f"model: expected sizes of all parameters, got none for {name}.{own} of a "
                        f"{type(module).__name__}; run the model once, which gives it its sizes"
                    )
                nbytes = 0 if id(parameter) in seen else parameter.nbytes
                seen.add(id(parameter))
                if isinstance(module, Sparse24Linear) and own != "bias":
                    continue
                self.total += nbytes
                if parameter.dim() > 1:
                    full = f"{name}.{own}".lstrip(".")
                    reason = _reason_beside(module, full, parameter)
                    shape = tuple(parameter.shape)
                    short = full.removesuffix(".weight")
                    self.matrices.append(DenseMatrix(short, shape, parameter.dtype, nbytes, reason))
            if isinstance(module, Sparse24Linear):
                self.earlier[name] = module.weight.shape.numel() * module.weight.dtype.itemsize
        self.total += sum(self.earlier.values())


def _reason_beside(module: nn.Module, name: str, parameter: Tensor) -> str:
    """Why a matrix that is no linear layer's weight stays dense."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding table, which is looked up, not multiplied"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if (known := reason_to_leave((name,), (), ())) is not None:
        return known
    if parameter.dim() > 2:
        return f"{parameter.dim()}-d (stacked matrices), which Sparse24Experts don't take"
    return f"a parameter of a {type(module).__name__}, which is not a linear layer"


def _is_sparse(weight: Tensor) -> bool:
    """Whether a weight [M, K] is 2:4 already; not known, so false, on the meta device."""
    if weight.is_meta:
        return False
    groups = nn.functional.pad(weight != 0, (0, -weight.shape[1] % 4)).unflatten(1, (-1, 4))
    return bool((groups.sum(-1, dtype=torch.uint8) <= 2).all())


class Choice:
    """Decides which layers are swapped and how, and notes why others aren't."""

    def __init__(
        self, model: nn.Module, include: Sequence[str], exclude: Sequence[str], recipe: RecipeLike
    ) -> None:
        found = {name: m for name, m in model.named_modules() if is_linear(m) or holds_stacks(m)}
        self.aliases = aliases_of(model)
        self._weights = {name: ["weight"] if is_linear(one) else [*STACKS] for name, one in found.items()}
        include, exclude = patterns_of("include", include), patterns_of("exclude", exclude)
        names = {one for name in found for one in self._names_of(name)}
        layers = {one for name in found for one in self.aliases[name]}
        recipes = patterns_of("recipe", tuple(recipe)) if isinstance(recipe, Mapping) else ()
        for argument, patterns, known in (
            ("include", include, names),
            ("exclude", exclude, names),
            ("recipe", recipes, layers),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(one, pattern) for one in known):
                    raise InvalidProblemError(
                        f"{argument}: pattern {pattern!r} matches no linear layer and no experts"
                    )
        owners = owners_of(model)
        self.chosen: dict[str, Sparse24Recipe] = {}
        self.experts: dict[str, Sparse24Recipe] = {}
        self.skipped: dict[str, str] = {}
        for name, module in found.items():
            if (left := reason_to_leave(self._names_of(name), include, exclude)) is not None:
                self.skip(name, left)
                continue
            how = _recipe_of(self.aliases[name], recipe)
            if how is None:
                reason: str | None = "no recipe matches"
            elif has_merged_adapter(model, self.aliases[name]):
                reason = "an adapter is merged into it; unmerge the adapter, or call merge_and_unload"
            else:
                reason = _obstacle_of_any(module, how, owners, to_values=bool(include))
            if reason is None and how is not None:
                (self.chosen if is_linear(module) else self.experts)[name] = how
            elif include:
                raise InvalidProblemError(f"{name}: expected a layer that can be swapped: {reason}")
            else:
                self.skip(name, str(reason))

    def skip(self, name: str, reason: str) -> None:
        """Note why a layer, or both stacks of experts, stay dense."""
        weights = [f"{name}.{own}".lstrip(".") for own in self._weights[name]]
        self.skipped |= dict.fromkeys([name] if len(weights) == 1 else weights, reason)

    def _names_of(self, name: str) -> list[str]:
        """The names of a layer or of experts, and of their weights or stacks, as checkpoints name them."""
        names = self.aliases[name]
        return [*names, *(f"{one}.{own}".lstrip(".") for one in names for own in self._weights[name])]


def _obstacle_of_any(
    module: nn.Module, how: Sparse24Recipe, owners: Counter[int], *, to_values: bool
) -> str | None:
    """Why a layer or experts can't be swapped, or None. Values that aren't 2:4 count if ``to_values``."""
    stacked = not is_linear(module)
    reason = (_obstacle_of_experts if stacked else obstacle_of)(module, how, owners)
    if reason is not None or not to_values or how.method != "compress":
        return reason
    linears = stacks_of(module).values() if stacked else [linear_of(module)]
    return next(filter(None, map(_not_sparse, linears)), None)


def stacks_of(module: nn.Module) -> dict[str, nn.Linear]:
    """The stacked weights [E, M, K] of experts, each as an nn.Linear [E*M, K] that shares its memory."""
    return {name: as_linear(getattr(module, name).detach().flatten(0, 1)) for name in STACKS}


def _recipe_of(names: Sequence[str], recipe: RecipeLike) -> Sparse24Recipe | None:
    """The recipe of a layer with these names, or None if the mapping has none."""
    if isinstance(recipe, Mapping):
        matching = (how for pattern, how in recipe.items() if any(fnmatchcase(one, pattern) for one in names))
        found = next(matching, None)
        if found is None:
            return None
        recipe = found
    if isinstance(recipe, str):
        return Sparse24Recipe(recipe)
    if not isinstance(recipe, Sparse24Recipe):
        raise InvalidProblemError(
            f"recipe: expected a Sparse24Recipe, a method or a mapping, got {type(recipe).__name__}"
        )
    return recipe


def obstacle_of(module: nn.Module, recipe: Sparse24Recipe, owners: Counter[int]) -> str | None:
    """Why a layer can't be swapped, or None. ``owners`` are the model's, from :func:`owners_of`."""
    if not is_swappable(module):
        return f"it is a {type(module).__module__}.{type(module).__name__}, not an nn.Linear"
    weight: Any = module.weight
    bias: Any = module.bias
    if type(weight) not in (nn.Parameter, Tensor):
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in DTYPES:
        return f"its dtype is {weight.dtype}"
    if (reason := _not_storable(recipe, weight.dtype)) is not None:
        return reason
    if has_hooks(module):
        return "it has hooks, which a swap would lose"
    if others := others_in(module):
        return f"it holds {', '.join(others)}, which a swap would lose"
    rows = weight.shape[1 if is_conv1d(module) else 0]
    if recipe.method == "tiles" and rows % 8:
        return f"tiles need out_features in multiples of 8, got {rows}"
    try:
        check_rows(recipe.activation, rows)
        if bias is not None:
            check_bias(bias.dtype, weight.dtype)
        Sparse24Linear._check_out_dtype(recipe.out_dtype, recipe.weight_dtype or weight.dtype)
    except InvalidProblemError as error:
        return str(error)
    shared = [name for name in ("weight", "bias") if owners[id(getattr(module, name))] > 1]
    if "weight" in shared or (shared and recipe.trainable):  # a frozen bias stays equal to its copy
        return f"its {shared[0]} is shared with another module"
    return None


def _not_storable(recipe: Sparse24Recipe, dtype: torch.dtype) -> str | None:
    """Why a weight of this dtype can't have the values that the recipe wants to store, or None."""
    if recipe.stored is None or dtype != torch.float32:
        return None
    return f"values in {recipe.stored} need a weight of float16 or bfloat16, got {dtype}"


def _obstacle_of_experts(module: nn.Module, recipe: Sparse24Recipe, owners: Counter[int]) -> str | None:
    """Why stacked experts can't be swapped, or None. ``owners`` are the model's."""
    if (reason := obstacle(module)) is not None:
        return f"stacked experts that Sparse24Experts don't take: {reason}"
    weights = [getattr(module, name) for name in STACKS]
    if any(map(has_hooks, module.modules())):
        return "it has hooks, which a swap would lose"
    if any(owners[id(weight)] > 1 for weight in weights):
        return "its weights are shared with another module"
    if recipe.weight_dtype is not None or recipe.trainable:
        reason = "weights can't be trained" if recipe.trainable else "inputs can't be quantized"
        return f"stacked experts, whose {reason} in Sparse24Experts"
    if (reason := _not_storable(recipe, weights[0].dtype)) is not None:
        return reason
    if recipe.activation != "none" or recipe.out_dtype not in (None, weights[0].dtype):
        return "stacked experts, which have an activation and an out_dtype of their own"
    if (reason := other_meaning(module)) is not None:
        return f"stacked experts that Sparse24Experts don't take: {reason}"
    return no_kernel(module, weights[1].device, **recipe.of_experts)


def _not_sparse(linear: nn.Linear) -> str | None:
    try:
        Sparse24Linear.from_linear(linear, method="compress")
    except FormatError as error:
        return str(error)
    return None


def _entry(name: str, linear: nn.Linear, layer: Sparse24Linear) -> SwappedLayer:
    weight = linear.weight.detach()
    energy, was_sparse = float("nan"), False
    if not weight.is_meta:
        values = layer.canonical()[0].detach()
        if isinstance(layer, Sparse24QuantizedLinear):  # rounding may have made more zeros
            values, was_sparse = values.double() * layer.weight_scale, _is_sparse(weight)
        elif isinstance(layer, Sparse24WeightOnlyLinear):
            values, was_sparse = layer.kept_values(values), _is_sparse(weight)
        else:
            was_sparse = bool(values.count_nonzero() == weight.count_nonzero())
        kept, whole = _squares(values), _squares(weight)
        energy = 1.0 if was_sparse and math.isfinite(kept) else kept / whole
    sizes = layer.out_features, layer.in_features
    nbytes = weight.nbytes, layer.weight_bytes
    return SwappedLayer(name, *sizes, weight.dtype, energy, *nbytes, layer.k, was_sparse)


def _squares(matrix: Tensor) -> float:
    """The sum of squares, in float64 for some rows at a time: experts are large."""
    rows = max(1, _BLOCK // max(matrix.shape[1], 1))
    found: float = sum(part.double().square().sum().item() for part in matrix.split(rows))
    return found


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar of ``total`` steps on stderr. The context is the function that advances it."""
    if wanted is None:
        wanted = sys.stderr.isatty()
    if not wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("2:4", total=total)
        yield lambda: bar.advance(task)
