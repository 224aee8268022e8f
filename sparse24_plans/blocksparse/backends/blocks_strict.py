"""Launches ``blocksparse/blocks_strict.cu``: kept blocks, multiplied in the order that the oracle has."""

from __future__ import annotations

import ctypes

from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Views
from ...vocab import ElementKind
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import K_MAJOR, Form
from ..strict_tiles import StrictTiles

_SOURCE = "blocksparse/blocks_strict.cu"


class _Parameters(ctypes.Structure):
    """BlocksStrictParams of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("left", "right", "bias", "out")),
        *((name, ctypes.c_void_p) for name in ("pointers", "across", "places", "group_rows", "group_firsts")),
        *((name, ctypes.c_int64) for name in ("left_matrix", "left_k", "left_row")),
        *((name, ctypes.c_int64) for name in ("right_matrix", "right_k", "right_token")),
        *((name, ctypes.c_int64) for name in ("out_matrix", "out_row", "out_token")),
        *((name, ctypes.c_int64) for name in ("blocks", "tokens", "depth")),
        *((name, ctypes.c_uint32) for name in ("heads", "head_lines", "lines", "token_tiles")),
        ("alpha", ctypes.c_float),
    ]


class Kernel(BaseKernel[BlockSparseMatmulDescriptor]):
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        self._form = form = Form(desc)
        self._tiles = tiles = StrictTiles.of(desc, choice.device.multiprocessors)
        self._blocks = tiles.blocks(desc)
        self.details = f"{self._blocks} tiles of {tiles.rows} rows x {tiles.tokens} tokens"
        self._function = load(
            _SOURCE, "blocks_strict", tiles.threads, choice.device, defines(desc, tiles), _Parameters
        )
        one, n = desc.layout, desc.n
        # How far it is to the next k, and to the next row or token.
        width = one.block if not form.sampled else one.rows if desc.trans_a else n
        left = (1, width) if form.left_major == K_MAJOR else (width, 1)
        across = one.cols if form.sampled else n
        right = (1, self._k) if form.right_major == K_MAJOR else (across, 1)
        rows = form.head_lines * one.block
        self._parameters = _Parameters(
            left_matrix=one.rows * n,
            left_k=left[0],
            left_row=left[1],
            right_matrix=self._k * across,
            right_k=right[0],
            right_token=right[1],
            out_matrix=rows * n,
            out_row=n if form.tokens_contiguous else 1,
            out_token=1 if form.tokens_contiguous else rows,
            blocks=one.blocks,
            tokens=n,
            depth=n,
            heads=one.heads,
            head_lines=max(form.head_lines, 1),
            lines=tiles.lines(desc),
            token_tiles=tiles.token_tiles(desc),
            alpha=desc.alpha,
        )

    @property
    def _k(self) -> int:
        """The length of the sums, blocks that aren't kept among them."""
        return self.descriptor.reduction

    def launcher(self, views: Views, workspace: int) -> Launch:
        form = self._form
        if self._blocks == 0:
            return nothing
        parameters = _Parameters.from_buffer_copy(self._parameters)
        for field, at in form.entries(views["layout"].address, self.descriptor).items():
            setattr(parameters, field, at)
        parameters.left, parameters.right = views[form.left].address, views[form.right].address
        parameters.out = views["c"].address
        if "bias" in views:
            parameters.bias = views["bias"].address
        return self._function.bind(self._blocks, parameters)


def defines(desc: BlockSparseMatmulDescriptor, tiles: StrictTiles) -> dict[str, int]:
    """Macros of the kernel."""
    form = Form(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "TILE_N": tiles.tokens,
        "SAMPLED": int(form.sampled),
        "LEFT_ALONG_K": int(form.left_major == K_MAJOR),
        "RIGHT_ALONG_K": int(form.right_major == K_MAJOR),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
    }
