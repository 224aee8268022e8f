"""``Sparse24Tensor``: a 2:4 matrix as a tensor, for code written against PyTorch's semi-structured sparsity.

It is a ``torch.sparse.SparseSemiStructuredTensor`` with the same constructor, attributes, operations and
errors. docs/pytorch.md lists what it can do beyond PyTorch's own two classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.sparse.semi_structured import SparseSemiStructuredTensor

from ..errors import InvalidProblemError, UnsupportedError
from ..vocab import TileRule
from .elements import in_dtype
from .foreign import is_canonical

_ops: Any = torch.ops.sparse24
_aten = torch.ops.aten


class SemiStructuredError(InvalidProblemError, RuntimeError):
    """A tensor can't become a 2:4 one. This is also a RuntimeError, which PyTorch's classes raise."""


class SemiStructuredProductError(SemiStructuredError, NotImplementedError):
    """The sizes of a product don't fit. This is also a NotImplementedError, which PyTorch's classes raise."""


class ShapeConstraints(NamedTuple):
    """The numbers that sizes must be multiples of; the fields have PyTorch's names."""

    sparse_min_rows: int
    sparse_min_cols: int
    dense_min_rows: int
    dense_min_cols: int


_ANY_ROWS = ShapeConstraints(1, 8, 1, 1)
_FP8 = torch.float8_e4m3fn
_PARTS = ("packed", "meta", "packed_t", "meta_t", "compressed_swizzled_bitmask")
TILE_ALGORITHMS = {
    "": TileRule.GREEDY_VALUE,
    "largest_abs_values_greedy": TileRule.GREEDY_MAGNITUDE,
    "largest_values_greedy": TileRule.GREEDY_VALUE,
    "causal1122": TileRule.CAUSAL_1122,
    "optimal": TileRule.OPTIMAL,
}
"""The rules for pruning 4x4 tiles by PyTorch's names, its default (""), and ``optimal``, which is ours."""


def tile_rule(algorithm: str) -> TileRule:
    """The rule with this name in PyTorch. Raises InvalidProblemError."""
    if algorithm not in TILE_ALGORITHMS:
        names = ", ".join(repr(name) for name in TILE_ALGORITHMS)
        raise InvalidProblemError(f"algorithm: expected one of {names}, got {algorithm!r}")
    return TILE_ALGORITHMS[algorithm]


