"""The streaming safetensors reader and writer, against the safetensors library as the independent party."""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import FormatError, InvalidProblemError, StorageError
from sparse24_plans.checkpoints.safetensors_file import (
    ELEMENT_BITS,
    MAX_HEADER_BYTES,
    SafetensorsReader,
    SafetensorsWriter,
    TensorInfo,
)

fuzzed = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encode(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def contents(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Everything in the file by our reader."""
    with SafetensorsReader(path) as reader:
        return {
            info.name: (info.dtype, list(info.shape), reader.read(info.name).tobytes())
            for info in reader.tensors.values()
        }


def library_contents(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Read the contents by the safetensors library."""
    found = safetensors.deserialize(content)
    return {name: (about["dtype"], about["shape"], bytes(about["data"])) for name, about in found}


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda s: s != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.dictionaries(
    names, st.tuples(st.sampled_from(["f4", "f8", "f2", "u2", "i8", "u1", "?"]), shapes), max_size=5
)
file_metadata = st.dictionaries(names, names, max_size=3)


# Reading ------------------------------------------------------------------------------------------


@fuzzed
@given(spec=tensors, metadata=file_metadata, seed=st.integers(0, 99))
def test_reads_what_the_library_writes(tmp_path, spec, metadata, seed):
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.integers(0, 2, shape).astype(dtype)  # numpy scalars become 0-d arrays
        for name, (dtype, shape) in spec.items()
    }
    content = safetensors.numpy.save({name: np.asarray(a) for name, a in arrays.items()}, metadata or None)
    path = write(tmp_path / "f", content)
    assert contents(path) == library_contents(content)
    with SafetensorsReader(path) as reader:
        assert reader.metadata == metadata


def test_reads_a_part_of_a_tensor(tmp_path):
    path = write(tmp_path / "f", encode({"a": entry(0, 2), "b": entry(2, 10)}, bytes(range(10))))
    with SafetensorsReader(path) as reader:
        assert reader.read("b", 3, 6).tolist() == [5, 6, 7]
        assert reader.read("b", 8).tolist() == []
        for start, stop in [(-1, 2), (3, 2), (0, 9)]:
            with pytest.raises(InvalidProblemError, match="b: expected a range"):
                reader.read("b", start, stop)
        with pytest.raises(InvalidProblemError, match="has no tensor 'c'"):
            reader.read("c")


def test_a_type_that_nobody_knows_is_bytes(tmp_path):
    header = {"a": entry(0, 3, shape=[7, 5], dtype="F3_NEW"), "b": entry(3, 4)}
    path = write(tmp_path / "f", encode(header, b"xyz!"))
    assert contents(path) == {"a": ("F3_NEW", [7, 5], b"xyz"), "b": ("U8", [1], b"!")}


OTHERS = {
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "torch.save": (b"PK\x03\x04" + bytes(100), "safetensors.torch.save_file"),
    "old torch.save": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", "safetensors.torch.save_file"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(100), "got a GGUF file"),
    "NumPy": (b"\x93NUMPY\1\0v\0" + bytes(100), "got a NumPy array"),
    "a page": (b"<!DOCTYPE html><html>not found</html>", "got a web page"),
    "text": (b"hello, world", "got one that starts with b'hello, w'"),
    "nothing": (b"", "got an empty file"),
}


@pytest.mark.parametrize(("content", "kind"), OTHERS.values(), ids=OTHERS)
def test_a_file_of_another_kind_is_named(tmp_path, content, kind):
    with pytest.raises(FormatError, match=f"expected a safetensors file, .*{kind}"):
        SafetensorsReader(write(tmp_path / "f", content))


@pytest.mark.parametrize("length", [640, 0x8B1F])
def test_a_header_whose_length_looks_like_another_kind(tmp_path, length):
    """640 bytes start a file as a pickle starts, 35,615 as gzip does."""
    path = write(tmp_path / "f", struct.pack("<Q", length) + b"{}".ljust(length))
    assert contents(path) == {}


HOSTILE = {
    "empty file": (b"", "at least 8 bytes, got 0"),
    "cut in the length": (b"\x02\0\0", "at least 8 bytes, got 3"),
    "header past the end": (struct.pack("<Q", 50) + b"{}", "header of 50 bytes, got a file with 2"),
    "giant header": (struct.pack("<Q", 2**64 - 1) + b"{}", f"at most {MAX_HEADER_BYTES}"),
    "no header": (encode(b""), "starts with"),
    "not JSON": (encode(b"{'a': 1}"), "expected a JSON header"),
    "not an object": (encode([1]), "starts with"),
    "not UTF-8": (encode(b'{"\xff": 1}'), "expected a JSON header"),
    "lone surrogate": (encode(b'{"\\ud800": {}}'), "expected a JSON header"),
    "NaN": (encode(b'{"a": NaN}'), "NaN is not JSON"),
    "trailing text": (encode(b"{} x"), "expected a JSON header"),
    "nested too deep": (encode(b'{"a":' + b"[" * 200_000), "expected a JSON header"),
    "endless integer": (encode(b'{"a": ' + b"9" * 5000 + b"}"), "."),
    "same name twice": (encode(b'{"a": 1, "a": 2}'), "'a' occurs twice"),
    "same field twice": (encode(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "'dtype' occurs twice"),
    "metadata of numbers": (encode({"__metadata__": {"a": 1}}), "strings to strings"),
    "metadata as a list": (encode({"__metadata__": ["a"]}), "strings to strings"),
    "entry is a number": (encode({"a": 1}), "'a': expected dtype, shape"),
    "no dtype": (encode({"a": {"shape": [], "data_offsets": [0, 0]}}), "'a': expected dtype, shape"),
    "no shape": (encode({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "'a': expected dtype, shape"),
    "no offsets": (encode({"a": {"dtype": "U8", "shape": [0]}}), "'a': expected dtype, shape"),
    "dtype is a number": (encode({"a": entry(0, 1, dtype=5)}, b"x"), "'a': expected the name of a dtype"),
    "negative shape": (encode({"a": entry(0, 1, [-1, -1])}, b"x"), r"'a': expected a shape.*\[-1, -1\]"),
    "fractional shape": (encode({"a": entry(0, 1, [1.0])}, b"x"), "'a': expected a shape"),
    "boolean shape": (encode({"a": entry(0, 1, [True])}, b"x"), "'a': expected a shape"),
    "shape is text": (encode({"a": entry(0, 1, "1")}, b"x"), "'a': expected a shape"),
    "huge size": (encode({"a": entry(0, 1, [2**63])}, b"x"), "'a': expected a shape"),
    "huge product": (encode({"a": entry(0, 1, [2**62, 2**62])}, b"x"), r"'a': expected fewer than 2\^63"),
    "wraps to fit": (encode({"a": entry(0, 0, [2**32, 2**32])}), r"'a': expected fewer than 2\^63"),
    "very long shape": (encode({"a": entry(0, 1, [2**62] * 10_000)}, b"x"), r"fewer than 2\^63"),
    "negative offset": (encode({"a": entry(-1, 0)}, b"x"), "'a': expected data_offsets"),
    "one offset": (encode({"a": {**entry(0, 0), "data_offsets": [0]}}), "'a': expected data_offsets"),
    "offsets reversed": (encode({"a": {**entry(0, 0), "data_offsets": [1, 0]}}, b"x"), "data_offsets"),
    "offsets past the end": (encode({"a": entry(0, 2)}, b"x"), "'a': expected data_offsets.*the 1 bytes"),
    "huge offset": (encode({"a": entry(0, 2**63 - 1)}, b"x"), "'a': expected data_offsets"),
    "size of another type": (encode({"a": entry(0, 2, [2], "F32")}, b"xx"), r"8 bytes for F32\[2\], got 2"),
    "part of a byte": (encode({"a": entry(0, 1, [1], "F4")}, b"x"), r"0\.5 bytes for F4\[1\], got 1"),
    "overlap": (encode({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx"), "'b': an overlap with 'a'"),
    "hole": (encode({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx"), "'b': a hole of 1 bytes after 'a'"),
    "hole at the start": (encode({"a": entry(1, 2)}, b"xx"), "'a': a hole of 1 bytes after the header"),
    "data after the end": (encode({"a": entry(0, 1)}, b"xx"), "end with 'a', got 1 bytes more"),
    "data without tensors": (encode({}, b"x"), "end with the header, got 1 bytes more"),
}


@pytest.mark.parametrize(("content", "complaint"), HOSTILE.values(), ids=HOSTILE)
def test_a_broken_file_is_refused_by_name(tmp_path, content, complaint):
    path = write(tmp_path / "broken.safetensors", content)
    with pytest.raises(FormatError, match=complaint) as caught:
        SafetensorsReader(path)
    assert str(path) in str(caught.value)


SOUND = encode(
    {
        "__metadata__": {"format": "pt"},
        "w": entry(0, 12, [3, 2], "F16"),
        "empty": entry(12, 12, [0, 3], "F32"),
        "b": entry(12, 16, [1], "F32"),
    },
    bytes(range(16)),
)


@fuzzed
@given(data=st.data())
def test_damaged_file_is_refused_or_read_as_library_reads_it(tmp_path, data):
    damaged = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[],:-')))
    length = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    path = write(tmp_path / "f", bytes(damaged[:length]))
    try:
        found = contents(path)
    except FormatError:
        return
    if all(dtype in ELEMENT_BITS for dtype, _, _ in found.values()):
        assert found == library_contents(path.read_bytes())


def test_a_file_cut_while_open_is_a_format_error(tmp_path):
    path = write(tmp_path / "f", encode({"a": entry(0, 10)}, bytes(10)))
    with SafetensorsReader(path) as reader:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(FormatError, match="ended 4 bytes early"):
            reader.read("a")


def test_what_cannot_be_read_is_a_storage_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(StorageError) as caught:
            SafetensorsReader(path)
        assert caught.value.filename == str(path)
        assert caught.value.errno


# Writing ------------------------------------------------------------------------------------------


def info_of(name: str, array: np.ndarray, dtype: str = "F32") -> TensorInfo:
    return TensorInfo(name, dtype, array.shape, array.nbytes)


DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "U8": "u1", "BOOL": "?"}


@fuzzed
@given(
    spec=st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=5),
    metadata=file_metadata,
    data=st.data(),
)
def test_the_library_reads_what_is_written_in_pieces(tmp_path, spec, metadata, data):
    arrays = {name: np.ones(shape, DTYPES[dtype]) for name, (dtype, shape) in spec.items()}
    infos = [info_of(name, array, spec[name][0]) for name, array in arrays.items()]
    # Pieces of different tensors come interleaved, in any order.
    pieces = [(name, part) for name, array in arrays.items() for part in np.array_split(array.reshape(-1), 2)]
    path = tmp_path / "f"
    with SafetensorsWriter(path, infos, metadata) as writer:
        for name, part in data.draw(st.permutations(pieces)):
            writer.write(name, part)
    expected = {name: (spec[name][0], list(a.shape), a.tobytes()) for name, a in arrays.items()}
    assert library_contents(path.read_bytes()) == contents(path) == expected
    with safetensors.safe_open(path, "numpy") as file:
        assert (file.metadata() or {}) == metadata


def test_pieces_of_a_tensor_keep_their_order(tmp_path):
    with SafetensorsWriter(tmp_path / "f", [TensorInfo("a", "U8", (4,), 4)], {}) as writer:
        writer.write("a", np.array([1, 2], np.uint8))
        writer.write("a", np.array([3], np.uint8))
        writer.write("a", np.array([4], np.uint8))
    assert contents(tmp_path / "f")["a"][2] == b"\1\2\3\4"


def test_every_tensor_is_aligned_to_its_element(tmp_path):
    sizes = {"U8": 1, "F64": 8, "U16": 2, "F32": 4}
    infos = [TensorInfo(dtype, dtype, (3,), 3 * size) for dtype, size in sizes.items()]
    path = tmp_path / "f"
    with SafetensorsWriter(path, infos, {"odd": "x"}) as writer:
        for info in infos:
            writer.write(info.name, np.zeros(info.nbytes, np.uint8))
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    for dtype, size in sizes.items():
        assert (8 + length + header[dtype]["data_offsets"][0]) % size == 0


def a_file(path: Path, byte: int = 1) -> None:
    with SafetensorsWriter(path, [TensorInfo("a", "U8", (1,), 1)], {}) as writer:
        writer.write("a", np.array([byte], np.uint8))


def write_and_fail(path: Path, error: type[BaseException]) -> None:
    with SafetensorsWriter(path, [TensorInfo("a", "U8", (9,), 9)], {}) as writer:
        writer.write("a", np.zeros(4, np.uint8))
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_the_folder_as_it_was(tmp_path, error, existing):
    path = tmp_path / "f"
    if existing:
        path.write_bytes(b"precious")
    with pytest.raises(error):
        write_and_fail(path, error)
    assert list(tmp_path.iterdir()) == ([path] if existing else [])
    assert not existing or path.read_bytes() == b"precious"


@pytest.mark.parametrize(("amount", "complaint"), [(3, "a: got 1 bytes too few"), (5, "a: got 1 bytes more")])
def test_the_announced_size_is_binding(tmp_path, amount, complaint):
    infos = [TensorInfo("a", "U8", (4,), 4), TensorInfo("b", "U8", (0,), 0)]
    with (
        pytest.raises(InvalidProblemError, match=complaint),
        SafetensorsWriter(tmp_path / "f", infos, {}) as writer,
    ):
        writer.write("a", np.zeros(amount, np.uint8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("infos", "complaint"),
    [
        ([TensorInfo("a", "U8", (1,), 1)] * 2, "a: expected names that occur once"),
        ([TensorInfo("__metadata__", "U8", (1,), 1)], "__metadata__: expected names"),
        ([TensorInfo("a", "F32", (2,), 7)], r"a: expected 8 bytes for F32\[2\], got 7"),
        ([TensorInfo("\ud800", "U8", (1,), 1)], "UTF-8"),
    ],
)
def test_tensors_that_do_not_fit_together(tmp_path, infos, complaint):
    with pytest.raises(InvalidProblemError, match=complaint):
        SafetensorsWriter(tmp_path / "f", infos, {})


def test_what_cannot_be_written_is_a_storage_error(tmp_path):
    for path in (tmp_path / "no" / "folder", tmp_path, Path("/dev/null")):
        with pytest.raises(StorageError) as caught:
            a_file(path)
        assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_is_written_through(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    a_file(link, 7)
    assert link.is_symlink()
    assert contents(target)["a"][2] == b"\7"


def test_the_file_has_the_usual_permissions(tmp_path):
    a_file(tmp_path / "f")
    (tmp_path / "g").write_bytes(b"")
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "g").stat().st_mode
