"""Launches ``blocksparse/blocks_wgmma.cu``: kept blocks and the rows that they meet, multiplied by wgmma."""

from __future__ import annotations

import ctypes

from ..._vendor import cuda_driver_abi
from ...device.jit.enum_codes import type_defines
from ...device.jit.launcher import load, put_maps
from ...device.streams import Launch
from ...device.tensors import TensorView
from ...plan.kernel import Choice, align_up, launch_in_order, nothing
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Alignment, Views
from ...vocab import ElementKind
from ..descriptor import BlockSparseMatmulDescriptor
from ..kernel_problem import K_MAJOR, Form, turned_bytes
from ..schedules.blocks_wgmma import Schedule, best_schedule
from ..transpose import SOURCE as TURN
from ..transpose import Turn
from ..wgmma import matrices_map, rows_map

_SOURCE = "blocksparse/blocks_wgmma.cu"
_LINE_BYTES = 128
"""Of a line of a box, and of k of a step."""
_TILE = 64
"""Rows of a tile, and rows or tokens of a box that isn't K-major."""


class _Parameters(ctypes.Structure):
    """BlocksWgmmaParams of the kernel."""

    _fields_ = [
        ("left_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("right_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("out_map", ctypes.c_char * cuda_driver_abi.TENSOR_MAP_BYTES),
        ("order", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("blocks", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("strips", ctypes.c_uint32),
        ("head_strips", ctypes.c_uint32),
        ("head_lines", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
        ("token_clusters", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("steps", ctypes.c_uint32),
        ("whole", ctypes.c_uint32),
        ("padding", ctypes.c_char * 8),  # a tensor map's alignment is the struct's
    ]


class Kernel(BaseKernel[BlockSparseMatmulDescriptor]):
    workspace_alignment = 256
    default_alignment = Alignment(16)
    sources = (_SOURCE, TURN)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._form = form = Form(desc)
        self._turns = form.turns(desc, choice.preference.max_workspace_bytes)
        self._turn = Turn(desc.element.itemsize, device) if self._turns else None
        self.workspace_size = turned_bytes(self._turns)
        self.launches = 1 + len(self._turns)
        self._majors = form.majors(self._turns)
        self._reads = desc.layout.blocks > 0 and desc.reduction > 0  # or the result is zeros
        self._schedule = schedule = best_schedule(desc, device.multiprocessors)
        items = schedule.items(desc)
        self._blocks = min(items, schedule.resident_clusters(device.multiprocessors)) * schedule.share
        self.details = (
            ("up to " if form.sampled else "")
            + f"{items * schedule.share} tiles of {schedule.rows} rows x {schedule.tokens} tokens on "
            f"{self._blocks} blocks, clusters of {schedule.share}, {schedule.stages} stages"
            + "".join(f"; {one.name} is transposed first" for one in self._turns)
        )
        self._function = load(
            _SOURCE,
            "blocks_wgmma",
            schedule.threads,
            device,
            defines(desc, schedule, self._majors),
            _Parameters,
            shared_bytes=schedule.shared_bytes(),
        )
        head_strips = form.head_strips(schedule.rows, desc.layout.block)
        self._parameters = _Parameters(
            blocks=desc.layout.blocks,
            alpha=desc.alpha,
            strips=desc.layout.heads * head_strips,
            head_strips=head_strips,
            head_lines=form.head_lines,
            words=form.words,
            heads=desc.layout.heads,
            batch=desc.batch,
            tokens=desc.n,
            token_clusters=schedule.token_clusters(desc),
            band=schedule.band(desc),
            groups=schedule.groups(desc.layout),
            steps=-(-desc.n // _depth(desc)),
            whole=int(desc.n % _TILE == 0),
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, form = self.descriptor, self._form
        if self._blocks == 0:
            return nothing
        parameters = _Parameters.from_buffer_copy(self._parameters)
        for field, at in form.tables(views["layout"].address, desc, self._schedule.rows).items():
            setattr(parameters, field, at)
        views, turns = self._turned(views, workspace)
        put_maps(parameters, self._maps, views)
        parameters.values = views["c" if form.sampled else form.left].address
        if "bias" in views:
            parameters.bias = views["bias"].address
        multiply = self._function.bind(self._blocks, parameters, overlapping=True)
        return launch_in_order(*turns, multiply) if turns else multiply

    def _turned(self, views: Views, workspace: int) -> tuple[Views, list[Launch]]:
        """The operands as they are multiplied, and what transposes them."""
        found, launches, at = dict(views), [], workspace
        for one in self._turns:
            if one.size:
                assert self._turn is not None
                launch, found[one.name] = self._turn.bind(views[one.name], at)
                launches.append(launch)
            at += align_up(one.size)
        return found, launches

    def _maps(self, views: Views) -> bytes:
        """Of the left and the right operand and the result."""
        desc, form, one = self.descriptor, self._form, self._schedule
        left_major, right_major = self._majors
        found = bytes(2 * cuda_driver_abi.TENSOR_MAP_BYTES)
        if self._reads:
            block, depth = desc.layout.block, _depth(desc)
            if form.sampled:
                found = _dense_map(views["a"], left_major, one.rows, depth, one.share)
                found += _dense_map(views["b"], right_major, min(block, one.tokens), depth)
            else:
                step = min(block, depth)
                lines = block if left_major == K_MAJOR else step
                found = rows_map(views[form.left], (lines // one.share, step))
                if form.small and right_major != K_MAJOR:
                    found += _grouped_map(views[form.right], one.tokens, step)
                else:
                    found += _dense_map(views[form.right], right_major, one.tokens, step)
        out = views["c"]
        wide = min(_LINE_BYTES // out.element.itemsize, _TILE)  # what the kernel's staging area holds
        if form.sampled:
            threads = bytes(cuda_driver_abi.TENSOR_MAP_BYTES)  # copy small blocks by themselves
            return found + (threads if form.small else rows_map(out, (_TILE, wide)))
        return found + matrices_map(out, (_TILE if form.tokens_contiguous else wide, wide))


def _depth(desc: BlockSparseMatmulDescriptor) -> int:
    """k of a step."""
    return _LINE_BYTES // desc.element.itemsize


def _dense_map(view: TensorView, major: int, lines: int, step: int, share: int = 1) -> bytes:
    """Boxes of ``step`` k of some rows or tokens; of so many blocks of threads each copies a part."""
    box = (lines // share, step) if major == K_MAJOR else (step // share, min(lines, _TILE))
    return matrices_map(view, box)


def _grouped_map(view: TensorView, tokens: int, step: int) -> bytes:
    """Boxes of ``step`` k of all tokens of a tile, or where they aren't whole tiles of a part of them."""
    batch, heads, rows, width = view.shape
    whole = width % _TILE == 0
    group, groups = (_TILE, tokens // _TILE) if whole else (width, 1)
    return cuda_driver_abi.grouped_matrices_map(
        view.address, (batch * heads, rows, width), view.element.itemsize, group, (groups, step, _TILE)
    )


def defines(desc: BlockSparseMatmulDescriptor, schedule: Schedule, majors: tuple[int, int]) -> dict[str, int]:
    """Macros of the kernel for one problem type and schedule."""
    form = Form(desc)
    return {
        **type_defines(desc),
        "BLOCK": desc.layout.block,
        "TILE_M": schedule.rows,
        "TILE_N": schedule.tokens,
        "WARPGROUPS": schedule.warpgroups,
        "CLUSTER_N": schedule.share,
        "STAGES": schedule.stages,
        "BUFFERS": schedule.buffers,
        "SPARSE_MAJOR": majors[0],
        "DENSE_MAJOR": majors[1],
        "TOKENS_CONTIGUOUS": int(form.tokens_contiguous),
        "SAMPLED": int(form.sampled),
        "RAW": int(desc.out_element is ElementKind.I32 and desc.is_plain),
    }
