"""Reads a model as one set of tensors, from a safetensors file or a folder of shards with their index.

The index is Hugging Face's ``*.safetensors.index.json``: ``weight_map`` maps the names of tensors to files
beside it. Tensors are read and copied in pieces, so memory stays bounded by a piece. A new folder is written
under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Self

from ..device.files import (
    StrPath,
    open_regular,
    path_of,
    read_whole,
    storage_errors,
    written_whole,
)
from ..errors import FormatError, InvalidProblemError
from ..vocab import ElementKind, checked_flag
from .safetensors_file import Bytes, SafetensorsReader, SafetensorsWriter, TensorInfo, shown

INDEX_SUFFIX = ".safetensors.index.json"
CONFIG_NAME = "config.json"
DTYPES = {
    ElementKind.F32: "F32",
    ElementKind.F16: "F16",
    ElementKind.BF16: "BF16",
    ElementKind.S8: "I8",
    ElementKind.FP8_E4M3: "F8_E4M3",
    ElementKind.FP8_E5M2: "F8_E5M2",
}
"""The safetensors types of the elements that a weight can have."""
ELEMENTS = {dtype: element for element, dtype in DTYPES.items()}

_MAX_JSON_BYTES = 100_000_000
_BLOCK_ELEMENTS = 1 << 20
_COPY_BYTES = 4 << 20
_SUBFOLDER_BYTES = 16 << 20
"""Most bytes of a subfolder that is copied beside a model."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a model: its name, and its open reader."""

    name: str
    reader: SafetensorsReader


class _ModelFiles(NamedTuple):
    """The files of a model."""

    folder: Path | None
    """None for a single file."""
    index_name: str | None
    shards: list[str]
    weight_map: dict[str, str]
    """The index: the shard of each tensor."""


def _files_of(path: Path) -> _ModelFiles:
    """The files of the model at ``path``. Raises what ModelReader does of the folder and the index."""
    with storage_errors(path):
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else None
    if names is not None:
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        files = [name for name in names if name.endswith(".safetensors")]
        if not indexes and len(files) == 1:
            return _ModelFiles(path, None, files, {})
        if len(indexes) != 1:
            raise InvalidProblemError(
                f"expected one *{INDEX_SUFFIX} or one safetensors file in {path}, "
                f"got {len(indexes)} and {len(files)}"
            )
        folder, index_name = path, indexes[0]
    elif path.name.endswith(INDEX_SUFFIX):
        folder, index_name = path.parent, path.name
    else:
        return _ModelFiles(None, None, [path.name], {})
    weight_map = _read_weight_map(folder / index_name)
    return _ModelFiles(folder, index_name, sorted(set(weight_map.values())), weight_map)


class ModelReader:
    """The tensors of a file, or of all shards of a folder. A context manager; for one thread at a time.

    ``path`` is a safetensors file, a folder, or the index in it. ``tensors`` maps names to entries in the
    order of the shards and their data. ``folder`` is None for a single file.

    Raises StorageError if a file can't be read; FormatError if a file breaks its format, or the index doesn't
    fit the shards; InvalidProblemError if the folder doesn't hold exactly one model.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        found = _files_of(self.path)
        self.folder, self.index_name = found.folder, found.index_name
        with ExitStack() as stack:
            where = self.folder or self.path.parent
            self.shards = tuple(
                Shard(name, stack.enter_context(SafetensorsReader(where / name))) for name in found.shards
            )
            self._homes = self._locate(found.weight_map)
            self.tensors: Mapping[str, TensorInfo] = {
                name: shard.reader.tensors[name] for name, shard in self._homes.items()
            }
            self._stack = stack.pop_all()

    def shard_of(self, name: str) -> Shard:
        """The shard that holds a tensor."""
        return self._homes[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes of a tensor; see :meth:`SafetensorsReader.read`."""
        return self._homes[name].reader.read(name, start, stop)

    def config(self) -> dict[str, Any] | None:
        """The folder's ``config.json``, or None without one."""
        if self.folder is None or not os.path.lexists(self.folder / CONFIG_NAME):
            return None
        return _read_json(self.folder / CONFIG_NAME)

    def side_files(self) -> tuple[dict[str, Path], list[str]]:
        """The files to copy beside the folder's model, by their paths in it, and names of what is not copied.

        Other weights and their indexes are not copied, nor what is no file. A subfolder is copied if it is
        small and holds no weights, unless it is hidden, as version control and caches are.
        """
        if self.folder is None:
            return {}, []
        known = {self.index_name, *(shard.name for shard in self.shards)}
        copied: dict[str, Path] = {}
        left: list[str] = []
        with storage_errors(self.folder):
            for path in sorted(self.folder.iterdir()):
                files = _small_files(path) if path.is_dir() else [path] if _is_side_file(path) else None
                if files is not None:
                    copied |= {str(file.relative_to(self.folder)): file for file in files}
                elif path.name not in known:
                    left.append(shown(path.name))
        return copied, left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _locate(self, weight_map: Mapping[str, str]) -> dict[str, Shard]:
        """The shard of each tensor. Raises FormatError if the index says otherwise."""
        homes: dict[str, Shard] = {}
        for shard in self.shards:
            for name in shard.reader.tensors:
                if name in homes:
                    raise FormatError(f"{shard.reader.path}: {name!r} is in {homes[name].name} as well")
                homes[name] = shard
        for name, file in weight_map.items():
            if name not in homes or homes[name].name != file:
                raise FormatError(
                    f"{self.path}: expected {name!r:.80} in {file}, where the index says it is, got none"
                )
        return homes


