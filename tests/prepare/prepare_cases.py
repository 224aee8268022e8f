"""Hostile matrices, and plans of preparing weights with operands in guarded memory."""

from __future__ import annotations

import itertools

import numpy as np

from sparse24_plans import (
    DequantizeSparse24Descriptor,
    ElementKind,
    MaskSparse24Descriptor,
    PackSparse24Descriptor,
    PruneQuantizeSparse24Descriptor,
    PruneSparse24Descriptor,
    QuantizeSparse24Descriptor,
    TilePruneSparse24Descriptor,
    TileRule,
)
from sparse24_plans.plan.plan import Plan
from sparse24_plans.prepare.descriptor import PrepareDescriptor

from ..plan import cases
from ..plan.cases import PlanCase, equal, matrix, parts_of, random_inputs

__all__ = [
    "ELEMENTS",
    "MOODS",
    "ON_HOST_ALONE",
    "PLANS",
    "PrepareCase",
    "equal",
    "kernel_descriptors",
    "matrix",
    "parts_of",
    "run",
]
PLANS: dict[type[PrepareDescriptor], type[Plan]] = {
    kind: plan for kind, plan in cases.PLANS.items() if issubclass(kind, PrepareDescriptor)
}
ON_HOST_ALONE = (PruneQuantizeSparse24Descriptor, DequantizeSparse24Descriptor)
"""Descriptors of quantized weights, which no kernel of a GPU serves. They have types of their own."""
ELEMENTS = tuple(ElementKind(name) for name in ("f32", "f16", "bf16", "s8", "u8", "fp8_e4m3", "fp8_e5m2"))
OTHERS = tuple(one for one in ELEMENTS if one not in (ElementKind.BF16, ElementKind.F32))
MOODS = ("normal", "any_bits", "ties", "sparse")


def kernel_descriptors(turn: int | None) -> list[PrepareDescriptor]:
    """One descriptor a kernel variant: every element and rule, or the heaviest and, in turn, one other."""
    few = turn is not None
    other = OTHERS[(turn or 0) % len(OTHERS)]
    made: list[PrepareDescriptor] = []
    for element in ("bf16", "f32", other) if few else ELEMENTS:
        fields = {"m": 64, "k": 128, "element": element}
        made += [kind(**fields) for kind in PLANS if kind not in (*ON_HOST_ALONE, QuantizeSparse24Descriptor)]
        made += [
            PackSparse24Descriptor(**fields, direction="unpack"),
            MaskSparse24Descriptor(**fields, layout="tiles"),
        ]
        rules = [*TileRule][-1:] if element == other and few else () if few else TileRule
        made += [TilePruneSparse24Descriptor(**fields, rule=rule) for rule in rules]
    made += [
        PruneSparse24Descriptor(m=64, k=128, element="bf16", scores=scores)
        for scores in ("f32", "f16", "bf16")
    ]
    for element in ("bf16",) if few else ("bf16", "f16", "f32"):
        for out, static in itertools.product(("fp8_e4m3", "s8"), (False, True)):
            fields = {"m": 64, "element": element, "out_element": out, "static_scale": static}
            made += [QuantizeSparse24Descriptor(k=k, **fields) for k in (128, 4096, 14336)]
    return made


class PrepareCase(PlanCase):
    """A plan of a descriptor, and its operands.

    ``inputs``: bits of what is read, by the operand's name. ``without``: optional results to leave out.
    """

    def __init__(
        self,
        desc: PrepareDescriptor,
        device: int | str,
        inputs: dict[str, np.ndarray] | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        plan = PLANS[type(desc)].select(desc, device=device)
        super().__init__(plan, random_inputs(desc) if inputs is None else inputs, without)


def run(
    desc: PrepareDescriptor, device: int | str, without: tuple[str, ...] = (), **inputs: np.ndarray
) -> dict[str, np.ndarray]:
    return PrepareCase(desc, device, inputs, without).run()
