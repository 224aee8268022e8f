"""Stacks [E, M, K] of matrices, such as experts, in checkpoints."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
    UnsupportedError,
    load_weight,
    prune,
)
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.verify import verify_checkpoint

from ..support import same_bits
from .models import convert, dense_file, library_load, random_array, rewrite

NOTE = "sparse24.experts"


@pytest.fixture
def compressed(files):
    """The dense file, the compressed one, and the stack."""
    source, out = files
    arrays = dense_file(
        source, {"experts": random_array((3, 24, 16), "bf16"), "w.weight": random_array((32, 32))}
    )
    compress_checkpoint(source, out, include=["*"])
    return source, out, arrays["experts"]


def test_an_included_stack_is_compressed_as_its_matrices_are(compressed):
    _, out, stack = compressed
    arrays, metadata = library_load(out)
    assert json.loads(metadata[NOTE]) == {"shape": [3, 24, 16], "element": "bf16"}
    for expert, matrix in enumerate(stack):
        wanted = Sparse24Weight.prune_compress(matrix)
        assert same_bits(arrays["experts.values24"][expert], wanted.values)
        assert same_bits(arrays["experts.meta24"][expert], wanted.metadata)
    whole = load_weight(out, "experts")
    assert (whole.m, whole.k) == (72, 16)


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama4", "llama4_text", "mixtral"])
def test_stacks_of_models_that_transpose_them_stay_dense(tmp_path, model_type):
    source = tmp_path / "model"
    source.mkdir()
    stack = dense_file(source / "model.safetensors", {"experts": random_array((3, 24, 16))})["experts"]
    (source / "config.json").write_text(json.dumps({"text_config": {"model_type": model_type}}))
    (report,) = compress_checkpoint(source, tmp_path / "out", include=["*"])
    if model_type == "mixtral":
        assert report.action == "compressed"
        return
    assert "[experts, in, out]" in report.reason
    arrays, _ = library_load(tmp_path / "out" / "model.safetensors")
    assert same_bits(arrays["experts"], stack)


def test_a_stack_is_verified_and_converted_back(compressed, tmp_path):
    source, out, stack = compressed
    found = verify_checkpoint(out, source, device="host")
    assert found.passed
    assert {one.name: one.shape for one in found.layers}["experts"] == (3, 24, 16)
    convert(out, tmp_path / "dense.safetensors", "sparse24", "dense")
    dense = library_load(tmp_path / "dense.safetensors")[0]["experts"]
    assert dense.shape == stack.shape
    assert same_bits(dense, np.stack([prune(matrix) for matrix in stack]))
    convert(
        tmp_path / "dense.safetensors", tmp_path / "again.safetensors", "dense", "sparse24", include=["*"]
    )
    again, ours = (library_load(path) for path in (tmp_path / "again.safetensors", out))
    assert again[1] == ours[1]
    assert all(same_bits(again[0][name], ours[0][name]) for name in ours[0])


def test_verification_finds_a_wrong_cell_of_a_stack(compressed):
    source, out, _ = compressed

    def change(arrays: dict[str, np.ndarray], _: Any) -> None:
        arrays["experts.values24"].view(np.uint16)[2, 5, 0] ^= 1

    rewrite(out, change)
    found = {one.name: one.problem for one in verify_checkpoint(out, source, device="host").layers}
    assert "row 53" in found["experts"]


@pytest.mark.parametrize("to_format", ["compressed_tensors", "torch_cutlass"])
def test_other_formats_have_no_stacks(compressed, tmp_path, to_format):
    with pytest.raises(UnsupportedError, match=r"experts: expected a matrix .* got a stack of them"):
        convert(compressed[1], tmp_path / "other.safetensors", "sparse24", to_format)


def test_a_stack_takes_values_with_scales_of_groups(files):
    source, out = files
    dense_file(source, {"experts": random_array((3, 24, 48), "bf16")})
    compress_checkpoint(source, out, include=["*"], weights="s4", group=32, device="host")
    tensors, _ = library_load(out)
    shapes = {name: tuple(one.shape) for name, one in tensors.items()}
    assert shapes == {
        "experts.values24": (3, 24, 12), "experts.meta24": (3, 24, 6), "experts.scales24": (3, 24, 2)
    }  # fmt: skip
    assert verify_checkpoint(out, source, device="host").passed


def test_a_stack_does_not_take_scales_of_rows(files):
    source, out = files
    dense_file(source, {"experts": random_array((3, 24, 16), "bf16")})
    with pytest.raises(
        InvalidProblemError, match="include: expected matrices to quantize, got a stack, experts"
    ):
        compress_checkpoint(source, out, include=["*"], element="s8")
    assert not out.exists()


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ([3, 24, 8], r"values24: expected BF16\[3, 24, 4\], got BF16\[3, 24, 8\]"),
        ([72, 16], r"values24: expected BF16\[72, 8\]"),
        ([0, 24, 16], r"expected \[M, K\], or \[E, M, K\]"),
        ([-3, -24, 16], r"expected \[M, K\]"),
        ([1, 3, 24, 16], r"expected \[M, K\], or \[E, M, K\]"),
        (["3", 24, 16], r"expected \[M, K\]"),
    ],
)
def test_notes_that_no_stack_has_are_refused(compressed, shape, complaint):
    rewrite(
        compressed[1],
        lambda _, metadata: metadata.update({NOTE: json.dumps({"shape": shape, "element": "bf16"})}),
    )
    with pytest.raises(FormatError, match=complaint):
        load_weight(compressed[1], "experts")


def test_a_transposed_stack_is_refused(compressed):
    note = {"shape": [3, 24, 16], "element": "bf16", "transposed": True}
    rewrite(compressed[1], lambda _, metadata: metadata.update({NOTE: json.dumps(note)}))
    with pytest.raises(FormatError, match=r"expected \[M, K\], or \[E, M, K\]"):
        load_weight(compressed[1], "experts")
