"""Keys that every query sees beside the layout's, for ``add_bias_kv`` and ``add_zero_attn``.

They are the first keys of one more block column, which every block row keeps. Its other keys don't count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...blocksparse.layout import BlockSparseLayout
from ...errors import InvalidProblemError

_pad = nn.functional.pad


def widened(layout: BlockSparseLayout) -> BlockSparseLayout:
    """The layout with one more block column, which every block row keeps."""
    bitmap = np.pad(layout.bitmap, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    return BlockSparseLayout(bitmap, layout.shape.block)


def with_extra_keys(tensor: Tensor, bias: Tensor | None, block: int) -> Tensor:
    """K or V [Z, heads, tokens, head_size], and behind it ``bias`` [1, 1, embed_dim], if given, and zeros."""
    batch, heads, _, size = tensor.shape
    extra = tensor.new_zeros(batch, heads, block, size)
    if bias is not None:
        first = bias.view(1, heads, 1, size).to(tensor.dtype).expand(batch, -1, -1, -1)
        extra = torch.cat((first, extra[:, :, 1:]), 2)
    return torch.cat((tensor, extra), 2)


class Masks(NamedTuple):
    """The arguments of ``softmax`` behind ``scale``."""

    rpe: Tensor | None
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    key_padding_mask_mode: str
    attn_mask_mode: str

    @property
    def given(self) -> bool:
        """Whether there is a mask."""
        return any(one is not None for one in self[:3])

    def with_numbers(self, dtype: torch.dtype) -> Masks:
        """Added masks in floats. True is -inf, because PyTorch drops those cells."""
        padding = _in_numbers(self.key_padding_mask, self.key_padding_mask_mode, dtype)
        mask = _in_numbers(self.attn_mask, self.attn_mask_mode, dtype)
        return self._replace(key_padding_mask=padding, attn_mask=mask)

    def with_extra_keys(self, tokens: int, extra: int, block: int, causal: bool, q: Tensor) -> Masks:
        """Masks that hide the extra block's other keys, and what ``causal`` hides of the ``tokens``.

        Raises InvalidProblemError for a mask of other sizes.
        """
        batch, heads, rows, _ = q.shape
        wanted = {
            "rpe": (heads, rows, tokens),
            "key_padding_mask": (batch, tokens),
            "attn_mask": (rows, tokens),
        }
        for name, sides in wanted.items():
            given: Tensor | None = getattr(self, name)
            if given is not None and given.shape[-3:] != sides:
                raise InvalidProblemError(f"{name}: expected shape {list(sides)}, got {list(given.shape)}")
        mask, adds = self.attn_mask, self.attn_mask_mode == "add" and self.attn_mask is not None
        if mask is None:
            mask = torch.ones(rows, tokens, dtype=torch.bool, device=q.device)
        hidden: Any = -torch.inf if adds else 0
        if causal:
            later = torch.ones(rows, tokens, dtype=torch.bool, device=q.device).triu(1)
            mask = mask.masked_fill(later, hidden)
        mask = _pad(_pad(mask, (0, extra), value=0 if adds else 1), (0, block - extra), value=hidden)
        padding = self.key_padding_mask
        if padding is not None:
            padding = _pad(padding, (0, block), value=0 if self.key_padding_mask_mode == "add" else 1)
        rpe = None if self.rpe is None else _pad(self.rpe, (0, block))
        return Masks(rpe, padding, mask, self.key_padding_mask_mode, "add" if adds else "mul")


def _in_numbers(mask: Tensor | None, mode: str, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mode != "add" or mask.is_floating_point():
        return mask
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    return mask.to(dtype)  # no integer is -inf, which hides other keys
