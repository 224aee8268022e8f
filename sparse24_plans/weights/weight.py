"""2:4 weights: the canonical form, the kernel-native packed form, and how to make them.

The canonical form is ``values[M, K/2]`` of the element and ``metadata[M, K/8]`` uint16, one byte per group
of four (docs/formats.md). It lives in host or device memory and never changes once made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import Self

from ..device.adapters import Unmoving
from ..device.devices import DeviceLike, home_of, resolve
from ..device.install import import_cupy
from ..device.streams import on_stream
from ..device.tensors import HOST, Device, TensorView, check_device, wrong
from ..errors import BufferTooSmallError, InvalidProblemError, UnsupportedError, check_type
from ..vocab import (
    CANONICAL_LAYOUT,
    INT64_MAX,
    ElementKind,
    ElementLike,
    checked_flag,
    element_kind,
    integer,
)
from . import canonical, device_code, host_code, threads
from .packed_layouts import Quantization, buffer_bytes, canonical_forms


def _dense_view(dense: Any, element: ElementLike | None) -> TensorView:
    view = TensorView.of(dense, element=element, argument="dense")
    if len(view.shape) != 2 or view.shape[1] % 8:
        raise InvalidProblemError(
            f"dense: expected shape [M, K] with K a multiple of 8, got {list(view.shape)}"
        )
    return view


class CanonicalWeight(Unmoving):
    """Base of weights in canonical form, which kernels of the host read as they are."""

    __slots__ = ()

    m: int
    k: int
    element: ElementKind
    device: Device
    quantization: Quantization | None
    """How the values are stored; None: as they are."""
    views: tuple[TensorView, ...]
    """The weight's memory: values, metadata and, if quantized, scales."""

    @property
    def metadata(self) -> Any:
        """The metadata uint16 [M, K/8] as a NumPy or CuPy array, not copied."""
        return self.views[1].bits()

    @property
    def nbytes(self) -> int:
        """Bytes of the views together."""
        return sum(view.nbytes_spanned for view in self.views)

    def to(self, device: DeviceLike, *, stream: Any = None) -> Self:
        """The weight on a device, named as for ``Plan.select``, or the weight itself if it is there already.

        ``stream`` belongs to the GPU that the weight comes from, or goes to if it comes from the host.

        Raises InvalidProblemError for a wrong device's name, BackendUnavailableError for an absent device.
        """
        if device is None:
            raise InvalidProblemError("device: expected 'host', 'cuda', a CUDA ordinal or a device, got None")
        target = home_of(resolve(device))
        if target == self.device:
            return self
        with on_stream(target if self.device == HOST else self.device, stream):
            return self._of(copy_to(view, target) for view in self.views)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A weight in memory of its own, on the same device."""
        return self._of(view.owned_copy() for view in self.views)

    def _of(self, parts: Iterable[Any]) -> Self:
        """A weight like this one of other memory, which holds valid metadata."""
        raise NotImplementedError

    def _check_memory(self) -> None:
        """Raise InvalidProblemError unless the views are contiguous memory of one device."""
        for name, view in zip(("values", "metadata", "scales"), self.views, strict=False):
            if view.device != self.device:
                raise InvalidProblemError(f"{name}: expected memory on {self.device}, got {view.device}")
            if not view.is_contiguous:
                raise InvalidProblemError(f"{name}: expected contiguous memory, got {view!r}")


class Sparse24Weight(CanonicalWeight):
    """A 2:4 weight W[M, K] in canonical form.

    ``values`` [M, K/2] and ``metadata`` [M, K/8] uint16 may be any tensors on one device; both must be
    contiguous. ``element`` names the type where ``values`` comes as raw bits. ``validate=False`` skips
    the scan of the metadata, which on a GPU waits for the device. ``m``, ``k``, ``element`` and ``device``
    are W's; ``values_view`` and ``metadata_view`` its memory as TensorViews.

    Raises InvalidProblemError for wrong shapes, types or devices; FormatError, with row and group, for
    metadata whose positions do not increase or that has stray bits.
    """

    __slots__ = ("device", "element", "k", "m", "metadata_view", "values_view", "views")

    quantization = None

    def __init__(
        self, values: Any, metadata: Any, *, element: ElementLike | None = None, validate: bool = True
    ) -> None:
        v = TensorView.of(values, element=element, argument="values")
        says_its_element = element is not None or isinstance(values, TensorView)
        if v.element is ElementKind.U16 and not says_its_element:
            raise InvalidProblemError(
                "element: expected one for values of uint16, which may be the bits of f16 or bf16: pass "
                "element='f16' or element='bf16', or element='u16' for integers, which no product takes"
            )
        d = TensorView.of(metadata, element=ElementKind.U16, argument="metadata")
        if len(v.shape) != 2 or v.shape[1] % 4:
            raise InvalidProblemError(
                f"values: expected shape [M, K/2] with K a multiple of 8, got {list(v.shape)}"
            )
        m, k = v.shape[0], 2 * v.shape[1]
        if d.shape != (m, k // 8):
            raise InvalidProblemError(
                f"metadata: expected shape [M, K/8] = {[m, k // 8]}, got {list(d.shape)}"
            )
        self.m, self.k, self.element, self.device = m, k, v.element, v.device
        self.values_view, self.metadata_view = self.views = v, d
        self._check_memory()
        if checked_flag("validate", validate):
            self.validate()

    @property
    def values(self) -> Any:
        """The kept values [M, K/2] as a NumPy or CuPy array, not copied."""
        return self.values_view.array()

    # A GPU's work and memory belong to the ``stream``; see ``plan.run``. If no kernel of ``prepare`` serves
    # the operands, CuPy's kernels do, with the same bits.

    def validate(self, *, stream: Any = None) -> None:
        """Check every metadata byte. Raises FormatError with the first bad row and group.

        On a GPU this waits for ``stream``; the host takes None alone.
        """
        with on_stream(self.device, stream):
            canonical.check_metadata(self.metadata)

    @classmethod
    def compress(
        cls, dense: Any, *, element: ElementLike | None = None, stream: Any = None
    ) -> Sparse24Weight:
        """Compress ``dense`` [M, K], which is 2:4 already.

        ``-0.0`` counts as zero. Raises FormatError, with row and group, where a group of four has more
        than two non-zeros: nothing is dropped. On a GPU the work is done on ``stream``, and waited for; the
        host takes None alone.
        """
        view = _dense_view(dense, element)
        with on_stream(view.device, stream):
            if made := view.device != HOST and device_code.short_forms().compress(view):
                return cls(*made, element=view.element, validate=False)
            return cls._build(
                view, lambda bits, rows, by: canonical.occupancy_codes(bits, view.element, rows.start, by)
            )

    @classmethod
    def prune_compress(
        cls, dense: Any, *, scores: Any = None, element: ElementLike | None = None, stream: Any = None
    ) -> Sparse24Weight:
        """Keep the two largest of every group of four of ``dense`` [M, K] and compress.

        Values are ranked by |value|, or by signed ``scores`` [M, K] of any element, or NumPy's float64. Ties
        keep the lower index; all NaNs rank highest, and equal. On a GPU the work is queued on ``stream``; the
        host takes None alone.
        """
        view = _dense_view(dense, element)
        with on_stream(view.device, stream):
            if view.device != HOST:
                ranks = None if scores is None else _scores_view(view, scores)
                if made := device_code.short_forms().prune_compress(view, ranks):
                    return cls(*made, element=view.element, validate=False)
            return cls._build(view, ranker(view, scores))

    @classmethod
    def _build(cls, view: TensorView, codes_of: canonical.CodesOf) -> Sparse24Weight:
        bits = view.bits()
        xp = canonical.array_module(bits)
        m, k = view.shape
        values = xp.empty((m, k // 2), bits.dtype)
        metadata = xp.empty((m, k // 8), np.uint16)
        canonical.compress(bits, codes_of, values, metadata, host_code.best(m * k))
        return cls(values, metadata, element=view.element, validate=False)

    def decompress(self, *, stream: Any = None) -> Any:
        """The dense matrix [M, K], on the weight's device: zeros at the pruned positions.

        On a GPU the work is queued on ``stream``; the host takes None alone.
        """
        with on_stream(self.device, stream):
            dense = None if self.device == HOST else device_code.short_forms().decompress(self)
            return (dense or self._expanded()).array()

    def _expanded(self) -> TensorView:
        values = self.values_view.bits()
        dense = canonical.array_module(values).empty((self.m, self.k), values.dtype)
        canonical.expand(values, self.metadata, dense, host_code.best(self.m * self.k))
        return TensorView.of(dense, element=self.element)

    def _of(self, parts: Iterable[Any]) -> Sparse24Weight:
        return Sparse24Weight(*parts, element=self.element, validate=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold the bits. Raises UnsupportedError for a weight in device memory."""
        parts = portable(self.values_view), portable(self.metadata_view)
        return _restored_weight, (*parts, self.element.value)

    def __repr__(self) -> str:
        return f"Sparse24Weight({self.element}[{self.m}, {self.k}], {self.device})"


