"""How ``mma_sp`` cuts a problem into CTAs, and the split-K that fixes the bits of its 16-bit kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...errors import UnsupportedError
from ...plan.schedule_choice import REFERENCE_SMS, SHARED_BYTES, first_enough
from ...vocab import DeviceProperties
from ...weights.packed_layouts import ROW_BYTES, TILE_M, TILES_16BIT, TileLayout, layout_of
from ..descriptor import GemmSparse24Descriptor

WARP_PAIRS = 4
"""Tiles of W that a CTA multiplies side by side."""
_WITH_CLUSTERS = ((9, 0), (12, 0))
"""Compute capabilities, from and below, whose CTAs can reduce in clusters and have that much memory."""
_MIDDLE_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10}
_MIN_BYTES = 99 << 10
"""Maximum shared memory of a CTA elsewhere."""
_N8_TILES_OF_CTA = (1, 2, 4)
"""Tiles of eight tokens of a CTA without clusters, as the kernel is compiled."""


class MmaSpSchedule(NamedTuple):
    """How a problem is cut into CTAs. ``split_k`` alone fixes the bits."""

    split_k: int
    n8_tiles: int
    warp_pairs_m: int
    ctas_per_sm: int
    stages: int
    token_blocks: int
    blocks: int
    tile_bytes: int
    """Bytes of a tile of W."""

    @classmethod
    def of(
        cls,
        desc: GemmSparse24Descriptor,
        device: DeviceProperties,
        configuration: Mapping[str, int] | None = None,
        whole_m: int | None = None,
    ) -> MmaSpSchedule:
        """The configured schedule, or the default. Raises UnsupportedError for one that isn't a candidate.

        With ``whole_m``, M of the weight that this one is a part of, no configuration is applied, nor to
        batches.
        """
        layout = layout_of(desc.element)
        if configuration and whole_m is None and not desc.is_batched:
            if dict(configuration) not in candidates(desc, device):
                raise UnsupportedError(
                    f"configuration: mma_sp has no schedule {dict(configuration)} for the problem"
                )
            return cls.shaped(desc.n, desc.m, split_k_of(desc.m), layout=layout, **configuration)
        if can_reduce_in_cluster(device):
            return cls.in_clusters(desc.n, desc.m, device.multiprocessors, whole_m, desc.batch_count, layout)
        return cls.in_cta(desc.n, desc.m, device.compute_capability, layout)

    @classmethod
    def in_clusters(
        cls,
        n: int,
        m: int,
        multiprocessors: int,
        whole_m: int | None = None,
        batches: int = 1,
        layout: TileLayout = TILES_16BIT,
    ) -> MmaSpSchedule:
        """The schedule for n tokens and m out features (of ``whole_m``), for each of the batches.

        It is the first shape of the list that runs in one wave with an SM to each CTA, and so with the
        deepest pipeline; else the last shape, with two CTAs an SM where they fit.
        """
        slices = split_k_of(whole_m or m)
        shapes = _shapes_of(slices, layout)
        n8_tiles = first_enough(sorted(shapes), lambda tiles: 8 * tiles >= n)
        return first_enough(
            [cls.shaped(n, m, slices, n8_tiles, *shape, layout) for shape in shapes[n8_tiles]],
            lambda one: one.ctas_per_sm == 1 and one.blocks * batches <= multiprocessors,
        )

    @classmethod
    def in_cta(
        cls, n: int, m: int, compute_capability: tuple[int, int], layout: TileLayout = TILES_16BIT
    ) -> MmaSpSchedule:
        """The schedule without clusters, where one CTA has all of a tile's split-K.

        A CTA takes as many tokens as leave two stages.
        """
        room = _MIDDLE_BYTES.get(compute_capability, _MIN_BYTES)
        wanted = first_enough(_N8_TILES_OF_CTA, lambda tiles: 8 * tiles >= n)

        def schedule(n8_tiles: int) -> MmaSpSchedule:
            token_blocks = -(-n // (8 * n8_tiles))
            blocks = -(-m // TILE_M) * token_blocks
            one = cls(WARP_PAIRS, n8_tiles, 1, 1, 0, token_blocks, blocks, layout.tile_bytes)
            return one._replace(stages=min(8, room // one.stage_bytes))

        tried = [schedule(tiles) for tiles in reversed(_N8_TILES_OF_CTA)]
        return first_enough(tried, lambda one: one.n8_tiles <= wanted and one.stages >= 2)

    @classmethod
    def shaped(
        cls,
        n: int,
        m: int,
        slices: int,
        n8_tiles: int,
        warp_pairs_m: int,
        ctas_per_sm: int,
        layout: TileLayout = TILES_16BIT,
    ) -> MmaSpSchedule:
        """The schedule in clusters of a shape, with as many stages as shared memory has room for."""
        token_blocks = -(-n // (8 * n8_tiles))
        clusters = -(-m // (TILE_M * warp_pairs_m)) * token_blocks
        blocks = clusters * (slices * warp_pairs_m // WARP_PAIRS)
        one = cls(slices, n8_tiles, warp_pairs_m, ctas_per_sm, 0, token_blocks, blocks, layout.tile_bytes)
        return one._replace(stages=min(8, SHARED_BYTES[ctas_per_sm] // one.stage_bytes))

    @property
    def work_tiles(self) -> int:
        """Tiles of Y, each of one cluster."""
        return self.blocks // (self.split_k * self.warp_pairs_m // WARP_PAIRS)

    @property
    def stage_bytes(self) -> int:
        sources = WARP_PAIRS // self.warp_pairs_m * 8 * self.n8_tiles * 2 * ROW_BYTES
        return WARP_PAIRS * self.tile_bytes + sources


def split_k_of(m: int) -> int:
    """Split-K: 8 where 4 would leave half of an H200 without a CTA, else 4.

    It is a function of the shape alone: another number of SMs must not mean other bits.
    """
    return 8 if 2 * -(-m // TILE_M) <= REFERENCE_SMS else 4


def _shapes_of(slices: int, layout: TileLayout = TILES_16BIT) -> dict[int, tuple[tuple[int, int], ...]]:
    """The compiled shapes: n8 tiles of a CTA -> (warp pairs along M, CTAs per SM)."""
    if layout.itemsize == 1:  # tensor cores of these devices multiply fp8 as f16, which takes many registers
        return {1: ((1, 1),)}
    few = {1: ((1, 1), (1, 2)), 2: ((1, 1), (1, 2)), 4: ((1, 1), (2, 2))}
    return {**few, 8: ((1, 1),)} if slices == 8 else {**few, 8: ((2, 1), (4, 2)), 16: ((2, 1),)}


def candidates(desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
    """The schedules with the default's split-K, so with the same bits, and tiles of at most twice n tokens.

    There are none without clusters, where a problem has one schedule.
    """
    if not can_reduce_in_cluster(device):
        return []
    layout = layout_of(desc.element)
    default = MmaSpSchedule.in_clusters(desc.n, desc.m, device.multiprocessors, layout=layout)
    found = []
    for n8_tiles, shapes in _shapes_of(default.split_k, layout).items():
        for warp_pairs_m, per_sm in shapes:
            shape = (n8_tiles, warp_pairs_m, per_sm)
            if 4 * n8_tiles < max(desc.n, 8) and shape != default[1:4]:
                found.append(dict(zip(MmaSpSchedule._fields[1:4], shape, strict=True)))
    return found


def can_reduce_in_cluster(device: DeviceProperties) -> bool:
    """Whether CTAs reduce their sums in clusters."""
    return _WITH_CLUSTERS[0] <= device.compute_capability < _WITH_CLUSTERS[1]
