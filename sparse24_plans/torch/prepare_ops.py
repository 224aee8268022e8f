"""The ops that prepare weights: prune, compress, decompress, pack, unpack, tile_prune and apply_mask.

Each but ``pack_quantized`` runs a plan of ``prepare`` on PyTorch's memory and current stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..device.tensors import TensorView
from ..errors import InvalidProblemError
from ..prepare import args as prepare_args
from ..prepare import plan as prepare_plans
from ..vocab import ElementKind, MaskLayout
from ..weights.packed_layouts import Quantization, layout_of, quantized_tiles
from ..weights.packing_quantized import pack_quantized
from .elements import (
    STORED_OF,
    canonical_weight,
    element_of,
    meta_view,
    packed_weight,
    quantized_weight,
    stream_argument,
    tensor_of,
    weight_sizes,
)
from .library import define
from .packed_weight_cache import cupy_on_torch_stream
from .plan_cache import CheckedCall, descriptor, plans, select

_ops: Any = torch.ops.sparse24


# Problems -----------------------------------------------------------------------------------------


def _matrix_fields(dense: Tensor) -> dict[str, Any]:
    """m, k and element of a matrix. Raises InvalidProblemError."""
    if dense.dim() != 2:
        raise InvalidProblemError(f"dense: expected a matrix [M, K], got {list(dense.shape)}")
    m, k = dense.shape
    return {"m": m, "k": k, "element": element_of(dense.dtype, "dense")}


def _ranked_fields(dense: Tensor, scores: Tensor | None) -> dict[str, Any]:
    """The fields of a matrix with scores. Raises InvalidProblemError if their shapes or devices differ."""
    fields = _matrix_fields(dense)
    if scores is None:
        return fields
    if scores.shape != dense.shape or scores.device != dense.device:
        raise InvalidProblemError(
            f"scores: expected {list(dense.shape)} on {dense.device}, got {list(scores.shape)} "
            f"on {scores.device}"
        )
    return {**fields, "scores": element_of(scores.dtype, "scores")}


def _mask_fields(dense: Tensor, mask: Tensor) -> dict[str, Any]:
    layout = MaskLayout.TILES if mask.dim() == 3 else MaskLayout.ROWS
    return {**_matrix_fields(dense), "layout": layout}


def _check(plan: Any, fields: dict[str, Any]) -> None:
    """Raise what the op itself would raise, if all sizes are known."""
    if all(isinstance(value, (int, str)) for value in fields.values()):
        descriptor(plan, **fields)


# Results without values ---------------------------------------------------------------------------


def empty_canonical(like: Tensor, m: Any, k: Any) -> tuple[Tensor, Tensor]:
    """Values and metadata of a weight [m, k], uninitialised."""
    return like.new_empty((m, k // 2)), like.new_empty((m, k // 8), dtype=torch.int16)


def _empty_packed(values: Tensor, m: Any, k: Any) -> Tensor:
    """A packed weight [m, k], uninitialised. Raises UnsupportedError for elements that aren't packed."""
    down, across, nbytes = layout_of(element_of(values.dtype, "values")).packed_shape(m, k)
    return values.new_empty((down, across, nbytes // values.element_size()))


def _empty_tiles(dense: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of tile_prune, uninitialised."""
    m, k = dense.shape
    mask = dense.new_empty((m // 8, k // 8, 8), dtype=torch.uint8)
    return (*empty_canonical(dense, m, k), *empty_canonical(dense, k, m), mask)


def _empty_dense(dense: Tensor) -> Tensor:
    return torch.empty_like(dense, memory_format=torch.contiguous_format)


def _run(plan: Any, args: Any, tensor: Tensor, *, check: bool = False) -> None:
    """Run on PyTorch's current stream of the tensor's device. ``check`` waits and raises what was found."""
    stream = stream_argument(tensor)
    plan.run(args, stream=stream)
    if check:
        plan.check(args, stream=stream)


def _prune(dense: Tensor, scores: Tensor | None = None) -> Tensor:
    plan = select(prepare_plans.PruneSparse24Plan, dense, **_ranked_fields(dense, scores))
    pruned = _empty_dense(dense)
    ranks = None if scores is None else scores.contiguous()
    _run(plan, prepare_args.PruneSparse24Args(dense.contiguous(), pruned, None, ranks), dense)
    return pruned


def _compress(dense: Tensor) -> tuple[Tensor, Tensor]:
    plan = select(prepare_plans.CompressSparse24Plan, dense, **_matrix_fields(dense))
    values, meta = empty_canonical(dense, *dense.shape)
    status = torch.empty(8, dtype=torch.uint8, device=dense.device)
    args = prepare_args.CompressSparse24Args(dense.contiguous(), values, meta_view(meta), status)
    _run(plan, args, dense, check=True)
    return values, meta


def _prune_compress(dense: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    plan = select(prepare_plans.PruneCompressSparse24Plan, dense, **_ranked_fields(dense, scores))
    values, meta = empty_canonical(dense, *dense.shape)
    ranks = None if scores is None else scores.contiguous()
    args = prepare_args.PruneCompressSparse24Args(dense.contiguous(), values, meta_view(meta), ranks)
    _run(plan, args, dense)
    return values, meta


def _decompress(values: Tensor, meta: Tensor) -> Tensor:
    m, k = weight_sizes(values, meta, None, None)
    element = element_of(values.dtype, "values")
    plan = select(prepare_plans.DecompressSparse24Plan, values, m=m, k=k, element=element)
    dense = values.new_empty((m, k))
    weight = canonical_weight(values.contiguous(), meta.contiguous())
    _run(plan, prepare_args.DecompressSparse24Args(weight, dense), values)
    return dense


def _pack(values: Tensor, meta: Tensor) -> Tensor:
    m, k = weight_sizes(values, meta, None, None)
    packed = _empty_packed(values, m, k)
    element = element_of(values.dtype, "values")
    plan = select(prepare_plans.PackSparse24Plan, values, m=m, k=k, element=element)
    weight = canonical_weight(values.contiguous(), meta.contiguous())
    _run(plan, prepare_args.PackSparse24Args(weight, TensorView.of(packed.view(torch.uint8))), values)
    return packed


def _pack_quantized(values: Tensor, meta: Tensor, scales: Tensor, group: int = 0) -> Tensor:
    _quantized_sizes(values, meta, scales, group)
    values, meta, scales = (one.contiguous() for one in (values, meta, scales))
    dtype = torch.bfloat16 if scales.dtype == torch.float32 else scales.dtype  # the tiles don't tell W's
    with cupy_on_torch_stream(values):
        tiles = pack_quantized(quantized_weight(values, meta, scales, group, dtype)).buffers[0]
        return tensor_of(tiles.bits(), ElementKind.U8).view(values.dtype).clone()


def _quantized_sizes(values: Tensor, meta: Tensor, scales: Tensor, group: int) -> tuple[Any, ...]:
    """The shape of the tiles of a quantized weight. Raises InvalidProblemError for wrong operands."""
    if values.dtype not in STORED_OF:
        raise InvalidProblemError(f"values: expected {', '.join(map(str, STORED_OF))}, got {values.dtype}")
    by = Quantization(STORED_OF[values.dtype], group, element_of(scales.dtype, "scales"))
    return quantized_tiles(by).packed_shape(*weight_sizes(values, meta, None, None, by))


def _unpack(packed: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    weight_sizes(packed, None, m, k)
    element = element_of(packed.dtype, "packed")
    plan = select(prepare_plans.PackSparse24Plan, packed, m=m, k=k, element=element, direction="unpack")
    values, meta = empty_canonical(packed, m, k)
    status = torch.empty(8, dtype=torch.uint8, device=packed.device)
    weight = packed_weight(packed.contiguous(), m, k)
    _run(plan, prepare_args.UnpackSparse24Args(weight, values, meta_view(meta), status), packed, check=True)
    return values, meta


def _tile_prune(dense: Tensor, rule: str = "greedy_magnitude") -> tuple[Tensor, ...]:
    plan = select(prepare_plans.TilePruneSparse24Plan, dense, **_matrix_fields(dense), rule=rule)
    results = _empty_tiles(dense)
    values, meta, values_t, meta_t, mask = results
    args = prepare_args.TilePruneSparse24Args(
        dense.contiguous(), values, meta_view(meta), values_t, meta_view(meta_t), mask
    )
    _run(plan, args, dense)
    return results


def _apply_mask(dense: Tensor, mask: Tensor) -> Tensor:
    plan = select(prepare_plans.MaskSparse24Plan, dense, **_mask_fields(dense, mask))
    masked = _empty_dense(dense)
    _run(plan, prepare_args.MaskSparse24Args(dense.contiguous(), mask.contiguous(), masked), dense)
    return masked


class _Quantize(CheckedCall):
    """The plan that quantizes rows of one form."""

    def __init__(self, rows: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: int) -> None:
        m, k = rows.shape
        elements = {"element": element_of(rows.dtype, "x"), "out_element": element_of(dtype, "dtype")}
        fields = {"m": m, "k": k, **elements, "static_scale": scale is not None}
        plan = select(prepare_plans.QuantizeSparse24Plan, rows, **fields)
        self._columns, self._dtype, self._pads = columns, dtype, columns > k
        quantized, scales = self._made(rows, scale)
        args = prepare_args.QuantizeSparse24Args(rows, quantized[:, :k], scales.reshape(-1))
        super().__init__(plan, plan.caller(args), rows.device)

    def _made(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        outer, make = x.shape[:-1], x.new_zeros if self._pads else x.new_empty
        quantized = make((*outer, self._columns), dtype=self._dtype)
        return quantized, x.new_empty((*outer, 1), dtype=torch.float32) if scale is None else scale

    def run(self, x: Tensor, rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """x in 8 bits, and its scales or the given one. ``rows`` is x as a matrix."""
        quantized, scales = self._made(x, scale)
        self._launch((rows.data_ptr(), quantized.data_ptr(), scales.data_ptr()))
        return quantized, scales


def quantize_rows(x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
    """x [..., K] in ``dtype``, padded with zeros to ``columns``, and its scales [..., 1] or the given one.

    Raises InvalidProblemError, and UnsupportedError for a GPU without a kernel.
    """
    _check_quantize(x, dtype, scale, columns)
    k = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), k)
    if (k > 1 and rows.stride(1) != 1) or rows.stride(0) < k:
        rows = rows.contiguous()
    form = (_Quantize, rows.shape, rows.stride(), rows.dtype, rows.device, dtype, scale is None, columns)
    found = plans.get(form)
    if found is None:
        found = plans.keep(form, _Quantize(rows, dtype, scale, columns))
    made: tuple[Tensor, Tensor] = found.run(x, rows, scale)
    return made


def _quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
    """The op's second result is empty if a scale is given, because it may not be an argument."""
    quantized, scales = quantize_rows(x, dtype, scale, columns)
    return quantized, scales if scale is None else scales.new_empty(0)


def _check_quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: Any) -> None:
    if not x.dim():
        raise InvalidProblemError("x: expected [..., K], got a number")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device):
        raise InvalidProblemError(
            f"scale: expected one float32 on {x.device}, got {scale.dtype} {list(scale.shape)} "
            f"on {scale.device}"
        )
    if columns < x.shape[-1]:
        raise InvalidProblemError(f"columns: expected at least {x.shape[-1]}, got {columns}")


def _fake_quantize(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, columns: Any
) -> tuple[Tensor, Tensor]:
    _check_quantize(x, dtype, scale, columns)
    for kind, name in ((x.dtype, "x"), (dtype, "dtype")):
        element_of(kind, name)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    quantized = x.new_empty((*x.shape[:-1], columns), dtype=dtype)
    return quantized, scales if scale is None else scales.new_empty(0)


def kept_values(dense: Tensor, meta: Tensor) -> Tensor:
    """The values [M, K/2] of a dense matrix [M, K] at the positions that metadata names."""
    m, k = dense.shape
    codes = meta.contiguous().view(torch.uint8).to(torch.int64)
    positions = torch.stack([codes & 3, codes >> 2 & 3], dim=-1)
    return dense.reshape(m, k // 4, 4).gather(2, positions).reshape(m, k // 2)


def _fake_prune(dense: Tensor, scores: Tensor | None = None) -> Tensor:
    _check(prepare_plans.PruneSparse24Plan, _ranked_fields(dense, scores))
    return _empty_dense(dense)


def _fake_compress(dense: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check(prepare_plans.PruneCompressSparse24Plan, _ranked_fields(dense, scores))
    return empty_canonical(dense, *dense.shape)


def _fake_decompress(values: Tensor, meta: Tensor) -> Tensor:
    return values.new_empty(weight_sizes(values, meta, None, None))


def _fake_pack(values: Tensor, meta: Tensor) -> Tensor:
    return _empty_packed(values, *weight_sizes(values, meta, None, None))


def _fake_pack_quantized(values: Tensor, meta: Tensor, scales: Tensor, group: int = 0) -> Tensor:
    return values.new_empty(_quantized_sizes(values, meta, scales, group))


def _fake_unpack(packed: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    weight_sizes(packed, None, m, k)
    return empty_canonical(packed, m, k)


def _fake_tile_prune(dense: Tensor, rule: str = "greedy_magnitude") -> tuple[Tensor, ...]:
    _check(prepare_plans.TilePruneSparse24Plan, {**_matrix_fields(dense), "rule": rule})
    return _empty_tiles(dense)


def _fake_apply_mask(dense: Tensor, mask: Tensor) -> Tensor:
    _check(prepare_plans.MaskSparse24Plan, _mask_fields(dense, mask))
    return _empty_dense(dense)


def _prune_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _prune_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dense, scores = ctx.saved_tensors
    _, meta = _ops.prune_compress(dense.detach(), scores)
    return _ops.decompress(kept_values(grad, meta), meta), None


def _compress_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.inputs = len(inputs)
    ctx.save_for_backward(output[1])


def _compress_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    (meta,) = ctx.saved_tensors
    return (_ops.decompress(grad.contiguous(), meta), *[None] * (ctx.inputs - 1))


def _save_second(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _decompress_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (meta,) = ctx.saved_tensors
    return kept_values(grad, meta), None


def _tile_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[3], output[4])


def _tile_backward(ctx: Any, grad: Any, _: Any, grad_t: Any, __: Any, ___: Any) -> tuple[Any, ...]:
    meta, meta_t, mask = ctx.saved_tensors
    parts = []
    if grad is not None:
        parts.append(_ops.decompress(grad.contiguous(), meta))
    if grad_t is not None:
        parts.append(_ops.decompress(grad_t.contiguous(), meta_t).t())
    # Metadata names two positions in every group. The mask drops those that hold no kept cell.
    return (_ops.apply_mask(sum(parts), mask) if parts else None), None


def _mask_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return _ops.apply_mask(grad.contiguous(), mask), None


define(
    "prune(Tensor dense, Tensor? scores=None) -> Tensor",
    _prune,
    _fake_prune,
    backward=_prune_backward,
    setup_context=_prune_context,
)
define(
    "compress(Tensor dense) -> (Tensor, Tensor)",
    _compress,
    _fake_compress,
    backward=_compress_backward,
    setup_context=_compress_context,
)
define(
    "prune_compress(Tensor dense, Tensor? scores=None) -> (Tensor, Tensor)",
    _prune_compress,
    _fake_compress,
    backward=_compress_backward,
    setup_context=_compress_context,
)
define(
    "decompress(Tensor values, Tensor meta) -> Tensor",
    _decompress,
    _fake_decompress,
    backward=_decompress_backward,
    setup_context=_save_second,
)
define("pack(Tensor values, Tensor meta) -> Tensor", _pack, _fake_pack)
define(
    "pack_quantized(Tensor values, Tensor meta, Tensor scales, int group=0) -> Tensor",
    _pack_quantized,
    _fake_pack_quantized,
)
define("unpack(Tensor packed, SymInt m, SymInt k) -> (Tensor, Tensor)", _unpack, _fake_unpack)
define(
    'tile_prune(Tensor dense, str rule="greedy_magnitude") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    _tile_prune,
    _fake_tile_prune,
    backward=_tile_backward,
    setup_context=_tile_context,
)
define(
    "apply_mask(Tensor dense, Tensor mask) -> Tensor",
    _apply_mask,
    _fake_apply_mask,
    backward=_mask_backward,
    setup_context=_save_second,
)
define(
    "quantize(Tensor x, ScalarType dtype, Tensor? scale, SymInt columns) -> (Tensor, Tensor)",
    _quantize,
    _fake_quantize,
)
