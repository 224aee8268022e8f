"""Who computes a row panel of ``blocksparse/blocks_wgmma.cu``, and in how many slices.

Long panels are cut, or come first; where few CTAs would leave others idle, every panel is cut. Bits depend on
the slices alone, and not on who sums them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...plan.kernel import align_up
from ...plan.schedule_choice import REFERENCE_SMS, constants, fastest
from ...vocab import BlockSparseOp
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import COUNTER_BYTES, KernelProblem, slice_bytes
from ..panels import NARROW_PANEL_ROWS, PANEL_ROWS, Slicing, expected_occupancy, panel_block_rows
from .blocks_wgmma import HELD_CELLS, TOKENS, BlocksWgmmaSchedule, fitting
from .blocks_wgmma_cost import cost_model, mean_panel, panel_count, work

NO_SLICES, APART, SEQUENTIAL, LONG_FIRST = 0, 1, 2, 3
"""How long panels are handled. In order: there are none; their slices have CTAs of their own, which exchange
sums in the workspace; one CTA takes the slices of a panel one after the other; they are not cut, but come
first."""
_MAX_CLAIMS = 1 << 24
"""Bound of the work tiles that a launch's counter counts."""
EVEN_SLICES, EVEN_CLUSTERS = "even_slices", "even_clusters"
"""The names of the constants of an exchange of sums between the slices of a panel, and of the numbers of
clusters that run at once."""
EXCHANGE_TERMS = ("exchange_us", "cell_us", "wave_us")
"""The names of what takes time if clusters add the slices of panels."""
_MAX_CLUSTER_SLICES = 8
"""Most slices into which every panel is cut: CTAs of the largest cluster that every device has."""
_MAX_WAVES = 4
"""Most waves of clusters with which cutting every panel is tried: with more, the tiles without a long panel
keep all SMs busy while the long ones are computed."""
_BEYOND_LOGARITHM = 0.6
"""The sum of 1 / rank, less the logarithm of the number of ranks: for tens of them it is Euler's constant and
half of the last term."""
NARROW = fitting(NARROW_PANEL_ROWS, TOKENS[-1], 1, 1)
"""The smallest tile. A multiprocessor has two of it."""


def tile_of(rows: int, tokens: int, cluster_n: int = 1) -> BlocksWgmmaSchedule:
    """The schedule with tiles of ``rows`` x ``tokens``."""
    return NARROW if (rows, tokens) == NARROW[:2] else fitting(rows, tokens, 2, cluster_n)


