"""Launches ``blocksparse/attention_backward_wgmma.cu``: the gradients of attention over kept blocks, fused.

One launch prepares two numbers for each row of Q. Then one launch over block columns computes dK and dV, and
one over block rows dQ.
"""

from __future__ import annotations

import math

from ...device.jit.launcher import fill, load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, align_up, launch_in_order, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import DeviceProperties
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
from ..limits import COUNTER_BYTES, PASSES, backward_workspace, rows_of_queries
from ..schedules.blocks_wgmma import SHARED_BYTES

_SOURCE = "blocksparse/attention_backward_wgmma.cu"
_ROW_THREADS, _ROW_ELEMENTS = 256, 8
"""Threads of a CTA of the first launch; elements of a row that each of them reads."""
_ALIGNMENT = 1024
"""Bytes that a pipeline group's shared memory is aligned to."""
_STAGE_BYTES, _GROUP_BYTES = 20, 96
"""Bytes of a stage's barriers and first row; bytes of a pipeline group's two barriers and four descriptions.
"""


@kernel_params("blocksparse/params/attention_backward_wgmma.cuh")
class AttentionBackwardWgmmaParams(KernelParams):
    """Parameters of ``blocksparse/attention_backward_wgmma.cu``."""

    stationary_maps = field("TensorMap", "K and V, or Q and dO, in boxes of 64 rows x 128 bytes.", 2)
    streamed_maps = field("TensorMap", "Q and dO, or K and V, in boxes of a tile's rows x 128 bytes.", 2)
    gradients = field("void*", "dK and dV, or dQ alone: [.., rows, head_size].", 2)
    o = field("const void*", "Result of the forward pass: [Z * H, queries, head_size].")
    d_o = field("const void*", "Gradient of the result: [Z * H, queries, head_size].")
    lse = field("const float*", "Logarithm of each row's sum of exponentials: [Z * H, queries].")
    bases = field("float*", "lse * log2(e), and infinity where a row sees no key: [Z * H, queries].")
    deltas = field("float*", "Sum of o * d_o over each row: [Z * H, queries].")
    tables = field(AttentionTables, "Tables of block columns for dK and dV, of block rows for dQ.")
    scale = field("float", "Factor of Q K^T.")
    exponent_scale = field("float", "scale * log2(e).")
    matrices = field("u32", "Number of stationary matrices: Z times the heads of K, or of Q.")
    heads = field("u32", "Number of heads of Q, H.")
    kv_heads = field("u32", "Number of heads of K and V.")
    heads_per_kv = field("u32", "Number of heads of Q that share one head of K and V.")
    queries = field("u32", "Number of rows of Q in a head.")
    keys = field("u32", "Number of rows of K in a head.")
    matrix_tiles = field("u32", "Number of work tiles of a matrix: its block columns, or block rows.")
    raster_matrices = field("u32", "Number of matrices whose work tiles are interleaved, for L2.")


class _Pass:
    """One walk over the kept blocks: with ``keys`` over columns, for dK and dV; else over rows, for dQ."""

    def __init__(self, desc: BlockSparseAttentionDescriptor, device: DeviceProperties, *, keys: bool) -> None:
        self._walk, self._tile = Walk(desc, columns=keys), _tile(desc, keys=keys)
        stages = _stages(desc, keys=keys)
        self.blocks = self._walk.blocks(device)
        self.details = self._walk.details(
            device, f"{pipeline_groups(desc) * stages} stages of {self._tile} rows"
        )
        self.function = load(
            _SOURCE,
            "attention_backward_wgmma",
            THREADS,
            device,
            defines(desc, keys=keys),
            shared_bytes=pipeline_groups(desc) * _pipeline_bytes(desc, stages, keys=keys),
        )
        self._parameters = AttentionBackwardWgmmaParams(
            scale=desc.scale,
            exponent_scale=desc.scale * math.log2(math.e),
            kv_heads=desc.kv_heads,
            **self._walk.sizes(),
        )

    def parameters(self, views: Views, workspace: int) -> AttentionBackwardWgmmaParams:
        found = AttentionBackwardWgmmaParams.from_buffer_copy(self._parameters)
        keys, rows = self._walk.columns, rows_of_queries(self._walk.problem)
        found.o, found.d_o, found.lse = (views[name].address for name in ("o", "do", "lse"))
        found.bases, found.deltas = workspace, workspace + 4 * rows
        for at, name in enumerate(("dk", "dv") if keys else ("dq",)):
            found.gradients[at] = views[name].address
        stationary, streamed = (("k", "v"), ("q", "do")) if keys else (("q", "do"), ("k", "v"))
        boxes = dict.fromkeys(stationary, BOX) | dict.fromkeys(streamed, self._tile)
        self._walk.fill(found, views, boxes, workspace + 8 * rows + COUNTER_BYTES * keys)
        return found


class Kernel(BaseKernel[BlockSparseAttentionDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self.workspace_size, self.workspace_alignment = backward_workspace(desc), 16
        self.launches = 2 + PASSES
        self._passes = [_Pass(desc, device, keys=keys) for keys in (True, False)]
        self.details = "; ".join(one.details for one in self._passes)
        self._row_blocks = rows_of_queries(desc) * desc.head_size // (_ROW_ELEMENTS * _ROW_THREADS)
        self._row_function = load(
            _SOURCE,
            "attention_backward_rows",
            _ROW_THREADS,
            device,
            defines(desc, keys=True),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        bound: list[Launch] = []
        for one in self._passes:
            if not one.blocks:
                continue
            parameters = one.parameters(views, workspace)
            if not bound and self._row_blocks:
                bound.append(self._row_function.bind(self._row_blocks, parameters))
            bound.append(one.function.bind(one.blocks, parameters))
        if not bound:
            return nothing
        counters = workspace + 8 * rows_of_queries(self.descriptor)
        return launch_in_order(fill(counters, 0, PASSES * COUNTER_BYTES), *bound)


def _tile(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> int:
    """Rows of a streamed tile. For dK and dV the accumulators of 128 columns leave registers for 64."""
    return 64 if keys else desc.layout.block


def _pipeline_bytes(desc: BlockSparseAttentionDescriptor, stages: int, *, keys: bool) -> int:
    """Shared memory of a pipeline group: stationary operands, stages, two numbers for each streamed row of Q,
    barriers and descriptions."""
    row = desc.head_size * desc.element.itemsize
    stationary, stage = 2 * desc.layout.block * row, 2 * _tile(desc, keys=keys) * (row + 4 * keys)
    return align_up(stationary + stages * (stage + _STAGE_BYTES) + _GROUP_BYTES, _ALIGNMENT)


def _stages(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> int:
    """Pipeline stages of a pipeline group."""
    space = SHARED_BYTES // pipeline_groups(desc)
    return max(n for n in range(MAX_STAGES + 1) if _pipeline_bytes(desc, n, keys=keys) <= space)


def defines(desc: BlockSparseAttentionDescriptor, *, keys: bool) -> dict[str, int]:
    """Macros of the kernel for one problem type."""
    return {
        **problem_defines(desc),
        "STATIONARY_KV": int(keys),
        "TILE": _tile(desc, keys=keys),
        "PIPELINE_STAGES": _stages(desc, keys=keys),
    }
