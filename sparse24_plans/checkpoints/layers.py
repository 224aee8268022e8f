"""Weights in a model's files: the notes about them, and version 1 of the compressed format.

A compressed tensor ``NAME`` [M, K] is stored as two tensors:

- ``NAME.values24`` [M, K/2], in the element's safetensors type (``F32``, ``F16``, ``BF16``, ...);
- ``NAME.meta24`` [M, K/8], ``U16``: the canonical metadata (docs/formats.md).

A quantized weight (:mod:`sparse24_plans.weights.quantized_weight`) has three:

- ``NAME.values24``: ``U8`` [M, K/4], two values of ``s4`` each, or ``I8`` or ``F8_E4M3`` [M, K/2];
- ``NAME.meta24``, as above;
- ``NAME.scales24`` [M, groups of a row], ``F16``, ``BF16`` or ``F32``.

A stack [E, M, K] of matrices, such as experts, is stored alike, with E before each shape.

The metadata of each file has ``sparse24_format = "1"`` and, for every compressed tensor in it, a note:
``sparse24.NAME`` with the JSON ``{"shape": [M, K], "element": "bf16"}``. All other tensors and metadata stay
unchanged. The note of a weight that the model holds as [K, M], like transformers' Conv1D, also has
``"transposed": true``; that of a calibrated weight has ``"calibrated"`` with the method. A weight whose K was
filled up with columns of zeros has their number in ``"padding"``: the dense tensor lacks them. The note of a
quantized weight also has ``"stored"``, ``"group"`` and ``"scale_element"``, and ``"scale_rule"`` if that rule
gives its scales for the pruned weight; its ``"element"`` is the type of the weight when it is multiplied. The
note of a weight in a foreign format also has ``"format"`` and its options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import FormatError, InvalidProblemError, Sparse24Error
from ..vocab import ElementKind
from ..weights.packed_layouts import Quantization, memory_element, stored_width
from ..weights.quantized_weight import GROUPS, Sparse24QuantizedWeight, quantization_of
from ..weights.weight import CanonicalWeight, Sparse24Weight
from .folder import DTYPES, ELEMENTS, ModelReader, Shard, row_blocks
from .safetensors_file import SafetensorsWriter, TensorInfo, shown

SPARSE24 = "sparse24"
FORMAT_KEY, FORMAT_VERSION = "sparse24_format", "1"
LAYER_KEY_PREFIX = "sparse24."
CALIBRATED = "calibrated"
"""The option of a layer with the method that has pruned it, unless that was by magnitude."""
SCALE_RULE = "scale_rule"
"""The option of a quantized layer with the rule that made its scales, unless calibration made them."""
PADDING = "padding"
_MAX_PADDING = 7
VALUES_SUFFIX, META_SUFFIX, SCALES_SUFFIX = SUFFIXES = ".values24", ".meta24", ".scales24"
_QUANTIZED_DTYPES = {ElementKind.S4: "U8", ElementKind.S8: "I8", ElementKind.FP8_E4M3: "F8_E4M3"}
"""The safetensors types of quantized values."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight [M, K] of a model: the names of its tensors, and its format's options.

    ``transposed`` says that the model's dense tensor is [K, M], as transformers' Conv1D holds it. ``stack``
    is the number E of matrices of a dense tensor [E, M/E, K], or 0 for a single matrix. ``quantization`` is
    that of a quantized weight, whose ``element`` is its type when it is multiplied. The last ``padding``
    columns are zeros that the dense tensor lacks.
    """

    name: str
    m: int
    k: int
    element: ElementKind
    sources: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    transposed: bool = False
    stack: int = 0
    quantization: Quantization | None = None
    padding: int = 0

    @property
    def columns(self) -> int:
        """The columns of the dense matrix: K without its padding."""
        return self.k - self.padding

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the dense tensor."""
        return (self.columns, self.m) if self.transposed else self.shape_with(self.columns)

    def shape_with(self, columns: int) -> tuple[int, ...]:
        """The shape of a tensor that has ``columns`` in each of the weight's rows."""
        return (self.stack, self.m // self.stack, columns) if self.stack else (self.m, columns)


def origin_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, or entries of a note, that say how the values of a weight were made."""
    return {key: options[key] for key in (CALIBRATED, SCALE_RULE) if key in options}


def origin_of_all(weights: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the values of a weight were made that has the rows of several, by what each says of its own.

    It is calibrated if one of them is. A rule gives its scales only if that gave all of them.
    """
    found = {key: value for one in weights for key, value in one.items()}
    return {
        key: value
        for key, value in found.items()
        if key == CALIBRATED or all(one.get(key) == value for one in weights)
    }


def dense_blocks(model: ModelReader, layer: Layer) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
    """The rows of a weight [M, K] of a dense model, in blocks; a transposed weight in one."""
    if layer.transposed:
        yield slice(0, layer.m), read_dense(model, layer)
    else:
        for rows, block in row_blocks(model, layer.name):
            yield rows, _padded(block, layer)


def read_dense(model: ModelReader, layer: Layer) -> np.ndarray[Any, Any]:
    """A whole weight [M, K] of a dense model."""
    stored = model.read(layer.name).view(layer.element.dtype)
    if layer.transposed:
        return _padded(np.ascontiguousarray(stored.reshape(layer.dense_shape).T), layer)
    return _padded(stored.reshape(layer.m, layer.columns), layer)


def _padded(rows: np.ndarray[Any, Any], layer: Layer) -> np.ndarray[Any, Any]:
    """Rows of the dense matrix with the layer's padding."""
    return np.pad(rows, ((0, 0), (0, layer.padding))) if layer.padding else rows


@dataclass(frozen=True, slots=True)
class Note:
    """The note about a weight in a file's metadata. ``element`` is None if the note has none.

    ``m`` counts the rows of all matrices of a ``stack``.
    """

    m: int
    k: int
    element: ElementKind | None
    options: Mapping[str, Any]
    stack: int = 0


def write_note(metadata: dict[str, str], layer: Layer, **more: Any) -> None:
    """Add a weight's note to a file's metadata. ``more`` are a foreign format and its options."""
    note = {"shape": list(layer.shape_with(layer.k)), "element": layer.element.value, **more}
    if layer.transposed:
        note["transposed"] = True
    if layer.padding:
        note[PADDING] = layer.padding
    if (by := layer.quantization) is not None:
        note |= by.arguments
    note |= origin_in(layer.options)
    metadata[LAYER_KEY_PREFIX + layer.name] = json.dumps(note)


def read_note(shard: Shard, name: str, format_name: str) -> Note | None:
    """The note about a weight in the named format, or None without one.

    Raises FormatError, naming file and weight, for an invalid note.
    """
    text = shard.reader.metadata.get(LAYER_KEY_PREFIX + name)
    if text is None:
        return None
    try:
        note = json.loads(text)
        *stack, m, k = note["shape"]
        element = ElementKind(note["element"]) if "element" in note else None
        written = note.get("format", SPARSE24)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise broken(shard, name, f"expected a JSON shape and element, got {text[:80]!r}") from error
    count = stack[0] if stack else 1
    sizes = (count, m, k)
    if not (
        all(type(size) is int for size in sizes) and min(m, k) >= 0 and k % 8 == 0 and max(sizes) < 2**63
    ):
        raise broken(shard, name, f"expected [M, K] with K a multiple of 8, got {text[:80]!r}")
    if written != format_name:
        raise broken(shard, name, f"expected the format {format_name}, got {written!r:.80}")
    if len(stack) > 1 or count < 1 or (stack and (written != SPARSE24 or note.get("transposed"))):
        raise broken(shard, name, f"expected [M, K], or [E, M, K] in our own format, got {text[:80]!r}")
    return Note(count * m, k, element, note, count if stack else 0)


def broken(shard: Shard, name: str, complaint: str) -> FormatError:
    """A FormatError that names the file and the weight."""
    return FormatError(f"{shard.reader.path}: {name!r}: {complaint}")


def located(model: ModelReader, layer: Layer, error: Sparse24Error) -> FormatError:
    """The error as a FormatError that names the file and the weight."""
    text = str(error)
    shard = model.shard_of(layer.sources[0])
    known = text.startswith(str(shard.reader.path))
    result = FormatError(text) if known else broken(shard, layer.name, text)
    if isinstance(error, FormatError):
        result.row, result.group = error.row, error.group
    return result


# The compressed format ----------------------------------------------------------------------------


def stored_tensors(layer: Layer) -> tuple[TensorInfo, ...]:
    """The entries of a weight's tensors, with the suffixes in their order.

    Raises InvalidProblemError for an element that no weight has.
    """
    m, k, element, by = layer.m, layer.k, layer.element, layer.quantization
    values, meta, scales = (layer.name + suffix for suffix in SUFFIXES)
    positions = TensorInfo(meta, "U16", layer.shape_with(k // 8), m * k // 4)
    if by is not None:
        width = stored_width(k, by)
        return (
            TensorInfo(values, _QUANTIZED_DTYPES[by.element], layer.shape_with(width), by.value_bytes(m, k)),
            positions,
            TensorInfo(
                scales,
                DTYPES[by.scale_element],
                layer.shape_with(by.scales_of_a_row(k)),
                by.scale_bytes(m, k),
            ),
        )
    if element not in DTYPES:
        raise InvalidProblemError(f"{shown(layer.name)}: expected one of {', '.join(DTYPES)}, got {element}")
    size = m * k // 2 * element.itemsize
    return TensorInfo(values, DTYPES[element], layer.shape_with(k // 2), size), positions


def compressed_names(model: ModelReader) -> dict[str, Shard]:
    """The file with the note of each compressed tensor of a model, by the tensor's name.

    Several files may hold the same note, as transformers writes it. A state_dict that was saved without any
    notes is known by the names of its tensors.

    Raises FormatError if a file isn't compressed, or two files describe one tensor differently.
    """
    if not any(FORMAT_KEY in shard.reader.metadata for shard in model.shards) and (bare := _bare(model)):
        return bare
    found: dict[str, Shard] = {}
    for shard in model.shards:
        version = shard.reader.metadata.get(FORMAT_KEY)
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{shard.reader.path}: expected a compressed model, with the metadata {FORMAT_KEY} = "
                f"{FORMAT_VERSION!r}, got {version!r:.80}"
            )
        for key, note in shard.reader.metadata.items():
            name = key.removeprefix(LAYER_KEY_PREFIX)
            if name == key:
                continue
            if found.setdefault(name, shard).reader.metadata[key] != note:
                raise broken(shard, name, f"expected one note, got another in {found[name].name}")
    return found


def is_compressed(model: ModelReader) -> bool:
    """Whether a model says that it is in this format, or has the names of its tensors."""
    return any(FORMAT_KEY in shard.reader.metadata for shard in model.shards) or bool(_bare(model))


def _bare(model: ModelReader) -> dict[str, Shard]:
    """The file with the values of each tensor whose two parts are in the model, by the tensor's name."""
    names = [name.removesuffix(VALUES_SUFFIX) for name in model.tensors if name.endswith(VALUES_SUFFIX)]
    return {
        name: model.shard_of(name + VALUES_SUFFIX) for name in names if name + META_SUFFIX in model.tensors
    }


def compressed_layer(model: ModelReader, shard: Shard, name: str) -> Layer:
    """A compressed tensor by its note, or without one by its values.

    Raises FormatError if the tensors don't agree with the note.
    """
    note = read_note(shard, name, SPARSE24)
    if note is None and FORMAT_KEY not in shard.reader.metadata:
        note = _note_of_tensors(model, name)
    if note is None or note.element is None:
        raise broken(shard, name, "expected a JSON shape and element")
    if note.element not in DTYPES:
        raise broken(shard, name, f"expected [M, K] of an element of weights, got {note.element}")
    transposed = note.options.get("transposed", False)
    if type(transposed) is not bool:
        raise broken(shard, name, f"transposed: expected true or false, got {transposed!r:.80}")
    padding = note.options.get(PADDING, 0)
    if type(padding) is not int or not 0 <= padding <= min(_MAX_PADDING, note.k):
        raise broken(shard, name, f"{PADDING}: expected 0 to {_MAX_PADDING} columns, got {padding!r:.80}")
    options, by = origin_in(note.options), _quantization(shard, name, note)
    layer = Layer(name, note.m, note.k, note.element, (), options, transposed, note.stack, by, padding)
    wanted = stored_tensors(layer)
    for expected in wanted:
        info = model.tensors.get(expected.name)
        if info is None:
            raise broken(shard, name, f"{shown(expected.name)} is missing")
        if info != expected:
            raise broken(
                shard,
                name,
                f"{shown(expected.name)}: expected {expected.dtype}{list(expected.shape)}, "
                f"got {shown(info.dtype)}{list(info.shape)}",
            )
    return replace(layer, sources=tuple(info.name for info in wanted))


def _note_of_tensors(model: ModelReader, name: str) -> Note | None:
    """The note that a state_dict's tensors amount to, or None if their shapes and types don't tell."""
    values, scales = (model.tensors.get(name + suffix) for suffix in (VALUES_SUFFIX, SCALES_SUFFIX))
    if values is None or len(values.shape) != 2:
        return None
    if scales is None:
        k = 2 * values.shape[1]
        return Note(values.shape[0], k, ELEMENTS.get(values.dtype), {}) if k % 8 == 0 else None
    stored = next((kind for kind, dtype in _QUANTIZED_DTYPES.items() if dtype == values.dtype), None)
    k = values.shape[1] * (4 if stored is ElementKind.S4 else 2)
    element = ELEMENTS.get(scales.dtype)
    if stored is None or element is None or len(scales.shape) != 2 or k % 8:
        return None
    fitting = (
        group
        for group in GROUPS
        if Quantization(stored, group, element).scales_of_a_row(k) == scales.shape[1]
    )
    return Note(values.shape[0], k, element, {"stored": stored.value, "group": next(fitting, None)})


def _quantization(shard: Shard, name: str, note: Note) -> Quantization | None:
    """The quantization that a note states. Raises FormatError for one that no weight has."""
    if "stored" not in note.options:
        return None
    assert note.element is not None  # the caller has checked it
    stored, group, scale_element = (note.options.get(key) for key in ("stored", "group", "scale_element"))
    try:
        return quantization_of(note.element, stored, group, scale_element)
    except InvalidProblemError as error:
        raise broken(shard, name, str(error)) from error


def read_weight(model: ModelReader, layer: Layer) -> Sparse24Weight | Sparse24QuantizedWeight:
    """A whole compressed tensor [M, K], validated. Raises FormatError with row and group."""
    by, element = layer.quantization, layer.element
    kinds = [element, ElementKind.U16]
    if by is not None:
        kinds = [memory_element(by.element), ElementKind.U16, by.scale_element]
    parts = [
        model.read(info.name).view(kind.dtype).reshape(layer.m, info.shape[-1])
        for info, kind in zip(stored_tensors(layer), kinds, strict=True)
    ]
    try:
        if by is None:
            return Sparse24Weight(*parts)
        return Sparse24QuantizedWeight(*parts, element=element, **by.arguments)
    except FormatError as error:
        raise located(model, layer, error) from error


def write_weight(writer: SafetensorsWriter, name: str, weight: CanonicalWeight) -> None:
    """Append a block of rows of a compressed tensor, which lies in host memory."""
    for suffix, view in zip(SUFFIXES, weight.views, strict=False):
        writer.write(name + suffix, view.bits())
