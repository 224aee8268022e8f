"""Schedules of float32 in bf16 terms, a model of the time that they take, and the fastest by that model.

The schedules are some of wgmma_sp's: threads hold sums twice and, for six products, terms of W as well. A
tile is 64 rows x 64 columns of W. The model knows the problem's shape alone, as wgmma_sp's does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from ...plan.kernel import align_up
from ...plan.schedule_choice import REFERENCE_SMS, constants, fastest
from ...vocab import DeviceProperties, ElementKind
from ...weights.packed_layouts import TILE_M, TILES_32BIT
from ..arithmetic.bf16_terms import SPLIT_GROUP, SPLIT_SUM, SPLIT_TILE
from ..descriptor import GemmSparse24Descriptor
from ..kernel_table import GemmEntry
from ..limits import SPLIT_CHUNK_BYTES, most_chunk, producers_split, split_bytes
from .schedule_family import Array, Pairs, ScheduleFamily
from .wgmma_sp import MAX_MEMORY_BOUND_N, Schedules, WgmmaSpSchedule, widths

_WIDEST, _WIDEST_SPLIT_K, _WIDEST_OF_MANY_ROWS = 128, 112, 16
"""Maximum tokens of a tile, as registers limit them: in general, with split-K, with many rows."""
# The shapes that are tried: (warpgroups, m64 tiles of a warpgroup, CTAs that share X, split-K). The lists
# name what is compiled and compared, and have only shapes for which registers suffice.
_OF_FEW = (
    *((*rows, 1, slices) for rows in ((1, 1), (2, 1), (2, 2)) for slices in (1, 2, 3, 4, 8)),
    *((3, 1, 1, slices) for slices in (1, 2, 3, 4)),  # registers don't suffice for 8
)
_OF_MANY = ((2, 1, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 3), (2, 1, 1, 4), (2, 1, 1, 8))
RANGE_TILES = {2: SPLIT_SUM[2] // SPLIT_TILE, 3: 2}
"""The unit of stream-K in K tiles for each number of terms. A unit is a whole number of tensor-core sums."""


class SplitCostInputs(NamedTuple):
    """The facts that the model reads of pairs of a schedule and a problem: arrays with an entry a pair."""

    k_tiles: Array
    """Tiles of K that a CTA multiplies for a work tile."""
    m_tiles: Array
    """Tiles of 64 rows of a CTA."""
    width: Array
    """Tokens of a CTA's tile."""
    sums: Array
    """Sums of a CTA that are stored."""
    waves: Array
    busy: Array
    """CTAs that run at once."""
    cluster: Array
    weight_bytes: Array
    """Bytes of a tile of W, or 0 where so many tokens share it that loading it costs nothing."""
    multicasts: Array
    splits: Array
    streams: Array
    """Whether clusters share X, split K, or take ranges by stream-K: 1 or 0."""

    @classmethod
    def of(cls, pairs: Pairs) -> SplitCostInputs:
        return cls(*np.array([_facts(one, desc) for one, desc in pairs], dtype=np.float64).T)


