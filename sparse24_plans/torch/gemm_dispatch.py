"""The kernels of the ops that multiply by a 2:4 weight, on the cache of plans (plan_cache.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendUnavailableError, InvalidProblemError, MisalignedOperandError, UnsupportedError
from ..gemm.args import DgradSparse24Args, GemmSparse24Args
from ..gemm.plan import GemmSparse24Plan
from ..plan.launches import Caller
from ..vocab import FP8, ElementKind, MatrixOrder
from . import packed_weight_cache
from .elements import DTYPE_OF, allocation, element_of, plan_device
from .gemm_call import OPERANDS, Call, describe, scale_kind, sizes
from .plan_cache import CheckedCall, PlanCache, Refusal, plans, preference_of

# Checked calls ------------------------------------------------------------------------------------


class CheckedProduct(CheckedCall):
    """The plan of one form of a product's operands."""

    def __init__(
        self, call: Call, out: Tensor | None, scale_y: Tensor | None = None, amax: Tensor | None = None
    ) -> None:
        """``scale_y`` and ``amax`` are those of a product whose result is fp8."""
        x = call.x
        m, k = sizes(call)
        shape = x.shape[:-1]
        self._copied, self._residual_copied = False, False
        if call.residual is not None and _rows(call.residual) is None:
            self._residual_copied, call = True, call._replace(residual=call.residual.contiguous())
        self.column_major = call.transposed and _is_column_major(x)
        rows = x if self.column_major else _rows(x)
        if rows is None:
            self._copied, rows = True, _rows(x.contiguous())
        assert rows is not None
        self._desc = desc = describe(
            call,
            rows.shape[0],
            m,
            k,
            x_order=MatrixOrder.COLUMN if self.column_major else MatrixOrder.ROW,
            y_order=MatrixOrder.COLUMN if call.transposed else MatrixOrder.ROW,
            scale_y=scale_kind(scale_y),
            amax=amax is not None,
        )
        plan = GemmSparse24Plan.select(desc, preference=preference_of(call.preference), device=plan_device(x))
        self.plan, self._m, self._k = plan, desc.m, desc.k
        whole = (*shape, desc.outputs)
        self.shape = tuple(whole[::-1] if call.transposed else whole)
        self._dtype, self._device = DTYPE_OF[desc.out_element], x.device
        self._empty = allocation(self.shape, self._dtype, self._device)
        self._has_scales = call.scales is not None
        self._fits = packed_weight_cache.fits(plan, call.weight, call.meta)
        self._check_out(out)
        super().__init__(plan, self._first_caller(call, rows, out, scale_y, amax), x.device)
        self.alignment = self._caller.alignment("dy" if call.dgrad else "x")
        """The address of x must be a multiple of this number of bytes."""

    def _check_out(self, out: Tensor | None) -> None:
        if out is None:
            return
        if tuple(out.shape) != self.shape or out.dtype != self._dtype or out.device != self._device:
            raise InvalidProblemError(
                f"out: expected {self._dtype} {list(self.shape)} on {self._device}, got {out.dtype} "
                f"{list(out.shape)} on {out.device}"
            )
        if not out.is_contiguous():
            raise InvalidProblemError(f"out: expected a contiguous tensor, got strides {out.stride()}")

    def _first_caller(
        self, call: Call, rows: Tensor, out: Tensor | None, scale_y: Tensor | None, amax: Tensor | None
    ) -> Caller:
        """The plan's caller, for which the first call's tensors are checked in full."""
        y = self._empty() if out is None else out
        y = y.t() if call.transposed else y.view(rows.shape[0], self._desc.outputs)
        args = partial(_args, call, self._weight(call), y, scale_y, amax)
        try:
            return self.plan.caller(args(rows))
        except MisalignedOperandError as error:
            if self._copied or out is not None or error.argument.split()[0] not in ("x", "dy"):
                raise
        self._copied = True
        return self.plan.caller(args(aligned(rows, self.column_major)))

    def _weight(self, call: Call) -> Any:
        if self._fits:
            return packed_weight_cache.unconverted(
                self.plan, call.weight, call.meta, self._m, self._k, call.scales
            )
        return packed_weight_cache.converted(self.plan, call.weight, call.meta, self._m, self._k, call.scales)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        meta: Tensor | None,
        others: tuple[Tensor | None, ...],
        out: Tensor | None,
    ) -> Tensor | None:
        """The result, in ``out`` or in new memory; None if x must be copied to an aligned address first.

        ``others`` are a quantized weight's scales, the bias, scales of x and W, and the residual. Every call
        runs this, so it is written for speed.
        """
        if self._copied:
            x = aligned(x, self.column_major)
        source = x.data_ptr()
        if source % self.alignment:
            return None
        y = self._empty() if out is None else out
        scales = None
        if self._has_scales:
            scales, *others = others  # type: ignore[assignment]
        places: tuple[int, ...]
        if not self._fits:
            packed = packed_weight_cache.converted(self.plan, weight, meta, self._m, self._k, scales)
            places = (*[view.address for view in packed.buffers], source, y.data_ptr())
        elif meta is None:
            places = (weight.data_ptr(), source, y.data_ptr())
        elif scales is not None:
            places = (weight.data_ptr(), meta.data_ptr(), scales.data_ptr(), source, y.data_ptr())
        else:
            places = (weight.data_ptr(), meta.data_ptr(), source, y.data_ptr())
        if self._residual_copied:
            others = *others[:-1], others[-1].contiguous()  # type: ignore[union-attr]
        for other in others:
            if other is not None:
                places += (other.data_ptr(),)
        self._launch(places)
        return y

    def with_aligned_x(self, call: tuple[Any, ...]) -> Call:
        """The call with a copy of x."""
        return Call(aligned(call[0], self.column_major), *call[1:])


