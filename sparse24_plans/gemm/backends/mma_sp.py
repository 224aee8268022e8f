"""Launches ``gemm/mma_sp.cu``: packed weights, sparse tensor cores, one kernel, no workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...device.jit.codes import type_defines
from ...device.jit.compiler import digest
from ...device.jit.launcher import load
from ...vocab import DeviceProperties, PlanPreference
from ...weights.packing import TILE_M, TILES_16BIT
from ..plan import BackendKernel, GemmSparse24Descriptor, Operands
from ..table import KernelSpec

_SOURCE = "gemm/mma_sp.cu"
_THREADS = 256
_STREAMS = 4  # tiles of W that a block works on side by side
_SHARED_BYTES = {1: 227 << 10, 2: 113 << 10}  # of a block, by how many share a multiprocessor
_FOLDING = ((9, 0), (12, 0))
"""Compute capabilities, from and below, whose blocks can fold through clusters and have that much memory."""
_MIDDLE_BYTES = {(8, 0): 163 << 10, (8, 7): 163 << 10}
_LEAST_BYTES = 99 << 10
"""Shared memory of a block elsewhere."""


class _Parameters(ctypes.Structure):
    """MmaSpParams of the kernel."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("row_tiles", ctypes.c_int64),
        ("k_tiles", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("token_blocks", ctypes.c_uint32),
    ]


class Cut(NamedTuple):
    """How a problem is cut into blocks. ``slices`` alone fixes the bits."""

    slices: int
    token_tiles: int
    block_tiles: int
    blocks_per_sm: int
    stages: int
    token_blocks: int
    blocks: int

    @property
    def stage_bytes(self) -> int:
        sources = _STREAMS // self.block_tiles * 8 * self.token_tiles * TILES_16BIT.tile_k * 2
        return _STREAMS * TILES_16BIT.tile_bytes + sources


def slices_of(m: int, multiprocessors: int) -> int:
    """Slices of K: 8 where four a row tile would leave half of the device without a block, else 4."""
    return 8 if 2 * -(-m // TILE_M) <= multiprocessors else 4


def cut_of(n: int, m: int, multiprocessors: int) -> Cut:
    """The cut for n tokens and m out features, as measured on an H200.

    The first shape of the list that runs in one wave, with its multiprocessors to itself and so with the
    deepest pipeline; else the last, two blocks sharing a multiprocessor where they fit.
    """
    shapes = _shapes_of(slices_of(m, multiprocessors))
    token_tiles = next((tiles for tiles in (1, 2, 4, 8) if 8 * tiles >= n), max(shapes))
    for block_tiles, per_sm in shapes[token_tiles]:
        cut = _cut(n, m, multiprocessors, token_tiles, block_tiles, per_sm)
        if per_sm == 1 and cut.blocks <= multiprocessors:
            break
    return cut


def _shapes_of(slices: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """Token tiles of a block -> (block tiles, blocks per multiprocessor) that there are."""
    few = {1: ((1, 1), (1, 2)), 2: ((1, 1), (1, 2)), 4: ((1, 1), (2, 2))}
    return {**few, 8: ((1, 1),)} if slices == 8 else {**few, 8: ((2, 1), (4, 2)), 16: ((2, 1),)}


def _cut(n: int, m: int, multiprocessors: int, token_tiles: int, block_tiles: int, blocks_per_sm: int) -> Cut:
    slices = slices_of(m, multiprocessors)
    token_blocks = -(-n // (8 * token_tiles))
    clusters = -(-m // (TILE_M * block_tiles)) * token_blocks
    blocks = clusters * (slices * block_tiles // _STREAMS)
    cut = Cut(slices, token_tiles, block_tiles, blocks_per_sm, 0, token_blocks, blocks)
    return cut._replace(stages=min(8, _SHARED_BYTES[blocks_per_sm] // cut.stage_bytes))


def candidates(desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
    """The cuts of the default's slices, so of the same bits, with blocks of at most twice n tokens.

    None where blocks don't fold through clusters: there is one cut there.
    """
    if not _FOLDING[0] <= device.compute_capability < _FOLDING[1]:
        return []
    default = cut_of(desc.n, desc.m, device.multiprocessors)
    found = []
    for token_tiles, shapes in _shapes_of(default.slices).items():
        for block_tiles, per_sm in shapes:
            shape = (token_tiles, block_tiles, per_sm)
            if 4 * token_tiles < max(desc.n, 8) and shape != default[1:4]:
                found.append(dict(zip(Cut._fields[1:4], shape, strict=True)))
    return found


def tuning_version(device: DeviceProperties) -> str:
    return f"sources {digest(_SOURCE)}"


def cut_in_block(n: int, m: int, compute_capability: tuple[int, int]) -> Cut:
    """The cut where blocks can't fold through clusters: a row tile's slices all in one block.

    As many tokens a block as leave two stages.
    """
    room = _MIDDLE_BYTES.get(compute_capability, _LEAST_BYTES)
    wanted = next((tiles for tiles in (1, 2, 4) if 8 * tiles >= n), 4)
    for token_tiles in (4, 2, 1):
        token_blocks = -(-n // (8 * token_tiles))
        cut = Cut(_STREAMS, token_tiles, 1, 1, 0, token_blocks, -(-m // TILE_M) * token_blocks)
        stages = min(8, room // cut.stage_bytes)
        if token_tiles <= wanted and stages >= 2:
            break
    return cut._replace(stages=stages)


class Kernel(BackendKernel):
    source_alignment = 16
    source_row_alignment = 16

    def __init__(
        self,
        desc: GemmSparse24Descriptor,
        device: DeviceProperties,
        spec: KernelSpec,
        preference: PlanPreference,
        configuration: Mapping[str, int] | None = None,
    ) -> None:
        self._desc = desc
        capability = device.compute_capability
        self._folding = _FOLDING[0] <= capability < _FOLDING[1]
        if configuration:
            cut = _cut(desc.n, desc.m, device.multiprocessors, **configuration)
        elif self._folding:
            cut = cut_of(desc.n, desc.m, device.multiprocessors)
        else:
            cut = cut_in_block(desc.n, desc.m, capability)
        self._cut = cut
        self.details = (
            f"{cut.blocks} blocks of {TILE_M * cut.block_tiles} rows x {8 * cut.token_tiles} tokens, "
            f"{cut.slices} slices of K, {cut.stages} stages"
        )
        self._function = load(
            _SOURCE,
            "gemm_mma_sp",
            _THREADS,
            device,
            defines(desc, cut),
            _Parameters,
            shared_bytes=cut.stages * cut.stage_bytes,
        )

    def prepare(self, operands: Operands, workspace: int) -> Callable[[int], None]:
        desc = self._desc
        return self._function.bind(
            self._cut.blocks,
            _Parameters(
                operands.weight.buffers[0].address,
                operands.source.address,
                0 if operands.bias is None else operands.bias.address,
                operands.result.address,
                desc.n,
                desc.m,
                desc.k,
                operands.source_stride,
                operands.result_stride,
                -(-desc.m // TILE_M),
                -(-desc.k // TILES_16BIT.tile_k),
                desc.alpha,
                self._cut.token_blocks,
            ),
            overlapping=self._folding,
        )


def defines(desc: GemmSparse24Descriptor, cut: Cut) -> dict[str, int]:
    """Macros of the kernel for one problem type and cut."""
    return {
        **type_defines(desc),
        "SLICES": cut.slices,
        "TOKEN_TILES": cut.token_tiles,
        "BLOCK_TILES": cut.block_tiles,
        "BLOCKS_PER_SM": cut.blocks_per_sm,
        "STAGES": cut.stages,
    }
