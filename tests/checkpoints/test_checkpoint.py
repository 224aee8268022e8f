"""Compressed checkpoints: what is compressed and what copied, the file, failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BackendUnavailableError,
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
    StorageError,
    prune,
)
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.selection import DEFAULT_EXCLUDE
from sparse24_plans.checkpoints.verify import verify_checkpoint
from sparse24_plans.checkpoints.weights_file import iter_weights, load_weight, save_weights

from ..support import same_bits
from .checkpoints import (
    ELEMENTS,
    REAL,
    dense_file,
    drop,
    library_load,
    needs_real,
    random_array,
    rewrite,
    swap,
)

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# The file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_library_reads_the_documented_format(files, element):
    source, out = files
    arrays = dense_file(
        source,
        {"a.weight": random_array((6, 16), element), "a.bias": random_array((6,), element)},
        {"format": "pt", "author": "someone"},
    )
    compress_checkpoint(source, out)
    stored, metadata = library_load(out)
    assert stored.keys() == {"a.weight.values24", "a.weight.meta24", "a.bias"}
    assert same_bits(stored["a.bias"], arrays["a.bias"])
    expected = Sparse24Weight.prune_compress(arrays["a.weight"])
    assert same_bits(stored["a.weight.values24"], expected.values)
    assert same_bits(stored["a.weight.meta24"], expected.metadata)
    description = json.loads(metadata.pop("sparse24.a.weight"))
    assert description == {"shape": [6, 16], "element": element}
    assert metadata == {"format": "pt", "author": "someone", "sparse24_format": "1"}


@quick
@given(
    m=st.integers(1, 40),
    groups=st.integers(1, 12),
    element=st.sampled_from(ELEMENTS),
    seed=st.integers(0, 99),
)
def test_a_layer_comes_back_as_the_pruned_dense_tensor(tmp_path, m, groups, element, seed):
    source, out = tmp_path / "dense", tmp_path / "sparse"
    dense = random_array((m, 8 * groups), element, seed)
    dense_file(source, {"w": dense})
    compress_checkpoint(source, out)
    assert same_bits(load_weight(out, "w").decompress(), prune(dense))
    [(name, weight)] = iter_weights(out)
    assert name == "w"
    assert same_bits(weight.decompress(), prune(dense))


def test_a_tensor_of_many_row_blocks(files):
    source, out = files
    dense = dense_file(source, {"w": random_array((700, 4096), "f16")})["w"]
    [report] = compress_checkpoint(source, out)
    assert same_bits(load_weight(out, "w").decompress(), prune(dense))
    squares = [float((array.astype(np.float64) ** 2).sum()) for array in (prune(dense), dense)]
    assert report.kept_energy == pytest.approx(squares[0] / squares[1], rel=1e-12)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0])
def test_special_values_survive(files, special):
    source, out = files
    dense = random_array((8, 32))
    dense[::2, ::8] = special
    dense_file(source, {"w": dense})
    [report] = compress_checkpoint(source, out)
    assert same_bits(load_weight(out, "w").decompress(), prune(dense))
    assert np.isnan(report.kept_energy) == (not np.isfinite(special))


def test_compressing_twice_gives_the_same_file(files):
    source, out = files
    dense_file(
        source, {"b": random_array((8, 64)), "a": random_array((3,)), "c": random_array((5, 8), "f16")}
    )
    compress_checkpoint(source, out)
    first = out.read_bytes()
    compress_checkpoint(source, out)
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    ("dense", "energy"),
    [
        (np.tile(np.array([1, 0, 2, 0], np.float32), (4, 4)), 1.0),
        (np.ones((4, 16), np.float32), 0.5),
        (np.tile(np.array([3, 1, 1, 1], np.float32), (4, 4)), 10 / 12),
        (np.zeros((4, 16), np.float32), 1.0),
    ],
    ids=["sparse already", "even", "uneven", "nothing to lose"],
)
def test_kept_energy(files, dense, energy):
    source, out = files
    dense_file(source, {"w": dense})
    [report] = compress_checkpoint(source, out)
    assert report.kept_energy == pytest.approx(energy)
    assert report.kept_energy <= 1.0


# What is compressed -------------------------------------------------------------------------------


def mixed_model() -> dict[str, np.ndarray]:
    return {
        "embed_tokens.weight": random_array((64, 16)),
        "wte.weight": random_array((64, 16)),
        "layer.0.weight": random_array((24, 16)),
        "layer.1.weight": random_array((24, 16), "bf16"),
        "lm_head.weight": random_array((64, 16)),
        "norm": random_array((16,)),
        "conv": random_array((4, 2, 2, 8)),
        "scale": random_array(()),
        "odd": random_array((4, 12)),
        "empty": random_array((0, 16)),
        "ids": np.arange(16, dtype=np.int64).reshape(2, 8),
        "double": np.zeros((8, 8)),
        "mask": np.zeros((8, 8), np.bool_),
        "int8": np.zeros((8, 8), np.int8),
    }


ALWAYS_COPIED = {
    "norm": "1-d",
    "conv": "4-d",
    "scale": "0-d",
    "odd": "K=12 is not a multiple of 8",
    "empty": "empty",
    "ids": "element i64",
    "double": "element f64",
    "mask": "element bool",
    "int8": "element i8",
}
LAYERS = {"layer.0.weight": None, "layer.1.weight": None, "lm_head.weight": None}
BY_DEFAULT = {
    "embed_tokens.weight": "excluded by pattern '*embed*' (the default)",
    "wte.weight": "excluded by pattern '*wte.*' (the default)",
}
NOT_INCLUDED = dict.fromkeys(LAYERS, "not included")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {**BY_DEFAULT, **LAYERS}),
        ((), ("lm_*",), {**BY_DEFAULT, **LAYERS, "lm_head.weight": "excluded by pattern 'lm_*'"}),
        (("layer.*",), (), {**BY_DEFAULT, **LAYERS, "lm_head.weight": "not included"}),
        (("embed*",), (), {**BY_DEFAULT, **NOT_INCLUDED, "embed_tokens.weight": None}),
        (("*",), (), dict.fromkeys((*BY_DEFAULT, *LAYERS))),
        (
            ("*.weight",),
            ("layer.[1-9].*", "*embed*"),
            {
                **LAYERS,
                "wte.weight": None,
                "embed_tokens.weight": "excluded by pattern '*embed*'",
                "layer.1.weight": "excluded by pattern 'layer.[1-9].*'",
            },
        ),
    ],
    ids=["default", "exclude", "include", "include an embedding", "include all", "exclude wins"],
)
def test_which_tensors_are_compressed(files, include, exclude, expected):
    source, out = files
    arrays = dense_file(source, mixed_model())
    seen: list[Any] = []
    reports = compress_checkpoint(source, out, include=include, exclude=exclude, on_tensor=seen.append)
    assert reports == seen
    assert {report.name: report.reason for report in reports} == {**ALWAYS_COPIED, **expected}
    stored, _ = library_load(out)
    for report in reports:
        dense = arrays[report.name]
        assert (report.shape, report.bytes_before) == (dense.shape, dense.nbytes)
        parts = (f"{report.name}.values24", f"{report.name}.meta24")
        if report.reason is None:
            assert report.action == "compressed"
            assert 0.5 < report.kept_energy < 1
            assert report.bytes_after == sum(stored.pop(part).nbytes for part in parts)
        else:
            assert (report.action, report.kept_energy) == ("copied", None)
            assert report.bytes_after == report.bytes_before
            assert same_bits(stored.pop(report.name), dense)
    assert stored == {}


@pytest.mark.parametrize("pattern", DEFAULT_EXCLUDE)
def test_the_default_exclusion_can_be_overridden(files, pattern):
    source, out = files
    name = f"model{pattern.replace('*', '.')}weight"
    dense_file(source, {name: random_array((8, 8))})
    assert compress_checkpoint(source, out)[0].action == "copied"
    assert compress_checkpoint(source, out, include=[name])[0].action == "compressed"


def test_a_type_that_nobody_knows_is_copied(files):
    source, out = files
    header = json.dumps({"new": {"dtype": "F3", "shape": [8, 8], "data_offsets": [0, 24]}}).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(24)))
    [report] = compress_checkpoint(source, out)
    assert (report.action, report.reason) == ("copied", "element f3")
    assert out.read_bytes().endswith(bytes(range(24)))


# Saving and loading -------------------------------------------------------------------------------


@pytest.mark.parametrize("element", [*ELEMENTS, "s8", "fp8_e4m3"])
def test_saved_weights_load_as_they_were(tmp_path, element):
    path = tmp_path / "w"
    weights = {
        f"layer.{i}": Sparse24Weight.prune_compress(random_array((8 * i, 24), element, i)) for i in range(3)
    }
    save_weights(path, weights)
    loaded = dict(iter_weights(path))
    assert list(loaded) == list(weights)
    for name, weight in weights.items():
        assert (loaded[name].m, loaded[name].k) == (weight.m, weight.k)
        assert loaded[name].element is weight.element
        assert same_bits(loaded[name].values, weight.values)
        assert same_bits(loaded[name].metadata, weight.metadata)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_gpu_writes_the_file_that_the_host_writes(files, tmp_path, element):
    """Several blocks of rows, the last one shorter, and values that don't order easily."""
    source, out = files
    array = random_array((1100, 1024), element)
    array[::7, ::3] = 0
    array[5, :8] = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1, -1]).astype(array.dtype)
    dense_file(source, {"a.weight": array, "a.bias": random_array((6,), element)})
    compress_checkpoint(source, out, device=0)
    there = out.read_bytes()
    compress_checkpoint(source, tmp_path / "host", device="host")
    assert (tmp_path / "host").read_bytes() == there
    compress_checkpoint(source, tmp_path / "auto")
    assert (tmp_path / "auto").read_bytes() == there


