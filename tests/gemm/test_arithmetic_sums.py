"""Sums by a named arithmetic: the order of the steps, against one result at a time in exact numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sparse24_plans import ElementKind, GemmSparse24Descriptor, Sparse24Weight
from sparse24_plans.gemm.arithmetic import sums as module
from sparse24_plans.gemm.arithmetic.results import blocks_of, places
from sparse24_plans.gemm.arithmetic.sums import Factors, step_places, sums
from sparse24_plans.plan.arithmetic import MAX_SLICES, Arithmetic
from sparse24_plans.weights import canonical

from ..support import random_values
from .scalar_arithmetic import TILE_COLUMNS, float32_sum, tensor_core_sum

HOPPER = [(element, f"hopper_tc/slices={s}") for element in ("f16", "bf16") for s in (1, 3, 8)]
FLOAT32 = [f"hopper_tc_f32x{products}/slices={s}" for products in (3, 6) for s in (1, 3)]
FP8 = [
    (element, f"hopper_tc_fp8/{how}")
    for element in ("fp8_e4m3", "fp8_e5m2")
    for how in ("slices=1", "slices=4", "promoted=128")
]


def factors_of(desc: GemmSparse24Descriptor, x: np.ndarray, weight: Sparse24Weight) -> Factors:
    codes = canonical.from_metadata(weight.metadata).reshape(desc.m, desc.k // 4)
    bits = desc.element.bits_dtype
    return Factors(desc, x.view(bits), weight.values_view.bits(), codes)


def wild(rng: np.random.Generator, shape: tuple[int, int], element: ElementKind) -> np.ndarray:
    """Values of many magnitudes, zeros among them."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 4, shape)
    values[rng.random(shape) < 0.2] = 0
    return values.astype(np.float32).astype(element.dtype)


def check_sums(n: int, m: int, k: int, element: str, name: str, one_sum: Callable[..., np.float32]) -> None:
    rng, kind = np.random.default_rng(k), ElementKind(element)
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element=element)
    weight = Sparse24Weight.prune_compress(wild(rng, (m, k), kind))
    x = wild(rng, (n, k), kind)
    tokens, outputs = places(np.arange(n * m), desc)
    got = sums(factors_of(desc, x, weight), Arithmetic.of(name), tokens, outputs)
    want = [one_sum(x, weight, *place, name) for place in zip(tokens, outputs, strict=True)]
    assert got.tobytes() == np.array(want, np.float32).tobytes()


@pytest.mark.parametrize(("element", "name"), HOPPER + FP8)
@pytest.mark.parametrize(("n", "m", "k"), [(3, 5, 8), (3, 5, 40), (3, 5, 264), (2, 2, 1544)])
def test_sums_of_the_tensor_cores(element, name, n, m, k):
    """K may be less than a step, less than a slice, or no multiple of a tile."""
    check_sums(n, m, k, element, name, tensor_core_sum)


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize(("n", "m", "k"), [(2, 2, 8), (2, 2, 72), (2, 2, 840), (2, 2, 8264)])
def test_sums_of_float32_in_bf16_terms(name, n, m, k):
    """K may be less than a tile, several sums long, or several groups of sums."""
    check_sums(n, m, k, "f32", name, float32_sum)


def test_blocked_sums_of_float32_are_for_one_slice_alone():
    """Two slices of more than 4096 columns, which is the length of a blocked sum of f32x6."""
    check_sums(2, 2, 2 * 4096 + 200, "f32", "hopper_tc_f32x6/slices=2", float32_sum)


def test_the_names_differ_in_bits():
    """A kernel with another number of slices would therefore be found."""
    rng, kind = np.random.default_rng(1), ElementKind.BF16
    desc = GemmSparse24Descriptor(n=8, m=16, k=2048, element=kind)
    weight = Sparse24Weight.prune_compress(random_values(rng, (16, 2048), kind))
    factors = factors_of(desc, random_values(rng, (8, 2048), kind), weight)
    tokens, outputs = places(np.arange(128), desc)
    found = {
        sums(factors, Arithmetic.of(name), tokens, outputs).tobytes()
        for name in ["fma32_in_order", *(f"hopper_tc/slices={s}" for s in range(1, MAX_SLICES + 1))]
    }
    assert len(found) == 1 + MAX_SLICES


@pytest.mark.parametrize(("element", "name"), [("bf16", "hopper_tc/slices=4"), ("s8", "exact_sum")])
def test_the_results_asked_for_and_no_others(element, name):
    """Results may be asked for in any order and repeatedly; each is what it is alone."""
    rng, kind = np.random.default_rng(2), ElementKind(element)
    desc = GemmSparse24Descriptor(n=7, m=30, k=640, element=kind)
    weight = Sparse24Weight.prune_compress(random_values(rng, (30, 640), kind))
    factors = factors_of(desc, random_values(rng, (7, 640), kind), weight)
    tokens, outputs = rng.integers(0, 7, 200), rng.integers(0, 30, 200)
    got = sums(factors, Arithmetic.of(name), tokens, outputs)
    for i in range(0, 200, 17):
        alone = sums(factors, Arithmetic.of(name), tokens[i : i + 1], outputs[i : i + 1])
        assert alone.tobytes() == got[i : i + 1].tobytes()


@pytest.mark.parametrize("op", ["forward", "dgrad"])
@pytest.mark.parametrize("k", [8, 520, 1032])
def test_exact_sums_of_integers(op, k):
    rng = np.random.default_rng(k)
    desc = GemmSparse24Descriptor(n=4, m=24 if op == "forward" else 528, k=k, element="s8", op=op)
    weight = Sparse24Weight.prune_compress(random_values(rng, (desc.m, k), ElementKind.S8))
    x = random_values(rng, (4, desc.reduction), ElementKind.S8)
    dense = weight.decompress().astype(np.int64)
    want = x.astype(np.int64) @ (dense.T if op == "forward" else dense)
    tokens, outputs = places(np.arange(4 * desc.outputs), desc)
    got = sums(factors_of(desc, x, weight), Arithmetic.of("exact_sum"), tokens, outputs)
    np.testing.assert_array_equal(got, want[tokens, outputs])


@pytest.mark.parametrize(("element", "name"), HOPPER + FP8)
@pytest.mark.parametrize("k", [8, 128, 136, 1544, 4096])
def test_steps_cover_every_column_once_and_slices_are_whole_tiles(element, name, k):
    desc, arithmetic = GemmSparse24Descriptor(n=1, m=1, k=k, element=element), Arithmetic.of(name)
    found = step_places(desc, arithmetic)
    assert [c for place in found for c in range(*place.columns)] == list(range(k))
    starts = [place.columns[0] for i, place in enumerate(found) if i == 0 or place.slice > found[i - 1].slice]
    width = arithmetic.promoted_every or TILE_COLUMNS[element]
    assert all(start % width == 0 for start in starts)


def test_decoded_columns_are_whole_steps_and_slices_begin_with_one():
    widths = [step.columns for step in module.tensor_core.STEPS.values()]
    assert all(module._COLUMNS % width == 0 for width in widths)
    assert all(columns % width == 0 for columns in (128, 256) for width in widths)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_blocks_cover_all_results_once(count):
    assert [i for block in blocks_of(count) for i in range(block.start, block.stop)] == list(range(count))
