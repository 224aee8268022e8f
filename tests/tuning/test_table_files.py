"""Tuning tables on disk: read from regular files of a sane size alone, written whole or not at all."""

from __future__ import annotations

import os

import pytest

from sparse24_plans import FormatError, StorageError, TuningTable
from sparse24_plans.gemm.tuned import EMPTY


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path, make):
    path = tmp_path / "table.json"
    make(path)
    for attempt in (TuningTable.load, EMPTY.save):
        with pytest.raises(StorageError) as caught:
            attempt(path)
        assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"\xff\xfe\x80", b"[" * 100_000, b"\0", b'{"schema": ' + b"9" * 5000])
def test_a_file_that_is_no_table_is_a_format_error(tmp_path, content):
    (tmp_path / "table.json").write_bytes(content)
    with pytest.raises(FormatError, match="tuning table"):
        TuningTable.load(tmp_path / "table.json")


STAMP = '"stamp": {"gpu": "H200", "driver": "1"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "expected a table that sparse24 tune wrote, got other JSON"),
        ("null", "expected a table that sparse24 tune wrote, got other JSON"),
        ('{"schema": 2}', "expected schema 1, got 2"),
        ('{"schema": 1}', "stamp: expected the names of a gpu and a driver, got None"),
        ('{"schema": 1, "stamp": {"gpu": "H200", "driver": null}, "entries": []}', "stamp: expected the"),
        ('{"schema": 1, %s}' % STAMP, "entries: expected a list, got None"),  # noqa: UP031 - has braces
        ('{"schema": 1, %s, "entries": {}}' % STAMP, "entries: expected a list, got {}"),  # noqa: UP031
        ('{"schema": 1, %s, "entries": [3]}' % STAMP, "TunedKernel: .* got 3"),  # noqa: UP031
    ],
)
def test_the_error_says_what_a_table_has(tmp_path, content, message):
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(FormatError, match=f"^tuning table .*table.json: {message}"):
        TuningTable.load(tmp_path / "table.json")


def test_a_table_replaces_the_old_one_whole(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    EMPTY.save(path)
    before = path.read_bytes()

    def interrupt(source: object, destination: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            TuningTable("another GPU", "1", ()).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    TuningTable("another GPU", "1", ()).save(path)
    assert TuningTable.load(path).gpu == "another GPU"
