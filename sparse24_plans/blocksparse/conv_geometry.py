"""How the pixels of a convolution's result meet those of what it reads, along rows and columns.

A tap is a place of the filter's kernel. Taps are counted row by row.
"""

from __future__ import annotations

from typing import NamedTuple


class Axis(NamedTuple):
    """One of both axes. Result i of a phase meets pixel ``lower + stride * i + offset`` at a tap.

    Phases are the results that are ``divide`` apart: of the gradient of a strided input each of them meets
    taps of its own.
    """

    size: int
    """Pixels of what is read."""
    results: int
    """Results of a phase, those counted that a phase may lack at the end."""
    lower: int
    stride: int
    start: int
    step: int
    divide: int
    taps: int

    @classmethod
    def forward(cls, size: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
        """Of a convolution's results; ``results`` is 0 or less where the kernel is wider than the image."""
        results = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        return cls(size, results, -padding, stride, 0, dilation, 1, kernel)

    @classmethod
    def gradient(cls, size: int, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
        """Of the gradient of the input, which has ``size`` pixels and reads that of the results."""
        read = cls.forward(size, kernel, stride, padding, dilation).results
        lower = -((dilation * (kernel - 1) - padding) // stride)
        start = padding - stride * lower
        return cls(read, -(-size // stride), lower, 1, start, -dilation, stride, kernel)

    def offset(self, phase: int, tap: int) -> int | None:
        """From 0 on; None where the phase meets no pixel at the tap."""
        found, rest = divmod(self.start + phase + self.step * tap, self.divide)
        return None if rest else found

    @property
    def most_offset(self) -> int:
        found = (self.offset(phase, tap) for phase in range(self.divide) for tap in range(self.taps))
        return max(one for one in found if one is not None)

    @property
    def upper(self) -> int:
        """The last result's pixel at offset 0, counted from the last one of the image."""
        return self.lower + self.stride * (self.results - 1) - (self.size - 1)


class Geometry(NamedTuple):
    """Both axes: rows and columns."""

    h: Axis
    w: Axis

    @property
    def taps(self) -> int:
        return self.h.taps * self.w.taps

    @property
    def phases(self) -> int:
        """Of rows, and in each those of columns."""
        return self.h.divide * self.w.divide

    @property
    def pixels(self) -> int:
        """Results of an image in a phase."""
        return self.h.results * self.w.results

    def offsets(self, phase: int, tap: int) -> tuple[int, int] | None:
        """None where the phase meets no pixels at the tap."""
        rows = self.h.offset(phase // self.w.divide, tap // self.w.taps)
        columns = self.w.offset(phase % self.w.divide, tap % self.w.taps)
        return None if rows is None or columns is None else (rows, columns)
