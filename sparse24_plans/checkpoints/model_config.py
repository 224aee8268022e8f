"""The sparsity configuration in a model's ``config.json``: compressed-tensors' alone has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._vendor import compressed_tensors
from ..errors import FormatError, InvalidProblemError
from .folder import CONFIG_NAME


def without_sparsity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what compressed-tensors says of sparsity; its quantisation stays."""
    changed = dict(config)
    for key in compressed_tensors.CONFIG_KEYS:
        section = changed.get(key)
        if isinstance(section, dict) and section.get("quant_method") in (None, compressed_tensors.METHOD):
            rest = {name: value for name, value in section.items() if name != "sparsity_config"}
            changed[key] = rest
            if not rest.get("config_groups"):  # it configured the sparsity alone
                del changed[key]
    return changed


def with_sparsity(config: Mapping[str, Any], modules: list[str], sparsity: float) -> dict[str, Any]:
    """The configuration of a model of compressed-tensors whose ``modules`` are 2:4.

    Raises FormatError where its quantisation is no object, InvalidProblemError where it is another's.
    """
    key = compressed_tensors.CONFIG_KEYS[0]
    section = config.get(key)
    if section is None:
        section = {"quant_method": compressed_tensors.METHOD, "format": "dense"}
    if not isinstance(section, dict):
        raise FormatError(f"{CONFIG_NAME}: {key}: expected an object, got {type(section).__name__}")
    if section.get("quant_method") != compressed_tensors.METHOD:
        raise InvalidProblemError(
            f"{CONFIG_NAME}: expected no quantisation or compressed-tensors', got "
            f"{section.get('quant_method')!r:.80}"
        )
    return {
        **config,
        key: {**section, "sparsity_config": compressed_tensors.sparsity_config(modules, sparsity)},
    }
