"""Quantizing rows: the definition, computed by slow code; the kernel's division; the same bits on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    DeviceProperties,
    ElementKind,
    InvalidProblemError,
    QuantizeSparse24Args,
    QuantizeSparse24Descriptor,
    QuantizeSparse24Plan,
    TensorView,
    UnsupportedError,
)
from sparse24_plans.arithmetic.fma32 import fma_f32
from sparse24_plans.prepare.backends.quantize import defines
from sparse24_plans.prepare.kernel_table import threads_of_row
from sparse24_plans.weights.quantize import quantized, scales_of

from ..plan.cases import matrix
from ..support import Guarded, check_that_nothing_is_allocated, synchronize
from .models import LARGEST, quantized_rows

F32 = ElementKind.F32
MOODS = ("normal", "any_bits", "ties", "sparse", "mixed")
every_element = pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
every_out = pytest.mark.parametrize("out", LARGEST)
either_scale = pytest.mark.parametrize("static", [False, True], ids=["each row", "static"])


def cells_of(rng: np.random.Generator, shape: tuple[int, int], element: ElementKind, mood: str) -> np.ndarray:
    """Bits of a matrix. ``mixed``: rows of all sizes, with some NaN, Inf and -0 among them."""
    if mood != "mixed":
        return matrix(rng, shape, element, mood)
    small, large = (-20, 10) if element == "f16" else (-140, 100)
    wide = rng.standard_normal(shape) * 2.0 ** rng.uniform(small, large, (shape[0], 1))
    wide[rng.random(shape) < 0.1] = -0.0
    if wide.size:
        wide[rng.random(shape) < 0.1 / shape[1]] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        return wide.astype(np.float32).astype(element.dtype).view(element.bits_dtype)


class Case:
    """A plan with poisoned results between guard bytes, in rows that may lie apart and start anywhere."""

    def __init__(self, desc, device, bits, *, given=0.01, pads=(0, 0), offsets=(0, 0)) -> None:
        self.desc = desc
        self.plan = QuantizeSparse24Plan.select(desc, device=device)
        self.x, self.quantized = (
            Guarded((desc.m, desc.k), element, device, desc.k + pad, offset=offset)
            for element, pad, offset in zip((desc.element, desc.out_element), pads, offsets, strict=True)
        )
        self.x.fill(bits.view(desc.element.dtype))
        self.scale = Guarded((1 if desc.static_scale else desc.m,), F32, device)
        if desc.static_scale:
            self.scale.fill(np.array([given], np.float32))
        self.args = QuantizeSparse24Args(self.x.view, self.quantized.view, self.scale.view)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """The bits of the result and of the scales; checks every guard."""
        self.plan.run(self.args)
        synchronize(self.plan)
        self.x.numpy()
        return self.quantized.numpy().view(np.uint8), self.scale.numpy().view(np.uint32)


@every_element
@every_out
@either_scale
@pytest.mark.parametrize("mood", MOODS)
def test_what_is_computed(element, out, static, mood):
    rng = np.random.default_rng(3)
    for m, k in ((9, 24), (3, 13), (1, 1), (0, 8), (2, 0)):
        desc = QuantizeSparse24Descriptor(m=m, k=k, element=element, out_element=out, static_scale=static)
        bits = cells_of(rng, (m, k), desc.element, mood)
        given = 0.37 if static else None
        codes, scales = Case(desc, "host", bits, given=given or 1.0).run()
        want, of_rows = quantized_rows(bits.view(desc.element.dtype), out, given)
        np.testing.assert_array_equal(codes, want)
        if not static:
            np.testing.assert_array_equal(scales, of_rows.view(np.uint32))


@every_out
@pytest.mark.parametrize("scale", [0.0, -0.5, np.inf, np.nan, 2.0**-149, 2.0**127])
def test_any_static_scale_has_a_meaning(out, scale):
    bits = cells_of(np.random.default_rng(0), (6, 40), F32, "mixed")
    desc = QuantizeSparse24Descriptor(m=6, k=40, element="f32", out_element=out, static_scale=True)
    codes, _ = Case(desc, "host", bits, given=scale).run()
    np.testing.assert_array_equal(codes, quantized_rows(bits.view(np.float32), out, scale)[0])


# The kernel's division ----------------------------------------------------------------------------


def refined(x: np.ndarray, given: np.ndarray, *, static: bool) -> np.ndarray:
    """``Divisor`` of prepare/quantize.cu, in its steps."""
    f32, size = np.float32, np.abs(given)
    power = np.where(size < 2.0**-60, f32(2.0**100), np.where(size > 2.0**100, f32(2.0**-60), f32(1)))
    scale, x = given * power, x * power
    inverse = f32(1) / scale
    first = x * inverse
    q = first
    for _ in range(2):
        q = fma_f32(fma_f32(-q, scale, x), inverse, q)
    rough = (scale == 0) | ~(np.abs(scale) <= 2.0**100) | (static & ~(np.abs(first) < 1024))
    return np.where(rough, first, np.copysign(q, first))


def codes(quotients: np.ndarray, out: str) -> np.ndarray:
    return quantized(quotients, np.float32(1), ElementKind(out)).view(np.uint8)


@every_out
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-149, 127), size=st.floats(-13, 9))
def test_the_kernels_quotients_become_what_ieee_division_gives(out, seed, exponent, size):
    """Any two mantissas, quotients near ties, and scales of every size."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        scale = np.ldexp(rng.uniform(1, 2, 2000) * rng.choice([-1, 1], 2000), exponent).astype(np.float32)
        near = np.round(rng.uniform(1, 2, 2000) * 2.0**size * 1024) / 1024
        x = (near * scale.astype(np.float64)).astype(np.float32)
        x = np.where(rng.random(2000) < 0.5, x, np.nextafter(x, np.float32(np.inf)))
        x[~np.isfinite(x)] = 0
        found, want = refined(x, scale, static=True), x / scale
    np.testing.assert_array_equal(codes(found, out), codes(want, out))


