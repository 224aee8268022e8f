"""Launches ``blocksparse/attention_backward_wgmma.cu``: the gradients of attention over kept blocks, fused.

One launch prepares two numbers for each row of Q. Then one launch over block columns computes dK and dV, for
large heads one each, and one over block rows dQ. Where the workspace has room for dS, the gradient of the
scores, the launch for dK stores it and that for dQ loads it; otherwise both compute it, with the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...device.jit.launcher import fill, load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, align_up, launch_in_order, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...plan.schedule_choice import SHARED_BYTES
from ...vocab import DeviceProperties
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
from ..limits import (
    ATTENTION_COUNTER_BYTES,
    MAX_PASSES,
    MIN_STREAMED_ROWS,
    backward_workspace,
    rows_of_queries,
    score_gradient_bytes,
)
from ..lookup_tables import addresses

_SOURCE = "blocksparse/attention_backward_wgmma.cu"
_ROW_THREADS, _ROW_ELEMENTS, _MIN_ROW_LANES = 256, 8, 4
"""Threads of a CTA of the first launch; elements of a row that each of them reads; least threads of a row."""
_ALIGNMENT = 1024
"""Bytes that a pipeline group's shared memory is aligned to."""
_STAGE_WORDS, _GROUP_BYTES = 5, 112
"""Words of a stage's barriers and first row, with dropout of its matrix and where dS is stored of its block;
bytes of a pipeline group's two barriers and four descriptions.
"""
_MAX_STORED_BYTES = 4 << 30
"""Most bytes of dS that are stored if ``max_workspace_bytes`` does not allow more."""
_MAX_TOGETHER = 128
"""Largest head whose dK and dV one launch computes."""


class Pass(NamedTuple):
    """The gradients that a launch over the kept blocks computes, and the operands that it reads."""

    code: int
    """The value of Gradients in ``attention_backward_wgmma/config.cuh``."""
    gradients: tuple[str, ...]
    stationary: tuple[str, ...]
    streamed: tuple[str, ...]
    stored: bool = False
    """Whether the launch stores dS, or loads it."""

    @property
    def keys(self) -> bool:
        """Whether work tiles are block columns."""
        return "k" in self.stationary


_Q = Pass(0, ("dq",), ("q", "do"), ("k", "v"))
_KV = Pass(1, ("dk", "dv"), ("k", "v"), ("q", "do"))
_K = Pass(2, ("dk",), ("k", "v"), ("q", "do"))
_V = Pass(3, ("dv",), ("k",), ("q", "do"))


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
    places = field("const int*", "Place in the values of each block, column by column.")
    score_gradients = field(
        "void*", "dS of each block, as the kernel stores it: [Z, blocks, block, block]; or null."
    )
    scale = field("float", "Factor of Q K^T.")
    exponent_scale = field("float", "scale * log2(e).")
    blocks = field("u32", "Number of kept blocks of all heads.")
    matrices = field("u32", "Number of stationary matrices: Z times the heads of K, or of Q.")
    heads = HEADS
    kv_heads = field("u32", "Number of heads of K and V.")
    heads_per_kv, queries, keys = SIZES.values()
    matrix_tiles = field("u32", "Number of work tiles of a matrix: its block columns, or block rows.")
    raster_matrices, seed_offset, drop_below, keep_scale = RASTER_AND_DROPOUT.values()


class _Launch:
    """A pass as it is launched; ``counter`` is its counter's number."""

    def __init__(
        self, desc: BlockSparseAttentionDescriptor, device: DeviceProperties, one: Pass, counter: int
    ) -> None:
        self._pass, self._counter = one, counter
        self._places_at = addresses(0, desc.layout)["column_order"]
        self._tiling = tiling = Tiling.of(desc, one)
        self._walk = Walk(desc, one.keys, tiling.groups)
        self.ctas = self._walk.ctas(device)
        self.details = self._walk.details(
            device, f"{tiling.groups * tiling.stages} stages of {tiling.rows} rows"
        )
        self.function = load(
            _SOURCE,
            "attention_backward_wgmma",
            THREADS,
            device,
            defines(desc, one),
            shared_bytes=tiling.groups * _pipeline_bytes(desc, one, tiling),
        )
        self._parameters = AttentionBackwardWgmmaParams(
            blocks=desc.layout.blocks,
            scale=desc.scale,
            exponent_scale=desc.scale * math.log2(math.e),
            kv_heads=desc.kv_heads,
            **self._walk.numbers(),
        )

    def parameters(self, views: Views, workspace: int) -> AttentionBackwardWgmmaParams:
        one, rows = self._pass, rows_of_queries(self._walk.problem)
        found = self._parameters.with_values(
            o=views["o"].address,
            d_o=views["do"].address,
            lse=views["lse"].address,
            bases=workspace,
            deltas=workspace + 4 * rows,
            score_gradients=workspace + _scores_at(self._walk.problem) if one.stored else 0,
            places=views["layout"].address + self._places_at,
        )
        for name in one.gradients:
            found.gradients[name == "dv"] = views[name].address
        boxes = dict.fromkeys(one.stationary, BOX)
        if len(boxes) == 1:  # the other map is not read
            boxes |= {"v": BOX}
        boxes |= dict.fromkeys(one.streamed, self._tiling.rows)
        self._walk.fill(found, views, boxes, workspace + 8 * rows + ATTENTION_COUNTER_BYTES * self._counter)
        return found


