"""Checkpoints from one 2:4 format to another: a safetensors file, or a folder of shards with its index.

In a file, the parts of a foreign weight ``NAME`` are the tensors ``NAME.PART`` (:data:`FORMATS` names the
parts), and the file's metadata has ``sparse24.NAME`` with the JSON ``{"format", "shape", "element"}`` and
the format's options. compressed-tensors has its own names, ``PREFIX.PART`` for a weight ``PREFIX.weight``,
and no such metadata; nor is it needed to read the other formats, where the values say M and K.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .._vendor import compressed_tensors
from ..errors import FormatError, InvalidProblemError, Sparse24Error, UnsupportedError
from ..formats.convert import from_foreign, to_foreign
from ..formats.foreign import FORMATS, ForeignFormat
from ..formats.parts import VALUES, weight_shape
from ..vocab import ElementKind
from ..weights import canonical
from ..weights.weight import Sparse24Weight
from .compress import (
    DTYPES,
    FORMAT_KEY,
    FORMAT_VERSION,
    LAYER_KEY_PREFIX,
    META_SUFFIX,
    VALUES_SUFFIX,
    Selection,
    StrPath,
    compressed_names,
    describe,
    read_weight,
    stored_tensors,
)
from .folder import CONFIG_NAME, Shard, ShardedReader, new_folder, write_index, write_json
from .safetensors_file import SafetensorsWriter, TensorInfo, storage_errors

DENSE, SPARSE24 = "dense", "sparse24"
CHECKPOINT_FORMATS = (DENSE, SPARSE24, *FORMATS)
"""What :func:`convert_checkpoint` reads and writes."""

_ELEMENTS = {dtype: element for element, dtype in DTYPES.items()}
_NUMPY_TYPES = {
    **{f"U{8 * size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"I{8 * size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
}
_SAFETENSORS_TYPES = {name: dtype for dtype, name in _NUMPY_TYPES.items()}
_STEP_ELEMENTS = 1 << 20
_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What :func:`convert_checkpoint` did with one weight or other tensor.

    ``shape`` and ``element`` are those of the dense matrix, or of the tensor that was copied (the element is
    the safetensors type in lower case). ``reason`` says why a tensor of a dense checkpoint was copied. Sizes
    are in bytes.
    """

    name: str
    shape: tuple[int, ...]
    element: str
    action: Literal["converted", "copied"]
    reason: str | None
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """A weight of the source: its dense shape, and the tensors that hold it, of which the first leads."""

    name: str
    m: int
    k: int
    element: ElementKind
    sources: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


def convert_checkpoint(
    source: StrPath,
    destination: StrPath,
    *,
    from_format: str,
    to_format: str,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    tile_k: int | None = None,
    on_tensor: Callable[[ConversionReport], None] | None = None,
) -> list[ConversionReport]:
    """Write the 2:4 weights of a checkpoint in another format; copy everything else unchanged.

    Nothing is pruned: of a dense checkpoint, 2-D tensors that are 2:4 and fit the format are converted,
    others copied with the reason. One weight at a time is in memory. A failed run leaves nothing behind.

    Parameters
    ----------
    source : path
        A safetensors file, a folder with one, a folder of shards with their index, or that index.
    destination : path
        A file where the source is a file, replaced if it exists. Else a folder, new or empty: it gets shards
        of the same names, the index, ``config.json`` (whose sparsity configuration is brought up to date) and
        copies of the folder's other files.
    from_format, to_format : str
        Names of :data:`CHECKPOINT_FORMATS`.
    include, exclude : sequence of str
        For dense sources, as in ``compress_checkpoint``. What ``include`` names must be 2:4 and fit.
    tile_k : int, optional
        ``cutlass_sm90``: the tile K to write for, or to read where the file doesn't say; 128 by default.
    on_tensor : callable, optional
        Called with each report when its tensor is done.

    Returns
    -------
    list of ConversionReport
        One for each weight and each copied tensor.

    Raises
    ------
    InvalidProblemError
        Formats, patterns or a destination that can't be meant; no weight of ``from_format`` in the source; a
        weight whose shape ``to_format`` can't hold.
    UnsupportedError
        A weight whose element ``to_format`` can't hold.
    FormatError
        The source breaks its format, or a weight can't be expressed in ``to_format``; with tensor, row and
        group.
    StorageError
        A file can't be read or written.
    """
    _check_request(source, destination, from_format, to_format, include, exclude)
    with ShardedReader(source) as store:
        job = _Job(store, from_format, to_format, tile_k, Selection(include, exclude, _ELEMENTS), on_tensor)
        if store.folder is None:
            job.write(store.shards[0], destination)
        else:
            with new_folder(destination) as folder:
                _write_folder(job, folder)
    return job.reports


