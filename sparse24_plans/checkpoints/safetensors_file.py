"""The safetensors file format: a lazy reader, and a writer that never leaves half a file.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes with neither
holes nor overlaps. Both classes move bytes in the chunks that the caller asks for, so memory stays bounded
by a chunk and the header. Tensors of unknown types can be copied byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

from ..device.files import open_regular, storage_errors, written_whole
from ..errors import FormatError, InvalidProblemError
from ..errors import shown as shown_value

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
_LENGTH_BYTES = 8
_ALIGNMENT = 8
"""The data starts at a multiple of this. With larger elements first, every tensor is aligned."""
_LARGEST = 2**63 - 1

_SIGNATURES = {
    b"version https://git-lfs": "a pointer of Git LFS: fetch the file itself, as git lfs pull does",
    b"PK\x03\x04": "a zip archive, as torch.save writes; save the tensors by safetensors.torch.save_file",
    b"\x80\x02": "a Python pickle, as torch.save wrote; save the tensors by safetensors.torch.save_file",
    b"GGUF": "a GGUF file",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
}
"""First bytes of other kinds of files that users mistake for safetensors files."""
_SIGNATURE_BYTES = 32

ELEMENT_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of one element, by the format's name of its type."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: ``dtype`` is the format's name (``"BF16"``), ``nbytes`` its size in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsReader:
    """The tensors of a file, read when asked for. A context manager; for one thread at a time.

    ``tensors`` maps names to TensorInfo in the order of the data. ``metadata`` is the file's map of strings
    to strings. Bytes are read, not mapped, so a file that changes meanwhile causes an exception rather than a
    signal.

    Raises StorageError if the file can't be read; FormatError, naming file and tensor, if it breaks the
    format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open_regular(self.path)
        try:
            with storage_errors(self.path):
                size = os.fstat(self._file.fileno()).st_size
            header, self._data_start = self._read_header(size)
            self.metadata = self._parse_metadata(header.pop("__metadata__", None))
            self.tensors, self._offsets = self._parse_tensors(header, size - self._data_start)
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes ``start`` to ``stop`` (default: the end) of a tensor's data, as a new array.

        Raises InvalidProblemError for a name that the file lacks, or a range outside the tensor.
        """
        if name not in self.tensors:
            raise InvalidProblemError(f"name: {self.path} has no tensor {name!r}")
        info = self.tensors[name]
        stop = info.nbytes if stop is None else stop
        if not 0 <= start <= stop <= info.nbytes:
            raise InvalidProblemError(
                f"{shown(name)}: expected a range inside its {info.nbytes} bytes, got {start}..{stop}"
            )
        return self._read_at(self._offsets[name] + start, stop - start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _read_at(self, position: int, nbytes: int) -> Bytes:
        buffer = np.empty(nbytes, np.uint8)
        done = 0
        with storage_errors(self.path):
            self._file.seek(position)
            while done < nbytes:
                got = self._file.readinto(buffer.data[done:])
                if not got:
                    raise FormatError(f"{self.path}: ended {nbytes - done} bytes early while being read")
                done += got
        return buffer

    # Header -------------------------------------------------------------------------------------------

    def _broken(self, complaint: str) -> FormatError:
        return FormatError(f"{self.path}: {complaint}")

    def _read_header(self, size: int) -> tuple[dict[str, Any], int]:
        start = self._read_at(0, min(size, _SIGNATURE_BYTES)).tobytes()
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        raw = b""
        if size < _LENGTH_BYTES:
            complaint = f"expected at least {_LENGTH_BYTES} bytes, got {size}"
        elif length > MAX_HEADER_BYTES:
            complaint = f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}"
        elif _LENGTH_BYTES + length > size:
            complaint = f"expected a header of {length} bytes, got a file with {size - _LENGTH_BYTES}"
        else:
            raw = self._read_at(_LENGTH_BYTES, length).tobytes()
            complaint = f"expected a header that starts with '{{', got {raw[:1]!r}"
        if not raw.startswith(b"{"):
            raise self._broken(f"expected a safetensors file, got {_kind_of(start)}; {complaint}")
        try:
            header = json.loads(raw.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
            json.dumps(header, ensure_ascii=False).encode()  # refuses the lone surrogates of \ud800
        except (ValueError, RecursionError) as error:
            raise self._broken(f"expected a JSON header: {error}") from error
        return header, _LENGTH_BYTES + length

    def _parse_metadata(self, metadata: Any) -> dict[str, str]:
        if metadata is None:
            return {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._broken("__metadata__: expected a map of strings to strings")
        return metadata

    def _parse_tensors(
        self, header: dict[str, Any], data_bytes: int
    ) -> tuple[dict[str, TensorInfo], dict[str, int]]:
        parsed = [self._parse_tensor(name, entry, data_bytes) for name, entry in header.items()]
        parsed.sort(key=lambda item: (item[1], item[1] + item[0].nbytes))
        tensors: dict[str, TensorInfo] = {}
        offsets: dict[str, int] = {}
        end, before = 0, "the header"
        for info, start in parsed:
            if start != end:
                what = "an overlap with" if start < end else f"a hole of {start - end} bytes after"
                raise self._broken(f"{info.name!r}: {what} {before}")
            tensors[info.name], offsets[info.name] = info, self._data_start + start
            end, before = start + info.nbytes, repr(info.name)
        if end != data_bytes:
            raise self._broken(f"expected data to end with {before}, got {data_bytes - end} bytes more")
        return tensors, offsets

    def _parse_tensor(self, name: str, entry: Any, data_bytes: int) -> tuple[TensorInfo, int]:
        """The entry and the offset of its bytes from the start of the data."""
        if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
            raise self._broken(f"{name!r}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str):
            raise self._broken(f"{name!r}: expected the name of a dtype, got {shown_value(dtype)}")
        if not _are_sizes(shape):
            raise self._broken(
                f"{name!r}: expected a shape of integers from 0 to 2^63-1, got {shown_value(shape)}"
            )
        if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
            raise self._broken(
                f"{name!r}: expected data_offsets [start, end] inside the {data_bytes} bytes of data, "
                f"got {shown_value(offsets)}"
            )
        info = TensorInfo(name, dtype, tuple(shape), offsets[1] - offsets[0])
        if (complaint := _size_complaint(info)) is not None:
            raise self._broken(f"{name!r}: {complaint}")
        return info, offsets[0]


class SafetensorsWriter:
    """A file whose tensors are announced first and then written piece by piece, in any order of tensors.

    A context manager. The file is :func:`written_whole`: it replaces the destination when the block ends
    without an error and every tensor is complete. Otherwise the destination stays as it was. Larger elements
    come first in the file, like in the reference implementation, so that every tensor is aligned.

    Raises InvalidProblemError for tensors that don't fit together; StorageError if the disk is full or the
    folder can't be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensors: Iterable[TensorInfo], metadata: Mapping[str, str]
    ) -> None:
        self.path = Path(path)
        infos = sorted(tensors, key=lambda info: -ELEMENT_BITS.get(info.dtype, 0))
        self._header = _encode_header(infos, metadata)
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        position = len(self._header)
        for info in infos:
            self._next[info.name] = position
            position += info.nbytes
            self._end[info.name] = position

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._file = stack.enter_context(written_whole(self.path))
            self._put(0, self._header)
            self._whole = stack.pop_all()
        return self

    def write(self, name: str, data: np.ndarray[Any, Any]) -> None:
        """Append the bytes of ``data`` to the tensor ``name``."""
        chunk = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        if self._next[name] + len(chunk) > self._end[name]:
            over = self._next[name] + len(chunk) - self._end[name]
            raise InvalidProblemError(f"{shown(name)}: got {over} bytes more than its shape holds")
        self._put(self._next[name], chunk)
        self._next[name] += len(chunk)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._whole.__exit__(kind, error, trace)
            return
        with self._whole:
            for name, end in self._end.items():
                if self._next[name] != end:
                    raise InvalidProblemError(f"{shown(name)}: got {end - self._next[name]} bytes too few")

    def _put(self, position: int, data: Any) -> None:
        with storage_errors(self.path):
            self._file.seek(position)
            self._file.write(data)


