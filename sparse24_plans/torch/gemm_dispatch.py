"""What the ops of products do on a device: one plan a form of operands, and per call the addresses alone.

A *form* is everything about a call but where its tensors lie: shapes, strides, dtypes, devices, options. The
first call of a form checks all of it, selects the plan and keeps both; later ones look that up, allocate the
result with PyTorch's allocator and launch on PyTorch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BackendUnavailableError, InvalidProblemError, MisalignedOperandError, UnsupportedError
from ..gemm.args import DgradSparse24Args, GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..plan.launches import Caller
from ..plan.preference import PlanPreference
from ..vocab import ElementKind, GemmOp, MatrixOrder, ScaleKind
from . import packed_weight_cache
from .activations import epilogue_of
from .elements import DTYPE_OF, allocation, element_of, plan_device, stream_getter, weight_sizes

MOST_FORMS = 4096
"""Forms that are kept; a server's token counts, times its layers' shapes."""


class Call(NamedTuple):
    """The operands and options of a product, as every op of this module comes to them.

    Generated code that lies on a disk has the options by place (compiled.py): another goes to the end.
    """

    x: Tensor
    """[..., K]; of ``dgrad`` dY [..., M]; of ``mm`` B^T [N, K]."""
    weight: Tensor
    meta: Tensor | None
    bias: Tensor | None = None
    scale_x: Tensor | None = None
    scale_w: Tensor | None = None
    m: int | None = None
    k: int | None = None
    dgrad: bool = False
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    preference: str = ""
    turned: bool = False
    """The result is Y^T, contiguous: Y is in columns."""


OPERANDS = ("x", "weight", "meta", "bias", "scale_x", "scale_w")
"""The fields of a call that are tensors; they come first."""

# What a product is --------------------------------------------------------------------------------


@lru_cache(maxsize=MOST_FORMS)
def _descriptor(**fields: Any) -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(**{name: value for name, value in fields.items() if value is not None})


@lru_cache(maxsize=256)
def preference_of(text: str) -> PlanPreference | None:
    """Of its JSON; "" is none. Raises InvalidProblemError."""
    return PlanPreference.model_validate_json(text) if text else None


def sizes(call: Call) -> tuple[int, int]:
    """M and K. Raises InvalidProblemError where the weight and x don't fit together."""
    if call.x.dim() < 1:
        raise InvalidProblemError("x: expected at least one dimension, got a scalar")
    width = call.x.shape[-1]
    m, k = call.m, call.k
    if call.meta is None:
        m, k = (width if m is None else m, k) if call.dgrad else (m, width if k is None else k)
    m, k = weight_sizes(call.weight, call.meta, m, k)
    wanted, name = (m, "M") if call.dgrad else (k, "K")
    if width != wanted:
        raise InvalidProblemError(
            f"x: expected [..., {wanted}], the weight's {name}, got {list(call.x.shape)}"
        )
    if call.x.dtype != call.weight.dtype:
        raise InvalidProblemError(f"x: expected {call.weight.dtype}, as the weight, got {call.x.dtype}")
    if call.bias is not None and tuple(call.bias.shape) != (m,):
        raise InvalidProblemError(f"bias: expected [{m}], got {list(call.bias.shape)}")
    if call.scale_x is not None:
        _check_scale(call.scale_x, _product(call.x.shape[:-1]), "scale_x")
    if call.scale_w is not None:
        _check_scale(call.scale_w, m, "scale_w")
    for name in ("weight", "bias", "scale_x", "scale_w"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.device != call.x.device:
            raise InvalidProblemError(f"{name}: expected a tensor on {call.x.device}, got {tensor.device}")
    return m, k


def _check_scale(scale: Tensor, rows: int, argument: str) -> None:
    if scale.dtype != torch.float32:
        raise InvalidProblemError(f"{argument}: expected torch.float32, got {scale.dtype}")
    if scale.numel() not in (1, rows):
        raise InvalidProblemError(f"{argument}: expected 1 or {rows} elements, got {list(scale.shape)}")


def _scale_kind(scale: Tensor | None) -> ScaleKind | None:
    if scale is None:
        return None
    return ScaleKind.TENSOR if scale.numel() == 1 else ScaleKind.ROW


def describe(call: Call, n: int, m: int, k: int, **orders: MatrixOrder) -> GemmSparse24Descriptor:
    """The problem. Raises InvalidProblemError naming what is wrong."""
    out, bias = call.out_dtype, call.bias
    return _descriptor(
        n=n,
        m=m,
        k=k,
        element=element_of(call.weight.dtype, "weight"),
        op=GemmOp.DGRAD if call.dgrad else GemmOp.FORWARD,
        epilogue=epilogue_of(call.activation, call.bias is not None, gates=True),
        out_element=None if out is None else element_of(out, "out_dtype"),
        bias_element=None if bias is None else element_of(bias.dtype, "bias"),
        scale_x=_scale_kind(call.scale_x),
        scale_w=_scale_kind(call.scale_w),
        **orders,
    )


def fake_result(call: Call) -> Tensor:
    """The result's shape, dtype and strides, without a value; ``x`` may have symbolic sizes."""
    preference_of(call.preference)
    m, k = sizes(call)
    desc = describe(call, 1, 16, 8)  # the dtypes don't hang on the sizes, which may be symbols
    outputs = m // 2 if desc.epilogue.is_gated else m
    shape = (*call.x.shape[:-1], k if call.dgrad else outputs)
    if call.turned:
        shape = shape[::-1]
    return call.x.new_empty(shape, dtype=DTYPE_OF[desc.out_element])


# Forms --------------------------------------------------------------------------------------------


class Form:
    """A checked form of operands, with the plan that serves it."""

    def __init__(self, call: Call, out: Tensor | None) -> None:
        x = call.x
        m, k = sizes(call)
        shape = x.shape[:-1]
        self._copied = False
        self.in_columns = call.turned and _in_columns(x)
        rows = x if self.in_columns else _rows(x)
        if rows is None:
            self._copied, rows = True, _rows(x.contiguous())
        assert rows is not None
        self._desc = desc = describe(
            call,
            rows.shape[0],
            m,
            k,
            x_order=MatrixOrder.COLUMN if self.in_columns else MatrixOrder.ROW,
            y_order=MatrixOrder.COLUMN if call.turned else MatrixOrder.ROW,
        )
        plan = GemmSparse24Plan.select(desc, preference=preference_of(call.preference), device=plan_device(x))
        self._plan, self._m, self._k = plan, desc.m, desc.k
        whole = (*shape, desc.outputs)
        self.shape = tuple(whole[::-1] if call.turned else whole)
        self._dtype, self._device = DTYPE_OF[desc.out_element], x.device
        self._empty = allocation(self.shape, self._dtype, self._device)
        self._stream = stream_getter(x.device.index if x.is_cuda else -1)
        self._workspace = plan.workspace_size()
        self._as_it_is = packed_weight_cache.fits(plan, call.weight, call.meta)
        self._check_out(out)
        self._zeros = None
        if desc.epilogue.has_bias and call.bias is None:
            self._zeros = torch.zeros(desc.m, dtype=DTYPE_OF[desc.bias_element], device=x.device)
        self._caller = self._first_caller(call, rows, out)
        self.alignment = self._caller.alignment("source")
        """Bytes that x's address must be a multiple of."""

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

    def _first_caller(self, call: Call, rows: Tensor, out: Tensor | None) -> Caller:
        """Everything is checked here once, on the first call's own tensors."""
        y = self._empty() if out is None else out
        y = y.t() if call.turned else y.view(rows.shape[0], self._desc.outputs)
        weight = self._weight(call)
        try:
            return self._plan.caller(self._args(call, weight, rows, y))
        except MisalignedOperandError as error:
            if self._copied or out is not None or error.argument.split()[0] not in ("x", "dy"):
                raise
        self._copied = True
        return self._plan.caller(self._args(call, weight, _aligned(rows, self.in_columns), y))

    def _weight(self, call: Call) -> Any:
        if self._as_it_is:
            return packed_weight_cache.as_it_is(call.weight, call.meta, self._m, self._k)
        return packed_weight_cache.converted(self._plan, call.weight, call.meta, self._m, self._k)

    def _args(self, call: Call, weight: Any, rows: Tensor, y: Tensor) -> Any:
        if call.dgrad:
            return DgradSparse24Args(weight, rows, y)
        bias = call.bias if self._zeros is None else self._zeros
        scales = [None if s is None else s.reshape(-1) for s in (call.scale_x, call.scale_w)]
        return GemmSparse24Args(weight, rows, y, bias, *scales)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        meta: Tensor | None,
        others: tuple[Tensor | None, ...],
        out: Tensor | None,
    ) -> Tensor | None:
        """The result, in ``out`` or in new memory; None where x must be copied to an aligned address first.

        ``others`` are the bias and the scales. On the path of every call.
        """
        if self._copied:
            x = _aligned(x, self.in_columns)
        source = x.data_ptr()
        if source % self.alignment:
            return None
        y = self._empty() if out is None else out
        places: tuple[int, ...]
        if not self._as_it_is:
            places = (*self._converted_at(weight, meta), source, y.data_ptr())
        elif meta is None:
            places = (weight.data_ptr(), source, y.data_ptr())
        else:
            places = (weight.data_ptr(), meta.data_ptr(), source, y.data_ptr())
        if self._zeros is not None:
            places += (self._zeros.data_ptr(),)
        for other in others:
            if other is not None:
                places += (other.data_ptr(),)
        space = 0
        if self._workspace:
            scratch = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
            space = scratch.data_ptr()
        self._caller.launch(places, space, self._stream())
        return y

    def _converted_at(self, weight: Tensor, meta: Tensor | None) -> list[int]:
        """Addresses of the weight's buffers in the layout that the kernel reads."""
        packed = packed_weight_cache.converted(self._plan, weight, meta, self._m, self._k)
        return [view.address for view in packed.buffers]

    def with_aligned_x(self, call: tuple[Any, ...]) -> Call:
        """The call with a copy of x."""
        return Call(_aligned(call[0], self.in_columns), *call[1:])


