"""Checkpoints on disk: safetensors files that hold 2:4 weights.

The format, version 1. A compressed tensor ``NAME`` [M, K] is stored as two tensors:

- ``NAME.values24`` [M, K/2], of the element's own safetensors type (``F32``, ``F16``, ``BF16``, ...);
- ``NAME.meta24`` [M, K/8], ``U16``: the canonical metadata (docs/formats.md).

The file's metadata has ``sparse24_format = "1"`` and, for every compressed tensor, ``sparse24.NAME`` with
the JSON ``{"shape": [M, K], "element": "bf16"}``. All other tensors and metadata are those of the dense
checkpoint, unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from ..device.devices import home_of, resolve
from ..device.tensors import HOST, Device, TensorView, import_cupy
from ..errors import FormatError, InvalidProblemError, UnsupportedError
from ..prepare.args import PruneCompressSparse24Args
from ..prepare.descriptor import PruneCompressSparse24Descriptor
from ..prepare.plan import PruneCompressSparse24Plan
from ..vocab import ElementKind
from ..weights.weight import Sparse24Weight
from .safetensors_file import SafetensorsReader, SafetensorsWriter, TensorInfo

StrPath = str | os.PathLike[str]

FORMAT_KEY, FORMAT_VERSION = "sparse24_format", "1"
LAYER_KEY_PREFIX = "sparse24."
VALUES_SUFFIX, META_SUFFIX = ".values24", ".meta24"

DEFAULT_EXCLUDE = ("*embed*", "*wte.*", "*wpe.*")
"""Embedding tables are looked up, not multiplied by: they stay dense unless ``include`` names them."""

DTYPES = {
    ElementKind.F32: "F32",
    ElementKind.F16: "F16",
    ElementKind.BF16: "BF16",
    ElementKind.S8: "I8",
    ElementKind.FP8_E4M3: "F8_E4M3",
    ElementKind.FP8_E5M2: "F8_E5M2",
}
"""The safetensors type of the elements that a weight can be stored with."""
_COMPRESSED_DTYPES = {DTYPES[kind]: kind for kind in (ElementKind.F32, ElementKind.F16, ElementKind.BF16)}

_STEP_ELEMENTS = 1 << 20
_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What :func:`compress_checkpoint` did with one tensor.

    ``shape`` and ``element`` are those of the dense tensor (the element is the safetensors type in lower
    case). ``reason`` says why a copied tensor was not compressed. ``kept_energy`` is sum(kept^2) /
    sum(all^2) in float64: 1.0 where nothing was lost, NaN where the tensor holds NaN or Inf, None where it
    was copied. Sizes are in bytes.
    """

    name: str
    shape: tuple[int, ...]
    element: str
    action: Literal["compressed", "copied"]
    reason: str | None
    kept_energy: float | None
    bytes_before: int
    bytes_after: int


def compress_checkpoint(
    source: StrPath,
    destination: StrPath,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    device: int | str | None = None,
    on_tensor: Callable[[TensorReport], None] | None = None,
) -> list[TensorReport]:
    """Prune and compress the weights of a dense safetensors file; copy everything else unchanged.

    Compressed are 2-D tensors of F32, F16 or BF16 whose K is a multiple of 8. The two largest of every
    group of four are kept, as in :meth:`Sparse24Weight.prune_compress`. Memory stays bounded by a block of
    rows, and an interrupted run leaves no half file.

    Parameters
    ----------
    source, destination : path
        The dense file, and the one to write; replaced if it exists.
    include : sequence of str
        Shell patterns (``fnmatch``) of tensor names. Where given, nothing else is compressed.
    exclude : sequence of str
        Patterns of names to copy; wins over ``include``. Names of :data:`DEFAULT_EXCLUDE` are copied too
        unless ``include`` matches them.
    device : int or str, optional
        Where to compress: a CUDA ordinal or ``"host"``. None is the current CUDA device, or the host where
        there is none of compute capability 8.0. The file is the same, byte for byte.
    on_tensor : callable, optional
        Called with each tensor's report when the tensor is done, in the order of the source's data.

    Returns a report for each tensor of the source.

    Raises
    ------
    InvalidProblemError
        A pattern matches no tensor, source and destination are one file, the source is compressed already,
        or a name that this would write is taken.
    FormatError, StorageError
        The source isn't a sound safetensors file; a file can't be read or written.
    UnsupportedError, BackendUnavailableError
        The device named can't be used.
    """
    place = _working_place(device)
    if os.path.exists(source) and os.path.exists(destination) and os.path.samefile(source, destination):
        raise InvalidProblemError(f"destination: expected another file than the source, got {destination}")
    with SafetensorsReader(source) as reader:
        if any(key == FORMAT_KEY or key.startswith(LAYER_KEY_PREFIX) for key in reader.metadata):
            raise InvalidProblemError(f"source: expected a dense checkpoint, {source} is compressed already")
        selection = Selection(include, exclude)
        selection.check(reader.tensors)
        reasons = {info.name: selection.reason_to_copy(info) for info in reader.tensors.values()}
        reports = []
        with SafetensorsWriter(destination, *_contents(reader, reasons)) as writer:
            for info in reader.tensors.values():
                report = _transfer(reader, writer, info, reasons[info.name], place)
                reports.append(report)
                if on_tensor is not None:
                    on_tensor(report)
    return reports


