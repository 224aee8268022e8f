"""A model in NumPy of the shared memory that TMA fills with a column-major X and that wgmma reads.

The model follows the PTX ISA (tensor copies, "Matrix Descriptor Format" for N-major operands). Bytes are
placed by the address and read by the descriptor, so that a wrong distance or swizzle gives a wrong matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparse24_plans.gemm import wgmma
from sparse24_plans.gemm.descriptor import GemmSparse24Descriptor
from sparse24_plans.gemm.schedules.wgmma_sp import OperandLayouts, WgmmaSpSchedule
from sparse24_plans.gemm.wgmma import Box, source_boxes

BOX_COLUMNS, STEP_COLUMNS = 64, 32
"""Columns of K in a stage, and in one instruction."""
_SWIZZLES = {16: 0, 32: 3, 64: 2, 128: 1}
"""The number of a swizzle in a descriptor, by the pitch of its lines."""


def swizzled(address: np.ndarray | int, pitch: int) -> np.ndarray | int:
    """Return the address under the swizzle of TMA and wgmma: bits from 7 on change bits from 4 on."""
    return address ^ (address >> 7 & pitch // 16 - 1) << 4


def copy_box(shared: np.ndarray, at: int, matrix: np.ndarray, line: int, first: int, box: Box) -> int:
    """Fill shared memory as a tensor copy does, with zeros outside of the matrix, and return its bytes."""
    size, part = matrix.itemsize, np.zeros((box.lines, box.elements), matrix.dtype)
    inside = matrix[line : line + box.lines, first : first + box.elements]
    part[: inside.shape[0], : inside.shape[1]] = inside
    lines, elements = np.indices(part.shape)
    to = swizzled(at + lines * box.pitch + elements * size, box.pitch)
    shared[to[..., None] + np.arange(size)] = part.view(np.uint8).reshape(*part.shape, size)
    return part.nbytes


def copy_groups(shared: np.ndarray, at: int, matrix: np.ndarray, line: int, first: int, box: Box) -> int:
    """Copy a box of a 3-D map, whose lines end where the last group begins at the matrix's last element."""
    ends = matrix[:, : matrix.shape[1] - (box.groups - 1) * box.elements]
    came = 0
    for group in range(box.groups):
        skipped = group * box.elements
        part = matrix[:, skipped : skipped + ends.shape[1]]
        came += copy_box(shared, at + group * box.lines * box.pitch, part, line, first, box)
    return came


def addresses(box: Box, size: int) -> np.ndarray:
    """Return where in shared memory a tensor copy has the elements of a box: [lines, elements]."""
    lines, elements = np.indices((box.lines, box.elements))
    return swizzled(lines * box.pitch + elements * size, box.pitch)


def defines(desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule) -> dict[str, int]:
    """Return the macros of the kernel, which reads a column-major X as it lies."""
    return wgmma.defines(desc, schedule, OperandLayouts.of(desc), False)


def descriptor(address: int, line_bytes: int, group_bytes: int) -> int:
    """Return the descriptor of an N-major operand, as the compiler finds it in kernels_cu/ptx/wgmma.cuh."""
    swizzle, eight_lines = _SWIZZLES[line_bytes], 8 * line_bytes
    leading, stride = (group_bytes, eight_lines) if swizzle else (eight_lines, group_bytes)
    return swizzle << 62 | (stride >> 4) << 32 | (leading >> 4) << 16 | (address & 0x3FFFF) >> 4


def read_b(shared: np.ndarray, at: int, tokens: int) -> np.ndarray:
    """Return B [32, tokens], 16-bit and N-major, as wgmma.sp m64nNk32 reads it by its descriptor."""
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


class XCopy(NamedTuple):
    """How threads copy a stage: thread t copies chunk t % lanes of columns t // lanes, + step, .."""

    threads: int
    lanes: int
    chunks: int
    """Chunks of 8 tokens in a column; threads beyond them copy nothing."""

    @classmethod
    def of(cls, schedule: WgmmaSpSchedule) -> XCopy:
        chunks = schedule.tokens // 8
        return cls(32 if schedule.stream_k else 64, 1 << (chunks - 1).bit_length(), chunks)

    @property
    def step(self) -> int:
        return self.threads // self.lanes

    def places(self, pitch: int) -> np.ndarray:
        """Return where in the stage each thread copies to: [threads, passes]."""
        line, chunk = np.divmod(np.arange(self.threads), self.lanes)
        columns = line[:, None] + np.arange(0, BOX_COLUMNS, self.step)
        return swizzled(columns * pitch + chunk[:, None] * 16, pitch)


def copy_by_threads(
    shared: np.ndarray, schedule: WgmmaSpSchedule, x: np.ndarray, token0: int, box: int
) -> None:
    """Fill one stage as load_x_cp_async of kernels_cu/gemm/wgmma_sp/producer.cuh does. x: [n, k] as bits."""
    copy, filled = XCopy.of(schedule), []
    for (thread, i), at in np.ndenumerate(copy.places(schedule.group(2) * 2)):
        line, chunk = divmod(thread, copy.lanes)
        token, column = token0 + 8 * chunk, box * BOX_COLUMNS + line + i * copy.step
        if chunk < copy.chunks and token < len(x):
            eight = x[token : token + 8, column] if column < x.shape[1] else np.zeros(8, x.dtype)
            shared[at : at + 16] = np.frombuffer(eight.tobytes(), np.uint8)
            filled.append(at)
    assert len(set(filled)) == len(filled) == BOX_COLUMNS * min(copy.chunks, (len(x) - token0) // 8)


def stage(
    desc: GemmSparse24Descriptor, schedule: WgmmaSpSchedule, x: np.ndarray, token0: int, box: int
) -> tuple[np.ndarray, int, int]:
    """Copy one stage of X for the tokens from ``token0``; x is [n, k] as bits.

    Returns the shared memory, the bytes that TMA moved, and those that load_x_column_major of
    gemm/wgmma_sp/producer.cuh expects.
    """
    group = schedule.group(2)
    _, stage_bytes = schedule._stage_bytes(OperandLayouts.of(desc))
    shared = np.full(stage_bytes, 0xA5, np.uint8)
    if schedule.copied_by_threads(desc.n):
        copy_by_threads(shared, schedule, x, token0, box)
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