def _is_side_file(path: Path) -> bool:
    """Whether a file is copied beside a model; not if it describes other weights, or is no regular file."""
    return path.is_file() and not path.name.endswith((".safetensors", INDEX_SUFFIX))


def _small_files(folder: Path) -> list[Path] | None:
    """The files of a subfolder to copy; None if it is hidden, closed, a link or large, or holds more."""
    found, nbytes, folders = [], 0, [folder]
    for place in folders:
        if place.name.startswith(".") or place.is_symlink() or not os.access(place, os.R_OK | os.X_OK):
            return None
        for path in place.iterdir():
            if path.is_dir():
                folders.append(path)
            elif _is_side_file(path):
                found.append(path)
                nbytes += path.stat().st_size
            else:
                return None
        if nbytes > _SUBFOLDER_BYTES:
            return None
    return sorted(found)


def stored_bytes(path: StrPath) -> int:
    """Bytes of a model's safetensors file, or of those that its index names. What is no file counts as none.

    Raises StorageError for a path that can't be looked at, FormatError for a broken index, and
    InvalidProblemError if a folder doesn't hold exactly one model.
    """
    place = Path(path)
    found = _files_of(place)
    with storage_errors(place):
        files = [(found.folder or place.parent) / name for name in found.shards]
        return sum(file.stat().st_size for file in files if file.is_file())


def row_blocks(model: ModelReader, name: str) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
    """The rows of a dense tensor [M, K] of :data:`ELEMENTS`, about a million elements at a time.

    A stack [E, M, K] has E*M rows.
    """
    info = model.tensors[name]
    *rows_of, k = info.shape
    m, element = math.prod(rows_of), ELEMENTS[info.dtype]
    step = max(1, _BLOCK_ELEMENTS // k) if k else max(m, 1)
    row_bytes = k * element.itemsize
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        raw = model.read(name, rows.start * row_bytes, rows.stop * row_bytes)
        yield rows, raw.view(element.dtype).reshape(rows.stop - start, k)


def copy_tensor(model: ModelReader, info: TensorInfo, writer: SafetensorsWriter) -> None:
    """Copy a tensor of any type byte for byte."""
    for start, stop in _pieces(info):
        writer.write(info.name, model.read(info.name, start, stop))


def same_tensor(a: ModelReader, b: ModelReader, name: str) -> bool:
    """Whether two models hold a tensor ``name`` of the same type, shape and bytes."""
    info = a.tensors[name]
    if b.tensors.get(name) != info:
        return False
    return all(np.array_equal(a.read(name, *piece), b.read(name, *piece)) for piece in _pieces(info))


def is_rounded(a: ModelReader, b: ModelReader, name: str) -> bool:
    """Whether ``b`` holds the float32 tensor ``name`` of ``a`` rounded to 16 bits, to nearest even."""
    given, own = a.tensors[name], b.tensors.get(name)
    if own is None or own.dtype not in ("F16", "BF16") or (given.dtype, given.shape) != ("F32", own.shape):
        return False
    dtype = ELEMENTS[own.dtype].dtype
    for start, stop in _pieces(given):
        with np.errstate(over="ignore"):
            wanted = a.read(name, start, stop).view(np.float32).astype(dtype)
        found = b.read(name, start // 2, stop // 2).view(dtype)
        same_bits = wanted.view(np.uint16) == found.view(np.uint16)
        if not (same_bits | (np.isnan(wanted) & np.isnan(found))).all():
            return False
    return True


def _pieces(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Start and stop, in bytes, of the pieces in which a tensor is copied."""
    for start in range(0, info.nbytes, _COPY_BYTES):
        yield start, min(start + _COPY_BYTES, info.nbytes)


def check_destination(source: StrPath, destination: StrPath, *, overwrite: bool) -> None:
    """Raise InvalidProblemError if the destination is the source, or exists and must not be overwritten."""
    source, destination = path_of("source", source), path_of("destination", destination)
    if os.path.exists(source) and os.path.exists(destination) and os.path.samefile(source, destination):
        raise InvalidProblemError(f"destination: expected another path than the source, got {destination}")
    if not checked_flag("overwrite", overwrite) and os.path.isfile(destination):
        raise InvalidProblemError(f"destination: expected a new file, got {destination}, which exists")


def copy_file(source: Path, destination: Path) -> None:
    """Copy a regular file. Raises StorageError, naming the file that couldn't be read or written."""
    with open_regular(source) as original, written_whole(destination) as copy:
        while True:
            with storage_errors(source):
                piece = original.read(_COPY_BYTES)
            if not piece:
                return
            copy.write(piece)


def write_index(path: Path, files: Mapping[str, Iterable[TensorInfo]]) -> None:
    """Write the index of shards. ``files`` maps the name of each file to its tensors."""
    weight_map = {info.name: file for file, infos in files.items() for info in infos}
    total = sum(info.nbytes for infos in files.values() for info in infos)
    write_json(path, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_json(path: Path, document: Any) -> None:
    """Write JSON. Raises StorageError."""
    with written_whole(path) as file:
        file.write((json.dumps(document, indent=2) + "\n").encode())


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path}: expected a weight_map of names to files")
    for file in weight_map.values():
        if not _is_plain_name(file):
            raise FormatError(f"{path}: expected safetensors files beside the index, got {file!r:.80}")
    return weight_map


def _read_json(path: Path) -> dict[str, Any]:
    raw = read_whole(path, _MAX_JSON_BYTES)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}: expected a JSON object, got {type(document).__name__}")
    return document


def _is_plain_name(file: object) -> bool:
    """Whether ``file`` is the printable name of a safetensors file in the index's own folder."""
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and file == os.path.basename(file)
        and "\\" not in file
        and file.isprintable()  # NUL and lone surrogates aren't printable
    )
