"""Rules that make block-sparse layouts of attention scores for any number of tokens.

``SparsityInfo`` is Torch-Blocksparse's. The ``SparsityConfig`` kinds have the names, arguments and layouts of
DeepSpeed's sparse attention: ``fixed`` follows arXiv 1904.10509, BigBird arXiv 2007.14062, Longformer arXiv
2004.05150, each cut to blocks. Fields may be changed; a layout that is made afterwards follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...blocksparse.layout import BlockSparseLayout
from ...errors import InvalidProblemError, UnsupportedError, shown
from ...vocab import INT64_MAX, checked_flag, integer
from ...vocab.fields import checked_integer
from .rule_checks import (
    blocks_of,
    check_attention,
    check_fits,
    check_word,
    checked_block,
    checked_ranges,
    counted,
    counts,
)

Bitmap = np.ndarray[Any, Any]


@dataclass
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
        Whether windows end with a row's own block, and rows see only columns of groups that begin before
        it. Later blocks of such a group are kept beyond the row's own, so pass ``causal`` or a mask, too.
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
        self._check()

    def _check(self) -> None:
        check_word("mode", self.mode, ("dense", "fixed"))
        self.block = checked_block(self.block)
        checked_flag("unidirectional", self.unidirectional)
        self.stride = counted("stride", self.stride, least=1)
        if self.stride % self.block:
            raise InvalidProblemError(f"stride: expected a multiple of block {self.block}, got {self.stride}")
        self.numverts = counted("numverts, vertsize", self.numverts, least=1)
        self.vertsize = counted("numverts, vertsize", self.vertsize, least=1)
        if self.numverts * self.vertsize > self._step:
            raise InvalidProblemError(
                f"numverts, vertsize: expected at most {self._step} columns of blocks, as a stride has, got "
                f"{self.numverts} x {self.vertsize}"
            )

    @property
    def attention(self) -> str:
        """``unidirectional`` or ``bidirectional``: Torch-Blocksparse's later form of ``unidirectional``."""
        return "unidirectional" if self.unidirectional else "bidirectional"

    @attention.setter
    def attention(self, word: str) -> None:
        check_attention(word)
        self.unidirectional = word == "unidirectional"

    @property
    def _step(self) -> int:
        return self.stride // self.block

    def layout(self, heads: int, tokens: int) -> BlockSparseLayout:
        """The layout of ``heads`` heads of [tokens, tokens]. Raises InvalidProblemError if it has none."""
        self._check()
        heads = counted("heads", heads, least=1)
        side = blocks_of(tokens, self.stride if self.mode == "fixed" else self.block, self.block)
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