def _args(
    call: Call, weight: Any, y: Tensor, scale_y: Tensor | None, amax: Tensor | None, rows: Tensor
) -> Any:
    """The plan's operands: ``rows`` of x, or of dy, and the result ``y`` as a matrix."""
    if call.dgrad:
        return DgradSparse24Args(weight, rows, y)
    scales = {"scale_x": call.scale_x, "scale_w": call.scale_w, "scale_y": scale_y, "amax": amax}
    given = {name: one.reshape(-1) for name, one in scales.items() if one is not None}
    c = None if call.residual is None else _rows(call.residual)
    return GemmSparse24Args(weight, rows, y, bias=call.bias, c=c, **given)


def _rows(x: Tensor) -> Tensor | None:
    """x as [n, width] with contiguous rows, without a copy; None if only a copy can be."""
    width = x.shape[-1]
    n = x.numel() // width if width else math.prod(x.shape[:-1])
    if not x.numel():  # strides without an element mean nothing
        return x.new_empty(n, width)
    try:
        rows = x.view(n, width)
    except RuntimeError:  # the leading dimensions have no common stride
        return None
    if (n > 1 and rows.stride(0) < width) or (width > 1 and rows.stride(1) != 1):
        return None
    return rows


def aligned(x: Tensor, column_major: bool = False) -> Tensor:
    """A contiguous copy, row-major or column-major. PyTorch's allocator aligns it."""
    if column_major:
        return aligned(x.t()).t()
    return x.clone(memory_format=torch.contiguous_format)


def _is_column_major(x: Tensor) -> bool:
    """Whether kernels read the matrix column-major, as it is. A GPU needs columns of whole 16 bytes."""
    if x.dim() != 2 or x.shape[0] < 2 or x.stride(1) == 1 or x.stride(0) != 1:
        return False
    return not x.is_cuda or x.shape[0] * x.element_size() % 16 == 0


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
    return run(found.with_aligned_x(call))


def checked(call: tuple[Any, ...], out: Tensor | None = None) -> Any:
    """The CheckedProduct of a call, or its Refusal. Raises what :func:`run` raises."""
    form = _form(*call) if out is None else (*_form(*call), about(out))
    found = plans.get(form)
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


