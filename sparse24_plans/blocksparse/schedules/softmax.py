"""How ``blocksparse/softmax.cu`` cuts a problem: teams of warps, and what each holds of a row."""

from __future__ import annotations

from typing import NamedTuple

from ...plan.schedule_choice import first_enough
from ...vocab import BlockSparsePass, DeviceProperties
from ..descriptor import BlockSparseSoftmaxDescriptor

_LANES, _VECTOR_BYTES = 32, 16
_REGISTERS, _OF_THREAD = 1 << 16, 128
"""Registers of an SM, and the most that a thread may have."""
_TEAMS = (1, 2, 3, 4, 5, 8, 16)
"""Warps of a team; with other numbers fewer fit on an SM."""
_MIN_WARPS = 4
"""Fewest warps of a CTA."""
_CHUNKS, _FEWER_CHUNKS, _CHUNKS_BESIDE_MASKS = 8, 5, 4
"""Vectors that a thread's registers suffice for: in general, for blocks of 16 or Blackwell, with masks."""
_BLACKWELL = (10, 0)
_TEAM_BYTES = 512
"""Contiguous bytes of a block whose rows a team has."""


class SoftmaxSchedule(NamedTuple):
    """The constants that the kernel is compiled with beyond the problem."""

    warps: int
    """Warps of a team, which has some rows of a block row."""
    teams: int
    """Teams of a CTA."""
    chunks: int
    """Vectors of 16 bytes that a thread holds, each from another block."""

    @classmethod
    def of(cls, desc: BlockSparseSoftmaxDescriptor, device: DeviceProperties) -> SoftmaxSchedule:
        """Registers for as many blocks as a row has on average; the rest of longer rows is read twice."""
        masks = desc.rpe or desc.causal or desc.key_padding_mask != "none" or desc.attn_mask != "none"
        fewer = device.compute_capability >= _BLACKWELL or desc.layout.block == 16
        chunks = _FEWER_CHUNKS if fewer else _CHUNKS
        if masks:
            chunks = _CHUNKS_BESIDE_MASKS
        mean = desc.layout.blocks / max(desc.layout.heads * desc.layout.block_rows, 1)
        warps = first_enough(_TEAMS, lambda warps: warps * chunks >= mean)
        return cls(warps, max(_MIN_WARPS // warps, 1), chunks)

    @property
    def threads(self) -> int:
        return _LANES * self.warps * self.teams

    @property
    def ctas_per_sm(self) -> int:
        return _REGISTERS // (_OF_THREAD * self.threads)

    def shared_bytes(self, desc: BlockSparseSoftmaxDescriptor) -> int:
        """Shared memory of a CTA, into which ``forward`` loads ahead of what it works on."""
        copies = desc.op is BlockSparsePass.FORWARD
        return self.threads * self.chunks * _VECTOR_BYTES if copies else 0

    def ctas(self, desc: BlockSparseSoftmaxDescriptor, multiprocessors: int) -> int:
        """CTAs of the launch, which are persistent for ``forward``."""
        wanted = -(-softmax_teams(desc) // self.teams)
        if desc.op is BlockSparsePass.FORWARD:
            return min(wanted, multiprocessors * self.ctas_per_sm)
        return wanted


def softmax_teams(desc: BlockSparseSoftmaxDescriptor) -> int:
    """Teams of warps of the launch."""
    one = desc.layout
    rows = _TEAM_BYTES // (one.block * desc.element.itemsize)
    return desc.batch * one.heads * one.rows // rows
