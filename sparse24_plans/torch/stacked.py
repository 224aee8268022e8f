"""Products whose weight stacks those of groups or batches: what the ops ``grouped_mm`` and ``bmm`` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import MisalignedOperandError
from ..gemm.args import GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from . import packed_weight_cache
from .elements import DTYPE_OF, allocation, plan_device
from .gemm_dispatch import about, aligned
from .plan_cache import CheckedCall, plans, preference_of

Operands = dict[str, Tensor]
"""Operands but the weight and y, by the names and in the order of GemmSparse24Args; x comes first."""


class CheckedStacked(CheckedCall):
    """The plan of one form of a product's operands."""

    def __init__(
        self, call: Any, desc: GemmSparse24Descriptor, sizes: tuple[int, int], operands: Operands
    ) -> None:
        """``sizes`` are the rows and the columns of the stacked weight."""
        preference = preference_of(call.preference)
        self._plan = plan = GemmSparse24Plan.select(desc, preference=preference, device=plan_device(call.x))
        self._sizes = sizes
        rows = call.x.shape[:-1] if desc.batches is not None else (desc.result_rows,)
        self._empty = allocation((*rows, desc.outputs), DTYPE_OF[desc.out_element], call.x.device)
        self._fits = packed_weight_cache.fits(plan, call.weight, call.meta)
        args = GemmSparse24Args(weight=self._weight(call), y=self._empty(), **operands)
        super().__init__(plan, plan.caller(args), call.x.device)

    def _weight(self, call: Any) -> Any:
        found = packed_weight_cache.unconverted if self._fits else packed_weight_cache.converted
        return found(self._plan, call.weight, call.meta, *self._sizes, call.scales)

    def run(self, call: Any, operands: Operands) -> Tensor:
        y = self._empty()
        if self._fits:
            found = (call.weight, call.meta, call.scales)
            weight = tuple(one.data_ptr() for one in found if one is not None)
        else:
            packed = self._weight(call)  # held until the launch, because nothing else may hold it
            weight = tuple(view.address for view in packed.buffers)
        x, *others = (one.data_ptr() for one in operands.values())
        self._launch((*weight, x, y.data_ptr(), *others))
        return y


def run(
    call: Any,
    operands_of: Callable[[Any], Operands],
    checked: Callable[[Any], CheckedStacked],
) -> Tensor:
    """Run a call by the plan of its form, which ``checked`` makes at the first call of the form.

    A misaligned x is copied. The copy has strides of its own, so its form has another plan.
    """
    try:
        return _run(call, operands_of, checked)
    except MisalignedOperandError as error:  # before anything is written
        if error.argument.split()[0] != "x":
            raise
    return _run(call._replace(x=aligned(call.x)), operands_of, checked)


def _run(
    call: Any,
    operands_of: Callable[[Any], Operands],
    checked: Callable[[Any], CheckedStacked],
) -> Tensor:
    """:func:`run` for an aligned x. Raises MisalignedOperandError for another."""
    form = (type(call), *(about(one) if isinstance(one, Tensor) else one for one in call))
    found = plans.get(form)
    if found is None:
        found = plans.keep(form, checked(call))
    y: Tensor = found.run(call, operands_of(call))
    return y


def given(**operands: Tensor | None) -> Operands:
    """The operands that are given."""
    return {name: one for name, one in operands.items() if one is not None}
