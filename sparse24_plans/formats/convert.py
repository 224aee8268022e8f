"""2:4 weights in other libraries' formats: in and out.

:data:`FORMATS` is the table. A foreign weight is a few named tensors, its parts; :func:`from_foreign` makes a
canonical weight of them and :func:`to_foreign` the parts of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..device.tensors import HOST, Device, TensorView, import_cupy
from ..errors import FormatError, InvalidProblemError
from ..vocab import ElementKind
from ..weights import canonical
from ..weights.weight import Sparse24Weight
from .foreign import ALL_ELEMENTS, BLOBS, FORMATS, ForeignFormat
from .parts import Incoming, Outgoing, weight_shape

__all__ = ["FORMATS", "ForeignFormat", "from_foreign", "from_product", "to_foreign"]


def from_foreign(
    name: str,
    parts: Mapping[str, Any],
    *,
    element: ElementKind | str | None = None,
    shape: Sequence[int] | None = None,
    tile_k: int | None = None,
    word_bytes: int | None = None,
) -> Sparse24Weight:
    """A canonical weight from the parts of a foreign one.

    Positions are normalised: unsorted ones are sorted, those of zeros (which some writers leave
    uninitialised) replaced by the lowest free ones. The dense matrix is that of the foreign weight, bit for
    bit; padding is dropped unread.

    Parameters
    ----------
    name : str
        A format's name in :data:`FORMATS`.
    parts : mapping of str to tensor
        The tensors, named as in the format's ``parts``; all on one device, of any framework.
    element : ElementKind or str, optional
        The type of the values, where they come as raw bits.
    shape : (int, int), optional
        M and K, where the values don't say: ``cusparselt_sm80`` needs it, ``torch_tile`` takes the padded
        shape without it.
    tile_k : int, optional
        ``cutlass_sm90``: the tile K of the mainloop; 128 by default.
    word_bytes : int, optional
        ``tilelang``: bytes of a metadata word, 1, 2 or 4; 2 by default.

    Raises
    ------
    InvalidProblemError
        An unknown format; a missing or unknown part or option; a wrong type, shape, size or device.
    UnsupportedError
        An element that the format doesn't hold.
    FormatError
        Metadata that can't be meant, with row and group.
    """
    known = _format(name)
    parts = _check_parts(known, parts)
    _check_options(known, shape=shape, tile_k=tile_k, word_bytes=word_bytes)
    first = TensorView.of(parts[known.parts[0]], element=element, argument=known.parts[0])
    m, k = _incoming_sizes(known, first, shape)
    what = weight_shape(m, k, first.element, tile_k, word_bytes)
    known.check(what)
    with _on(first.device):
        values, codes = known.decode(Incoming(what, known.layout(what), parts, first.device))
        return _canonical(values, codes, what.element)


def to_foreign(
    name: str, weight: Sparse24Weight, *, tile_k: int | None = None, word_bytes: int | None = None
) -> dict[str, Any]:
    """The parts of ``weight`` in a foreign format, as new NumPy or CuPy arrays on its device.

    Parameters
    ----------
    name : str
        A format's name in :data:`FORMATS`.
    weight : Sparse24Weight
        Its positions go out as they are, but float32 in the 1:2 formats.
    tile_k : int, optional
        ``cutlass_sm90``: the tile K of the mainloop that will read it; 128 by default.
    word_bytes : int, optional
        ``tilelang``: bytes of a metadata word, 1, 2 or 4; 2 by default.

    Raises
    ------
    InvalidProblemError
        An unknown format or option, or a shape that the format doesn't hold.
    UnsupportedError
        An element that the format doesn't hold.
    FormatError
        A weight that the format can't express, with row and group: two non-zeros in a pair of float32 where
        the format is 1:2; a weight whose transpose isn't 2:4 for ``torch_tile``.
    """
    known = _format(name)
    if not isinstance(weight, Sparse24Weight):
        raise InvalidProblemError(f"weight: expected Sparse24Weight, got {type(weight).__name__}")
    _check_options(known, tile_k=tile_k, word_bytes=word_bytes)
    what = weight_shape(weight.m, weight.k, weight.element, tile_k, word_bytes)
    known.check(what)
    with _on(weight.device):
        codes = canonical.from_metadata(weight.metadata).reshape(weight.m, weight.k // 4)
        return known.encode(Outgoing(what, weight.values_view.bits(), codes))


def from_product(
    blob: Any,
    shape: Sequence[int],
    multiply: Callable[[Any], Any],
    *,
    element: ElementKind | str | None = None,
) -> Sparse24Weight:
    """A canonical weight from a compressed matrix whose metadata only its own library can read.

    It serves cuSPARSELt on every architecture: the values [M, K/2] lie at the start of the blob, row-major,
    and the library itself says where they belong. ``multiply`` is called once, with a copy of the blob whose
    values are 1 and 2 (first and second of their group), and returns the dense matrix that it stands for: its
    product with the identity matrix. So the weight's own values, NaN and Inf among them, come through as
    bits.

    Parameters
    ----------
    blob : tensor
        The compressed matrix, contiguous, of the element's type. Copied with its own ``clone()`` or
        ``copy()``.
    shape : (int, int)
        M and K.
    multiply : callable
        ``multiply(blob)`` -> tensor [M, K], of a floating type or the element's. For PyTorch:
        ``lambda blob: torch._cslt_sparse_mm(blob, torch.eye(K, dtype=blob.dtype, device=blob.device))``.
    element : ElementKind or str, optional
        The type of the values, where they come as raw bits.

    Raises
    ------
    InvalidProblemError
        A shape, size, device or type that is wrong, of the blob or of the product.
    FormatError
        A product that isn't a 2:4 matrix of 1 and 2, with row and group: the values don't lie where expected.
    """
    view = TensorView.of(blob, element=element, argument="blob")
    m, k = _two_sizes(shape)
    if k % 8 or view.element not in ALL_ELEMENTS:
        raise InvalidProblemError(f"shape: expected K a multiple of 8, got {[m, k]} of {view.element}")
    if not view.is_contiguous or view.nbytes_spanned < m * k // 2 * view.element.itemsize:
        raise InvalidProblemError(f"blob: expected {m * k // 2} values or more, contiguous, got {view!r}")
    probe = blob.clone() if hasattr(blob, "clone") else blob.copy()
    with _on(view.device):
        bits = TensorView.of(probe, element=element, argument="blob").bits().reshape(-1)
        marks = np.array([1, 2]).astype(view.element.dtype).view(view.element.bits_dtype)
        values = view.bits().reshape(-1)[: m * k // 2].reshape(m, k // 2)
        for slot in range(2):
            bits[: m * k // 2][slot::2] = marks[slot]
        codes = _codes_of_product(multiply(probe), m, k, view.device)
        return _canonical(values, codes, view.element)


# Checks -------------------------------------------------------------------------------------------


def _format(name: str) -> ForeignFormat:
    if name not in FORMATS:
        raise InvalidProblemError(f"name: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def _check_parts(known: ForeignFormat, parts: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(parts, Mapping):
        raise InvalidProblemError(
            f"parts: expected a mapping of names to tensors, got {type(parts).__name__}"
        )
    given = {name: part for name, part in parts.items() if part is not None}
    if unknown := given.keys() - set(known.parts):
        raise InvalidProblemError(f"parts: expected {', '.join(known.parts)}, got {sorted(unknown)[0]!r}")
    for name in known.parts:
        if name not in given and name not in known.optional:
            raise InvalidProblemError(f"parts: {known.name} needs {name!r}, got {sorted(given)}")
    return {name: given[name] for name in known.parts if name in given}


def _check_options(known: ForeignFormat, **given: object) -> None:
    for name, value in given.items():
        if value is not None and name not in known.options:
            raise InvalidProblemError(f"{name}: {known.name} takes no such option, got {value!r}")


def _incoming_sizes(known: ForeignFormat, first: TensorView, shape: Sequence[int] | None) -> tuple[int, int]:
    if shape is not None:
        return _two_sizes(shape)
    if len(first.shape) == 2 and first.shape[1] % 4 == 0 and known.name not in BLOBS:
        return first.shape[0], 2 * first.shape[1]
    needed = "shape=(M, K)" if known.name in BLOBS else "shape [M, K/2]"
    raise InvalidProblemError(
        f"{known.parts[0]}: expected {needed} with K a multiple of 8, got a tensor {list(first.shape)}"
    )


def _two_sizes(shape: Any) -> tuple[int, int]:
    try:
        m, k = (int(size) for size in shape)
    except (TypeError, ValueError, OverflowError):
        raise InvalidProblemError(f"shape: expected two sizes, M and K, got {shape!r}") from None
    if m < 0 or k < 0 or m * k >= 2**62:
        raise InvalidProblemError(f"shape: expected M * K from 0 to below 2^62, got {[m, k]}")
    return m, k


def _on(device: Device) -> AbstractContextManager[Any]:
    """CuPy allocates on its current device: make that the operands' own."""
    if device == HOST:
        return nullcontext()
    guard: AbstractContextManager[Any] = import_cupy().cuda.Device(device.ordinal)
    return guard


