"""Folders of shards compressed and verified: the same shards, index and other files; or nothing."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sparse24_plans import FormatError, InvalidProblemError, Sparse24Weight, StorageError, prune
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.verify import verify_checkpoint
from sparse24_plans.checkpoints.weights_file import iter_weights, load_weight

from ..support import same_bits
from .models import (
    INDEX,
    contents,
    convert,
    drop,
    library_load,
    random_array,
    rewrite,
    run_python,
    snapshot,
    swap,
)

SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
LAYERS = ("layer.0.weight", "layer.1.weight", "layer.2.weight")
CONFIG = '{"hidden_size":   16}\n'


@pytest.fixture
def model(tmp_path) -> Path:
    """Three shards, of which the last holds nothing to compress."""
    folder = tmp_path / "model"
    folder.mkdir()
    shards = {
        SHARDS[0]: {"embed.weight": random_array((32, 16)), "layer.0.weight": random_array((24, 16), "bf16")},
        SHARDS[1]: {"layer.1.weight": random_array((24, 16), seed=1), "norm": random_array((24,))},
        SHARDS[2]: {"ids": np.arange(5), "layer.2.bias": random_array((8,))},
    }
    shards[SHARDS[1]]["layer.2.weight"] = random_array((8, 16), "f16")
    for file, arrays in shards.items():
        safetensors.numpy.save_file(arrays, folder / file, {"format": "pt"})
    weight_map = {name: file for file, arrays in shards.items() for name in arrays}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text(CONFIG)
    (folder / "tokenizer.json").write_bytes(b"\x00\xff tokens")
    (folder / "README").mkdir()
    return folder


@pytest.mark.parametrize("by_index", [False, True])
def test_a_folder_is_compressed_shard_by_shard(model, tmp_path, by_index):
    dense, out, seen = contents(model), tmp_path / "out", []
    reports = compress_checkpoint(model / INDEX if by_index else model, out, on_tensor=seen.append)
    assert reports == seen
    assert {report.name: report.action for report in reports} == {
        name: "compressed" if name in LAYERS else "copied" for name in dense
    }
    assert {path.name for path in out.iterdir()} == {*SHARDS, INDEX, "config.json", "tokenizer.json"}
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    entry = {"quantization_config": {"quant_method": "sparse24"}}
    assert json.loads((out / "config.json").read_text()) == {**json.loads(CONFIG), **entry}
    stored, index = contents(out), json.loads((out / INDEX).read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    homes = json.loads((model / INDEX).read_text())["weight_map"]
    for name, file in index["weight_map"].items():
        assert file == homes[name.removesuffix(".values24").removesuffix(".meta24")]
        assert name in library_load(out / file)[0]
    for file in SHARDS:
        assert library_load(out / file)[1]["sparse24_format"] == "1"
        assert library_load(out / file)[1]["format"] == "pt"
    for name, array in dense.items():
        if name in LAYERS:
            expected = Sparse24Weight.prune_compress(array)
            assert same_bits(stored[f"{name}.values24"], expected.values)
            assert same_bits(stored[f"{name}.meta24"], expected.metadata)
        else:
            assert same_bits(stored[name], array)
    assert not list(tmp_path.glob(".*"))


def test_each_shard_is_the_file_that_it_would_be_alone(model, tmp_path):
    compress_checkpoint(model, tmp_path / "out")
    for file in SHARDS:
        compress_checkpoint(model / file, tmp_path / "alone")
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "alone").read_bytes()


def test_weights_load_from_the_folder(model, tmp_path):
    dense, out = contents(model), tmp_path / "out"
    compress_checkpoint(model, out)
    for path in (out, out / INDEX):
        weights = dict(iter_weights(path))
        assert weights.keys() == set(LAYERS)
        for name, weight in weights.items():
            assert same_bits(weight.decompress(), prune(dense[name]))
            assert same_bits(load_weight(path, name).decompress(), prune(dense[name]))


def test_conversion_reads_the_folder(model, tmp_path):
    dense = contents(model)
    compress_checkpoint(model, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", "sparse24", "dense")
    for name, array in contents(tmp_path / "back").items():
        assert same_bits(array, prune(dense[name]) if name in LAYERS else dense[name])


def test_patterns_are_those_of_the_whole_model(model, tmp_path):
    reports = compress_checkpoint(model, tmp_path / "out", include=["layer.1.*"], exclude=["norm"])
    assert [report.name for report in reports if report.action == "compressed"] == ["layer.1.weight"]
    with pytest.raises(InvalidProblemError, match="pattern 'typo' matches no tensor"):
        compress_checkpoint(model, tmp_path / "out2", include=["typo"])


def test_small_subfolders_are_copied_and_the_rest_is_named(model, tmp_path):
    (model / "1_Pooling" / "deep").mkdir(parents=True)
    (model / "1_Pooling" / "config.json").write_text("{}")
    (model / "1_Pooling" / "deep" / "words.txt").write_bytes(b"\x00\xff")
    for folder in ("2_Dense", ".git", "original", "linked"):
        (model / folder).mkdir()
    (model / "2_Dense" / "model.safetensors").write_bytes(b"")
    (model / ".git" / "HEAD").write_text("main")
    with open(model / "original" / "consolidated.pth", "wb") as large:
        large.truncate((16 << 20) + 1)
    (model / "linked" / "again").symlink_to(model)
    (model / "adapter.safetensors").write_bytes(b"")
    (model / "other.safetensors.index.json").write_text("{}")
    left = ".git, 2_Dense, adapter.safetensors, linked, original, other.safetensors.index.json"
    out = tmp_path / "out"
    with pytest.warns(UserWarning, match=f"{re.escape(str(model))}: not copied: {re.escape(left)};"):
        compress_checkpoint(model / INDEX, out)
    copied = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    files = {"1_Pooling/config.json", "1_Pooling/deep/words.txt", "config.json", "tokenizer.json"}
    assert copied == {*SHARDS, INDEX, *files}
    assert (out / "1_Pooling" / "deep" / "words.txt").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("stop_at", [0, 3, 6])
def test_an_interrupted_run_leaves_nothing(model, tmp_path, stop_at):
    before, seen = snapshot(tmp_path), []

    def interrupt(report: object) -> None:
        seen.append(report)
        if len(seen) > stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(model, tmp_path / "out", on_tensor=interrupt)
    assert len(seen) == stop_at + 1
    assert snapshot(tmp_path) == before
    assert list(tmp_path.iterdir()) == [model]


def test_a_full_disk_is_an_error_of_the_final_path(model, tmp_path):
    """Be it while a shard is written or while another file is copied: the temporary folder isn't named."""
    code = """
        import resource, signal, sys
        from sparse24_plans import StorageError
        from sparse24_plans.checkpoints.compress import compress_checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            compress_checkpoint(sys.argv[1], sys.argv[2], device="host")
        except StorageError as error:
            print(error.filename)
    """
    out = tmp_path / "out"
    (model / "tokenizer.json").write_bytes(bytes(200_000))
    assert run_python(code, model, out) == str(out / "tokenizer.json")
    rewrite(model / SHARDS[2], swap("ids", np.arange(50_000)))
    assert run_python(code, model, out) == str(out / SHARDS[2])
    assert list(tmp_path.iterdir()) == [model]


