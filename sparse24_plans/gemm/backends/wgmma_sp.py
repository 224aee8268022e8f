"""Launches ``gemm/wgmma_sp.cu``: packed weights, wgmma.sp fed by the copy engine, no workspace."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..._vendor import cuda_driver_abi
from ..._vendor.library_error import LibraryError
from ...device.jit.codes import type_defines
from ...device.jit.compiler import digest
from ...device.jit.launcher import load
from ...device.streams import driver_error
from ...device.tensors import TensorView
from ...errors import UnsupportedError
from ...vocab import DeviceProperties, ElementKind, PlanPreference, ScaleKind
from ...weights.packing import TILE_M, TileLayout, layout_of
from ..plan import BackendKernel, GemmSparse24Descriptor, Operands
from ..table import PROMOTED_FP8, KernelSpec
from .mma_sp import slices_of

_SOURCE = "gemm/wgmma_sp.cu"
_SHARED_BYTES = {1: 227 << 10, 2: 113 << 10, 3: 75 << 10, 4: 56 << 10, 5: 0}
"""The most a block can have, by how many share a multiprocessor."""
_STEP_BYTES, _BUFFERS = 8192, 2
"""Of a warpgroup's results on their way out: what is staged at a time, and buffers for it."""
_BARRIER_BYTES = 512


