"""The operations of ``Sparse24Tensor``, as its dispatch table lists them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import InvalidProblemError, UnsupportedError
from .prepare_ops import kept_values
from .repeated import Repeated, as_view_of
from .tensor import FP8, PARTS, SemiStructuredError, Sparse24Tensor

_ops: Any = torch.ops.sparse24
_aten = torch.ops.aten


def _parts(tensor: Sparse24Tensor) -> list[Tensor | None]:
    return [getattr(tensor, name) for name in PARTS]


def _with(tensor: Sparse24Tensor, shape: Any, parts: Any, requires_grad: bool = False) -> Sparse24Tensor:
    """A tensor of other parts, with the options of ``tensor``."""
    options = tensor.fuse_transpose_cusparselt, tensor.alg_id_cusparselt, requires_grad
    return type(tensor)._of(shape, parts, *options)


def _rebuilt(tensor: Sparse24Tensor, change: Callable[[Tensor], Tensor], **options: Any) -> Sparse24Tensor:
    """A tensor of the same shape whose parts ``change`` makes."""
    parts = [None if part is None else change(part) for part in _parts(tensor)]
    return _with(tensor, tensor.shape, parts, **options)


def _view_of(tensor: Sparse24Tensor, shape: Any, parts: Any) -> Sparse24Tensor:
    """A tensor of views of the parts."""
    with as_view_of(tensor):
        return _with(tensor, shape, parts)


def _values(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    (tensor,) = args
    return _part(tensor, "packed").detach()


def _indices(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Metadata in CUTLASS's layout, which PyTorch's functions of values and indices read."""
    (tensor,) = args
    return cast(Tensor, _ops.to_cutlass(_part(tensor, "packed").detach(), _part(tensor, "meta")))


def _part(tensor: Sparse24Tensor, name: str) -> Tensor:
    part = getattr(tensor, name)
    if part is None:
        raise UnsupportedError(f"{name}: expected a tensor that isn't a transpose; transpose it back first")
    return cast(Tensor, part)


