"""What code that Inductor generates calls: a product at one place in it, into memory that Inductor planned.

Generated code is kept on disk and imports this by name, so what :class:`CallSite` takes is a contract with
code that is already there: another contract is another name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..device.log import COMPILE
from .gemm_dispatch import MOST_FORMS, OPERANDS, Form, form_of, run


class CallSite:
    """A product in generated code.

    Past PyTorch's dispatcher and without the search for its form: in generated code all about the operands
    but their addresses is constant, or follows from the sizes of x.
    """

    __slots__ = ("_forms", "_has_meta", "_moves", "_operands", "_options")

    def __init__(self, operands: str, x_moves: bool, *options: Any) -> None:
        """``operands``: the fields of a Call that are tensors here; ``options``: all that aren't operands.

        ``x_moves``: whether sizes or strides of x vary from call to call.
        """
        self._operands, self._options = tuple(operands.split()), options
        self._has_meta = "meta" in self._operands
        self._moves = x_moves
        self._forms: dict[Any, Form] = {}

    def __call__(self, x: Tensor, weight: Tensor, *others: Tensor, out: Tensor) -> None:
        """Raises what the op raises."""
        key = (x.shape, x.stride()) if self._moves else None
        form = self._forms.get(key)
        if form is None:
            form = self._found(key, (x, weight, *others), out)
        if self._has_meta:
            done = form.run(x, weight, others[0], others[1:], out)
        else:
            done = form.run(x, weight, None, others, out)
        if done is None:
            run(form.with_aligned_x(self._call((x, weight, *others))), out)

    def _call(self, operands: tuple[Tensor, ...]) -> tuple[Any, ...]:
        given = dict(zip(self._operands, operands, strict=True))
        return (*(given.get(name) for name in OPERANDS), *self._options)

    def _found(self, key: Any, operands: tuple[Tensor, ...], out: Tensor) -> Form:
        form = form_of(self._call(operands), out)
        if len(self._forms) >= MOST_FORMS:
            self._forms.clear()
        self._forms[key] = form
        return form


def report_unknown(op: Any, error: Exception) -> None:
    """Say that generated code calls the op, as Inductor's internals aren't those that are known here."""
    COMPILE.warning("%s goes through PyTorch's dispatcher in compiled code: %r", op.name(), error)
