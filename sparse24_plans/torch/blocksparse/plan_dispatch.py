"""Calls of block-sparse ops to plans, through the cache of all ops (plan_cache.py).

An op takes a layout as ``layout``, the look-up tables in one int32 tensor, and ``shape``, the five integers
of a BlockSparseShape. A plan is selected for the shape. The kernel reads from the tables which blocks are
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...blocksparse.layout import BlockSparseLayout
from ...blocksparse.lookup_tables import BlockSparseTables
from ...blocksparse.shape import BlockSparseShape
from ...errors import InvalidProblemError, MisalignedOperandError, UnsupportedError
from ...plan.operands import Role
from ...vocab import ElementKind
from ..elements import DTYPE_OF, allocation, plan_device
from ..plan_cache import MAX_FORMS, CheckedCall, Refusal, descriptor, plans, preference_of

PlanType = Any  # a class of plans; mypy takes none for hashable
Operands = Mapping[str, Tensor | None]


class Wanted(NamedTuple):
    """An operand that a descriptor asks for."""

    name: str
    role: Role
    shape: tuple[int | str, ...]
    """Integers, and the names of sizes that a graph may leave open."""
    element: ElementKind

    def sized(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)


class Problem(NamedTuple):
    """A problem as an op states it, and its operands."""

    plan: PlanType
    shape: tuple[int, ...]
    """The integers of the layout's shape."""
    sizes: dict[str, Any]
    """The descriptor's fields that may be symbols while a graph is traced: integers, or symbols."""
    fields: dict[str, Any]
    """The descriptor's other fields."""
    preference: str
    operands: Operands
    """The given tensors. None stands for an optional operand that is absent."""
    layout: Tensor

    def wanted(self) -> tuple[Wanted, ...]:
        """All operands. Raises InvalidProblemError naming the field that is wrong."""
        return _wanted(self.plan, self.shape, tuple(self.sizes), **self.fields)


@lru_cache(maxsize=MAX_FORMS)
def shape_of(numbers: tuple[int, ...]) -> BlockSparseShape:
    """The shape of these integers. Raises InvalidProblemError if no layout can have it."""
    names = tuple(BlockSparseShape.model_fields)
    if len(numbers) != len(names):
        raise InvalidProblemError(f"shape: expected {', '.join(names)}, got {list(numbers)}")
    return BlockSparseShape(**dict(zip(names, numbers, strict=True)))


def numbers_of(shape: BlockSparseShape) -> tuple[int, ...]:
    """The integers of a shape, which ops take for it."""
    return tuple(getattr(shape, name) for name in BlockSparseShape.model_fields)


@lru_cache(maxsize=MAX_FORMS)
def _wanted(
    plan: PlanType, shape: tuple[int, ...], sizes: tuple[str, ...], **fields: Any
) -> tuple[Wanted, ...]:
    """The operands for all values of ``sizes``. A dimension that changes with one of them gets its name."""
    ones = dict.fromkeys(sizes, 1)
    base = descriptor(plan, layout=shape_of(shape), **fields, **ones).operands()
    open_: list[list[int | str]] = [list(one.shape) for one in base]
    for size in ones:
        other = descriptor(plan, layout=shape_of(shape), **fields, **(ones | {size: 2})).operands()
        for at, operand in enumerate(other):
            for axis, count in enumerate(operand.shape):
                if count != base[at].shape[axis]:
                    open_[at][axis] = size
    return tuple(
        Wanted(one.name, one.role, tuple(dims), one.element) for one, dims in zip(base, open_, strict=True)
    )


# Checks -------------------------------------------------------------------------------------------


def check_dims(tensor: Tensor, argument: str, dims: str) -> None:
    """Raise InvalidProblemError if the tensor has another number of dimensions than "Z, H, rows, cols"."""
    if tensor.dim() != dims.count(",") + 1:
        raise InvalidProblemError(f"{argument}: expected [{dims}], got {list(tensor.shape)}")


def check(problem: Problem) -> None:
    """Raise InvalidProblemError naming an operand that the problem doesn't allow. Reads no memory."""
    layout, operands = problem.layout, problem.operands
    known = {one.name for one in problem.wanted() if one.role is Role.IN}
    for name, given in operands.items():
        if name not in known and given is not None:
            raise InvalidProblemError(f"{name}: expected None beside the other arguments, got a tensor")
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
                f"{one.name}: expected a tensor on {layout.device}, as the layout, got {tensor.device}; "
                "take layout.tables_on(device)"
            )
    if not layout.is_contiguous():
        raise InvalidProblemError(f"layout: expected a contiguous tensor, got strides {layout.stride()}")


