"""Rules that make block-sparse layouts of attention scores for any number of tokens.

``SparsityInfo`` is Torch-Blocksparse's. The ``SparsityConfig`` kinds have the names, arguments and layouts of
DeepSpeed's sparse attention: ``fixed`` follows arXiv 1904.10509, BigBird arXiv 2007.14062, Longformer arXiv
2004.05150, each cut to blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...blocksparse.layout import BlockSparseLayout
from ...errors import InvalidProblemError

Bitmap = np.ndarray[Any, Any]
_BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class SparsityInfo:
    """A rule that says for any number of tokens which blocks of the scores are kept.

    Parameters
    ----------
    mode : str
        ``dense`` keeps all blocks. ``fixed`` keeps the blocks within each ``stride`` of tokens, and for all
        rows the last ``vertsize`` columns of blocks of every stride.
    block : int
        16, 32, 64 or 128 tokens.
    stride : int
        Tokens, a multiple of the block. With ``fixed``, the number of tokens must be a multiple of it.
    unidirectional : bool
        Whether no block beyond a row's own is kept. Inside a block, ``causal`` or a mask decides.
    numverts : int
        Head h keeps the ``1 + h % numverts``-th group of ``vertsize`` columns from a stride's end.
    vertsize : int
        Columns of blocks.
    """

    mode: str = "fixed"
    block: int = 64
    stride: int = 128
    unidirectional: bool = False
    numverts: int = 1
    vertsize: int = 1

    def __post_init__(self) -> None:
        _check_word("mode", self.mode, ("dense", "fixed"))
        _check_block(self.block)
        if self.stride < self.block or self.stride % self.block:
            raise InvalidProblemError(f"stride: expected a multiple of block {self.block}, got {self.stride}")
        least = min(self.numverts, self.vertsize)
        if least < 1 or self.numverts * self.vertsize > self._step:
            raise InvalidProblemError(
                f"numverts, vertsize: expected at most {self._step} columns of blocks, as a stride has, got "
                f"{self.numverts} x {self.vertsize}"
            )

    @property
    def _step(self) -> int:
        return self.stride // self.block

    def layout(self, heads: int, tokens: int) -> BlockSparseLayout:
        """The layout of ``heads`` heads of [tokens, tokens]. Raises InvalidProblemError if it has none."""
        side = _side(tokens, self.stride if self.mode == "fixed" else self.block, self.block)
        step = self._step
        if self.mode == "dense":
            return BlockSparseLayout(np.ones((heads, side, side), np.bool_), self.block)
        row, column = np.arange(side)[:, None], np.arange(side)
        local = row // step == column // step
        if self.unidirectional:
            local &= column <= row
        head = np.arange(heads)[:, None, None]
        start = step - (1 + head % self.numverts) * self.vertsize
        summary = (column % step >= start) & (column % step < start + self.vertsize)
        if self.unidirectional:  # only columns that begin before the row's own block
            summary = summary & (column - (column % step - start) < row)
        return BlockSparseLayout(local | summary, self.block)


@dataclass(frozen=True)
class SparsityConfig:
    """The base of DeepSpeed's rules. Counts are in blocks.

    Parameters
    ----------
    num_heads : int
    block : int
        16, 32, 64 or 128 tokens.
    different_layout_per_head : bool
        Whether each head has a layout of its own; otherwise all have the first head's.

    Constructors and ``make_layout`` raise InvalidProblemError naming the argument.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        _check_block(self.block)
        if self.num_heads < 1:
            raise InvalidProblemError(f"num_heads: expected at least 1, got {self.num_heads}")

    def make_layout(self, seq_len: int) -> Tensor:
        """The bitmap int64 [num_heads, blocks, blocks] of scores of ``seq_len`` tokens."""
        return torch.from_numpy(self.layout(self.num_heads, seq_len).bitmap.astype(np.int64))

    def layout(self, heads: int, tokens: int) -> BlockSparseLayout:
        """The layout of ``heads`` heads, as many as ``num_heads``, of [tokens, tokens]."""
        if heads != self.num_heads:
            raise InvalidProblemError(f"num_heads: expected {heads}, as the module has, got {self.num_heads}")
        side = _side(tokens, self.block, self.block)
        distinct = self.num_heads if self.different_layout_per_head else 1
        kept = np.stack([self._kept(head, side) for head in range(distinct)])
        return BlockSparseLayout(np.broadcast_to(kept, (heads, side, side)), self.block)

    def _kept(self, head: int, side: int) -> Bitmap:
        """The kept blocks of a head, bool [side, side]."""
        raise NotImplementedError


