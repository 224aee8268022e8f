"""Plans that prepare weights: prune, compress, both at once, decompress, pack, prune 4x4 tiles, apply masks.

Results are the caller's memory. The rules of pruning, the formats and the positions of groups with fewer than
two non-zeros: docs/formats.md. W is [M, K], K a multiple of 8.
"""

from __future__ import annotations

from typing import Any, ClassVar, overload

import numpy as np

from ..device.install import import_cupy
from ..device.streams import current_stream_of, launch_on, stream_handle
from ..device.tensors import HOST, TensorView
from ..plan.operands import Views
from ..plan.plan import Plan
from ..vocab import PrepareOp
from ..weights import canonical
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import PackedWeight, Sparse24Weight
from .args import (
    CompressSparse24Args,
    DecompressSparse24Args,
    DequantizeSparse24Args,
    MaskSparse24Args,
    PackSparse24Args,
    PruneCompressSparse24Args,
    PruneQuantizeSparse24Args,
    PruneSparse24Args,
    QuantizeSparse24Args,
    TilePruneSparse24Args,
    UnpackSparse24Args,
)
from .descriptor import (
    NOTHING_FOUND,
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    DequantizeSparse24Descriptor,
    MaskSparse24Descriptor,
    PackSparse24Descriptor,
    PrepareDescriptor,
    PruneCompressSparse24Descriptor,
    PruneQuantizeSparse24Descriptor,
    PruneSparse24Descriptor,
    QuantizeSparse24Descriptor,
    TilePruneSparse24Descriptor,
)
from .kernel_table import ENTRIES


class PreparePlan(Plan):
    """Base of the family's plans: results have the same bits on every device and on the host.

    ``descriptor`` says what is done.
    """

    table = ENTRIES
    descriptor: PrepareDescriptor

    def _made(self, views: Views, suffix: str = "") -> Sparse24Weight:
        values, metadata = views["values" + suffix], views["metadata" + suffix]
        return Sparse24Weight(values, metadata, element=self.descriptor.element, validate=False)

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "layout": self.descriptor.layout_id}


# Status ----------------------------------------------------------------------------------------


