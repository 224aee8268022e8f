"""A checkpoint as one set of tensors, be it a safetensors file or a folder of shards with their index.

The index is Hugging Face's ``*.safetensors.index.json``: ``weight_map`` maps the names of tensors to files
beside it. A new folder is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from ..errors import FormatError, InvalidProblemError
from .safetensors_file import Bytes, SafetensorsReader, TensorInfo, storage_errors

INDEX_SUFFIX = ".safetensors.index.json"
CONFIG_NAME = "config.json"
_MAX_JSON_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, and its open reader."""

    name: str
    reader: SafetensorsReader


class ShardedReader:
    """The tensors of a file, or of all shards of a folder. A context manager; for one thread at a time.

    ``path`` is a safetensors file, a folder, or the index in it. ``tensors`` maps names to entries in the
    order of the shards and their data. ``folder`` is None for a single file.

    Raises StorageError where a file can't be read; FormatError where one breaks its format, or the index
    doesn't fit the shards; InvalidProblemError where the folder holds no checkpoint, or more than one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.index_name: str | None = None
        self.folder: Path | None = None
        names = self._find()
        with ExitStack() as stack:
            where = self.folder or self.path.parent
            self.shards = tuple(
                Shard(name, stack.enter_context(SafetensorsReader(where / name))) for name in names
            )
            self._homes = self._locate()
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
        """The folder's ``config.json``, or None where there is none."""
        if self.folder is None or not (self.folder / CONFIG_NAME).is_file():
            return None
        return _read_json(self.folder / CONFIG_NAME)

    def others(self) -> Iterator[Path]:
        """The folder's other files: neither safetensors nor the index nor ``config.json``, nor folders."""
        for path in sorted(self.folder.iterdir()) if self.folder else ():
            known = path.suffix == ".safetensors" or path.name in (self.index_name, CONFIG_NAME)
            if path.is_file() and not known:
                yield path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _find(self) -> list[str]:
        """The names of the shards; sets ``folder`` and ``index_name``."""
        if self.path.is_dir():
            self.folder = self.path
            with storage_errors(self.path):
                names = sorted(entry.name for entry in self.path.iterdir())
            indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
            files = [name for name in names if name.endswith(".safetensors")]
            if not indexes and len(files) == 1:
                return files
            if len(indexes) != 1:
                raise InvalidProblemError(
                    f"source: expected one *{INDEX_SUFFIX} or one safetensors file in {self.path}, "
                    f"got {len(indexes)} and {len(files)}"
                )
            self.index_name = indexes[0]
        elif self.path.name.endswith(INDEX_SUFFIX):
            self.folder, self.index_name = self.path.parent, self.path.name
        else:
            return [self.path.name]
        return sorted(set(self._weight_map().values()))

    def _weight_map(self) -> dict[str, str]:
        assert self.folder is not None
        assert self.index_name is not None
        path = self.folder / self.index_name
        weight_map = _read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{path}: expected a weight_map of names to files")
        for file in weight_map.values():
            if not _is_plain_name(file):
                raise FormatError(f"{path}: expected safetensors files beside the index, got {file!r:.80}")
        return weight_map

    def _locate(self) -> dict[str, Shard]:
        homes: dict[str, Shard] = {}
        for shard in self.shards:
            for name in shard.reader.tensors:
                if name in homes:
                    raise FormatError(f"{shard.reader.path}: {name!r} is in {homes[name].name} as well")
                homes[name] = shard
        if self.index_name is not None:
            for name, file in self._weight_map().items():
                if name not in homes or homes[name].name != file:
                    raise FormatError(f"{self.path}: the index looks for {name!r:.80} in {file}: not there")
        return homes


def stored_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a checkpoint's safetensors file or files; 0 where there is none."""
    place = Path(path)
    if place.name.endswith(INDEX_SUFFIX):
        place = place.parent
    files = place.glob("*.safetensors") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def new_folder(destination: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder that becomes ``destination`` when the block ends well, and disappears otherwise.

    The destination must not exist, or be an empty folder. Raises InvalidProblemError where it isn't,
    StorageError where the disk doesn't allow it.
    """
    target = Path(os.path.realpath(destination))
    with storage_errors(target):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise InvalidProblemError(f"destination: expected a new or an empty folder, got {target}")
        temporary = target.with_name(f".sparse24-{secrets.token_hex(8)}.tmp")
        temporary.mkdir()
    try:
        yield temporary
        with storage_errors(target):
            os.replace(temporary, target)
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)


def write_index(path: Path, files: Mapping[str, Iterable[TensorInfo]]) -> None:
    """Write the index of shards: file name -> its tensors."""
    weight_map = {info.name: file for file, infos in files.items() for info in infos}
    total = sum(info.nbytes for infos in files.values() for info in infos)
    write_json(path, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_json(path: Path, document: Any) -> None:
    with storage_errors(path):
        path.write_text(json.dumps(document, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    with storage_errors(path):
        size = path.stat().st_size
        raw = path.read_bytes() if size <= _MAX_JSON_BYTES else b""
    if size > _MAX_JSON_BYTES:
        raise FormatError(f"{path}: expected at most {_MAX_JSON_BYTES} bytes, got {size}")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}: expected a JSON object, got {type(document).__name__}")
    return document


def _is_plain_name(file: object) -> bool:
    """Whether it names a safetensors file in the index's own folder."""
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and file == os.path.basename(file)
        and "\\" not in file
        and "\0" not in file
    )
