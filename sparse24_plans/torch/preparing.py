"""What the ops that prepare weights do on a device: plans of ``prepare`` on PyTorch's memory and stream."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..device.tensors import TensorView
from ..errors import InvalidProblemError
from ..prepare.args import (
    CompressSparse24Args,
    DecompressSparse24Args,
    MaskSparse24Args,
    PackSparse24Args,
    PruneCompressSparse24Args,
    PruneSparse24Args,
    TilePruneSparse24Args,
    UnpackSparse24Args,
)
from ..prepare.descriptor import (
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    MaskSparse24Descriptor,
    PackSparse24Descriptor,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    TilePruneSparse24Descriptor,
)
from ..prepare.plan import (
    CompressSparse24Plan,
    DecompressSparse24Plan,
    MaskSparse24Plan,
    PackSparse24Plan,
    PreparePlan,
    PruneCompressSparse24Plan,
    PruneSparse24Plan,
    TilePruneSparse24Plan,
)
from ..vocab import MaskLayout
from ..weights.packed_layouts import layout_of
from .elements import (
    canonical_weight,
    element_of,
    meta_view,
    packed_weight,
    plan_device,
    stream_argument,
    weight_sizes,
)

_PLANS: dict[type[Any], type[PreparePlan]] = {
    CompressSparse24Descriptor: CompressSparse24Plan,
    DecompressSparse24Descriptor: DecompressSparse24Plan,
    MaskSparse24Descriptor: MaskSparse24Plan,
    PackSparse24Descriptor: PackSparse24Plan,
    PruneCompressSparse24Descriptor: PruneCompressSparse24Plan,
    PruneSparse24Descriptor: PruneSparse24Plan,
    TilePruneSparse24Descriptor: TilePruneSparse24Plan,
}


@lru_cache(maxsize=4096)
def describe(kind: type[Any], **fields: Any) -> Any:
    """The descriptor, made once. Raises InvalidProblemError naming the field."""
    return kind(**fields)


def _plan(kind: type[Any], tensor: Tensor, **fields: Any) -> Any:
    descriptor = describe(kind, **fields)  # type: ignore[arg-type]  # mypy takes no class for hashable
    return _PLANS[kind].select(descriptor, device=plan_device(tensor))


def matrix_fields(dense: Tensor, argument: str = "dense") -> dict[str, Any]:
    """m, k and element of a matrix that is to be prepared. Raises InvalidProblemError."""
    if dense.dim() != 2:
        raise InvalidProblemError(f"{argument}: expected a matrix [M, K], got {list(dense.shape)}")
    m, k = dense.shape
    return {"m": m, "k": k, "element": element_of(dense.dtype, argument)}


def scores_field(dense: Tensor, scores: Tensor | None) -> dict[str, Any]:
    """The element of the scores. Raises InvalidProblemError where they aren't like the matrix."""
    if scores is None:
        return {}
    if scores.shape != dense.shape or scores.device != dense.device:
        raise InvalidProblemError(
            f"scores: expected {list(dense.shape)} on {dense.device}, got {list(scores.shape)} "
            f"on {scores.device}"
        )
    return {"scores": element_of(scores.dtype, "scores")}


