"""Places of a checkpoint's tensors in a model.

transformers 5 builds some models otherwise than their checkpoints are: modules have other names, and the
matrices of experts are stacked. Its conversion mapping says how, and is followed here. transformers is
imported for its own models alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import InvalidProblemError, Sparse24Error


@dataclass
class Merged:
    """Tensors of a checkpoint from which one of transformers' converters makes tensors of the model.

    ``sources`` are their names in the checkpoint, each with the converter's pattern that it matches.
    """

    target: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def stacks_rows(self) -> bool:
        """Whether the converter does no more than to stack matrices and join their rows."""
        return stacks_rows(self.converter)

    def result(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name. ``read`` returns a tensor of the checkpoint.

        Raises InvalidProblemError for tensors that the converter can't take.
        """
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, lambda name=name: read(name))
        try:
            made = converter.convert(self.target, model=model, config=model.config)
        except Sparse24Error:  # from ``read``
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise InvalidProblemError(
                f"{self.target}: expected tensors that fit together: {error}"
            ) from error
        return {own: one[0] if isinstance(one, list) else one for own, one in made.items()}


def conversions_of(model: Any) -> list[Any]:
    """The transforms by which transformers loads a checkpoint into the model; none for other modules."""
    if not is_transformers_model(model):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4 builds models as their checkpoints are
        return []
    found: list[Any] = get_model_conversion_mapping(model)
    return found


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model is a PreTrainedModel. Doesn't import transformers."""
    home = sys.modules.get("transformers.modeling_utils")
    return home is not None and isinstance(model, home.PreTrainedModel)


def placed(
    model: nn.Module, names: Sequence[str], known: Container[str], transforms: Sequence[Any]
) -> tuple[dict[str, str], list[Merged]]:
    """The model's name for each tensor of a checkpoint, and those that converters make of several.

    ``known`` are the names of the model's tensors, from which a checkpoint's may differ by the prefix of the
    inner model. Names that fit nothing are left out.
    """
    renamings = [one for one in transforms if not is_converter(one)]
    converters = [one for one in transforms if is_converter(one)]
    direct: dict[str, str] = {}
    merged: dict[str, Merged] = {}
    for name in sorted(names, key=_by_number):
        renamed, converter, pattern = renamed_by(renamings, name), None, None
        for one in converters:
            renamed, pattern = one.rename_source_key(renamed)
            if pattern is not None:
                converter = one
                break
        own = place_of(model, renamed, known)
        if own is not None and converter is not None and pattern is not None:
            merged.setdefault(own, Merged(own, converter)).sources.append((name, pattern))
        elif (own := own or place_of(model, name, known)) is not None:
            direct[name] = own
    return {name: direct[name] for name in names if name in direct}, list(merged.values())


def is_converter(transform: Any) -> bool:
    """Whether a transform computes tensors, and doesn't only rename them."""
    return hasattr(transform, "operations")


def may_transpose(converter: Any) -> bool:
    """Whether a converter transposes a tensor unless it has the shape of the model's."""
    steps = converter.operations
    return all(type(one).__name__ == "Transpose" and getattr(one, "check_dims", False) for one in steps)


def stacks_rows(converter: Any) -> bool:
    """Whether a converter stacks the matrices of experts, and perhaps joins those of gate and up by rows.

    Then it does the same to the parts of compressed matrices.
    """
    steps = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def renamed_by(renamings: Iterable[Any], name: str) -> str:
    """The name after all renamings, one after the other."""
    for one in renamings:
        name, _ = one.rename_source_key(name)
    return name


def place_of(model: nn.Module, name: str, known: Container[str]) -> str | None:
    """The name in ``known`` that is the given one, perhaps with or without the inner model's prefix."""
    inner = f"{getattr(model, 'base_model_prefix', '')}."
    return next((own for own in (name, inner + name, name.removeprefix(inner)) if own in known), None)


def _by_number(name: str) -> list[int | str]:
    """A key by which ``experts.10`` comes after ``experts.9``: converters stack experts in this order."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
