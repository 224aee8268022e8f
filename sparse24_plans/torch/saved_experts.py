"""Finds the experts of a checkpoint that a model takes as Sparse24Experts.

A checkpoint has a matrix for each expert, which transformers' converters stack, or the stacks themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..checkpoints.layers import Layer, origin_in, origin_of_all
from ..device.log import LOAD
from ..errors import InvalidProblemError
from ..weights.packed_layouts import Quantization
from .activations import GATED_ACTIVATIONS
from .checkpoint_names import Merged, may_transpose, place_of
from .elements import DTYPE_OF, stored_form
from .experts import STACKS, Sparse24Experts, as_rows, holds_stacks, is_known, obstacle
from .linear import DTYPES
from .saved_form import SavedForm, SavedLayer

Source = str | Merged
"""The name of a stored stack, or the matrices that a converter stacks."""


class StoredExperts:
    """The experts of a model whose weights are 2:4 in a checkpoint.

    ``weights`` are the checkpoint's compressed weights; ``direct`` and ``merged`` are the places of its
    tensors, from :func:`placed`. With ``stay_dense`` no dense module gives way. ``sources`` has, by the names
    of modules and of their stacks, where a stack comes from; ``saved`` has what experts were saved with.

    Raises InvalidProblemError if ``form`` names a module that can't be Sparse24Experts, or whose weights
    aren't 2:4 in the checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        form: SavedForm,
        weights: Mapping[str, Layer],
        direct: Mapping[str, str],
        merged: Sequence[Merged],
        *,
        stay_dense: bool = False,
    ) -> None:
        known = dict(model.named_modules())
        self._weights = weights
        self.saved = {
            own: saved for name, saved in form.experts.items() if (own := place_of(model, name, known))
        }
        owners = Counter(id(p) for m in known.values() for p in m.parameters(recurse=False))
        for name, saved in self.saved.items():
            _check(name, known[name], saved)
        shapes = stack_shapes(model)
        # Weights of 8 bits don't count.
        plain = {name for name, one in weights.items() if DTYPE_OF[one.element] in DTYPES}
        places: dict[str, Source] = {own: name for name, own in direct.items() if name in plain}
        places |= {one.target: one for one in merged if _is_stacked(one, plain)}
        places |= {
            one.target: name
            for one in merged
            if may_transpose(one.converter)
            for name, _ in one.sources
            if name in plain and shapes.get(one.target) == weights[name].dense_shape
        }
        found: dict[str, dict[str, Source]] = {}
        for name, module in known.items():
            stacks = {stack: places[f"{name}.{stack}"] for stack in STACKS if f"{name}.{stack}" in places}
            if len(stacks) < len(STACKS):
                continue
            if isinstance(module, Sparse24Experts) or (
                not stay_dense and self._gives_way(name, module, owners)
            ):
                found[name] = stacks
        compressed = [one for one in merged if any(source in weights for source, _ in one.sources)]
        self.sources = _without_mixed(found, compressed)
        self.targets = {f"{name}.{stack}" for name in self.sources for stack in STACKS}
        """The names of the stacks in the model."""
        lost = set() if stay_dense else self.saved.keys() - self.sources.keys()
        if lost:
            raise InvalidProblemError(
                f"experts: {min(lost)}: expected 2:4 weights of the checkpoint, got others"
            )

    def source_of(self, target: str) -> Source | None:
        """Return the source of the model's stack of this name, or None if it isn't 2:4."""
        name, _, stack = target.rpartition(".")
        return self.sources.get(name, {}).get(stack)

    def _gives_way(self, name: str, module: nn.Module, owners: Counter[int]) -> bool:
        """Whether Sparse24Experts can replace a dense module. The log says why a module of stacks stays."""
        if not holds_stacks(module):
            return False
        reason = obstacle(module)
        if any(owners[id(one)] > 1 for one in module.parameters()):
            reason = "another module shares its weights"
        elif reason is None and name not in self.saved and not is_known(module):
            reason = f"{type(module).__name__} isn't known to compute what transformers' experts do"
        if reason is not None:
            LOAD.warning("experts stay dense: %s: %s", name, reason)
        return reason is None

    def forms(self, name: str) -> set[Quantization | None]:
        """How the checkpoint stores the values of these experts' matrices."""
        return {self._weights[weight].quantization for weight in self.names_of(name)}

    def names_of(self, name: str) -> list[str]:
        """The checkpoint's names of these experts' weights."""
        sources = self.sources[name].values()
        return [own for one in sources for own in ([one] if isinstance(one, str) else dict(one.sources))]

    def form_of(self, name: str) -> dict[str, Any]:
        """The arguments by which Sparse24Experts store values as the checkpoint does.

        They are empty for values of 16 bits, and if the experts' matrices differ in how they are stored.
        """
        by = next(iter(forms)) if len(forms := self.forms(name)) == 1 else None
        if by is None:
            return {}
        return stored_form(by, self._weights[self.names_of(name)[0]].element)

    def origin_of(self, name: str, stack: str) -> dict[str, Any]:
        """How the values of a stack were made, by what the checkpoint says of its matrices."""
        source = self.sources[name][stack]
        names = [source] if isinstance(source, str) else dict(source.sources)
        return origin_of_all([origin_in(self._weights[one].options) for one in names])

    def like(self, name: str, module: nn.Module, **options: Any) -> Sparse24Experts:
        """The experts of zeros in place of a module. ``options`` win over those that were saved."""
        about = self.saved[name].options if name in self.saved else {}
        about.pop("out_dtype", None)
        return Sparse24Experts.like(module, **{**about, **options})


