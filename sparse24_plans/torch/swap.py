"""``to_sparse24`` swaps the linear layers of a model for 2:4 ones, in place, and reports what it did."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..checkpoints.selection import check_callback, patterns_of
from ..errors import FormatError, InvalidProblemError
from ..vocab import TileRule
from .activations import check_activation, check_rows
from .linear import DTYPES, METHODS, PreferenceLike, RequirementLike, Sparse24Linear


@dataclass(frozen=True)
class Sparse24Recipe:
    """How a layer's weight becomes 2:4. The fields are arguments of Sparse24Linear and ``from_linear``.

    ``activation`` is for models that don't apply it themselves. ``scores`` is called with a layer's name and
    the layer; it returns scores [M, K], or None to rank by |value|.
    """

    method: str = "prune"
    rule: TileRule | str = TileRule.OPTIMAL
    scores: Callable[[str, nn.Linear], Tensor | None] | None = None
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    trainable: bool = False
    require: RequirementLike = None
    preference: PreferenceLike = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidProblemError(f"recipe: expected one of {', '.join(METHODS)}, got {self.method!r}")
        check_callback("scores", self.scores)
        check_activation(self.activation)

    def layer(self, name: str, linear: nn.Linear) -> Sparse24Linear:
        """The Sparse24Linear that replaces ``linear``."""
        return Sparse24Linear.from_linear(
            linear,
            method=self.method,
            rule=self.rule,
            scores=self.scores(name, linear) if self.scores else None,
            activation=self.activation,
            out_dtype=self.out_dtype,
            trainable=self.trainable,
            require=self.require,
            preference=self.preference,
        )


RecipeLike = Sparse24Recipe | str | Mapping[str, "Sparse24Recipe | str"]


@dataclass(frozen=True)
class SwappedLayer:
    """One layer that was swapped.

    ``kept_energy`` is the kept share of the weight's sum of squares; NaN for a weight on the meta device.
    """

    name: str
    m: int
    k: int
    dtype: torch.dtype
    kept_energy: float
    dense_bytes: int
    sparse_bytes: int
    padded_k: int


@dataclass(frozen=True)
class SwapReport:
    """The result of ``to_sparse24``: swapped ``layers``, and ``skipped`` linear layers with the reasons."""

    layers: tuple[SwappedLayer, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the swapped weights before."""
        return sum(layer.dense_bytes for layer in self.layers)

    @property
    def sparse_bytes(self) -> int:
        """Bytes of the swapped weights after."""
        return sum(layer.sparse_bytes for layer in self.layers)

    @property
    def least_kept_energy(self) -> float:
        """The kept energy of the layer that lost most; 1 if nothing was swapped."""
        return min((layer.kept_energy for layer in self.layers), default=1.0)

    def __str__(self) -> str:
        lines = [
            f"{layer.name}: [{layer.m}, {layer.k}] {str(layer.dtype).removeprefix('torch.')}, "
            f"kept {layer.kept_energy:.1%} of the energy, {layer.dense_bytes} -> {layer.sparse_bytes} bytes"
            for layer in self.layers
        ]
        lines += [f"{name}: skipped, {reason}" for name, reason in self.skipped.items()]
        lines.append(
            f"{len(self.layers)} layers swapped, {len(self.skipped)} skipped; "
            f"{self.dense_bytes} -> {self.sparse_bytes} bytes of weights"
        )
        return "\n".join(lines)


