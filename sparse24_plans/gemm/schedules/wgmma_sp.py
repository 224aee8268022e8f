"""How ``wgmma_sp`` cuts a problem into blocks: what a block holds, and the schedules that are tried."""

from __future__ import annotations

from typing import NamedTuple

from ...vocab import ElementKind
from ...weights.layouts import TILE_M, TileLayout
from ..descriptor import GemmSparse24Descriptor
from ..table import GemmRow
from .mma_sp import slices_of

_SHARED_BYTES = {1: 227 << 10, 2: 113 << 10, 3: 75 << 10, 4: 56 << 10, 5: 0}
"""The most a block can have, by how many share a multiprocessor."""
_STEP_BYTES, _BUFFERS = 8192, 2
"""Of a warpgroup's results on their way out: what is staged at a time, and buffers for it."""
_BARRIER_BYTES = 512

FEW = 64
"""Up to so many tokens one block takes them all, and memory sets the pace."""


class Schedule(NamedTuple):
    """How a problem is cut into blocks. Of a row of the table, ``slices * parts`` alone fixes the bits."""

    warpgroups: int
    row_blocks: int
    tokens: int
    share: int = 1
    slices: int = 1
    blocks_per_sm: int = 1
    parts: int = 1

    @property
    def rows(self) -> int:
        """Of W that a block multiplies."""
        return TILE_M * self.warpgroups * self.row_blocks

    @property
    def cluster(self) -> int:
        return self.share * self.slices

    def step_tokens(self, out_bytes: int) -> int:
        """Tokens that a warpgroup stages at a time on their way out."""
        return min(self.tokens, _STEP_BYTES // (TILE_M * out_bytes))

    def _staging_bytes(self, out_bytes: int) -> int:
        step_bytes = self.step_tokens(out_bytes) * TILE_M * out_bytes
        return self.warpgroups * _BUFFERS * step_bytes if self.slices == 1 else 0

    def _stage_bytes(self, layout: TileLayout) -> tuple[int, int]:
        return self.rows // TILE_M * layout.tile_bytes, 128 * self.tokens

    def stages(self, layout: TileLayout, out_bytes: int) -> tuple[int, int]:
        """Of W and of X: as many as fit. X comes in steps half as long."""
        weight, source = self._stage_bytes(layout)
        room = _SHARED_BYTES[self.blocks_per_sm] - _BARRIER_BYTES - self._staging_bytes(out_bytes)
        fitting = [(w, x) for w in range(2, 9) for x in range(2, 17) if w * weight + x * source <= room]
        return max(fitting, key=lambda stages: (min(2 * stages[0] - 1, stages[1]), sum(stages)))

    def shared_bytes(self, layout: TileLayout, out_bytes: int) -> int:
        """At least so much that no more blocks than ``blocks_per_sm`` share a multiprocessor.

        Those of the next launch start early: were there room, they would crowd on the multiprocessors that
        are done first, and leave others idle.
        """
        (weights, sources), (weight, source) = self.stages(layout, out_bytes), self._stage_bytes(layout)
        used = weights * weight + sources * source + self._staging_bytes(out_bytes) + _BARRIER_BYTES
        return max(used, _SHARED_BYTES[self.blocks_per_sm + 1] + 1)

    def items(self, n: int, m: int) -> int:
        """Pieces of work, one a cluster."""
        return -(-m // (self.rows * self.share)) * -(-n // self.tokens)

    def resident_clusters(self, multiprocessors: int) -> int:
        """Clusters that run at once. Those beyond 2 don't fill the groups of multiprocessors they lie in."""
        usable = multiprocessors if self.cluster <= 2 else multiprocessors * 10 // 11
        return max(1, usable * self.blocks_per_sm // self.cluster)


# (warpgroups, row tiles of one, slices, blocks per multiprocessor)
_OF_FEW = (
    (1, 1, 1, 1),
    (1, 1, 2, 1),
    (2, 1, 1, 1),
    (2, 1, 2, 1),
    (3, 1, 2, 1),
)
_UP_TO_32, _ABOVE_32 = ((1, 1, 3, 4),), ((2, 2, 1, 1),)
"""And, by n."""
_OF_SOME = (
    Schedule(1, 1, 128),
    Schedule(2, 1, 128),
    Schedule(3, 1, 128),
    Schedule(2, 2, 128),
    Schedule(2, 1, 256, share=2),
    Schedule(1, 1, 128, slices=2),
    Schedule(2, 1, 128, slices=2),
    Schedule(3, 1, 128, slices=2),
    Schedule(2, 2, 128, slices=2),
    Schedule(2, 1, 256, slices=2),
)
_OF_MANY = (Schedule(2, 1, 256, share=2), Schedule(2, 1, 128, share=2), Schedule(3, 1, 128))
_MANY = 1024
"""Tokens from which these are tried."""


def _fewest_tokens(n: int) -> int:
    """Of a block that takes all of n <= 64 tokens."""
    return next(tokens for tokens in (8, 16, 32, 64) if n <= tokens)


def schedules_for(n: int) -> tuple[Schedule, ...]:
    """The schedules that are tried for n tokens."""
    if n <= FEW:
        tokens = _fewest_tokens(n)
        few = _OF_FEW + (_UP_TO_32 if n <= 32 else _ABOVE_32)
        return tuple(Schedule(w, r, tokens, 1, slices, per_sm) for w, r, slices, per_sm in few)
    return _OF_SOME if n < _MANY else _OF_MANY


def one_block_schedules(n: int, parts: int) -> tuple[Schedule, ...]:
    """Those that sum all of K in one block, in as many parts as asked: their bits don't depend on n."""
    if n <= FEW:
        return tuple(Schedule(w, 1, _fewest_tokens(n), parts=parts) for w in (1, 2))
    return tuple(Schedule(w, 1, 128, 2 if w == 2 and n >= _MANY else 1, parts=parts) for w in (1, 2))


def allowed_schedules(desc: GemmSparse24Descriptor, row: GemmRow) -> tuple[Schedule, ...]:
    """The schedules with which the row keeps what it promises."""
    if row.promoted:
        return one_block_schedules(desc.n, 1)
    if row.guarantee(desc).batch_invariant and desc.element is not ElementKind.S8:
        return one_block_schedules(desc.n, slices_of(desc.m))  # as many as mma_sp has slices
    return schedules_for(desc.n)


def candidates(desc: GemmSparse24Descriptor) -> list[dict[str, int]]:
    """What the model ranks, for every row; a row refuses those with which it wouldn't keep its promises."""
    found = dict.fromkeys(
        schedules_for(desc.n)
        + one_block_schedules(desc.n, slices_of(desc.m))
        + one_block_schedules(desc.n, 1)
    )
    return [schedule._asdict() for schedule in found]
