"""How ``blocksparse/softmax.cu`` is cut for a problem: teams of warps, and what each holds of a row."""

from __future__ import annotations

from typing import NamedTuple

from ...vocab import BlockSparsePass, DeviceProperties
from ..descriptor import BlockSparseSoftmaxDescriptor
from ..limits import softmax_teams

_LANES, _VECTOR_BYTES = 32, 16
_REGISTERS, _OF_THREAD = 1 << 16, 128
"""Of a multiprocessor, and of a thread at most."""
_TEAMS = (1, 2, 3, 4, 5, 8, 16)
"""Warps: of other numbers fewer fit in a multiprocessor."""
_LEAST_WARPS = 4
"""Of a block of threads."""
_CHUNKS, _FEWER_CHUNKS, _CHUNKS_BESIDE_MASKS = 8, 5, 4
"""Those for which the registers suffice; fewer for blocks of 16 and on Blackwell."""
_BLACKWELL = (10, 0)


class SoftmaxSchedule(NamedTuple):
    """What the kernel is compiled with beyond the problem."""

    warps: int
    """Of a team, which has some rows of a line."""
    teams: int
    """Of a block of threads."""
    chunks: int
    """Vectors of 16 bytes that a thread holds, each of another block."""

    @property
    def threads(self) -> int:
        return _LANES * self.warps * self.teams

    @property
    def blocks_per_sm(self) -> int:
        return _REGISTERS // (_OF_THREAD * self.threads)

    def shared_bytes(self, desc: BlockSparseSoftmaxDescriptor) -> int:
        """Of a block: what ``forward`` copies there while it works on what it copied before."""
        copies = desc.op is BlockSparsePass.FORWARD
        return self.threads * self.chunks * _VECTOR_BYTES if copies else 0

    def blocks(self, desc: BlockSparseSoftmaxDescriptor, multiprocessors: int) -> int:
        """Of the launch. Those of ``forward`` stay, each for many rows."""
        wanted = -(-softmax_teams(desc) // self.teams)
        if desc.op is BlockSparsePass.FORWARD:
            return min(wanted, multiprocessors * self.blocks_per_sm)
        return wanted


def best_schedule(desc: BlockSparseSoftmaxDescriptor, device: DeviceProperties) -> SoftmaxSchedule:
    """With registers for as many blocks as rows have on average; of longer ones the rest is read twice."""
    masks = desc.rpe or desc.causal or desc.key_padding_mask != "none" or desc.attn_mask != "none"
    fewer = device.compute_capability >= _BLACKWELL or desc.layout.block == 16
    chunks = _FEWER_CHUNKS if fewer else _CHUNKS
    if masks:
        chunks = _CHUNKS_BESIDE_MASKS
    mean = desc.layout.blocks / max(desc.layout.heads * desc.layout.block_rows, 1)
    warps = next((warps for warps in _TEAMS if warps * chunks >= mean), _TEAMS[-1])
    return SoftmaxSchedule(warps, max(_LEAST_WARPS // warps, 1), chunks)
