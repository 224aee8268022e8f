"""Batches of products in guarded memory, beside the products that each of them is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparse24_plans import (
    DgradSparse24Args,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    PackedWeight,
    TensorView,
)

from ..support import (
    GUARD,
    GUARD_BYTES,
    POISON,
    Case,
    Data,
    Guarded,
    case_of,
    place_name,
    place_of,
    random_data,
    scratch,
    synchronize,
    to_place,
    weight_of,
)

ORDERS = ("dense", "gaps", "interleaved", "reversed gaps")
"""How batches of matrices lie: one after the other; with gaps between lines and between batches; the first
lines of all batches before the second ones; or so with gaps."""
SHARED = ("x", "c", "bias", "scale_x", "scale_w")
"""Operands that all batches may have in common; the weight is shared by the descriptor."""


class Strided:
    """A tensor of any strides, poisoned, in memory whose other bytes are guards."""

    def __init__(
        self,
        shape: tuple[int, ...],
        element: ElementKind,
        device: int | str,
        strides: tuple[int, ...],
        offset: int = 0,
    ) -> None:
        size = element.itemsize
        at = np.zeros(shape, np.int64)
        for axis, (count, stride) in enumerate(zip(shape, strides, strict=True)):
            at += (np.arange(count) * stride).reshape([-1 if one == axis else 1 for one in range(len(shape))])
        self._at = at + offset
        start = GUARD_BYTES // size
        raw = np.full((int(self._at.max(initial=0)) + 1) * size + 2 * GUARD_BYTES, GUARD, np.uint8)
        self._elements = self._at + start
        self._inside = np.zeros(len(raw) // size, bool)
        self._inside[self._elements] = True
        raw[: len(self._inside) * size].reshape(-1, size)[self._inside] = POISON
        self._memory = to_place(raw, place_of(device))
        base = TensorView.of(self._memory)
        self.view = TensorView(
            base.address + GUARD_BYTES + offset * size,
            shape,
            element,
            base.device,
            strides=strides,
            owner=self._memory,
        )

    def fill(self, array: np.ndarray) -> Strided:
        raw = np.array(self._bytes())
        words = raw[: len(self._inside) * self.view.element.itemsize].view(self.view.element.bits_dtype)
        words[self._elements] = array.view(words.dtype)
        self._memory[...] = to_place(raw, self.view.device)
        return self

    def _bytes(self) -> np.ndarray:
        return self._memory if isinstance(self._memory, np.ndarray) else self._memory.get()

    def numpy(self) -> np.ndarray:
        """The tensor's contents, typed; checks the guards."""
        size, raw = self.view.element.itemsize, self._bytes()
        whole = raw[: len(self._inside) * size].reshape(-1, size)
        assert (whole[~self._inside] == GUARD).all(), "guard bytes were overwritten"
        return whole.view(self.view.element.dtype)[:, 0][self._elements]


@dataclass
class BatchedCase:
    """A batched product in guarded memory, and the operands of each batch."""

    plan: GemmSparse24Plan
    args: GemmSparse24Args | DgradSparse24Args
    result: Strided
    inputs: tuple[Strided, ...]
    data: tuple[Data, ...]
    workspace: Guarded | None
    amax: Strided | None = None

    def run(self, stream: Any = None) -> np.ndarray:
        self.plan.run(self.args, workspace=self.workspace and self.workspace.view, stream=stream)
        return self.fetch()

    def fetch(self) -> np.ndarray:
        synchronize(self.plan)
        for operand in self.inputs:
            operand.numpy()
        if self.workspace is not None:
            self.workspace.numpy()
        return self.result.numpy()

    def single(self, batch: int) -> Case:
        """The product that the batch is, by the same kernel."""
        one = type(self.plan).select(self.plan.descriptor.one_batch, device=place_name(self.plan))
        assert one.kernel == self.plan.kernel
        return case_of(one, self.data[batch])


