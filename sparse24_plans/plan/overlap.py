"""Whether two operands share memory. Another operand may lie in the gaps between a matrix's rows."""

from __future__ import annotations

from typing import NamedTuple

from ..device.tensors import TensorView

_MOST_LINES = 1 << 16
"""Most lines that are compared one by one. More lines of different pitches count as one piece."""


class StridedSpan(NamedTuple):
    """``lines`` pieces of ``width`` bytes that start ``pitch`` bytes apart."""

    address: int
    lines: int
    pitch: int
    width: int

    @property
    def end(self) -> int:
        return self.address + (self.lines - 1) * self.pitch + self.width

    def overlaps(self, start: int, width: int) -> bool:
        """Whether a line shares memory with the ``width`` bytes from ``start``."""
        first = (start - self.width - self.address) // self.pitch + 1
        last = -(-(start + width - self.address) // self.pitch) - 1
        return max(first, 0) <= min(last, self.lines - 1)


def piece(address: int, nbytes: int) -> StridedSpan:
    """A span without gaps."""
    return StridedSpan(address, 1, max(nbytes, 1), nbytes)


def span_of(view: TensorView) -> StridedSpan:
    """The rows (or columns) of a matrix with gaps between them; for any other tensor its whole span."""
    if len(view.shape) == 2:
        size = view.element.itemsize
        for line, step in ((0, 1), (1, 0)):
            count, width, pitch = view.shape[line], view.shape[step], view.strides[line]
            if count > 1 and pitch > width and view.strides[step] == 1:
                return StridedSpan(view.address, count, pitch * size, width * size)
    return piece(view.address, view.nbytes_spanned)


def overlap(one: StridedSpan, other: StridedSpan) -> bool:
    """Whether two spans share a byte."""
    if one.address >= other.end or other.address >= one.end:
        return False
    few, many = (one, other) if one.lines <= other.lines else (other, one)
    if few.lines == 1:
        return many.overlaps(few.address, few.width)
    if few.pitch == many.pitch:  # whether line i of one overlaps line j of the other depends on i - j alone
        back = (few.lines - 1) * many.pitch
        spread = StridedSpan(many.address - back, many.lines + few.lines - 1, many.pitch, many.width)
        return spread.overlaps(few.address, few.width)
    if few.lines > _MOST_LINES:
        return True
    return any(many.overlaps(few.address + at * few.pitch, few.width) for at in range(few.lines))
