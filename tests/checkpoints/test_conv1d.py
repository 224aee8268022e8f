"""Matrices that a model holds as [in, out], like transformers' Conv1D: found, and pruned along the inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import FormatError, Sparse24Weight, UnsupportedError, load_weight
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.verify import verify_checkpoint

from ..support import same_bits
from .models import contents, convert, dense_file, library_load, random_array

IN_OUT = "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_proj"


def gpt(inner: int = 64) -> dict[str, np.ndarray]:
    """A block of GPT-2, width 16: [in, out] weights, one of them square, and an ordinary square matrix."""
    sizes = {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "mlp.c_proj": (inner, 16)}
    arrays = {"other.weight": random_array((16, 16), seed=9), "other.bias": random_array((16,))}
    for seed, (name, shape) in enumerate(sizes.items()):
        arrays[f"h.0.{name}.weight"] = random_array(shape, seed=seed)
        arrays[f"h.0.{name}.bias"] = random_array(shape[1:], seed=seed)
    return arrays


def gpt_folder(folder: Path, arrays: dict[str, np.ndarray], model_type: str = "gpt2") -> Path:
    folder.mkdir()
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def check_pruned_along_inputs(out: Path, arrays: dict[str, np.ndarray]) -> None:
    for name in IN_OUT:
        expected = Sparse24Weight.prune_compress(np.ascontiguousarray(arrays[f"{name}.weight"].T))
        assert same_bits(load_weight(out, f"{name}.weight").values, expected.values), name
        assert same_bits(load_weight(out, f"{name}.weight").metadata, expected.metadata), name
    plain = Sparse24Weight.prune_compress(arrays["other.weight"])
    assert same_bits(load_weight(out, "other.weight").values, plain.values)


def test_biases_tell_also_about_square_matrices_of_the_same_name(files):
    source, out = files
    arrays = dense_file(source, gpt())
    reports = {one.name: one for one in compress_checkpoint(source, out)}
    assert reports["h.0.attn.c_attn.weight"].shape == (16, 48)
    check_pruned_along_inputs(out, arrays)
    assert verify_checkpoint(out, source, device="host").passed


def test_config_json_tells_if_every_matrix_of_name_is_square(tmp_path):
    arrays = gpt(inner=16)
    out, guess = tmp_path / "out", tmp_path / "llama out"
    compress_checkpoint(gpt_folder(tmp_path / "gpt2", arrays), out)
    check_pruned_along_inputs(out, arrays)
    compress_checkpoint(gpt_folder(tmp_path / "llama", arrays, "llama"), guess)
    plain = Sparse24Weight.prune_compress(arrays["h.0.attn.c_proj.weight"])
    assert same_bits(load_weight(guess, "h.0.attn.c_proj.weight").values, plain.values)


def test_a_model_inside_another_tells_too(tmp_path):
    arrays, out = gpt(inner=16), tmp_path / "out"
    folder = gpt_folder(tmp_path / "model", arrays)
    inner = {"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}}
    (folder / "config.json").write_text(json.dumps(inner))
    compress_checkpoint(folder, out)
    check_pruned_along_inputs(out, arrays)


def test_a_bias_outweighs_config_json(tmp_path):
    """GPT-BigCode has nn.Linear layers of GPT-2's names."""
    arrays = {"h.0.c_attn.weight": random_array((48, 16)), "h.0.c_attn.bias": random_array((48,))}
    compress_checkpoint(gpt_folder(tmp_path / "model", arrays), tmp_path / "out")
    expected = Sparse24Weight.prune_compress(arrays["h.0.c_attn.weight"])
    assert same_bits(load_weight(tmp_path / "out", "h.0.c_attn.weight").values, expected.values)


def test_what_nobody_can_tell_stays_dense(files):
    source, out = files
    both = {"a.proj": (16, 48), "b.proj": (48, 16), "c.proj": (16, 16)}
    arrays = {f"{name}.weight": random_array(shape) for name, shape in both.items()}
    arrays |= {f"{name}.bias": random_array((size,)) for name, size in zip(both, (48, 48, 16), strict=True)}
    dense_file(source, arrays)
    reports = {one.name: one.reason for one in compress_checkpoint(source, out)}
    assert (
        reports["c.proj.weight"] == "stored [in, out] or [out, in]: neither its bias nor a config.json tells"
    )
    assert reports["a.proj.weight"] is reports["b.proj.weight"] is None


def test_it_is_the_inputs_that_come_in_eights(files):
    source, out = files
    sizes = {"narrow": (12, 24), "wide": (24, 12)}
    arrays = {f"{name}.weight": random_array(shape) for name, shape in sizes.items()}
    dense_file(source, arrays | {f"{name}.bias": random_array(shape[1:]) for name, shape in sizes.items()})
    reports = {one.name: one.reason for one in compress_checkpoint(source, out)}
    assert reports["narrow.weight"] == "K=12 is not a multiple of 8"
    assert reports["wide.weight"] is None


def test_converting_back_gives_the_models_own_shape(tmp_path):
    arrays = gpt()
    source = gpt_folder(tmp_path / "model", arrays)
    compress_checkpoint(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "dense", "sparse24", "dense")
    dense = contents(tmp_path / "dense")
    for name in IN_OUT:
        pruned = Sparse24Weight.prune_compress(np.ascontiguousarray(arrays[f"{name}.weight"].T)).decompress()
        assert same_bits(dense[f"{name}.weight"], np.ascontiguousarray(pruned.T))
    convert(tmp_path / "dense", tmp_path / "again", "dense", "sparse24")
    ours, again = contents(tmp_path / "ours"), contents(tmp_path / "again")
    assert ours.keys() == again.keys()
    assert all(same_bits(ours[name], again[name]) for name in ours)


def test_formats_without_a_word_for_it_are_refused(tmp_path):
    compress_checkpoint(gpt_folder(tmp_path / "model", gpt()), tmp_path / "ours")
    with pytest.raises(UnsupportedError, match=r"c_\w+\.weight: .*\[in, out\].*compressed_tensors"):
        convert(tmp_path / "ours", tmp_path / "theirs", "sparse24", "compressed_tensors")
    assert not (tmp_path / "theirs").exists()


def test_a_note_that_is_neither_true_nor_false_is_refused(files):
    source, out = files
    dense_file(source, gpt())
    compress_checkpoint(source, out)
    arrays, metadata = library_load(out)
    name = "sparse24.h.0.attn.c_attn.weight"
    note = json.loads(metadata[name])
    assert note["transposed"] is True
    metadata[name] = json.dumps({**note, "transposed": 1})
    safetensors.numpy.save_file(arrays, out, metadata)
    with pytest.raises(FormatError, match="transposed: expected true or false, got 1"):
        load_weight(out, "h.0.attn.c_attn.weight")


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), outputs=st.booleans(), seed=st.integers(0, 99))
def test_the_bias_tells_along_which_side_a_matrix_is_pruned(tmp_path_factory, rows, columns, outputs, seed):
    folder = tmp_path_factory.mktemp("model")
    shape = (8 * rows, 8 * columns)
    dense = random_array(shape, seed=seed)
    bias = random_array((shape[0 if outputs else 1],))
    dense_file(folder / "in", {"w.weight": dense, "w.bias": bias})
    compress_checkpoint(folder / "in", folder / "out", device="host")
    along = dense if outputs or rows == columns else np.ascontiguousarray(dense.T)
    assert same_bits(
        load_weight(folder / "out", "w.weight").values, Sparse24Weight.prune_compress(along).values
    )
