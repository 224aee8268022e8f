"""A model in NumPy of shared memory that the copy engine fills and wgmma reads, where X lies in columns.

Written from the PTX ISA (tensor copies, "Matrix Descriptor Format" for N-major operands): bytes are placed by
the address, and read by the descriptor, so that a wrong distance or swizzle gives a wrong matrix.
"""

from __future__ import annotations

import numpy as np

from sparse24_plans.gemm.descriptor import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule
from sparse24_plans.gemm.wgmma import Box, source_boxes

BOX_COLUMNS, STEP_COLUMNS = 64, 32
"""Columns of K of a stage, and of one instruction."""
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


def copy_groups(shared: np.ndarray, at: int, matrix: np.ndarray, line: int, first: int, box: Box) -> int:
    """The same of a 3-D map, whose lines end where the last group's first element is the matrix's last."""
    ends = matrix[:, : matrix.shape[1] - (box.groups - 1) * box.elements]
    came = 0
    for group in range(box.groups):
        skipped = group * box.elements
        part = matrix[:, skipped : skipped + ends.shape[1]]
        came += copy_box(shared, at + group * box.lines * box.pitch, part, line, first, box)
    return came


def copied_out(shared: np.ndarray, at: int, dtype: np.dtype, box: Box) -> np.ndarray:
    """What a tensor copy takes out of shared memory, [lines, elements]."""
    size = dtype.itemsize
    lines, elements = np.indices((box.lines, box.elements))
    table = swizzled(at + lines * box.pitch + elements * size, box.pitch)
    return np.stack([shared[table + i] for i in range(size)], -1).view(dtype)[..., 0]


def descriptor(address: int, line_bytes: int, group_bytes: int) -> int:
    """matrix_descriptor_n_major of kernels_cu/ptx/wgmma.cuh."""
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


def copy_lines(shared: np.ndarray, schedule: WgmmaSpSchedule, x: np.ndarray, token0: int, box: int) -> None:
    """What load_x_cp_async of kernels_cu/gemm/wgmma_sp/producer.cuh does in one stage. x: [n, k] as bits."""
    chunks, group, filled = schedule.tokens // 8, schedule.group(2), []
    swapped, threads = group // 8, 32 if schedule.stream_k else 64
    lanes = next(most for most in (1, 2, 4, 8) if chunks <= most)
    step = threads // lanes

    def swizzle(line: int) -> int:
        return line * swapped // 8 % swapped * 16

    for thread in range(threads):
        line, chunk = divmod(thread, lanes)
        token, into = token0 + 8 * chunk, line * group * 2 + (chunk * 16 ^ swizzle(line))
        if chunk >= chunks or token >= len(x):
            continue
        for i in range(BOX_COLUMNS // step):
            column, at = (
                box * BOX_COLUMNS + line + i * step,
                (into ^ swizzle(i * step)) + i * step * group * 2,
            )
            eight = x[token : token + 8, column] if column < x.shape[1] else np.zeros(8, x.dtype)
            shared[at : at + 16] = np.frombuffer(eight.tobytes(), np.uint8)
            filled.append(at)
    assert len(set(filled)) == len(filled) == BOX_COLUMNS * min(chunks, (len(x) - token0) // 8)


def stage(
    desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule, x: np.ndarray, token0: int, box: int
) -> tuple[np.ndarray, int, int]:
    """Shared memory after one stage of X was copied for the tokens from ``token0``, the bytes that the engine
    moved there, and those that load_x_column_major of gemm/wgmma_sp/producer.cuh announces. x: [n, k] as
    bits.
    """
    group = schedule.group(2)
    _, stage_bytes = schedule._stage_bytes(OperandLayouts.of(desc))
    shared = np.full(stage_bytes, 0xA5, np.uint8)
    if schedule.copied_by_threads(desc.n):
        copy_lines(shared, schedule, x, token0, box)
        return shared, 0, 0
    whole, tail, rest, tail_rest = source_boxes(desc, schedule, desc.element.itemsize)
    is_tail = token0 + schedule.tokens >= desc.n
    tokens = schedule.tail_boxed(desc.n) if is_tail else schedule.tokens
    whole_tokens = (desc.n - token0 if is_tail else schedule.tokens) // group * group
    came = 0
    if whole_tokens:
        came += copy_groups(shared, 0, x.T, box * BOX_COLUMNS, token0, tail if is_tail else whole)
    if whole_tokens < tokens:
        left = tail_rest if is_tail else rest
        came += copy_groups(shared, whole_tokens * 128, x.T, box * BOX_COLUMNS, token0 + whole_tokens, left)
    return shared, came, tokens * BOX_COLUMNS * 2
