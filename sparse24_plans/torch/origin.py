"""Notes on dense modules that ``calibrate`` made their weights, as checkpoints say it.

A note holds as long as the zeros of the weights stay: moves, copies and other dtypes keep them, and a
``state_dict`` that is loaded later brings its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

_NOTE = "_sparse24_origin"
"""The attribute of a dense module that holds its note."""


def note_origin(module: nn.Module, origin: Mapping[str, Any]) -> None:
    """Note how the weights of a dense module, as they are, were made; empty: nothing is known."""
    vars(module)[_NOTE] = origin, _zeros_of(module) if origin else ""


def noted_origin(module: nn.Module) -> Mapping[str, Any]:
    """How the weights of a dense module were made, in a checkpoint's words; empty if no note holds."""
    found: tuple[Mapping[str, Any], str] = vars(module).get(_NOTE, ({}, ""))
    origin, zeros = found
    return origin if origin and _zeros_of(module) == zeros else {}


def _zeros_of(module: nn.Module) -> str:
    """A hash of where the module's own matrices have zeros; on the meta device, of their shapes alone."""
    found = hashlib.sha256()
    for name, weight in module.named_parameters(recurse=False):
        if weight.dim() > 1:
            found.update(f"{name}{list(weight.shape)}".encode())
            if not weight.is_meta:
                kept = (weight.detach() != 0).cpu().numpy()
                found.update(np.packbits(kept).tobytes())
    return found.hexdigest()
