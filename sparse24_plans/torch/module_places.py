"""Finds what else of a model refers to a module that is to be replaced: names, holders, owners and hooks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn


def aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """All names of a module, for each of its names. The first is its name in ``named_modules``.

    Modules themselves aren't held, so that each can be freed when it is replaced.
    """
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return {name: same for same in names.values() for name in same}


def put(model: nn.Module, names: Sequence[str], module: nn.Module) -> None:
    """Replace the module that has these names under all of them, because they mean one module."""
    for name in names:
        model.set_submodule(name, module)


def is_held_once(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether one attribute of one module holds the module with these names, however often that is named."""
    homes = (name.rpartition(".") for name in names)
    return len({(id(model.get_submodule(home)), own) for home, _, own in homes}) == 1


def owners_of(model: nn.Module) -> Counter[int]:
    """The number of modules that own each parameter, by the parameter's id."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def has_hooks(module: nn.Module) -> bool:
    """Whether the module does more than its class: by hooks, or by a forward of its own (accelerate's)."""
    own = vars(module)
    return "forward" in own or any(hooks for key, hooks in own.items() if key.endswith("_hooks"))


def others_in(module: nn.Module) -> list[str]:
    """Names of what a linear layer holds besides its weight and bias: parameters, buffers and modules."""
    alone: Any = {"recurse": False, "remove_duplicate": False}
    held = (module.named_parameters(**alone), module.named_buffers(**alone), module.named_children())
    return sorted({name for kind in held for name, _ in kind} - {"weight", "bias"})


def has_merged_adapter(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether PEFT has added an adapter to the weights of the module. Doesn't import PEFT."""
    home = sys.modules.get("peft.tuners.tuners_utils")
    kind: Any = getattr(home, "BaseTunerLayer", ())
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            holder = model.get_submodule(name)
            if not isinstance(holder, kind):
                break
            if holder.merged:
                return True
    return False
