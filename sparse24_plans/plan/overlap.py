"""Whether operands share memory. Another operand may lie in the gaps between rows, or between batches."""

from __future__ import annotations

from typing import NamedTuple

from ..device.tensors import TensorView

_MAX_LINES = 1 << 16
"""Most lines that are compared one by one. More lines of different pitches count as one piece."""
_MAX_SPANS = 256
"""Most spans of a tensor. A tensor of more spans counts as one piece."""


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


def spans_of(view: TensorView) -> tuple[StridedSpan, ...]:
    """Spans that hold the tensor's elements: its lines, or where lines form batches those of each batch."""
    if 0 in view.shape:
        return ()
    whole = (piece(view.address, view.nbytes_spanned),)
    width, *outer = _dimensions(view)
    if not outer or len(outer) > 2 or any(one.stride < width.size for one in outer):
        return whole
    few, many = sorted(outer) if len(outer) == 2 else (_Dimension(1, 0), *outer)
    if few.size > _MAX_SPANS:
        return whole
    size = view.element.itemsize
    lines = many.size, many.stride * size, width.size * size
    return tuple(StridedSpan(view.address + at * few.stride * size, *lines) for at in range(few.size))


def lie_apart(view: TensorView) -> bool:
    """Whether no two elements of a tensor of up to three dimensions share memory. False if it takes long."""
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.strides, strict=True)):
        return False
    width, *outer = _dimensions(view)
    if len(outer) < 2 or outer[1].stride >= outer[0].size * outer[0].stride:
        return all(one.stride >= width.size for one in outer)
    few, many = sorted(outer)
    if len(outer) > 2 or min(few.stride, many.stride) < width.size or few.size > _MAX_LINES:
        return False
    # Whether two lines overlap depends on how far apart their indices are in both dimensions.
    back = (many.size - 1) * many.stride
    spread = StridedSpan(-back, 2 * many.size - 1, many.stride, width.size)
    return not any(spread.overlaps(at * few.stride, width.size) for at in range(1, few.size))


class _Dimension(NamedTuple):
    size: int
    stride: int
    """Elements from one index to the next."""


def _dimensions(view: TensorView) -> list[_Dimension]:
    """The dimensions, the innermost first. Dimensions without gaps between them count as one."""
    found = [_Dimension(1, 1)]
    sizes = zip(view.shape, view.strides, strict=True)
    for count, stride in sorted((one for one in sizes if one[0] > 1 and one[1] != 0), key=lambda one: one[1]):
        last = found[-1]
        if stride == last.size * last.stride:
            found[-1] = _Dimension(last.size * count, last.stride)
        else:
            found.append(_Dimension(count, stride))
    return found


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
    if few.lines > _MAX_LINES:
        return True
    return any(many.overlaps(few.address + at * few.pitch, few.width) for at in range(few.lines))
