"""How ``wgmma_sp`` cuts a problem into blocks: what a block holds, and the schedules that are tried."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...plan.kernel import align_up
from ...vocab import MatrixOrder
from ...weights.packed_layouts import TILE_M, TileLayout, layout_of
from ..descriptor import GemmSparse24Descriptor
from .mma_sp import H200_MULTIPROCESSORS

_SHARED_BYTES = {1: 227 << 10, 2: 113 << 10, 3: 75 << 10, 4: 56 << 10, 5: 0}
"""The most a block can have, by how many share a multiprocessor."""
_STEP_BYTES, _BUFFERS = 8192, 2
"""Of a warpgroup's results on their way out: what is staged at a time, and buffers for it."""
_BARRIER_BYTES = 512
_PATTERN = 1024
"""A swizzle's pattern begins at multiples of so many bytes: X, which follows W, must too."""

MAX_MEMORY_BOUND_N, WIDEST = 64, 256
"""Up to so many tokens one block takes them all, and memory sets the pace; and the most of a block."""
_MORE_BLOCKS = 5
"""So many blocks of tokens more than the fewest are tried."""
_FEW_OUTPUTS = 2048
"""Of which any number of blocks of tokens is tried: it takes 1 to 5% less by the model, 37% at the most."""
_SUMS, _SUMS_OF_THREE, _SUMS_OF_FOUR = 128, 80, 24
"""Accumulators that a thread of one or two warpgroups has registers for; one of three; and where four blocks
share a multiprocessor."""
_HANDED_OF_THREE = 72
"""Those of one of three warpgroups, where they may be handed over."""
_HANDED_PARTS_OF_THREE = 48
"""Those of one of three, where sums of two parts may be: of more some are spilled."""
_HANDED_OF_PARTS = 120
"""Those of one or two, where sums of more than two parts may be handed over."""
_SUMS_TWICE = 96
"""Those that it has twice: a part's, and the parts' before it."""
_PARTS_OF_THREE, _SUMS_TWICE_OF_THREE = 56, 36
"""Those of one of three warpgroups that sums K in parts; and those that it has twice."""
_HELD, _HELD_OF_THREE = 168, 72
"""What there is room for where not all are there twice."""


_LINE_BYTES = 128
"""The longest line that the copy engine swizzles."""


class OperandLayouts(NamedTuple):
    """How X and Y lie in the shared memory of a block; all that a schedule must know of a problem for it."""

    layout: TileLayout
    out_bytes: int
    x_columns: bool = False
    y_columns: bool = False

    @classmethod
    def of(cls, desc: GemmSparse24Descriptor, layout: TileLayout | None = None) -> OperandLayouts:
        """``layout``: W's; None: that of its element."""
        columns = (order is MatrixOrder.COLUMN for order in (desc.x_order, desc.y_order))
        return cls(layout or layout_of(desc.element), desc.out_element.itemsize, *columns)


def pitch_of(nbytes: int) -> int:
    """Bytes from one line of so many to the next, as a swizzle has them: the least of 16, 32, 64 and 128."""
    return max(16, 1 << (nbytes - 1).bit_length())