@dataclass(frozen=True)
class DenseSparsityConfig(SparsityConfig):
    """All blocks are kept."""

    def _kept(self, head: int, side: int) -> Bitmap:
        return np.ones((side, side), np.bool_)


@dataclass(frozen=True)
class FixedSparsityConfig(SparsityConfig):
    """Local windows, and in each window global blocks that every row sees.

    Parameters
    ----------
    num_local_blocks, num_global_blocks : int
        The size of a window, and its number of global blocks, which divides it. The global blocks are the
        window's last, or further towards its beginning for later patterns.
    attention : str
        ``bidirectional``, or ``unidirectional``: no block beyond a row's own window position is kept.
    horizontal_global_attention : bool
        Whether global blocks also see every block; only bidirectional.
    num_different_global_patterns : int
        Head h has pattern ``h % num_different_global_patterns``; above 1 only with a layout for each head.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention, self.horizontal_global_attention)
        if self.num_global_blocks < 1 or self.num_local_blocks % self.num_global_blocks:
            raise InvalidProblemError(
                f"num_global_blocks: expected a divisor of num_local_blocks {self.num_local_blocks}, got "
                f"{self.num_global_blocks}"
            )
        most = self.num_local_blocks // self.num_global_blocks if self.different_layout_per_head else 1
        if not 1 <= self.num_different_global_patterns <= most:
            raise InvalidProblemError(
                f"num_different_global_patterns: expected from 1 to {most}, got "
                f"{self.num_different_global_patterns}"
            )

    def _kept(self, head: int, side: int) -> Bitmap:
        step, width = self.num_local_blocks, self.num_global_blocks
        kept = _windows(side, [step], self.attention)
        first = step - (1 + head % self.num_different_global_patterns) * width
        whole = side // step * step
        starts = list(range(first, whole, step))
        if whole < side:  # the last window is short
            starts.append(max(min(whole + first, side - width), 0))
        for start in starts:
            _add_global(kept, start, start + width, self.attention, self.horizontal_global_attention)
        return kept


@dataclass(frozen=True)
class VariableSparsityConfig(SparsityConfig):
    """Local windows of given sizes, given global blocks, and random blocks.

    Parameters
    ----------
    num_random_blocks : int
        Random blocks of each row. DeepSpeed draws them from Python's generator; here ``seed``, the head and
        the number of blocks decide.
    local_window_blocks : sequence of int
        Sizes of the first windows; the last size repeats.
    global_block_indices, global_block_end_indices : sequences of int
        The global blocks; with ends, each pair is a range. Indices beyond the scores are left out.
    attention, horizontal_global_attention
        As in FixedSparsityConfig.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention, self.horizontal_global_attention)
        _ranges(self.global_block_indices, self.global_block_end_indices)
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise InvalidProblemError(
                f"local_window_blocks: expected sizes of at least 1, got {list(self.local_window_blocks)}"
            )

    def _kept(self, head: int, side: int) -> Bitmap:
        kept = _random(self.num_random_blocks, side, (self.seed, head, side))
        kept |= _windows(side, self.local_window_blocks, self.attention)
        for start, end in _ranges(self.global_block_indices, self.global_block_end_indices):
            _add_global(kept, start, end, self.attention, self.horizontal_global_attention)
        return kept


@dataclass(frozen=True)
class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks as global ones, and random blocks.

    Parameters
    ----------
    num_random_blocks, seed
        As in VariableSparsityConfig. A unidirectional row draws from the blocks up to its own.
    num_sliding_window_blocks : int
        Blocks of the window round a row's own.
    num_global_blocks : int
        The first blocks, which see all blocks and are seen by all.
    attention : str
        ``bidirectional``, or ``unidirectional``: no block beyond a row's own is kept.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention, False)

    def _kept(self, head: int, side: int) -> Bitmap:
        one_way = self.attention == "unidirectional"
        _check_fits("num_global_blocks", self.num_global_blocks, side)
        kept = _random(self.num_random_blocks, side, (self.seed, head, side), one_way=one_way)
        kept |= _sliding(self.num_sliding_window_blocks, side)
        kept[: self.num_global_blocks] = kept[:, : self.num_global_blocks] = True
        return np.tril(kept) if one_way else kept