def check_on_host(what: str, device: Device) -> None:
    """Raise UnsupportedError if ``what`` is asked for a weight in device memory."""
    if device != HOST:
        raise UnsupportedError(
            f"{what}: expected a weight in host memory, got one on {device}; call weight.to('host')"
        )


def portable(view: TensorView) -> Any:
    """A NumPy copy of the bits, to be pickled. Raises UnsupportedError for device memory."""
    check_on_host("pickle", view.device)
    return np.array(view.bits(), order="C")


def _restored_weight(values: Any, metadata: Any, element: str) -> Sparse24Weight:
    return Sparse24Weight(values, metadata, element=element)


def copy_to(view: TensorView, target: Device) -> Any:
    """The bits of a view as an array in the host's or a GPU's memory."""
    bits = view.bits()
    if target == HOST:
        return bits.get()
    cupy = import_cupy()
    with cupy.cuda.Device(target.ordinal):
        return cupy.array(bits)


def ranker(view: TensorView, scores: Any) -> canonical.CodesOf:
    """Gives the codes of the two largest of every group of ``view``, by |value| or by signed scores."""
    if scores is None:
        return lambda bits, rows, by: canonical.magnitude_codes(bits, view.element, by)
    if isinstance(scores, np.ndarray) and scores.dtype == np.float64:  # no element, but NumPy's default
        _check_scores(view, scores.shape, HOST)
        return lambda bits, rows, by: canonical.rank_codes(canonical.float64_keys(scores[rows]), by)
    ranked = _scores_view(view, scores)
    ranks = ranked.bits()
    return lambda bits, rows, by: canonical.rank_codes(canonical.value_keys(ranks[rows], ranked.element), by)


