"""Pruning by what a layer's inputs are: 2:4, better the more of the inputs is used, the same in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import Sparse24Weight
from sparse24_plans.weights.calibrated import METHODS, output_error, pruned_for, pruned_together

every_method = pytest.mark.parametrize("method", METHODS)


def problem(seed: int, m: int = 24, k: int = 128, n: int = 512, dtype: type = np.float32):
    """A weight [m, k] and correlated inputs [n, k], some of whose channels are far larger than others."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((n, k)) @ rng.standard_normal((k, k))
    x = mixed * np.exp(rng.standard_normal(k))
    return rng.standard_normal((m, k)).astype(dtype), x.astype(dtype)


@every_method
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    m=st.integers(1, 9),
    groups=st.integers(1, 70),
    n=st.integers(0, 40),
    dead=st.integers(0, 4),
)
def test_the_result_is_24_for_any_inputs(method, seed, m, groups, n, dead):
    weight, x = problem(seed, m, 4 * groups, n)
    x[:, :dead] = 0
    before = weight.copy()
    pruned = pruned_for(weight, x.T @ x, method)
    assert pruned.dtype == np.float32
    assert np.isfinite(pruned).all()
    assert (np.count_nonzero(pruned.reshape(m, -1, 4), axis=2) <= 2).all()
    assert np.array_equal(weight, before)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_more_of_the_inputs_gives_smaller_errors(seed):
    weight, x = problem(seed)
    moment = x.T @ x
    magnitude, wanda, sparsegpt = (
        output_error(weight, pruned_for(weight, moment, method), moment) for method in METHODS
    )
    assert sparsegpt < 0.9 * wanda < 0.9 * magnitude


def test_magnitude_is_the_packages_own():
    weight, x = problem(1)
    expected = Sparse24Weight.prune_compress(weight).decompress()
    assert np.array_equal(pruned_for(weight, x.T @ x, "magnitude"), expected)


def test_wanda_keeps_values_and_ranks_by_the_norms_of_channels():
    weight = np.float32([[4, 3, 2, 1]])
    x = np.diag(np.float32([1, 1, 4, 9]))
    assert pruned_for(weight, x.T @ x, "wanda").tolist() == [[0, 0, 2, 1]]


def test_sparsegpt_solves_for_the_kept_weights():
    """Each row's kept weights are near the least-squares solution on their channels."""
    weight, x = problem(5, m=4, k=32, dtype=np.float64)
    moment = x.T @ x
    pruned = pruned_for(weight, moment, "sparsegpt")
    best = np.zeros_like(weight)
    for row, target, result in zip(pruned, weight, best, strict=True):
        kept = np.flatnonzero(row)
        result[kept] = np.linalg.lstsq(x[:, kept], x @ target, rcond=None)[0]
    least = output_error(weight, best, moment)
    assert least <= output_error(weight, pruned, moment) < 1.1 * least


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_error_is_that_of_the_outputs(seed):
    weight, x = problem(seed, dtype=np.float64)
    other = weight + np.random.default_rng(seed).standard_normal(weight.shape)
    expected = np.linalg.norm(x @ (weight - other).T) / np.linalg.norm(x @ weight.T)
    assert output_error(weight, other, x.T @ x) == pytest.approx(expected, rel=1e-9)


def test_outputs_of_zero_have_no_error():
    weight, x = problem(2)
    assert output_error(weight, 0 * weight, 0 * x.T @ x) == 0


def test_inputs_that_are_always_zero_leave_the_magnitudes_to_decide():
    weight, x = problem(3)
    moment = 0 * (x.T @ x)
    assert np.array_equal(pruned_for(weight, moment, "sparsegpt"), pruned_for(weight, moment, "magnitude"))


@every_method
def test_weights_with_the_same_inputs_are_pruned_as_one(method):
    weight, x = problem(4)
    first, second = pruned_together([weight[:10], weight[10:]], x.T @ x, method)
    assert np.array_equal(np.concatenate([first, second]), pruned_for(weight, x.T @ x, method))


@every_method
@pytest.mark.parametrize(("dtype", "close"), [(np.float64, 1e-9), (np.float32, 2e-3)])
def test_pytorch_and_numpy_agree(method, dtype, close):
    torch = pytest.importorskip("torch")
    weight, x = problem(6, m=64, k=256, n=1024, dtype=dtype)
    moment = x.T @ x
    ours = pruned_for(weight, moment, method)
    theirs = pruned_for(torch.from_numpy(weight), torch.from_numpy(moment), method)
    assert isinstance(theirs, torch.Tensor)
    if dtype is np.float64:
        assert np.array_equal(theirs.numpy() != 0, ours != 0)
        np.testing.assert_allclose(theirs.numpy(), ours, atol=close)
    assert output_error(weight, theirs.numpy(), moment) == pytest.approx(
        output_error(weight, ours, moment), rel=close
    )
