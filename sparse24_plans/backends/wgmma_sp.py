"""Launches ``sm90a_gemm_wgmma_sp.cu``: packed weights, wgmma.sp fed by the copy engine, one kernel, no workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from .. import jit
from .._vendor import cuda_driver_abi
from ..errors import DriverError
from ..gemm import GemmSparse24Descriptor, Operands
from ..packing import TILE_BYTES, TILE_K, TILE_M
from ..registry import KernelSpec
from ..vocab import DeviceProperties, PlanPreference

_SHARED_BYTES = {1: 227 << 10, 2: 113 << 10}  # of a block, by how many share a multiprocessor
_STAGING_BYTES = 16 * 68 * 4  # of a warpgroup's results on their way out


class _Parameters(ctypes.Structure):
    """WgmmaSpParams of the kernel."""

    _fields_ = [
        ("x", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("row_tiles", ctypes.c_int64),
        ("k_tiles", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("token_blocks", ctypes.c_uint32),
        ("items", ctypes.c_uint32),
        ("vectors", ctypes.c_uint32),
        ("padding", ctypes.c_char * 48),  # a tensor map's alignment is the struct's
    ]


class Cut(NamedTuple):
    """How a problem is cut into blocks. ``slices`` alone fixes the bits."""

    warpgroups: int
    row_blocks: int
    tokens: int
    share: int
    slices: int
    blocks_per_sm: int = 1
    parts: int = 1
    ring: tuple[int, int] | None = None

    @property
    def row_tiles(self) -> int:
        return self.warpgroups * self.row_blocks

    @property
    def cluster(self) -> int:
        return self.share * self.slices

    @property
    def stages(self) -> tuple[int, int]:
        """Of W and of X: as many as fit, X half as coarse along K."""
        if self.ring: return self.ring
        weight, source = self.row_tiles * TILE_BYTES, 128 * self.tokens
        room = _SHARED_BYTES[self.blocks_per_sm] - 256
        if self.slices == 1:
            room -= self.warpgroups * _STAGING_BYTES
        best = max(
            ((w, x) for w in range(2, 9) for x in range(2, 17) if w * weight + x * source <= room),
            key=lambda stages: (min(2 * stages[0] - 1, stages[1]), sum(stages)),
        )
        return best

    @property
    def shared_bytes(self) -> int:
        weight, source = self.stages
        stages = weight * self.row_tiles * TILE_BYTES + source * 128 * self.tokens
        staging = self.warpgroups * _STAGING_BYTES if self.slices == 1 else 0
        return stages + staging + 16 * (weight + source)

    def items(self, n: int, m: int) -> int:
        """Pieces of work, one a cluster."""
        return -(-m // (TILE_M * self.row_tiles * self.share)) * -(-n // self.tokens)


def cut_of(n: int, m: int, k: int, multiprocessors: int) -> Cut:
    return Cut(2, 1, 256, 2, 1)


class Kernel:
    workspace_size = 0
    workspace_alignment = 1
    weight_alignment = 16
    source_alignment = 16
    source_row_alignment = 16
    result_alignment = 1
    launches = 1

    def __init__(
        self,
        desc: GemmSparse24Descriptor,
        device: DeviceProperties,
        spec: KernelSpec,
        preference: PlanPreference,
        cut: Cut | None = None,
    ) -> None:
        self._desc = desc
        self._cut = cut = cut or cut_of(desc.n, desc.m, desc.k, device.multiprocessors)
        items = cut.items(desc.n, desc.m)
        clusters = min(items, {1: 132, 2: 66, 4: 30}[cut.cluster] * cut.blocks_per_sm) if cut.slices == 1 else items
        self._items, self._blocks = items, clusters * cut.cluster
        weight_stages, source_stages = cut.stages
        self.details = (
            f"{items * cut.cluster} tiles of {TILE_M * cut.row_tiles} rows x {cut.tokens} tokens, clusters of "
            f"{cut.share} rows x {cut.slices} slices of K, {weight_stages} + {source_stages} stages"
        )
        self._function = jit.load(
            "sm90a_gemm_wgmma_sp.cu",
            "gemm_wgmma_sp",
            128 * (cut.warpgroups + 1),
            device.cuda_arch,
            device.ordinal,
            defines(desc, cut),
            shared_bytes=cut.shared_bytes,
        )

    def prepare(self, operands: Operands, workspace: int) -> Callable[[int], None]:
        desc, cut = self._desc, self._cut
        try:
            source = cuda_driver_abi.swizzled_matrix_map(
                operands.source.address,
                desc.n,
                desc.k,
                operands.source_stride * desc.element.itemsize,
                desc.element.itemsize,
                cut.tokens // cut.share,
            )
        except cuda_driver_abi.CudaDriverError as error:
            raise DriverError(error.call, error.status) from error
        result_bytes = operands.result_stride * desc.out_element.itemsize
        parameters = _Parameters(
            packed=operands.weight.buffers[0].address,
            bias=0 if operands.bias is None else operands.bias.address,
            y=operands.result.address,
            n=desc.n,
            m=desc.m,
            y_stride=operands.result_stride,
            row_tiles=-(-desc.m // TILE_M),
            k_tiles=-(-desc.k // TILE_K),
            alpha=desc.alpha,
            token_blocks=-(-desc.n // cut.tokens),
            items=self._items,
            vectors=(operands.result.address | result_bytes) % 16 == 0,
        )
        ctypes.memmove(ctypes.addressof(parameters), source, len(source))
        return self._function.bind(self._blocks, parameters, overlapping=True)


def defines(desc: GemmSparse24Descriptor, cut: Cut) -> dict[str, int]:
    """Macros of the kernel for one problem type and cut."""
    weight_stages, source_stages = cut.stages
    return {
        **jit.type_defines(desc),
        "WARPGROUPS": cut.warpgroups,
        "ROW_BLOCKS": cut.row_blocks,
        "TOKENS": cut.tokens,
        "SHARE": cut.share,
        "SLICES": cut.slices,
        "PARTS": cut.parts,
        "BLOCKS_PER_SM": cut.blocks_per_sm,
        "WEIGHT_STAGES": weight_stages,
        "SOURCE_STAGES": source_stages,
    }
