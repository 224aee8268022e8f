"""Random batches of products, each of which is held against the product that it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparse24_plans import GemmSparse24Descriptor, GemmSparse24Plan, PlanPreference, UnsupportedError
from sparse24_plans.errors import MisalignedOperandError

from ..float64 import reference
from ..gemm.batched_cases import ORDERS, SHARED, batched_case
from ..support import case_of, place_name, same_bits

_MAX_BATCHES = 24


@dataclass(frozen=True)
class BatchedProduct:
    """Batches of a product, and how its matrices lie in memory."""

    desc: GemmSparse24Descriptor
    preference: PlanPreference
    orders: tuple[str, ...]
    shared: tuple[str, ...]
    """Operands that all batches have in common."""
    units: tuple[int, ...]
    """Elements of a gap between lines of x, y and c."""
    offsets: tuple[int, ...]
    in_place: bool
    """Whether c is y."""
    data_seed: tuple[int, ...] = field(repr=False)


def batches_of(rng: np.random.Generator, product: Any) -> BatchedProduct:
    """Batches of a drawn product. Their weights have whole tiles, unless all of them have one weight."""
    batches, shared_weight = int(2 ** rng.uniform(0, np.log2(_MAX_BATCHES))), bool(rng.random() < 0.4)
    fields = product.desc.model_dump() | {"batches": batches, "shared_weight": shared_weight}
    if rng.random() < 0.05:
        fields["batches"] = 0
    if rng.random() < 0.6:
        fields["m"] = -(-fields["m"] // 64) * 64
    fields["n"] = -(-fields["n"] // batches)
    desc = GemmSparse24Descriptor(**fields)
    names = {one.name for one in desc.operands()} | {"x"}
    shared = tuple(name for name in SHARED if name in names and rng.random() < 0.3)
    orders = tuple(str(rng.choice(ORDERS)) for _ in range(3))
    in_place = product.in_place and "c" not in shared
    return BatchedProduct(
        desc, product.preference, orders, shared, product.pads, product.offsets, in_place, product.data_seed
    )


def check_batched(
    problem: BatchedProduct, plan: GemmSparse24Plan, check_numbers: Callable[..., None]
) -> bool:
    """Each batch is right, and has the bits of its product."""
    desc = problem.desc
    layout: dict[str, Any] = {"shared": problem.shared, "in_place": problem.in_place}
    case = batched_case(
        plan,
        problem.data_seed,
        orders=problem.orders,
        units=problem.units,
        offsets=problem.offsets,
        **layout,
    )
    verdict = plan.can_implement(case.args)
    if not verdict:
        assert isinstance(verdict.error, (UnsupportedError, MisalignedOperandError)), repr(verdict.error)
        case = batched_case(plan, problem.data_seed, gap=16, **layout)
    found = case.run().copy()
    wanted = problem.preference.model_copy(update={"prefer_kernel": plan.kernel})
    one = GemmSparse24Plan.select(desc.one_batch, device=place_name(plan), preference=wanted)
    largest = [np.float32(0)]
    for batch, data in enumerate(case.data):
        single = case_of(one, data)
        known = reference(one, single.x, single.dense, single.bias, single.scale, single.c, single.scale_y)
        check_numbers(one, found[batch], *known)
        if plan.guarantee.deterministic and plan.kernel != "inflate_cublas":  # bits depend on its alignment
            assert same_bits(np.ascontiguousarray(found[batch]), np.ascontiguousarray(single.run())), (
                f"batch {batch} has other bits than its product"
            )
            largest += [single.largest()] if desc.amax else []
    if case.amax is not None and len(largest) > len(case.data):
        np.testing.assert_array_equal(case.amax.numpy()[0], np.max(largest), "amax of all batches")
    return True