def _facts(one: WgmmaSpSchedule, desc: GemmSparse24Descriptor) -> tuple[float, ...]:
    work_tiles = one.work_tiles(desc.n, desc.m)
    resident = one.stream_k or one.resident_clusters(REFERENCE_SMS)
    return (
        -(-desc.k // SPLIT_TILE) / one.split_k,
        one.rows // TILE_M,
        one.tokens,
        one.rows * min(one.tokens, desc.n),
        work_tiles / resident if one.stream_k else -(-work_tiles // resident),
        min(work_tiles, resident) * one.cluster,
        one.cluster,
        TILES_32BIT.tile_bytes if desc.n <= MAX_MEMORY_BOUND_N else 0,
        one.cluster_m > 1,
        one.split_k > 1,
        one.stream_k > 0,
    )


@dataclass(frozen=True)
class F32Split(ScheduleFamily):
    """Products of float32 in ``terms`` bf16 terms."""

    terms: int

    def candidates(
        self, desc: GemmSparse24Descriptor, split_k: int | None = None, *, first: bool = False
    ) -> Schedules:
        """The schedules that are tried. ``first`` leaves out stream-K for few tokens.

        Another set of candidates would choose another split-K, and so change bits.
        """
        ranged = not first or desc.n > MAX_MEMORY_BOUND_N
        tried = _tried_schedules(desc.n, desc.m, desc.k, self.terms)
        return tuple(one for one in tried if split_k in (None, one.split_k) and (ranged or not one.stream_k))

    def model_of(self, desc: GemmSparse24Descriptor, *, first: bool = False) -> str:
        family = "f32_split_split_k" if first else "f32_split"
        return f"{family}_{self.terms}_{'few' if desc.n <= MAX_MEMORY_BOUND_N else 'many'}"

    def split_rule(self, element: ElementKind) -> str:
        return "f32_split_split_k"

    def inputs(self, pairs: Pairs) -> SplitCostInputs:
        return SplitCostInputs.of(pairs)

    def microseconds(self, work: SplitCostInputs, fit: Mapping[str, float]) -> Array:
        rows = constants("f32_split_rows")
        multiply = (fit["tile"] + fit["token"] * work.width) * (rows["any"] + rows["tile"] * work.m_tiles)
        multiply *= np.where(work.multicasts, fit["multicast"], 1.0)
        bandwidth = np.minimum(fit["sm_bandwidth"], fit["dram_bandwidth"] / work.busy)
        load = work.m_tiles * work.weight_bytes / bandwidth
        stored = work.sums * fit["output"] + fit["pipeline_refill"] * work.splits
        each = work.k_tiles * np.maximum(multiply, load) + stored
        launch = fit["launch"] + fit["cluster_launch"] * np.log2(work.cluster)
        return launch + work.waves * each + fit["fixup_wait"] * work.streams


@lru_cache(1024)
def _tried_schedules(n: int, m: int, k: int, terms: int) -> Schedules:
    """The schedules that are tried for ``terms`` bf16 terms."""
    found = []
    for warpgroups, m_tiles, cluster_m, split_k in _OF_FEW if n <= MAX_MEMORY_BOUND_N else _OF_MANY:
        most = _WIDEST_SPLIT_K if split_k > 1 else _WIDEST
        most = _WIDEST_OF_MANY_ROWS if warpgroups * m_tiles > 2 else most
        if (warpgroups, split_k, terms) == (3, 2, 3):
            continue  # registers don't suffice
        shape = [
            WgmmaSpSchedule(warpgroups, m_tiles, tokens, cluster_m, split_k) for tokens in widths(n, most)
        ]
        found += [one for one in shape if one.fits() and one.tokens <= most]
    return (*found, *(ranged for one in found if (ranged := _with_stream_k(one, n, m, k)) is not None))


def _with_stream_k(one: WgmmaSpSchedule, n: int, m: int, k: int) -> WgmmaSpSchedule | None:
    """The schedule with stream-K; None unless there is more than one wave and the last is partial.

    Producers that split X leave no warp for the flags of stream-K, and their problems are too small for it.
    """
    ranges, work_tiles = REFERENCE_SMS // one.cluster_m, one.work_tiles(n, m)
    if one.split_k > 1 or work_tiles <= ranges or work_tiles % ranges == 0:
        return None
    if producers_split(m, k, one.tokens):
        return None
    return one._replace(stream_k=ranges)


class Regions(NamedTuple):
    """Offsets in the workspace, behind the terms of a chunk of X, in bytes."""

    partials: int
    """The partial sums and flags of stream-K begin here."""
    groups: int
    """The sums of groups of columns begin here: one set a CTA, and with stream-K two."""
    end: int

    @classmethod
    def of(
        cls, schedule: WgmmaSpSchedule, desc: GemmSparse24Descriptor, terms: int, device: DeviceProperties
    ) -> Regions:
        partials = (
            0 if producers_split(desc.m, desc.k, schedule.tokens) else align_up(split_bytes(terms, desc))
        )
        groups = partials + align_up(schedule.workspace_bytes())
        in_groups = schedule.split_k == 1 and 0 < SPLIT_GROUP[terms] < desc.k
        ctas = schedule.ctas(schedule.work_tiles(desc.n, desc.m), device.multiprocessors)
        sums = 4 * schedule.rows * schedule.tokens * ctas * (2 if schedule.stream_k else 1)
        return cls(partials, groups, groups + (sums if in_groups else 0))


class Chunking(NamedTuple):
    """A schedule, and the tokens of each chunk that it multiplies."""

    schedule: WgmmaSpSchedule
    tokens: int

    @classmethod
    @lru_cache(4096)
    def of(
        cls,
        desc: GemmSparse24Descriptor,
        entry: GemmEntry,
        device: DeviceProperties,
        whole_m: int | None = None,
        max_workspace: int | None = None,
    ) -> Chunking:
        """The kernel's schedule of the least predicted time, and its chunks.

        ``whole_m``: M of the weight that W is a part of. ``max_workspace``: bytes that the kernel may ask
        for. A limit can make chunks smaller, but it changes no split-K, so the bits are those without one.
        """
        found, terms = _fastest_chunking(desc, entry, whole_m), entry.split_terms
        needed = Regions.of(found.schedule, found.chunk(desc), terms, device).end
        if max_workspace is None or needed <= max_workspace:
            return found
        smaller = _smaller_chunks(desc, entry, device, whole_m, max_workspace)
        return _fastest([one for one, needed in smaller if needed <= max_workspace], desc, terms)

    @classmethod
    def cut(
        cls,
        schedule: WgmmaSpSchedule,
        desc: GemmSparse24Descriptor,
        terms: int,
        room: int = SPLIT_CHUNK_BYTES,
    ) -> Chunking:
        """Chunks of whole tiles, about as many in each, whose terms take at most ``room`` bytes.

        A chunk of the fewest tokens may take more.
        """
        most = most_chunk(terms, desc, room)
        if most == desc.n:
            return cls(schedule, most)
        tiles, width = -(-desc.n // schedule.tokens), schedule.tokens
        return cls(schedule, -(-tiles // -(-tiles // (most // width))) * width)

    def chunk(self, desc: GemmSparse24Descriptor) -> GemmSparse24Descriptor:
        return desc.model_copy(update={"n": self.tokens})


def needed_workspace(
    desc: GemmSparse24Descriptor, entry: GemmEntry, device: DeviceProperties, whole_m: int | None = None
) -> int:
    """The least ``max_workspace`` with which :meth:`Chunking.of` finds a schedule.

    No tokens count as one token, so that the kernel of one token serves them, too, and reads its layout.
    """
    if desc.m == 0:
        return 0
    some = desc.model_copy(update={"n": max(1, desc.n)})
    return min(needed for _, needed in _smaller_chunks(some, entry, device, whole_m, 0))


@lru_cache(4096)
def _fastest_chunking(desc: GemmSparse24Descriptor, entry: GemmEntry, whole_m: int | None) -> Chunking:
    """The fastest schedule if any workspace were allowed."""
    terms = entry.split_terms
    whole = desc.model_copy(update={"n": most_chunk(terms, desc)})
    allowed = F32Split(terms).allowed(whole, entry, whole_m)
    return _fastest([Chunking.cut(one, desc, terms) for one in allowed], desc, terms)


def _smaller_chunks(
    desc: GemmSparse24Descriptor,
    entry: GemmEntry,
    device: DeviceProperties,
    whole_m: int | None,
    max_workspace: int,
) -> list[tuple[Chunking, int]]:
    """The largest chunks of each schedule that a workspace has room for, or the smallest of all.

    Each stands with its bytes of workspace. All have the split-K of the kernel without a limit.
    """
    terms, found = entry.split_terms, []
    whole = desc.model_copy(update={"n": most_chunk(terms, desc)})
    split_k = _fastest_chunking(desc, entry, whole_m).schedule.split_k
    for one in F32Split(terms).candidates(whole, split_k):
        regions = Regions.of(one, whole, terms, device)
        room = max(0, max_workspace - (regions.end - regions.partials))
        cut = Chunking.cut(one, desc, terms, room)
        if one.stream_k and one.work_tiles(cut.tokens, desc.m) <= one.stream_k:
            continue  # the chunk has too few work tiles for every cluster to have one
        found.append((cut, Regions.of(one, cut.chunk(desc), terms, device).end))
    return found


def _fastest(tried: Sequence[Chunking], desc: GemmSparse24Descriptor, terms: int) -> Chunking:
    """The schedule of which all chunks take the least predicted time."""
    family, problem = F32Split(terms), cache(lambda n: desc.model_copy(update={"n": n}))

    def times(tried: Sequence[Chunking]) -> Array:
        pairs = [(one.schedule, problem(one.tokens)) for one in tried]
        return family.times(pairs, family.model_of(desc)) * [desc.n / one.tokens for one in tried]

    return fastest(tried, times)
