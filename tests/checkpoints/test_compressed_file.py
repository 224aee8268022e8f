"""A compressed file: the documented format, holding the pruned weights; the same bytes from every device."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    Sparse24Weight,
    prune,
)
from sparse24_plans.checkpoints.compress import compress_checkpoint
from sparse24_plans.checkpoints.verify import verify_checkpoint
from sparse24_plans.checkpoints.weights_file import iter_weights, load_weight

from ..support import same_bits
from .models import (
    ELEMENTS,
    REAL,
    dense_file,
    library_load,
    needs_real,
    random_array,
)

quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
def test_a_layer_is_restored_as_its_pruned_dense_tensor(tmp_path, m, groups, element, seed):
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


@pytest.mark.parametrize("element", ELEMENTS)
def test_numbers_that_are_none_give_no_warnings_of_numpy(files, element):
    """A signalling NaN, Inf, and numbers whose squares overflow."""
    source, out = files
    dense = np.full((8, 16), 3e4, np.float32).astype(ElementKind(element).dtype)
    dense[0, 1] = np.inf
    bits = dense.view(ElementKind(element).bits_dtype)
    bits[0, 0] = {"f32": 0x7F800001, "f16": 0x7C01, "bf16": 0x7F81}[element]
    dense_file(source, {"w": dense})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [report] = compress_checkpoint(source, out, device="host")
    assert math.isnan(report.kept_energy)
