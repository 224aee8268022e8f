"""Conversions of 2:4 weights from and to other libraries' formats.

A foreign weight is a few named tensors, its parts. :func:`from_foreign` makes a canonical weight of parts,
and :func:`to_foreign` the parts of a weight. :data:`FORMATS` and :data:`QUANTIZED_FORMATS` are the tables of
formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from ..device.devices import current_on
from ..device.tensors import HOST, TensorView
from ..errors import InvalidProblemError, UnsupportedError, shown
from ..vocab import ElementLike
from ..weights import canonical
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import Sparse24Weight
from .base import ForeignFormat, Format, Incoming, Outgoing, WeightShape
from .positions import canonical_weight
from .quantized import QuantizedFormat, Stored
from .table import FORMATS, QUANTIZED_FORMATS, find_format, format_names

__all__ = ["FORMATS", "QUANTIZED_FORMATS", "from_foreign", "to_foreign"]

_Quantized = Literal["marlin_24", "pack_quantized", "gptq", "awq"]


@overload
def from_foreign(
    name: _Quantized,
    parts: Mapping[str, Any],
    *,
    element: ElementLike | None = None,
    **options: Any,
) -> Sparse24QuantizedWeight: ...
@overload
def from_foreign(
    name: str,
    parts: Mapping[str, Any],
    *,
    element: ElementLike | None = None,
    shape: Sequence[int] | None = None,
    **options: Any,
) -> Sparse24Weight: ...
def from_foreign(
    name: str,
    parts: Mapping[str, Any],
    *,
    element: ElementLike | None = None,
    shape: Sequence[int] | None = None,
    **options: Any,
) -> Sparse24Weight | Sparse24QuantizedWeight:
    """A canonical weight from the parts of a foreign one, quantized from a quantized one.

    Unsorted positions are sorted. Positions of zeros, which some writers leave uninitialised, become the
    lowest free ones. The dense matrix is the foreign weight's, bit for bit. Padding is not read.

    Stored values, scales and positions of a quantized weight stay as they are, in host memory. Values of 4
    bits with zero points other than 8 become s8: the difference of value and zero point.

    Parameters
    ----------
    name : str
        A format's name in :data:`FORMATS` or :data:`QUANTIZED_FORMATS`, or one that ``register_format`` was
        given.
    parts : mapping of str to tensor
        Tensors of any framework on one device, by the names in the format's ``parts``. The part ``shape`` of
        ``compressed_tensors`` may also be a list or a tuple.
    element : ElementKind or str, optional
        The type of the values, if they are raw bits. For quantized weights: ``f16`` or ``bf16``, the type of
        W when it is multiplied, by default that of the scales; scales of another type become f32.
    shape : (int, int), optional
        M and K. ``cusparselt_sm80`` and ``cusparselt_sm90`` need them; ``torch_tile`` takes the padded shape
        without them.
    tile_k : int, optional
        ``cutlass_sm90``: the tile K of the mainloop; 128 by default.
    word_bytes : int, optional
        ``tilelang``: bytes of a metadata word, 1, 2 or 4; 2 by default.
    bits : int, optional
        Quantized weights but ``awq``: bits of a stored value, 4 (default) or 8.
    group : int, optional
        Quantized weights: columns that share a scale, 32, 64 or 128, or 0 for the whole row; by default what
        the number of scales tells.
    version : int, optional
        ``gptq``: 1 (default) if zero points are stored less one, 2 if as they are (``gptq_v2``).

    Raises
    ------
    InvalidProblemError
        An unknown format; a missing or unknown part or option; a wrong type, shape, size or device.
    UnsupportedError
        An element that the format doesn't hold; columns in another order than that of their groups of scales;
        quantized weights in device memory.
    FormatError
        Invalid metadata, or a quantized matrix that isn't 2:4, with row and group.
    """
    known = _format(name)
    parts = _check_parts(known, parts)
    settled = known.settle({"shape": shape, **options})
    if isinstance(known, QuantizedFormat):
        return known.decode(Stored(parts, settled, element))
    return _read(known, parts, element, settled)


def _read(
    known: ForeignFormat, parts: Mapping[str, Any], element: ElementLike | None, settled: dict[str, Any]
) -> Sparse24Weight:
    """The weight of checked parts and options."""
    sizes = settled.pop("shape", None)
    first = TensorView.of(parts[known.parts[0]], element=element, argument=known.parts[0])
    m, k = known.sizes(first) if sizes is None else sizes
    what = WeightShape(m, k, first.element, settled)
    known.check(what)
    with current_on(first.device):
        values, codes = known.decode(Incoming(what, known.layout(what), parts, first.device))
        return canonical_weight(values, codes, what.element)


def to_foreign(name: str, weight: Sparse24Weight | Sparse24QuantizedWeight, **options: Any) -> dict[str, Any]:
    """The parts of ``weight`` in a foreign format, as new NumPy or CuPy arrays on its device.

    Parameters
    ----------
    name : str
        A format's name in :data:`FORMATS`, or ``marlin_24``.
    weight : Sparse24Weight, or Sparse24QuantizedWeight for ``marlin_24``
        The weight. Its positions are kept, but for float32 in 1:2 formats.
    tile_k : int, optional
        ``cutlass_sm90``: the tile K of the mainloop that will read it; 128 by default.
    word_bytes : int, optional
        ``tilelang``: bytes of a metadata word, 1, 2 or 4; 2 by default.

    Raises
    ------
    InvalidProblemError
        An unknown format or option, or a shape that the format doesn't hold.
    UnsupportedError
        An element or a quantization that the format doesn't hold; a format that is only read.
    FormatError
        A weight that the format can't hold, with row and group: two non-zeros in a pair of float32 for a 1:2
        format; a weight whose transpose isn't 2:4 for ``torch_tile``.
    """
    known = _format(name)
    if isinstance(known, QuantizedFormat):
        if not isinstance(weight, Sparse24QuantizedWeight):
            raise InvalidProblemError(
                f"weight: expected Sparse24QuantizedWeight, got {type(weight).__name__}"
            )
        if weight.device != HOST:
            raise UnsupportedError(f"weight: expected memory of the host, got {weight.device}")
        _refuse(options, *options)
        return known.encode(weight)
    if not isinstance(weight, Sparse24Weight):
        raise InvalidProblemError(f"weight: expected Sparse24Weight, got {type(weight).__name__}")
    _refuse(options, "shape")
    what = known.shape_of(weight.m, weight.k, weight.element, **options)
    known.check(what)
    with current_on(weight.device):
        codes = canonical.from_metadata(weight.metadata).reshape(weight.m, weight.k // 4)
        return known.encode(Outgoing(what, weight.values_view.bits(), codes))


def _refuse(options: Mapping[str, Any], *names: str) -> None:
    """Raise InvalidProblemError for options that the weight itself determines."""
    for name in names:
        if options.get(name) is not None:
            raise InvalidProblemError(
                f"{name}: to_foreign takes no such option, the weight has its own; got {shown(options[name])}"
            )


def _format(name: object) -> ForeignFormat | QuantizedFormat:
    known: ForeignFormat | QuantizedFormat | None = None
    if isinstance(name, str):
        known = QUANTIZED_FORMATS.get(name) or find_format(name)
    if known is None:
        names = ", ".join((*format_names(), *QUANTIZED_FORMATS))
        raise InvalidProblemError(f"name: expected one of {names}, got {shown(name)}")
    return known


def _check_parts(known: Format, parts: object) -> dict[str, Any]:
    """The given parts, in the format's order."""
    if not isinstance(parts, Mapping):
        raise InvalidProblemError(
            f"parts: expected a mapping of names to tensors, got {type(parts).__name__}"
        )
    given = {name: part for name, part in parts.items() if part is not None}
    for name, part in given.items():
        if not isinstance(name, str) or name not in known.parts:
            raise InvalidProblemError(f"parts: expected {', '.join(known.parts)}, got {shown(name)}")
        if isinstance(part, np.ma.MaskedArray):  # NumPy would export the hidden cells
            raise InvalidProblemError(f"{name}: expected plain memory, got a masked array")
    for name in known.parts:
        if name not in given and name not in known.optional:
            raise InvalidProblemError(f"parts: {known.name} needs {name!r}, got {sorted(given)}")
    return {name: given[name] for name in known.parts if name in given}
