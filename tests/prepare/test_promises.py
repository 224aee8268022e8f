"""Every kernel of the family promises bits that depend on the weight alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from sparse24_plans import (
    ElementKind,
    MaskSparse24Descriptor,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    TilePruneSparse24Descriptor,
    TileRule,
)
from sparse24_plans.plan.operands import Role

from ..plan.cases import PREPARE, PlanCase, case_of, equal, matrix, name_of, parts_of, random_inputs, select
from .prepare_cases import ELEMENTS, MOODS, run

every_descriptor = pytest.mark.parametrize("desc", PREPARE, ids=name_of)
FLAGS = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "bit_stable_across_hardware")


@every_descriptor
def test_what_is_promised(desc, device):
    """The tests below, and test_prepare_gpu.py across hardware, are about these."""
    promised = select(desc, device).guarantee
    assert all(getattr(promised, flag) for flag in FLAGS)
    assert promised.subnormals == "preserved"
    if "quantize" in desc.op:  # a scale and a quotient, or a product and its element, are rounded
        assert promised.nonfinite == "propagates"
        assert 2 * 2.0**-24 < promised.error_bound(desc.reduction) < 2.001 * 2.0**-24
        return
    assert promised.nonfinite == "skips_pruned"
    assert [promised.error_bound(k) for k in (8, 4096, 2**20)] == [0, 0, 0]


@pytest.mark.parametrize("mood", MOODS)
@every_descriptor
def test_deterministic_whatever_lay_there_before(desc, mood, device):
    """Any bits among the inputs; results over poison, over zeros, and over themselves."""
    rng = np.random.default_rng(1)
    inputs = random_inputs(desc)
    for operand in desc.operands():
        for part in parts_of(operand):
            if operand.role is not Role.OUT and part.name not in ("metadata", "packed"):
                inputs[part.name] = matrix(rng, part.shape, part.element, mood)
    case = PlanCase(select(desc, device), inputs)
    first = case.run()
    first = {name: bits.copy() for name, bits in first.items()}
    assert equal(case.run(), first)
    for name in case.written:
        case.guarded[name].view.bits()[...] = 0
    assert equal(case.run(), first)
    case.poison()
    assert equal(case.run(), first)


def digest_of(index: int, device: int | str) -> str:
    found = case_of(PREPARE[index], device).run()
    return hashlib.sha256(b"".join(found[name].tobytes() for name in sorted(found))).hexdigest()


IN_ANOTHER_PROCESS = """
import sys
from tests.prepare.test_promises import PREPARE, digest_of
device = sys.argv[1] if sys.argv[1] == "host" else int(sys.argv[1])
print(*(digest_of(index, device) for index in range(len(PREPARE))))
"""


def test_bit_stable_in_another_process(device):
    here = [digest_of(index, device) for index in range(len(PREPARE))]
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(device)]
    there = subprocess.run(command, capture_output=True, text=True)
    assert there.returncode == 0, there.stderr
    assert there.stdout.split() == here


@pytest.mark.gpu
@every_descriptor
def test_bit_stable_across_hardware(desc):
    assert equal(case_of(desc, 0).run(), case_of(desc, "host").run())


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mood", MOODS)
def test_a_row_depends_on_itself_alone(element, mood, device):
    """Whatever rows stand beside it, and at whatever place."""
    rng = np.random.default_rng(2)
    m, k = 40, 72
    dense = matrix(rng, (m, k), element, mood)
    scores = matrix(rng, (m, k), ElementKind.F32, mood)
    rows = rng.permutation(m)[:13]
    for kind, more, inputs in (
        (PruneSparse24Descriptor, {}, {"dense": dense}),
        (PruneCompressSparse24Descriptor, {"scores": "f32"}, {"dense": dense, "scores": scores}),
    ):
        whole = run(kind(m=m, k=k, element=element, **more), device, **inputs)
        some = {name: bits[rows] for name, bits in inputs.items()}
        part = run(kind(m=len(rows), k=k, element=element, **more), device, **some)
        assert equal(part, {name: bits[rows] for name, bits in whole.items()})


@pytest.mark.parametrize("rule", TileRule)
def test_a_tile_depends_on_itself_alone(rule, device):
    rng = np.random.default_rng(3)
    element = PREPARE[0].element
    dense = matrix(rng, (32, 48), element, "ties")
    whole = run(TilePruneSparse24Descriptor(m=32, k=48, element=element, rule=rule), device, dense=dense)
    for row in range(0, 32, 8):
        desc = TilePruneSparse24Descriptor(m=8, k=48, element=element, rule=rule)
        part = run(desc, device, dense=np.ascontiguousarray(dense[row : row + 8]))
        assert np.array_equal(part["values"], whole["values"][row : row + 8])
        assert np.array_equal(part["mask"], whole["mask"][row // 8 : row // 8 + 1])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "fp8_e5m2"])
def test_masked_values_become_positive_zero(element, value, device):
    desc = MaskSparse24Descriptor(m=8, k=16, element=element)
    dense = np.full((8, 16), value).astype(desc.element.dtype)
    dense[:, ::2] = 1
    mask = np.packbits(np.arange(16) % 2 == 0, bitorder="little")[None].repeat(8, axis=0)
    found = run(desc, device, dense=dense.view(desc.element.bits_dtype), mask=mask)["masked"]
    typed = found.view(desc.element.dtype).astype(float)
    assert (typed[:, ::2] == 1).all()
    assert not found[:, 1::2].any()
