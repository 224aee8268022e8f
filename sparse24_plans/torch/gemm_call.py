"""A product by a 2:4 weight as ops pass it: operands, options, its problem, and its result without values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.elements import addends_of, results_of, sources_of
from ..errors import InvalidProblemError
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..vocab import ElementKind, GemmOp, MatrixOrder, ScaleKind
from ..weights.packed_layouts import Quantization
from .activations import epilogue_of
from .elements import DTYPE_OF, STORED_OF, element_of, weight_sizes
from .plan_cache import descriptor, preference_of

Operands = Mapping[str, Tensor | None]
"""Operands by the names and in the order of GemmSparse24Args. None stands for one that is absent."""


class Kind:
    """What tells the products of one op from those of another. This class is the kind of plain products."""

    stacked = ""
    """The descriptor's field that counts the weights that are stacked in one; "" for a single weight."""

    def own_operands(self) -> Operands:
        """Operands that no other kind has."""
        return {}

    def weight_count(self, call: Call) -> Any:
        """The number of stacked weights. Raises InvalidProblemError for a wrong x or a wrong own operand."""
        if call.x.dim() < 1:
            raise InvalidProblemError("x: expected at least one dimension, got a scalar")
        return 1

    def outer(self, call: Call) -> tuple[Any, ...]:
        """All sizes of the result but its width."""
        return tuple(call.x.shape[:-1])

    def fields(self, call: Call) -> dict[str, Any]:
        """The descriptor's fields that depend on the rows and on own operands."""
        return {
            "n": math.prod(call.x.shape[:-1]),
            "x_order": MatrixOrder.COLUMN if is_column_major(call) else MatrixOrder.ROW,
            "y_order": MatrixOrder.COLUMN if call.transposed else MatrixOrder.ROW,
        }

    def operands(self, call: Call) -> dict[str, Tensor | None]:
        """All operands but the weight and y, as kernels take them."""
        return {
            "x": call.x if is_column_major(call) else _rows(call.x),
            "bias": call.bias,
            "scale_x": flat(call.scale_x),
            "scale_w": flat(call.scale_w),
            "c": None if call.residual is None else _rows(call.residual),
        }


PLAIN = Kind()


class Call(NamedTuple):
    """The operands and options of a product.

    Inductor keeps generated code on disk that passes the options by position (:class:`ProductSite`), so a new
    option goes to the end of them, before ``kind``.
    """

    x: Tensor
    """X [..., K]. ``dgrad`` has dY [..., M] here, and ``mm`` has B^T [N, K]."""
    weight: Tensor
    meta: Tensor | None = None
    scales: Tensor | None = None
    """Scales of a quantized weight's groups of columns."""
    bias: Tensor | None = None
    scale_x: Tensor | None = None
    scale_w: Tensor | None = None
    residual: Tensor | None = None
    """Tensor [..., M] that is added to the product before the bias, ``beta`` times."""
    m: int | None = None
    k: int | None = None
    dgrad: bool = False
    activation: str = "none"
    out_dtype: torch.dtype | None = None
    preference: str = ""
    transposed: bool = False
    """Whether the result is Y^T, contiguous, so that Y is column-major."""
    beta: float = 1.0
    group: int = 0
    """Columns of a quantized weight that share a scale; 0: the whole row."""
    scale_dtype: torch.dtype | None = None
    """The dtype of the scales in a quantized weight that is packed; None for every other weight."""
    kind: Kind = PLAIN


OPERANDS = ("x", "weight", "meta", "scales", "bias", "scale_x", "scale_w", "residual")
"""The fields of a call that are tensors; they come first."""
OWN_OPERANDS = ("offsets", "experts", "scale_y", "amax", "y_weights")
"""Operands of single kinds of products. They follow the others in a launch, in this order."""

# The problem of a call ----------------------------------------------------------------------------