def _is_same_size(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


def _detach(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    return _view_of(args[0], args[0].shape, _parts(args[0]))


def _detach_in_place(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._DisableTorchDispatch():
        return func(*args)


def _clone(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    return _rebuilt(args[0], torch.clone, requires_grad=args[0].requires_grad)


def _t(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    (tensor,) = args
    packed, meta, packed_t, meta_t, mask = _parts(tensor)
    parts = packed_t, meta_t, packed, meta, None if mask is None else mask.transpose(0, 1)
    return _view_of(tensor, torch.Size([tensor.shape[1], tensor.shape[0]]), parts)


def _permute(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    """``permute`` has one list of dimensions, ``transpose`` two that it exchanges."""
    tensor, *dims = args
    given = [int(one) for one in (dims[0] if len(dims) == 1 else dims)]
    order = [one + 2 if one < 0 else one for one in given]
    if any(one not in (0, 1) for one in order) or (len(dims) == 1 and sorted(order) != [0, 1]):
        raise SemiStructuredError(f"dims: expected the dimensions 0 and 1 of a matrix, got {given}")
    transposes = order == [1, 0] if len(dims) == 1 else order[0] != order[1]
    return (_t if transposes else _detach)(func, types, (tensor,), kwargs)


def _view(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    tensor, shape = args
    same = tuple(tensor.shape), (-1, tensor.shape[1]), (tensor.shape[0], -1)
    if isinstance(shape, torch.dtype) or tuple(shape) not in same:
        raise UnsupportedError(
            f"`{func._opname}` is not implemented for SparseSemiStructuredTensor, except for the dummy case "
            f"(shape={shape})"
        )
    return _detach(func, types, (tensor,), kwargs)


def _expand(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """A batch of copies, which PyTorch's matmul asks for where x can't be folded without a copy."""
    tensor, sizes, *_ = args
    *leading, rows, columns = sizes
    if any(given not in (-1, own) for given, own in zip((rows, columns), tensor.shape, strict=True)):
        raise UnsupportedError(f"expand: expected sizes that end with {list(tensor.shape)}, got {sizes}")
    with as_view_of(tensor):
        return Repeated(tensor, leading)


def _mm(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    first, second, *out_dtype = args
    _refuse_out_dtype(func, out_dtype)
    if isinstance(first, Sparse24Tensor):
        return first._mm(second)
    return cast(Tensor, second.t()._mm(first, should_transpose_dense=True))


def _refuse_out_dtype(func: Any, given: list[torch.dtype]) -> None:
    if given:
        raise UnsupportedError(
            f"`SparseSemiStructuredTensor` {func._opname}: expected no out_dtype, got {given[0]}"
        )


def _matmul(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Serve aten.matmul, which arrives with any leading dimensions of x in inference mode."""
    first, second = args
    if isinstance(first, Sparse24Tensor) or first.dim() == 2:
        return _mm(func, types, args, kwargs)
    return _linear(func, types, (first, second.t()), kwargs)


def _addmm(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """``beta * added + first @ second``; a bias [M] is added as it is where beta is 1."""
    added, first, second, *out_dtype = args
    _refuse_out_dtype(func, out_dtype)
    if isinstance(first, Sparse24Tensor) or isinstance(added, Sparse24Tensor):
        raise UnsupportedError("`SparseSemiStructuredTensor` matmul: only operand B of `addmm` can be sparse")
    alpha, beta = (kwargs.get(name, 1) for name in ("alpha", "beta"))
    if alpha != 1:
        raise UnsupportedError(f"`SparseSemiStructuredTensor` addmm: expected alpha 1, got {alpha}")
    options: dict[str, Any] = {"bias": added}
    if added.shape != second.shape[1:] or beta != 1:
        residual = _broadcast(added, *first.shape[:1], second.shape[1]) if beta else None
        options = {"residual": residual, "beta": float(beta)}
    return cast(Tensor, second.t()._mm(first, should_transpose_dense=True, **options))


def _broadcast(added: Tensor, *sizes: int) -> Tensor:
    try:
        return added.expand(sizes)
    except RuntimeError as error:
        name = "bias" if added.ndim == 1 else "input"
        raise InvalidProblemError(
            f"{name}: expected a tensor that broadcasts to {list(sizes)}, got {list(added.shape)}"
        ) from error


def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    if isinstance(x, Sparse24Tensor) or not isinstance(weight, Sparse24Tensor):
        raise UnsupportedError("`SparseSemiStructuredTensor` linear: only the weight can be sparse")
    if not x.dim():
        raise InvalidProblemError(
            f"input: expected [..., {weight.shape[1]}], got a tensor without dimensions"
        )
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    y = weight._mm(rows, bias=bias, should_transpose_dense=True)
    return y.view(*x.shape[:-1], weight.shape[0])


def _to_copy(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """A dense tensor on the CPU, as PyTorch's classes do it; on other devices a Sparse24Tensor."""
    tensor = args[0]
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is not None and torch.device(device).type == "cpu":
        return cast(Tensor, func(tensor.to_dense(), **kwargs))
    if dtype is not None and (
        dtype not in Sparse24Tensor._DTYPE_SHAPE_CONSTRAINTS or _narrow(tensor.dtype, dtype)
    ):
        raise UnsupportedError(
            f"`_to_copy()` with dtype={dtype} is not implemented for a SparseSemiStructuredTensor of "
            f"{tensor.dtype}"
        )

    def change(part: Tensor) -> Tensor:
        return part.to(device=device, dtype=dtype if part.dtype == tensor.dtype else None, copy=True)

    return _rebuilt(tensor, change)


def _narrow(*dtypes: torch.dtype) -> bool:
    """Whether the dtypes differ and one has 8 bits: 8-bit values mean little without a scale."""
    return dtypes[0] != dtypes[1] and any(dtype.itemsize == 1 for dtype in dtypes)


def _to(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Serve aten.to, which arrives instead of aten._to_copy in inference mode.

    The tensor itself is returned where nothing changes.
    """
    names = (one.name for one in func._schema.arguments)
    tensor, *_ = args
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if (other := given.get("other")) is not None:
        given |= {"device": other.device, "dtype": other.dtype}
    wanted = {name: given[name] for name in ("device", "dtype") if given.get(name) is not None}
    like = torch.empty(0, **{"device": tensor.device, "dtype": tensor.dtype, **wanted})
    if (like.device, like.dtype) == (tensor.device, tensor.dtype) and not given.get("copy"):
        return cast(Tensor, tensor)
    return _to_copy(_aten._to_copy.default, types, (tensor,), wanted)


def _scaled(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """``scale_a * scale_b * (a @ b)``, one operand sparse. A float32 scale is for all rows or for each."""
    names = ("bias", "scale_result", "out_dtype", "use_fast_accum")
    a, b, scale_a, scale_b, *rest = args
    options = {**dict(zip(names, rest, strict=False)), **kwargs}
    out = options.get("out_dtype")
    if options.get("bias") is not None or options.get("scale_result") is not None:
        raise UnsupportedError(
            "`SparseSemiStructuredTensor` _scaled_mm: expected no bias and no scale_result"
        )
    out = FP8 if out is None else out
    if out not in (FP8, torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedError(
            "`SparseSemiStructuredTensor` _scaled_mm: expected out_dtype bfloat16, float16, float32 or "
            f"float8_e4m3fn, got {out}"
        )
    product = _ops.fp8_linear if out == FP8 else _ops.scaled_linear
    if isinstance(a, Sparse24Tensor):
        values, meta = _part(a, "packed"), _part(a, "meta")
        y = product(b.t(), values, meta, scale_b, scale_a, out_dtype=out)
        return cast(Tensor, y.t().contiguous())
    sparse = b.t()
    values, meta = _part(sparse, "packed"), _part(sparse, "meta")
    return cast(Tensor, product(a, values, meta, scale_a, scale_b, out_dtype=out))


# One cell at a time ---------------------------------------------------------------------------------


def _pointwise(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    """``func`` of the kept cells of the last sparse operand, whose cells the result keeps; others stay zero.

    A dense operand, and a sparse one that keeps other cells, counts at these cells alone. Gradients of a
    function are thus gradients of the kept cells, as in PyTorch's semi-structured training.
    """
    like = [one for one in args if isinstance(one, Sparse24Tensor)][-1]
    if like.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(f"{func.__name__}: expected float32, float16 or bfloat16, got {like.dtype}")
    operands = [_at_cells_of(like, one, func.__name__) for one in args]
    packed, packed_t = (
        None if part is None else func(*(one[side] for one in operands), **kwargs)
        for side, part in enumerate((like.packed, like.packed_t))
    )
    made: Any = packed if packed is not None else packed_t
    if made.dtype != like.dtype:
        raise UnsupportedError(f"{func.__name__}: expected a result of {like.dtype}, got {made.dtype}")
    return _with_values(like, packed, packed_t)


def _with_values(like: Sparse24Tensor, packed: Any, packed_t: Any) -> Sparse24Tensor:
    parts = packed, like.meta, packed_t, like.meta_t, like.compressed_swizzled_bitmask
    return _with(like, like.shape, parts)


def _at_cells_of(like: Sparse24Tensor, operand: Any, function: str) -> tuple[Any, Any]:
    """The operand's values at the kept cells of a tensor and of its transpose; a scalar as it is."""
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        return operand, operand
    if isinstance(operand, Sparse24Tensor) and operand.meta is like.meta and operand.meta_t is like.meta_t:
        return operand.packed, operand.packed_t  # of the same cells in the same order
    if operand.dtype != like.dtype or operand.device != like.device:
        raise UnsupportedError(
            f"{function}: expected {like.dtype} on {like.device}, as the sparse operand, got {operand.dtype} "
            f"on {operand.device}"
        )
    dense = operand.to_dense() if isinstance(operand, Sparse24Tensor) else operand
    if dense.shape != like.shape:
        try:
            dense = dense.expand(like.shape)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{function}: expected an operand that broadcasts to {list(like.shape)}, the shape of the "
                f"sparse one, got {list(operand.shape)}"
            ) from error
    if like.packed is not None and like.packed_t is not None:
        # Metadata names spare cells in groups that keep fewer than two, which the transpose's may lack.
        both = _cells(like.packed, like.meta) & _cells(like.packed_t, like.meta_t).t()
        dense = torch.where(both, dense, torch.zeros_like(dense))
    return (
        None if like.meta is None else kept_values(dense, like.meta),
        None if like.meta_t is None else kept_values(dense.t(), like.meta_t),
    )


def _cells(packed: Tensor, meta: Any) -> Tensor:
    """The cells that metadata names, as booleans [M, K]."""
    return cast(Tensor, _ops.decompress(torch.ones_like(packed), meta) != 0)


def _add(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    """The sum of two tensors that keep the same cells. Any other sum may not be 2:4."""
    first, second = args
    if not (
        isinstance(first, Sparse24Tensor)
        and isinstance(second, Sparse24Tensor)
        and _have_equal_metadata(first, second)
    ):
        raise UnsupportedError(
            "add: expected two Sparse24Tensors that keep the same cells, whose sum is 2:4; else add their "
            "to_dense()"
        )
    sides = ((first.packed, second.packed), (first.packed_t, second.packed_t))
    packed, packed_t = (None if one is None else func(one, other, **kwargs) for one, other in sides)
    if func is _aten.add_.Tensor:  # backward passes sum gradients in place
        return first
    return _with_values(first, packed, packed_t)


def _have_equal_metadata(first: Sparse24Tensor, second: Sparse24Tensor) -> bool:
    """On a GPU, this waits for the device."""
    return first.shape == second.shape and all(
        one is other or (one is not None and other is not None and torch.equal(one, other))
        for one, other in ((first.meta, second.meta), (first.meta_t, second.meta_t))
    )


def _without_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a dispatch table. It refuses results in given memory, which none of them writes."""

    @wraps(function)
    def checked(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if kwargs and any(one.is_out for one in func._schema.arguments):
            raise UnsupportedError(
                f"{func.__name__}: expected no tensor to write to, because what is computed of a "
                "Sparse24Tensor is in new memory; copy that"
            )
        return function(func, types, args, kwargs)

    return checked


_SERVED = {
    _aten.values: _values,
    _aten.indices: _indices,
    _aten.is_same_size: _is_same_size,
    _aten.detach_: _detach_in_place,
    _aten.detach: _detach,
    _aten.t: _t,
    _aten.numpy_T: _t,
    _aten.mT: _t,
    _aten.matrix_H: _t,
    _aten.adjoint: _t,
    _aten.permute: _permute,
    _aten.transpose: _permute,
    _aten.swapdims: _permute,
    _aten.view: _view,
    _aten.reshape: _view,
    _aten.expand: _expand,
    _aten.mm: _mm,
    _aten.matmul: _matmul,
    _aten.addmm: _addmm,
    _aten.linear: _linear,
    _aten._to_copy: _to_copy,
    _aten.to: _to,
    _aten._scaled_mm: _scaled,
    _aten.clone: _clone,
    _aten.relu: _pointwise,
    _aten.gelu: _pointwise,
    _aten.silu: _pointwise,
    _aten.mul: _pointwise,
    _aten.add: _add,
    _aten.add_: _add,
    _aten.threshold_backward: _pointwise,
    _aten.gelu_backward: _pointwise,
    _aten.silu_backward: _pointwise,
}
Sparse24Tensor.SPARSE_DISPATCH = {op: _without_out(function) for op, function in _SERVED.items()}
