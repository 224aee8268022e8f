"""Tables that differ from a kernel's index functions fail to compile."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans.errors import DriverError

from .index_functions import Table, check_tables

HEADER = "ptx/wgmma.cuh"
DESCRIPTOR = "matrix_descriptor_n_major<128, 8192>(16 * i0) >> 32"
"""The stride of a matrix descriptor, in units of 16 bytes, below the number of its swizzle."""
RIGHT = np.full(5, 1 << 30 | 8 * 128 >> 4)


def test_right_values_compile():
    check_tables(HEADER, {}, Table(DESCRIPTOR, RIGHT))


@pytest.mark.parametrize("place", [0, 4])
def test_one_wrong_value_fails_the_compilation(place):
    wrong = RIGHT + (np.arange(len(RIGHT)) == place)
    with pytest.raises(DriverError, match=r"static assertion failed with .*matrix_descriptor_n_major"):
        check_tables(HEADER, {}, Table(DESCRIPTOR, RIGHT), Table(DESCRIPTOR, wrong))


def test_a_function_that_needs_the_device_fails_the_compilation():
    with pytest.raises(DriverError, match="threadIdx"):
        check_tables(HEADER, {}, Table("threadIdx.x + i0", np.zeros(1)))
