"""How ``wgmma_sp`` cuts a problem into CTAs: what a CTA holds, and the schedules that are tried."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...plan.kernel import align_up
from ...plan.schedule_choice import REFERENCE_SMS, SHARED_BYTES, constants
from ...vocab import MatrixOrder
from ...weights.packed_layouts import TILE_M, TileLayout, layout_of, quantized_tiles
from ..descriptor import GemmSparse24Descriptor
from ..limits import most_token_tiles

_STAGED_BYTES, _BUFFERS, _BUFFERS_WITH_C = 16384, 2, 4
"""Bytes of all staging buffers of a warpgroup, and how many it has: more where they also receive C ahead."""
_BARRIER_BYTES, _C_BARRIER_BYTES = 512, 16
"""Bytes of the barriers of all stages of W and X, and of a staging buffer that receives C."""
_SHARES_APART, _SHARE_BARRIER_BYTES = 48 << 10, 16
"""Most bytes of an SM for sums of split-K that don't lie over the stages, and those of their barrier."""
_MAX_EXCHANGED = 128 * 208
"""Most sums of a CTA with three or more slices, which needs room for those it sends and those it receives."""
_MAX_WARPS = 16
"""Warps of a CTA with three consumer warpgroups."""
_PATTERN = 1024
"""X follows W in shared memory and must begin at a multiple of these bytes, where a swizzle begins."""
_LINE_BYTES = 128
"""The longest line that TMA swizzles."""

MAX_MEMORY_BOUND_N, WIDEST = 64, 256
"""Most tokens that one CTA computes at the pace of memory, and most tokens of a tile."""
# Two bounds of the candidates. Like the lists of shapes below they say what is compared, not what wins. The
# choice of split-K compares the same candidates, so another bound may mean other bits.
_MORE_TILES = 5
"""Number of token tiles beyond the fewest that are tried."""
_FEW_OUTPUTS = 2048
"""Outputs below which any number of token tiles is tried: there are hardly as many work tiles as clusters."""

# Accumulators for which a thread has registers: facts of the compiled kernel.
_SUMS, _SUMS_OF_THREE, _SUMS_OF_FOUR = 128, 80, 24
"""Accumulators of a thread with one or two warpgroups, with three, and where four CTAs share an SM."""
_STREAM_K_OF_THREE = 72
"""Accumulators of a thread with three warpgroups and stream-K."""
_STREAM_K_CHUNKS_OF_THREE = 48
"""Accumulators of a thread with three warpgroups, stream-K and two chunks of K: of more some are spilled."""
_STREAM_K_CHUNKS = 120
"""Accumulators of a thread with one or two warpgroups, stream-K and more than two chunks of K."""
_SUMS_TWICE = 96
"""Accumulators that a thread can hold twice: for a chunk of K, and for the chunks before it."""
_CHUNKS_OF_THREE, _SUMS_TWICE_OF_THREE = 56, 36
"""Accumulators of a thread with three warpgroups and chunks of K; and those that it can hold twice."""
_ELEMENTS = {(1, 2, 2): 48, (2, 2, 2): 16, (3, 2, 1): 48, (3, 1, 1): 144, (1, 1, 4): 40}
"""Most tokens where threads have registers for the elements that they make of a quantized W, by warpgroups,
m64 tiles of a warpgroup and CTAs an SM; without an entry all tokens of a tile."""
_ELEMENTS_BESIDE_CHUNKS = 144
"""Most tokens where threads make such elements beside sums of earlier chunks of K."""
_HELD, _HELD_OF_THREE = 168, 72
"""Accumulators that registers hold in total where some wait in the workspace."""


def tiles_of(desc: GemmSparse24Descriptor) -> TileLayout:
    """W's packed layout by default: that of its element, or of what it stores if it is quantized."""
    return layout_of(desc.element) if desc.quantization is None else quantized_tiles(desc.quantization)