class Cut(NamedTuple):
    """A schedule, and who sums the slices of panels that are cut."""

    schedule: BlocksWgmmaSchedule
    slices: int = NO_SLICES
    """``NO_SLICES``, ``APART``, ``SEQUENTIAL`` or ``LONG_FIRST``."""
    counter_bytes: int = 0
    """Workspace bytes of the counters of claimed work tiles and of arrivals."""
    sum_bytes: int = 0
    """Workspace bytes of the sums of slices."""
    cluster_slices: int = 1
    """Slices of every panel, which the CTAs of a cluster compute. 1: none is cut on this account."""

    @property
    def workspace(self) -> int:
        return self.counter_bytes + self.sum_bytes

    @property
    def name(self) -> str:
        """The name of this cut among a problem's others, in files of measured times."""
        one = self.schedule
        rows = "" if one.rows == PANEL_ROWS else f",{one.rows}"
        evenly = "" if self.cluster_slices == 1 else f"/{self.cluster_slices}"
        return f"{one.tokens},{one.cluster_n},{self.slices}{rows}{evenly}"

    @classmethod
    def named(cls, name: str) -> Cut:
        """The cut of such a name, without its workspace."""
        tile, _, evenly = name.partition("/")
        tokens, cluster_n, slices, *narrow = map(int, tile.split(","))
        rows = narrow[0] if narrow else PANEL_ROWS
        return cls(tile_of(rows, tokens, cluster_n), slices, cluster_slices=int(evenly or 1))

    @classmethod
    def of(
        cls,
        desc: BlockSparseMatmulDescriptor,
        multiprocessors: int,
        most: int | None = None,
        *,
        invariant: bool = False,
    ) -> Cut:
        """The fastest cut that needs at most ``most`` bytes of workspace.

        ``invariant``: long panels are cut, whatever ``n`` is, and no bit depends on who sums their slices.
        Otherwise they are cut if that is faster than taking them first, which costs no exchange of sums: then
        CTAs without a long panel take more of the others.
        """
        problem, alike = KernelProblem(desc), _of_unknown_panels(desc)
        whole = BlocksWgmmaSchedule.of(desc if has_long_panel(desc) else alike, multiprocessors)
        slicing = problem.slicing()
        if slicing is None:
            return cls(whole)
        one = _with_long_panels(desc, multiprocessors)
        found = cls(one, APART, *slice_bytes(problem, one.rows))
        if invariant and one.rows == PANEL_ROWS and _evens_out(desc, one, multiprocessors):
            found = cls(one, SEQUENTIAL, 0, one.held_bytes(desc, multiprocessors))
        elif not (invariant or _pays_to_cut(desc, slicing)):
            if one.work_tiles(desc) <= one.resident_clusters(multiprocessors):
                return cls(whole)
            found = cls(one, LONG_FIRST, align_up(COUNTER_BYTES))
        fits = (most is None or found.workspace <= most) and one.most_work_tiles(desc) < _MAX_CLAIMS
        if fits or (found.slices == SEQUENTIAL and found.workspace == 0):
            return found
        if not invariant:
            return cls(whole)
        return cls(BlocksWgmmaSchedule.of(desc, multiprocessors, HELD_CELLS), SEQUENTIAL)

    def narrowed(self, desc: BlockSparseMatmulDescriptor) -> Cut:
        """Return this cut with tiles of 64 x 64 instead of 128 x 64, if slices and density allow them.

        Two CTAs with such tiles share a multiprocessor, so more loads are in flight, and a narrow panel has
        fewer columns. If most blocks are kept, the tiles stay as they are, and so they do with blocks of 64
        if panels may be long: slices of narrow ones have other bits.
        """
        layout, wide = desc.layout, (PANEL_ROWS, NARROW.tokens)
        if desc.op is BlockSparseOp.SDD or layout.block == PANEL_ROWS or self.schedule[:2] != wide:
            return self
        keeps_slices = self.slices != SEQUENTIAL and layout.block < NARROW_PANEL_ROWS
        lacks_slices = self.slices != NO_SLICES and not keeps_slices
        is_dense = layout.density > constants("blocks_tiles")["narrow_density"]
        is_counted = NARROW.most_work_tiles(desc) < _MAX_CLAIMS
        return self if lacks_slices or is_dense or not is_counted else self._replace(schedule=NARROW)

    def evenly(self, desc: BlockSparseMatmulDescriptor) -> list[Cut]:
        """Cuts with the same tiles and every panel in several slices, if all slices are computed at once.

        A cluster computes and adds the slices of a panel. If a panel is known to be longer than those of
        random layouts, for which others would wait at the end, there may be several waves of clusters.
        """
        across = desc.reduction // desc.layout.block
        several = range(2, min(across, _MAX_CLUSTER_SLICES) + 1)
        alone = self.schedule._replace(cluster_n=1)
        cuts = [Cut(alone, cluster_slices=slices) for slices in several]
        most = _MAX_WAVES if desc.n <= TOKENS[0] and _is_uneven(desc) else 1
        return [cut for cut in cuts if 0 < cut.cluster_waves(desc) <= most]

    def cluster_waves(self, desc: BlockSparseMatmulDescriptor) -> float:
        """Work tiles over the clusters of ``cluster_slices`` CTAs that an H200 runs at once."""
        return self.schedule.work_tiles(desc) / clusters_of(self.cluster_slices, self.schedule.ctas_per_sm)


def clusters_of(cluster_slices: int, ctas_per_sm: int) -> int:
    """Number of clusters of ``cluster_slices`` CTAs that run at once on an H200."""
    return int(constants(EVEN_CLUSTERS)[str(cluster_slices)]) * ctas_per_sm


def as_run(
    desc: BlockSparseMatmulDescriptor,
    multiprocessors: int,
    most: int | None = None,
    *,
    invariant: bool = False,
) -> Cut:
    """The cut that runs, which needs at most ``most`` bytes of workspace.

    If it needn't be batch-invariant, it is the one that takes the least time by prediction for the H200 on
    every device, because the choice decides guarantees.
    """
    found = Cut.of(desc, multiprocessors, most, invariant=invariant).narrowed(desc)
    if invariant or desc.op is BlockSparseOp.SDD:
        return found
    return fastest(
        [found, *others(desc, found)],
        lambda some: cuts_us(desc, some),
        lambda one: one.workspace,
        most,
    )