class Sparse24Tensor(SparseSemiStructuredTensor):
    """A 2:4 matrix [M, K] of float32, float16, bfloat16, int8 or float8_e4m3fn, on CPU or CUDA.

    ``packed`` [M, K/2] and ``meta`` int16 [M, K/8] are the canonical weight. ``packed_t`` and ``meta_t`` are
    the canonical weight of the transpose, if 4x4 tiles were pruned or the tensor was transposed.
    ``compressed_swizzled_bitmask`` uint8 [M/8, K/8, 8] says which cells of the tiles were kept. Make a tensor
    by :meth:`from_dense` or :meth:`prune_dense_static_sort`. K must be a multiple of 8. M and the sizes of
    the dense operand are free, so nothing is padded.
    """

    BACKEND = "sparse24"
    _DTYPE_SHAPE_CONSTRAINTS: Any = dict.fromkeys(
        (torch.float32, torch.float16, torch.bfloat16, torch.int8, _FP8), _ANY_ROWS
    )
    SPARSE_DISPATCH: dict[Callable[..., Any], Callable[..., Any]]

    @staticmethod
    def __new__(
        cls: type[Sparse24Tensor],
        shape: Any,
        packed: Tensor | None,
        meta: Tensor | None,
        packed_t: Tensor | None,
        meta_t: Tensor | None,
        compressed_swizzled_bitmask: Tensor | None,
        fuse_transpose_cusparselt: bool = False,
        alg_id_cusparselt: int = 0,
        requires_grad: bool = False,
    ) -> Sparse24Tensor:
        """Make a tensor from parts: ours, or CUTLASS's of 16 and 8 bits, which are converted.

        Raises InvalidProblemError (a ValueError) without parts, and for parts that cuSPARSELt compressed,
        because they don't tell the device; FormatError for bad metadata. :func:`from_semi_structured` takes
        all of PyTorch's tensors.
        """
        packed, meta = _own(packed, meta, shape)
        packed_t, meta_t = _own(packed_t, meta_t, shape[::-1])
        held = packed if packed is not None else packed_t
        if held is None:
            raise InvalidProblemError("packed: expected packed or packed_t, got neither")
        tensor: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, device=held.device, dtype=held.dtype, layout=held.layout, requires_grad=requires_grad
        )
        tensor.packed, tensor.meta = packed, meta
        tensor.packed_t, tensor.meta_t = packed_t, meta_t
        tensor.compressed_swizzled_bitmask = compressed_swizzled_bitmask
        tensor.fuse_transpose_cusparselt = fuse_transpose_cusparselt
        tensor.alg_id_cusparselt = alg_id_cusparselt
        made: Sparse24Tensor = tensor
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={self.shape})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in _PARTS if getattr(self, name) is not None]
        about = self.shape, self.fuse_transpose_cusparselt, self.alg_id_cusparselt, self.requires_grad
        return names, about

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner_tensors: Mapping[str, Tensor],
        tensor_meta: tuple[Any, ...],
        outer_size: Any,
        outer_stride: Any,
    ) -> Sparse24Tensor:
        shape, fused, algorithm, requires_grad = tensor_meta
        parts: Any = [inner_tensors.get(name) for name in _PARTS]
        made: Any = cls
        tensor: Sparse24Tensor = made(shape, *parts, fused, algorithm, requires_grad)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = cls.SPARSE_DISPATCH.get(func._overloadpacket)
        if found is None:
            raise UnsupportedError(
                f"{cls.__name__} only supports a specific set of operations, can't perform requested op "
                f"({func.__name__})"
            )
        return found(func, types, args, kwargs or {})

    # Making one ---------------------------------------------------------------------------------------

    @classmethod
    def from_dense(cls, original_tensor: Tensor, alg_id: int = 0) -> Sparse24Tensor:
        """The tensor of a matrix [M, K] that is 2:4 already. On a GPU this waits for the device.

        ``alg_id`` is cuSPARSELt's: it is stored and not used. Raises SemiStructuredError (a RuntimeError) for
        a dtype, shape, device or strides that aren't served; FormatError, with row and group, for a matrix
        that isn't 2:4, of which nothing is dropped.
        """
        cls._validate_device_dim_dtype_shape(original_tensor)
        with torch.no_grad():
            values, meta = _ops.compress(original_tensor.detach())
        options: Any = {"alg_id_cusparselt": alg_id, "requires_grad": original_tensor.requires_grad}
        return cls(original_tensor.shape, values, meta, None, None, None, **options)

    @classmethod
    def prune_dense_static_sort(cls, original_tensor: Tensor, algorithm: str = "") -> Sparse24Tensor:
        """Prune the 4x4 tiles of a matrix [M, K], both multiples of 8, so that its transpose is 2:4 too.

        ``algorithm`` is PyTorch's ``largest_values_greedy`` (the default, which heeds signs),
        ``largest_abs_values_greedy`` or ``causal1122``; or ``optimal``. Raises SemiStructuredError,
        InvalidProblemError.
        """
        cls._validate_device_dim_dtype_shape(original_tensor)
        rule = tile_rule(algorithm).value
        with torch.no_grad():
            parts = _ops.tile_prune(original_tensor.detach(), rule)
        return cls(original_tensor.shape, *parts)

    @classmethod
    def _validate_device_dim_dtype_shape(cls, original_tensor: Tensor) -> None:
        given = original_tensor
        if not isinstance(given, Tensor):
            raise SemiStructuredError(f"original_tensor: expected a tensor, got a {type(given).__name__}")
        if given.device.type not in ("cpu", "cuda", "meta"):
            raise SemiStructuredError(
                f"Error original_tensor.device= {given.device} is not supported! Only CPU and CUDA are."
            )
        if given.dim() != 2:
            raise SemiStructuredError(
                f"Error original_tensor.dim = {given.dim()} is not supported! Only 2d tensors are."
            )
        if not given.is_contiguous():
            raise SemiStructuredError(
                "Error original_tensor is not contiguous! Only contiguous tensors are supported."
            )
        if given.dtype not in cls._DTYPE_SHAPE_CONSTRAINTS:
            raise SemiStructuredError(
                f"Error original_tensor.dtype {given.dtype} is not a supported dtype for {cls}!"
            )
        limits = cls._DTYPE_SHAPE_CONSTRAINTS[given.dtype]
        rows, columns = limits.sparse_min_rows, limits.sparse_min_cols
        m, k = given.shape
        if m < rows or m % rows or k < columns or k % columns:
            raise SemiStructuredError(
                f"Error original_tensor.shape {given.shape} is not supported! Both dimensions must be larger "
                f"than or equal to and a multiple of ({rows}, {columns})"
            )

    # Out of one ---------------------------------------------------------------------------------------

    def to_dense(self, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None) -> Tensor:
        """The dense matrix, bit for bit; not differentiable."""
        with torch.no_grad():
            if self.packed is not None:
                dense: Tensor = _ops.decompress(self.packed.detach(), self.meta)
            else:
                assert self.packed_t is not None
                dense = _ops.decompress(self.packed_t.detach(), self.meta_t).t().contiguous()
        return dense if dtype is None else dense.to(dtype)

    def _mm(
        self,
        B: Tensor,  # noqa: N803 - PyTorch's name
        *,
        bias: Tensor | None = None,
        should_transpose_dense: bool = False,
        **_: Any,
    ) -> Tensor:
        """``self @ B``; with ``should_transpose_dense`` ``B @ self^T + bias``."""
        self._check_mm(B, bias, B.shape[-1 if should_transpose_dense else 0])
        if should_transpose_dense:
            if self.packed is not None:
                return in_dtype(_ops.linear(B, self.packed, self.meta, bias), self.dtype)
            y = self._by_transpose(B)
            return in_dtype(y if bias is None else y + bias, self.dtype)
        if bias is not None:
            raise UnsupportedError("bias: expected None where the sparse operand is the first, got a tensor")
        if self.packed is not None:
            return in_dtype(_ops.mm(self.packed, self.meta, B, may_transpose=True), self.dtype)
        return in_dtype(self._by_transpose(B.t()).t().contiguous(), self.dtype)

    def _by_transpose(self, rows: Tensor) -> Tensor:
        """``rows @ self^T`` from the transpose's parts. Raises UnsupportedError if no kernel serves it."""
        try:
            return _tensor(_ops.dgrad(rows, self.packed_t, self.meta_t, None, self.shape[0]))
        except UnsupportedError as error:
            raise UnsupportedError(
                f"`SparseSemiStructuredTensor` matmul: operation is not supported on a transpose: {error}"
            ) from error

    def _check_mm(self, other: Tensor, bias: Tensor | None, inner: int) -> None:
        name = "SparseSemiStructuredTensor"  # as PyTorch's messages have it
        if isinstance(other, SparseSemiStructuredTensor):
            raise InvalidProblemError(
                "`SparseSemiStructuredTensor @ SparseSemiStructuredTensor` is not supported by the hardware"
            )
        if self.ndim != 2 or other.ndim != 2:
            raise UnsupportedError(f"`{name}` matmul: Broadcasting is not implemented")
        shapes = f"`A={tuple(self.shape)} @ B={tuple(other.shape)}`"
        if other.dtype != self.dtype or (bias is not None and bias.dtype not in (self.dtype, torch.float32)):
            raise UnsupportedError(
                f"`{name}` matmul: trying to do {shapes}, with A.dtype={self.dtype} and "
                f"B.dtype={other.dtype}. "
                "This operation is only supported when A and B have the same data type, and a bias that or "
                "torch.float32."
            )
        if self.dtype == _FP8:
            raise UnsupportedError(
                f"`{name}` matmul: trying to do {shapes}, with A.dtype=B.dtype={self.dtype}. mm is not "
                "supported for float8_e4m3fn, please use `torch._scaled_mm` instead."
            )
        if inner != self.shape[1]:
            raise SemiStructuredProductError(
                f"`{name}` matmul: operation is not supported, expected {self.shape[1]} summands on both "
                f"sides, got a dense operand {list(other.shape)} with {inner}"
            )


