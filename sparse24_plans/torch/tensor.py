"""``Sparse24Tensor``: a 2:4 matrix as a tensor, for code written against PyTorch's semi-structured sparsity.

It is a ``torch.sparse.SparseSemiStructuredTensor`` with the same constructor, attributes, operations and
errors. docs/pytorch.md lists what it can do beyond PyTorch's own two classes; tensor_ops.py has its
operations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.sparse.semi_structured import SparseSemiStructuredTensor

from .._version import __version__
from ..errors import InvalidProblemError, UnsupportedError, shown
from ..vocab import TileRule, integer
from .elements import canonical_weight, in_dtype, weight_sizes
from .foreign import is_canonical

_ops: Any = torch.ops.sparse24


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
FP8 = torch.float8_e4m3fn
PARTS = ("packed", "meta", "packed_t", "meta_t", "compressed_swizzled_bitmask")
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
        (torch.float32, torch.float16, torch.bfloat16, torch.int8, FP8), _ANY_ROWS
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

        Raises InvalidProblemError (a ValueError) without parts, for parts that don't fit the shape or one
        another, and for parts that cuSPARSELt compressed, because they don't tell the device; FormatError for
        bad metadata of CUTLASS. :func:`from_semi_structured` takes all of PyTorch's tensors.
        """
        m, k = sizes = _sizes_of(shape)
        parts = (
            *_own("", packed, meta, sizes),
            *_own("_t", packed_t, meta_t, (k, m)),
            compressed_swizzled_bitmask,
        )
        _check_together(sizes, *parts)
        options = fuse_transpose_cusparselt, alg_id_cusparselt, requires_grad
        return cls._of(torch.Size(sizes), parts, *options)

    @classmethod
    def _of(cls, shape: Any, parts: Any, fused: bool, algorithm: int, requires_grad: bool) -> Sparse24Tensor:
        """A tensor of canonical parts, unchecked."""
        held = parts[0] if parts[0] is not None else parts[2]
        about = {"device": held.device, "dtype": held.dtype, "layout": held.layout}
        tensor: Sparse24Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, requires_grad=requires_grad, **about
        )
        for name, part in zip(PARTS, parts, strict=True):
            setattr(tensor, name, part)
        tensor.fuse_transpose_cusparselt, tensor.alg_id_cusparselt = fused, algorithm
        return tensor

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner_tensors: Mapping[str, Tensor],
        tensor_meta: tuple[Any, ...],
        outer_size: Any,
        outer_stride: Any,
    ) -> Sparse24Tensor:
        shape, fused, algorithm, requires_grad = tensor_meta
        parts = [inner_tensors.get(name) for name in PARTS]
        return cls._of(shape, parts, fused, algorithm, requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """The facts that compiled code for this tensor depends on; the same in every process."""
        names, about = self.__tensor_flatten__()
        parts = [(p.dtype, p.shape, p.stride(), p.device) for p in (getattr(self, name) for name in names)]
        served = [
            (str(op), f"{function.__module__}.{getattr(function, '__qualname__', function)}")
            for op, function in self.SPARSE_DISPATCH.items()
        ]
        known = type(self).__qualname__, __version__, served, names, about, parts
        return hashlib.blake2b(str(known).encode(), digest_size=16).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let ``torch.load`` rebuild a tensor through :func:`load_tensor`, which checks what a file holds."""
        if type(self) is not Sparse24Tensor:
            return super().__reduce_ex__(protocol)
        options = self.fuse_transpose_cusparselt, self.alg_id_cusparselt, self.requires_grad
        held = {"fuse_transpose_cusparselt", "alg_id_cusparselt"}
        others = {name: value for name, value in self.__dict__.items() if name not in held}
        parts = [getattr(self, name) for name in PARTS]
        return load_tensor, (tuple(self.shape), *parts, *options, others)

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

    @classmethod
    def _load_dispatch_table(
        cls, custom_dispatch_table: Mapping[Any, Callable[..., Any]] | None = None
    ) -> None:
        """Serve the operations of a custom table, too, in place of ours where both have one.

        A table maps an operation, such as ``torch.ops.aten.relu``, to a function of (func, types, args,
        kwargs), as in PyTorch. It holds for the class and its subclasses. Raises InvalidProblemError.
        """
        custom = {} if custom_dispatch_table is None else custom_dispatch_table
        if not isinstance(custom, Mapping):
            raise InvalidProblemError(f"custom_dispatch_table: expected a mapping, got {shown(custom)}")
        for op, function in custom.items():
            if not isinstance(op, torch._ops.OpOverloadPacket) or not callable(function):
                raise InvalidProblemError(
                    "custom_dispatch_table: expected functions by operations such as torch.ops.aten.relu, "
                    f"got {shown(function)} for {shown(op)}"
                )
        cls.SPARSE_DISPATCH = {**cls.SPARSE_DISPATCH, **custom}

    # Memory -------------------------------------------------------------------------------------------

    # The tensor itself has no memory, which PyTorch's own methods would read and write at address 0.

    @property
    def data(self) -> Any:
        """The detached tensor. Setting it raises UnsupportedError, because the parts would stay."""
        return self.detach()

    @data.setter
    def data(self, value: object) -> None:
        raise UnsupportedError(
            f"data: a {type(self).__name__} keeps its parts, so no other tensor can be set; assign a new "
            "parameter, or call torch.utils.swap_tensors. A model moves to the CPU, where the tensor becomes "
            "dense, after torch.__future__.set_overwrite_module_params_on_conversion(True)"
        )

    def share_memory_(self) -> Sparse24Tensor:
        """Move the parts to memory that processes share."""
        for part in self._held_parts():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the parts lie in memory that processes share."""
        return all(part.is_shared() for part in self._held_parts())

    def _held_parts(self) -> list[Tensor]:
        return [part for name in PARTS if (part := getattr(self, name)) is not None]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: DLPack has no 2:4 matrices."""
        raise UnsupportedError(
            f"__dlpack__: expected a dense tensor, got a {type(self).__name__}; take its to_dense()"
        )

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
        residual: Tensor | None = None,
        beta: float = 1.0,
        should_transpose_dense: bool = False,
        **_: Any,
    ) -> Tensor:
        """``self @ B``; with ``should_transpose_dense`` ``B @ self^T + bias + beta * residual``."""
        self._check_mm(B, bias if residual is None else residual, -1 if should_transpose_dense else 0)
        if should_transpose_dense:
            if self.packed is not None:
                y = _ops.linear(B, self.packed, self.meta, bias, residual=residual, beta=beta)
                return in_dtype(y, self.dtype)
            y = self._by_transpose(B)
            y = y if residual is None else y + beta * residual
            return in_dtype(y if bias is None else y + bias, self.dtype)
        if bias is not None:
            raise UnsupportedError("bias: expected None where the sparse operand is the first, got a tensor")
        if self.packed is not None:
            return in_dtype(_ops.mm(self.packed, self.meta, B, may_transpose=True), self.dtype)
        return in_dtype(self._by_transpose(B.t()).t().contiguous(), self.dtype)

    def _by_transpose(self, rows: Tensor) -> Tensor:
        """``rows @ self^T`` from the transpose's parts. Raises UnsupportedError if no kernel serves it."""
        try:
            y: Tensor = _ops.dgrad(rows, self.packed_t, self.meta_t, None, self.shape[0])
            return y
        except UnsupportedError as error:
            raise UnsupportedError(
                f"`SparseSemiStructuredTensor` matmul: operation is not supported on a transpose: {error}"
            ) from error

    def _check_mm(self, other: Tensor, bias: Tensor | None, summed: int) -> None:
        """Raise for operands that don't fit. ``summed`` is the dimension of ``other`` that is summed over."""
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
        if self.dtype == FP8:
            raise UnsupportedError(
                f"`{name}` matmul: trying to do {shapes}, with A.dtype=B.dtype={self.dtype}. mm is not "
                "supported for float8_e4m3fn, please use `torch._scaled_mm` instead."
            )
        if (inner := other.shape[summed]) != self.shape[1]:
            raise SemiStructuredProductError(
                f"`{name}` matmul: operation is not supported, expected {self.shape[1]} summands on both "
                f"sides, got a dense operand {list(other.shape)} with {inner}"
            )


# Parts --------------------------------------------------------------------------------------------


def _sizes_of(shape: Any) -> tuple[int, int]:
    """M and K. Raises InvalidProblemError for what is no shape of a matrix."""
    sizes = [integer(size) for size in shape] if isinstance(shape, (tuple, list)) else []
    if len(sizes) != 2 or any(size is None or size < 0 for size in sizes):
        raise InvalidProblemError(f"shape: expected the two sizes [M, K], got {shown(shape)}")
    return sizes[0], sizes[1]  # type: ignore[return-value]


def _own(
    which: str, packed: Tensor | None, meta: Tensor | None, sizes: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """The canonical parts of a matrix [M, K], converted if they are CUTLASS's.

    ``which`` ends the parts' names. Raises InvalidProblemError for parts of another shape.
    """
    for name, part in (("packed", packed), ("meta", meta)):
        if part is not None and not isinstance(part, Tensor):
            raise InvalidProblemError(f"{name}{which}: expected a tensor or None, got {shown(part)}")
    if packed is None:
        if meta is not None:
            raise InvalidProblemError(f"meta{which}: expected None without packed{which}, got a tensor")
        return None, None
    if packed.dtype not in Sparse24Tensor._DTYPE_SHAPE_CONSTRAINTS:
        raise InvalidProblemError(f"packed{which}: expected a dtype of 2:4 matrices, got {packed.dtype}")
    if meta is None:
        raise InvalidProblemError(
            f"meta{which}: expected a tensor, got None; from_semi_structured converts cuSPARSELt's tensors"
        )
    if not is_canonical(packed, meta):
        packed, meta = _ops.from_cutlass(packed.detach(), meta, *sizes)
    found = weight_sizes(packed, meta, None, None)
    if found != sizes:
        raise InvalidProblemError(
            f"packed{which}: expected parts of a matrix {list(sizes)}, got those of {list(found)}"
        )
    return packed, meta


def _check_together(
    sizes: tuple[int, int],
    packed: Tensor | None,
    meta: Tensor | None,
    packed_t: Tensor | None,
    meta_t: Tensor | None,
    mask: Tensor | None,
) -> None:
    """Raise InvalidProblemError for parts that don't belong to one tensor."""
    held = packed if packed is not None else packed_t
    if held is None:
        raise InvalidProblemError("packed: expected packed or packed_t, got neither")
    if packed_t is not None and (packed_t.dtype, packed_t.device) != (held.dtype, held.device):
        raise InvalidProblemError(
            f"packed_t: expected {held.dtype} on {held.device}, as packed, got {packed_t.dtype} on "
            f"{packed_t.device}"
        )
    if mask is None:
        return
    least = [-(-size // 8) for size in sizes]  # PyTorch's packer pads a mask
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.uint8 and mask.dim() == 3
    if not is_mask or mask.shape[2] != 8 or any(n < m for n, m in zip(mask.shape, least, strict=False)):
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else shown(mask)
        raise InvalidProblemError(
            f"compressed_swizzled_bitmask: expected uint8 {[*least, 8]} or larger, got {got}"
        )
    if mask.device != held.device:
        raise InvalidProblemError(
            f"compressed_swizzled_bitmask: expected a tensor on {held.device}, got {mask.device}"
        )


def load_tensor(
    shape: Any,
    packed: Tensor | None,
    meta: Tensor | None,
    packed_t: Tensor | None,
    meta_t: Tensor | None,
    mask: Tensor | None,
    fused: bool,
    algorithm: int,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Sparse24Tensor:
    """The tensor that a file of ``torch.save`` holds. ``torch.load(weights_only=True)`` may call this.

    Raises what the constructor raises, and FormatError for bad metadata.
    """
    tensor = Sparse24Tensor(
        shape, packed, meta, packed_t, meta_t, mask, fused, algorithm, bool(requires_grad)
    )
    if not isinstance(attributes, dict):
        raise InvalidProblemError(f"attributes: expected a dict, got {shown(attributes)}")
    for values, words in ((tensor.packed, tensor.meta), (tensor.packed_t, tensor.meta_t)):
        if values is not None and words is not None and not values.is_meta:
            canonical_weight(values.detach(), words, validate=True)
    tensor.__dict__.update(attributes)
    return tensor


torch.serialization.add_safe_globals([load_tensor])
