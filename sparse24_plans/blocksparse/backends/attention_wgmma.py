"""Launches ``blocksparse/attention_wgmma.cu``: attention over kept blocks, fused."""

from __future__ import annotations

import math

from ...device.jit.launcher import fill, load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, align_up, launch_in_order, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...plan.schedule_choice import SHARED_BYTES
from ..attention import (
    BOX,
    HEADS,
    MAX_STAGES,
    RASTER_AND_DROPOUT,
    SIZES,
    THREADS,
    AttentionTables,
    Walk,
    pipeline_groups,
    problem_defines,
    row_bytes,
)
from ..descriptor import BlockSparseAttentionDescriptor
from ..limits import ATTENTION_COUNTER_BYTES

_SOURCE = "blocksparse/attention_wgmma.cu"
_BARRIER_BYTES = 256
"""Bytes of a pipeline group's barriers and description of a work tile."""
_TILES = (128, 64)
"""Numbers of keys of a pipeline stage, in the order in which they are tried."""
_MAX_ACCUMULATORS, _MAX_WITH_DROPOUT = 192, 176
"""Most registers of a thread for results, scores and probabilities, and beside dropout's words."""


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
    heads = HEADS
    heads_per_kv, queries, keys = SIZES.values()
    matrix_tiles = field("u32", "Number of work tiles of a matrix: its block rows.")
    raster_matrices, seed_offset, drop_below, keep_scale = RASTER_AND_DROPOUT.values()


class Kernel(BaseKernel[BlockSparseAttentionDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._walk = Walk(desc, columns=False, groups=pipeline_groups(desc))
        self._ctas = self._walk.ctas(device)
        self.launches, self.workspace_size = 2, ATTENTION_COUNTER_BYTES
        self.workspace_alignment = ATTENTION_COUNTER_BYTES
        tile = _tile(desc)
        stages = pipeline_groups(desc) * _stages(desc, tile)
        self.details = self._walk.details(device, f"{stages} stages of {tile} keys")
        self._function = load(
            _SOURCE,
            "attention_wgmma",
            THREADS,
            device,
            defines(desc),
            shared_bytes=_fixed_bytes(desc) + stages * tile * row_bytes(desc),
        )
        self._parameters = AttentionWgmmaParams(
            scale=abs(desc.scale) * math.log2(math.e), **self._walk.numbers()
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc = self.descriptor
        if self._ctas == 0:
            return nothing
        parameters = self._parameters.with_values(o=views["o"].address, lse=views["lse"].address)
        keys = min(desc.layout.block, _tile(desc))
        self._walk.fill(parameters, views, {"q": BOX, "k": keys, "v": keys}, workspace)
        kernel = self._function.bind(self._ctas, parameters)
        return launch_in_order(fill(workspace, 0, ATTENTION_COUNTER_BYTES), kernel)


def _tile(desc: BlockSparseAttentionDescriptor) -> int:
    """Keys of a pipeline stage: the first whose accumulators and stages fit."""
    most = (_MAX_WITH_DROPOUT if desc.dropout else _MAX_ACCUMULATORS) - align_up(desc.head_size, 32) // 2
    return next(tile for tile in _TILES if 3 * tile // 4 <= most and _stages(desc, tile) >= 2)


def _fixed_bytes(desc: BlockSparseAttentionDescriptor) -> int:
    """Shared memory apart from stages: Q of both warpgroups, barriers."""
    return 2 * BOX * row_bytes(desc) + pipeline_groups(desc) * _BARRIER_BYTES


def _stages(desc: BlockSparseAttentionDescriptor, tile: int) -> int:
    """Pipeline stages of a pipeline group."""
    space = (SHARED_BYTES[1] - _fixed_bytes(desc)) // pipeline_groups(desc)
    return min(space // (tile * row_bytes(desc)), MAX_STAGES)


def defines(desc: BlockSparseAttentionDescriptor) -> dict[str, int]:
    """Macros of the kernel for one problem type."""
    tile = _tile(desc)
    return {
        **problem_defines(desc),
        "SIGN": -1 if desc.scale < 0 else 1,
        "PING_PONG": int(pipeline_groups(desc) == 1),
        "TILE": tile,
        "PIPELINE_STAGES": _stages(desc, tile),
    }