def empty_canonical(like: Tensor, m: Any, k: Any) -> tuple[Tensor, Tensor]:
    """Values and metadata of a weight [m, k] without a value."""
    return like.new_empty((m, k // 2)), like.new_empty((m, k // 8), dtype=torch.int16)


def prune(dense: Tensor, scores: Tensor | None = None) -> Tensor:
    fields = matrix_fields(dense) | scores_field(dense, scores)
    plan = _plan(PruneSparse24Descriptor, dense, **fields)
    pruned = torch.empty_like(dense, memory_format=torch.contiguous_format)
    ranks = None if scores is None else scores.contiguous()
    args = PruneSparse24Args(dense.contiguous(), pruned, None, ranks)
    plan.run(args, stream=stream_argument(dense))
    return pruned


def compress(dense: Tensor) -> tuple[Tensor, Tensor]:
    plan = _plan(CompressSparse24Descriptor, dense, **matrix_fields(dense))
    values, meta = empty_canonical(dense, *dense.shape)
    status = torch.empty(8, dtype=torch.uint8, device=dense.device)
    args = CompressSparse24Args(dense.contiguous(), values, meta_view(meta), status)
    stream = stream_argument(dense)
    plan.run(args, stream=stream)
    plan.check(args, stream=stream)
    return values, meta


def prune_compress(dense: Tensor, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
    fields = matrix_fields(dense) | scores_field(dense, scores)
    plan = _plan(PruneCompressSparse24Descriptor, dense, **fields)
    values, meta = empty_canonical(dense, *dense.shape)
    ranks = None if scores is None else scores.contiguous()
    args = PruneCompressSparse24Args(dense.contiguous(), values, meta_view(meta), ranks)
    plan.run(args, stream=stream_argument(dense))
    return values, meta


def decompress(values: Tensor, meta: Tensor) -> Tensor:
    m, k = weight_sizes(values, meta, None, None)
    plan = _plan(DecompressSparse24Descriptor, values, m=m, k=k, element=element_of(values.dtype, "values"))
    dense = values.new_empty((m, k))
    weight = canonical_weight(values.contiguous(), meta.contiguous())
    plan.run(DecompressSparse24Args(weight, dense), stream=stream_argument(values))
    return dense


def packed_shape(weight: Tensor, m: Any, k: Any) -> tuple[Any, Any, int]:
    """Of a packed weight [m, k], in elements. Raises UnsupportedError for elements without tiles."""
    layout = layout_of(element_of(weight.dtype, "values"))
    down, across, nbytes = layout.packed_shape(m, k)
    return down, across, nbytes // weight.element_size()


def pack(values: Tensor, meta: Tensor) -> Tensor:
    m, k = weight_sizes(values, meta, None, None)
    shape = packed_shape(values, m, k)
    plan = _plan(PackSparse24Descriptor, values, m=m, k=k, element=element_of(values.dtype, "values"))
    packed = values.new_empty(shape)
    weight = canonical_weight(values.contiguous(), meta.contiguous())
    args = PackSparse24Args(weight, TensorView.of(packed.view(torch.uint8)))
    plan.run(args, stream=stream_argument(values))
    return packed


def unpack(packed: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    weight_sizes(packed, None, m, k)
    element = element_of(packed.dtype, "packed")
    plan = _plan(PackSparse24Descriptor, packed, m=m, k=k, element=element, direction="unpack")
    values, meta = empty_canonical(packed, m, k)
    status = torch.empty(8, dtype=torch.uint8, device=packed.device)
    args = UnpackSparse24Args(packed_weight(packed.contiguous(), m, k), values, meta_view(meta), status)
    stream = stream_argument(packed)
    plan.run(args, stream=stream)
    plan.check(args, stream=stream)
    return values, meta


def tile_fields(dense: Tensor, rule: str) -> dict[str, Any]:
    """The problem of tile_prune. Raises InvalidProblemError naming the field."""
    return {**matrix_fields(dense), "rule": rule}


def empty_tiles(dense: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of tile_prune without a value."""
    m, k = dense.shape
    mask = dense.new_empty((m // 8, k // 8, 8), dtype=torch.uint8)
    return (*empty_canonical(dense, m, k), *empty_canonical(dense, k, m), mask)


def tile_prune(dense: Tensor, rule: str = "greedy_magnitude") -> tuple[Tensor, ...]:
    plan = _plan(TilePruneSparse24Descriptor, dense, **tile_fields(dense, rule))
    values, meta, values_t, meta_t, mask = results = empty_tiles(dense)
    args = TilePruneSparse24Args(
        dense.contiguous(), values, meta_view(meta), values_t, meta_view(meta_t), mask
    )
    plan.run(args, stream=stream_argument(dense))
    return results


def mask_fields(dense: Tensor, mask: Tensor) -> dict[str, Any]:
    """The problem of apply_mask. Raises InvalidProblemError naming the field."""
    layout = MaskLayout.TILES if mask.dim() == 3 else MaskLayout.ROWS
    return {**matrix_fields(dense), "layout": layout}


def apply_mask(dense: Tensor, mask: Tensor) -> Tensor:
    plan = _plan(MaskSparse24Descriptor, dense, **mask_fields(dense, mask))
    masked = torch.empty_like(dense, memory_format=torch.contiguous_format)
    args = MaskSparse24Args(dense.contiguous(), mask.contiguous(), masked)
    plan.run(args, stream=stream_argument(dense))
    return masked


def kept_values(dense: Tensor, meta: Tensor) -> Tensor:
    """The values [M, K/2] of a dense matrix [M, K] at the positions that metadata names."""
    m, k = dense.shape
    codes = meta.contiguous().view(torch.uint8).to(torch.int64)
    positions = torch.stack([codes & 3, codes >> 2 & 3], dim=-1)
    return dense.reshape(m, k // 4, 4).gather(2, positions).reshape(m, k // 2)