def fake_results(problem: Problem) -> tuple[Tensor, ...]:
    """The results' shapes, dtypes and strides, without values; sizes may be symbols."""
    preference_of(problem.preference)
    check(problem)
    return tuple(
        problem.layout.new_empty(one.sized(problem.sizes), dtype=DTYPE_OF[one.element])
        for one in problem.wanted()
        if one.role is Role.OUT
    )


# Running ------------------------------------------------------------------------------------------


class _CheckedProblem(CheckedCall):
    """The plan of one form of a problem's operands."""

    def __init__(self, problem: Problem, operands: dict[str, Tensor]) -> None:
        check(problem)
        layout = problem.layout
        desc = descriptor(problem.plan, layout=shape_of(problem.shape), **problem.sizes, **problem.fields)
        plan: Any = problem.plan.select(
            desc, preference=preference_of(problem.preference), device=plan_device(layout)
        )
        self._results = {
            one.name: allocation(one.shape, DTYPE_OF[one.element], layout.device)
            for one in desc.operands()
            if one.role is Role.OUT
        }
        made = {name: make() for name, make in self._results.items()}
        super().__init__(plan, _caller(plan, operands | made), layout.device)
        self._order = self._caller.operands
        self._alignments = {name: self._caller.alignment(name) for name in operands}

    def run(self, operands: dict[str, Tensor], layout: Tensor) -> tuple[Tensor, ...]:
        at = {"layout": layout.data_ptr()}
        kept = []  # copies that must live until the launch
        for name, tensor in operands.items():
            if tensor.data_ptr() % self._alignments[name]:
                tensor = tensor.clone()
                kept.append(tensor)
            at[name] = tensor.data_ptr()
        results = {name: make() for name, make in self._results.items()}
        for name, result in results.items():
            at[name] = result.data_ptr()
        self._launch(tuple(at[name] for name in self._order))
        return tuple(results.values())


def _caller(plan: Any, operands: dict[str, Tensor]) -> Any:
    """The plan's caller, for which the first call's operands are checked in full."""
    kind, tables = plan.args_type(plan.descriptor), plan.pack(_any_layout(plan.descriptor.layout))
    try:
        return plan.caller(kind(layout=tables, **operands))
    except MisalignedOperandError:  # they are copied at each call; PyTorch's allocator aligns
        aligned = {name: tensor.clone() for name, tensor in operands.items()}
        return plan.caller(kind(layout=tables, **aligned))


def _any_layout(shape: BlockSparseShape) -> BlockSparseLayout:
    """Some layout of the shape. A launch gets the address of the real tables."""
    sides = shape.heads, shape.block_rows, shape.block_cols
    kept = np.arange(shape.heads * shape.block_rows * shape.block_cols) < shape.blocks
    return BlockSparseLayout(kept.reshape(sides), shape.block)


def run(problem: Problem) -> tuple[Tensor, ...]:
    """The results, on the device of the operands. Operands that aren't contiguous are copied.

    Raises InvalidProblemError, MisalignedOperandError, UnsupportedError or BackendUnavailableError.
    """
    layout = problem.layout
    operands = {name: tensor.contiguous() for name, tensor in problem.operands.items() if tensor is not None}
    form = (
        *problem[:2],
        *problem.sizes.values(),
        *problem.fields.values(),
        problem.preference,
        *((name, t.shape, t.dtype, t.get_device()) for name, t in operands.items()),
        (layout.shape, layout.dtype, layout.stride(), layout.get_device()),
    )
    found = plans.get(form)
    if found is None:
        try:
            found = _CheckedProblem(problem, operands)
        except UnsupportedError as error:  # kept, because other ops may stand in at every call
            found = Refusal(error)
        plans.keep(form, found)
    results: tuple[Tensor, ...] = found.run(operands, layout)
    return results


def kernel_of(describe: Callable[..., Problem]) -> Callable[..., Tensor]:
    """The kernel of an op with one result, whose arguments ``describe`` turns into a Problem."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        return run(describe(*args, **kwargs))[0]

    return kernel


def fake_of(describe: Callable[..., Problem]) -> Callable[..., Tensor]:
    """The fake kernel of such an op."""

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        return fake_results(describe(*args, **kwargs))[0]

    return fake


# Tables -------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _places(shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Begin and end of each table, by its name, in the tables of such layouts."""
    lookup = BlockSparseTables(_any_layout(shape_of(shape))).lookup
    found, at = {}, 0
    for name, memory in lookup._asdict().items():
        found[name] = at, at + memory.size
        at += memory.size
    return found


def table(layout: Tensor, shape: Sequence[int], name: str) -> Tensor:
    """The table that BlockSparseTables' look-up has under this name."""
    begin, end = _places(tuple(shape))[name]
    return layout[begin:end]
