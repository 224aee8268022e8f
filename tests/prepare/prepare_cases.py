"""What the tests of prepare.py share: hostile matrices, and plans with every operand in guarded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sparse24_plans import (
    CompressSparse24Args,
    CompressSparse24Descriptor,
    CompressSparse24Plan,
    DecompressSparse24Args,
    DecompressSparse24Descriptor,
    DecompressSparse24Plan,
    ElementKind,
    MaskSparse24Args,
    MaskSparse24Descriptor,
    MaskSparse24Plan,
    PackedWeight,
    PackSparse24Args,
    PackSparse24Descriptor,
    PackSparse24Plan,
    PruneCompressSparse24Args,
    PruneCompressSparse24Descriptor,
    PruneCompressSparse24Plan,
    PruneSparse24Args,
    PruneSparse24Descriptor,
    PruneSparse24Plan,
    Sparse24Weight,
    TensorView,
    TilePruneSparse24Args,
    TilePruneSparse24Descriptor,
    TilePruneSparse24Plan,
    TileRule,
    UnpackSparse24Args,
)
from sparse24_plans.plan.operands import Operand, Role
from sparse24_plans.prepare.descriptor import PrepareDescriptor
from sparse24_plans.vocab import CANONICAL_LAYOUT
from sparse24_plans.weights.layouts import layout_of

from ..support import Guarded, synchronize

PLANS: dict[type, tuple[type, type]] = {
    PruneSparse24Descriptor: (PruneSparse24Plan, PruneSparse24Args),
    CompressSparse24Descriptor: (CompressSparse24Plan, CompressSparse24Args),
    PruneCompressSparse24Descriptor: (PruneCompressSparse24Plan, PruneCompressSparse24Args),
    DecompressSparse24Descriptor: (DecompressSparse24Plan, DecompressSparse24Args),
    PackSparse24Descriptor: (PackSparse24Plan, PackSparse24Args),
    TilePruneSparse24Descriptor: (TilePruneSparse24Plan, TilePruneSparse24Args),
    MaskSparse24Descriptor: (MaskSparse24Plan, MaskSparse24Args),
}
ELEMENTS = tuple(ElementKind(name) for name in ("f32", "f16", "bf16", "s8", "u8", "fp8_e4m3", "fp8_e5m2"))
MOODS = ("normal", "any_bits", "ties", "sparse")


def matrix(rng: np.random.Generator, shape: tuple[int, ...], element: ElementKind, mood: str) -> np.ndarray:
    """Bits of elements: random numbers; any bits; a few distinct ones, with -0 and NaN; or mostly zeros."""
    size = 8 * element.itemsize
    if mood == "any_bits":
        return rng.integers(0, 2**size, shape, dtype=np.uint64).astype(element.bits_dtype)
    if mood == "ties":
        sign = 1 << size - 1
        few = np.array([0, 1, 2, sign, sign | 1, sign - 1, 2 * sign - 1], np.uint64)
        return rng.choice(few, shape).astype(element.bits_dtype)
    values = rng.standard_normal(shape).astype(np.float32)
    if element in (ElementKind.S8, ElementKind.U8):
        values = np.clip(np.rint(values * 40) + (128 if element is ElementKind.U8 else 0), -128, 255)
        values = np.clip(values, -128, 127) if element is ElementKind.S8 else np.clip(values, 0, 255)
    bits = values.astype(element.dtype).view(element.bits_dtype)
    return np.where(rng.random(shape) < 0.3, bits, 0).astype(bits.dtype) if mood == "sparse" else bits


def kernel_descriptors(*, few: bool) -> list[PrepareDescriptor]:
    """One descriptor a kernel variant: every element and rule, or some of the heaviest."""
    made: list[PrepareDescriptor] = []
    for element in ("bf16", "f32") if few else ELEMENTS:
        fields = {"m": 64, "k": 128, "element": element}
        made += [kind(**fields) for kind in PLANS]
        made += [
            PackSparse24Descriptor(**fields, direction="unpack"),
            MaskSparse24Descriptor(**fields, layout="tiles"),
        ]
        if not few:
            made += [TilePruneSparse24Descriptor(**fields, rule=rule) for rule in TileRule]
    made += [
        PruneSparse24Descriptor(m=64, k=128, element="bf16", scores=scores)
        for scores in ("f32", "f16", "bf16")
    ]
    return made


def parts_of(operand: Operand) -> list[Operand]:
    """The operand itself; of a weight the buffers that it consists of."""
    if operand.role is not Role.WEIGHT:
        return [operand]
    m, k = operand.shape
    if operand.layout == CANONICAL_LAYOUT:
        parts = {"values": ((m, k // 2), operand.element), "metadata": ((m, k // 8), ElementKind.U16)}
    else:
        parts = {"packed": (layout_of(operand.element).packed_shape(m, k), ElementKind.U8)}
    return [
        replace(operand, name=name, shape=shape, element=element) for name, (shape, element) in parts.items()
    ]


class PrepareCase:
    """A plan and its operands: inputs as given, results poisoned, guard bytes round each.

    ``inputs``: bits of what is read, by the operand's name. ``without``: optional results to leave out.
    """

    def __init__(
        self,
        desc: PrepareDescriptor,
        device: int | str,
        inputs: dict[str, np.ndarray],
        without: tuple[str, ...] = (),
    ) -> None:
        kind, args = PLANS[type(desc)]
        self.desc, self.plan = desc, kind.select(desc, device=device)
        self.guarded: dict[str, Guarded] = {}
        self.written = []
        given: dict[str, Any] = {}
        tensors = [part for operand in desc.operands() for part in parts_of(operand)]
        for operand in tensors:
            if operand.name in without:
                continue
            memory = Guarded((int(np.prod(operand.shape)),), operand.element, device)
            if operand.role is Role.OUT:
                self.written.append(operand.name)
            else:
                memory.fill(np.ascontiguousarray(inputs[operand.name]).reshape(-1))
            self.guarded[operand.name] = memory
            flat = memory.view
            view = TensorView(flat.address, operand.shape, flat.element, flat.device, owner=flat.owner)
            given.setdefault(operand.argument, []).append(view)
        if isinstance(desc, PackSparse24Descriptor) and desc.direction == "unpack":
            args, home = UnpackSparse24Args, given["packed"][0].device
            given["packed"] = [
                PackedWeight(desc.layout_id, desc.m, desc.k, desc.element, home, tuple(given["packed"]))
            ]
        if "weight" in given:
            given["weight"] = [Sparse24Weight(*given["weight"], element=desc.element, validate=False)]
        self.args = args(**{name: views[0] for name, views in given.items()})
        self.shapes = {operand.name: operand.shape for operand in tensors}

    def run(self, stream: Any = None) -> dict[str, np.ndarray]:
        self.plan.run(self.args, stream=stream)
        return self.fetch()

    def fetch(self) -> dict[str, np.ndarray]:
        """Bits of the results, by name; checks every guard."""
        synchronize(self.plan)
        contents = {name: memory.numpy() for name, memory in self.guarded.items()}
        return {
            name: contents[name].view(f"u{contents[name].itemsize}").reshape(self.shapes[name])
            for name in self.written
        }

    def poison(self) -> None:
        for name in self.written:
            bits = self.guarded[name].view.bits()
            bits[...] = bits.dtype.type(2 ** (8 * bits.itemsize) - 1)

    def untouched(self) -> bool:
        return all(self.guarded[name].untouched() for name in self.written)


def run(
    desc: PrepareDescriptor, device: int | str, without: tuple[str, ...] = (), **inputs: np.ndarray
) -> dict[str, np.ndarray]:
    return PrepareCase(desc, device, inputs, without).run()


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