def shown(name: str) -> str:
    """A tensor's name for a message, shortened and with control characters escaped."""
    return name if name.isprintable() and len(name) <= 200 else ascii(name[:200])


def _kind_of(start: bytes) -> str:
    """The kind of a file that isn't a safetensors file, by its first bytes."""
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature):
            return kind
    return f"one that starts with {start[:_LENGTH_BYTES]!r}" if start else "an empty file"


def _encode_header(infos: list[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for info in infos:
        if info.name in header or info.name == "__metadata__":
            raise InvalidProblemError(f"{shown(info.name)}: expected names that occur once")
        if (complaint := _size_complaint(info)) is not None:
            raise InvalidProblemError(f"{shown(info.name)}: {complaint}")
        header[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, position + info.nbytes],
        }
        position += info.nbytes
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidProblemError(f"expected names that UTF-8 can hold: {error}") from error
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidProblemError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(text)}")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _size_complaint(info: TensorInfo) -> str | None:
    """Why ``nbytes`` can't hold the shape, or None. For an unknown type any size is accepted."""
    bits = ELEMENT_BITS.get(info.dtype)
    if bits is None:
        return None
    total = bits
    for size in info.shape:
        total *= size
        if total > _LARGEST:  # stops before a long shape grows a giant integer
            return f"expected fewer than 2^63 bits, got shape {shown_value(info.shape)}"
    if total != 8 * info.nbytes:
        return (
            f"expected {total / 8:g} bytes for {info.dtype}{shown_value(list(info.shape))}, got {info.nbytes}"
        )
    return None


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST for item in value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
