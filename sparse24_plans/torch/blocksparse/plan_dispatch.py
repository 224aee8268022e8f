"""What the ops of block-sparse matrices do on a device: one plan a form of operands, then addresses alone.

A layout comes to an op as ``layout``, its look-up tables in one int32 tensor, and ``shape``, the five
integers of its BlockSparseShape. The plan is selected for the shape; which blocks are kept is read later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...blocksparse.layout import BlockSparseLayout
from ...blocksparse.lookup_tables import BlockSparseTables
from ...blocksparse.plan import (
    BlockSparseAttentionPlan,
    BlockSparseConv2dPlan,
    BlockSparseMatmulPlan,
    BlockSparseSoftmaxPlan,
)
from ...blocksparse.shape import BlockSparseShape
from ...errors import InvalidProblemError, MisalignedOperandError, UnsupportedError
from ...plan.operands import Role
from ...vocab import ElementKind
from ..elements import DTYPE_OF, allocation, current_stream, plan_device
from ..gemm_dispatch import MOST_FORMS, preference_of

PlanType = Any  # a class of plans; mypy takes none for hashable
Operands = dict[str, Tensor]

_SIZES: dict[PlanType, tuple[str, ...]] = {
    BlockSparseMatmulPlan: ("batch", "n"),
    BlockSparseSoftmaxPlan: ("batch",),
    BlockSparseAttentionPlan: ("batch",),
    BlockSparseConv2dPlan: ("batch",),
}
"""Fields of a descriptor that may be symbols while a graph is traced."""


class Wanted(NamedTuple):
    """An operand as a descriptor has it."""

    name: str
    role: Role
    shape: tuple[int | str, ...]
    """Of the sizes that a graph may leave open, the names."""
    element: ElementKind

    def sized(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)


class Problem(NamedTuple):
    """What is to be computed: a plan's class, and the fields of its descriptor."""

    plan: PlanType
    shape: tuple[int, ...]
    sizes: dict[str, Any]
    """Integers, or symbols for them."""
    fields: dict[str, Any]
    """All others."""
    preference: str

    def wanted(self) -> tuple[Wanted, ...]:
        """Raises InvalidProblemError naming the field that can't be."""
        return _wanted(self.plan, self.shape, **self.fields)


@lru_cache(maxsize=MOST_FORMS)
def shape_of(numbers: tuple[int, ...]) -> BlockSparseShape:
    """Raises InvalidProblemError for what is no shape of a layout."""
    names = tuple(BlockSparseShape.model_fields)
    if len(numbers) != len(names):
        raise InvalidProblemError(f"shape: expected {', '.join(names)}, got {list(numbers)}")
    return BlockSparseShape(**dict(zip(names, numbers, strict=True)))


def numbers_of(shape: BlockSparseShape) -> tuple[int, ...]:
    """A shape as the ops take it."""
    return tuple(getattr(shape, name) for name in BlockSparseShape.model_fields)


def _descriptor(plan: PlanType, shape: tuple[int, ...], **fields: Any) -> Any:
    given = {name: value for name, value in fields.items() if value is not None}
    return plan.descriptor_type(layout=shape_of(shape), **given)


@lru_cache(maxsize=MOST_FORMS)
def _wanted(plan: PlanType, shape: tuple[int, ...], **fields: Any) -> tuple[Wanted, ...]:
    """Where an open size stands in a shape is seen by changing it."""
    ones = dict.fromkeys(_SIZES[plan], 1)
    base = _descriptor(plan, shape, **fields, **ones).operands()
    open_: list[list[int | str]] = [list(one.shape) for one in base]
    for size in ones:
        other = _descriptor(plan, shape, **fields, **(ones | {size: 2})).operands()
        for at, operand in enumerate(other):
            for axis, count in enumerate(operand.shape):
                if count != base[at].shape[axis]:
                    open_[at][axis] = size
    return tuple(
        Wanted(one.name, one.role, tuple(sizes), one.element) for one, sizes in zip(base, open_, strict=True)
    )


# Checks -------------------------------------------------------------------------------------------


def check_dims(tensor: Tensor, argument: str, dims: str) -> None:
    """Raises InvalidProblemError where the tensor hasn't these dimensions, ``Z, H, rows, cols``, say."""
    if tensor.dim() != dims.count(",") + 1:
        raise InvalidProblemError(f"{argument}: expected [{dims}], got {list(tensor.shape)}")


