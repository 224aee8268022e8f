"""The tables of an exported folder, and ``plans.bin``, their bytes. docs/export.md describes both.

A table is a list of records, which refer to each other by index. ``sparse24_export.c`` reads the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import FormatError

MAGIC = b"S24PLANS"
SCHEMA = 1
Record = dict[str, Any]


class Number(NamedTuple):
    """``constant + by_n * n``, and the number in ``column`` of the row of n's range; 0: in none."""

    constant: int
    by_n: int = 0
    column: int = 0


NO_PLAN = (1 << 32) - 1
"""The plan of a range that no kernel serves."""
_NUMBER = "qqI4x"
_MAP_DIMENSIONS = 5
WALK = 8
"""Numbers of a map in im2col mode: lower corner, upper corner, element strides."""
_PLACE = {"at": "I", "size": "I", "kind": "I", "operand": "i", "factor": "q", "number": _NUMBER}
_NO_PLACE = dict.fromkeys(("at", "size", "kind", "operand", "factor"), 0) | {"number": Number(0)}

RECORDS: Mapping[str, Mapping[str, Any]] = {
    "problems": {
        "name": "text",
        "descriptor": "text",
        "first_range": "I",
        "ranges": "I",
        "least_n": "q",
        "most_n": "q",
    },
    "ranges": {"first_n": "q", "plan": "I", "row": "I"},
    "numbers": {"number": "q"},
    "plans": {
        "kernel": "text",
        "guarantee": "text",
        "promises": "I",
        "workspace_alignment": "I",
        "workspace": _NUMBER,
        "first_operand": "I",
        "operands": "I",
        "first_launch": "I",
        "launches": "I",
    },
    "operands": {
        "name": "text",
        "written": "I",
        "optional": "I",
        "itemsize": "I",
        "strided": "I",
        "alignment": "I",
        "line_alignment": "I",
        "may_be": "i",
        "lines": _NUMBER,
        "width": _NUMBER,
    },
    "launches": {
        "fill": "I",
        "cubin": "I",
        "symbol": "text",
        "threads": "I",
        "shared_bytes": "I",
        "overlapping": "I",
        "parameter_bytes": "I",
        "byte": "I",
        "size": _NUMBER,
        "first_place": "I",
        "places": "I",
        "first_map": "I",
        "maps": "I",
    },
    "places": _PLACE,
    "maps": {
        "at": "I",
        "data_type": "I",
        "rank": "I",
        "swizzle": "I",
        "promotion": "I",
        "only_if_aligned": "i",
        "im2col": "I",
        **{f"walk{at}": "i" for at in range(WALK)},
        "zero": "I",
        "address": _PLACE,
        **{f"pitch{at}": _PLACE for at in range(_MAP_DIMENSIONS - 1)},
        **{f"size{at}": _NUMBER for at in range(_MAP_DIMENSIONS)},
        **{f"box{at}": _NUMBER for at in range(_MAP_DIMENSIONS)},
    },
    "cubins": {"file": "text", "zero": "I", "nbytes": "Q", "sha256": "32s"},
}
"""The fields of each table's records, in their order: a format of ``struct``, ``text`` or a record."""
_HEADER = struct.Struct("<8sIIQ32sIIII")
_SECTION = struct.Struct("<QQ")
_SECTIONS = (*RECORDS, "text")
HEADER_BYTES = _HEADER.size + _SECTION.size * len(_SECTIONS)