def test_a_device_that_is_not_here(files):
    source, out = files
    dense_file(source, {"a.weight": random_array((8, 16), "f32")})
    with pytest.raises(BackendUnavailableError):
        compress_checkpoint(source, out, device=99)
    with pytest.raises(InvalidProblemError, match="device"):
        compress_checkpoint(source, out, device="gpu")
    assert not out.exists()


@pytest.mark.gpu
def test_a_device_weight_is_saved_from_the_device(tmp_path):
    weight = Sparse24Weight.prune_compress(random_array((8, 16), "bf16"))
    save_weights(tmp_path / "w", {"w": weight.to(0)})
    assert same_bits(load_weight(tmp_path / "w", "w").decompress(), weight.decompress())


def test_save_takes_weights_only(tmp_path):
    with pytest.raises(InvalidProblemError, match="w: expected Sparse24Weight, got ndarray"):
        save_weights(tmp_path / "w", {"w": random_array((8, 8))})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def compressed(files) -> Path:
    source, out = files
    dense_file(source, {"w": random_array((4, 16)), "norm": random_array((4,))})
    compress_checkpoint(source, out)
    return out


@pytest.mark.parametrize("name", ["norm", "nothing", "w.values24"])
def test_only_compressed_tensors_load(compressed, name):
    with pytest.raises(InvalidProblemError, match=f"one of the 1 compressed tensors.*got '{name}'"):
        load_weight(compressed, name)


