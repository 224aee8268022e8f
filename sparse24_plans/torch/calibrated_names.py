"""Finds the parts of calibrated weights that the tensors of a model's checkpoint hold.

transformers stacks the matrices of experts when it loads a checkpoint that has one for each expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from .checkpoint_names import Merged, conversions_of, may_transpose, placed
from .conv1d import is_linear, linear_of
from .experts import STACKS, holds_stacks


class Part(NamedTuple):
    """Rows of a weight [M, K] that ``calibrate`` can prune."""

    home: str
    """The name of the module: of a linear layer, or of experts."""
    weight: str
    """The weight's name in a CalibrationReport."""
    rows: slice


def parts_by_tensor(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """The part of a calibrated weight that each tensor of the model's checkpoint holds, by its name.

    ``shapes`` are the shapes of the checkpoint's tensors. Tensors that hold no such part are left out.
    """
    known: dict[str, Part] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if is_linear(module):
            known[f"{name}.weight"] = Part(name, name, slice(None))
        for own in STACKS if holds_stacks(module) else ():
            known[f"{name}.{own}"] = Part(name, f"{name}.{own}", slice(None))
            sizes[f"{name}.{own}"] = tuple(getattr(module, own).shape)
    direct, merged = placed(model, list(shapes), model.state_dict().keys(), conversions_of(model))
    found = {name: known[own] for name, own in direct.items() if own in known}
    for one in merged:
        if one.target not in sizes:
            continue
        if one.stacks_rows:
            found |= _parts_of_experts(one, known[one.target], sizes[one.target])
        elif may_transpose(one.converter):
            same = [name for name, _ in one.sources if shapes[name] == sizes[one.target]]
            found |= dict.fromkeys(same, known[one.target])
    return found


def _parts_of_experts(merged: Merged, whole: Part, size: tuple[int, ...]) -> dict[str, Part]:
    """For each matrix that a converter stacks to [E, M, K], its rows of the stack."""
    experts, m, _ = size
    patterns = list(dict.fromkeys(merged.converter.source_patterns))
    if len(merged.sources) != experts * len(patterns):
        return {}
    rows = m // len(patterns)
    count: Counter[str] = Counter()
    found = {}
    for name, pattern in merged.sources:
        begin = count[pattern] * m + patterns.index(pattern) * rows
        found[name] = whole._replace(rows=slice(begin, begin + rows))
        count[pattern] += 1
    return found


def homes_of(model: nn.Module) -> set[str]:
    """The names of the linear layers and of the stacked experts of a model."""
    return {name for name, one in model.named_modules() if is_linear(one) or holds_stacks(one)}


def whole_parts(parts: Mapping[str, Part], selected: Collection[str]) -> dict[str, Part]:
    """The parts of the modules whose tensors are all selected."""
    split = {part.home for name, part in parts.items() if name not in selected}
    return {name: part for name, part in parts.items() if part.home not in split}


def matrix_of(model: nn.Module, part: Part) -> Tensor:
    """The rows of a part, as the model has them."""
    module: Any = model.get_submodule(part.home)
    if is_linear(module):
        return linear_of(module).weight.detach()
    stack: Tensor = getattr(module, part.weight.rpartition(".")[2])
    return stack.detach().flatten(0, 1)[part.rows]