def to_sparse24(
    model: nn.Module,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    recipe: RecipeLike = "prune",
    progress: bool | None = None,
) -> SwapReport:
    """Swap the model's ``nn.Linear`` layers for Sparse24Linear, in place.

    Parameters
    ----------
    model : torch.nn.Module
        A module that holds linear layers, on any device.
    include, exclude : sequences of str
        Patterns (``fnmatch``) of layers' qualified names. Without ``include`` all layers are taken. A layer
        that ``include`` names must be swappable; other layers that aren't are skipped.
    recipe : Sparse24Recipe, str or mapping
        A recipe, a method of ``Sparse24Linear.from_linear``, or a mapping from patterns of names to either.
        The first pattern that matches counts; layers that no pattern matches are skipped.
    progress : bool, optional
        Whether to show a progress bar on stderr. The default is whether stderr is a terminal.

    Raises InvalidProblemError for a wrong model, pattern or recipe, and before anything is swapped for an
    included layer that can't be swapped.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.Linear):
        raise InvalidProblemError(
            f"model: expected a module that holds linear layers, got {type(model).__name__}"
        )
    choice = _Choice(model, include, exclude, recipe)
    layers: list[SwappedLayer] = []
    with _progress(len(choice.chosen), progress) as advance:
        for name, how in choice.chosen.items():
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            try:
                swapped = how.layer(name, linear)
            except FormatError as error:  # included layers were checked by _Choice
                choice.skipped[name] = str(error)
            else:
                layers.append(_entry(name, linear, swapped))
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, swapped)
            advance()
    return SwapReport(tuple(layers), choice.skipped)


class _Choice:
    """Decides which layers are swapped and how, and notes why others aren't."""

    def __init__(
        self, model: nn.Module, include: Sequence[str], exclude: Sequence[str], recipe: RecipeLike
    ) -> None:
        linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        include, exclude = patterns_of("include", include), patterns_of("exclude", exclude)
        for argument, patterns in (("include", include), ("exclude", exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in linears):
                    raise InvalidProblemError(f"{argument}: pattern {pattern!r} matches no linear layer")
        owners = owners_of(model)
        self.chosen: dict[str, Sparse24Recipe] = {}
        self.skipped: dict[str, str] = {}
        for name, linear in linears.items():
            if _matches(name, exclude) or (include and not _matches(name, include)):
                self.skipped[name] = "excluded" if _matches(name, exclude) else "not included"
                continue
            how = _recipe_of(name, recipe)
            reason = "no recipe matches" if how is None else obstacle_of(linear, how, owners)
            named = _matches(name, include)
            if reason is None and named and how is not None and how.method == "compress":
                reason = _not_sparse(linear)
            if reason is None and how is not None:
                self.chosen[name] = how
            elif named:
                raise InvalidProblemError(f"{name}: expected a layer that can be swapped: {reason}")
            else:
                self.skipped[name] = str(reason)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _recipe_of(name: str, recipe: RecipeLike) -> Sparse24Recipe | None:
    if isinstance(recipe, Mapping):
        found = next((how for pattern, how in recipe.items() if fnmatchcase(name, pattern)), None)
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


def owners_of(model: nn.Module) -> Counter[int]:
    """The number of modules that own each parameter, by the parameter's id."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def obstacle_of(linear: nn.Module, recipe: Sparse24Recipe, owners: Counter[int]) -> str | None:
    """Why a layer can't be swapped, or None. ``owners`` are the model's, from :func:`owners_of`."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, not an nn.Linear"
    weight = linear.weight
    if type(weight) not in (nn.Parameter, Tensor):
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in DTYPES:
        return f"its dtype is {weight.dtype}"
    if has_hooks(linear):
        return "it has hooks, which a swap would lose"
    if recipe.method == "tiles" and linear.out_features % 8:
        return f"tiles need out_features in multiples of 8, got {linear.out_features}"
    try:
        check_rows(recipe.activation, linear.out_features)
    except InvalidProblemError as error:
        return str(error)
    return "its weight is shared with another module" if owners[id(weight)] > 1 else None


def _not_sparse(linear: nn.Linear) -> str | None:
    try:
        Sparse24Linear.from_linear(linear, method="compress")
    except FormatError as error:
        return str(error)
    return None


def _entry(name: str, linear: nn.Linear, layer: Sparse24Linear) -> SwappedLayer:
    weight = linear.weight.detach()
    energy = float("nan")
    if not weight.is_meta:
        values, _ = layer.canonical()
        kept, whole = (t.detach().to(torch.float64).square().sum().item() for t in (values, weight))
        energy = kept / whole if whole else 1.0
    sizes = layer.out_features, layer.in_features
    return SwappedLayer(name, *sizes, weight.dtype, energy, weight.nbytes, layer.weight_bytes, layer.k)


@contextmanager
def _progress(total: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
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