class _Parameters(ctypes.Structure):
    """WgmmaSpParams of the kernel."""

    _fields_ = [
        ("x_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("y_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale_x", ctypes.c_void_p),
        ("scale_w", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("row_tiles", ctypes.c_int64),
        ("k_tiles", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("token_blocks", ctypes.c_uint32),
        ("items", ctypes.c_uint32),
        ("aligned", ctypes.c_uint32),
        ("padding", ctypes.c_char * 32),  # a tensor map's alignment is the struct's
    ]


class Cut(NamedTuple):
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

    def microseconds(self, desc: GemmSparse24Descriptor, multiprocessors: int) -> float:
        """Predicted time. The constants were fitted to an H200: they rank cuts, they promise nothing."""
        n, m, k, layout = desc.n, desc.m, desc.k, layout_of(desc.element)
        fit = _FEW_FIT if self.tokens <= _FEW else _MANY_FIT if self.tokens < 256 else _WIDEST_FIT
        depth = k / self.slices
        row_bytes = layout.tile_bytes / (TILE_M * layout.tile_k)  # of W, a dense column
        multiply = layout.itemsize * self.rows * self.tokens * depth / fit.products_per_us
        source_rows = max(16, self.tokens)  # fewer take as long
        copy = depth * (row_bytes * self.rows + layout.itemsize * source_rows) / fit.copied_per_us
        if self.rows == TILE_M:
            copy *= fit.one_tile
        each = _soft_max(multiply, copy)
        resident, items = self.resident_clusters(multiprocessors), self.items(n, m)
        out_bytes = desc.out_element.itemsize
        if self.slices > 1:  # they fold, and what follows starts afresh
            fold = fit.fold_us * self.rows * self.tokens + (fit.again_us if items > resident else 0)
            each += fold / self.blocks_per_sm
        else:
            each += out_bytes * self.rows * self.tokens / fit.stored_per_us
        waves = -(-items // max(1, resident // self.blocks_per_sm))
        memory = (row_bytes * m * k + layout.itemsize * n * k + out_bytes * n * m) / fit.moved_per_us
        return fit.launch_us + _soft_max(waves * each, memory)


def _soft_max(a: float, b: float) -> float:
    """The time of two things that overlap, nearly."""
    return math.sqrt(math.hypot(a * a, b * b))


class _Fit(NamedTuple):
    """Constants of the model."""

    products_per_us: float
    """Of one multiprocessor, times the bytes of an element."""
    copied_per_us: float
    """Bytes into one multiprocessor."""
    moved_per_us: float
    """Bytes of memory."""
    launch_us: float
    fold_us: float
    """Of one sum."""
    again_us: float
    stored_per_us: float
    """Bytes of results, while nothing is multiplied."""
    one_tile: float
    """What copying takes where a block has one row tile, relative to more of them."""


_FEW_FIT = _Fit(7.4e6, 140e3, 4.0e6, 3.0, 2.1e-4, 3.6, math.inf, 0.87)
_MANY_FIT = _Fit(7.6e6, 129e3, 3.9e6, 1.3, 1.6e-4, 2.8, 60e3, 1.0)
_WIDEST_FIT = _MANY_FIT._replace(products_per_us=9.1e6)
_FEW = 64
"""Up to so many tokens one block takes them all, and memory sets the pace."""

# (warpgroups, row tiles of one, slices, blocks per multiprocessor)
_FEW_TOKENS = (
    (1, 1, 1, 1),
    (1, 1, 2, 1),
    (2, 1, 1, 1),
    (2, 1, 2, 1),
    (3, 1, 2, 1),
)
_UP_TO_32, _ABOVE_32 = ((1, 1, 3, 4),), ((2, 2, 1, 1),)
"""And, by n."""
_SOME_CUTS = (
    Cut(1, 1, 128),
    Cut(2, 1, 128),
    Cut(3, 1, 128),
    Cut(2, 2, 128),
    Cut(2, 1, 256, share=2),
    Cut(1, 1, 128, slices=2),
    Cut(2, 1, 128, slices=2),
    Cut(3, 1, 128, slices=2),
    Cut(2, 2, 128, slices=2),
    Cut(2, 1, 256, slices=2),
)
_MANY_CUTS = (Cut(2, 1, 256, share=2), Cut(2, 1, 128, share=2), Cut(3, 1, 128))
_MANY = 1024
"""Tokens from which these are tried."""


def _fewest_tokens(n: int) -> int:
    """Of a block that takes all of n <= 64 tokens."""
    return next(tokens for tokens in (8, 16, 32, 64) if n <= tokens)


def cuts(n: int) -> tuple[Cut, ...]:
    """The cuts that are tried for n tokens."""
    if n <= _FEW:
        tokens = _fewest_tokens(n)
        few = _FEW_TOKENS + (_UP_TO_32 if n <= 32 else _ABOVE_32)
        return tuple(Cut(w, r, tokens, 1, slices, per_sm) for w, r, slices, per_sm in few)
    return _SOME_CUTS if n < _MANY else _MANY_CUTS


def one_block_cuts(n: int, parts: int) -> tuple[Cut, ...]:
    """Those that sum all of K in one block, in as many parts as asked: their bits don't depend on n."""
    if n <= _FEW:
        return tuple(Cut(w, 1, _fewest_tokens(n), parts=parts) for w in (1, 2))
    return tuple(Cut(w, 1, 128, 2 if w == 2 and n >= _MANY else 1, parts=parts) for w in (1, 2))


def promotes(spec: KernelSpec) -> bool:
    """Whether the row adds sums of fp8 products up outside of the tensor cores."""
    return spec.name == PROMOTED_FP8


def cuts_of(desc: GemmSparse24Descriptor, spec: KernelSpec, multiprocessors: int) -> tuple[Cut, ...]:
    """The cuts with which the row keeps what it promises."""
    if promotes(spec):
        return one_block_cuts(desc.n, 1)
    if spec.guarantee(desc).batch_invariant and desc.element is not ElementKind.S8:
        return one_block_cuts(desc.n, slices_of(desc.m, multiprocessors))  # as many as mma_sp has slices
    return cuts(desc.n)


def cut_of(desc: GemmSparse24Descriptor, spec: KernelSpec, multiprocessors: int) -> Cut:
    """The cut of the least predicted time: the same one whenever it is asked."""
    tried = cuts_of(desc, spec, multiprocessors)
    return min(tried, key=lambda cut: cut.microseconds(desc, multiprocessors))


def candidates(desc: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
    """What the model ranks, for every row; a row refuses those with which it wouldn't keep its promises."""
    parts = slices_of(desc.m, device.multiprocessors)
    found = dict.fromkeys(cuts(desc.n) + one_block_cuts(desc.n, parts) + one_block_cuts(desc.n, 1))
    return [cut._asdict() for cut in found]


def tuning_version(device: DeviceProperties) -> str:
    return f"sources {digest(_SOURCE)}"


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
        self._cut = cut = self._choose(desc, spec, device.multiprocessors, configuration)
        items = cut.items(desc.n, desc.m)
        # One slice: blocks stay and take tile after tile.
        clusters = min(items, cut.resident_clusters(device.multiprocessors)) if cut.slices == 1 else items
        self._blocks = clusters * cut.cluster
        layout = layout_of(desc.element)
        out_bytes = desc.out_element.itemsize
        weight_stages, source_stages = cut.stages(layout, out_bytes)
        self.details = (
            f"{items * cut.share} tiles of {cut.rows} rows x {cut.tokens} tokens on {self._blocks} blocks, "
            f"K in {cut.slices * cut.parts} slices, clusters of {cut.cluster}, "
            f"{weight_stages} + {source_stages} stages"
        )
        self._function = load(
            _SOURCE,
            "gemm_wgmma_sp",
            128 * (cut.warpgroups + 1),
            device,
            defines(desc, cut, promotes(spec)),
            _Parameters,
            shared_bytes=cut.shared_bytes(layout, out_bytes),
        )
        self._source_box = cut.tokens // cut.share, 128 // desc.element.itemsize
        self._result_box = cut.step_tokens(out_bytes), min(TILE_M, 128 // out_bytes)
        self._parameters = _Parameters(
            n=desc.n,
            m=desc.m,
            row_tiles=-(-desc.m // TILE_M),
            k_tiles=-(-desc.k // layout.tile_k),
            alpha=desc.alpha,
            token_blocks=-(-desc.n // cut.tokens),
            items=items,
        )

    @staticmethod
    def _choose(
        desc: GemmSparse24Descriptor,
        spec: KernelSpec,
        multiprocessors: int,
        configuration: Mapping[str, int] | None,
    ) -> Cut:
        if not configuration:
            return cut_of(desc, spec, multiprocessors)
        cut = Cut(**configuration)
        if cut not in cuts_of(desc, spec, multiprocessors):
            raise UnsupportedError(f"configuration: {spec.name} can't keep its promises with {cut}")
        return cut

    def prepare(self, operands: Operands, workspace: int) -> Callable[[int], None]:
        desc, result = self._desc, operands.result
        parameters = _Parameters.from_buffer_copy(self._parameters)
        result_bytes = operands.result_stride * result.element.itemsize
        parameters.aligned = (result.address | result_bytes) % 16 == 0
        try:
            maps = _map(operands.source, (desc.n, desc.k), operands.source_stride, self._source_box)
            if parameters.aligned and self._cut.slices == 1:
                maps += _map(result, (desc.n, desc.m), operands.result_stride, self._result_box)
        except LibraryError as error:
            raise driver_error(error) from error
        ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))  # the maps come first
        parameters.packed = operands.weight.buffers[0].address
        parameters.bias = _address(operands.bias)
        parameters.scale_x = _address(operands.scale_x)
        parameters.scale_w = _address(operands.scale_w)
        parameters.y = result.address
        parameters.y_stride = operands.result_stride
        return self._function.bind(self._blocks, parameters, overlapping=True)


def _map(view: TensorView, shape: tuple[int, int], stride: int, box: tuple[int, int]) -> bytes:
    size = view.element.itemsize
    return cuda_driver_abi.swizzled_matrix_map(view.address, shape, stride * size, size, box)


def _address(view: TensorView | None) -> int:
    return 0 if view is None else view.address


_SCALE_CODES = {ScaleKind.NONE: 0, ScaleKind.TENSOR: 1, ScaleKind.ROW: 2}


def defines(desc: GemmSparse24Descriptor, cut: Cut, promote: bool) -> dict[str, int]:
    """Macros of the kernel for one problem type and cut."""
    out_bytes = desc.out_element.itemsize
    weight_stages, source_stages = cut.stages(layout_of(desc.element), out_bytes)
    return {
        **type_defines(desc),
        "WARPGROUPS": cut.warpgroups,
        "ROW_BLOCKS": cut.row_blocks,
        "TOKENS": cut.tokens,
        "SHARE": cut.share,
        "SLICES": cut.slices,
        "PARTS": cut.parts,
        "PROMOTE": int(promote),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
        "SCALE_X": _SCALE_CODES[desc.scale_x],
        "SCALE_W": _SCALE_CODES[desc.scale_w],
        "BLOCKS_PER_SM": cut.blocks_per_sm,
        "WEIGHT_STAGES": weight_stages,
        "SOURCE_STAGES": source_stages,
        "STEP_TOKENS": cut.step_tokens(out_bytes),
    }
