"""The table of kernels that prepare weights, and the whole of their selection.

The same rules as in registry.py: rows in order of preference, a pure function of descriptor, preference and
device properties. A row's name is that of its module under ``backends/``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..gemm.table import Considered, misplaced
from ..vocab import (
    ArchSku,
    BackendKind,
    DeviceProperties,
    ElementKind,
    MathPrecision,
    PlanPreference,
    PrecisionGuarantee,
    PrepareOp,
    Tier,
)

F32, F16, BF16 = ElementKind.F32, ElementKind.F16, ElementKind.BF16
S8, U8 = ElementKind.S8, ElementKind.U8
E4M3, E5M2 = ElementKind.FP8_E4M3, ElementKind.FP8_E5M2

ELEMENTS = (F32, F16, BF16, S8, U8, E4M3, E5M2)
"""The elements of weights that can be prepared."""
SCORE_ELEMENTS = (F32, F16, BF16)
"""The elements of scores."""
PACKED_ELEMENTS = (F16, BF16, S8, E4M3)
"""The elements that packing.py has a layout for."""


class Problem(Protocol):
    """What selection reads of a descriptor."""

    m: int
    k: int
    element: ElementKind

    @property
    def kind(self) -> PrepareOp: ...


@dataclass(frozen=True)
class PrepareSpec:
    """One row. ``limits`` gives the reason why a problem can't be served, or None."""

    name: str
    backend: BackendKind
    tier: Tier
    ops: tuple[PrepareOp, ...]
    elements: tuple[ElementKind, ...] = ELEMENTS
    arch: ArchSku = ArchSku.ANY
    min_compute_capability: tuple[int, int] = (8, 0)
    limits: Callable[[Problem], str | None] = lambda problem: None

    @property
    def on_host(self) -> bool:
        return self.tier is Tier.HOST


_PRECISION = {
    F32: MathPrecision.F32,
    F16: MathPrecision.F16,
    BF16: MathPrecision.BF16,
    S8: MathPrecision.INT8,
    U8: MathPrecision.INT8,
    E4M3: MathPrecision.FP8_E4M3,
    E5M2: MathPrecision.FP8_E5M2,
}


def guarantee(problem: Problem) -> PrecisionGuarantee:
    """Of every row: bits are compared and moved, so nothing rounds, and host and GPU give the same bits."""
    return PrecisionGuarantee(
        math_precision=_PRECISION[problem.element],
        accumulator=problem.element,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        bit_stable_across_hardware=True,
        subnormals="preserved",
        nonfinite="skips_pruned",
        unit_roundoff=0.0,
        terms_per_k=1.0,
    )


_GRID_X = 2**31 - 1
BLOCK_BYTES = 16384
"""Dense bytes that a block of the kernels over a flat matrix works on."""
TILE_SIDES = (64, 128)
"""Rows and columns of a block of the packing kernels, at least."""
SQUARE_SIDE = 128
"""Rows, and columns, of a block of the kernel over 4x4 tiles."""


def _within_grid(blocks: int) -> str | None:
    return None if blocks <= _GRID_X else f"{blocks} blocks exceed the grid limit {_GRID_X}"


def _flat_limits(problem: Problem) -> str | None:
    return _within_grid(-(-problem.m * problem.k * problem.element.itemsize // BLOCK_BYTES))


def _pack_limits(problem: Problem) -> str | None:
    return _within_grid(-(-problem.m // TILE_SIDES[0]) * -(-problem.k // TILE_SIDES[1]))


def _square_limits(problem: Problem) -> str | None:
    if max(problem.m, problem.k) >= 8 << 32:  # squares of 8 x 8 are counted in 32 bits along a side
        return f"serves dimensions below {8 << 32}"
    return _within_grid(-(-problem.m // SQUARE_SIDE) * -(-problem.k // SQUARE_SIDE))


_PRUNE_OPS = (PrepareOp.PRUNE, PrepareOp.COMPRESS, PrepareOp.PRUNE_COMPRESS, PrepareOp.MASK)
_PACK_OPS = (PrepareOp.PACK, PrepareOp.UNPACK)
_DEVICE, _HOST = (BackendKind.PREPARE, Tier.INFLATE), (BackendKind.HOST, Tier.HOST)

KERNELS: tuple[PrepareSpec, ...] = (
    PrepareSpec("prune", *_DEVICE, _PRUNE_OPS, limits=_flat_limits),
    PrepareSpec("decompress", *_DEVICE, (PrepareOp.DECOMPRESS,), limits=_flat_limits),
    PrepareSpec("pack", *_DEVICE, _PACK_OPS, PACKED_ELEMENTS, limits=_pack_limits),
    PrepareSpec("tile_prune", *_DEVICE, (PrepareOp.TILE_PRUNE,), limits=_square_limits),
    PrepareSpec("host_prepare", *_HOST, tuple(op for op in PrepareOp if op not in _PACK_OPS)),
    PrepareSpec("host_pack", *_HOST, _PACK_OPS, PACKED_ELEMENTS),
)


def consider(
    problem: Problem, preference: PlanPreference, device: DeviceProperties
) -> tuple[Considered[PrepareSpec], ...]:
    """Every row of the table, in order, with the reason why it can't serve."""
    return tuple(Considered(spec, _mismatch(spec, problem, preference, device)) for spec in KERNELS)


def _mismatch(
    spec: PrepareSpec, problem: Problem, preference: PlanPreference, device: DeviceProperties
) -> str | None:
    if (reason := misplaced(spec, preference, device)) is not None:
        return reason
    if problem.kind not in spec.ops:
        return f"does not serve op {problem.kind}"
    if problem.element not in spec.elements:
        return f"serves elements {', '.join(spec.elements)}, not {problem.element}"
    if (limit := spec.limits(problem)) is not None:
        return limit
    return preference.require.unmet(guarantee(problem), problem.k)
