"""Launches ``blocksparse/attention_wgmma.cu``: attention over kept blocks, fused."""

from __future__ import annotations

import math

from ...device.jit.launcher import fill, load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, launch_in_order, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ..attention import (
    BOX,
    MAX_STAGES,
    THREADS,
    AttentionTables,
    Walk,
    pipeline_groups,
    problem_defines,
)
from ..descriptor import BlockSparseAttentionDescriptor
from ..limits import COUNTER_BYTES
from ..schedules.blocks_wgmma import SHARED_BYTES

_SOURCE = "blocksparse/attention_wgmma.cu"
_BARRIER_BYTES = 256
"""Bytes of a pipeline group's barriers and description of a work tile."""
_TILE = 128
"""Keys of a pipeline stage."""


@kernel_params("blocksparse/params/attention_wgmma.cuh")
class AttentionWgmmaParams(KernelParams):
    """Parameters of ``blocksparse/attention_wgmma.cu``."""

    q_map = field("TensorMap", "Q [Z * H, queries, head_size] in boxes of 64 rows x 128 bytes.")
    k_map = field("TensorMap", "K [matrices, keys, head_size] in boxes of a block's rows x 128 bytes.")
    v_map = field("TensorMap", "V [matrices, keys, head_size] in boxes of a block's rows x 128 bytes.")
    o = field("void*", "Result [Z * H, queries, head_size].")
    lse = field("float*", "Logarithm of each row's sum of exponentials: [Z * H, queries].")
    tables = field(AttentionTables, "Tables of block rows.")
    scale = field("float", "|scale| * log2(e).")
    matrices = field("u32", "Number of matrices Q: Z * H.")
    heads = field("u32", "Number of heads of Q, H.")
    heads_per_kv = field("u32", "Number of heads of Q that share one head of K and V.")
    queries = field("u32", "Number of rows of Q in a head.")
    keys = field("u32", "Number of rows of K in a head.")
    matrix_tiles = field("u32", "Number of work tiles of a matrix: its block rows.")
    raster_matrices = field("u32", "Number of matrices whose work tiles are interleaved, for L2.")


class Kernel(BaseKernel[BlockSparseAttentionDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._walk = Walk(desc, columns=False)
        self._blocks = self._walk.blocks(device)
        self.launches, self.workspace_size, self.workspace_alignment = 2, COUNTER_BYTES, COUNTER_BYTES
        stages = pipeline_groups(desc) * _stages(desc)
        self.details = self._walk.details(device, f"{stages} stages of {_TILE} keys")
        self._function = load(
            _SOURCE,
            "attention_wgmma",
            THREADS,
            device,
            defines(desc),
            shared_bytes=_fixed_bytes(desc) + stages * _tile_bytes(desc),
        )
        self._parameters = AttentionWgmmaParams(
            scale=abs(desc.scale) * math.log2(math.e), **self._walk.sizes()
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc = self.descriptor
        if self._blocks == 0:
            return nothing
        parameters = AttentionWgmmaParams.from_buffer_copy(self._parameters)
        parameters.o, parameters.lse = views["o"].address, views["lse"].address
        block = desc.layout.block
        self._walk.fill(parameters, views, {"q": BOX, "k": block, "v": block}, workspace)
        kernel = self._function.bind(self._blocks, parameters)
        return launch_in_order(fill(workspace, 0, COUNTER_BYTES), kernel)


def _tile_bytes(desc: BlockSparseAttentionDescriptor) -> int:
    return _TILE * desc.head_size * desc.element.itemsize


def _fixed_bytes(desc: BlockSparseAttentionDescriptor) -> int:
    """Shared memory apart from stages: Q of both warpgroups, barriers."""
    return _tile_bytes(desc) + pipeline_groups(desc) * _BARRIER_BYTES


def _stages(desc: BlockSparseAttentionDescriptor) -> int:
    """Pipeline stages of a pipeline group."""
    space = (SHARED_BYTES - _fixed_bytes(desc)) // pipeline_groups(desc)
    return min(space // _tile_bytes(desc), MAX_STAGES)


def defines(desc: BlockSparseAttentionDescriptor) -> dict[str, int]:
    """Macros of the kernel for one problem type."""
    return {
        **problem_defines(desc),
        "SIGN": -1 if desc.scale < 0 else 1,
        "PING_PONG": int(desc.layout.block == _TILE),
        "PIPELINE_STAGES": _stages(desc),
    }
