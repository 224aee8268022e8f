"""The dense copy of a layer's weight that inference may keep where a product with it is faster."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...blocksparse.descriptor import HALVES, BlockSparseMatmulDescriptor
from ...blocksparse.layout import BlockSparseLayout
from ...blocksparse.plan import BlockSparseMatmulPlan
from ...vocab import DENSE_BLOCKS_LAYOUT, ElementKind
from ..activations import epilogue_of
from ..elements import DTYPE_OF, element_of, plan_device
from ..library import only_dispatches
from ..packed_weight_cache import state_of
from .layout_buffers import Layout
from .plan_dispatch import shape_of

_DTYPES = tuple(DTYPE_OF[element] for element in HALVES)


@lru_cache(maxsize=4096)
def _prefers_dense(
    shape: tuple[int, ...], longest: int, n: int, element: ElementKind, epilogue: Any, device: int | str
) -> bool:
    """Whether a plan for a packed weight would pack it dense."""
    desc = BlockSparseMatmulDescriptor(
        op="dds",
        layout=shape_of(shape),
        n=n,
        element=element,
        epilogue=epilogue,
        packed=True,
        longest_panel=longest,
    )
    chosen = BlockSparseMatmulPlan.explain_choice(desc, device=device).chosen
    layouts = {entry.name: entry.layout for entry in BlockSparseMatmulPlan.table}
    return chosen is not None and layouts[chosen] == DENSE_BLOCKS_LAYOUT


def _dense(weight: Tensor, layout: Layout) -> Tensor:
    """S^T [out, in] in new memory."""
    return layout.to_dense(weight.detach()[None])[0, 0].t().contiguous()


class DenseCopy:
    """S^T [out, in] of one layer as long as its weight and its layout stay as they are."""

    def __init__(self) -> None:
        self._made: tuple[Any, Tensor, BlockSparseLayout, torch.UntypedStorage] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy; 0 without one."""
        made = self._made
        return 0 if made is None else made[1].nbytes

    def drop(self) -> None:
        """Free the copy."""
        self._made = None

    def find(self, layer: Any, rows: Tensor) -> Tensor | None:
        """The copy, made if it is new, if nothing needs a gradient and it is faster for so many rows.

        A mask that was made on the GPU has none, because the host does not know it.

        A CUDA graph that is captured reads the copy only if the layer says that weight and mask stay. Else
        each replay makes one of its own, and so follows both.
        """
        weight, bias, layout = layer.weight, layer.bias, layer.layout
        if torch.compiler.is_compiling() or not only_dispatches(rows, weight, bias):
            return None
        other = rows.dtype != weight.dtype or weight.dtype not in _DTYPES
        if other or weight.is_inference() or layout.is_behind:
            return None
        element = element_of(weight.dtype, "weight")
        epilogue = epilogue_of(layer.activation, bias is not None)
        if not _prefers_dense(
            layout.sizes, layout.panels[1], len(rows), element, epilogue, plan_device(weight)
        ):
            return None
        key = *state_of(weight), id(layout.layout)
        made = self._made
        known = made is not None and made[0] == key
        if weight.is_cuda and torch.cuda.is_current_stream_capturing() and not (known and layer.weight_stays):
            return _dense(weight, layout)
        if made is None or not known:
            dense = _dense(weight, layout)
            if weight.is_cuda:  # calls on other streams may read it
                torch.cuda.current_stream(weight.device).synchronize()
            # The layout and the weight's memory are kept, so that no others get their id and address.
            self._made = made = key, dense, layout.layout, weight.untyped_storage()
        return made[1]

    def __deepcopy__(self, memo: object) -> DenseCopy:
        return DenseCopy()

    def __reduce__(self) -> tuple[Any, ...]:
        return DenseCopy, ()