def check(problem: Problem, operands: Operands, layout: Tensor) -> None:
    """Raise InvalidProblemError naming the operand that isn't as the problem has it. Looks at no memory."""
    known = {one.name for one in problem.wanted() if one.role is Role.IN}
    for name in operands:
        if name not in known:
            raise InvalidProblemError(f"{name}: expected None, as the other arguments have it, got a tensor")
    for one in problem.wanted():
        if one.role is Role.OUT:
            continue
        tensor = layout if one.role is Role.TABLES else operands.get(one.name)
        shape, dtype = one.sized(problem.sizes), DTYPE_OF[one.element]
        if tensor is None:
            raise InvalidProblemError(f"{one.name}: expected {dtype} {list(shape)}, got None")
        if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
            raise InvalidProblemError(f"{one.name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype:
            raise InvalidProblemError(f"{one.name}: expected {dtype}, got {tensor.dtype}")
        if tensor.device != layout.device:
            raise InvalidProblemError(
                f"{one.name}: expected a tensor on {layout.device}, as the layout, got {tensor.device}"
            )
    if not layout.is_contiguous():
        raise InvalidProblemError(f"layout: expected a contiguous tensor, got strides {layout.stride()}")


def fake_results(problem: Problem, operands: Operands, layout: Tensor) -> tuple[Tensor, ...]:
    """The results' shapes, dtypes and strides, without values; sizes may be symbols."""
    preference_of(problem.preference)
    check(problem, operands, layout)
    return tuple(
        layout.new_empty(one.sized(problem.sizes), dtype=DTYPE_OF[one.element])
        for one in problem.wanted()
        if one.role is Role.OUT
    )


# Running ------------------------------------------------------------------------------------------


class _Form:
    """A checked form of operands, with the plan that serves it."""

    def __init__(self, problem: Problem, operands: Operands, layout: Tensor) -> None:
        check(problem, operands, layout)
        desc = _descriptor(problem.plan, problem.shape, **problem.sizes, **problem.fields)
        plan: Any = problem.plan.select(
            desc, preference=preference_of(problem.preference), device=plan_device(layout)
        )
        self._results = {
            one.name: allocation(one.shape, DTYPE_OF[one.element], layout.device)
            for one in desc.operands()
            if one.role is Role.OUT
        }
        self._caller = _caller(plan, operands | {name: make() for name, make in self._results.items()})
        self._order = self._caller.operands
        self._alignments = {name: self._caller.alignment(name) for name in operands}
        self._workspace, self._device = plan.workspace_size(), layout.device
        self._ordinal = layout.device.index if layout.is_cuda else -1

    def run(self, operands: Operands, layout: Tensor) -> tuple[Tensor, ...]:
        at = {"layout": layout.data_ptr()}
        kept = []  # alive until the launch
        for name, tensor in operands.items():
            if tensor.data_ptr() % self._alignments[name]:
                tensor = tensor.clone()
                kept.append(tensor)
            at[name] = tensor.data_ptr()
        results = {name: make() for name, make in self._results.items()}
        for name, result in results.items():
            at[name] = result.data_ptr()
        space = 0
        if self._workspace:
            scratch = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
            space = scratch.data_ptr()
        places = tuple(at[name] for name in self._order)
        self._caller.launch(places, space, current_stream(self._ordinal))
        return tuple(results.values())


def _caller(plan: Any, operands: Operands) -> Any:
    """Everything but addresses is checked here, on the first call's operands."""
    kind, tables = plan.args_type(plan.descriptor), plan.pack(_any_layout(plan.descriptor.layout))
    try:
        return plan.caller(kind(layout=tables, **operands))
    except MisalignedOperandError:  # they are copied at each call; PyTorch's allocator aligns
        aligned = {name: tensor.clone() for name, tensor in operands.items()}
        return plan.caller(kind(layout=tables, **aligned))


def _any_layout(shape: BlockSparseShape) -> BlockSparseLayout:
    """A layout of the shape. Callers read the tables that lie where they are told, not this one's."""
    sides = shape.heads, shape.block_rows, shape.block_cols
    kept = np.arange(shape.heads * shape.block_rows * shape.block_cols) < shape.blocks
    return BlockSparseLayout(kept.reshape(sides), shape.block)


_forms: dict[tuple[Any, ...], _Form | str] = {}
"""Or why there is none."""


def run(problem: Problem, operands: Operands, layout: Tensor) -> tuple[Tensor, ...]:
    """The results, on the device of the operands, which are copied where they aren't contiguous.

    Raises InvalidProblemError, MisalignedOperandError, UnsupportedError or BackendUnavailableError.
    """
    operands = {name: tensor.contiguous() for name, tensor in operands.items()}
    key = (
        *problem[:2],
        *problem.sizes.values(),
        *problem.fields.values(),
        problem.preference,
        *((name, t.shape, t.dtype, t.get_device()) for name, t in operands.items()),
        (layout.shape, layout.dtype, layout.stride(), layout.get_device()),
    )
    form = _forms.get(key)
    if form is None:
        form = _form(problem, operands, layout)
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        _forms[key] = form
    if isinstance(form, str):
        raise UnsupportedError(form)
    return form.run(operands, layout)


def _form(problem: Problem, operands: Operands, layout: Tensor) -> _Form | str:
    try:
        return _Form(problem, operands, layout)
    except UnsupportedError as error:  # kept, since another way may stand in for it at every call
        return str(error)


# Tables -------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _places(shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Where in the tables of such layouts each one begins and ends, by name."""
    lookup = BlockSparseTables(_any_layout(shape_of(shape))).lookup
    found, at = {}, 0
    for name, memory in lookup._asdict().items():
        found[name] = at, at + memory.size
        at += memory.size
    return found


def table(layout: Tensor, shape: Sequence[int], name: str) -> Tensor:
    """The part of the tables that has this name in BlockSparseTables' look-up."""
    begin, end = _places(tuple(shape))[name]
    return layout[begin:end]
