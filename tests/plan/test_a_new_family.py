"""A new family needs a descriptor, arguments, a table and kernels. The base gives everything else.

The toy: ``out[n] = factor * x[n]``, on the host, by two kernels of which one promises more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import Field

import sparse24_plans as s
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.guarantee import PrecisionGuarantee
from sparse24_plans.plan.kernel import Kernel
from sparse24_plans.plan.kernel_table import KernelEntry
from sparse24_plans.plan.operands import Args, Operand, Role
from sparse24_plans.plan.plan import Plan

# The family ---------------------------------------------------------------------------------------


class ScaleDescriptor(Descriptor):
    n: int = Field(ge=0)
    factor: float = 1.0

    category: ClassVar = s.OpCategory.GEMM
    op_name: ClassVar[str] = "scale"

    def operands(self) -> tuple[Operand, ...]:
        x = Operand("x", Role.IN, (self.n,), self.element)
        return x, Operand("out", Role.OUT, (self.n,), self.element, may_be="x")


@dataclass(frozen=True, slots=True)
class ScaleArgs(Args):
    x: Any
    out: Any


class ScaleKernel(Kernel[ScaleDescriptor]):
    details = "NumPy"

    def launcher(self, views, workspace):
        x, out, factor = views["x"], views["out"], np.float32(self.descriptor.factor)
        return lambda stream: np.multiply(x.array(), factor, out=out.array())


class ScaleRow(KernelEntry):
    kernel_type = ScaleKernel


def promises(**more: Any):
    fields = dict.fromkeys(("batch_invariant", "bit_stable_across_hardware"), False)
    fields |= dict.fromkeys(("deterministic", "bit_stable_on_same_hardware"), True)
    fields |= {"math_precision": "f32", "accumulator": "f32", "nonfinite": "propagates", **more}
    return lambda desc: PrecisionGuarantee(
        subnormals="preserved", unit_roundoff=2.0**-24, terms_per_k=1, **fields
    )


class ScalePlan(Plan):
    descriptor_type = ScaleDescriptor
    table = (
        ScaleRow("fast", "host", s.Tier.HOST, promises(), (s.ElementKind.F32,)),
        ScaleRow("sure", "host", s.Tier.HOST, promises(batch_invariant=True), (s.ElementKind.F32,)),
    )

    @classmethod
    def args_type(cls, descriptor: ScaleDescriptor) -> type[Args]:
        return ScaleArgs


# Behaviour from the base --------------------------------------------------------------------------

DESC = ScaleDescriptor(n=3, element="f32", factor=2.0)
SURE = s.PlanPreference(require={"batch_invariant": True})


def select(**options: Any) -> ScalePlan:
    return ScalePlan.select(DESC, device="host", **options)


def args(**change: Any) -> ScaleArgs:
    return ScaleArgs(**{"x": np.ones(3, np.float32), "out": np.full(3, np.nan, np.float32), **change})


def test_json_and_hash():
    assert ScaleDescriptor.model_validate_json(DESC.model_dump_json()) == DESC
    assert {DESC: 1}[ScaleDescriptor(n=3, element="f32", factor=2.0)] == 1
    with pytest.raises(s.InvalidProblemError, match="ScaleDescriptor: n"):
        ScaleDescriptor(n=-1, element="f32")


def test_selection_by_promise_cached_and_explained():
    assert select() is select()
    assert select().explain().chosen == "fast"
    assert select(preference=SURE).explain().chosen == "sure"
    assert select(preference=SURE).guarantee.batch_invariant
    assert "fast (host): does not guarantee batch_invariant" in str(s.explain(DESC, preference=SURE))
    assert s.explain(DESC, device="h200").chosen is None
    with pytest.raises(s.UnsupportedError, match=r"fast.*: serves elements f32"):
        ScalePlan.select(DESC.model_copy(update={"element": "f16"}), device="host")


def test_the_sku_names_the_new_family():
    sku = select().sku
    assert (sku.op, sku.backend, sku.element, sku.aux_element) == ("scale", "host", "f32", "f32")


def test_run_and_bind_write_the_result():
    given = args()
    select().run(given)
    np.testing.assert_array_equal(given.out, [2, 2, 2])
    given.out.fill(np.nan)
    select().bind(given).launch()
    np.testing.assert_array_equal(given.out, [2, 2, 2])
    select().run(args(out=given.x, x=given.x))
    np.testing.assert_array_equal(given.x, [2, 2, 2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.ones(4, np.float32)}, r"x: expected shape \[3\], got \[4\]"),
        ({"out": np.ones(3, np.float16)}, "out: expected element f32, got f16"),
        ({"out": None}, "out: expected a tensor"),
        ({"x": np.ones(6, np.float32)[::2]}, "x: expected contiguous memory"),
    ],
)
def test_bad_operands_are_typed_errors_before_anything_is_written(change, words):
    given = args(**change)
    verdict = select().can_implement(given)
    assert not verdict
    for attempt in (select().run, select().bind):
        with pytest.raises(s.InvalidProblemError, match=words):
            attempt(given)
    assert given.out is None or "out" in change or np.isnan(given.out).all()
    with pytest.raises(s.InvalidProblemError, match="args: expected ScaleArgs"):
        select().run(object())


def test_overlaps_and_workspaces():
    memory = np.ones(4, np.float32)
    with pytest.raises(s.InvalidProblemError, match="out: expected memory apart from x"):
        select().run(args(x=memory[:3], out=memory[1:]))
    assert (select().workspace_size(), select().workspace_alignment) == (0, 1)
    select().run(args(), workspace=np.empty(8, np.uint8))