def others(desc: BlockSparseMatmulDescriptor, found: Cut) -> list[Cut]:
    """The cuts that compete with ``found``.

    For few tokens, or with a long panel, they are every tile with every way to compute its panels. Otherwise
    they are the tile of ``found`` with every panel cut.
    """
    if desc.n > TOKENS[0] and not _is_uneven(desc):
        is_alike = found.slices in (NO_SLICES, APART)
        return Cut(found.schedule).narrowed(desc).evenly(desc) if is_alike else []
    problem, tried = KernelProblem(desc), list[Cut]()
    may_be_cut = problem.slicing() is not None
    for one in _tiles_tried(desc):
        if desc.n <= TOKENS[0] or one.work_tiles(desc) <= one.resident_clusters(REFERENCE_SMS):
            tried.append(Cut(one))
        elif may_be_cut:
            tried.append(Cut(one, LONG_FIRST, align_up(COUNTER_BYTES)))
        tried += Cut(one).evenly(desc)
        if may_be_cut:
            tried.append(Cut(one, APART, *slice_bytes(problem, one.rows)))
    return tried


def _tiles_tried(desc: BlockSparseMatmulDescriptor) -> list[BlocksWgmmaSchedule]:
    """The tiles that are tried. Of the widths that hold all tokens, only the smallest is among them."""
    widths = [one for one in TOKENS if one == TOKENS[-1] or one < 2 * desc.n]
    tiles = [tile_of(rows, one) for one in widths for rows in _rows_tried(desc, one)]
    return [one for one in tiles if one.most_work_tiles(desc) < _MAX_CLAIMS]


def _rows_tried(desc: BlockSparseMatmulDescriptor, tokens: int) -> tuple[int, ...]:
    """Rows of the tiles that are tried with this number of tokens.

    Tiles of 64 tokens have 64 rows, or with blocks of 64 also 128. Wider tiles have 128 rows, or for few
    tokens and blocks below 64 also 64. Blocks of 128 have 128 rows alone.
    """
    block = desc.layout.block
    if block == PANEL_ROWS:
        return (PANEL_ROWS,)
    if tokens == TOKENS[-1]:
        return (NARROW_PANEL_ROWS, PANEL_ROWS) if block == NARROW_PANEL_ROWS else (NARROW_PANEL_ROWS,)
    has_both = block < NARROW_PANEL_ROWS and desc.n <= TOKENS[0]
    return (NARROW_PANEL_ROWS, PANEL_ROWS) if has_both else (PANEL_ROWS,)


def cut_work(desc: BlockSparseMatmulDescriptor, cut: Cut) -> tuple[float, ...]:
    """The amount of each kind of work in the cost model's terms."""
    one, most = cut.schedule, math.inf
    slicing = KernelProblem(desc).slicing(one.rows)
    if cut.slices in (APART, SEQUENTIAL) and slicing:
        most = slicing.longest
    ctas = REFERENCE_SMS * one.ctas_per_sm
    if cut.cluster_slices > 1:
        ctas = cut.cluster_slices * clusters_of(cut.cluster_slices, one.ctas_per_sm)
    return work(desc, one.rows, one.tokens, most, ctas, cut.cluster_slices)


def cuts_us(desc: BlockSparseMatmulDescriptor, cuts: Sequence[Cut]) -> list[float]:
    """Predicted microseconds of a problem's cuts without pre-passes."""
    model = cost_model(desc)
    return [model.microseconds(cut_work(desc, one)) + exchange_us(desc, one) for one in cuts]


def cluster_exchange(desc: BlockSparseMatmulDescriptor, cut: Cut) -> tuple[float, float, float]:
    """The amounts of EXCHANGE_TERMS if clusters add the slices of panels.

    A further wave of clusters waits for whole clusters of the one before.
    """
    one = cut.schedule
    return 1.0, one.rows * one.tokens, max(cut.cluster_waves(desc) - 1, 0.0)


def exchange_us(desc: BlockSparseMatmulDescriptor, cut: Cut) -> float:
    """Predicted microseconds in which CTAs exchange the sums of slices: in a cluster, or of long panels.

    The exchange for long panels takes longer with wider tiles, unless few tokens leave most of a tile empty.
    """
    if cut.cluster_slices > 1:
        costs = constants(EVEN_SLICES)
        amounts = zip(EXCHANGE_TERMS, cluster_exchange(desc, cut), strict=True)
        return float(sum(costs[name] * amount for name, amount in amounts))
    if not _exchanges_slices(desc, cut):
        return 0.0
    tokens = cut.schedule.tokens if desc.n > TOKENS[0] else TOKENS[-1]
    return float(constants("blocks_tiles")["apart_us"]) * tokens / TOKENS[-1]


