"""Checkpoints of quantized 2:4 weights in other libraries' formats: marlin-24, pack-quantized, GPTQ, AWQ.

The parts of a weight ``PREFIX.weight`` are the tensors ``PREFIX.PART``. Such checkpoints are read alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .._vendor.compressed_tensors import CONFIG_KEYS
from ..errors import Sparse24Error, UnsupportedError
from ..formats.convert import from_foreign
from ..formats.quantized import QuantizedFormat
from ..vocab import ElementKind
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import Sparse24Weight
from .checkpoint_base import CheckpointFormat, array_of, checked, parts_in
from .folder import ModelReader
from .layers import Layer, located
from .safetensors_file import TensorInfo

_WEIGHT = ".weight"


class QuantizedCheckpoint(CheckpointFormat):
    """A format of quantized weights, which become Sparse24QuantizedWeights."""

    def __init__(self, known: QuantizedFormat) -> None:
        self.name, self._known = known.name, known

    def find(self, model: ModelReader, target: CheckpointFormat) -> tuple[list[Layer], dict[str, str]]:
        """The weights. Each is read once to tell its size and form, and once more when it is converted."""
        suffix = f".{self._known.parts[0]}"
        prefixes = [name.removesuffix(suffix) for name in model.tensors if name.endswith(suffix)]
        wanted = (*self._known.options, "element")
        said = {name: one for name, one in _options_in(model.config() or {}).items() if name in wanted}
        return checked(target, [self._layer(model, prefix, said) for prefix in prefixes])

    def _layer(self, model: ModelReader, prefix: str, options: dict[str, Any]) -> Layer:
        sources = tuple(parts_in(model, prefix, self._known).values())
        layer = Layer(prefix + _WEIGHT, 0, 0, ElementKind.F16, sources, options)
        try:
            found = self.read_stored(model, layer)
        except Sparse24Error as error:
            raise located(model, layer, error) from error
        return replace(layer, m=found.m, k=found.k, element=found.element, quantization=found.quantization)

    def read_stored(self, model: ModelReader, layer: Layer) -> Sparse24QuantizedWeight:
        parts = {name.rpartition(".")[2]: array_of(model, name) for name in layer.sources}
        found = from_foreign(self.name, parts, **layer.options)
        assert isinstance(found, Sparse24QuantizedWeight)
        return found

    def read(self, model: ModelReader, layer: Layer) -> Sparse24Weight:
        return self.read_stored(model, layer).dequantize()

    def stored(self, layer: Layer) -> list[TensorInfo]:
        raise self._not_written()

    def arrays(self, layer: Layer, weight: Any) -> Iterator[tuple[str, Any]]:
        raise self._not_written()

    def check(self, layer: Layer) -> None:
        raise self._not_written()

    def _not_written(self) -> UnsupportedError:
        return UnsupportedError(f"to_format: checkpoints in {self.name} are read and not written")


def _options_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of reading that ``config.json`` tells: the element, the bits of a value, GPTQ's version."""
    kinds = {"float16": ElementKind.F16, "bfloat16": ElementKind.BF16}
    dtype = config.get("dtype", config.get("torch_dtype"))
    options: dict[str, Any] = {"element": kinds.get(dtype) if isinstance(dtype, str) else None}
    section = config.get(CONFIG_KEYS[0])
    if not isinstance(section, dict):
        return options
    groups = section.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    bits = section.get("bits", weights.get("num_bits") if isinstance(weights, dict) else None)
    if bits is not None:
        options["bits"] = bits
    if section.get("checkpoint_format") == "gptq_v2":
        options["version"] = 2
    return options
