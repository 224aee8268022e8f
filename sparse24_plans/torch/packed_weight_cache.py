"""Keeps weights in the layouts that kernels read, converted at first use, while the weights live."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..device.install import import_cupy
from ..errors import UnsupportedError
from ..gemm.plan import GemmSparse24Plan
from ..vocab import CANONICAL_LAYOUT
from ..weights import packing
from ..weights.packing_quantized import unpack_quantized
from ..weights.weight import CanonicalWeight, PackedWeight
from .elements import (
    DTYPE_OF,
    canonical_weight,
    current_stream,
    packed_layout,
    packed_weight,
    quantized_weight,
)


class _Copy(NamedTuple):
    """A weight in another layout."""

    made_of: tuple[int, ...]
    """The states of the tensors at the time of the conversion."""
    packed: PackedWeight


_kept: dict[int, dict[Any, _Copy]] = {}
"""The copies of each living weight by its id, and by their layouts, elements and quantization."""
_version_of = attrgetter("_version")  # PyTorch increments it with every write in place
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)  # PyTorch counts no writes of fused optimizers


class PlanWeights:
    """Weights [m, k] as a plan's kernel reads them, of tensors in either form that elements.py describes."""

    def __init__(self, plan: GemmSparse24Plan, m: int, k: int) -> None:
        desc = plan.descriptor
        self._plan, self._m, self._k = plan, m, k
        self._by, self._dtype, self._group = desc.quantization, DTYPE_OF[desc.element], desc.weight_group
        self._layout = plan.sku.layout, desc.element, desc.quantization

    def fit(self, weight: torch.Tensor, meta: torch.Tensor | None) -> bool:
        """Whether the plan's kernel reads the weight's own layout."""
        own = CANONICAL_LAYOUT if meta is not None else packed_layout(weight, self._by).layout_id
        return self._layout[0] == own

    def unconverted(
        self, weight: torch.Tensor, meta: torch.Tensor | None, scales: torch.Tensor | None
    ) -> PackedWeight:
        """The weight in its own layout and memory. ``scales`` are a quantized weight's."""
        if meta is None:
            return packed_weight(weight, self._m, self._k, self._by, self._dtype)
        return PackedWeight.canonical(self._canonical(weight, meta, scales))

    def _canonical(
        self, weight: torch.Tensor, meta: torch.Tensor, scales: torch.Tensor | None
    ) -> CanonicalWeight:
        if scales is None:
            return canonical_weight(weight, meta)
        return quantized_weight(weight, meta, scales, self._group, self._dtype)

    def converted(
        self, weight: torch.Tensor, meta: torch.Tensor | None, scales: torch.Tensor | None
    ) -> PackedWeight:
        """The weight in the layout that the kernel reads, converted again after each write to the weight.

        PyTorch's version counters show writes. They miss writes through ``.data``, after which the old copy
        stays in use. They also miss writes to inference tensors, and those of fused optimizers and
        ``fully_shard``. So a weight or scales made in ``torch.inference_mode``, and a weight that requires
        gradients, are converted at each call. Metadata is assumed to change only with its weight, because a
        layer's metadata is an inference view in that mode.

        Raises UnsupportedError in a CUDA-graph capture: run once before it, or pack the weight.
        """
        if not _writes_are_counted(weight, scales):
            _kept.pop(id(weight), None)  # it may be written before it is frozen again
            return self._convert(weight, meta, scales)
        made_of = state_of(weight) + (() if meta is None else state_of(meta))
        if scales is not None:
            made_of += state_of(scales)
        copies = _kept.get(id(weight))
        if copies is None:
            copies = _kept[id(weight)] = {}
            weakref.finalize(weight, _kept.pop, id(weight), None).atexit = False
        copy = copies.get(self._layout)
        if copy is not None and copy.made_of == made_of:
            return copy.packed
        packed = self._convert(weight, meta, scales)
        copies[self._layout] = _Copy(made_of, packed)
        return packed

    def _convert(
        self, weight: torch.Tensor, meta: torch.Tensor | None, scales: torch.Tensor | None
    ) -> PackedWeight:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            remedy = "run the op once before it"
            if weight.requires_grad:
                remedy = "freeze the weight by requires_grad_(False), and run the op once before it"
            elif not _writes_are_counted(weight, scales):
                remedy = "make the weight and its scales outside torch.inference_mode"
            raise UnsupportedError(
                f"weight: layout {self._layout[0]!r} can't be made in a CUDA-graph capture: {remedy}, or "
                "pass a weight that torch.ops.sparse24.pack has made"
            )
        with cupy_on_torch_stream(weight):
            if meta is None:
                unpack = packing.unpack if self._by is None else unpack_quantized
                packed = self._plan.pack(unpack(self.unconverted(weight, None, None)))
            else:
                packed = self._plan.pack(self._canonical(weight, meta, scales))
        if weight.is_cuda:
            torch.cuda.current_stream(weight.device).synchronize()  # any stream may read it afterwards
        return packed


def _writes_are_counted(weight: torch.Tensor, scales: torch.Tensor | None) -> bool:
    if weight.requires_grad or weight.is_inference():
        return False
    return scales is None or not scales.is_inference()


def state_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The place of a tensor, and its version, which each write in place changes, or each step of training."""
    version = -1 if tensor.is_inference() else _version_of(tensor)
    return tensor.data_ptr(), version, _optimizer_steps if tensor.requires_grad else 0


def cupy_on_torch_stream(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which CuPy works on PyTorch's current stream."""
    if not tensor.is_cuda:
        return nullcontext()
    cuda = import_cupy().cuda
    ordinal = tensor.device.index
    stream: AbstractContextManager[Any] = cuda.ExternalStream(current_stream(ordinal), ordinal)
    return stream


def kept_copies() -> int:
    """The number of weights that are kept in another layout too."""
    return len(_kept)
