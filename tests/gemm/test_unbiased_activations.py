"""An activation without a bias has the same kernels and the same bits as with a bias of zeros."""

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import EpilogueKind, GemmSparse24Descriptor

from ..support import Case, Data, case_of, device_of_row, plan_of_row, random_data, same_bits
from .kernel_entries import OWN, marked, row_of

UNBIASED = [kind for kind in EpilogueKind if not kind.has_bias and kind != "identity"]
SERVED = [marked(row, kind) for row in OWN for kind in UNBIASED if kind in row_of(row).epilogues]


def biased(kind: EpilogueKind) -> EpilogueKind:
    return EpilogueKind(f"bias_{kind}")


def case(row: str, data: Data, **problem) -> Case:
    plan = plan_of_row(row).select(GemmSparse24Descriptor(**problem), device=device_of_row(row))
    assert plan.explain().chosen == row
    return case_of(plan, data)


def test_every_activation_exists_with_a_bias_and_without():
    assert {*map(biased, UNBIASED), "bias"} == {kind for kind in EpilogueKind if kind.has_bias}


@pytest.mark.parametrize("row", OWN)
def test_a_kernel_serves_both_or_neither(row):
    served = row_of(row).epilogues
    assert all((kind in served) == (biased(kind) in served) for kind in UNBIASED)


@pytest.mark.parametrize(("row", "kind"), SERVED)
def test_the_bits_are_those_of_a_zero_bias(row, kind):
    """The first token is zero and alpha negative, so that -0 is activated."""
    at = UNBIASED.index(kind)
    rng, elements = np.random.default_rng([OWN.index(row), at]), row_of(row).elements
    sizes = {
        "n": int(rng.integers(1, 9)),
        "m": 16 * int(rng.integers(1, 40)),
        "k": 16 * int(rng.integers(1, 60)),
    }
    element = elements[at % len(elements)]
    problem = {**sizes, "element": element, "out_element": "f32", "bias_element": "f32", "alpha": -0.75}
    data = random_data(rng, GemmSparse24Descriptor(**problem, epilogue=kind))
    assert data.bias is None
    data.x[0] = 0
    without = case(row, data, **problem, epilogue=kind)
    found = without.run()
    without.check(found)
    zeros = replace(data, bias=np.zeros(sizes["m"], np.float32))
    with_zeros = case(row, zeros, **problem, epilogue=biased(kind))
    assert same_bits(found, with_zeros.run()) or not without.plan.guarantee.deterministic
    assert not np.signbit(found[0]).any()