@dataclass
class SparsityConfig:
    """The base of DeepSpeed's rules. Counts are in blocks.

    Parameters
    ----------
    num_heads : int
    block : int
        16, 32, 64 or 128 tokens.
    different_layout_per_head : bool
        Whether each head has a layout of its own; otherwise all have the first head's.

    With the arguments of Torch-Blocksparse's class of this name it makes a SparsityInfo: ``mode``, ``block``,
    ``stride``, ``attention`` (a word as in FixedSparsityConfig), ``numverts`` and ``vertsize``.

    A rule of your own is a subclass that overrides ``make_layout``. Constructors and ``make_layout`` raise
    InvalidProblemError naming the argument.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __new__(cls, *given: Any, **options: Any) -> Any:
        """A rule, or with the arguments of Torch-Blocksparse's class of this name a SparsityInfo."""
        is_theirs = isinstance(given[0], str) if given else "num_heads" not in options
        return _attending(*given, **options) if cls is SparsityConfig and is_theirs else super().__new__(cls)

    def __getnewargs__(self) -> tuple[int]:
        """The argument without which a copy would be a SparsityInfo."""
        return (self.num_heads,)

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """Raise InvalidProblemError for a wrong field. Integers become Python's, sequences lists."""
        self._count("num_heads", least=1)
        self.block = checked_block(self.block)
        checked_flag("different_layout_per_head", self.different_layout_per_head)

    def _count(self, *names: str, least: int = 0) -> None:
        """Make these fields ints. Raises InvalidProblemError for a field that counts nothing."""
        for name in names:
            setattr(self, name, counted(name, getattr(self, name), least))

    @property
    def num_layout_heads(self) -> int:
        """The first heads, which have layouts of their own: all of them, or one."""
        return self.num_heads if self.different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Zeros int64 [num_heads, blocks, blocks], which a ``make_layout`` may fill."""
        self._check()
        side = blocks_of(seq_len, self.block, self.block)
        return torch.zeros(self.num_heads, side, side, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """``layout``, in which all heads get the first one's blocks unless each has a layout of its own."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """The bitmap int64 [num_heads, blocks, blocks] of scores of ``seq_len`` tokens.

        Raises UnsupportedError for the base itself, which has no rule.
        """
        return torch.from_numpy(self._bitmap(seq_len).astype(np.int64))

    def _bitmap(self, tokens: int) -> Bitmap:
        """The bitmap as bools."""
        self._check()
        side = blocks_of(tokens, self.block, self.block)
        kept = np.stack([self._kept(head, side) for head in range(self.num_layout_heads)])
        return np.broadcast_to(kept, (self.num_heads, side, side))

    def layout(self, heads: int, tokens: int) -> BlockSparseLayout:
        """The layout of ``heads`` heads, as many as ``num_heads``, of [tokens, tokens]."""
        self._check()
        if integer(heads) != self.num_heads:
            raise InvalidProblemError(
                f"num_heads: expected {shown(heads)}, as the module has, got {self.num_heads}"
            )
        side = blocks_of(tokens, self.block, self.block)
        is_ours = getattr(self.make_layout, "__func__", None) is SparsityConfig.make_layout
        bitmap: Any = self._bitmap(tokens) if is_ours else self.make_layout(tokens)
        if tuple(getattr(bitmap, "shape", ())) != (self.num_heads, side, side):
            raise InvalidProblemError(
                f"make_layout: expected a bitmap [{self.num_heads}, {side}, {side}] of {tokens} tokens, got "
                f"{shown(getattr(bitmap, 'shape', bitmap))}"
            )
        return BlockSparseLayout(bitmap, self.block)

    def _kept(self, head: int, side: int) -> Bitmap:
        """The kept blocks of a head, bool [side, side]."""
        raise UnsupportedError(
            f"make_layout: expected {type(self).__name__} to override it; return the kept blocks as int64 "
            f"[num_heads, blocks, blocks] of 0 and 1, where setup_layout(seq_len) makes the zeros"
        )


def _attending(
    mode: str = "fixed",
    block: int = 16,
    stride: int = 64,
    attention: str = "unidirectional",
    numverts: int = 1,
    vertsize: int = 1,
) -> SparsityInfo:
    """Torch-Blocksparse's SparsityConfig."""
    check_attention(attention)
    return SparsityInfo(mode, block, stride, attention == "unidirectional", numverts, vertsize)


@dataclass
class DenseSparsityConfig(SparsityConfig):
    """All blocks are kept."""

    def _kept(self, head: int, side: int) -> Bitmap:
        return np.ones((side, side), np.bool_)