def save_weights(path: StrPath, weights: Mapping[str, Sparse24Weight]) -> None:
    """Write ``weights`` by name as a compressed checkpoint of their own. Device weights are fetched.

    Raises InvalidProblemError for other types or unusable names; StorageError where the file can't be
    written: an existing one then stays as it was.
    """
    outputs: list[TensorInfo] = []
    metadata = {FORMAT_KEY: FORMAT_VERSION}
    for name, weight in weights.items():
        if type(weight) is not Sparse24Weight:
            raise InvalidProblemError(f"{name}: expected Sparse24Weight, got {type(weight).__name__}")
        outputs += stored_tensors(name, (weight.m, weight.k), weight.element)
        describe(metadata, name, (weight.m, weight.k), weight.element)
    with SafetensorsWriter(path, outputs, metadata) as writer:
        for name, weight in weights.items():
            _write_weight(writer, name, weight.to("host"))


def load_weight(path: StrPath, name: str) -> Sparse24Weight:
    """The compressed tensor ``name`` of a file, on the host, validated.

    Raises InvalidProblemError for a name that the file doesn't hold compressed; FormatError, naming file
    and tensor, where the file breaks the format; StorageError where it can't be read.
    """
    with SafetensorsReader(path) as reader:
        names = compressed_names(reader)
        if name not in names:
            raise InvalidProblemError(
                f"name: expected one of the {len(names)} compressed tensors of {path}, got {name!r}"
            )
        return read_weight(reader, name)


def iter_weights(path: StrPath) -> Iterator[tuple[str, Sparse24Weight]]:
    """Every compressed tensor of a file with its name, loaded one at a time.

    Raises what :func:`load_weight` raises, when it gets there.
    """
    with SafetensorsReader(path) as reader:
        for name in compressed_names(reader):
            yield name, read_weight(reader, name)


def compressed_names(reader: SafetensorsReader) -> list[str]:
    """Names of the compressed tensors of an open file. Raises FormatError where it isn't a compressed one."""
    version = reader.metadata.get(FORMAT_KEY)
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{reader.path}: expected metadata {FORMAT_KEY} = {FORMAT_VERSION!r}, got {version!r}"
        )
    prefix = len(LAYER_KEY_PREFIX)
    return [key[prefix:] for key in reader.metadata if key.startswith(LAYER_KEY_PREFIX)]