class _Reporting(PreparePlan):
    """A plan whose results include a status."""

    def check(self, args: Any, *, stream: Any = None) -> None:
        """Wait for ``stream``, then raise FormatError for the first bad group that the last run found.

        The error has ``row`` and ``group``. The check can't be captured in a CUDA graph, because it reads the
        status back. Runs without a status have nothing to check.
        """
        if not self.descriptor.has_status:
            return
        view = self._check(args)["status"]
        handle = stream_handle(stream, self._home, current_stream_of(self._operands_in(args)))
        status = np.empty(1, np.uint64)
        if self._home == HOST:
            status.view(np.uint8)[...] = view.bits()
        else:
            launch_on(self._home, lambda on: _fetch(view, status, on), handle)
        if int(status[0]) != NOTHING_FOUND:
            at, detail = divmod(int(status[0]), 256)
            packed = self.descriptor.op is PrepareOp.UNPACK
            error = canonical.metadata_error if packed else canonical.crowded_error
            raise error(*divmod(at, self.descriptor.k // 4), detail)


def _fetch(view: TensorView, status: Any, stream: int) -> None:
    runtime = import_cupy().cuda.runtime
    runtime.memcpyAsync(status.ctypes.data, view.address, status.nbytes, runtime.memcpyDeviceToHost, stream)
    runtime.streamSynchronize(stream)


# The plans ----------------------------------------------------------------------------------------


class PruneSparse24Plan(PreparePlan):
    """Keeps the two largest of every group of four, by |value| or by scores; gives matrix, mask, or both."""

    descriptor_type = PruneSparse24Descriptor
    args_types: ClassVar = {PrepareOp.PRUNE: PruneSparse24Args}


class CompressSparse24Plan(_Reporting):
    """Compresses a matrix that is 2:4 already, and checks that it is, on the device.

    A group with more than two non-zeros keeps the first two, and :meth:`check` raises.
    """

    descriptor_type = CompressSparse24Descriptor
    args_types: ClassVar = {PrepareOp.COMPRESS: CompressSparse24Args}

    def weight(self, args: CompressSparse24Args) -> Sparse24Weight:
        """Return the results as a weight that shares their memory; sound once :meth:`check` has passed."""
        return self._made(self._check(args))


class PruneCompressSparse24Plan(PreparePlan):
    """Prunes and compresses in one pass."""

    descriptor_type = PruneCompressSparse24Descriptor
    args_types: ClassVar = {PrepareOp.PRUNE_COMPRESS: PruneCompressSparse24Args}

    def weight(self, args: PruneCompressSparse24Args) -> Sparse24Weight:
        """Return the results as a weight that shares their memory."""
        return self._made(self._check(args))


class DecompressSparse24Plan(PreparePlan):
    """Expands a canonical weight to the dense matrix."""

    descriptor_type = DecompressSparse24Descriptor
    args_types: ClassVar = {PrepareOp.DECOMPRESS: DecompressSparse24Args}


class PackSparse24Plan(_Reporting):
    """Canonical weights to the layout of the sparse tensor core kernels, or back.

    Unpacking checks the metadata on the device; :meth:`check` raises for what it found. Packing has nothing
    to check.
    """

    descriptor_type = PackSparse24Descriptor
    args_types: ClassVar = {PrepareOp.PACK: PackSparse24Args, PrepareOp.UNPACK: UnpackSparse24Args}

    @overload
    def weight(self, args: PackSparse24Args) -> PackedWeight: ...
    @overload
    def weight(self, args: UnpackSparse24Args) -> Sparse24Weight: ...
    def weight(self, args: PackSparse24Args | UnpackSparse24Args) -> PackedWeight | Sparse24Weight:
        """Return the results as a weight that shares their memory; an unpacked one is sound once checked."""
        views, desc = self._check(args), self.descriptor
        if desc.op is PrepareOp.UNPACK:
            return self._made(views)
        return PackedWeight(desc.layout_id, desc.m, desc.k, desc.element, self._home, (views["packed"],))


class TilePruneSparse24Plan(PreparePlan):
    """Transposable 2:4: prunes 4x4 tiles, and compresses W and W^T, in one pass.

    Positions are those of the mask; spare slots take the lowest free positions and hold +0.
    """

    descriptor_type = TilePruneSparse24Descriptor
    args_types: ClassVar = {PrepareOp.TILE_PRUNE: TilePruneSparse24Args}

    def weights(self, args: TilePruneSparse24Args) -> tuple[Sparse24Weight, Sparse24Weight]:
        """Return the results as weights, W [M, K] and W^T [K, M], that share their memory."""
        views = self._check(args)
        return self._made(views), self._made(views, "_t")


class QuantizeSparse24Plan(PreparePlan):
    """Quantizes the rows of a matrix to 8 bits, in one pass. Here values are rounded, alike everywhere."""

    descriptor_type = QuantizeSparse24Descriptor
    args_types: ClassVar = {PrepareOp.QUANTIZE: QuantizeSparse24Args}


class PruneQuantizeSparse24Plan(_Reporting):
    """Prunes and quantizes in one pass, with the bits of Sparse24QuantizedWeight.quantize.

    Values that are 2:4 already are checked; :meth:`check` raises for a group with more than two non-zeros.
    """

    descriptor_type = PruneQuantizeSparse24Descriptor
    args_types: ClassVar = {PrepareOp.PRUNE_QUANTIZE: PruneQuantizeSparse24Args}
    descriptor: PruneQuantizeSparse24Descriptor

    def weight(self, args: PruneQuantizeSparse24Args) -> Sparse24QuantizedWeight:
        """Return the results as a weight that shares their memory; sound once :meth:`check` has passed."""
        views, desc = self._check(args), self.descriptor
        return Sparse24QuantizedWeight(
            *(views[name] for name in ("values", "metadata", "scales")),
            element=desc.element,
            stored=desc.stored,
            group=desc.group,
            scale_element=desc.scale_element,
            validate=False,
        )


class DequantizeSparse24Plan(PreparePlan):
    """Gives the kept values of a quantized weight, as they are multiplied."""

    descriptor_type = DequantizeSparse24Descriptor
    args_types: ClassVar = {PrepareOp.DEQUANTIZE: DequantizeSparse24Args}

    def weight(self, args: DequantizeSparse24Args) -> Sparse24Weight:
        """Return the result as a weight that shares its memory, and the given weight's metadata."""
        views = self._check(args)
        return Sparse24Weight(
            views["dequantized"], views["metadata"], element=self.descriptor.element, validate=False
        )


class MaskSparse24Plan(PreparePlan):
    """Sets to zero what a mask has no one for: how gradients of pruned weights are pruned."""

    descriptor_type = MaskSparse24Descriptor
    args_types: ClassVar = {PrepareOp.MASK: MaskSparse24Args}