@dataclass
class FixedSparsityConfig(SparsityConfig):
    """Local windows, and in each window global blocks that every row sees.

    Parameters
    ----------
    num_local_blocks, num_global_blocks : int
        The size of a window, and its number of global blocks, which divides it. The global blocks are the
        window's last, or further towards its beginning for later patterns.
    attention : str
        ``bidirectional``, or ``unidirectional``: windows end with a row's own block, and rows see a group of
        global blocks from its first row on. Later blocks of such a group are kept beyond the row's own, as
        in DeepSpeed, so pass ``causal``, too.
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

    def _check(self) -> None:
        super()._check()
        check_attention(self.attention, self.horizontal_global_attention)
        self._count("num_local_blocks", "num_global_blocks", least=1)
        if self.num_local_blocks % self.num_global_blocks:
            raise InvalidProblemError(
                f"num_global_blocks: expected a divisor of num_local_blocks {self.num_local_blocks}, got "
                f"{self.num_global_blocks}"
            )
        most = self.num_local_blocks // self.num_global_blocks if self.different_layout_per_head else 1
        patterns = counted("num_different_global_patterns", self.num_different_global_patterns)
        if not 1 <= patterns <= most:
            raise InvalidProblemError(
                f"num_different_global_patterns: expected from 1 to {most}, got {patterns}"
            )
        self.num_different_global_patterns = patterns

    def _kept(self, head: int, side: int) -> Bitmap:
        step, width = self.num_local_blocks, self.num_global_blocks
        kept = _windows(side, [step], self.attention)
        first = step - (1 + head % self.num_different_global_patterns) * width
        whole = side // step * step
        starts = list(range(first, whole, step))
        if whole < side:  # the last window is short; a negative start counts from the end, as in DeepSpeed
            starts.append(min(whole + first, side - width))
        for start in starts:
            _add_global(kept, start, start + width, self.attention, self.horizontal_global_attention)
        return kept


@dataclass
class VariableSparsityConfig(SparsityConfig):
    """Local windows of given sizes, given global blocks, and random blocks.

    Parameters
    ----------
    num_random_blocks : int
        Random blocks of each row, which may lie beyond its own even if unidirectional. DeepSpeed draws them
        from Python's generator; here ``seed``, the head and the number of blocks decide.
    local_window_blocks : sequence of int
        Sizes of the first windows; the last size repeats.
    global_block_indices, global_block_end_indices : sequences of int
        The global blocks; with ends, each pair is a range. Indices beyond the scores are left out.
    attention, horizontal_global_attention
        Arguments of FixedSparsityConfig.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0

    def _check(self) -> None:
        super()._check()
        check_attention(self.attention, self.horizontal_global_attention)
        self._count("num_random_blocks")
        self.seed = checked_integer("seed", self.seed, most=INT64_MAX)
        self.local_window_blocks = counts("local_window_blocks", self.local_window_blocks, least=1)
        if not self.local_window_blocks:
            raise InvalidProblemError("local_window_blocks: expected sizes of at least 1 block, got none")
        self.global_block_indices, self.global_block_end_indices = checked_ranges(
            self.global_block_indices, self.global_block_end_indices
        )

    def _kept(self, head: int, side: int) -> Bitmap:
        kept = _random(self.num_random_blocks, side, (self.seed, head, side))
        kept |= _windows(side, self.local_window_blocks, self.attention)
        for start, end in _ranges(self.global_block_indices, self.global_block_end_indices):
            _add_global(kept, start, end, self.attention, self.horizontal_global_attention)
        return kept


@dataclass
class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks as global ones, and random blocks.

    Parameters
    ----------
    num_random_blocks, seed
        Arguments of VariableSparsityConfig. A unidirectional row draws from the blocks up to its own.
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

    def _check(self) -> None:
        super()._check()
        check_attention(self.attention)
        self._count("num_sliding_window_blocks", "num_random_blocks", "num_global_blocks")
        self.seed = checked_integer("seed", self.seed, most=INT64_MAX)

    def _kept(self, head: int, side: int) -> Bitmap:
        one_way = self.attention == "unidirectional"
        check_fits("num_global_blocks", self.num_global_blocks, side)
        kept = _random(self.num_random_blocks, side, (self.seed, head, side), one_way=one_way)
        kept |= _sliding(self.num_sliding_window_blocks, side)
        kept[: self.num_global_blocks] = kept[:, : self.num_global_blocks] = True
        return np.tril(kept) if one_way else kept


@dataclass
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given global blocks, which see all blocks and are seen by all.

    The parameters are those of BigBirdSparsityConfig and VariableSparsityConfig.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def _check(self) -> None:
        super()._check()
        check_attention(self.attention)
        self._count("num_sliding_window_blocks")
        self.global_block_indices, self.global_block_end_indices = checked_ranges(
            self.global_block_indices, self.global_block_end_indices
        )

    def _kept(self, head: int, side: int) -> Bitmap:
        kept = _sliding(self.num_sliding_window_blocks, side)
        for start, end in _ranges(self.global_block_indices, self.global_block_end_indices):
            kept[start:end] = kept[:, start:end] = True
        return np.tril(kept) if self.attention == "unidirectional" else kept


@dataclass
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone, the same for every head; unidirectional unless said otherwise."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def _check(self) -> None:
        super()._check()
        check_attention(self.attention)
        self._count("num_sliding_window_blocks")

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
    check_fits("num_sliding_window_blocks", count, side)
    places = np.arange(side)
    kept: Bitmap = np.abs(places[:, None] - places) <= count // 2
    return kept


def _random(count: int, side: int, seed: Sequence[int], *, one_way: bool = False) -> Bitmap:
    check_fits("num_random_blocks", count, side)
    rng, kept = np.random.default_rng(seed), np.zeros((side, side), np.bool_)
    for row in range(side):
        among = row + 1 if one_way else side
        kept[row, rng.choice(among, min(count, among), replace=False)] = True
    return kept


def _ranges(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """Ranges of global blocks, each of one block if there are no ends."""
    return list(zip(starts, [start + 1 for start in starts] if ends is None else ends, strict=True))
