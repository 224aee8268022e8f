"""A thread whose processor flushes subnormal numbers is refused: no host row would keep its promise there."""

from __future__ import annotations

import ctypes
import platform
import threading

import numpy as np
import pytest

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan, UnsupportedError

from ..support import case_of, random_data

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
    """What ``run`` raised there."""
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


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="sets MXCSR through glibc"
)
@pytest.mark.parametrize("bits", [FTZ, DAZ, FTZ | DAZ])
@pytest.mark.parametrize(
    ("row", "require"),
    [
        ("host_blas", {}),
        ("host_strict", {"bit_stable_across_hardware": True}),
        ("host_tensor_core", {"arithmetic": "hopper_tc/slices=1"}),
    ],
)
def test_it_is_refused_and_nothing_is_written(bits, row, require):
    desc = GemmSparse24Descriptor(n=3, m=8, k=16, element="bf16")
    plan = GemmSparse24Plan.select(desc, preference={"require": require}, device="host")
    assert plan.explain().chosen == row
    assert plan.guarantee.subnormals == "preserved"
    case = case_of(plan, random_data(np.random.default_rng(0), desc))
    before = case.result.numpy().tobytes()
    error = in_a_thread_with(bits, case.run)
    assert isinstance(error, UnsupportedError)
    assert "flushes them to zero" in str(error)
    assert case.result.numpy().tobytes() == before
    assert in_a_thread_with(0, case.run) is None
    case.check(case.fetch())