def _rows(x: Tensor) -> Tensor | None:
    """x as [n, width], its rows contiguous, without a copy; None where it can't be."""
    width = x.shape[-1]
    n = x.numel() // width if width else _product(x.shape[:-1])
    try:
        rows = x.view(n, width)
    except RuntimeError:  # its dimensions don't lie in one another
        return None
    if (n > 1 and rows.stride(0) < width) or (width > 1 and rows.stride(1) != 1):
        return None
    return rows


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _aligned(x: Tensor, in_columns: bool = False) -> Tensor:
    """A copy in rows (or columns) that touch, which the allocator aligns."""
    if in_columns:
        return _aligned(x.t()).t()
    return x.clone(memory_format=torch.contiguous_format)


def _in_columns(x: Tensor) -> bool:
    """Whether a matrix is read in columns: on a GPU those of whole 16 bytes; of others, a copy in rows."""
    if x.dim() != 2 or x.shape[0] < 2 or x.stride(1) == 1 or x.stride(0) != 1:
        return False
    return not x.is_cuda or x.shape[0] * x.element_size() % 16 == 0


_forms: dict[tuple[Any, ...], Form] = {}
_not_turned: set[tuple[Any, ...]] = set()
"""Forms of mm that no kernel serves with X or Y in columns."""