def _tensor(value: Any) -> Tensor:
    made: Tensor = value
    return made


def _own(packed: Tensor | None, meta: Tensor | None, shape: Any) -> tuple[Tensor | None, Tensor | None]:
    """The canonical parts of a matrix of this shape, converted if they are CUTLASS's."""
    if packed is None or is_canonical(packed, meta):
        return packed, meta
    if meta is None:
        raise InvalidProblemError(
            "meta: expected a tensor, got None; from_semi_structured converts cuSPARSELt's tensors"
        )
    m, k = shape
    values, words = _ops.from_cutlass(packed.detach(), meta, m, k)
    return _tensor(values), _tensor(words)


# Operations ---------------------------------------------------------------------------------------


def _rebuilt(tensor: Sparse24Tensor, change: Callable[[Tensor], Tensor], **options: Any) -> Sparse24Tensor:
    """A tensor of the same shape whose parts ``change`` makes."""
    parts = [None if (part := getattr(tensor, name)) is None else change(part) for name in _PARTS]
    kind: Any = type(tensor)
    made: Sparse24Tensor = kind(
        tensor.shape, *parts, tensor.fuse_transpose_cusparselt, tensor.alg_id_cusparselt, **options
    )
    return made


def _values(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    (tensor,) = args
    return _tensor(_part(tensor, "packed").detach())


def _indices(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Metadata in CUTLASS's layout, which PyTorch's functions of values and indices read."""
    (tensor,) = args
    return _tensor(_ops.to_cutlass(_part(tensor, "packed").detach(), _part(tensor, "meta")))


def _part(tensor: Sparse24Tensor, name: str) -> Tensor:
    part = getattr(tensor, name)
    if part is None:
        raise UnsupportedError(f"{name}: expected a tensor that isn't a transpose; transpose it back first")
    return _tensor(part)


def _is_same_size(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


def _detach(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    return _rebuilt(args[0], lambda part: part)


def _detach_in_place(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._DisableTorchDispatch():
        return func(*args)


def _clone(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    return _rebuilt(args[0], torch.clone, requires_grad=args[0].requires_grad)


def _transpose(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    (tensor,) = args
    mask = tensor.compressed_swizzled_bitmask
    made: Sparse24Tensor = type(tensor)(
        torch.Size([tensor.shape[1], tensor.shape[0]]),
        tensor.packed_t,
        tensor.meta_t,
        tensor.packed,
        tensor.meta,
        None if mask is None else mask.transpose(0, 1),
        tensor.fuse_transpose_cusparselt,
        tensor.alg_id_cusparselt,
    )
    return made


def _view(func: Any, types: Any, args: Any, kwargs: Any) -> Sparse24Tensor:
    tensor, shape = args
    if tuple(shape) not in (tuple(tensor.shape), (-1, tensor.shape[1]), (tensor.shape[0], -1)):
        raise UnsupportedError(
            f"`view` is not implemented for SparseSemiStructuredTensor, except for the dummy case "
            f"(shape={shape})"
        )
    return _rebuilt(tensor, lambda part: part)


def _mm(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    first, second = args
    if first.ndim != 2 or second.ndim != 2:
        raise UnsupportedError("`SparseSemiStructuredTensor` matmul: Broadcasting is not implemented")
    if isinstance(first, Sparse24Tensor):
        return first._mm(second)
    return _tensor(second.t()._mm(first, should_transpose_dense=True))


def _addmm(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    bias, first, second = args
    if first.ndim != 2 or second.ndim != 2:
        raise UnsupportedError("`SparseSemiStructuredTensor` matmul: Broadcasting is not implemented")
    if bias.ndim != 1:
        raise UnsupportedError(
            f"`SparseSemiStructuredTensor` matmul: only bias dim=1 supported. Shape={bias.shape}"
        )
    if isinstance(first, Sparse24Tensor) or isinstance(bias, Sparse24Tensor):
        raise UnsupportedError("`SparseSemiStructuredTensor` matmul: only operand B of `addmm` can be sparse")
    if any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        raise UnsupportedError(f"`SparseSemiStructuredTensor` addmm: expected alpha and beta 1, got {kwargs}")
    return _tensor(second.t()._mm(first, bias=bias, should_transpose_dense=True))


def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, weight, *rest = args
    bias = rest[0] if rest else kwargs.get("bias")
    if isinstance(x, Sparse24Tensor) or not isinstance(weight, Sparse24Tensor):
        raise UnsupportedError("`SparseSemiStructuredTensor` linear: only the weight can be sparse")
    rows = x.reshape(-1, x.shape[-1])
    y = weight._mm(rows, bias=bias, should_transpose_dense=True)
    return y.view(*x.shape[:-1], weight.shape[0])


def _to_copy(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """A dense tensor on the CPU, as PyTorch's classes do it; on other devices a Sparse24Tensor."""
    tensor = args[0]
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is not None and torch.device(device).type == "cpu":
        return _tensor(func(tensor.to_dense(), **kwargs))
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
    """Serve aten.to, which arrives instead of aten._to_copy in inference mode."""
    tensor, *rest = args
    for given in rest:
        if isinstance(given, (str, torch.device)):
            kwargs = {"device": given, **kwargs}
        elif isinstance(given, torch.dtype):
            kwargs = {"dtype": given, **kwargs}
    wanted = {name: kwargs[name] for name in ("device", "dtype") if kwargs.get(name) is not None}
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
    if out in (None, _FP8):  # no kernel writes fp8: the scaled sum is computed in float32 and rounded once
        wide = _scaled(func, types, args[:4], {"out_dtype": torch.float32})
        most = torch.finfo(_FP8).max
        return wide.clamp(-most, most).to(_FP8)
    if out not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedError(
            "`SparseSemiStructuredTensor` _scaled_mm: expected out_dtype bfloat16, float16, float32 or "
            f"float8_e4m3fn, got {out}"
        )
    if isinstance(a, Sparse24Tensor):
        values, meta = _part(a, "packed"), _part(a, "meta")
        y = _ops.scaled_linear(b.t(), values, meta, scale_b, scale_a, out_dtype=out)
        return _tensor(y.t().contiguous())
    sparse = b.t()
    values, meta = _part(sparse, "packed"), _part(sparse, "meta")
    return _tensor(_ops.scaled_linear(a, values, meta, scale_a, scale_b, out_dtype=out))


Sparse24Tensor.SPARSE_DISPATCH = {
    _aten.values: _values,
    _aten.indices: _indices,
    _aten.is_same_size: _is_same_size,
    _aten.detach_: _detach_in_place,
    _aten.detach: _detach,
    _aten.t: _transpose,
    _aten.view: _view,
    _aten.mm: _mm,
    _aten.matmul: _mm,
    _aten.addmm: _addmm,
    _aten.linear: _linear,
    _aten._to_copy: _to_copy,
    _aten.to: _to,
    _aten._scaled_mm: _scaled,
    _aten.clone: _clone,
}