def sizes(call: Call) -> tuple[Any, Any, Any]:
    """The number of stacked weights, M of each, and K.

    Raises InvalidProblemError if the operands don't fit together.
    """
    weights, stacked = call.kind.weight_count(call), call.kind.stacked
    width, m, k = call.x.shape[-1], call.m, call.k
    if call.meta is None or stacked:
        m, k = (width if m is None else m, k) if call.dgrad else (m, width if k is None else k)
    by = quantization_of(call)
    rows, k = weight_sizes(call.weight, call.meta, m, k, by)
    wanted, name = (rows, "M") if call.dgrad else (k, "K")
    if width != wanted:
        raise InvalidProblemError(
            f"x: expected [..., {wanted}], the weight's {name}, got {list(call.x.shape)}"
        )
    if rows % weights:
        raise InvalidProblemError(
            f"weight: expected rows in {weights} {stacked} of one size, got {rows} rows"
        )
    m = rows // weights
    _check_shapes(call, [[weights, m], [m]] if stacked == "batches" else [[rows]], m)
    _check_dtypes(call.x.dtype, call.weight.dtype, None if by is None else DTYPE_OF[by.scale_element])
    for name, count in (("scale_x", math.prod(call.x.shape[:-1])), ("scale_w", rows)):
        if (scale := getattr(call, name)) is not None:
            _check_scale(scale, count, name)
    shared = {
        name: getattr(call, name) for name in ("weight", "bias", "scale_x", "scale_w", "scales", "residual")
    }
    for name, one in {**shared, **call.kind.own_operands()}.items():
        if one is not None and one.device != call.x.device:
            raise InvalidProblemError(f"{name}: expected a tensor on {call.x.device}, got {one.device}")
    return weights, m, k


def _check_shapes(call: Call, bias: list[list[Any]], m: Any) -> None:
    """Raise InvalidProblemError unless ``bias`` has the bias's shape, and the residual has the result's."""
    if call.bias is not None and list(call.bias.shape) not in bias:
        raise InvalidProblemError(
            f"bias: expected {' or '.join(map(str, bias))}, got {list(call.bias.shape)}"
        )
    if call.residual is not None and call.residual.shape != (whole := (*call.x.shape[:-1], m)):
        raise InvalidProblemError(f"residual: expected {list(whole)}, got {list(call.residual.shape)}")


def quantization_of(call: Call) -> Quantization | None:
    """How a call's weight is quantized; None if it isn't. Raises InvalidProblemError for the weight's dtype.

    The scales in a packed weight come with no tensor; ``scale_dtype`` is their dtype then.
    """
    dtype = call.scale_dtype if call.scales is None else call.scales.dtype
    if dtype is None:
        return None
    weight = call.weight.dtype
    if weight not in STORED_OF:
        known = ", ".join(map(str, STORED_OF))
        raise InvalidProblemError(f"weight: expected values of {known}, got {weight}")
    return Quantization(STORED_OF[weight], call.group, element_of(dtype, "scales"))


def _check_dtypes(x: torch.dtype, weight: torch.dtype, scales: torch.dtype | None) -> None:
    """Raise InvalidProblemError unless x and the weight, or a quantized weight's scales, fit together."""
    if scales is None:
        element = element_of(weight, "weight")
        if element_of(x, "x") not in (expected := sources_of(element)):
            names = " or ".join(str(DTYPE_OF[one]) for one in expected)
            raise InvalidProblemError(f"x: expected {names}, as the weight, got {x}")
        return
    if x not in (torch.float16, torch.bfloat16):
        raise InvalidProblemError(f"x: expected torch.float16 or torch.bfloat16, got {x}")
    if scales not in (x, torch.float32):
        raise InvalidProblemError(f"scales: expected {x} or torch.float32, got {scales}")


def _check_scale(scale: Tensor, rows: int, argument: str) -> None:
    """Raise InvalidProblemError unless the scale is float32 with one element, or one for each row."""
    if scale.dtype != torch.float32:
        raise InvalidProblemError(f"{argument}: expected torch.float32, got {scale.dtype}")
    if scale.numel() not in (1, rows):
        raise InvalidProblemError(f"{argument}: expected 1 or {rows} elements, got {list(scale.shape)}")


def scale_kind(scale: Tensor | None) -> ScaleKind | None:
    """The descriptor's field for the scale; None without one."""
    if scale is None:
        return None
    return ScaleKind.TENSOR if scale.numel() == 1 else ScaleKind.ROW