class Kernel(BaseKernel[BlockSparseAttentionDescriptor]):
    default_alignment = Alignment(16)
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self.workspace_size, self.workspace_alignment = backward_workspace(desc), 16
        size, most = score_gradient_bytes(desc), choice.preference.max_workspace_bytes
        stored = size <= _MAX_STORED_BYTES if most is None else _scores_at(desc) + size <= most
        if stored:
            self.workspace_size = _scores_at(desc) + size
        passes = passes_of(desc, stored=stored)
        self._passes = [_Launch(desc, device, one, counter) for counter, one in enumerate(passes)]
        self.launches = 2 + len(self._passes)
        scores = f"gradients of scores {'in' if stored else 'computed twice instead of in'} {size} bytes"
        self.details = "; ".join([*(one.details for one in self._passes), scores])
        self._row_blocks = rows_of_queries(desc) * _row_lanes(desc) // _ROW_THREADS
        self._row_function = load(
            _SOURCE,
            "attention_backward_rows",
            _ROW_THREADS,
            device,
            defines(desc, passes[0]),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        bound: list[Launch] = []
        for one in self._passes:
            if not one.ctas:
                continue
            parameters = one.parameters(views, workspace)
            if not bound and self._row_blocks:
                bound.append(self._row_function.bind(self._row_blocks, parameters))
            bound.append(one.function.bind(one.ctas, parameters))
        if not bound:
            return nothing
        counters = workspace + 8 * rows_of_queries(self.descriptor)
        return launch_in_order(fill(counters, 0, MAX_PASSES * ATTENTION_COUNTER_BYTES), *bound)


def passes_of(desc: BlockSparseAttentionDescriptor, *, stored: bool) -> tuple[Pass, ...]:
    """The launches over the kept blocks, in order. dV alone does without dS."""
    found = (_KV, _Q) if desc.head_size <= _MAX_TOGETHER else (_K, _V, _Q)
    return tuple(one._replace(stored=stored and one is not _V) for one in found)


def _scores_at(desc: BlockSparseAttentionDescriptor) -> int:
    """Offset of dS in the workspace."""
    return align_up(backward_workspace(desc))


def _row_lanes(desc: BlockSparseAttentionDescriptor) -> int:
    """Threads that read a row in the first launch: a power of 2."""
    chunks = -(-desc.head_size // _ROW_ELEMENTS)
    return max(_MIN_ROW_LANES, 1 << (chunks - 1).bit_length())


class Tiling(NamedTuple):
    """The tiling of a pass."""

    groups: int
    """Pipeline groups of a CTA."""
    rows: int
    """Rows of a streamed tile."""
    stages: int
    """Pipeline stages of a pipeline group."""

    @classmethod
    def of(cls, desc: BlockSparseAttentionDescriptor, one: Pass) -> Tiling:
        """The first of these tilings with which two stages fit in shared memory."""
        groups = pipeline_groups(desc)
        # Sums of both gradients, or of a large head, and dropout's words leave registers for 64 rows.
        few = len(one.gradients) > 1 or desc.dropout > 0 or desc.head_size > _MAX_TOGETHER
        most = 64 if few else desc.layout.block
        # One warpgroup alone has registers for 64 rows and the rest, but not for dropout's words beside them.
        tries = (
            (groups, most),
            (groups, MIN_STREAMED_ROWS),
            (1, MIN_STREAMED_ROWS if desc.dropout else 64),
        )
        tilings = (cls(*cut, n) for cut in tries for n in range(MAX_STAGES, 1, -1))
        return next(cut for cut in tilings if cut.groups * _pipeline_bytes(desc, one, cut) <= SHARED_BYTES[1])


def _pipeline_bytes(desc: BlockSparseAttentionDescriptor, one: Pass, tiling: Tiling) -> int:
    """Shared memory of a pipeline group: stationary operands, stages, two numbers for each streamed row of Q,
    barriers and descriptions. Stages of a stored dS have its rows beside those of K."""
    row, loads = row_bytes(desc), one.stored and not one.keys
    stationary = 0 if loads else len(one.stationary) * desc.layout.block * row
    tiles = row + desc.layout.block * desc.element.itemsize if loads else 2 * (row + 4 * one.keys)
    words = _STAGE_WORDS + (desc.dropout > 0) + (one.stored and one.keys)
    stage = tiling.rows * tiles + 4 * words
    return align_up(stationary + tiling.stages * stage + _GROUP_BYTES, _ALIGNMENT)


def defines(desc: BlockSparseAttentionDescriptor, one: Pass) -> dict[str, int]:
    """Macros of the kernel for one problem type."""
    groups, rows, stages = Tiling.of(desc, one)
    return {
        **problem_defines(desc),
        "GRADIENTS": one.code,
        "STORED": int(one.stored),
        "TILE": rows,
        "PIPELINE_GROUPS": groups,
        "PIPELINE_STAGES": stages,
    }