class OperandLayouts(NamedTuple):
    """How W, X and Y lie in a CTA's shared memory: all that a schedule must know of the operands."""

    layout: TileLayout
    out_bytes: int
    x_columns: bool = False
    y_columns: bool = False
    groups: int = 0
    """Number of groups of tokens, whose table lies behind the barriers."""
    stages_c: bool = False
    """Whether TMA loads C into the staging buffers of results, which must have elements of its size."""

    @property
    def buffers(self) -> int:
        """Staging buffers of a warpgroup."""
        return _BUFFERS_WITH_C if self.stages_c else _BUFFERS

    @classmethod
    def of(cls, desc: GemmSparse24Descriptor, layout: TileLayout | None = None) -> OperandLayouts:
        """``layout`` is W's packed layout, by default that of what it stores."""
        x_columns, y_columns = (order is MatrixOrder.COLUMN for order in (desc.x_order, desc.y_order))
        size = desc.out_element.itemsize
        # The warps that would load C may load a column-major X.
        stages_c = desc.has_c and desc.c_element.itemsize == size and not x_columns
        return cls(layout or tiles_of(desc), size, x_columns, y_columns, desc.groups, stages_c)

    @property
    def table_bytes(self) -> int:
        """Shared memory of the table of groups, with a total for each warp of the CTA."""
        return align_up(4 * (3 * self.groups + 1 + _MAX_WARPS), 16) if self.groups else 0


def pitch_of(nbytes: int) -> int:
    """Bytes from one swizzled line to the next: the least of 16, 32, 64 and 128 that ``nbytes`` fit in."""
    return max(16, 1 << (nbytes - 1).bit_length())


