"""A thread whose processor flushes subnormal numbers is refused: no host row would keep its promise there."""

from __future__ import annotations

import ctypes
import platform
import threading
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TilePruneSparse24Descriptor,
    UnsupportedError,
)

from .cases import BLOCKSPARSE, GEMM, PlanCase, name_of, random_inputs, select

FTZ, DAZ = 0x8000, 0x0040
"""Bits of MXCSR: results, operands."""
_MXCSR_AT = 28  # in glibc's fenv_t for x86-64


def set_bits(bits: int) -> None:
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint8 * 32)()
    assert libm.fegetenv(environment) == 0
    register = ctypes.c_uint32.from_buffer(environment, _MXCSR_AT)
    register.value |= bits
    assert libm.fesetenv(environment) == 0


def in_a_thread_with(bits: int, run) -> BaseException | None:
    """Return what ``run`` raised in the thread."""
    raised: list[BaseException] = []

    def body() -> None:
        set_bits(bits)
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return raised[0] if raised else None


glibc = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="sets MXCSR through glibc"
)


@glibc
@pytest.mark.parametrize("require", [{}, {"bit_stable_across_hardware": True}], ids=["default", "strict"])
@pytest.mark.parametrize("desc", [*GEMM, *BLOCKSPARSE], ids=name_of)
def test_it_is_refused_and_nothing_is_written(desc, require):
    plan = select(desc, "host", preference={"require": require})
    assert plan.guarantee.subnormals == "preserved"
    check_refused(PlanCase(plan, random_inputs(desc)))


@glibc
def test_the_tensor_cores_arithmetic_is_refused_too():
    desc = GemmSparse24Descriptor(n=3, m=16, k=16, element="bf16")
    plan = select(desc, "host", preference={"require": {"arithmetic": "hopper_tc/slices=1"}})
    assert plan.explain().chosen == "host_tensor_core"
    check_refused(PlanCase(plan, random_inputs(desc)))


@glibc
def test_sums_that_choose_tiles_are_refused_too():
    desc = TilePruneSparse24Descriptor(m=8, k=8, element="f32", rule="optimal")
    plan = select(desc, "host")
    assert plan.guarantee.subnormals == "preserved"
    check_refused(PlanCase(plan, random_inputs(desc)))


def of_a_quantized_weight() -> dict[str, Any]:
    """The functions that round a quantized weight's values, without a plan's run."""
    rng = np.random.default_rng(0)
    weight = Sparse24Weight.prune_compress(rng.standard_normal((8, 64), np.float32).astype(np.float16))
    stored = {"stored": "s8", "group": 32}
    quantized = Sparse24QuantizedWeight.quantize(weight, **stored)
    fields = {"weight_element": "s8", "weight_group": 32}
    plan = select(GemmSparse24Descriptor(n=2, m=8, k=64, element="f16", **fields), "host")
    return {
        "quantize": lambda: Sparse24QuantizedWeight.quantize(weight, **stored),
        "dequantize": quantized.dequantize,
        "decompress": quantized.decompress,
        "pack": lambda: plan.pack(quantized),
    }


@glibc
@pytest.mark.parametrize("bits", [FTZ, DAZ])
@pytest.mark.parametrize("name", ["quantize", "dequantize", "decompress", "pack"])
def test_a_quantized_weight_is_refused_as_a_run_is(name, bits):
    function = of_a_quantized_weight()[name]
    error = in_a_thread_with(bits, function)
    assert isinstance(error, UnsupportedError)
    assert "flushes them to zero" in str(error)
    assert in_a_thread_with(0, function) is None


@glibc
@pytest.mark.parametrize("device", ["host", "h200"])
@pytest.mark.parametrize("bits", [FTZ, DAZ])
def test_no_replay_calls_right_subnormals_wrong(device, bits):
    desc = GemmSparse24Descriptor(n=2, m=8, k=16, element="f32")
    rng = np.random.default_rng(0)
    weight = Sparse24Weight.prune_compress(rng.standard_normal((8, 16), np.float32))
    x, y = rng.standard_normal((2, 16), np.float32) * np.float32(1e-40), np.empty((2, 8), np.float32)
    args = GemmSparse24Args(weight, x, y)
    select(desc, "host", preference={"require": {"arithmetic": "fma32_in_order"}}).run(args)
    plan = select(desc, device, preference={"require": {"arithmetic": "fma32_in_order"}})
    error = in_a_thread_with(bits, lambda: plan.replay(args))
    assert isinstance(error, UnsupportedError)
    assert "flushes them to zero" in str(error)
    assert plan.replay(args).equal


def check_refused(case: PlanCase) -> None:
    """With either bit set, and with both."""
    for bits in (FTZ, DAZ, FTZ | DAZ):
        error = in_a_thread_with(bits, case.run)
        assert isinstance(error, UnsupportedError), f"bits {bits:#x}"
        assert "flushes them to zero" in str(error)
        assert case.untouched(), f"bits {bits:#x}"
    assert in_a_thread_with(0, case.run) is None
    assert not case.untouched()