def run(call: tuple[Any, ...], out: Tensor | None = None) -> Tensor:
    """The product of a :class:`Call`, or of a tuple like one, on the device of its operands.

    Raises InvalidProblemError, MisalignedOperandError, UnsupportedError or BackendUnavailableError.
    """
    form = form_of(call, out)
    y = form.run(call[0], call[1], call[2], call[3:6], out)
    if y is not None:
        return y
    if out is not None:
        raise MisalignedOperandError("x", form.alignment, call[0].data_ptr())
    return run(form.with_aligned_x(call))


def form_of(call: tuple[Any, ...], out: Tensor | None = None) -> Form:
    """That of a call, made where it is the first like it. Raises what :func:`run` raises."""
    key = _key(*call) if out is None else (*_key(*call), _about(out))
    form = _forms.get(key)
    if form is None:
        form = Form(Call(*call), out)
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        _forms[key] = form
    return form


def _key(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None = None,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    *options: Any,
) -> tuple[Any, ...]:
    """All that the form of a call hangs on, of its fields. Written out: it is on the path of every call."""
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.get_device(),
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.get_device(),
        None if meta is None else _about(meta),
        None if bias is None else _about(bias),
        None if scale_x is None else _about(scale_x),
        None if scale_w is None else _about(scale_w),
        options,
    )


def _about(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


# The ops ------------------------------------------------------------------------------------------


def product_of(call: Callable[..., Call]) -> Callable[..., Tensor]:
    """The op that runs what ``call`` makes of its arguments."""

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
    k: int | None = None,
) -> Tensor:
    """As the op: its kernel, and what a layer calls where the dispatcher would only come to it.

    ``k``: what a packed weight doesn't say, for those who know it.
    """
    call = x, weight, meta, bias, None, None, m, k, False, activation, out_dtype, preference, False
    form = _forms.get(_key(*call))
    y = None if form is None else form.run(x, weight, meta, (bias,), None)
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
) -> Call:
    return Call(x, weight, meta, bias, None, None, m, None, False, activation, out_dtype, preference)


def linear_out(
    x: Tensor,
    weight: Tensor,
    meta: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    m: int | None = None,
    activation: str = "none",
    preference: str = "",
) -> None:
    run(linear_call(x, weight, meta, bias, m, activation, out.dtype, preference), out)


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
) -> Call:
    """Raises InvalidProblemError for elements that have no scales."""
    if element_of(weight.dtype, "weight") not in (ElementKind.S8, ElementKind.FP8_E4M3):
        raise InvalidProblemError(f"weight: expected int8 or float8_e4m3fn, got {weight.dtype}")
    return Call(x, weight, meta, bias, scale_x, scale_w, m, None, False, activation, out_dtype, preference)


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
    key = _key(*call)
    if key not in _not_turned:
        try:
            return run(call)
        except (UnsupportedError, BackendUnavailableError):
            if len(_not_turned) >= MOST_FORMS:
                _not_turned.clear()
            _not_turned.add(key)
    rows = call._replace(x=call.x.contiguous(), turned=False)
    return run(rows).t().contiguous()


def mm_call(
    weight: Tensor,
    meta: Tensor | None,
    b: Tensor,
    m: int | None,
    out_dtype: torch.dtype | None,
    preference: str,
) -> Call:
    """Raises InvalidProblemError where b is no matrix."""
    if b.dim() != 2:
        raise InvalidProblemError(f"b: expected a matrix [K, N], got {list(b.shape)}")
    return Call(b.t(), weight, meta, m=m, out_dtype=out_dtype, preference=preference, turned=True)