def _check_request(
    source: StrPath,
    destination: StrPath,
    from_format: str,
    to_format: str,
    include: Sequence[str],
    exclude: Sequence[str],
) -> None:
    for argument, name in (("from_format", from_format), ("to_format", to_format)):
        if name not in CHECKPOINT_FORMATS:
            raise InvalidProblemError(
                f"{argument}: expected one of {', '.join(CHECKPOINT_FORMATS)}, got {name!r}"
            )
    if from_format == to_format:
        raise InvalidProblemError(f"to_format: expected another format than {from_format}")
    if (include or exclude) and from_format != DENSE:
        raise InvalidProblemError(f"include, exclude: apply to dense checkpoints, not to {from_format}")
    if os.path.exists(source) and os.path.exists(destination) and os.path.samefile(source, destination):
        raise InvalidProblemError(f"destination: expected another path than the source, got {destination}")


def _write_folder(job: _Job, folder: Path) -> None:
    store = job.store
    config = store.config()
    changed = None if config is None else _new_config(config, job)
    for shard in store.shards:
        job.write(shard, folder / shard.name)
    if store.index_name is not None:
        write_index(folder / store.index_name, {shard.name: job.outputs(shard) for shard in store.shards})
    if changed is not None:
        write_json(folder / CONFIG_NAME, changed)
    for path in store.others():
        with storage_errors(path):
            shutil.copyfile(path, folder / path.name)


# What is done to each tensor ----------------------------------------------------------------------