def read_weight(reader: SafetensorsReader, name: str) -> Sparse24Weight:
    """One compressed tensor of an open file; see :func:`load_weight`."""
    m, k, element = _parse_description(reader, name)
    arrays = []
    for expected in stored_tensors(name, (m, k), element):
        info = reader.tensors.get(expected.name)
        if info is None:
            raise _broken(reader, name, f"{expected.name} is missing")
        if info != expected:
            raise _broken(
                reader,
                name,
                f"{expected.name}: expected {expected.dtype}{list(expected.shape)}, "
                f"got {info.dtype}{list(info.shape)}",
            )
        arrays.append(reader.read(info.name))
    values = arrays[0].view(element.dtype).reshape(m, k // 2)
    metadata = arrays[1].view(np.uint16).reshape(m, k // 8)
    try:
        return Sparse24Weight(values, metadata)
    except FormatError as error:
        broken = _broken(reader, name, str(error))
        broken.row, broken.group = error.row, error.group
        raise broken from error


# What is compressed -------------------------------------------------------------------------------


class Selection:
    """The include and exclude patterns, for tensors of ``dtypes``."""

    def __init__(
        self, include: Sequence[str], exclude: Sequence[str], dtypes: Container[str] = _COMPRESSED_DTYPES
    ) -> None:
        for argument, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise InvalidProblemError(f"{argument}: expected a sequence of patterns, got {patterns!r}")
        self._include, self._exclude, self._dtypes = tuple(include), tuple(exclude), dtypes

    def names(self, name: str) -> bool:
        """Whether an include pattern matches, and no exclude pattern."""
        return _first_match(name, self._include) is not None and _first_match(name, self._exclude) is None

    def check(self, names: Mapping[str, object]) -> None:
        """Raise for a pattern that matches nothing: most likely it is mistyped."""
        for argument, patterns in (("include", self._include), ("exclude", self._exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise InvalidProblemError(f"{argument}: pattern {pattern!r} matches no tensor")

    def reason_to_copy(self, info: TensorInfo) -> str | None:
        """Why the tensor is not compressed, or None where it is. Patterns come after what is impossible."""
        if info.dtype not in self._dtypes:
            return f"element {info.dtype.lower()}"
        if len(info.shape) != 2:
            return f"{len(info.shape)}-d"
        if info.nbytes == 0:
            return "empty"
        if info.shape[1] % 8:
            return f"K={info.shape[1]} is not a multiple of 8"
        return self._reason_by_name(info.name)

    def _reason_by_name(self, name: str) -> str | None:
        if (pattern := _first_match(name, self._exclude)) is not None:
            return f"excluded by pattern {pattern!r}"
        if _first_match(name, self._include) is not None:
            return None
        if (pattern := _first_match(name, DEFAULT_EXCLUDE)) is not None:
            return f"excluded by pattern {pattern!r} (the default)"
        return "not included" if self._include else None


def _first_match(name: str, patterns: Sequence[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


# How it is stored ---------------------------------------------------------------------------------


def _contents(
    reader: SafetensorsReader, reasons: Mapping[str, str | None]
) -> tuple[list[TensorInfo], dict[str, str]]:
    """Tensors and metadata of the compressed file."""
    outputs: list[TensorInfo] = []
    metadata = {**reader.metadata, FORMAT_KEY: FORMAT_VERSION}
    for info in reader.tensors.values():
        if reasons[info.name] is not None:
            outputs.append(info)
            continue
        element = _COMPRESSED_DTYPES[info.dtype]
        outputs += stored_tensors(info.name, info.shape, element)
        describe(metadata, info.name, info.shape, element)
    return outputs, metadata


def stored_tensors(name: str, shape: tuple[int, ...], element: ElementKind) -> tuple[TensorInfo, TensorInfo]:
    """The entries of NAME.values24 and NAME.meta24 for a dense tensor [M, K]."""
    m, k = shape
    if element not in DTYPES:
        raise InvalidProblemError(f"{name}: expected one of {', '.join(DTYPES)}, got {element}")
    values = TensorInfo(name + VALUES_SUFFIX, DTYPES[element], (m, k // 2), m * k // 2 * element.itemsize)
    return values, TensorInfo(name + META_SUFFIX, "U16", (m, k // 8), m * k // 4)


def describe(metadata: dict[str, str], name: str, shape: tuple[int, ...], element: ElementKind) -> None:
    """Add what the file's metadata says of a compressed tensor."""
    metadata[LAYER_KEY_PREFIX + name] = json.dumps({"shape": list(shape), "element": element.value})


def _parse_description(reader: SafetensorsReader, name: str) -> tuple[int, int, ElementKind]:
    text = reader.metadata[LAYER_KEY_PREFIX + name]
    try:
        description = json.loads(text)
        m, k = description["shape"]
        element = ElementKind(description["element"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _broken(reader, name, f"expected a JSON shape and element, got {text[:80]!r}") from error
    if type(m) is not int or type(k) is not int or min(m, k) < 0 or k % 8 or element not in DTYPES:
        raise _broken(reader, name, f"expected [M, K] with K a multiple of 8, got {text[:80]!r}")
    return m, k, element


def _broken(reader: SafetensorsReader, name: str, complaint: str) -> FormatError:
    return FormatError(f"{reader.path}: {name!r}: {complaint}")


def _transfer(
    reader: SafetensorsReader,
    writer: SafetensorsWriter,
    info: TensorInfo,
    reason: str | None,
    place: Device,
) -> TensorReport:
    energy = None
    after = info.nbytes
    if reason is None:
        energy = _compress_tensor(reader, writer, info, place)
        stored = stored_tensors(info.name, info.shape, _COMPRESSED_DTYPES[info.dtype])
        after = sum(part.nbytes for part in stored)
    else:
        for start in range(0, info.nbytes, _COPY_BYTES):
            stop = min(start + _COPY_BYTES, info.nbytes)
            writer.write(info.name, reader.read(info.name, start, stop))
    return TensorReport(
        name=info.name,
        shape=info.shape,
        element=info.dtype.lower(),
        action="compressed" if reason is None else "copied",
        reason=reason,
        kept_energy=energy,
        bytes_before=info.nbytes,
        bytes_after=after,
    )


def _working_place(device: int | str | None) -> Device:
    """The device to compress on. One that nobody named has to serve; else it is the host."""
    place = home_of(resolve(device))
    if device is None and place != HOST:
        probe = PruneCompressSparse24Descriptor(m=1, k=8, element=ElementKind.F32)
        try:
            PruneCompressSparse24Plan.select(probe, device=place.ordinal)
        except UnsupportedError:
            return HOST
    return place


def _prune_compress(dense: np.ndarray[Any, Any], place: Device) -> Sparse24Weight:
    """A block of rows compressed, on the host; computed on ``place``."""
    if place == HOST:
        return Sparse24Weight.prune_compress(dense)
    (m, k), element = dense.shape, TensorView.of(dense).element
    desc = PruneCompressSparse24Descriptor(m=m, k=k, element=element)
    plan = PruneCompressSparse24Plan.select(desc, device=place.ordinal)
    cupy = import_cupy()
    with cupy.cuda.Device(place.ordinal):
        source = cupy.asarray(dense.view(element.bits_dtype))
        values = cupy.empty((m, k // 2), element.bits_dtype)
        metadata = cupy.empty((m, k // 8), np.uint16)
        typed = [TensorView.of(bits, element=element) for bits in (source, values)]
        args = PruneCompressSparse24Args(typed[0], typed[1], metadata)
        plan.run(args)
        return plan.weight(args).to("host")


def _compress_tensor(
    reader: SafetensorsReader, writer: SafetensorsWriter, info: TensorInfo, place: Device
) -> float:
    """Write a tensor's values and metadata, block by block; returns the kept energy."""
    kept = total = 0.0
    for _, dense in dense_blocks(reader, info.name):
        weight = _prune_compress(dense, place)
        _write_weight(writer, info.name, weight)
        kept += _energy(weight.values)
        total += _energy(dense)
    return min(kept / total, 1.0) if total else 1.0  # rounding may exceed 1; NaN stays NaN


def dense_blocks(reader: SafetensorsReader, name: str) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
    """The rows of a dense F32, F16 or BF16 tensor [M, K], about a million elements at a time."""
    info = reader.info(name)
    (m, k), element = info.shape, _COMPRESSED_DTYPES[info.dtype]
    rows = max(1, _STEP_ELEMENTS // max(k, 1))
    for start in range(0, m, rows):
        block = slice(start, min(start + rows, m))
        row_bytes = k * element.itemsize
        raw = reader.read(name, block.start * row_bytes, block.stop * row_bytes)
        yield block, raw.view(element.dtype).reshape(-1, k)


def _write_weight(writer: SafetensorsWriter, name: str, weight: Sparse24Weight) -> None:
    writer.write(name + VALUES_SUFFIX, weight.values)
    writer.write(name + META_SUFFIX, weight.metadata)


def _energy(array: np.ndarray[Any, Any]) -> float:
    wide = array.astype(np.float64).reshape(-1)
    with np.errstate(all="ignore"):  # NaN and Inf give NaN, which is the report
        return float(np.dot(wide, wide))


def same_tensor(a: SafetensorsReader, b: SafetensorsReader, name: str) -> bool:
    """Whether two open files hold a tensor ``name`` of the same type, shape and bytes."""
    info = a.info(name)
    if b.tensors.get(name) != info:
        return False
    steps = range(0, info.nbytes, _COPY_BYTES)
    ends = ((start, min(start + _COPY_BYTES, info.nbytes)) for start in steps)
    return all(np.array_equal(a.read(name, *part), b.read(name, *part)) for part in ends)


def dense_element(info: TensorInfo) -> ElementKind | None:
    """The element of a dense tensor that compression takes, or None."""
    return _COMPRESSED_DTYPES.get(info.dtype)