def about(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor but its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


# The ops ------------------------------------------------------------------------------------------


def product_of(call: Callable[..., Call]) -> Callable[..., Tensor]:
    """The kernel of an op whose arguments ``call`` turns into a Call."""

    def product(*args: Any, **kwargs: Any) -> Tensor:
        return run(call(*args, **kwargs))

    return product


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
        x,
        weight,
        meta,
        None,
        bias,
        None,
        None,
        added,
        m,
        k,
        False,
        activation,
        out_dtype,
        preference,
        False,
        beta,
    )
    found = plans.get(_form(*call))
    y = None if found is None else found.run(x, weight, meta, (bias, added), None)
    return run(call) if y is None else y


def linear_call(
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
) -> Call:
    added = residual if beta else None
    options = None, False, activation, out_dtype, preference, False, beta
    return Call(x, weight, meta, None, bias, None, None, added, m, *options)


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
    return linear_call(x, weight, meta, bias, m, activation, out.dtype, preference)


def linear_out(x: Tensor, weight: Tensor, meta: Any, bias: Any, out: Tensor, *options: Any) -> None:
    run(linear_out_call(x, weight, meta, bias, out, *options), out)


def scaled_call(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    bias: Tensor | None = None,
    m: int | None = None,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    residual: Tensor | None = None,
) -> Call:
    """Raises InvalidProblemError for elements that have no scales."""
    if element_of(weight.dtype, "weight") not in (ElementKind.S8, *FP8):
        raise InvalidProblemError(f"weight: expected int8, float8_e4m3fn or float8_e5m2, got {weight.dtype}")
    options = None, False, activation, out_dtype, preference
    return Call(x, weight, meta, None, bias, scale_x, scale_w, residual, m, *options)


def weight_only_call(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None = None,
    group: int = 0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    preference: str = "",
    m: int | None = None,
    scale_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Call:
    """Raises InvalidProblemError for a weight that is neither canonical nor packed."""
    is_packed = scale_dtype is not None
    if (scales is None) != is_packed or (meta is None) != is_packed:
        raise InvalidProblemError(
            "scales: expected meta and scales of stored values, or scale_dtype alone of a packed weight, got "
            f"meta {_named(meta)}, scales {_named(scales)} and scale_dtype {scale_dtype}"
        )
    options = m, None, False, activation, out_dtype, preference, False, 1.0, group, scale_dtype
    return Call(x, weight, meta, scales, bias, None, None, residual, *options)


def _named(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def weight_only_dgrad_call(
    dy: Tensor, values: Tensor, meta: Tensor, scales: Tensor, group: int = 0, preference: str = ""
) -> Call:
    return Call(dy, values, meta, scales, dgrad=True, preference=preference, group=group)


def dgrad_call(
    dy: Tensor,
    weight: Tensor,
    meta: Tensor | None = None,
    m: int | None = None,
    k: int | None = None,
    out_dtype: torch.dtype | None = None,
    preference: str = "",
) -> Call:
    return Call(dy, weight, meta, m=m, k=k, dgrad=True, out_dtype=out_dtype, preference=preference)


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
    found = plans.get(form)
    if found is None:
        try:
            found = CheckedProduct(call, None)
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

    __slots__ = ("_checked", "_has_meta", "_moves", "_operands", "_options")

    def __init__(self, operands: str, x_moves: bool, *options: Any) -> None:
        """``operands`` names the fields of a Call that are tensors here; ``options`` are all other fields.

        ``x_moves`` says whether sizes or strides of x vary from call to call.
        """
        self._operands, self._options = tuple(operands.split()), options
        self._has_meta = "meta" in self._operands
        self._moves = x_moves
        self._checked = PlanCache()

    def __call__(self, x: Tensor, weight: Tensor, *others: Tensor, out: Tensor) -> None:
        """Write the product to ``out``. Raises what the op raises."""
        form = (x.shape, x.stride()) if self._moves else None
        found = self._checked.get(form)
        if found is None:
            found = self._checked.keep(form, checked(self._call((x, weight, *others)), out))
        if self._has_meta:
            done = found.run(x, weight, others[0], others[1:], out)
        else:
            done = found.run(x, weight, None, others, out)
        if done is None:
            run(found.with_aligned_x(self._call((x, weight, *others))), out)

    def _call(self, operands: tuple[Tensor, ...]) -> tuple[Any, ...]:
        given = dict(zip(self._operands, operands, strict=True))
        return (*(given.get(name) for name in OPERANDS), *self._options)