# Positions ----------------------------------------------------------------------------------------


def _canonical(values: Any, codes: Any, element: ElementKind) -> Sparse24Weight:
    """The weight of bits [m, k/2] and codes uint8 [m, k/4] of any positions."""
    xp = canonical.array_module(values)
    m, width = values.shape
    kept = xp.empty((m, width), values.dtype)
    metadata = xp.empty((m, width // 4), np.uint16)
    for rows in canonical.row_steps(m, 2 * width, xp is np):
        flat = xp.ascontiguousarray(codes[rows]).reshape(-1)
        part, moved = canonical.normalise(values[rows], flat, element, rows.start)
        kept[rows] = part
        metadata[rows] = canonical.to_metadata(moved, part.shape[0], 2 * width)
    return Sparse24Weight(kept, metadata, element=element, validate=False)


def _codes_of_product(product: Any, m: int, k: int, device: Device) -> Any:
    """Codes [m, k/4] from a dense matrix in which 1 stands for a first value, 2 for a second, 3 for both."""
    view = TensorView.of(product, argument="product")
    if view.shape != (m, k) or view.device != device:
        raise InvalidProblemError(
            f"product: expected shape {[m, k]} on {device}, got {list(view.shape)} on {view.device}"
        )
    marks = _small_integers(view)
    xp = canonical.array_module(marks)
    groups = marks.reshape(m, k // 4, 4)
    firsts, seconds = groups & np.uint8(1), groups >> np.uint8(1)
    bad = (firsts.sum(axis=2) != 1) | (seconds.sum(axis=2) != 1)
    if bool(bad.any()):
        row, group = divmod(int(bad.argmax()), k // 4)
        raise FormatError("product: expected one 1 and one 2 in every group of 4", row=row, group=group)
    return (firsts.argmax(axis=2) | seconds.argmax(axis=2) << 2).astype(xp.uint8)


def _small_integers(view: TensorView) -> Any:
    """Elements 0, 1, 2 and 3 as uint8 [m, k]; 255, which has too many bits to pass, for all others."""
    if view.element not in (*ALL_ELEMENTS, ElementKind.I32):
        raise InvalidProblemError(f"product: expected a number type, got {view.element}")
    bits = view.bits()
    xp = canonical.array_module(bits)
    marks = xp.full(bits.shape, 255, np.uint8)
    known = np.array([0, 1, 2, 3]).astype(view.element.dtype).view(view.element.bits_dtype)
    for value, pattern in enumerate(known):
        marks[bits == pattern] = value
    if view.element.unit_roundoff:
        marks[bits == np.array(-0.0).astype(view.element.dtype).view(view.element.bits_dtype)] = 0
    return marks