def _scores_view(view: TensorView, scores: Any) -> TensorView:
    by = TensorView.of(scores, argument="scores")
    _check_scores(view, by.shape, by.device)
    return by


def _check_scores(view: TensorView, shape: tuple[int, ...], device: Device) -> None:
    if shape != view.shape or device != view.device:
        raise InvalidProblemError(
            f"scores: expected shape {list(view.shape)} on {view.device}, got {list(shape)} on {device}"
        )


def prune(dense: Any, *, scores: Any = None, element: ElementLike | None = None, stream: Any = None) -> Any:
    """A copy of ``dense`` [M, K] with all but the two largest of every group of four set to zero.

    Rule and ``stream`` are those of :meth:`Sparse24Weight.prune_compress`. Returns a NumPy or CuPy array of
    the element's type on the device of ``dense``. Raises InvalidProblemError for anything but a matrix with K
    a multiple of 8.
    """
    view = _dense_view(dense, element)
    if view.device != HOST:
        weight = Sparse24Weight.prune_compress(view, scores=scores, stream=stream)
        return weight.decompress(stream=stream)
    with on_stream(HOST, stream):
        bits, codes_of = view.bits(), ranker(view, scores)
        pruned = np.empty(view.shape, bits.dtype)
        by = host_code.best(bits.size)
        threads.for_each(
            lambda rows: by.keep(bits[rows], codes_of(bits[rows], rows, by), out=pruned[rows]),
            canonical.row_steps(view.shape[0], view.shape[1], True),
        )
    return TensorView.of(pruned, element=view.element).array()


class Packed(Unmoving):
    """Base of the dataclasses of packed operands, whose memory is ``buffers`` on one device."""

    __slots__ = ()

    device: Device
    buffers: tuple[TensorView, ...]

    def _check_place(self) -> None:
        """Raise InvalidProblemError for a wrong device, or for buffers that are no tuple of views."""
        check_device("device", self.device)
        if type(self.buffers) is not tuple or any(type(one) is not TensorView for one in self.buffers):
            raise wrong("buffers", "a tuple of TensorViews", self.buffers)

    def _check_buffers(self, least: Iterable[int]) -> None:
        """Raise an error unless the buffers are contiguous, on the device, and have at least these bytes."""
        for view, needed in zip(self.buffers, least, strict=True):
            if view.device != self.device or not view.is_contiguous:
                raise InvalidProblemError(
                    f"buffers: expected contiguous memory on {self.device}, got {view!r}"
                )
            if view.nbytes_spanned < needed:
                raise BufferTooSmallError("buffers", needed, view.nbytes_spanned)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An operand in memory of its own, on the same device."""
        buffers = tuple(view.owned_copy() for view in self.buffers)
        return replace(self, buffers=buffers)  # type: ignore[type-var]

    def _portable_parts(self) -> list[tuple[Any, str]]:
        """The buffers' bits and elements, to be pickled. Raises UnsupportedError for device memory."""
        return [(portable(view), view.element.value) for view in self.buffers]