def describe(text: str, key: str = "sparse24.w") -> Any:
    return lambda arrays, metadata: metadata.update({key: text})


def corrupt_group(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    arrays["w.meta24"] = arrays["w.meta24"].copy()
    arrays["w.meta24"][2, 1] = 0x1404  # row 2, group 3: stray bit


BROKEN = {
    "no values": (drop("w.values24"), "w.values24 is missing"),
    "no metadata": (drop("w.meta24"), "w.meta24 is missing"),
    "values of another shape": (swap("w.values24", random_array((4, 4))), r"F32\[4, 8\], got F32\[4, 4\]"),
    "values of another type": (swap("w.values24", random_array((4, 8), "f16")), "F32.*got F16"),
    "metadata of another type": (swap("w.meta24", np.zeros((4, 2), np.int16)), "U16.*got I16"),
    "a bad group": (corrupt_group, r"expected bits 4-7 to be zero.*\(row 2, group 3\)"),
    "description isn't JSON": (describe("shape"), "expected a JSON shape and element, got 'shape'"),
    "description is a list": (describe("[1]"), "expected a JSON shape and element"),
    "one dimension": (describe('{"shape": [4], "element": "f32"}'), "expected a JSON shape and element"),
    "unknown element": (describe('{"shape": [4, 16], "element": "f33"}'), "expected a JSON shape"),
    "element that isn't stored": (describe('{"shape": [4, 16], "element": "u8"}'), "expected .M, K."),
    "K isn't a multiple of 8": (describe('{"shape": [4, 12], "element": "f32"}'), "a multiple of 8"),
    "negative shape": (describe('{"shape": [-4, 16], "element": "f32"}'), "expected .M, K."),
    "shape of text": (describe('{"shape": "ab", "element": "f32"}'), "expected .M, K."),
    "giant shape": (describe(f'{{"shape": [{2**62}, {2**62}], "element": "f32"}}'), "w.values24: expected"),
    "another version": (describe("2", "sparse24_format"), "sparse24_format = '1', got '2'"),
}


@pytest.mark.parametrize(("change", "complaint"), BROKEN.values(), ids=BROKEN)
def test_a_broken_layer_is_refused_by_name(compressed, change, complaint):
    rewrite(compressed, change)
    for attempt in (lambda: load_weight(compressed, "w"), lambda: dict(iter_weights(compressed))):
        with pytest.raises(FormatError, match=complaint) as caught:
            attempt()
        assert str(compressed) in str(caught.value)
    if change is corrupt_group:
        assert (caught.value.row, caught.value.group) == (2, 3)


@settings(quick, max_examples=100)
@given(data=st.data())
def test_a_damaged_header_gives_a_format_error_or_a_sound_weight(tmp_path, data):
    path = tmp_path / "w"
    if not path.exists():
        save_weights(path, {"w": Sparse24Weight.prune_compress(random_array((4, 16)))})
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(8, header_end - 1))
        content[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[],:')))
    damaged = tmp_path / "damaged"
    damaged.write_bytes(bytes(content))
    try:
        for _, weight in iter_weights(damaged):
            weight.validate()
    except FormatError:
        pass


def test_a_dense_file_holds_no_layers(files):
    source, _ = files
    dense_file(source, {"w": random_array((4, 16))})
    with pytest.raises(FormatError, match="expected metadata sparse24_format = '1', got None"):
        load_weight(source, "w")


# Refusals and failures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"include": ["typo*"]}, r"include: pattern 'typo\*' matches no tensor"),
        ({"exclude": ["typo"]}, "exclude: pattern 'typo' matches no tensor"),
        ({"include": "w"}, "include: expected a sequence of patterns, got 'w'"),
    ],
)
def test_patterns_that_cannot_be_meant(files, options, complaint):
    source, out = files
    dense_file(source, {"w": random_array((8, 8))})
    with pytest.raises(InvalidProblemError, match=complaint):
        compress_checkpoint(source, out, **options)
    assert not out.exists()


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_a_checkpoint_is_not_compressed_onto_itself(files, link):
    source, out = files
    dense_file(source, {"w": random_array((8, 8))})
    before = source.read_bytes()
    if link is not None:
        link(source, out)
    with pytest.raises(InvalidProblemError, match="destination: expected another path than the source"):
        compress_checkpoint(source, out if link else source)
    assert source.read_bytes() == before