def _exchanges_slices(desc: BlockSparseMatmulDescriptor, cut: Cut) -> bool:
    """Whether a panel is known to be so long that CTAs exchange the sums of its slices."""
    slicing = KernelProblem(desc).slicing()
    return cut.slices == APART and slicing is not None and desc.longest_panel > slicing.uncut


def may_be_evened(desc: BlockSparseMatmulDescriptor) -> bool:
    """Whether panels may be cut evenly for any number of tokens, or batch elements, with this layout."""
    panels = desc.layout.heads * KernelProblem(desc).head_panels(PANEL_ROWS)
    return desc.op is not BlockSparseOp.SDD and panels <= clusters_of(2, 1)


def _with_long_panels(desc: BlockSparseMatmulDescriptor, multiprocessors: int) -> BlocksWgmmaSchedule:
    """The schedule where long panels are cut or come first, so that others do not wait for them.

    Tiles of few waves are narrower if a panel is known to be long: more tiles are shared out better.
    """
    alike, limits = _of_unknown_panels(desc), constants("blocks_tiles")
    waves = panel_count(desc) * -(-desc.n // TOKENS[0]) / multiprocessors
    is_large = desc.layout.block >= NARROW_PANEL_ROWS
    narrower = is_large and has_long_panel(desc) and waves < limits["wide_waves"]
    return BlocksWgmmaSchedule.of(alike, multiprocessors, HELD_CELLS if narrower else None)


def _of_unknown_panels(desc: BlockSparseMatmulDescriptor) -> BlockSparseMatmulDescriptor:
    """The problem without its longest panel. A copy is validated, so none is made if nothing changes."""
    return desc.model_copy(update={"longest_panel": 0}) if desc.longest_panel else desc


def _is_uneven(desc: BlockSparseMatmulDescriptor) -> bool:
    """Whether a panel is known to be longer than those of random layouts, so that it may be cut."""
    slicing = KernelProblem(desc).slicing()
    return slicing is not None and desc.longest_panel > slicing.longest


def has_long_panel(desc: BlockSparseMatmulDescriptor) -> bool:
    """Whether a panel is known to be much longer than the mean."""
    return bool(desc.longest_panel > constants("blocks_tiles")["uneven_panel"] * mean_panel(desc))


def _pays_to_cut(desc: BlockSparseMatmulDescriptor, slicing: Slicing) -> bool:
    """Whether slices that several CTAs sum take less time than whole panels, of which long ones come first.

    Times are counted in columns of a panel. A CTA does its share of all work. With slices it also exchanges
    sums for each slice, and ends with an exchange. Whole panels end no earlier than the longest one. If the
    longest length is unknown, it is taken to be that of rows whose blocks follow 1 / rank. Each slice of a
    panel that is cut has more than half of the columns that a slice may have. A column takes less time in a
    narrow tile, and an exchange takes still less, by the square root of the width.
    """
    layout, problem = desc.layout, KernelProblem(desc)
    lines, across = problem.head_block_rows, desc.reduction // layout.block
    one = _with_long_panels(desc, REFERENCE_SMS)
    tiles = one.work_tiles(desc) * one.cluster_n
    share = tiles / REFERENCE_SMS * mean_panel(desc, one.rows)
    of_rank_1 = across * lines * layout.density / (math.log(lines) + _BEYOND_LOGARITHM)
    longest = desc.longest_panel or min(across, mean_panel(desc) + of_rank_1)
    exchange = math.sqrt(one.tokens / TOKENS[0]) * constants("blocks_tiles")["exchange_cells"] / layout.block
    cut = max(share * (1 + exchange / slicing.longest), slicing.longest / 2) + exchange
    return bool(max(longest, share) > cut)


def _evens_out(desc: BlockSparseMatmulDescriptor, one: BlocksWgmmaSchedule, multiprocessors: int) -> bool:
    """Whether a CTA has so many panels that a long one makes no CTA much later than the others."""
    layout, problem = desc.layout, KernelProblem(desc)
    occupancy = expected_occupancy(layout, panel_block_rows(layout))
    across = layout.block_rows if problem.by_columns else layout.block_cols
    longest = desc.longest_panel / across if desc.longest_panel else 1.0
    waves = one.work_tiles(desc) / one.resident_clusters(multiprocessors)
    return waves * occupancy >= float(constants("blocks_tiles")["sequential_work"]) * longest
