"""A family with a workspace, on the host: ``out = factor * x``, by way of the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from sparse24_plans import ElementKind, OpCategory, PrecisionGuarantee, Tier
from sparse24_plans.device.tensors import HOST, TensorView
from sparse24_plans.plan.descriptor import Descriptor
from sparse24_plans.plan.kernel import Choice, Kernel
from sparse24_plans.plan.kernel_table import KernelEntry
from sparse24_plans.plan.operands import Args, Operand, Role
from sparse24_plans.plan.plan import Plan

N, BYTES, ALIGNMENT = 16, 96, 32


class ToyDescriptor(Descriptor):
    n: int = Field(default=N, ge=0)
    factor: float = 2.0
    element: ElementKind = ElementKind.F32

    category: ClassVar = OpCategory.GEMM
    op_name: ClassVar[str] = "toy"

    def operands(self) -> tuple[Operand, ...]:
        x = Operand("x", Role.IN, (self.n,), self.element)
        return x, Operand("out", Role.OUT, (self.n,), self.element)


@dataclass(frozen=True, slots=True)
class ToyArgs(Args):
    x: Any
    out: Any


class ToyKernel(Kernel[ToyDescriptor]):
    details = "NumPy"
    workspace_size = BYTES
    workspace_alignment = ALIGNMENT

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.launchers = 0

    def launcher(self, views, workspace):
        self.launchers += 1
        desc = self.descriptor
        scratch = TensorView(workspace, (desc.n,), desc.element, HOST) if workspace else None

        def launch(stream: int) -> None:
            scratch.array()[...] = views["x"].array()
            np.multiply(scratch.array(), np.float32(desc.factor), out=views["out"].array())

        return launch


class ToyRow(KernelEntry):
    kernel_type = ToyKernel


def _promises(descriptor: Any) -> PrecisionGuarantee:
    flags = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "bit_stable_across_hardware")
    return PrecisionGuarantee(
        **dict.fromkeys(flags, True),
        math_precision="f32",
        accumulator="f32",
        nonfinite="propagates",
        subnormals="preserved",
        unit_roundoff=2.0**-24,
        terms_per_k=1,
    )


class ToyPlan(Plan):
    descriptor_type = ToyDescriptor
    table = (
        ToyRow(
            "toy",
            "host",
            Tier.HOST,
            _promises,
            (ElementKind.F32,),
            min_workspace=lambda descriptor: BYTES,
        ),
    )

    @classmethod
    def args_type(cls, descriptor: ToyDescriptor) -> type[Args]:
        return ToyArgs