def test_a_compressed_checkpoint_is_not_compressed_again(compressed):
    with pytest.raises(InvalidProblemError, match="compressed already"):
        compress_checkpoint(compressed, compressed.with_name("again"))


def test_a_name_that_is_taken(files):
    source, out = files
    dense_file(source, {"w": random_array((8, 8)), "w.meta24": random_array((3,))})
    with pytest.raises(InvalidProblemError, match=r"w\.meta24: expected names that occur once"):
        compress_checkpoint(source, out)


def test_missing_files_and_folders(files):
    source, out = files
    with pytest.raises(StorageError) as caught:
        compress_checkpoint(source, out)
    assert caught.value.filename == str(source)
    dense_file(source, {"w": random_array((8, 8))})
    with pytest.raises(StorageError) as caught:
        compress_checkpoint(source, source.parent / "no" / "folder")
    assert caught.value.filename.endswith("no/folder")


def test_a_run_that_is_interrupted_leaves_nothing(files):
    source, out = files
    dense_file(source, {"a": random_array((8, 8)), "b": random_array((8, 8))})
    out.write_bytes(b"precious")

    def interrupt(report: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(source, out, on_tensor=interrupt)
    assert sorted(source.parent.iterdir()) == sorted(files)
    assert out.read_bytes() == b"precious"


def run_python(code: str, *arguments: object) -> str:
    """Run a script in a fresh process; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_full_disk_leaves_no_half_file(files):
    source, out = files
    dense_file(source, {"w": random_array((256, 512))})
    out.write_bytes(b"precious")
    code = """
        import resource, signal, sys
        from sparse24_plans import StorageError
        from sparse24_plans.checkpoints.compress import compress_checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            compress_checkpoint(sys.argv[1], sys.argv[2])
        except StorageError as error:
            import errno
            print(errno.errorcode[error.errno], error.filename)
    """
    assert run_python(code, source, out) == f"EFBIG {out}"
    assert sorted(source.parent.iterdir()) == sorted(files)
    assert out.read_bytes() == b"precious"


def sparse_file(path: Path, count: int, nbytes: int) -> None:
    """A checkpoint of ``count`` bf16 tensors of zeros, which takes no room on the disk."""
    entries = {
        f"w{i}": {
            "dtype": "BF16",
            "shape": [nbytes // 8192, 4096],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i in range(count)
    }
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, path.stat().st_size + count * nbytes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_file(files):
    source, out = files
    tensor, count = 16 << 20, 8
    sparse_file(source, count, tensor)
    code = """
        import re, sys
        from sparse24_plans.checkpoints.compress import compress_checkpoint
        # Not ru_maxrss: that starts from what the parent process had.
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
        before = peak()
        compress_checkpoint(sys.argv[1], sys.argv[2], device="host")
        print(peak() - before)
    """
    grown = int(run_python(code, source, out)) << 10
    assert grown < 2 * tensor, f"of {count} tensors"


# A real model -------------------------------------------------------------------------------------


@needs_real
def test_a_real_checkpoint_is_compressed_and_verified(tmp_path):
    assert REAL is not None
    out = tmp_path / "out"
    reports = compress_checkpoint(REAL, out)
    dense, _ = library_load(REAL)
    stored, metadata = library_load(out)
    assert metadata.items() >= {"format": "pt", "sparse24_format": "1"}.items()
    assert {report.name for report in reports} == dense.keys()
    compressed = {report.name: report for report in reports if report.action == "compressed"}
    assert len(compressed) == 37  # 6 in each of 6 blocks, and the pooler
    for name, array in dense.items():
        if name in compressed:
            assert same_bits(load_weight(out, name).decompress(), prune(array))
            assert 0.8 < compressed[name].kept_energy < 0.95
        else:
            assert same_bits(stored[name], array)
    found = verify_checkpoint(out, REAL, tokens=2, device="host")
    assert found.passed
    assert len(found.layers) == 37
    assert all(0 < layer.worst_ratio <= 1 for layer in found.layers)