def strides_of(shape: tuple[int, int, int], column: bool, order: str, unit: int) -> tuple[int, ...]:
    """Strides of [batches, rows, columns] in an order of ORDERS, where gaps are of ``unit`` elements."""
    batches, rows, columns = shape
    lines, width = (columns, rows) if column else (rows, columns)
    if order == "dense":
        line, batch = width, lines * width
    elif order == "gaps":
        line = width + unit
        batch = lines * line + 3 * unit
    else:
        batch = width + (2 * unit if order == "reversed gaps" else 0)
        line = batches * batch + (unit if order == "reversed gaps" else 0)
    return (batch, 1, line) if column else (batch, line, 1)


def batched_case(
    plan: GemmSparse24Plan,
    seed: Any = 0,
    *,
    orders: tuple[str, str, str] = ("dense", "dense", "dense"),
    shared: tuple[str, ...] = (),
    units: tuple[int, int, int] = (16, 16, 16),
    offsets: tuple[int, int, int] = (0, 0, 0),
    in_place: bool = False,
    gap: int = 3,
) -> BatchedCase:
    """``orders``, ``units`` of gaps and ``offsets`` in elements are of x, y and c. ``in_place``: c is y.

    ``gap``: elements between the vectors of one batch and the next.
    """
    desc, device = plan.descriptor, place_name(plan)
    assert desc.batches is not None
    rng = np.random.default_rng(seed)
    data = [random_data(rng, desc.one_batch) for _ in range(max(desc.batches, 1))]
    common = {name: getattr(data[0], name) for name in shared}
    common |= {"dense": data[0].dense} if desc.shared_weight else {}
    common |= {"scale_y": data[0].scale_y}
    data = [replace(one, **common) for one in data]
    dense = data[0].dense if desc.shared_weight else np.concatenate([one.dense for one in data])
    weight = weight_of(dense[: desc.weight_rows], desc).to(device)
    forward, batches = desc.op == "forward", desc.batches
    x, y, c = (
        _matrices(desc, rows, element, device, order, shape, unit, offset, name in shared)
        for name, rows, element, order, shape, unit, offset in zip(
            ("x", "y", "c"),
            (desc.x_order, desc.y_order, desc.y_order),
            (desc.x_element, desc.out_element, desc.c_element),
            orders,
            ((desc.n, desc.reduction), (desc.n, desc.outputs), (desc.n, desc.outputs)),
            units,
            offsets,
            strict=True,
        )
    )
    inputs = {"x": x.fill(_stacked(data, "x", batches))}
    if desc.has_c:
        target = y if in_place else c
        inputs["c"] = target.fill(_stacked(data, "c", batches))
    for name in ("bias", "scale_x", "scale_w"):
        if getattr(data[0], name) is not None:
            values = _stacked(data, name, batches)
            element = desc.bias_element if name == "bias" else ElementKind.F32
            strides = (0 if name in shared else values.shape[1] + gap, 1)
            inputs[name] = Strided(values.shape, element, device, strides).fill(values)
    for name in ("scale_y", "amax"):  # all batches have one
        values = getattr(data[0], name)
        if values is not None:
            inputs[name] = Strided((1,), ElementKind.F32, device, (1,)).fill(values)
    packed: PackedWeight = plan.pack(weight)
    views = {name: operand.view for name, operand in inputs.items()}
    args: GemmSparse24Args | DgradSparse24Args
    if forward:
        args = GemmSparse24Args(packed, y=y.view, **views)
    else:
        args = DgradSparse24Args(packed, x.view, y.view)
    space = scratch(plan.workspace_size(), device)
    return BatchedCase(
        plan, args, y, tuple(inputs.values()), tuple(data[:batches]), space, inputs.get("amax")
    )


def _stacked(data: list[Data], name: str, batches: int) -> np.ndarray:
    return np.stack([getattr(one, name) for one in data])[:batches]


def _matrices(
    desc: GemmSparse24Descriptor,
    lines: str,
    element: ElementKind,
    device: int | str,
    order: str,
    shape: tuple[int, int],
    unit: int,
    offset: int,
    shared: bool,
) -> Strided:
    whole = (desc.batch_count, *shape)
    strides = strides_of(whole, lines == "column", order, unit)
    if shared:
        strides = (0, *strides_of((1, *shape), lines == "column", order, unit)[1:])
    return Strided(whole, element, device, strides if math.prod(whole) else (1, 1, 1), offset)
