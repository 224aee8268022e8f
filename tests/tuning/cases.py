"""An H200 that isn't here, entries and tables for it, and workers that a script plays."""

from __future__ import annotations

from sparse24_plans import GemmSparse24Descriptor, PlanPreference, TuningTable
from sparse24_plans.gemm.backends import cusparselt, mma_sp
from sparse24_plans.gemm.tuned import TunedKernel

from .. import sample_devices

H200 = sample_devices.H200.model_copy(update={"driver": "580.1"})
DESC = GemmSparse24Descriptor(n=16, m=28672, k=4096, element="bf16")
MMA, CSLT = PlanPreference(prefer_backend="mma_sp"), PlanPreference(prefer_backend="cusparselt")
SCHEDULE = {"n8_tiles": 2, "warp_pairs_m": 1, "ctas_per_sm": 1}
"""Not the default one."""


def entry(kernel: str = "mma_sp", **change: object) -> TunedKernel:
    fields = {
        "kernel": kernel,
        "version": (mma_sp if kernel == "mma_sp" else cusparselt).Kernel.tuning_version(H200),
        "problem": DESC,
        "configuration": SCHEDULE if kernel == "mma_sp" else {"algorithm": 3},
        "microseconds": 1.5,
        "default_microseconds": 2.5,
    }
    return TunedKernel(**{**fields, **change})


def table(*entries: TunedKernel, gpu: str = "NVIDIA H200", driver: str = "580.1") -> TuningTable:
    return TuningTable(gpu, driver, entries)


def of_n(*tokens: int) -> list[GemmSparse24Descriptor]:
    return [DESC.model_copy(update={"n": n}) for n in tokens]