def stack_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes [E, M, K] of the stacks of experts, by their names, dense and 2:4."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        for stack in STACKS if holds_stacks(module) else ():
            found[f"{name}.{stack}"] = tuple(getattr(module, stack).shape)
        for stack in STACKS if isinstance(module, Sparse24Experts) else ():
            rows, columns = getattr(module, stack).weight.shape
            found[f"{name}.{stack}"] = (module.num_experts, rows // module.num_experts, columns)
    return found


def stack_of(
    model: Any, source: Source, read: Callable[[str], Mapping[str, Tensor]], key: str, shape: tuple[int, ...]
) -> Tensor:
    """A part of a stack, such as metadata [E, M, K/8], by its key in a layer. ``shape`` is E and M.

    ``read`` returns the parts of one weight.
    """
    if isinstance(source, str):
        return read(source)[key].reshape(*shape, -1)
    (stack,) = source.result(model, lambda name: read(name)[key]).values()
    return stack


def state_of(stack: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an ExpertsWeight by its stacked parts, with its rows in the order of ``from_linear``."""
    return {key: as_rows(stack, part) for key, part in parts.items()}


def _check(name: str, module: nn.Module, saved: SavedLayer) -> None:
    """Raise InvalidProblemError for a saved module that isn't one of gated experts."""
    known = isinstance(module, Sparse24Experts)
    reason = None if known else obstacle(module)
    if saved.activation not in GATED_ACTIVATIONS or saved.out_dtype is not None:
        reason = f"expected a gated activation and no out_dtype, got {saved}"
    if reason is not None:
        raise InvalidProblemError(f"experts: {name}: {reason}")


def _is_stacked(merged: Merged, plain: Container[str]) -> bool:
    """Whether a stack is made of matrices that are in ``plain``, and nothing else."""
    return merged.stacks_rows and all(name in plain for name, _ in merged.sources)


def _without_mixed(
    found: dict[str, dict[str, Source]], compressed: Sequence[Merged]
) -> dict[str, dict[str, Source]]:
    """The experts without those that share a converter with stacks that must be decompressed."""
    while True:
        taken = {f"{name}.{stack}" for name in found for stack in STACKS}
        mixed = {id(one.converter) for one in compressed if one.target not in taken}
        left = {
            name: stacks
            for name, stacks in found.items()
            if not any(isinstance(one, Merged) and id(one.converter) in mixed for one in stacks.values())
        }
        if len(left) == len(found):
            return left
        found = left