class _Job:
    """One conversion: the layers of the source, and what each shard becomes."""

    def __init__(
        self,
        store: ShardedReader,
        from_format: str,
        to_format: str,
        tile_k: int | None,
        selection: Selection,
        on_tensor: Callable[[ConversionReport], None] | None,
    ) -> None:
        self.store, self.from_format, self.to_format, self.tile_k = store, from_format, to_format, tile_k
        self.reports: list[ConversionReport] = []
        self._on_tensor = on_tensor
        self.reasons: dict[str, str] = {}
        found = self._find_dense(selection) if from_format == DENSE else self._find()
        if not found:
            raise InvalidProblemError(f"source: {store.path} holds no weight in the format {from_format}")
        self.layers = {layer.sources[0]: layer for layer in found}
        self._parts = {name for layer in found for name in layer.sources}
        seen: set[str] = set()
        for info in (info for shard in store.shards for info in self.outputs(shard)):
            if info.name in seen:
                raise InvalidProblemError(f"{info.name}: expected names that occur once")
            seen.add(info.name)

    def outputs(self, shard: Shard) -> list[TensorInfo]:
        """The tensors that a shard becomes."""
        infos: list[TensorInfo] = []
        for name, info in shard.reader.tensors.items():
            if name in self.layers:
                infos += self._stored(self.layers[name])
            elif name not in self._parts:
                infos.append(info)
        return infos

    def write(self, shard: Shard, path: StrPath) -> None:
        """Convert one shard."""
        with SafetensorsWriter(path, self.outputs(shard), self._metadata(shard)) as writer:
            for name, info in shard.reader.tensors.items():
                if name in self.layers:
                    self._report(self._convert(self.layers[name], writer))
                elif name not in self._parts:
                    _copy(self.store, info, writer)
                    what = (name, info.shape, info.dtype.lower())
                    reason = self.reasons.get(name)
                    self._report(ConversionReport(*what, "copied", reason, info.nbytes, info.nbytes))

    def _report(self, report: ConversionReport) -> None:
        self.reports.append(report)
        if self._on_tensor is not None:
            self._on_tensor(report)

    # The source -----------------------------------------------------------------------------------

    def _find(self) -> list[_Layer]:
        if self.from_format == SPARSE24:
            layers = [layer for shard in self.store.shards for layer in _canonical_layers(shard)]
        else:
            known = FORMATS[self.from_format]
            suffix = f".{known.parts[0]}"
            prefixes = [name.removesuffix(suffix) for name in self.store.tensors if name.endswith(suffix)]
            layers = [_foreign_layer(self.store, known, prefix, self.tile_k) for prefix in prefixes]
        for layer in layers:
            self._check_target(layer)
        return layers

    def _find_dense(self, selection: Selection) -> list[_Layer]:
        tensors = self.store.tensors
        for shard in self.store.shards:
            if FORMAT_KEY in shard.reader.metadata:
                raise InvalidProblemError(f"source: expected dense tensors, {self.store.path} is sparse24")
        selection.check(tensors)
        layers = []
        for info in tensors.values():
            reason = selection.reason_to_copy(info)
            if reason is None:
                m, k = info.shape
                layer = _Layer(info.name, m, k, _ELEMENTS[info.dtype], (info.name,))
                reason = self._reason_not_to_convert(layer, must=selection.names(info.name))
            if reason is None:
                layers.append(layer)
            else:
                self.reasons[info.name] = reason
        return layers

    def _reason_not_to_convert(self, layer: _Layer, *, must: bool) -> str | None:
        """Why a dense tensor can't be converted, or None; an error where it ``must`` be."""
        try:
            self._check_target(layer)
            if self.to_format == SPARSE24:
                for rows, dense in _dense_blocks(self.store, layer):
                    canonical.occupancy_codes(dense.view(layer.element.bits_dtype), layer.element, rows.start)
            else:  # which may not hold every 2:4 matrix
                for _ in self._arrays(layer, self._read(layer)):
                    pass
        except (InvalidProblemError, UnsupportedError, FormatError) as error:
            if must:
                raise
            path = self.store.shard_of(layer.name).reader.path
            return str(error).removeprefix(f"{path}: {layer.name!r}: ").removeprefix(f"{layer.name}: ")
        return None

    def _check_target(self, layer: _Layer) -> None:
        try:
            if self.to_format in FORMATS:
                shape = weight_shape(layer.m, layer.k, layer.element, self.tile_k, None)
                FORMATS[self.to_format].check(shape)
            is_bitmask = self.to_format == "compressed_tensors"
            if is_bitmask and not layer.name.endswith(compressed_tensors.WEIGHT_SUFFIX):
                raise InvalidProblemError(f"{self.to_format}: expected a name that ends in .weight")
        except Sparse24Error as error:
            raise type(error)(f"{layer.name}: {error}") from error

    def _read(self, layer: _Layer) -> Sparse24Weight:
        store = self.store
        try:
            if self.from_format == DENSE:
                info = store.tensors[layer.name]
                dense = store.read(layer.name).view(layer.element.dtype).reshape(info.shape)
                return Sparse24Weight.compress(dense)
            if self.from_format == SPARSE24:
                return read_weight(store.shard_of(layer.sources[0]).reader, layer.name)
            known = FORMATS[self.from_format]
            parts = {name.rpartition(".")[2]: _array(store, name) for name in layer.sources}
            sizes = (layer.m, layer.k) if "shape" in known.options else None
            return from_foreign(known.name, parts, shape=sizes, **layer.options)
        except (FormatError, InvalidProblemError, UnsupportedError) as error:
            raise _located(store, layer, error) from error

    # The target -----------------------------------------------------------------------------------

    def _stored(self, layer: _Layer) -> list[TensorInfo]:
        """The entries of a layer in the new format."""
        if self.to_format == DENSE:
            size = layer.m * layer.k * layer.element.itemsize
            return [TensorInfo(layer.name, DTYPES[layer.element], (layer.m, layer.k), size)]
        if self.to_format == SPARSE24:
            return list(stored_tensors(layer.name, (layer.m, layer.k), layer.element))
        infos = []
        shape = weight_shape(layer.m, layer.k, layer.element, self.tile_k, None)
        for part, (kind, sizes) in FORMATS[self.to_format].layout(shape).items():
            dtype = DTYPES[layer.element] if kind == VALUES else _SAFETENSORS_TYPES[kind]
            itemsize = layer.element.itemsize if kind == VALUES else np.dtype(kind).itemsize
            name = f"{_prefix(self.to_format, layer.name)}.{part}"
            infos.append(TensorInfo(name, dtype, sizes, math.prod(sizes) * itemsize))
        return infos

    def _arrays(self, layer: _Layer, weight: Sparse24Weight) -> Iterator[tuple[str, Any]]:
        if self.to_format == DENSE:
            yield layer.name, weight.decompress()
        elif self.to_format == SPARSE24:
            yield layer.name + VALUES_SUFFIX, weight.values
            yield layer.name + META_SUFFIX, weight.metadata
        else:
            given = {} if self.tile_k is None else {"tile_k": self.tile_k}
            options = given if "tile_k" in FORMATS[self.to_format].options else {}
            for part, array in to_foreign(self.to_format, weight, **options).items():
                yield f"{_prefix(self.to_format, layer.name)}.{part}", array

    def _metadata(self, shard: Shard) -> dict[str, str]:
        metadata = {
            key: value
            for key, value in shard.reader.metadata.items()
            if key != FORMAT_KEY and not key.startswith(LAYER_KEY_PREFIX)
        }
        if self.to_format == SPARSE24:
            metadata[FORMAT_KEY] = FORMAT_VERSION
        if self.to_format == "compressed_tensors":
            metadata.setdefault("format", "pt")  # readers of such models ask for it
        for name in shard.reader.tensors:
            if name in self.layers:
                self._note(metadata, self.layers[name])
        return metadata

    def _note(self, metadata: dict[str, str], layer: _Layer) -> None:
        if self.to_format == SPARSE24:
            describe(metadata, layer.name, (layer.m, layer.k), layer.element)
        elif self.to_format not in (DENSE, "compressed_tensors"):
            note: dict[str, Any] = {
                "format": self.to_format,
                "shape": [layer.m, layer.k],
                "element": layer.element.value,
            }
            shape = weight_shape(layer.m, layer.k, layer.element, self.tile_k, None)
            options = FORMATS[self.to_format].options
            note |= {option: getattr(shape, option) for option in options if option != "shape"}
            metadata[LAYER_KEY_PREFIX + layer.name] = json.dumps(note)

    def _convert(self, layer: _Layer, writer: SafetensorsWriter) -> ConversionReport:
        weight = self._read(layer)
        try:
            for name, array in self._arrays(layer, weight):
                writer.write(name, array)
        except FormatError as error:
            raise _located(self.store, layer, error) from error
        return ConversionReport(
            name=layer.name,
            shape=(layer.m, layer.k),
            element=layer.element.value,
            action="converted",
            reason=None,
            bytes_before=sum(self.store.tensors[name].nbytes for name in layer.sources),
            bytes_after=sum(info.nbytes for info in self._stored(layer)),
        )


