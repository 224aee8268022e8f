"""LoRA adapters of PEFT beside 2:4 layers."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from ..errors import BackendUnavailableError, UnsupportedError, check_type
from .experts import ExpertsWeight
from .linear import Sparse24Linear

_STARTS = (True, False, "gaussian", "eva")
"""Values of PEFT's ``init_lora_weights`` that leave the layer's own weight as it is."""


def lora_config(config: Any) -> Any:
    """Make a PEFT configuration of LoRA adapt Sparse24Linear layers, and return it.

    The adapters train and the 2:4 weight stays frozen. PEFT doesn't store this: do it also to a configuration
    that was read for ``PeftModel.from_pretrained(model, folder, config=)``. Merging raises UnsupportedError,
    because the sum is not 2:4; so do variants that read or change the dense weight (DoRA, PiSSA) or are made
    for merging (QA-LoRA), ``target_parameters`` of 2:4 layers, and layers with an activation, whose result
    isn't the product's.

    Raises BackendUnavailableError without PEFT, InvalidProblemError for anything but a LoraConfig.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise BackendUnavailableError("PEFT is not installed: pip install peft") from error
    check_type("config", config, LoraConfig, "a peft.LoraConfig")
    config._register_custom_module({Sparse24Linear: _adapter()})
    return config


@cache
def _adapter() -> type[Any]:
    """The class of adapters. PEFT is imported when it is first asked for."""
    from peft.tuners import lora

    class LoraSparse24Linear(lora.Linear):  # type: ignore[misc]
        """A Sparse24Linear with LoRA adapters beside it."""

        def __init__(self, base_layer: Any, adapter_name: str, config: Any, **options: Any) -> None:
            layer = getattr(base_layer, "base_layer", base_layer)
            if (part := options.get("parameter_name")) is not None:
                raise UnsupportedError(
                    f"target_parameters: expected parameters of dense modules, got {part} of a "
                    f"{type(layer).__name__}; name the layer in target_modules"
                )
            if isinstance(layer, ExpertsWeight):
                raise UnsupportedError(
                    "target_modules: expected linear layers, got a weight of Sparse24Experts; name it in "
                    "exclude_modules"
                )
            if layer.activation != "none":
                raise UnsupportedError(
                    f"target_modules: expected layers without an activation, got one with {layer.activation}"
                )
            with warnings.catch_warnings():  # PEFT warns of every class that it doesn't know
                warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
                super().__init__(base_layer, adapter_name, config=config, **options)

        def update_layer(
            self, adapter_name: str, r: int, lora_alpha: int, config: Any, **options: Any
        ) -> None:
            """Add an adapter. Raises UnsupportedError for one that needs the dense weight."""
            if config.use_qalora:
                raise UnsupportedError(
                    "use_qalora: expected False, as no adapter is merged into a 2:4 weight, got True"
                )
            variant = self.resolve_lora_variant(config=config)
            if variant is not None or config.init_lora_weights not in _STARTS:
                raise UnsupportedError(
                    f"config: expected plain LoRA with init_lora_weights one of {_STARTS}, got "
                    f"{config.init_lora_weights!r:.80}"
                    + (f" and {type(variant).__name__}" if variant else "")
                )
            super().update_layer(adapter_name, r, lora_alpha, config=config, **options)

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            """Raise UnsupportedError: the sum of a 2:4 weight and an adapter is not 2:4."""
            raise UnsupportedError(
                "merge: expected the adapter to stay beside the 2:4 weight, whose sum with it is not 2:4; "
                "serve both, or merge into the dense model and swap that"
            )

    return LoraSparse24Linear