def restored_buffers(parts: list[tuple[Any, str]]) -> tuple[TensorView, ...]:
    """The buffers, in host memory, of a packed operand that was pickled."""
    return tuple(TensorView.of(bits, element=kind) for bits, kind in parts)


@dataclass(frozen=True, slots=True)
class PackedWeight(Packed):
    """A weight in the layout that a kernel reads. Made by ``plan.pack``; good for every n.

    ``layout_id`` names the layout; kernels of one architecture and element share it. ``buffers`` are its
    memory, in the layout's order; ``m``, ``k``, ``element``, ``device`` and ``quantization`` are the
    weight's. Kernels that read the canonical layout need no packing, so nothing is copied for them.

    Raises InvalidProblemError for buffers that don't fit the layout, BufferTooSmallError for short ones.
    """

    layout_id: str
    m: int
    k: int
    element: ElementKind
    device: Device
    buffers: tuple[TensorView, ...]
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        self._check_fields()
        wanted = buffer_bytes(self.layout_id, self.m, self.k, self.element, self.quantization)
        if wanted is not None and len(self.buffers) != len(wanted):
            raise InvalidProblemError(
                f"buffers: expected {len(wanted)} for layout {self.layout_id!r}, got {len(self.buffers)}"
            )
        self._check_buffers(wanted or (0,) * len(self.buffers))
        if self.layout_id == CANONICAL_LAYOUT:
            object.__setattr__(self, "buffers", self._in_canonical_form())

    def _in_canonical_form(self) -> tuple[TensorView, ...]:
        """The buffers as matrices, which kernels of the host index, whatever shape the caller gave them."""
        forms = canonical_forms(self.m, self.k, self.element, self.quantization)
        return tuple(
            view
            if (view.element, view.shape) == (kind, shape)
            else TensorView(view.address, shape, kind, view.device, readonly=view.readonly, owner=view)
            for view, (kind, shape) in zip(self.buffers, forms, strict=True)
        )

    def _check_fields(self) -> None:
        if not isinstance(self.layout_id, str):
            raise wrong("layout_id", "a layout's name", self.layout_id)
        for name in ("m", "k"):
            size = integer(getattr(self, name))
            if size is None or not 0 <= size <= INT64_MAX:
                raise wrong(name, "an integer from 0 to 2^63 - 1", getattr(self, name))
            object.__setattr__(self, name, size)
        if self.k % 8:
            raise InvalidProblemError(f"packed: expected K a multiple of 8, got [{self.m}, {self.k}]")
        object.__setattr__(self, "element", element_kind(self.element))
        if self.quantization is not None and type(self.quantization) is not Quantization:
            raise wrong("quantization", "a Quantization or None", self.quantization)
        self._check_place()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold the bits. Raises UnsupportedError for a weight in device memory."""
        fields = (self.layout_id, self.m, self.k, self.element.value)
        return _restored_packed, (*fields, self._portable_parts(), self.quantization)

    @classmethod
    def canonical(cls, weight: CanonicalWeight) -> PackedWeight:
        """The canonical weight under its layout's name, sharing its memory."""
        check_type("weight", weight, CanonicalWeight, "Sparse24Weight")
        fields = (weight.m, weight.k, weight.element, weight.device, weight.views)
        return cls(CANONICAL_LAYOUT, *fields, weight.quantization)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers together."""
        return sum(view.nbytes_spanned for view in self.buffers)


def _restored_packed(
    layout: str,
    m: int,
    k: int,
    element: str,
    parts: list[tuple[Any, str]],
    quantization: Quantization | None = None,
) -> PackedWeight:
    return PackedWeight(layout, m, k, ElementKind(element), HOST, restored_buffers(parts), quantization)
