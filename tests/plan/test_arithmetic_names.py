"""Names of arithmetics: what there is, and what is no name."""

from __future__ import annotations

import pytest

from sparse24_plans import ElementKind, InvalidProblemError
from sparse24_plans.plan.arithmetic import Arithmetic

NAMES = [
    "fma32_in_order",
    "exact_sum",
    *(f"{kind}/slices={s}" for kind in ("hopper_tc", "hopper_tc_fp8") for s in range(1, 9)),
    "hopper_tc_fp8/promoted=128",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reads_back_as_itself(name):
    assert str(Arithmetic.of(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "fma32", "hopper_tc", "hopper_tc/slices=0", "hopper_tc/slices=9", "hopper_tc/slices=04"),
        *("hopper_tc/promoted=128", "hopper_tc_fp8/promoted=64", "exact_sum/slices=1"),
        *(3, None, b"exact_sum"),
    ],
)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(InvalidProblemError, match=r"arithmetic: expected one of fma32_in_order, .*, got"):
        Arithmetic.of(name)


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("fma32_in_order", "f32 f16 bf16 fp8_e4m3 fp8_e5m2"),
        ("exact_sum", "s8"),
        ("hopper_tc/slices=2", "f16 bf16"),
        ("hopper_tc_fp8/slices=2", "fp8_e4m3 fp8_e5m2"),
        ("hopper_tc_fp8/promoted=128", "fp8_e4m3 fp8_e5m2"),
    ],
)
def test_the_elements_that_each_is_defined_for(name, elements):
    arithmetic = Arithmetic.of(name)
    assert {str(one) for one in ElementKind if arithmetic.takes(one)} == set(elements.split())


def test_what_kernels_are_named_by_their_slices():
    assert str(Arithmetic.hopper(ElementKind.BF16, 4)) == "hopper_tc/slices=4"
    assert str(Arithmetic.hopper(ElementKind.FP8_E4M3, 1)) == "hopper_tc_fp8/slices=1"
    assert str(Arithmetic.promoted()) == "hopper_tc_fp8/promoted=128"