# Layers of the source -----------------------------------------------------------------------------


def _canonical_layers(shard: Shard) -> Iterator[_Layer]:
    for name in compressed_names(shard.reader):
        values = shard.reader.tensors.get(name + VALUES_SUFFIX)
        if values is None or values.dtype not in _ELEMENTS or len(values.shape) != 2:
            read_weight(shard.reader, name)  # raises, and says what is wrong
            raise FormatError(f"{shard.reader.path}: {name!r}: expected a 2:4 weight")
        m, half = values.shape
        sources = (values.name, name + META_SUFFIX)
        yield _Layer(name, m, 2 * half, _ELEMENTS[values.dtype], sources)


def _foreign_layer(store: ShardedReader, known: ForeignFormat, prefix: str, tile_k: int | None) -> _Layer:
    names = {part: f"{prefix}.{part}" for part in known.parts if f"{prefix}.{part}" in store.tensors}
    shard = store.shard_of(names[known.parts[0]])
    name = prefix + compressed_tensors.WEIGHT_SUFFIX if known.name == "compressed_tensors" else prefix

    def broken(complaint: str) -> FormatError:
        return FormatError(f"{shard.reader.path}: {prefix!r}: {complaint}")

    for part in known.parts:
        if part not in names and part not in known.optional:
            raise broken(f"{prefix}.{part} is missing")
    values = store.tensors[names[known.parts[0]]]
    if values.dtype not in _ELEMENTS:
        raise broken(f"{values.name}: expected a type of {', '.join(_ELEMENTS)}, got {values.dtype}")
    note = _note_of(shard, name, known, broken)
    if "shape" in note:
        m, k = note["shape"]
    elif len(values.shape) == 2 and values.shape[1] % 4 == 0:
        m, k = values.shape[0], 2 * values.shape[1]
    else:
        raise broken(f"{values.name}: expected [M, K/2] with K a multiple of 8, got {list(values.shape)}")
    element = _ELEMENTS[values.dtype]
    _, sizes = known.layout(weight_shape(m, k, element, None, None))[known.parts[0]]
    if math.prod(sizes) * element.itemsize != values.nbytes:
        raise broken(f"{values.name}: expected the values of {[m, k]}, got {list(values.shape)}")
    options: dict[str, Any] = {}
    if "tile_k" in known.options:
        options["tile_k"] = note.get("tile_k", tile_k)
    if "word_bytes" in known.options:
        words = store.tensors[names["meta"]].dtype
        options["word_bytes"] = {"U16": 2, "I16": 2, "U32": 4, "I32": 4}.get(words, 1)
    return _Layer(name, m, k, element, tuple(names.values()), options)


