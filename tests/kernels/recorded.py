"""Compilations for the cells of the benchmarks, by the schedules that cost models choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import blocks, blocks24
from sparse24_plans import (
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    GemmSparse24Descriptor,
    PlanPreference,
    Tier,
)
from sparse24_plans.bench import scope
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.kernel_table import KernelEntry, consider

from .block_requests import BLOCKS_ENTRIES
from .gemm_requests import GEMM_ENTRIES
from .requests import HOPPER, Request, device_of, recorded_loads

_KINDS = (
    {"element": "bf16", "epilogue": "bias_gelu"},
    {"element": "f32", "epilogue": "bias_gelu"},
    {"element": "fp8_e4m3", "epilogue": "bias_gelu"},
    {"element": "s8", "epilogue": "bias_gelu", "out_element": "s8"},
    {"element": "s8"},
)
"""Products with 2:4 weights. f16 has the schedules of bf16; the epilogue is the one of most registers."""


def _products() -> Iterator[GemmSparse24Descriptor]:
    for (m, k), n, kind in itertools.product(scope.SHAPES, scope.TOKENS, _KINDS):
        yield GemmSparse24Descriptor(n=n, m=m, k=k, **kind)


def _block_products() -> Iterator[BlockSparseMatmulDescriptor]:
    for inner, cells in (("dense", blocks.cells()), ("sparse24", blocks24.cells())):
        for one in cells:
            kept = int(one.density * (one.m // one.block) * (one.k // one.block))
            shape = BlockSparseShape(heads=1, rows=one.m, cols=one.k, block=one.block, blocks=kept)
            yield BlockSparseMatmulDescriptor(op=one.op, layout=shape, n=one.n, element="bf16", inner=inner)


def _requests(rows: Sequence[KernelEntry], descriptors: Iterable[Descriptor]) -> list[Request]:
    """Return the requests of tensor-core kernels: other kernels are the same for every shape."""
    asked, device, preference = list(descriptors), device_of(HOPPER), PlanPreference()
    found: list[Request] = []
    for row in rows:
        if row.tier not in (Tier.TENSOR_CORE, Tier.SPARSE_TENSOR_CORE):
            continue
        with recorded_loads(row.kernel) as loads:
            for desc in asked:
                if all(one.reason is None for one in consider((row,), desc, preference, device)):
                    row.kernel(Choice(desc, device, row, preference, {}))
        found += loads
    return found


RECORDED = list(
    dict.fromkeys(_requests(GEMM_ENTRIES, _products()) + _requests(BLOCKS_ENTRIES, _block_products()))
)