class Schedule(NamedTuple):
    """How a problem is cut into blocks. Of a row of the table, ``slices * parts`` alone fixes the bits.

    With ``ranges``, that many clusters take equal shares of the items' tiles of K: where one ends within an
    item, the next cluster goes on from its sums, and the bits are those of an item that isn't cut.
    """

    warpgroups: int
    m_tiles: int
    tokens: int
    cluster_m: int = 1
    split_k: int = 1
    ctas_per_sm: int = 1
    k_chunks: int = 1
    stream_k: int = 0

    @property
    def rows(self) -> int:
        """Of W that a block multiplies."""
        return TILE_M * self.warpgroups * self.m_tiles

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.split_k

    @property
    def saved_accumulators(self) -> int:
        """Sums of a thread, of the parts before, that wait in the workspace: those without a register.

        With ranges all do, so that they go with an item that is handed over.
        """
        sums, three = self.m_tiles * self.tokens // 2, self.warpgroups == 3
        if self.stream_k and self.k_chunks > 1:
            return sums
        if self.k_chunks == 1 or sums <= (_SUMS_TWICE_OF_THREE if three else _SUMS_TWICE):
            return 0
        return 2 * sums - (_HELD_OF_THREE if three else _HELD)

    def fits(self) -> bool:
        """Whether a thread's registers hold its sums, and blocks can share X."""
        most = _SUMS_OF_FOUR if self.ctas_per_sm == 4 else _SUMS
        if self.stream_k and self.k_chunks > 2:
            most = 0 if self.warpgroups == 3 else _HANDED_OF_PARTS
        elif self.warpgroups == 3:
            handed, summed = _HANDED_OF_THREE, _SUMS_OF_THREE
            if self.k_chunks > 1:
                handed, summed = _HANDED_PARTS_OF_THREE, _PARTS_OF_THREE
            most = handed if self.stream_k else summed
        return self.m_tiles * self.tokens // 2 <= most and self.tokens % (8 * self.cluster_m) == 0

    def step_tokens(self, out_bytes: int) -> int:
        """Tokens that a warpgroup stages at a time on their way out: equal steps of whole 8."""
        most = min(self.tokens, _STEP_BYTES // (TILE_M * out_bytes))
        return max(step for step in range(8, most + 1, 8) if self.tokens % step == 0)

    def tail_tokens(self, n: int) -> int:
        """Tokens of the last block."""
        return n - (-(-n // self.tokens) - 1) * self.tokens

    def tail_boxed(self, n: int) -> int:
        """Those of X in columns that are copied for it: boxes are fast in steps of 32 bytes."""
        tokens = self.tail_tokens(n)
        return align_up(tokens, 16) if self.tokens >= MAX_MEMORY_BOUND_N else tokens

    def tail_rows(self, n: int) -> int:
        """Rows of X for the last block of tokens that each of the blocks that share it copies."""
        tokens = self.tail_tokens(n)
        return tokens if self.cluster_m == 1 else align_up(-(-tokens // self.cluster_m), 8)

    def group(self, element_bytes: int) -> int:
        """Tokens that a line of X in columns holds, all of the block's or as many as there can be."""
        return min(pitch_of(self.tokens * element_bytes), _LINE_BYTES) // element_bytes

    def copied_by_threads(self, n: int) -> bool:
        """Whether threads copy X in columns, and not the copy engine, which is slow for short lines."""
        return self.tokens < MAX_MEMORY_BOUND_N or n <= MAX_MEMORY_BOUND_N

    def _staging_bytes(self, lines: OperandLayouts) -> int:
        token_bytes = self.step_tokens(lines.out_bytes) * lines.out_bytes
        step_bytes = TILE_M * (pitch_of(token_bytes) if lines.y_columns else token_bytes)
        return self.warpgroups * _BUFFERS * step_bytes if self.split_k == 1 else 0

    def _stage_bytes(self, lines: OperandLayouts) -> tuple[int, int]:
        group = self.group(2) if lines.x_columns else 1
        return self.rows // TILE_M * lines.layout.shared_bytes, 128 * align_up(self.tokens, group)

    def stages(self, lines: OperandLayouts, parts: int = 0) -> tuple[int, int]:
        """Of W and of X: as many as fit. X comes in steps half as long, or in ``parts`` of the same width."""
        weight, source = self._stage_bytes(lines)
        room = _SHARED_BYTES[self.ctas_per_sm] - _BARRIER_BYTES - self._staging_bytes(lines)
        if parts:  # two tiles of W at a time, and what they are multiplied by
            pairs = ((w, x) for w in range(2, 9) for x in range(2 * parts, 25))
            tried = [
                (w, x) for w, x in pairs if w * weight % _PATTERN == 0 and w * weight + x * source <= room
            ]
            return max(tried, key=lambda stages: (min(parts * stages[0], stages[1]), sum(stages)))
        fitting = [(w, x) for w in range(2, 9) for x in range(2, 17) if w * weight + x * source <= room]
        return max(fitting, key=lambda stages: (min(2 * stages[0] - 1, stages[1]), sum(stages)))

    def shared_bytes(self, lines: OperandLayouts, parts: int = 0) -> int:
        """At least so much that no more blocks than ``ctas_per_sm`` share a multiprocessor.

        Those of the next launch start early: were there room, they would crowd on the multiprocessors that
        are done first, and leave others idle.
        """
        (weights, sources), (weight, source) = self.stages(lines, parts), self._stage_bytes(lines)
        used = weights * weight + sources * source + self._staging_bytes(lines) + _BARRIER_BYTES
        return max(used, _SHARED_BYTES[self.ctas_per_sm + 1] + 1)

    def items(self, n: int, m: int) -> int:
        """Pieces of work, one a cluster."""
        return -(-m // (self.rows * self.cluster_m)) * -(-n // self.tokens)

    def oversubscribes(self, n: int, m: int) -> bool:
        """Whether blocks share multiprocessors although all clusters would run at once without."""
        return self.ctas_per_sm > 1 and self.items(n, m) <= self.resident_alone(H200_MULTIPROCESSORS)

    def stream_k_split(self, n: int, m: int, k_tiles: int) -> tuple[int, int, int]:
        """Items that are not; tiles of a range; and ranges that have one more.

        Cut are as few items as give each range the tiles of one: an item then has two clusters at most, of
        which one begins with it and the other ends with it.
        """
        items = self.items(n, m)
        if not self.stream_k or items < self.stream_k or items % self.stream_k == 0:
            return items, 0, 0
        cut = self.stream_k + items % self.stream_k
        return items - cut, *divmod(cut * k_tiles, self.stream_k)

    def flags_bytes(self) -> int:
        """Of the workspace's first part: a flag for each warpgroup of each block."""
        return align_up(8 * self.stream_k * self.cluster * self.warpgroups, 256)

    def sums_bytes(self) -> int:
        """Of its second part: the sums that each block may hand over or park."""
        parking = self.resident_clusters(H200_MULTIPROCESSORS) if self.saved_accumulators else 0
        return (self.stream_k or parking) * self.cluster * 4 * self.rows * self.tokens

    def workspace_bytes(self) -> int:
        """Those, and with parts in ranges twice as many: parts of items handed over, and of others."""
        return self.flags_bytes() + self.sums_bytes() * (3 if self.stream_k and self.k_chunks > 1 else 1)

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once. Those beyond 2 don't fill the groups of multiprocessors they lie in."""
        idle = 15 if self.cluster % 3 == 0 and self.ctas_per_sm < 4 else 12  # of the 132 of an H200
        idle = idle if self.cluster > 2 else 0
        usable = multiprocessors * (132 - idle) // 132
        return max(1, usable * self.ctas_per_sm // self.cluster)

    def resident_alone(self, multiprocessors: int) -> int:
        """The same, were there one block a multiprocessor."""
        return self._replace(ctas_per_sm=1).resident_clusters(multiprocessors)


def _width(tokens: int) -> int:
    """The narrowest instructions for so many tokens: of integers there are, beyond 32, multiples of 16."""
    return align_up(tokens, 8 if tokens <= 32 else 16)


def widths(n: int, widest: int = WIDEST, m: int = 0) -> tuple[int, ...]:
    """Tokens of a block that are worth trying: those that cut n into equal blocks, as wide as they go.

    Of few outputs (``m``, if known) narrower ones, too: else there are hardly as many items as clusters.
    """
    if n <= MAX_MEMORY_BOUND_N:
        return (_width(n),)
    fewest, most = -(-n // widest), -(-n // MAX_MEMORY_BOUND_N)
    if not 0 < m < _FEW_OUTPUTS:
        most = min(most, fewest + _MORE_BLOCKS)
    counts = sorted({c for w in range(16, widest + 1, 16) if fewest <= (c := -(-n // w)) <= most})
    return tuple(dict.fromkeys(_width(-(-n // blocks)) for blocks in counts))


# (warpgroups, row tiles of one, blocks that share X, slices, blocks per multiprocessor): of those that were
# measured on random shapes, the ones that were the fastest somewhere by more than a few percent.
_OF_FEW = (
    (1, 1, 1, 1, 1),
    (1, 1, 1, 2, 1),
    (1, 1, 1, 2, 2),
    (1, 1, 1, 3, 1),
    (1, 1, 1, 3, 2),
    (1, 1, 1, 3, 4),
    (1, 1, 1, 4, 1),
    (1, 1, 1, 4, 2),
    (1, 1, 1, 6, 2),
    (1, 1, 1, 8, 1),
    (2, 1, 1, 1, 1),
    (2, 1, 1, 2, 1),
    (2, 1, 1, 3, 1),
    (2, 1, 1, 4, 1),
    (3, 1, 1, 1, 1),
    (3, 1, 1, 2, 1),
    (3, 1, 1, 3, 1),
    (3, 1, 1, 4, 1),
    (2, 2, 1, 1, 1),
    (2, 2, 1, 2, 1),
    (2, 2, 1, 3, 1),
)
_OF_MANY = ((1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (3, 1, 1, 1, 1), (2, 2, 1, 1, 1), (2, 1, 2, 1, 1))
_OF_SOME = (
    *_OF_MANY,
    *((1, 1, 1, 2, 1), (2, 1, 1, 2, 1), (3, 1, 1, 2, 1)),
    *((1, 1, 1, 3, 1), (2, 1, 1, 3, 1), (1, 1, 1, 4, 1), (2, 1, 1, 4, 1)),
)
_MANY = 2048
"""Tokens beyond which blocks need no slices to be many."""


# (warpgroups, row tiles of one, blocks that share X) of schedules with ranges.
_OF_RANGES = ((1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 2))
_WORTH_RANGES = 0.35
"""The share of the last wave that must be idle for ranges to win by filling it: handing over takes a third of
an item. Of 261 measured pairs the model's choice alone lost 0.9% on the mean, with this it loses 0.4%."""


def _schedules_of_ranges(n: int, m: int, parts: int = 1) -> tuple[Schedule, ...]:
    """Where there are items for all clusters, and too few for some."""
    found, least = [], _WORTH_RANGES if parts == 1 else 0.0
    for tokens in widths(n, m=m):
        for warpgroups, row_blocks, share in _OF_RANGES:
            ranges = H200_MULTIPROCESSORS // share
            one = Schedule(warpgroups, row_blocks, tokens, share, k_chunks=parts, stream_k=ranges)
            items = one.items(n, m)
            if one.fits() and one.stream_k < items and -items % ranges > least * ranges:
                found.append(one)
    return tuple(found)


@lru_cache(1024)
def schedules_for(n: int, m: int = 0) -> tuple[Schedule, ...]:
    """The schedules that are tried for n tokens; with m, also those that are for so many outputs."""
    shapes = _OF_FEW if n <= MAX_MEMORY_BOUND_N else _OF_SOME if n <= _MANY else _OF_MANY
    tried = (Schedule(w, r, tokens, *rest) for tokens in widths(n, m=m) for w, r, *rest in shapes)
    fitting = tuple(one for one in tried if one.fits() and not (m and one.oversubscribes(n, m)))
    return fitting + _schedules_of_ranges(n, m)


def schedules_in(slices: int, n: int, m: int = 0) -> tuple[Schedule, ...]:
    """Those that sum K in so many slices, along a cluster or in a block: the same bits either way."""
    tried = [one for one in schedules_for(n, m) if one.split_k == slices]
    if slices > 1:
        wide = [
            Schedule(w, r, tokens, share, k_chunks=slices)
            for tokens in widths(n, m=m)
            for w, r, share, *_ in _OF_MANY
        ]
        tried += [one for one in wide if n > MAX_MEMORY_BOUND_N and one.warpgroups > 1 and one.fits()]
        tried += [
            one for one in _schedules_of_ranges(n, m, slices) if n > MAX_MEMORY_BOUND_N and one.warpgroups > 1
        ]
        narrow = narrow_schedules(n)
        tried += [one._replace(k_chunks=slices) for one in narrow]
        tried += [one._replace(split_k=slices) for one in narrow if one.warpgroups == 1]
    return tuple(dict.fromkeys(tried))


def narrow_schedules(n: int) -> tuple[Schedule, ...]:
    """Those whose threads have registers for their sums twice."""
    found = []
    for tokens in widths(n, 2 * _SUMS_TWICE):
        found += [Schedule(1, 1, tokens), Schedule(2, 1, tokens), Schedule(2, 1, tokens, cluster_m=2)]
    return tuple(one for one in found if one.fits())
