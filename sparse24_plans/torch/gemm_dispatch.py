"""The kernels of the ops that multiply by a 2:4 weight, on the cache of plans (plan_cache.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendUnavailableError, InvalidProblemError, MisalignedOperandError, UnsupportedError
from ..gemm.plan import GemmSparse24Plan
from .elements import DTYPE_OF, allocation, plan_device
from .gemm_call import OPERANDS, Call, Operands, describe, is_column_major, sizes
from .packed_weight_cache import PlanWeights
from .plan_cache import CheckedCall, Refusal, about, find, plans, preference_of

# Checked calls ------------------------------------------------------------------------------------


class CheckedProduct(CheckedCall):
    """The plan of one form of a product's operands."""

    def __init__(self, call: Call, out: Tensor | None = None) -> None:
        weights, m, k = sizes(call)
        desc = describe(call, weights, m, k, **call.kind.fields(call))
        plan: Any = GemmSparse24Plan
        plan = plan.select(desc, preference=preference_of(call.preference), device=plan_device(call.x))
        self.plan, self.column_major = plan, is_column_major(call)
        whole = (*call.kind.outer(call), desc.outputs)
        result = whole[::-1] if call.transposed else whole, DTYPE_OF[desc.out_element], call.x.device
        self._empty = allocation(*result)
        self._has_scales = call.scales is not None
        self._weights = PlanWeights(plan, weights * m, k)
        self._fits = self._weights.fit(call.weight, call.meta)
        if out is not None:
            _check_out(out, *result)
        y = self._empty() if out is None else out
        operands = call.kind.operands(call)
        self._changes = _changes(call, operands)
        super().__init__(plan, self._first_caller(call, operands, y, may_copy=out is None), call.x.device)
        if all(change is _unchanged for change in self._changes):
            self._changes = []
        self.alignment = self._caller.alignment("dy" if call.dgrad else "x")
        """The address of x must be a multiple of this number of bytes."""

    def _first_caller(self, call: Call, operands: Operands, y: Tensor, *, may_copy: bool) -> Any:
        """The plan's caller, for which the first call's tensors are checked in full."""
        read = self._weights.unconverted if self._fits else self._weights.converted
        weight = read(call.weight, call.meta, call.scales)
        others = {name: one for name, one in operands.items() if one is not None}
        x = others.pop("x")
        if not call.kind.stacked:
            y = y.t() if call.transposed else y.view(x.shape[0], y.shape[-1])
        args = self.plan.args_type(self.plan.descriptor)
        try:
            return self.plan.caller(args(weight, x, y, **others))
        except MisalignedOperandError as error:
            is_copied = self._changes[0] is not _unchanged
            if is_copied or not may_copy or error.argument.split()[0] not in ("x", "dy"):
                raise
        self._changes[0] = partial(aligned, column_major=self.column_major)
        return self.plan.caller(args(weight, self._changes[0](x), y, **others))

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        meta: Tensor | None,
        others: Sequence[Tensor | None],
        out: Tensor | None,
    ) -> Tensor | None:
        """The result, in ``out`` or in new memory; None if x must be copied to an aligned address first.

        ``others`` are a quantized weight's scales, the bias, scales of x and W, the residual, and the own
        operands of the call's kind. Every call runs this, so it is written for speed.
        """
        if self._changes:
            given = [one for one in (x, *others) if one is not None]
            x, *others = [change(one) for change, one in zip(self._changes, given, strict=True)]
        source = x.data_ptr()
        if source % self.alignment:
            return None
        y = self._empty() if out is None else out
        scales = None
        if self._has_scales:
            scales, *others = others
        places: tuple[int, ...]
        if not self._fits:
            packed = self._weights.converted(weight, meta, scales)
            places = (*[view.address for view in packed.buffers], source, y.data_ptr())
        elif meta is None:
            places = (weight.data_ptr(), source, y.data_ptr())
        elif scales is not None:
            places = (weight.data_ptr(), meta.data_ptr(), scales.data_ptr(), source, y.data_ptr())
        else:
            places = (weight.data_ptr(), meta.data_ptr(), source, y.data_ptr())
        for other in others:
            if other is not None:
                places += (other.data_ptr(),)
        self._launch(places)
        return y


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise InvalidProblemError unless ``out`` is contiguous and has the result's form."""
    if (out.shape, out.dtype, out.device) != (shape, dtype, device):
        raise InvalidProblemError(
            f"out: expected {dtype} {list(shape)} on {device}, got {out.dtype} {list(out.shape)} "
            f"on {out.device}"
        )
    if not out.is_contiguous():
        raise InvalidProblemError(f"out: expected a contiguous tensor, got strides {out.stride()}")


def _changes(call: Call, operands: Operands) -> list[Callable[[Tensor], Any]]:
    """Functions that make what the kernel reads: of x first, then of each given operand but the weight.

    The kernel reads ``operands``. An operand that lies elsewhere than the given tensor is a copy, which every
    call makes. An operand that is None is left out.
    """
    given = {"x": call.x, "scales": call.scales, "bias": call.bias, "scale_x": call.scale_x}
    given |= {"scale_w": call.scale_w, "c": call.residual, **call.kind.own_operands()}
    changes: list[Callable[[Tensor], Any]] = []
    for name, one in given.items():
        if one is not None:
            read = operands.get(name, call.scales if name == "scales" else None)
            stays = read is not None and one.data_ptr() == read.data_ptr()
            changes.append(_unchanged if stays else _absent if read is None else Tensor.contiguous)
    return changes


def _absent(_: Tensor) -> None: ...


def _unchanged(given: Tensor) -> Tensor:
    return given