def _note_of(
    shard: Shard, name: str, known: ForeignFormat, broken: Callable[[str], FormatError]
) -> dict[str, Any]:
    """What the file's metadata says of a weight; empty where it says nothing."""
    text = shard.reader.metadata.get(LAYER_KEY_PREFIX + name)
    if text is None:
        return {}
    try:
        note = json.loads(text)
        m, k = note["shape"]
        written = note.get("format")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise broken(f"expected a JSON shape and format, got {text[:80]!r}") from error
    if type(m) is not int or type(k) is not int or min(m, k) < 0 or m * k >= 2**62 or k % 8:
        raise broken(f"expected [M, K] with K a multiple of 8, got {text[:80]!r}")
    if written != known.name:
        raise broken(f"expected the format {known.name}, the file says {written!r:.80}")
    return {"shape": (m, k), **({"tile_k": note["tile_k"]} if "tile_k" in note else {})}


def _dense_blocks(store: ShardedReader, layer: _Layer) -> Iterator[tuple[slice, Any]]:
    """The rows of a dense tensor, about a million elements at a time."""
    row_bytes = layer.k * layer.element.itemsize
    step = max(1, _STEP_ELEMENTS // max(layer.k, 1))
    for start in range(0, layer.m, step):
        rows = slice(start, min(start + step, layer.m))
        raw = store.read(layer.name, rows.start * row_bytes, rows.stop * row_bytes)
        yield rows, raw.view(layer.element.dtype).reshape(-1, layer.k)


def _array(store: ShardedReader, name: str) -> Any:
    """A stored tensor, whole."""
    info = store.tensors[name]
    if info.dtype in _ELEMENTS and info.dtype != "I8":
        dtype = _ELEMENTS[info.dtype].dtype
    elif info.dtype in _NUMPY_TYPES:
        dtype = np.dtype(_NUMPY_TYPES[info.dtype])
    else:
        raise FormatError(f"{name}: expected a type that metadata can have, got {info.dtype}")
    return store.read(name).view(dtype).reshape(info.shape)


def _prefix(format_name: str, name: str) -> str:
    """What the names of a weight's parts start with."""
    return compressed_tensors.prefix_of(name) if format_name == "compressed_tensors" else name


def _located(store: ShardedReader, layer: _Layer, error: Sparse24Error) -> FormatError:
    """The error as one of the source's file, naming tensor, row and group."""
    text = str(error)
    path = str(store.shard_of(layer.sources[0]).reader.path)
    located = FormatError(text if text.startswith(path) else f"{path}: {layer.name!r}: {text}")
    if isinstance(error, FormatError):
        located.row, located.group = error.row, error.group
    return located


def _copy(store: ShardedReader, info: TensorInfo, writer: SafetensorsWriter) -> None:
    for start in range(0, info.nbytes, _COPY_BYTES):
        stop = min(start + _COPY_BYTES, info.nbytes)
        writer.write(info.name, store.read(info.name, start, stop))


# config.json --------------------------------------------------------------------------------------


def _new_config(config: Mapping[str, Any], job: _Job) -> dict[str, Any]:
    """``config.json`` without the old sparsity configuration; with the new one of compressed-tensors."""
    changed = dict(config)
    for key in compressed_tensors.CONFIG_KEYS:
        section = changed.get(key)
        if isinstance(section, dict) and section.get("quant_method") in (None, compressed_tensors.METHOD):
            rest = {name: value for name, value in section.items() if name != "sparsity_config"}
            changed[key] = rest
            if not rest.get("config_groups"):  # it configured the sparsity alone
                del changed[key]
    if job.to_format == "compressed_tensors":
        key = compressed_tensors.CONFIG_KEYS[0]
        section = changed.get(key) or {"quant_method": compressed_tensors.METHOD, "format": DENSE}
        if section.get("quant_method") != compressed_tensors.METHOD:
            raise InvalidProblemError(
                f"{CONFIG_NAME}: expected no quantisation or compressed-tensors', got "
                f"{section.get('quant_method')!r:.80}"
            )
        modules = sorted(compressed_tensors.prefix_of(layer.name) for layer in job.layers.values())
        changed[key] = {
            **section,
            "sparsity_config": compressed_tensors.sparsity_config(modules, _zeros(job)),
        }
    return changed


def _zeros(job: _Job) -> float:
    """The share of the checkpoint's elements that compression leaves out."""
    cells = sum(layer.m * layer.k for layer in job.layers.values())
    others = (info for name, info in job.store.tensors.items() if name in job.reasons)
    total = cells + sum(math.prod(info.shape) for info in others)
    return round(cells / 2 / total, 4) if total else 0.0