class WgmmaSpSchedule(NamedTuple):
    """How a problem is cut into CTAs. For one kernel ``split_k * k_chunks`` alone fixes the bits.

    With stream-K each cluster takes an equal range of the work tiles' tiles of K. If one cluster's range ends
    within a work tile, the next cluster continues its sums, so the bits are those of an uncut tile.
    """

    warpgroups: int
    """Consumer warpgroups of a CTA."""
    m_tiles: int
    """Tiles of 64 rows of W that a warpgroup multiplies."""
    tokens: int
    """Tokens of a CTA's tile."""
    cluster_m: int = 1
    """CTAs of a cluster along M, which share X by multicast."""
    split_k: int = 1
    """CTAs of a cluster along K, whose sums are reduced in a fixed order."""
    ctas_per_sm: int = 1
    k_chunks: int = 1
    """Chunks of K that a CTA sums one after the other and adds in order."""
    stream_k: int = 0
    """Clusters that take equal ranges of all work tiles; 0 gives each cluster whole work tiles."""

    @property
    def rows(self) -> int:
        """Rows of W that a CTA multiplies."""
        return TILE_M * self.warpgroups * self.m_tiles

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.split_k

    @property
    def saved_accumulators(self) -> int:
        """Sums of a thread over earlier chunks of K that have no register and wait in the workspace.

        With stream-K all of them do, so that the next cluster finds them.
        """
        sums, three = self.m_tiles * self.tokens // 2, self.warpgroups == 3
        if self.stream_k and self.k_chunks > 1:
            return sums
        if self.k_chunks == 1 or sums <= (_SUMS_TWICE_OF_THREE if three else _SUMS_TWICE):
            return 0
        return 2 * sums - (_HELD_OF_THREE if three else _HELD)

    def fits(self) -> bool:
        """Whether registers hold the sums of a thread, and shared memory those that the CTAs of a cluster
        exchange; and whether these CTAs can share X.
        """
        if self.split_k > 2 and self.rows * self.tokens > _MAX_EXCHANGED:
            return False
        most = _SUMS_OF_FOUR if self.ctas_per_sm == 4 else _SUMS
        if self.stream_k and self.k_chunks > 2:
            most = 0 if self.warpgroups == 3 else _STREAM_K_CHUNKS
        elif self.warpgroups == 3:
            streamed, summed = _STREAM_K_OF_THREE, _SUMS_OF_THREE
            if self.k_chunks > 1:
                streamed, summed = _STREAM_K_CHUNKS_OF_THREE, _CHUNKS_OF_THREE
            most = streamed if self.stream_k else summed
        return self.m_tiles * self.tokens // 2 <= most and self.tokens % (8 * self.cluster_m) == 0

    def makes_elements(self) -> bool:
        """Whether threads have registers for the elements that they make of a quantized W."""
        most = _ELEMENTS.get((self.warpgroups, self.m_tiles, self.ctas_per_sm), WIDEST)
        if self.k_chunks > 1 and not self.stream_k:
            most = 0 if self.warpgroups == 3 or self.m_tiles == 2 else _ELEMENTS_BESIDE_CHUNKS
        return self.tokens <= most

    def step_tokens(self, lines: OperandLayouts) -> int:
        """Tokens of a staging buffer: the tile is stored in equal steps of a multiple of 8 tokens."""
        most = min(self.tokens, _STAGED_BYTES // lines.buffers // (TILE_M * lines.out_bytes))
        return max(step for step in range(8, most + 1, 8) if self.tokens % step == 0)

    def tail_tokens(self, n: int) -> int:
        """Tokens of the last token tile."""
        return n - (-(-n // self.tokens) - 1) * self.tokens

    def tail_boxed(self, n: int) -> int:
        """Tokens of column-major X that TMA loads for the last tile: boxes are fast in steps of 32 bytes."""
        tokens = self.tail_tokens(n)
        return align_up(tokens, 16) if self.tokens >= MAX_MEMORY_BOUND_N else tokens

    def tail_rows(self, n: int) -> int:
        """Rows of X that each CTA of a cluster loads for the last token tile."""
        tokens = self.tail_tokens(n)
        return tokens if self.cluster_m == 1 else align_up(-(-tokens // self.cluster_m), 8)

    def group(self, element_bytes: int) -> int:
        """Tokens in a shared-memory line of column-major X: all of the tile's, or as many as fit."""
        return min(pitch_of(self.tokens * element_bytes), _LINE_BYTES) // element_bytes

    def copied_by_threads(self, n: int) -> bool:
        """Whether cp.async loads column-major X instead of TMA, which is slow for short lines."""
        return self.tokens < MAX_MEMORY_BOUND_N or n <= MAX_MEMORY_BOUND_N

    def _staging_bytes(self, lines: OperandLayouts) -> int:
        token_bytes = self.step_tokens(lines) * lines.out_bytes
        step_bytes = TILE_M * (pitch_of(token_bytes) if lines.y_columns else token_bytes)
        barriers = _C_BARRIER_BYTES if lines.stages_c else 0
        return self.warpgroups * lines.buffers * (step_bytes + barriers) if self.split_k == 1 else 0

    def _part_bytes(self, lines: OperandLayouts) -> int:
        """Bytes of what a CTA sends to another with split-K: the sums of the other's share of the rows."""
        rows = align_up(-(-self.rows // self.split_k), 8)
        if lines.y_columns:
            return 4 * rows * (self.tokens + (0 if self.tokens % 16 else 8))
        return 4 * (rows + 4) * self.tokens

    def has_share_apart(self, lines: OperandLayouts) -> bool:
        """Whether a CTA receives parts beside its stages, so that others need not wait before they send."""
        bytes_of_sm = self.ctas_per_sm * self.split_k * self._part_bytes(lines)
        return self.split_k > 1 and bytes_of_sm <= _SHARES_APART

    def _fixed_bytes(self, lines: OperandLayouts) -> int:
        share = self.split_k * self._part_bytes(lines) if self.has_share_apart(lines) else 0
        barrier = _SHARE_BARRIER_BYTES if self.split_k > 1 else 0
        return self._staging_bytes(lines) + share + _BARRIER_BYTES + barrier + lines.table_bytes

    def _stage_bytes(self, lines: OperandLayouts) -> tuple[int, int]:
        group = self.group(2) if lines.x_columns else 1
        return self.rows // TILE_M * lines.layout.shared_bytes, 128 * align_up(self.tokens, group)

    def stages(self, lines: OperandLayouts, terms: int = 0) -> tuple[int, int]:
        """Pipeline stages of W and of X, as many as fit.

        A stage of X has half the columns of one of W; with split terms it has as many, of one term.
        """
        weight, source = self._stage_bytes(lines)
        room = SHARED_BYTES[self.ctas_per_sm] - self._fixed_bytes(lines)
        if self.joins_stages(lines):
            both = max(w for w in range(2, 9) if align_up(w * weight, _PATTERN) + 2 * w * source <= room)
            return both, 2 * both
        if terms:  # two tiles of W at a time, and the terms of X for them
            aligned = (w for w in range(2, 9) if w * weight % _PATTERN == 0)
            most = ((w, min(24, (room - w * weight) // source)) for w in aligned)
            fitting = [(w, x) for w, x in most if x >= 2 * terms]
            return max(fitting, key=lambda stages: (min(terms * stages[0], stages[1]), sum(stages)))
        most = ((w, min(16, (room - align_up(w * weight, _PATTERN)) // source)) for w in range(2, 9))
        fitting = [(w, x) for w, x in most if x >= 2]
        return max(fitting, key=lambda stages: (min(2 * stages[0] - 1, stages[1]), sum(stages)))

    def joins_stages(self, lines: OperandLayouts) -> bool:
        """Whether a stage of a quantized W shares its barriers with the two of X that it is multiplied with.

        That takes one thread that loads both, which kernels with larger tiles don't have.
        """
        most = 2 * MAX_MEMORY_BOUND_N if self.rows == TILE_M else MAX_MEMORY_BOUND_N
        is_quantized = lines.layout.quantization is not None
        return is_quantized and not lines.x_columns and self.cluster_m == 1 and self.tokens <= most

    def shared_bytes(self, lines: OperandLayouts, terms: int = 0) -> int:
        """Shared memory of a CTA, at least so much that no more than ``ctas_per_sm`` CTAs share an SM.

        The CTAs of the next launch start early. With room for them, they would crowd on the SMs that finish
        first and leave others idle.
        """
        (weights, sources), (weight, source) = self.stages(lines, terms), self._stage_bytes(lines)
        used = align_up(weights * weight, _PATTERN) + sources * source + self._fixed_bytes(lines)
        return max(used, SHARED_BYTES.get(self.ctas_per_sm + 1, 0) + 1)

    def work_tiles(self, n: int, m: int) -> int:
        """Work tiles; a cluster takes one at a time."""
        return -(-m // (self.rows * self.cluster_m)) * -(-n // self.tokens)

    def most_work_tiles(self, desc: GemmSparse24Descriptor) -> int:
        """Work tiles, or the most there can be: each group may end within a tile."""
        return most_token_tiles(desc, self.tokens) * self.work_tiles(1, desc.m) * desc.batch_count

    def oversubscribes(self, n: int, m: int) -> bool:
        """Whether CTAs share SMs although all clusters would run at once without sharing."""
        return self.ctas_per_sm > 1 and self.work_tiles(n, m) <= self.resident_alone(REFERENCE_SMS)

    def stream_k_split(self, n: int, m: int, k_tiles: int) -> tuple[int, int, int]:
        """Return the work tiles that stay whole, the K tiles of a range, and how many ranges have one more.

        Just enough work tiles are cut to give each range the K tiles of at least one work tile. At most two
        clusters therefore share a work tile: it is the last one of a cluster and the first one of the next.
        """
        work_tiles = self.work_tiles(n, m)
        if not self.stream_k or work_tiles < self.stream_k or work_tiles % self.stream_k == 0:
            return work_tiles, 0, 0
        cut = self.stream_k + work_tiles % self.stream_k
        return work_tiles - cut, *divmod(cut * k_tiles, self.stream_k)

    def flags_bytes(self) -> int:
        """Bytes of the workspace's first part, which holds a flag for each warpgroup of each CTA."""
        return align_up(8 * self.stream_k * self.cluster * self.warpgroups, 256)

    def sums_bytes(self) -> int:
        """Bytes of the workspace's second part: sums that a CTA passes on or saves for lack of registers."""
        parking = self.resident_clusters(REFERENCE_SMS) if self.saved_accumulators else 0
        return (self.stream_k or parking) * self.cluster * 4 * self.rows * self.tokens

    def workspace_bytes(self) -> int:
        """Bytes of the workspace. Stream-K with chunks of K keeps two further sets of sums."""
        return self.flags_bytes() + self.sums_bytes() * (3 if self.stream_k and self.k_chunks > 1 else 1)

    def ctas(self, work_tiles: int, multiprocessors: int) -> int:
        """CTAs of a launch. They are persistent, or with split-K one cluster per work tile."""
        # The workspace for saved accumulators has room for the CTAs of an H200.
        most = REFERENCE_SMS if self.saved_accumulators else multiprocessors
        resident = self.stream_k or self.resident_clusters(min(most, multiprocessors))
        persistent = resident if self.stream_k else min(work_tiles, resident)
        return (persistent if self.split_k == 1 else work_tiles) * self.cluster

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once. Clusters of over 2 CTAs don't fill the GPCs of an H200's 132 SMs."""
        idle = 15 if self.cluster % 3 == 0 and self.ctas_per_sm < 4 else 12
        idle = idle if self.cluster > 2 else 0
        usable = multiprocessors * (132 - idle) // 132
        return max(1, usable * self.ctas_per_sm // self.cluster)

    def resident_alone(self, multiprocessors: int) -> int:
        """Clusters that would run at once with one CTA an SM."""
        return self._replace(ctas_per_sm=1).resident_clusters(multiprocessors)


Schedules = tuple[WgmmaSpSchedule, ...]


def _width(tokens: int) -> int:
    """The narrowest instruction for ``tokens`` tokens. Beyond 32, integers have multiples of 16 alone."""
    return align_up(tokens, 8 if tokens <= 32 else 16)


def _has_few_outputs(m: int) -> bool:
    """Whether there are hardly as many work tiles as clusters. An unknown M, 0, counts as large."""
    return 0 < m < _FEW_OUTPUTS


def widths(n: int, widest: int = WIDEST, m: int = 0) -> tuple[int, ...]:
    """The tile widths that are tried: those that cut n into equal tiles, the widest first.

    For few outputs (``m``, if known) narrower ones are tried too.
    """
    if n <= MAX_MEMORY_BOUND_N:
        return (_width(n),)
    fewest, most = -(-n // widest), -(-n // MAX_MEMORY_BOUND_N)
    if not _has_few_outputs(m):
        most = min(most, fewest + _MORE_TILES)
    counts = sorted({c for w in range(16, widest + 1, 16) if fewest <= (c := -(-n // w)) <= most})
    return tuple(dict.fromkeys(_width(-(-n // blocks)) for blocks in counts))


# The shapes that are tried: (warpgroups, m64 tiles of a warpgroup, CTAs along M, split-K, CTAs per SM).
# They were the fastest somewhere by more than a few percent, among all that were measured on random shapes.
# The lists are code because they name what is compiled; the data files say which shape wins where.
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
# Weights of few bytes need more warps at once. The fastest of these is nearly always the fastest of all 37
# shapes that were measured. The others are left out, since the model would choose them where it errs.
_OF_FEW_QUANTIZED = (
    *((1, 1, 1, split, 1) for split in (2, 4, 8)),
    *((1, 1, 1, split, 2) for split in (1, 3, 4, 6)),
    *((1, 1, 1, split, 4) for split in (2, 3, 4, 7, 8)),
    *((1, 2, 1, split, 2) for split in (2, 4)),
    *((2, 2, 1, split, 2) for split in (1, 2)),
    *((2, 1, 1, 2, 1), (2, 2, 1, 1, 1), (2, 2, 1, 8, 1), (3, 2, 1, 1, 1)),
    *((3, 1, 1, split, 1) for split in (1, 2, 4)),
)
_OF_MANY = ((1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (3, 1, 1, 1, 1), (2, 2, 1, 1, 1), (2, 1, 2, 1, 1))
_OF_SOME = (
    *_OF_MANY,
    *((1, 1, 1, 2, 1), (2, 1, 1, 2, 1), (3, 1, 1, 2, 1)),
    *((1, 1, 1, 3, 1), (2, 1, 1, 3, 1), (1, 1, 1, 4, 1), (2, 1, 1, 4, 1)),
)
_MANY = 2048
"""Tokens beyond which there are CTAs enough without split-K, so that no schedule with it is tried."""


# The shapes that stream-K is tried with: (warpgroups, m64 tiles of a warpgroup, CTAs along M).
_STREAM_K_SHAPES = ((1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 2))


@lru_cache(4096)
def _fitting(every_width: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> Schedules:
    """The schedules that fit of these shapes, which are all fields but the tokens, in order."""
    tried = (WgmmaSpSchedule(w, r, tokens, *rest) for tokens in every_width for w, r, *rest in shapes)
    return tuple(one for one in tried if one.fits())


def _stream_k_schedules(n: int, m: int, k_chunks: int = 1, min_idle: float | None = None) -> Schedules:
    """Stream-K schedules, where every cluster has a work tile and enough of the last wave would be idle."""
    least = 0.0
    if k_chunks == 1:
        least = constants("wgmma_sp_stream_k")["min_idle"] if min_idle is None else min_idle
    shapes = tuple((w, r, c, 1, 1, k_chunks, REFERENCE_SMS // c) for w, r, c in _STREAM_K_SHAPES)

    def pays(one: WgmmaSpSchedule) -> bool:
        work_tiles, clusters = one.work_tiles(n, m), one.stream_k
        return clusters < work_tiles and -work_tiles % clusters > least * clusters

    return tuple(filter(pays, _fitting(widths(n, m=m), shapes)))


@lru_cache(1024)
def schedules_for(n: int, m: int = 0, min_idle: float | None = None, quantized: bool = False) -> Schedules:
    """The schedules that are tried for n tokens; with m, also those that depend on the outputs.

    ``min_idle`` is the fraction of a last wave that must be idle for stream-K; None takes the fitted one.
    ``quantized``: whether W is quantized.
    """
    few = _OF_FEW_QUANTIZED if quantized else _OF_FEW
    shapes = few if n <= MAX_MEMORY_BOUND_N else _OF_SOME if n <= _MANY else _OF_MANY
    fitting = _fitting(widths(n, m=m), shapes)
    found = tuple(one for one in fitting if not (m and one.oversubscribes(n, m)))
    found += _stream_k_schedules(n, m, min_idle=min_idle)
    return tuple(one for one in found if one.makes_elements()) if quantized else found


@lru_cache(1024)
def schedules_in(
    slices: int, n: int, m: int = 0, min_idle: float | None = None, quantized: bool = False
) -> Schedules:
    """Schedules that sum K in ``slices`` slices, along a cluster or in chunks: the bits are the same."""
    tried = [one for one in schedules_for(n, m, min_idle, quantized) if one.split_k == slices]
    if slices > 1:
        if n > MAX_MEMORY_BOUND_N:
            wide = tuple((*shape, slices) for shape in _OF_MANY if shape[0] > 1)
            tried += _fitting(widths(n, m=m), wide)
            tried += (one for one in _stream_k_schedules(n, m, slices) if one.warpgroups > 1)
        tried += _narrow_in(slices, n)
    return tuple(one for one in dict.fromkeys(tried) if not quantized or one.makes_elements())


@lru_cache(4096)
def _narrow_in(slices: int, n: int) -> Schedules:
    """Narrow schedules that sum K in chunks, and those that sum it along a cluster."""
    narrow = narrow_schedules(n)
    in_chunks = (one._replace(k_chunks=slices) for one in narrow)
    return *in_chunks, *(one._replace(split_k=slices) for one in narrow if one.warpgroups == 1)


def narrow_schedules(n: int) -> Schedules:
    """Schedules whose threads have registers for their sums twice."""
    found = []
    for tokens in widths(n, 2 * _SUMS_TWICE):
        found += [
            WgmmaSpSchedule(1, 1, tokens),
            WgmmaSpSchedule(2, 1, tokens),
            WgmmaSpSchedule(2, 1, tokens, cluster_m=2),
        ]
    return tuple(one for one in found if one.fits())
