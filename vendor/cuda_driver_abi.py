"""The parts of the CUDA driver C ABI that CuPy doesn't offer.

They are tensor maps, launches that may overlap, and the mode in which a thread may free anything while a
stream captures.

Provenance: VENDOR.md.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, NamedTuple

from .library_error import LibraryError

# CUtensorMapDataType, by bytes of an unsigned element
_UNSIGNED = {1: 0, 2: 1, 4: 2}
# CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
_INTERLEAVE_NONE, _FILL_ZEROS = 0, 0
_L2_PROMOTION_NONE, _L2_PROMOTION_256B = 0, 3
_SWIZZLE = {16: 0, 32: 1, 64: 2, 128: 3}  # by bytes that a box's rows are apart

TENSOR_MAP_BYTES = 128
_ALIGNMENT = 64
_Space = ctypes.c_char * (TENSOR_MAP_BYTES + _ALIGNMENT)


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value in a union of 64 bytes."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_MOST_STREAMS = 64
"""Streams whose configurations a launch keeps."""
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CU_STREAM_CAPTURE_MODE_RELAXED
_PROGRAMMATIC_STREAM_SERIALIZATION, _CAPTURE_MODE_RELAXED = 6, 2

_P, _INT = ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "cuTensorMapEncodeTiled": [_P, _INT, ctypes.c_uint32, *[_P] * 5, *[_INT] * 4],
    "cuTensorMapEncodeIm2col": [
        *[_P, _INT, ctypes.c_uint32, *[_P] * 5],
        *[ctypes.c_uint32] * 2,
        *[_P, *[_INT] * 4],
    ],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(_INT)],
}


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, signature in _SIGNATURES.items():
        getattr(library, name).argtypes = signature
    return library


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Let this thread make calls that CUDA forbids while a stream captures, and ends the capture for.

    It is for destructors, so it raises nothing.
    """
    exchange, mode = _driver()["cuThreadExchangeStreamCaptureMode"], _INT(_CAPTURE_MODE_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class OverlappingLaunch:
    """Launches of ``function`` that may start before the kernel in front of them in the stream has ended.

    So the kernel must wait by itself (``griddepcontrol.wait``) before it touches memory.
    """

    __slots__ = ("_attribute", "_configs", "_function", "_launch", "_template")

    def __init__(self, function: int, blocks: int, threads: int, shared_bytes: int) -> None:
        self._function = ctypes.c_void_p(function)
        self._launch = _driver()["cuLaunchKernelEx"]  # without argtypes, which would convert at every call
        self._configs: dict[int, Any] = {}  # by stream, never written to again: threads share them
        self._attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        attributes = ctypes.pointer(self._attribute)
        self._template = _LaunchConfig((blocks, 1, 1), (threads, 1, 1), shared_bytes, None, attributes, 1)

    def bind(self, parameters: int, keep: Any) -> Callable[[int], None]:
        """A launcher: call it with a stream handle. It raises LibraryError.

        ``parameters``: address of the array of pointers to them, which ``keep`` keeps alive.
        """
        configs, config_on, launch = self._configs, self._config_on, self._launch
        function, at = self._function, ctypes.c_void_p(parameters)

        def launch_early(stream: int, _keep: Any = keep) -> None:
            status = launch(configs.get(stream) or config_on(stream), function, at, None)
            if status:
                raise LibraryError("cuLaunchKernelEx", status)

        return launch_early

    def _config_on(self, stream: int) -> Any:
        config = _LaunchConfig.from_buffer_copy(self._template)
        config.stream = stream
        if len(self._configs) >= _MOST_STREAMS:
            self._configs.clear()
        self._configs[stream] = pointer = ctypes.byref(config)
        return pointer


@lru_cache(maxsize=1024)
def swizzled_matrix_map(
    address: int,
    shape: tuple[int, int],
    row_bytes: int,
    itemsize: int,
    box: tuple[int, int],
    pitch: int = 0,
    batches: tuple[int, ...] = (),
) -> bytes:
    """A CUtensorMap of a row-major matrix, copied in boxes (rows, columns) under the swizzle of their pitch.

    In shared memory a box's rows are ``pitch`` bytes apart: 16 (without a swizzle), 32, 64 or 128, and no
    less than their width, which is the default. A box has at most 256 rows. What lies outside of the matrix
    reads as zero bits and isn't written. ``address``, ``row_bytes`` and the width of a box are multiples of
    16, ``row_bytes`` below 2^40, the extents from 1 to 2^32. ``batches`` are a number of such matrices and
    the bytes from one to the next, which are one more dimension; a box lies in one matrix. Raises
    LibraryError.
    """
    return _batched_map(batches, address, shape, (row_bytes,), itemsize, box, pitch)


@lru_cache(maxsize=1024)
def swizzled_matrices_map(
    address: int, shape: tuple[int, int, int], itemsize: int, box: tuple[int, int]
) -> bytes:
    """A CUtensorMap, as :func:`swizzled_map` makes it, of contiguous matrices (matrices, rows, columns).

    A box is part of one matrix. Elements outside of that matrix read as zero bits and aren't written.
    """
    row_bytes = shape[2] * itemsize
    return _swizzled_map(address, shape, (shape[1] * row_bytes, row_bytes), itemsize, (1, *box))


@lru_cache(maxsize=1024)
def grouped_matrices_map(
    address: int, shape: tuple[int, int, int], itemsize: int, group: int, box: tuple[int, int, int]
) -> bytes:
    """A CUtensorMap of contiguous matrices whose columns form groups of ``group``, a divisor of them.

    A box is (groups, rows, columns). Its coordinates, from the innermost: a column in a group, row, group,
    matrix.
    """
    matrices, rows, columns = shape
    row_bytes, group_bytes = columns * itemsize, group * itemsize
    pitches = rows * row_bytes, group_bytes, row_bytes
    return _swizzled_map(address, (matrices, columns // group, rows, group), pitches, itemsize, (1, *box))


@lru_cache(maxsize=1024)
def swizzled_groups_map(
    address: int,
    shape: tuple[int, int],
    row_bytes: int,
    itemsize: int,
    box: tuple[int, int, int, int],
    batches: tuple[int, ...] = (),
) -> bytes:
    """A CUtensorMap, [groups, rows, columns], of a row-major matrix: groups of columns follow each other.

    ``box`` is (rows, columns, pitch, groups): ``groups`` times so many columns, from the coordinates (0, row,
    column). In shared memory the rows of a group lie ``pitch`` bytes apart, under the swizzle of that width,
    and groups one after the other. With several of them a box that isn't all inside of the matrix may be
    filled with zeros. ``batches`` are as those of :func:`swizzled_matrix_map`.
    """
    rows, columns, pitch, groups = box
    sizes = groups, shape[0], max(1, shape[1] - (groups - 1) * columns)
    # TMA would fetch bytes of another group beside a line, so each line is fetched by itself.
    return _batched_map(
        batches,
        address,
        sizes,
        (columns * itemsize, row_bytes),
        itemsize,
        (groups, rows, columns),
        pitch,
        _L2_PROMOTION_NONE,
    )


class PixelBox(NamedTuple):
    """The pixels that a map walks, row by row: from ``lower``, ``steps`` of them ``stride`` apart."""

    lower: tuple[int, int]
    """Row and column of the first pixel; below 0 it is outside of the image."""
    steps: tuple[int, int]
    stride: tuple[int, int]


@lru_cache(maxsize=1024)
def swizzled_images_map(
    address: int,
    shape: tuple[int, int, int, int],
    itemsize: int,
    walk: PixelBox,
    box: tuple[int, int],
) -> bytes:
    """A CUtensorMap in im2col mode of contiguous images (images, rows, columns, channels).

    It is read in boxes (pixels, channels). A copy names the pixel that its box begins at and an offset that
    moves all of the walk. In shared memory pixels are as far apart as their channels are wide, under that
    swizzle. What lies outside of an image reads as zero bits. A pixel's bytes are a multiple of 16; first
    and last pixels are up to 128 outside of an image, strides up to 8 and offsets to 255. Raises
    LibraryError.
    """
    _, rows, columns, channels = shape
    pitches = [itemsize * channels * size for size in (1, columns, columns * rows)]
    upper = [
        first + (count - 1) * stride - (size - 1)
        for first, count, stride, size in zip(*walk, shape[1:3], strict=True)
    ]
    return _encoded(
        "cuTensorMapEncodeIm2col",
        _UNSIGNED[itemsize],
        4,
        address,
        (ctypes.c_uint64 * 4)(*reversed(shape)),
        (ctypes.c_uint64 * 3)(*pitches),
        (ctypes.c_int * 2)(*reversed(walk.lower)),
        (ctypes.c_int * 2)(*reversed(upper)),
        box[1],
        box[0],
        (ctypes.c_uint32 * 4)(1, *reversed(walk.stride), 1),
        _INTERLEAVE_NONE,
        _SWIZZLE[box[1] * itemsize],
        _L2_PROMOTION_256B,
        _FILL_ZEROS,
    )


def _batched_map(
    batches: tuple[int, ...],
    address: int,
    shape: tuple[int, ...],
    pitches: tuple[int, ...],
    itemsize: int,
    box: tuple[int, ...],
    *rest: int,
) -> bytes:
    """The map of a matrix or, with ``batches``, of so many matrices so many bytes apart."""
    if batches:
        count, apart = batches
        shape, pitches, box = (count, *shape), (apart, *pitches), (1, *box)
    return _swizzled_map(address, shape, pitches, itemsize, box, *rest)


def _swizzled_map(address: int, *geometry: Any) -> bytes:
    """The map of a matrix at ``address``; ``geometry`` is what :func:`_tiling` takes."""
    front, back = _tiling(*geometry)
    return _encoded("cuTensorMapEncodeTiled", *front, address, *back)


@lru_cache(maxsize=1024)
def _tiling(
    shape: tuple[int, ...],
    pitches: tuple[int, ...],
    itemsize: int,
    box: tuple[int, ...],
    pitch: int = 0,
    promotion: int = _L2_PROMOTION_256B,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The encoder's arguments before and behind the address. The encoder only reads their arrays.

    Sizes are given from the outermost to the innermost, which is contiguous.
    """
    rank = len(shape)
    return (_UNSIGNED[itemsize], rank), (
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(pitches)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        _SWIZZLE[pitch or box[-1] * itemsize],
        promotion,
        _FILL_ZEROS,
    )


_DESCRIPTION = struct.Struct("<8sQ5Q4Q5H4B4h4B")
_TILED, _IM2COL = b"tiledmap", b"im2col__"
_WALK = 8


class MapDescription(NamedTuple):
    """The arguments of an encoder of tensor maps, from the innermost dimension to the outermost."""

    data_type: int
    address: int
    sizes: tuple[int, ...]
    pitches: tuple[int, ...]
    """Bytes from one index of a dimension to the next, without the innermost dimension's."""
    box: tuple[int, ...]
    """In im2col mode the channels and the pixels."""
    swizzle: int
    promotion: int
    walk: tuple[int, ...] = ()
    """In im2col mode the lower corner, the upper corner and the element strides: 2, 2 and 4 numbers."""

    def to_bytes(self) -> bytes:
        """Return as many bytes as a tensor map has."""
        sizes, pitches, box = (
            one + (0,) * (most - len(one))
            for one, most in zip((self.sizes, self.pitches, self.box), (5, 4, 5), strict=True)
        )
        rank = len(self.sizes)
        codes = self.data_type, rank, self.swizzle, self.promotion
        walk = self.walk or (0,) * _WALK
        mark = _IM2COL if self.walk else _TILED
        packed = _DESCRIPTION.pack(mark, self.address, *sizes, *pitches, *box, *codes, *walk)
        return packed.ljust(TENSOR_MAP_BYTES, b"\0")

    @classmethod
    def of(cls, described: bytes) -> MapDescription | None:
        """The description in these bytes, or None where no map was written."""
        mark, address, *numbers = _DESCRIPTION.unpack_from(described)
        if mark not in (_TILED, _IM2COL):
            return None
        data_type, rank, swizzle, promotion, *walk = numbers[14:]
        sizes, pitches, box = numbers[:rank], numbers[5 : 4 + rank], numbers[9 : 9 + rank]
        shape = tuple(sizes), tuple(pitches), tuple(box if mark == _TILED else box[:2])
        return cls(data_type, address, *shape, swizzle, promotion, tuple(walk) if mark == _IM2COL else ())


_describing: ContextVar[bool] = ContextVar("describing", default=False)


@contextmanager
def describing_maps() -> Iterator[None]:
    """Write a :class:`MapDescription` in place of each tensor map. The driver is not needed.

    Maps are cached by their addresses, so describe them for addresses that no device has.
    """
    before = _describing.set(True)
    try:
        yield
    finally:
        _describing.reset(before)


def _encoded(encoder: str, *arguments: Any) -> bytes:
    """The map that this function of the driver writes."""
    if _describing.get():
        data_type, _, address, sizes, pitches, *middle, steps, _, swizzle, promotion, _ = arguments
        box, walk = middle[0] if len(middle) == 1 else middle[2:], ()
        if len(middle) > 1:
            walk = (*middle[0], *middle[1], *steps)
        shape = tuple(sizes), tuple(pitches), tuple(box)
        return MapDescription(data_type, address, *shape, swizzle, promotion, walk).to_bytes()
    space = _Space()
    at = -(-ctypes.addressof(space) // _ALIGNMENT) * _ALIGNMENT
    status = getattr(_driver(), encoder)(at, *arguments)
    if status:
        raise LibraryError(encoder, status)
    return ctypes.string_at(at, TENSOR_MAP_BYTES)
