"""A model in NumPy of shared memory that the copy engine fills and wgmma reads, where X lies in columns.

Written from the PTX ISA (tensor copies, "Matrix Descriptor Format" for N-major operands): bytes are placed by
the address, and read by the descriptor, so that a wrong distance or swizzle gives a wrong matrix.
"""

from __future__ import annotations

import numpy as np

from sparse24_plans.gemm.descriptor import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules.wgmma_sp import Lines, Schedule
from sparse24_plans.gemm.wgmma import Box, source_boxes

BOX_COLUMNS, STEP_COLUMNS, LINE_THREADS = 64, 32, 64
"""Columns of K of a stage, and of one instruction; threads that copy lines of few tokens."""
_SWIZZLES = {16: 0, 32: 3, 64: 2, 128: 1}
"""Pitch of lines -> the number of its swizzle in a descriptor."""


def swizzled(address: np.ndarray | int, pitch: int) -> np.ndarray | int:
    """The address where the engine, and the tensor cores, have them: bits 4 .. are changed by bits 7 .."""
    return address ^ (address >> 7 & pitch // 16 - 1) << 4


def copy_box(shared: np.ndarray, at: int, matrix: np.ndarray, line: int, first: int, box: Box) -> int:
    """What a tensor copy does to shared memory; what lies outside of the matrix is zero. The bytes moved."""
    size = matrix.itemsize
    for i in range(box.lines):
        for j in range(box.elements):
            inside = line + i < matrix.shape[0] and first + j < matrix.shape[1]
            value = matrix[line + i, first + j] if inside else matrix.dtype.type(0)
            to = swizzled(at + i * box.pitch + j * size, box.pitch)
            shared[to : to + size] = np.frombuffer(value.tobytes(), np.uint8)
    return box.lines * box.elements * size


def copied_out(shared: np.ndarray, at: int, dtype: np.dtype, box: Box) -> np.ndarray:
    """What a tensor copy takes out of shared memory, [lines, elements]."""
    size = dtype.itemsize
    lines, elements = np.indices((box.lines, box.elements))
    table = swizzled(at + lines * box.pitch + elements * size, box.pitch)
    return np.stack([shared[table + i] for i in range(size)], -1).view(dtype)[..., 0]


def descriptor(address: int, line_bytes: int, group_bytes: int) -> int:
    """matrix_descriptor_of_lines of kernels_cu/ptx/wgmma.cuh."""
    swizzle, eight_lines = _SWIZZLES[line_bytes], 8 * line_bytes
    leading, stride = (group_bytes, eight_lines) if swizzle else (eight_lines, group_bytes)
    return swizzle << 62 | (stride >> 4) << 32 | (leading >> 4) << 16 | (address & 0x3FFFF) >> 4


def read_b(shared: np.ndarray, at: int, tokens: int) -> np.ndarray:
    """B [32, tokens] of 16-bit elements, N-major, as wgmma.sp m64nNk32 reads it by its descriptor."""
    pitch = {number: pitch for pitch, number in _SWIZZLES.items()}[at >> 62]
    start, leading, stride = (at & 0x3FFF) << 4, (at >> 16 & 0x3FFF) << 4, (at >> 32 & 0x3FFF) << 4
    k, n = np.indices((STEP_COLUMNS, tokens))
    if pitch == 16:
        linear = start + n % 8 * 2 + n // 8 * stride + k % 8 * 16 + k // 8 * leading
    else:
        group = pitch // 2
        linear = start + n % group * 2 + n // group * leading + k % 8 * pitch + k // 8 * stride
    table = swizzled(linear, pitch)
    return shared[table].astype(np.uint16) | shared[table + 1].astype(np.uint16) << 8


def copy_lines(shared: np.ndarray, tokens: int, group: int, x: np.ndarray, token0: int, box: int) -> None:
    """What the threads of copy_lines of kernels_cu/gemm/wgmma_sp/copies.cuh do in one stage. x: [n, k] as bits."""
    chunks, swapped, filled = tokens // 8, group // 8, []
    step = next(BOX_COLUMNS // most for most in (1, 2, 4, 8) if chunks <= most)
    for thread in range(LINE_THREADS):
        line, chunk = divmod(thread, chunks)
        token = token0 + 8 * chunk
        into = line * group * 2 + (chunk ^ line * swapped // 8 % swapped) * 16
        for one in range(line, BOX_COLUMNS if line < step and token < len(x) else 0, step):
            column, at = box * BOX_COLUMNS + one, into + (one - line) * group * 2
            eight = x[token : token + 8, column] if column < x.shape[1] else np.zeros(8, x.dtype)
            shared[at : at + 16] = np.frombuffer(eight.tobytes(), np.uint8)
            filled.append((one, chunk))
    assert len(set(filled)) == len(filled) == BOX_COLUMNS * min(chunks, (len(x) - token0) // 8)


def stage(
    desc: GemmSparse24Descriptor, schedule: Schedule, x: np.ndarray, token0: int, box: int
) -> tuple[np.ndarray, int, int]:
    """Shared memory after one stage of X was copied for the tokens from ``token0``, the bytes that the engine
    moved there, and those that copy_columns of kernels_cu/gemm/wgmma_sp/copies.cuh announces. x: [n, k] as bits.
    """
    group = schedule.group(2)
    _, stage_bytes = schedule._stage_bytes(Lines.of(desc))
    shared = np.full(stage_bytes, 0xA5, np.uint8)
    if schedule.tokens < 64:
        copy_lines(shared, schedule.tokens, group, x, token0, box)
        return shared, 0, 0
    whole, tail, rest = source_boxes(desc, schedule, desc.element.itemsize)
    is_tail = token0 + schedule.tokens >= desc.n
    tokens = schedule.tail_boxed(desc.n) if is_tail else schedule.tokens
    came, groups = 0, -(-schedule.tokens // group)
    splits_groups = schedule.share > 1 and whole.lines == BOX_COLUMNS
    for share in range(schedule.share):
        mine = groups // schedule.share
        for index in range(share * mine, (share + 1) * mine) if splits_groups else range(groups):
            first, line = index * group, 0 if splits_groups else share * whole.lines
            if first < tokens:
                one = whole if first + group <= tokens else tail if is_tail else rest
                at = index * group * 128 + line * group * 2
                came += copy_box(shared, at, x.T, box * BOX_COLUMNS + line, token0 + first, one)
    return shared, came, tokens * BOX_COLUMNS * 2