def aligned(x: Tensor, column_major: bool = False) -> Tensor:
    """A contiguous copy, row-major or column-major. PyTorch's allocator aligns it."""
    if column_major:
        return aligned(x.t()).t()
    return x.clone(memory_format=torch.contiguous_format)


def run(call: tuple[Any, ...], out: Tensor | None = None) -> Tensor:
    """The product of a :class:`Call`, or of a tuple like one, on the device of its operands.

    Raises InvalidProblemError, MisalignedOperandError, UnsupportedError or BackendUnavailableError.
    """
    found = checked(call, out)
    y: Tensor | None = found.run(call[0], call[1], call[2], call[3 : len(OPERANDS)], out)
    if y is not None:
        return y
    if out is not None:
        raise MisalignedOperandError("x", found.alignment, call[0].data_ptr())
    return run((aligned(call[0], found.column_major), *call[1:]))


def checked(call: tuple[Any, ...], out: Tensor | None = None) -> Any:
    """The CheckedProduct of a call, or its Refusal. Raises what :func:`run` raises."""
    form = _form(*call) if out is None else (*_form(*call), about(out))
    found = find(form)
    return plans.keep(form, CheckedProduct(Call(*call), out)) if found is None else found


def _form(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None = None,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    residual: Tensor | None = None,
    *options: Any,
) -> tuple[Any, ...]:
    """The form of a call with these fields. It is written out because every call makes it."""
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.get_device(),
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.get_device(),
        None if meta is None else about(meta),
        None if scales is None else about(scales),
        None if bias is None else about(bias),
        None if scale_x is None else about(scale_x),
        None if scale_w is None else about(scale_w),
        None if residual is None else about(residual),
        options,
    )


# The ops ------------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None = None,
    bias: Tensor | None = None,
    m: int | None = None,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    residual: Tensor | None = None,
    beta: float = 1.0,
    k: int | None = None,
) -> Tensor:
    """The kernel of the op. A layer calls it where the dispatcher would do nothing else.

    ``k`` is the weight's K, which a packed weight alone doesn't tell.
    """
    added = residual if beta else None
    call = (
        x, weight, meta, None, bias, None, None, added,
        m, k, False, activation, out_dtype, preference, False, beta,
    )  # fmt: skip
    found = find(_form(*call))
    y = None if found is None else found.run(x, weight, meta, (bias, added), None)
    return run(call) if y is None else y


def linear_out_call(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    m: int | None = None,
    activation: str = "none",
    preference: str = "",
) -> Call:
    options = None, False, activation, out.dtype, preference
    return Call(x, weight, meta, None, bias, None, None, None, m, *options)


def linear_out(x: Tensor, weight: Tensor, meta: Any, bias: Any, out: Tensor, *options: Any) -> None:
    run(linear_out_call(x, weight, meta, bias, out, *options), out)


def mm(
    weight: Tensor,
    meta: Tensor | None,
    b: Tensor,
    m: int | None = None,
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    may_transpose: bool = False,
) -> Tensor:
    call = mm_call(weight, meta, b, m, out_dtype, preference)
    if not may_transpose:
        return run(call)
    form = _form(*call)
    found = find(form)
    if found is None:
        try:
            found = CheckedProduct(call)
        except (UnsupportedError, BackendUnavailableError) as error:
            found = Refusal(error)
        plans.keep(form, found)
    if not isinstance(found, Refusal):
        y = found.run(call.x, weight, meta, (), None)
        return run(call) if y is None else y
    rows = call._replace(x=call.x.contiguous(), transposed=False)
    return run(rows).t().contiguous()


def mm_call(
    weight: Tensor,
    meta: Tensor | None,
    b: Tensor,
    m: int | None = None,
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    may_transpose: bool = False,
) -> Call:
    """Raises InvalidProblemError if b isn't a matrix. The result doesn't depend on ``may_transpose``."""
    if b.dim() != 2:
        raise InvalidProblemError(f"b: expected a matrix [K, N], got {list(b.shape)}")
    return Call(b.t(), weight, meta, m=m, out_dtype=out_dtype, preference=preference, transposed=True)


class ProductSite:
    """A product at one place in code that Inductor generated, which writes into Inductor's memory.

    It passes by PyTorch's dispatcher, and looks its form up by the sizes of x alone: there all else about
    the operands is constant. Generated code is kept on disk and imports this class by name. A change of the
    constructor's parameters therefore needs another class name.
    """

    __slots__ = ("_has_meta", "_moves", "_operands", "_options")

    def __init__(self, operands: str, x_moves: bool, *options: Any) -> None:
        """``operands`` names the fields of a Call that are tensors here; ``options`` are all other fields.

        ``x_moves`` says whether sizes or strides of x vary from call to call.
        """
        self._operands, self._options = tuple(operands.split()), options
        self._has_meta = "meta" in self._operands
        self._moves = x_moves

    def __call__(self, x: Tensor, weight: Tensor, *others: Tensor, out: Tensor) -> None:
        """Write the product to ``out``. Raises what the op raises."""
        form = (self, x.shape, x.stride()) if self._moves else self
        found = find(form)
        if found is None:
            found = plans.keep(form, checked(self._call(x, weight, *others), out))
        if self._has_meta:
            done = found.run(x, weight, others[0], others[1:], out)
        else:
            done = found.run(x, weight, None, others, out)
        if done is None:
            run(self._call(aligned(x, found.column_major), weight, *others), out)

    def _call(self, *operands: Tensor) -> tuple[Any, ...]:
        given = dict(zip(self._operands, operands, strict=True))
        return (*(given.get(name) for name in OPERANDS), *self._options)