class Tables:
    """Tables that are being made. Equal records that :meth:`add` adds one behind the other are not shared."""

    def __init__(self, compute_capability: tuple[int, int], multiprocessors: int) -> None:
        self.device = (*compute_capability, multiprocessors)
        self.records: dict[str, list[Record]] = {name: [] for name in RECORDS}

    def add(self, table: str, records: list[Record]) -> int:
        """Add records and return the index of the first."""
        known = self.records[table]
        known.extend(records)
        return len(known) - len(records)

    def document(self) -> dict[str, Any]:
        """The tables as the manifest has them."""
        major, minor, multiprocessors = self.device
        device = {"compute_capability": [major, minor], "multiprocessors": multiprocessors}
        return {"schema": SCHEMA, "device": device, "tables": self.records}

    def to_bytes(self) -> bytes:
        """The content of ``plans.bin``."""
        text, sections = _Text(), b""
        where = []
        for name, records in self.records.items():
            where.append((HEADER_BYTES + len(sections), len(records)))
            sections += b"".join(_packed(RECORDS[name], record, text) for record in records)
        where.append((HEADER_BYTES + len(sections), len(text.content)))
        sections += text.content
        rest = struct.pack("<4I", *self.device, 0) + b"".join(_SECTION.pack(*one) for one in where) + sections
        total = HEADER_BYTES + len(sections)
        digest = hashlib.sha256(rest).digest()
        return struct.pack("<8sIIQ", MAGIC, SCHEMA, HEADER_BYTES, total) + digest + rest

    @classmethod
    def of(cls, content: bytes) -> Tables:
        """The tables in the bytes of ``plans.bin``. Raises FormatError for anything else."""
        try:
            return cls._read(content)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise FormatError(f"plans.bin: expected tables of plans, got damaged ones ({error})") from error

    @classmethod
    def _read(cls, content: bytes) -> Tables:
        magic, schema, header, total, digest, major, minor, multiprocessors, _ = _HEADER.unpack_from(content)
        if (magic, schema, header, total) != (MAGIC, SCHEMA, HEADER_BYTES, len(content)):
            raise FormatError(
                f"plans.bin: expected schema {SCHEMA} of {len(content)} bytes, got another file"
            )
        if hashlib.sha256(content[_HEADER.size - 16 :]).digest() != digest:
            raise FormatError("plans.bin: expected the bytes that its SHA-256 is of, got others")
        found = cls((major, minor), multiprocessors)
        where = {
            name: _SECTION.unpack_from(content, _HEADER.size + at * _SECTION.size)
            for at, name in enumerate(_SECTIONS)
        }
        start, length = where["text"]
        text = content[start : start + length]
        for name, fields in RECORDS.items():
            at, count = where[name]
            size = struct.calcsize(_format_of(fields))
            for number in range(count):
                values = iter(struct.unpack_from(_format_of(fields), content, at + number * size))
                found.records[name].append(_unpacked(fields, values, text))
        return found


class _Text:
    """Strings, each ended by a zero byte. Offset 0 is the empty one."""

    def __init__(self) -> None:
        self.content, self._known = b"\0", {"": 0}

    def offset(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self.content)
            self.content += text.encode() + b"\0"
        return self._known[text]


def _format_of(fields: Mapping[str, Any], order: str = "<") -> str:
    parts = (
        "I" if one == "text" else one if isinstance(one, str) else _format_of(one, "")
        for one in fields.values()
    )
    return order + "".join(parts)


def _packed(fields: Mapping[str, Any], record: Record, text: _Text) -> bytes:
    return struct.pack(_format_of(fields), *_values(fields, record, text))


def _values(fields: Mapping[str, Any], record: Record, text: _Text) -> Iterator[Any]:
    for name, kind in fields.items():
        value = record[name]
        if kind == "text":
            yield text.offset(value)
        elif kind == _NUMBER:
            yield from value
        elif kind == "32s":
            yield bytes.fromhex(value)
        elif isinstance(kind, str):
            yield value
        else:
            yield from _values(kind, value, text)


def _unpacked(fields: Mapping[str, Any], values: Iterator[Any], text: bytes) -> Record:
    record: Record = {}
    for name, kind in fields.items():
        if kind == "text":
            start = next(values)
            record[name] = text[start : text.index(b"\0", start)].decode()
        elif kind == _NUMBER:
            record[name] = Number(next(values), next(values), next(values))
        elif kind == "32s":
            record[name] = next(values).hex()
        else:
            record[name] = next(values) if isinstance(kind, str) else _unpacked(kind, values, text)
    return record


def no_place() -> Record:
    """A place that nothing reads."""
    return dict(_NO_PLACE)