@dataclass(frozen=True)
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given global blocks, which see all blocks and are seen by all.

    The parameters are those of BigBirdSparsityConfig and VariableSparsityConfig.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention, False)
        _ranges(self.global_block_indices, self.global_block_end_indices)

    def _kept(self, head: int, side: int) -> Bitmap:
        kept = _sliding(self.num_sliding_window_blocks, side)
        for start, end in _ranges(self.global_block_indices, self.global_block_end_indices):
            kept[start:end] = kept[:, start:end] = True
        return np.tril(kept) if self.attention == "unidirectional" else kept


@dataclass(frozen=True)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone, the same for every head; unidirectional unless said otherwise."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention, False)

    def _kept(self, head: int, side: int) -> Bitmap:
        kept = _sliding(self.num_sliding_window_blocks, side)
        return np.tril(kept) if self.attention == "unidirectional" else kept


# Parts of layouts -----------------------------------------------------------------------------------


def _windows(side: int, sizes: Sequence[int], attention: str) -> Bitmap:
    """Blocks whose row and column are in one window; the last size repeats."""
    ends = np.cumsum(sizes)
    places = np.arange(side)
    beyond = (places - ends[-1]) // sizes[-1] + len(sizes)
    window = np.where(places < ends[-1], np.searchsorted(ends, places, side="right"), beyond)
    kept: Bitmap = window[:, None] == window
    return np.tril(kept) if attention == "unidirectional" else kept


def _add_global(kept: Bitmap, start: int, end: int, attention: str, horizontal: bool) -> None:
    """Columns [start, end), which all rows see, or those from ``start`` on; and the same rows."""
    kept[0 if attention == "bidirectional" else start :, start:end] = True
    if horizontal:
        kept[start:end] = True


def _sliding(count: int, side: int) -> Bitmap:
    _check_fits("num_sliding_window_blocks", count, side)
    places = np.arange(side)
    kept: Bitmap = np.abs(places[:, None] - places) <= count // 2
    return kept


def _random(count: int, side: int, seed: Sequence[int], *, one_way: bool = False) -> Bitmap:
    _check_fits("num_random_blocks", count, side)
    rng, kept = np.random.default_rng(seed), np.zeros((side, side), np.bool_)
    for row in range(side):
        among = row + 1 if one_way else side
        kept[row, rng.choice(among, min(count, among), replace=False)] = True
    return kept


def _ranges(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """Ranges of global blocks. Raises InvalidProblemError for ends that don't fit the starts."""
    if ends is None:
        ends = [start + 1 for start in starts]
    if len(starts) != len(ends):
        raise InvalidProblemError(
            f"global_block_end_indices: expected {len(starts)}, as global_block_indices, got {len(ends)}"
        )
    found = list(zip(starts, ends, strict=True))
    if any(not 0 <= start < end for start, end in found):
        raise InvalidProblemError(f"global_block_end_indices: expected ends beyond the starts, got {found}")
    return found


def _check_fits(name: str, count: int, side: int) -> None:
    if not 0 <= count <= side:
        raise InvalidProblemError(f"{name}: expected at most {side}, the blocks of a row, got {count}")


def _check_word(name: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise InvalidProblemError(f"{name}: expected {' or '.join(known)}, got {given!r}")


def _check_attention(attention: str, horizontal: bool) -> None:
    _check_word("attention", attention, ("unidirectional", "bidirectional"))
    if horizontal and attention == "unidirectional":
        raise InvalidProblemError("horizontal_global_attention: expected False for unidirectional, got True")


def _check_block(block: int) -> None:
    if block not in _BLOCKS:
        raise InvalidProblemError(f"block: expected 16, 32, 64 or 128, got {block!r}")


def _side(tokens: int, unit: int, block: int) -> int:
    """Blocks of ``tokens``. Raises InvalidProblemError if they aren't a multiple of ``unit``."""
    if tokens % unit:
        raise InvalidProblemError(f"tokens: expected a multiple of {unit}, got {tokens}")
    return tokens // block
