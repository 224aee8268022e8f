"""The forms in which ``compress_checkpoint`` writes pruned weights: as they are, or quantized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..device.tensors import wrong
from ..errors import InvalidProblemError, shown
from ..vocab import ElementKind, ElementLike, ScaleRule, element_kind
from ..weights.calibrated import Rounding
from ..weights.packed_layouts import Quantization
from ..weights.quantize import LARGEST, SCALE_SUFFIX, quantized_rows
from ..weights.quantized_weight import ELEMENTS as QUANTIZABLE
from ..weights.quantized_weight import Sparse24QuantizedWeight, quantization_of, scale_rule_of
from ..weights.weight import Sparse24Weight
from .checkpoint_format import Sparse24Checkpoint
from .folder import DTYPES
from .layers import CALIBRATED, SCALE_RULE, Layer, write_weight
from .safetensors_file import SafetensorsWriter, TensorInfo

Array = np.ndarray[Any, Any]
DEFAULT_GROUP = 128
DEFAULT_RULE = ScaleRule.LEAST_SQUARES
"""It tries the scale of ``largest`` too, so that the weight's squared error is never larger."""


class CompressedForm(Sparse24Checkpoint):
    """Our format, with values in the element of the dense tensor."""

    takes_stacks = True
    """Whether stacks of matrices can have this form."""

    def write_block(self, writer: SafetensorsWriter, name: str, weight: Sparse24Weight) -> Array | None:
        """Append rows of a weight. Returns its dequantized kept values as float32, or None if they are it."""
        write_weight(writer, name, weight)
        return None

    def as_written(self, layer: Layer) -> Layer:
        """The dense layer with the element and quantization that its compressed tensors have."""
        return layer

    def rounding(self, element: ElementKind) -> Rounding | None:
        """How calibration quantizes a weight of this element; None if it doesn't."""
        return None

    def __str__(self) -> str:
        """The words that tell forms of calibrated weights apart."""
        return ""

    def stored(self, layer: Layer) -> list[TensorInfo]:
        return super().stored(self.as_written(layer))

    def note(self, metadata: dict[str, str], layer: Layer) -> None:
        super().note(metadata, self.as_written(layer))


class RowForm(CompressedForm):
    """Values of 8 bits, and a scale for each row, for layers that quantize their input too."""

    takes_stacks = False

    def __init__(self, element: ElementKind) -> None:
        self._element = element

    def stored(self, layer: Layer) -> list[TensorInfo]:
        scale = TensorInfo(layer.name + SCALE_SUFFIX, DTYPES[ElementKind.F32], (layer.m, 1), 4 * layer.m)
        return [*super().stored(layer), scale]

    def as_written(self, layer: Layer) -> Layer:
        return replace(layer, element=self._element)

    def write_block(self, writer: SafetensorsWriter, name: str, weight: Sparse24Weight) -> Array:
        values, scale = quantized_rows(weight.values, self._element)
        writer.write(name + SCALE_SUFFIX, scale)
        write_weight(writer, name, Sparse24Weight(values, weight.metadata))
        with np.errstate(all="ignore"):  # Inf and NaN are results here
            return values.astype(np.float32) * scale


class GroupForm(CompressedForm):
    """Values of 4 or 8 bits, and scales of groups of columns, for layers that keep their input."""

    def __init__(self, stored: ElementKind, group: int, rule: ScaleRule) -> None:
        self._stored, self._group, self._rule = stored, group, rule

    def as_written(self, layer: Layer) -> Layer:
        """The layer, with the rule of the scales unless calibration has chosen them."""
        rule = {} if CALIBRATED in layer.options else {SCALE_RULE: self._rule.value}
        return replace(
            layer,
            element=multiplied_as(layer.element),
            options={**layer.options, **rule},
            quantization=self.rounding(layer.element).by,
        )

    def rounding(self, element: ElementKind) -> Rounding:
        multiplied = multiplied_as(element)
        return Rounding(multiplied, quantization_of(multiplied, self._stored, self._group), self._rule)

    def __str__(self) -> str:
        return f" {self._stored} {self._group} {self._rule}"

    def write_block(self, writer: SafetensorsWriter, name: str, weight: Sparse24Weight) -> Array:
        found = quantized_weight(weight, self.rounding(weight.element).by, self._rule)
        write_weight(writer, name, found)
        kept: Array = found.dequantize().values.astype(np.float32)
        return kept


def multiplied_as(element: ElementKind) -> ElementKind:
    """The element of a quantized weight when it is multiplied: the dense tensor's, or bf16 for f32."""
    return element if element in QUANTIZABLE else ElementKind.BF16


def quantized_weight(weight: Sparse24Weight, by: Quantization, rule: ScaleRule) -> Sparse24QuantizedWeight:
    """A pruned weight on the host, quantized."""
    element = multiplied_as(weight.element)
    return Sparse24QuantizedWeight.quantize(weight, element=element, **by.arguments, rule=rule)


def compressed_form(
    element: ElementLike | None,
    weights: ElementLike | None,
    group: int | None,
    scale_rule: ScaleRule | str | None,
) -> CompressedForm:
    """The form that arguments of ``compress_checkpoint`` ask for. Raises InvalidProblemError naming one."""
    if weights is None:
        for argument, value in (("group", group), ("scale_rule", scale_rule)):
            if value is not None:
                raise InvalidProblemError(f"{argument}: expected None without weights, got {shown(value)}")
        if element is None:
            return CompressedForm()
        if (kind := element_kind(element)) not in LARGEST:
            raise wrong("element", f"one of {', '.join(LARGEST)} or None", element)
        return RowForm(kind)
    if element is not None:
        raise InvalidProblemError(
            f"weights: expected None with element, which makes layers quantize X too, got {shown(weights)}"
        )
    rule = scale_rule_of(DEFAULT_RULE if scale_rule is None else scale_rule, "scale_rule")
    columns = DEFAULT_GROUP if group is None else group
    by = quantization_of(ElementKind.BF16, weights, columns, argument="weights")
    return GroupForm(by.element, by.group, rule)
