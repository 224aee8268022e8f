"""Pre-passes that pad or transpose operands: every byte of a copy, whatever the sizes and the padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import ElementKind
from sparse24_plans.device.devices import cuda_properties
from sparse24_plans.device.pad_rows import SOURCE, PadRows, padded
from sparse24_plans.device.transpose import Matrices, Transpose

from ..kernels.index_functions import Table, check_tables
from ..support import Guarded, same_bits

gpu = pytest.mark.gpu
by_size = pytest.mark.parametrize("element", [ElementKind.S8, ElementKind.F16], ids=["1 byte", "2 bytes"])
SIZES = st.integers(1, 300)


@by_size
def test_a_vector_keeps_the_bytes_of_its_row(element):
    """Vectors that begin behind the row's end keep none."""
    size, most = element.itemsize, 40
    columns, vectors = np.indices((most, 6))
    inside = np.clip(columns * size - 16 * vectors, 0, 16)
    check_tables(SOURCE, {"BYTES": size}, Table(f"bytes_inside(i0, {16 // size} * i1)", inside))


def copied(launch_to, source: np.ndarray, shape: tuple[int, ...], element: ElementKind) -> np.ndarray:
    """The result of a launch that writes to a poisoned matrix of a shape."""
    import cupy

    given, out = (Guarded(one, element, 0) for one in (source.shape, shape))
    given.fill(source)
    launch_to(given.view.address, out.view.address)(0)
    cupy.cuda.Device(0).synchronize()
    return out.numpy()


def numbers(rng: np.random.Generator, shape: tuple[int, ...], element: ElementKind) -> np.ndarray:
    """Any bits but those of the poison."""
    return rng.integers(1, 100, shape, np.uint8).astype(element.dtype)


@gpu
@by_size
@given(rows=SIZES, columns=SIZES, more=st.integers(0, 12), seed=st.integers(0, 99))
def test_padded_rows_end_with_zeros(element, rows, columns, more, seed):
    """``more`` is how many vectors of 16 bytes a row has beyond those that it needs."""
    width = padded(columns, element.itemsize) + more * 16 // element.itemsize
    matrix = numbers(np.random.default_rng(seed), (rows, columns), element)
    pad = PadRows(element.itemsize, cuda_properties(0))
    got = copied(lambda *at: pad.bind(rows, columns, width, *at), matrix, (rows, width), element)
    assert same_bits(got, np.pad(matrix, ((0, 0), (0, width - columns))))


@gpu
@by_size
@given(batch=st.integers(1, 3), rows=SIZES, columns=SIZES, seed=st.integers(0, 99))
def test_matrices_are_transposed(element, batch, rows, columns, seed):
    matrices = numbers(np.random.default_rng(seed), (batch * rows, columns), element)
    transpose = Transpose(element.itemsize, cuda_properties(0))
    sizes = Matrices(rows, columns, element.itemsize, batch)
    got = copied(lambda *at: transpose.bind(sizes, *at), matrices, (batch * columns, rows), element)
    expected = matrices.reshape(batch, rows, columns).swapaxes(1, 2)
    assert same_bits(got, expected.reshape(got.shape))
