"""Lets torch.compile call products directly, into a buffer of Inductor's.

No other module touches Inductor's internals; library.py loads this one when Inductor is at work. An ordinary
op costs a trip through the dispatcher and back into Python at every call, which a dense product doesn't. An
op stays an op where a direct call is impossible: in generated C++, or if the weight's sizes vary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V

from .gemm_call import OPERANDS, Call
from .gemm_dispatch import ProductSite

_NAME = "Sparse24ProductSite"
_IMPORT = f"from {ProductSite.__module__} import {ProductSite.__name__} as {_NAME}"

if "add_import_once" not in PythonWrapperCodegen.__init__.__code__.co_names:
    raise ImportError("PythonWrapperCodegen has no add_import_once")


class _Product(ir.ExternKernelOut):  # type: ignore[misc]
    """A product in the graph. Its call site becomes a global of the generated module."""

    def __init__(self, layout: Any, operands: dict[str, Any], x_moves: bool, options: Any) -> None:
        super().__init__(layout, list(operands.values()))
        self.python_kernel_name = f"sparse24_{self.get_name()}"
        arguments = ", ".join(map(repr, (" ".join(operands), x_moves, *options)))
        self._site = f"{self.python_kernel_name} = {_NAME}({arguments})"

    def codegen(self, wrapper: Any) -> None:
        for line in (_IMPORT, self._site):
            wrapper.add_import_once(line)
        super().codegen(wrapper)


def lower(op: Any, call: Callable[..., Call], report: Callable[[Any, Exception], None]) -> None:
    """Make Inductor call the op's product directly. ``call`` turns the op's arguments into a Call.

    ``report`` is told of an error that says that Inductor has changed; the op then stays an op.
    """
    as_op = fallback_handler(op, add_to_fallback_set=False)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        try:
            product = _product(op, call(*args, **kwargs))
        except (AttributeError, TypeError) as error:
            report(op, error)
            product = None
        return as_op(*args, **kwargs) if product is None else product

    register_lowering(op, type_promotion_kind=None)(lowered)


def _product(op: Any, call: Call) -> Any:
    """The product as a node of Inductor's; None if the op must stay."""
    node, graph = V.graph.current_node, V.graph
    if graph.cpp_wrapper or getattr(graph, "fx_wrapper", False) or node.target is not op:
        return None
    result = node.meta.get("val")
    if result is None or any(_is_symbolic(size) for size in (call.m, call.k)):
        return None
    given = {name: getattr(call, name) for name in OPERANDS if getattr(call, name) is not None}
    # the rows of x may lie apart: kernels take a row stride
    operands = {name: ir.ExternKernel.require_contiguous(each) for name, each in given.items()}
    if any(_moves(each) for name, each in operands.items() if name not in ("x", "scale_x")):
        return None
    layout = ir.FixedLayout(
        result.device,
        result.dtype,
        convert_shape_to_inductor(result.size()),
        convert_shape_to_inductor(result.stride()),
    )
    moves = any(_moves(operands[name]) for name in ("x", "scale_x") if name in operands)
    return ir.TensorBox.create(_Product(layout, operands, moves, call[len(OPERANDS) : -1]))


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) or bool(getattr(size, "free_symbols", ()))


def _moves(operand: Any) -> bool:
    return any(_is_symbolic(size) for size in (*operand.get_size(), *operand.get_stride()))
