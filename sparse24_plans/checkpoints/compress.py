"""``compress_checkpoint`` prunes and compresses a safetensors file or a folder of shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..device.devices import home_of, resolve
from ..device.files import StrPath
from ..device.install import import_cupy
from ..device.log import SELECT
from ..device.tensors import HOST, Device, TensorView
from ..errors import InvalidProblemError, UnsupportedError
from ..prepare.descriptor import PruneCompressSparse24Descriptor
from ..prepare.plan import PruneCompressSparse24Plan
from ..vocab import ElementKind, ElementLike, ScaleRule, checked_flag
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import Sparse24Weight
from .compressed_form import CompressedForm, compressed_form
from .folder import DTYPES, ModelReader, check_destination
from .layers import CALIBRATED, Layer, dense_blocks, write_weight
from .rewrite import Rewrite
from .safetensors_file import SafetensorsWriter, shown
from .selection import Selection, dense_lines

COMPRESSED_DTYPES = tuple(DTYPES[kind] for kind in (ElementKind.F32, ElementKind.F16, ElementKind.BF16))
"""The safetensors types of the tensors that are pruned."""
SPARSE_ALREADY = "2:4 already"
"""The reason in the report on a compressed tensor that lost nothing."""


@dataclass(frozen=True, slots=True)
class TensorReport:
    """The report of :func:`compress_checkpoint` on one tensor.

    ``shape`` is the dense tensor's, and ``element`` its safetensors type in lower case. ``reason`` says why a
    tensor was copied; for a compressed one it is None, or ``"2:4 already"``: nothing was pruned.
    ``kept_energy`` is sum(kept^2) / sum(all^2) in float64: 1.0 if nothing was lost, NaN if the tensor has NaN
    or Inf, None if it was copied or not read. ``quantization_error`` is ||W' - W|| / ||W|| in float64, of the
    pruned W and the dequantized W'; None if it was not quantized, or calibration did it. Sizes are in bytes.
    """

    name: str
    shape: tuple[int, ...]
    element: str
    action: Literal["compressed", "copied"]
    reason: str | None
    bytes_before: int
    bytes_after: int
    kept_energy: float | None = None
    quantization_error: float | None = None


@dataclass(frozen=True)
class CalibratedWeights:
    """Weights [M, K] that a ``method`` has pruned to 2:4: for each tensor's name, a function that reads it.

    They are dense arrays, or quantized weights, whose values and scales are written as they are.
    """

    method: str
    read: Mapping[str, Callable[[], np.ndarray[Any, Any] | Sparse24QuantizedWeight]]


class CompressionReport(list[TensorReport]):
    """The result of :func:`compress_checkpoint`: a report on each tensor. Its ``str`` is a summary."""

    @property
    def sparse_share(self) -> float:
        """The share of the dense model's bytes that is 2:4 in the new one."""
        sparse = sum(one.bytes_before for one in self if one.action == "compressed")
        return sparse / max(sum(one.bytes_before for one in self), 1)

    @property
    def left_dense(self) -> list[TensorReport]:
        """The reports on matrices, or stacks of them, that were copied."""
        return [one for one in self if one.action == "copied" and len(one.shape) > 1]

    def __str__(self) -> str:
        lines = dense_lines((one.name, one.bytes_before, one.reason) for one in self.left_dense)
        done = [one for one in self if one.action == "compressed"]
        known = sum(one.reason == SPARSE_ALREADY for one in done)
        lines.append(
            f"{len(done)} tensors compressed, {known} of them 2:4 already: "
            f"{self.sparse_share:.1%} of the model's bytes is 2:4"
        )
        return "\n".join(lines)


def compress_checkpoint(
    source: StrPath,
    destination: StrPath,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    element: ElementLike | None = None,
    weights: ElementLike | None = None,
    group: int | None = None,
    scale_rule: ScaleRule | str | None = None,
    device: int | str | None = None,
    overwrite: bool = True,
    dry_run: bool = False,
    calibrated: CalibratedWeights | None = None,
    on_tensor: Callable[[TensorReport], None] | None = None,
) -> CompressionReport:
    """Prune and compress the weights of a dense checkpoint, copy everything else, and report on each tensor.

    It compresses 2-D tensors of F32, F16 and BF16 whose K is a multiple of 8, and keeps the two largest of
    every four. Matrices [in, out], of transformers' Conv1D (GPT-2), are found by biases or ``config.json``.
    Memory stays bounded by a block of rows, or one such matrix. A failed run leaves nothing behind.

    Parameters
    ----------
    source, destination : paths
        A safetensors file, and the file to write. Or a folder with one, or with shards and their index, and a
        new or empty folder, which gets shards of the same names, the index, and copies of other files and
        small subfolders. A warning names what is not copied.
    include, exclude : sequences of str
        Shell patterns (``fnmatch``) of tensor names. If ``include`` has any, nothing else is compressed.
        ``exclude`` wins. Embeddings, heads, routers and adapters are copied unless ``include`` matches them,
        and so are stacks [E, out, in] of experts.
    element : ElementKind, optional
        ``fp8_e4m3`` or ``s8``, for layers that quantize their input too: kept values are quantized, with a
        scale for each row in ``NAME_scale``. By default they keep their element.
    weights, group, scale_rule : optional
        ``s4``, ``s8`` or ``fp8_e4m3``, for layers that keep their input: kept values are quantized as by
        ``Sparse24QuantizedWeight.quantize``, those of F32 as bf16. ``group`` columns of a row share a scale
        (by default 128) that ``scale_rule`` chooses (``least_squares``).
    device : int or str, optional
        The device that compresses: a CUDA ordinal or ``"host"``. None is the current CUDA device, or the
        host if there is no GPU of compute capability 8.0. The file is the same, byte for byte.
    overwrite, dry_run : bool
        Whether an existing file is replaced; otherwise it is an error. Whether to write nothing, read the
        headers alone and report what a run would do, without ``kept_energy``.
    calibrated : CalibratedWeights, optional
        Weights to write instead of the source's, whose other matrices are copied.
    on_tensor : callable, optional
        It is called with each tensor's report, in the order of the source's data.

    Raises InvalidProblemError for wrong arguments, and a source that is compressed or has a name that this
    would write; FormatError for an invalid source; StorageError; UnsupportedError or BackendUnavailableError.
    """
    form = compressed_form(element, weights, group, scale_rule)
    place = HOST if checked_flag("dry_run", dry_run) else _working_place(device)
    selection = Selection(include, exclude, COMPRESSED_DTYPES)
    check_destination(source, destination, overwrite=overwrite)
    with ModelReader(source) as model:
        run = _Compression(model, selection, place, calibrated, on_tensor, form)
        return CompressionReport(run.foreseen() if dry_run else run.run(destination))