@every_out
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bits_over_any_bits(out, seed):
    rng = np.random.default_rng(seed)
    x, scale = (rng.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32) for _ in range(2))
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-149), 3e38], np.float32)
    x[:64], scale[:64] = np.repeat(special, 8), np.tile(special, 8)
    with np.errstate(all="ignore"):
        found, want = refined(x, scale, static=True), x / scale
    np.testing.assert_array_equal(codes(found, out), codes(want, out))


@every_out
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-149, 127))
def test_rows_over_their_own_scales(out, seed, exponent):
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        x = np.ldexp(rng.standard_normal((8, 200)), exponent).astype(np.float32)
        x = np.where(np.isfinite(x), x, np.float32(3e38))
        scale = np.broadcast_to(scales_of(x, ElementKind(out)), x.shape)
        found, want = refined(x, scale, static=False), x / scale
    np.testing.assert_array_equal(codes(found, out), codes(want, out))


# What is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"element": "s8"}, "element: expected f32 or f16 or bf16, got s8"),
        ({"out_element": "bf16"}, "out_element: expected fp8_e4m3 or s8, got bf16"),
        ({"static_scale": 1}, "static_scale"),
        ({"k": -1}, "k"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(InvalidProblemError, match=message):
        QuantizeSparse24Descriptor(**{"m": 4, "k": 5, "element": "bf16", **change})


def test_fp8_needs_a_gpu_that_converts_to_it():
    ampere = DeviceProperties(kind="cuda", compute_capability=(8, 0), multiprocessors=108)
    kernels = {}
    for out in LARGEST:
        desc = QuantizeSparse24Descriptor(m=4, k=64, element="f16", out_element=out)
        rows = QuantizeSparse24Plan.explain_choice(desc, device=ampere)
        kernels[out] = rows.chosen
    assert kernels == {"fp8_e4m3": None, "s8": "quantize_s8"}
    with pytest.raises(UnsupportedError, match=r"quantize_fp8: needs compute capability 8\.9"):
        QuantizeSparse24Plan.select(QuantizeSparse24Descriptor(m=4, k=64, element="f16"), device=ampere)


def test_rows_that_overlap_or_are_transposed_are_refused():
    desc = QuantizeSparse24Descriptor(m=4, k=16, element="f32")
    plan = QuantizeSparse24Plan.select(desc, device="host")
    x, scale = np.zeros((4, 16), np.float32), np.zeros(4, np.float32)
    out = TensorView.of(x.view(np.uint8)[:, :16], element="fp8_e4m3")
    with pytest.raises(InvalidProblemError, match="quantized: expected memory apart from x"):
        plan.run(QuantizeSparse24Args(x, out, scale))
    with pytest.raises(InvalidProblemError, match="x: expected unit stride"):
        plan.run(QuantizeSparse24Args(np.zeros((16, 4), np.float32).T, np.zeros((4, 16), np.uint8), scale))


def test_a_row_is_held_by_a_warp_or_a_block():
    found = {}
    for k in (1, 512, 2048, 2049, 4096, 14336, 65536):
        desc = QuantizeSparse24Descriptor(m=1, k=k, element="bf16")
        found[k] = threads_of_row(desc), defines(desc)["HELD"]
    assert found == {
        1: (32, 1),
        512: (32, 2),
        2048: (32, 8),
        2049: (256, 2),
        4096: (256, 2),
        14336: (256, 8),
        65536: (256, 8),
    }


# On a GPU ------------------------------------------------------------------------------------------

SHORT = ((1, 1), (3, 8), (9, 75), (5, 512), (300, 264), (7, 2048))
LONG = ((2, 2049), (3, 4096), (2, 14336), (2, 40001))


@pytest.mark.gpu
@every_element
@every_out
@either_scale
@pytest.mark.parametrize("mood", MOODS)
def test_a_gpu_gives_the_hosts_bits(element, out, static, mood):
    rng = np.random.default_rng(5)
    for m, k in SHORT + LONG:
        desc = QuantizeSparse24Descriptor(m=m, k=k, element=element, out_element=out, static_scale=static)
        bits = cells_of(rng, (m, k), desc.element, mood)
        place = {"pads": (int(rng.choice([0, 1, 8])), int(rng.choice([0, 3, 8]))), "given": 0.37}
        place["offsets"] = int(rng.choice([0, 1, 8])), int(rng.choice([0, 1, 16]))
        found, wanted = Case(desc, 0, bits, **place).run(), Case(desc, "host", bits, **place).run()
        for name, got, want in zip(("quantized", "scale"), found, wanted, strict=True):
            wrong = np.argwhere(got != want)
            assert len(wrong) == 0, f"{name} {m}x{k}: {len(wrong)} differ, the first at {wrong[0]}"


@pytest.mark.gpu
@every_out
@pytest.mark.parametrize("scale", [0.0, -0.5, np.inf, np.nan, 2.0**-149, 2.0**-60, 2.0**100, 2.0**127])
def test_any_static_scale_gives_the_hosts_bits(out, scale):
    bits = cells_of(np.random.default_rng(0), (60, 400), F32, "any_bits")
    desc = QuantizeSparse24Descriptor(m=60, k=400, element="f32", out_element=out, static_scale=True)
    found, wanted = (Case(desc, device, bits, given=scale).run() for device in (0, "host"))
    np.testing.assert_array_equal(found[0], wanted[0])


@pytest.mark.gpu
@every_out
def test_every_float16_divided_by_many_scales(out):
    """A row has all numbers that its first cell, which decides on its scale, is as large as."""
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    first = (2.0 ** np.linspace(-14, 15.9, 40)).astype(np.float16)[:, None]
    rows = np.where(np.abs(every) <= first, every, first)
    desc = QuantizeSparse24Descriptor(m=40, k=65536, element="f16", out_element=out)
    found, wanted = (Case(desc, device, rows).run() for device in (0, "host"))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_overlapping_launches_keep_the_order_of_their_stream():
    """A launch may start before the preceding kernel has ended, and the next one before this one has."""
    import cupy

    desc = QuantizeSparse24Descriptor(m=4096, k=4096, element="f32", out_element="s8")
    plan = QuantizeSparse24Plan.select(desc, device=0)
    source = cupy.random.default_rng(0).standard_normal((4096, 4096), dtype=cupy.float32)
    x, scale = cupy.empty_like(source), cupy.empty(4096, cupy.float32)
    results = [cupy.empty((4096, 4096), cupy.int8) for _ in range(4)]
    for number, result in enumerate(results):
        cupy.multiply(source, number + 1, out=x)
        plan.run(QuantizeSparse24Args(x, result, scale))
        again = cupy.multiply(result, scale[:, None])
        assert float(cupy.abs(again - x).max()) <= float(scale.max()) * 0.5001
    assert bool((results[1] == results[0]).all()), "twice the row has twice the scale"


@pytest.mark.gpu
@pytest.mark.alone
def test_nothing_is_allocated():
    desc = QuantizeSparse24Descriptor(m=64, k=4096, element="bf16")
    case = Case(desc, 0, cells_of(np.random.default_rng(0), (64, 4096), desc.element, "normal"))
    check_that_nothing_is_allocated(lambda: case.plan.run(case.args))
