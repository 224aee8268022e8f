"""Launches ``gemm/wgmma_sp.cu``: packed weights, wgmma.sp fed by the copy engine.

Its workspace is for sums that blocks hand over, and flags: one that holds the launch's own mark is set.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
from typing import NamedTuple

from ..._vendor import cuda_driver_abi
from ..._vendor.library_error import LibraryError
from ...device.jit.compiler import digest
from ...device.jit.launcher import load
from ...device.streams import Launch, driver_error
from ...device.tensors import TensorView
from ...errors import UnsupportedError
from ...plan.kernel import Choice, align_up
from ...plan.operands import Alignment, Views, line_stride
from ...vocab import DeviceProperties, ElementKind, MatrixOrder
from ...weights.layouts import TILE_M, layout_of
from ..arithmetic import names
from ..descriptor import GemmSparse24Descriptor
from ..kernel import GemmKernel, address
from ..schedules.wgmma_choice import allowed_schedules, best_schedule, candidates
from ..schedules.wgmma_sp import Lines, Schedule, pitch_of
from ..wgmma import SOURCE, Parameters, defines

_marks = itertools.count(secrets.randbits(63) | 1)
"""One for each bound launch, which no workspace holds by chance. After a run no flag holds it any longer."""


class Kernel(GemmKernel):
    alignments = {"weight": Alignment(16), "source": Alignment(16, 16)}  # noqa: RUF012
    sources = (SOURCE,)
    tunable = True
    workspace_alignment = 256

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        self._schedule = schedule = _schedule_of(choice)
        items = schedule.items(desc.n, desc.m)
        # One slice: blocks stay and take tile after tile.
        resident = schedule.ranges or schedule.resident_clusters(device.multiprocessors)
        clusters = resident if schedule.ranges else min(items, resident)
        self._blocks = (clusters if schedule.slices == 1 else items) * schedule.cluster
        self.workspace_size = schedule.workspace_bytes()
        layout, lines = layout_of(desc.element), Lines.of(desc)
        weight_stages, source_stages = schedule.stages(lines)
        self.details = (
            f"{items * schedule.share} tiles of {schedule.rows} rows x {schedule.tokens} tokens on "
            f"{self._blocks} blocks{' in equal shares' if schedule.ranges else ''}, "
            f"K in {schedule.slices * schedule.parts} slices, clusters of "
            f"{schedule.cluster}, {weight_stages} + {source_stages} stages"
        )
        self._function = load(
            SOURCE,
            "gemm_wgmma_sp",
            128 * (schedule.warpgroups + 1),
            device,
            defines(desc, schedule, self.row.promoted),
            Parameters,
            shared_bytes=schedule.shared_bytes(lines),
        )
        k_tiles = -(-desc.k // layout.tile_k)
        whole, range_tiles, longer = schedule.cut_into_ranges(desc.n, desc.m, k_tiles)
        self._source_boxes = _source_boxes(desc, schedule)
        self._result_box = _result_box(desc, schedule)
        self._parameters = Parameters(
            n=desc.n,
            m=desc.m,
            k=desc.k,
            row_tiles=-(-desc.m // TILE_M),
            k_tiles=k_tiles,
            alpha=desc.alpha,
            token_blocks=-(-desc.n // schedule.tokens),
            items=items,
            tail_rows=schedule.tail_boxed(desc.n) if lines.x_columns else schedule.tail_rows(desc.n),
            whole=whole,
            range=range_tiles,
            longer=longer,
        )

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        parameters = Parameters.from_buffer_copy(self._parameters)
        size, result_stride = result.element.itemsize, line_stride(result, desc.y_order)
        # The copy engine writes whole 16 bytes: where a line of Y ends within them, elements go one by one.
        copied = self._schedule.slices == 1
        ends = (desc.m if desc.y_order is MatrixOrder.ROW else desc.n) * size if copied else 0
        parameters.aligned = (result.address | result_stride * size | ends) % 16 == 0
        try:
            maps = b"".join(_map(source, desc.x_order, box) for box in self._source_boxes)
            if parameters.aligned and copied:
                maps += _map(result, desc.y_order, self._result_box)
        except LibraryError as error:
            raise driver_error(error) from error
        ctypes.memmove(ctypes.addressof(parameters), maps, len(maps))  # the maps come first
        parameters.x = source.address
        parameters.x_stride = line_stride(source, desc.x_order)
        parameters.packed = views["packed"].address
        parameters.bias = address(views.get("bias"))
        parameters.scale_x = address(views.get("scale_x"))
        parameters.scale_w = address(views.get("scale_w"))
        parameters.y = result.address
        parameters.y_stride = result_stride
        if self._schedule.ranges:
            parameters.flags = workspace
            parameters.sums = workspace + self._schedule.flags_bytes()
            parameters.mark = next(_marks)
        return self._function.bind(self._blocks, parameters, overlapping=True)

    @classmethod
    def arithmetic(cls, choice: Choice) -> str | None:
        if choice.row.promoted or choice.descriptor.element is ElementKind.S8:
            return super().arithmetic(choice)  # where the cut doesn't show
        schedule = _schedule_of(choice)
        return names.sliced(choice.descriptor, schedule.slices * schedule.parts)

    @classmethod
    def candidates(cls, descriptor: GemmSparse24Descriptor, device: DeviceProperties) -> list[dict[str, int]]:
        return candidates(descriptor)

    @classmethod
    def tuning_version(cls, device: DeviceProperties) -> str:
        return f"sources {digest(SOURCE)}"


def _schedule_of(choice: Choice) -> Schedule:
    desc, row, preference = choice.descriptor, choice.row, choice.preference
    whole_m, most = preference.whole_m, preference.max_workspace_bytes
    if whole_m is not None or not choice.configuration:  # which knows nothing of whole_m
        return best_schedule(desc, row, whole_m, most)
    schedule = Schedule(**choice.configuration)
    if schedule not in allowed_schedules(desc, row):
        raise UnsupportedError(f"configuration: {row.name} can't keep its promises with {schedule}")
    if most is not None and schedule.workspace_bytes() > most:
        return best_schedule(desc, row, whole_m, most)
    return schedule


class _Box(NamedTuple):
    """What the copy engine moves at a time: lines, which are rows or columns, and elements of each."""

    lines: int
    elements: int
    pitch: int
    """Bytes from one line to the next in shared memory."""


def _source_boxes(desc: GemmSparse24Descriptor, schedule: Schedule) -> tuple[_Box, _Box, _Box]:
    """Of X: of all blocks of tokens; of the last block; in columns: its last group's, and that of the others.

    What lies past the last token is not copied, not even as zeros: those the copy engine writes slowly.
    """
    size, line = desc.element.itemsize, 128
    if desc.x_order is MatrixOrder.ROW:
        tail = _Box(schedule.tail_rows(desc.n), line // size, line)
        whole = tail._replace(lines=schedule.tokens // schedule.share) if desc.n > schedule.tokens else tail
        return whole, tail, whole
    group = schedule.group(size)
    boxes = (group, schedule.tail_boxed(desc.n) % group or group, schedule.tokens % group or group)
    whole, tail, rest = (_Box(schedule.box_lines(group), tokens, group * size) for tokens in boxes)
    return whole, tail, rest


def _result_box(desc: GemmSparse24Descriptor, schedule: Schedule) -> _Box:
    size = desc.out_element.itemsize
    tokens = schedule.step_tokens(size)
    if desc.y_order is MatrixOrder.ROW:
        rows = min(TILE_M, 128 // size)
        return _Box(tokens, rows, rows * size)
    return _Box(TILE_M, tokens, pitch_of(tokens * size))


def _map(view: TensorView, order: MatrixOrder, box: _Box) -> bytes:
    shape = view.shape if order is MatrixOrder.ROW else view.shape[::-1]
    size = view.element.itemsize
    line_bytes = line_stride(view, order) * size
    if shape[0] == 1:  # nothing lies a line further, so any distance serves
        line_bytes = align_up(line_bytes, 16)
    return cuda_driver_abi.swizzled_matrix_map(view.address, shape, line_bytes, size, box[:2], box.pitch)