class _Compression(Rewrite[TensorReport]):
    """Prunes and compresses the weights that ``selection`` takes, on ``place``, block by block."""

    report_type, action = TensorReport, "compressed"

    def __init__(
        self,
        model: ModelReader,
        selection: Selection,
        place: Device,
        calibrated: CalibratedWeights | None,
        on_tensor: Callable[[TensorReport], None] | None,
        form: CompressedForm,
    ) -> None:
        self._place, self._calibrated, self._form = place, calibrated, form
        layers, reasons = selection.split(model)
        for layer in layers:
            if layer.stack and not form.takes_stacks:
                raise InvalidProblemError(
                    f"include: expected matrices to quantize, got a stack, {layer.name}"
                )
        if calibrated is not None:
            reasons |= {one.name: "not calibrated" for one in layers if one.name not in calibrated.read}
            options = {CALIBRATED: calibrated.method}
            layers = [replace(one, options=options) for one in layers if one.name in calibrated.read]
        super().__init__(model, form, layers, reasons, on_tensor)

    def write_layer(self, layer: Layer, writer: SafetensorsWriter) -> TensorReport:
        given = None if self._calibrated is None else self._calibrated.read[layer.name]()
        if isinstance(given, Sparse24QuantizedWeight):
            return self._write_quantized(layer, given, writer)
        kept = total = missed = 0.0
        lost, quantized = 0, False
        for rows, dense in dense_blocks(self.model, layer):
            source = dense if given is None else given[rows].astype(dense.dtype)
            weight = _prune_compress(source, self._place)
            written = self._form.write_block(writer, layer.name, weight)
            if written is not None:
                quantized, missed = True, missed + _energy(weight.values, written)
            kept += _energy(weight.values)
            total += _energy(dense)
            lost += int(np.count_nonzero(dense)) - int(np.count_nonzero(weight.values))
        error = (missed / kept if kept else missed) ** 0.5 if quantized else None
        if lost == 0:
            whole = kept if math.isnan(kept) else 1.0
            return self.report_layer(
                layer, reason=SPARSE_ALREADY, kept_energy=whole, quantization_error=error
            )
        # Rounding may exceed 1; min() keeps NaN, which stands first.
        share = min(kept / total, 1.0) if total else 1.0
        return self.report_layer(layer, kept_energy=share, quantization_error=error)

    def _write_quantized(
        self, layer: Layer, weight: Sparse24QuantizedWeight, writer: SafetensorsWriter
    ) -> TensorReport:
        """Write a weight that calibration has quantized."""
        wanted = self._form.as_written(layer)
        if any(getattr(weight, one) != getattr(wanted, one) for one in ("element", "m", "k", "quantization")):
            raise InvalidProblemError(
                f"calibrated: expected {wanted.element}[{wanted.m}, {wanted.k}], {wanted.quantization}, for "
                f"{shown(layer.name)}, got {weight!r}"
            )
        write_weight(writer, layer.name, weight)
        return self.report_layer(layer)

    def foreseen(self) -> list[TensorReport]:
        """The reports that a run would make. Raises the errors of ``run`` about names."""
        self.check_names()
        for info in (info for shard in self.model.shards for info in shard.reader.tensors.values()):
            layer = self.layers.get(info.name)
            self.report(self.report_copy(info) if layer is None else self.report_layer(layer))
        return self.reports


def _working_place(device: int | str | None) -> Device:
    """The device to compress on. A default device that can't serve gives way to the host."""
    place = home_of(resolve(device))
    if place != HOST:
        probe = PruneCompressSparse24Descriptor(m=1, k=8, element=ElementKind.F32)
        try:
            PruneCompressSparse24Plan.select(probe, device=place.ordinal)
        except UnsupportedError as error:
            if device is not None:
                raise
            SELECT.warning("compressing on the host: %s", error)
            return HOST
    return place


def _prune_compress(dense: np.ndarray[Any, Any], place: Device) -> Sparse24Weight:
    """A block of rows compressed on ``place``, in host memory."""
    if place == HOST:
        return Sparse24Weight.prune_compress(dense)
    cupy, element = import_cupy(), TensorView.of(dense).element
    with cupy.cuda.Device(place.ordinal):
        source = cupy.asarray(dense.view(element.bits_dtype))
    return Sparse24Weight.prune_compress(source, element=element).to("host")


def _energy(array: np.ndarray[Any, Any], other: np.ndarray[Any, Any] | None = None) -> float:
    """The sum of squares of an array, or of its differences from another one."""
    with np.errstate(all="ignore"):  # NaN and Inf give NaN, which is reported
        wide = array.astype(np.float64).reshape(-1)
        if other is not None:
            wide -= other.reshape(-1)
        return float(np.dot(wide, wide))
