"""Paths and names that nobody should trust: a typed error that can be printed, no wait, nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparse24_plans import FormatError, InvalidProblemError, Sparse24Error, StorageError
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.folder import stored_bytes
from sparse24_plans.checkpoints.verify import verify_checkpoint
from sparse24_plans.checkpoints.weights_file import load_weight, save_weights

from .models import INDEX, convert, dense_file, random_array, rewrite, sharded_model, snapshot, swap, tiled

LONG = "x" * 256


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def to_dense(source: Path, out: Path) -> Any:
    return convert(source, out, "compressed_tensors", "dense")


@pytest.mark.parametrize("hostile", [pipe, endless, loop])
@pytest.mark.parametrize("file", [INDEX, "model-00001-of-00002.safetensors", "config.json"])
def test_a_folder_with_a_file_that_never_ends(tmp_path, file, hostile):
    model, out = tmp_path / "model", tmp_path / "out"
    sharded_model(model)
    hostile(model / file)
    with pytest.raises(StorageError) as caught:
        to_dense(model, out)
    assert caught.value.filename == str(model / file)
    assert list(tmp_path.iterdir()) == [model]


def test_other_files_that_never_end_are_left_out(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    sharded_model(model)
    for hostile in (pipe, endless, loop):
        hostile(model / hostile.__name__)
    to_dense(model, out)
    assert {path.name for path in model.iterdir()} - {path.name for path in out.iterdir()} == {
        "pipe",
        "endless",
        "loop",
    }


@pytest.mark.parametrize("hostile", [pipe, endless, loop])
def test_a_source_that_never_ends(files, hostile):
    source, out = files
    hostile(source)
    for attempt in (
        lambda: compress_checkpoint(source, out),
        lambda: convert(source, out, "dense", "sparse24"),
        lambda: verify_checkpoint(source, source),
        lambda: load_weight(source, "w"),
    ):
        with pytest.raises(StorageError) as caught:
            attempt()
        assert caught.value.filename == str(source)
    assert stored_bytes(source) == 0
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("hostile", [pipe, endless, loop])
def test_a_destination_that_is_no_file_stays_what_it_was(files, hostile):
    source, out = files
    dense_file(source, {"w": tiled((16, 32), "f32")})
    hostile(out)
    before = os.lstat(out)
    for attempt in (
        lambda: compress_checkpoint(source, out),
        lambda: convert(source, out, "dense", "sparse24"),
        lambda: save_weights(out, {}),
    ):
        with pytest.raises(StorageError) as caught:
            attempt()
        assert caught.value.filename == str(out)
    assert (os.lstat(out).st_ino, os.lstat(out).st_mode) == (before.st_ino, before.st_mode)
    assert sorted(out.parent.iterdir()) == sorted(files)


@pytest.mark.parametrize("name", [LONG, "\ud800", "a\0b"])
def test_names_that_no_file_can_have(tmp_path, name):
    source, model = tmp_path / "dense.safetensors", tmp_path / "model"
    dense_file(source, {"w": tiled((16, 32), "f32")})
    sharded_model(model)
    before, impossible = snapshot(tmp_path), tmp_path / name
    for attempt in (
        lambda: compress_checkpoint(impossible, tmp_path / "out"),
        lambda: compress_checkpoint(impossible / INDEX, tmp_path / "out"),
        lambda: compress_checkpoint(source, impossible),
        lambda: to_dense(model, impossible),
        lambda: to_dense(impossible, tmp_path / "out"),
        lambda: verify_checkpoint(impossible, source),
        lambda: load_weight(impossible, "w"),
        lambda: save_weights(impossible, {}),
    ):
        with pytest.raises(StorageError) as caught:
            attempt()
        str(caught.value).encode()
        assert caught.value.errno
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_folders_that_cannot_be_searched(tmp_path):
    closed, model = tmp_path / "closed", tmp_path / "model"
    sharded_model(closed)
    sharded_model(model)
    closed.chmod(0o444)
    try:
        for path in (closed, closed / INDEX, closed / "model-00001-of-00002.safetensors"):
            for attempt in (
                lambda path=path: to_dense(path, tmp_path / "out"),
                lambda path=path: compress_checkpoint(path, tmp_path / "out"),
                lambda path=path: verify_checkpoint(path, path),
                lambda: to_dense(model, closed / "new"),
                lambda path=path: stored_bytes(path),
            ):
                with pytest.raises(StorageError) as caught:
                    attempt()
                assert str(closed) in caught.value.filename
    finally:
        closed.chmod(0o755)
    assert sorted(tmp_path.iterdir()) == [closed, model]


def set_map(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"].update(entries)
        (folder / INDEX).write_text(json.dumps(index))

    return change


INDEXES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a lone surrogate in a file": (set_map(x="\ud800.safetensors"), FormatError, "files beside the index"),
    "a lone surrogate in a tensor": (
        set_map(**{"\ud800": "model-00001-of-00002.safetensors"}),
        FormatError,
        "expected '.*ud800' in .*, where the index says it is, got none",
    ),
    "an escape in a file": (set_map(x="\x1b[2J.safetensors"), FormatError, "files beside the index"),
    "a backslash in a file": (set_map(x="a\\b.safetensors"), FormatError, "files beside the index"),
    "a NUL in a file": (set_map(x="a\0.safetensors"), FormatError, "files beside the index"),
    "a file of 300 bytes": (set_map(x="x" * 288 + ".safetensors"), StorageError, "File name too long"),
    "bytes that aren't text": (
        lambda f: (f / INDEX).write_bytes(b"\xff\xfe\x00"),
        FormatError,
        "expected JSON",
    ),
    "an integer of 5000 digits": (lambda f: (f / INDEX).write_text("9" * 5000), FormatError, "expected"),
}


@pytest.mark.parametrize(("change", "kind", "complaint"), INDEXES.values(), ids=INDEXES)
def test_hostile_indexes(tmp_path, change, kind, complaint):
    model = tmp_path / "model"
    sharded_model(model)
    change(model)
    for attempt in (
        lambda: to_dense(model, tmp_path / "out"),
        lambda: compress_checkpoint(model, tmp_path / "out"),
        lambda: verify_checkpoint(model, model),
    ):
        with pytest.raises(kind, match=complaint) as caught:
            attempt()
        str(caught.value).encode()
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("value", [3, "text", [1], True, 0])
def test_a_configuration_that_is_no_object(tmp_path, value):
    """The configuration is refused where it would have to be changed, and left alone elsewhere."""
    model = tmp_path / "model"
    model.mkdir()
    dense_file(model / "model.safetensors", {"w.weight": tiled((16, 32), "f16")})
    (model / "config.json").write_text(json.dumps({"quantization_config": value}))
    with pytest.raises(FormatError, match=r"config\.json: quantization_config: expected an object, got"):
        convert(model, tmp_path / "out", "dense", "compressed_tensors")
    assert list(tmp_path.iterdir()) == [model]
    convert(model, tmp_path / "out", "dense", "sparse24")
    assert (tmp_path / "out" / "config.json").read_bytes() == (model / "config.json").read_bytes()


# Names of tensors ---------------------------------------------------------------------------------

NASTY = "a\x1b[31m\nb.weight"


def messages(attempts: list[Callable[[], Any]]) -> list[str]:
    found = []
    for attempt in attempts:
        with pytest.raises(Sparse24Error) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_names_of_tensors_are_escaped_in_errors(files):
    source, out = files
    dense_file(source, {NASTY: random_array((16, 32))})
    compressed = out.with_name("compressed.safetensors")
    compress_checkpoint(source, compressed)
    broken = out.with_name("broken.safetensors")
    broken.write_bytes(compressed.read_bytes())
    rewrite(broken, swap(f"{NASTY}.values24", np.zeros((3, 3), np.float32)))
    taken = out.with_name("taken.safetensors")
    dense_file(taken, {NASTY: random_array((16, 32)), f"{NASTY}.meta24": np.zeros(3)})
    for message in messages(
        [
            lambda: convert(source, out, "dense", "sparse24", include=["*"]),
            lambda: convert(source, out, "dense", "tilelang", include=["*"]),
            lambda: convert(compressed, out, "sparse24", "torch_cutlass"),
            lambda: convert(broken, out, "sparse24", "dense"),
            lambda: compress_checkpoint(taken, out),
            lambda: load_weight(broken, NASTY),
            lambda: load_weight(compressed, NASTY + "?"),
            lambda: verify_checkpoint(broken, source),
            lambda: save_weights(out, {NASTY: 3}),
        ]
    ):
        assert "a\\x1b[31m\\nb.weight" in message
        assert message.isprintable()
    assert not out.exists()


def test_names_of_tensors_are_escaped_in_findings(files):
    dense, out = files
    dense_file(dense, {NASTY: random_array((3,)), "w": random_array((8, 16))})
    compress_checkpoint(dense, out)
    rewrite(out, swap(NASTY, np.zeros(3, np.float32)))
    rewrite(out, swap(NASTY + "?", np.zeros(3, np.float32)))
    found = verify_checkpoint(out, dense, device="host")
    assert len(found.problems) == 2
    assert all("a\\x1b[31m\\nb.weight" in problem and problem.isprintable() for problem in found.problems)


def test_reasons_to_copy_are_printable(files):
    source, out = files
    header = json.dumps({"w": {"dtype": "F3\n\x1b", "shape": [8], "data_offsets": [0, 3]}}).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    [report] = compress_checkpoint(source, out)
    assert report.reason.isprintable()


@pytest.mark.parametrize(
    "write", [compress_checkpoint, lambda *paths, **options: convert(*paths, "dense", "sparse24", **options)]
)
def test_a_file_that_exists_is_kept_where_it_must_be(files, write):
    source, out = files
    dense_file(source, {"w": tiled((16, 32), "f32")})
    out.write_bytes(b"precious")
    with pytest.raises(InvalidProblemError, match=r"destination: expected a new file, .* exists"):
        write(source, out, overwrite=False)
    assert out.read_bytes() == b"precious"
    out.unlink()
    write(source, out, overwrite=False)
    assert load_weight(out, "w").m == 16