def test_the_destination_is_new_or_empty(model, tmp_path):
    for out, complaint in ((model, "another path than the source"), (tmp_path, "a new or an empty folder")):
        with pytest.raises(InvalidProblemError, match=f"destination: expected {complaint}"):
            compress_checkpoint(model, out)
    (tmp_path / "empty").mkdir()
    compress_checkpoint(model, tmp_path / "empty")
    assert (tmp_path / "empty" / INDEX).exists()
    with pytest.raises(StorageError):
        compress_checkpoint(model, tmp_path / "no" / "folder")


def test_a_folder_is_not_compressed_twice(model, tmp_path):
    compress_checkpoint(model, tmp_path / "out")
    with pytest.raises(InvalidProblemError, match="compressed already"):
        compress_checkpoint(tmp_path / "out", tmp_path / "again")


def test_a_name_that_another_shard_takes(model, tmp_path):
    rewrite(model / SHARDS[2], swap("layer.0.weight.meta24", np.zeros(3)))
    with pytest.raises(InvalidProblemError, match=r"layer\.0\.weight\.meta24: expected names that occur"):
        compress_checkpoint(model, tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_folder(tmp_path):
    """Eight shards of a tensor of zeros each, which take no room on the disk."""
    nbytes, count = 16 << 20, 8
    (tmp_path / "model").mkdir()
    weight_map = {f"w{i}": f"{i}.safetensors" for i in range(count)}
    for name, file in weight_map.items():
        entry = {"dtype": "F32", "shape": [nbytes // 16384, 4096], "data_offsets": [0, nbytes]}
        header = json.dumps({name: entry}).encode()
        (tmp_path / "model" / file).write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(tmp_path / "model" / file, 8 + len(header) + nbytes)
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    code = """
        import re, sys, numpy
        from sparse24_plans import Sparse24Weight
        from sparse24_plans.checkpoints.compress import compress_checkpoint
        Sparse24Weight.prune_compress(numpy.zeros((256, 4096), "f4"))  # where numba is, its compiler's memory
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
        before = peak()
        compress_checkpoint(sys.argv[1], sys.argv[2], device="host")
        print(peak() - before)
    """
    grown = int(run_python(code, tmp_path / "model", tmp_path / "out")) << 10
    assert {path.name for path in (tmp_path / "out").iterdir()} == {INDEX, *weight_map.values()}
    assert grown < 2 * nbytes, f"of {count} shards"


# Verification -------------------------------------------------------------------------------------


@pytest.fixture
def pair(model, tmp_path) -> tuple[Path, Path]:
    """The folder of dense shards and that of compressed ones."""
    compress_checkpoint(model, tmp_path / "out")
    return model, tmp_path / "out"


def test_a_sound_folder_verifies(pair):
    dense, out = pair
    for ours, theirs in ((out, dense), (out / INDEX, dense / INDEX)):
        found = verify_checkpoint(ours, theirs, device="host")
        assert found.passed
        assert {layer.name for layer in found.layers} == set(LAYERS)
        assert all(0 <= layer.worst_ratio <= 1 for layer in found.layers)
        assert (found.copied, found.problems) == (4, ())


def test_shards_needn_t_be_cut_alike(pair, tmp_path):
    dense, out = pair
    whole = tmp_path / "whole.safetensors"
    safetensors.numpy.save_file(contents(dense), whole)
    found = verify_checkpoint(out, whole, device="host")
    assert found.passed
    assert len(found.layers) == 3
    compress_checkpoint(whole, tmp_path / "whole24.safetensors")
    assert verify_checkpoint(tmp_path / "whole24.safetensors", dense, device="host").passed


def test_a_change_in_any_shard_is_found(pair):
    dense, out = pair
    rewrite(out / SHARDS[1], swap("norm", np.ones(24, np.float32)))
    rewrite(dense / SHARDS[0], swap("layer.0.weight", random_array((24, 16), "bf16", seed=9)))
    found = verify_checkpoint(out, dense, device="host")
    assert found.problems == ("norm: differs from the dense checkpoint",)
    [bad] = [layer for layer in found.layers if not layer.passed]
    assert (bad.name, bad.worst_ratio) == ("layer.0.weight", None)
    assert re.match("differs from the pruned dense tensor at row 0", bad.problem)


def test_a_shard_that_is_not_compressed_is_refused(pair):
    dense, out = pair
    rewrite(out / SHARDS[2], lambda arrays, metadata: metadata.pop("sparse24_format"))
    with pytest.raises(
        FormatError,
        match=rf"{SHARDS[2]}: expected a compressed model, with .* sparse24_format = '1', got None",
    ):
        verify_checkpoint(out, dense, device="host")


def test_shards_may_repeat_a_note_but_not_contradict_it(pair):
    """transformers writes the same metadata into each shard."""
    dense, out = pair
    note = library_load(out / SHARDS[0])[1]["sparse24.layer.0.weight"]
    rewrite(out / SHARDS[1], lambda arrays, metadata: metadata.update({"sparse24.layer.0.weight": note}))
    assert verify_checkpoint(out, dense, device="host").passed
    rewrite(out / SHARDS[1], lambda arrays, metadata: metadata.update({"sparse24.layer.0.weight": "{}"}))
    with pytest.raises(FormatError, match=f"'layer.0.weight': expected one note, got another in {SHARDS[0]}"):
        verify_checkpoint(out, dense, device="host")


def test_a_layer_may_lie_in_two_shards(pair, tmp_path):
    dense, out = pair
    name = "layer.0.weight.meta24"
    meta = library_load(out / SHARDS[0])[0][name]
    rewrite(out / SHARDS[0], drop(name))
    rewrite(out / SHARDS[2], swap(name, meta))
    index = json.loads((out / INDEX).read_text())
    index["weight_map"][name] = SHARDS[2]
    (out / INDEX).write_text(json.dumps(index))
    assert verify_checkpoint(out, dense, device="host").passed
    convert(out, tmp_path / "back", "sparse24", "dense")
    pruned = prune(contents(dense)["layer.0.weight"])
    assert same_bits(library_load(tmp_path / "back" / SHARDS[0])[0]["layer.0.weight"], pruned)