def describe(call: Call, weights: int, m: int, k: int, **rows: Any) -> GemmSparse24Descriptor:
    """The descriptor of the product. ``rows`` are the fields that its kind gives.

    Raises InvalidProblemError naming the field.
    """
    fields = _fields_of(call)
    found: GemmSparse24Descriptor = descriptor(
        GemmSparse24Plan,
        m=m,
        k=k,
        op=GemmOp.DGRAD if call.dgrad else GemmOp.FORWARD,
        beta=_beta_of(call.residual, call.beta),
        c_element=_residual_element(call.residual if call.beta else None, fields),
        **({call.kind.stacked: weights} if call.kind.stacked else {}),
        **fields,
        **rows,
    )
    return found


def _fields_of(call: Call) -> dict[str, Any]:
    """The descriptor's fields of elements, epilogue and scales. Raises InvalidProblemError naming one."""
    by = quantization_of(call)
    x_element = element_of(call.x.dtype, "x")
    return {
        "element": x_element if by is not None else element_of(call.weight.dtype, "weight"),
        "x_element": x_element,
        "epilogue": epilogue_of(call.activation, call.bias is not None, gates=True),
        "out_element": None if call.out_dtype is None else element_of(call.out_dtype, "out_dtype"),
        "bias_element": None if call.bias is None else element_of(call.bias.dtype, "bias"),
        "scale_x": scale_kind(call.scale_x),
        "scale_w": scale_kind(call.scale_w),
        **({} if by is None else by.problem),
    }


def _beta_of(residual: Tensor | None, beta: float) -> float | None:
    """The descriptor's ``beta``; None without a residual, which a ``beta`` of 0 leaves out, too.

    Raises InvalidProblemError for a factor without the residual that it would multiply.
    """
    if residual is None and beta not in (0, 1):
        raise InvalidProblemError(f"beta: expected 1, the default, without a residual, got {beta}")
    return None if residual is None or beta == 0 else beta


def _residual_element(residual: Tensor | None, fields: dict[str, Any]) -> ElementKind | None:
    """The descriptor's ``c_element``; None without a residual. Raises InvalidProblemError for its dtype."""
    if residual is None:
        return None
    out = fields["out_element"] or results_of(fields["element"])[0]
    c, expected = element_of(residual.dtype, "residual"), addends_of(out)
    if c not in expected:
        raise InvalidProblemError(f"residual: expected {' or '.join(dict.fromkeys(expected))}, got {c}")
    return c


def fake_result(call: Call) -> Tensor:
    """The result's shape, dtype and strides, without a value; ``x`` may have symbolic sizes."""
    preference_of(call.preference)
    _, m, k = sizes(call)
    desc = describe(call, 1, 16, 8, n=1)  # any sizes do for the dtypes; x may have symbols
    outputs = m // 2 if desc.epilogue.is_gated else m
    shape = (*call.kind.outer(call), k if call.dgrad else outputs)
    if call.transposed:
        shape = shape[::-1]
    return call.x.new_empty(shape, dtype=DTYPE_OF[desc.out_element])


# Operands as kernels take them --------------------------------------------------------------------


def is_column_major(call: Call) -> bool:
    """Whether kernels read x column-major, as it is. A GPU needs columns of whole 16 bytes."""
    x = call.x
    if not call.transposed or x.dim() != 2 or x.shape[0] < 2 or x.stride(1) == 1 or x.stride(0) != 1:
        return False
    return not x.is_cuda or x.shape[0] * x.element_size() % 16 == 0


def _rows(x: Tensor) -> Tensor:
    """x as [n, width] with contiguous rows: a view, or a copy where no view can be."""
    width = x.shape[-1]
    n = x.numel() // width if width else math.prod(x.shape[:-1])
    if not x.numel():  # strides without an element mean nothing
        return x.new_empty(n, width)
    try:
        rows = x.view(n, width)
    except RuntimeError:
        return x.contiguous().view(n, width)
    if (n > 1 and rows.stride(0) < width) or (width > 1 and rows.stride(1) != 1):
        return x.contiguous().view(n, width)
    return rows


def flat(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(-1)
