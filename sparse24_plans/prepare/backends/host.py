"""Plans that prepare weights on the host, by the array code of weights/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...arithmetic.epilogue import encoded
from ...device.streams import Launch
from ...device.subnormals import check_subnormals
from ...device.tensors import HOST, TensorView
from ...plan.kernel import Choice
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Views
from ...vocab import ElementKind, MaskLayout, PrepareOp, TileRule
from ...weights import canonical, groups, host_code, packing, threads, tiles
from ...weights.packed_layouts import layout_of
from ...weights.quantize import quantized, scales_of
from ...weights.quantized_weight import stored_values, write_dequantized
from ...weights.weight import PackedWeight, Sparse24Weight, ranker
from ..descriptor import (
    NOTHING_FOUND,
    DequantizeSparse24Descriptor,
    MaskSparse24Descriptor,
    PrepareDescriptor,
    PruneQuantizeSparse24Descriptor,
    QuantizeSparse24Descriptor,
    TilePruneSparse24Descriptor,
)

Array = np.ndarray[Any, Any]


def write_status(status: TensorView, k: int, found: tuple[int, int, int] | None) -> None:
    """Write what a kernel reports: row, group and detail of the first bad group, or nothing."""
    row, group, detail = found or (0, 0, 0)
    word = (row * (k // 4) + group) << 8 | detail if found else NOTHING_FOUND
    status.bits()[...] = np.array([word], np.uint64).view(np.uint8)


_CALLS = {
    PrepareOp.PRUNE: ("keep", "largest"),
    PrepareOp.PRUNE_COMPRESS: ("gather", "largest"),
    PrepareOp.PRUNE_QUANTIZE: ("gather", "largest"),
    PrepareOp.COMPRESS: ("gather", "covering"),
    PrepareOp.DECOMPRESS: ("scatter",),
}
"""Functions of host_code.HostCode that an op calls: on cells, and on keys. Other ops use NumPy."""


class Kernel(BaseKernel[PrepareDescriptor]):
    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self._code = self._compiled_code()
        self.details = self._code.title()
        self._act: Callable[[Views], None] = {
            PrepareOp.PRUNE: self._prune,
            PrepareOp.COMPRESS: self._compress,
            PrepareOp.PRUNE_COMPRESS: self._prune_compress,
            PrepareOp.DECOMPRESS: self._decompress,
            PrepareOp.PACK: self._pack,
            PrepareOp.UNPACK: self._unpack,
            PrepareOp.TILE_PRUNE: self._tile_prune,
            PrepareOp.MASK: self._mask,
            PrepareOp.QUANTIZE: self._quantize,
            PrepareOp.PRUNE_QUANTIZE: self._prune_quantize,
            PrepareOp.DEQUANTIZE: self._dequantize,
        }[self.descriptor.op]

    def _compiled_code(self) -> host_code.HostCode:
        """The compiled host code, ready before ``run``."""
        desc = self.descriptor
        if desc.op not in _CALLS:
            return groups
        code, (on_cells, *on_keys) = host_code.best(desc.m * desc.k), _CALLS[desc.op]
        if getattr(desc, "sparse", False):
            on_keys = ["covering"]
        dense: ElementKind = getattr(desc, "dense_element", desc.element)
        ranked: ElementKind = getattr(desc, "scores", None) or dense
        code.ready(dense.itemsize, on_cells)
        code.ready(ranked.itemsize, *on_keys)
        return code

    def launcher(self, views: Views, workspace: int) -> Launch:
        return lambda stream: self._act(views)

    def _prune(self, views: Views) -> None:
        dense, codes_of = views["dense"].bits(), ranker(views["dense"], views.get("scores"))

        def prune(rows: slice) -> None:
            codes = codes_of(dense[rows], rows, self._code)
            if "mask" in views:
                mask = views["mask"].bits()[rows]
                mask[...] = groups.mask_bytes(codes).reshape(mask.shape)
            if "pruned" in views:
                self._code.keep(dense[rows], codes, out=views["pruned"].bits()[rows])

        threads.for_each(prune, canonical.row_steps(self.descriptor.m, self.descriptor.k, True))

    def _prune_compress(self, views: Views) -> None:
        self._write(views, ranker(views["dense"], views.get("scores")))

    def _compress(self, views: Views) -> None:
        self._checked(views, self.descriptor.element, lambda codes_of: self._write(views, codes_of))

    def _checked(
        self, views: Views, element: ElementKind, write: Callable[[canonical.CodesOf], None]
    ) -> None:
        """Write results with the codes that cover the non-zeros, and report the first crowded group."""
        crowded: list[tuple[int, int, int]] = []

        def codes_of(bits: Array, rows: slice, by: host_code.HostCode) -> Any:
            codes, found = canonical.covering_codes(bits, element, by)
            if found is not None:
                crowded.append((rows.start + found[0], *found[1:]))
            return codes

        write(codes_of)
        write_status(views["status"], self.descriptor.k, min(crowded, default=None))

    def _write(self, views: Views, codes_of: canonical.CodesOf) -> None:
        dense, values, metadata = (views[name].bits() for name in ("dense", "values", "metadata"))
        canonical.compress(dense, codes_of, values, metadata, self._code)

    def _decompress(self, views: Views) -> None:
        values, metadata, dense = (views[name].bits() for name in ("values", "metadata", "dense"))
        canonical.expand(values, metadata, dense, self._code)

    def _tile_prune(self, views: Views) -> None:
        desc, bits = self.descriptor, views["dense"].bits()
        assert isinstance(desc, TilePruneSparse24Descriptor)
        if desc.rule is TileRule.OPTIMAL:  # it adds; the other rules compare bits
            check_subnormals()
        masks = tiles.choose(bits, desc.element, desc.rule)
        keep = tiles.kept(masks)
        for suffix, cells, kept in (("", bits, keep), ("_t", bits.T, keep.T)):
            values, codes = tiles.compress(cells, kept)
            views["values" + suffix].bits()[...] = values
            views["metadata" + suffix].bits()[...] = canonical.to_metadata(codes, *cells.shape)
        views["mask"].bits()[...] = tiles.to_bytes(masks)

    def _mask(self, views: Views) -> None:
        desc, bits = self.descriptor, views["dense"].bits()
        assert isinstance(desc, MaskSparse24Descriptor)
        mask = views["mask"].bits()
        if desc.layout is MaskLayout.TILES:
            keep = tiles.kept(tiles.from_bytes(mask))
        else:
            keep = np.unpackbits(mask, axis=1, bitorder="little").astype(bool)
        views["masked"].bits()[...] = np.where(keep, bits, bits.dtype.type(0))

    def _quantize(self, views: Views) -> None:
        desc = self.descriptor
        assert isinstance(desc, QuantizeSparse24Descriptor)
        check_subnormals()
        x, scale = views["x"].array(), views["scale"].array()
        bits = views["quantized"].bits()

        def quantize(rows: slice) -> None:
            wide = x[rows].astype(np.float32)
            by = scale.reshape(1, 1) if desc.static_scale else scales_of(wide, desc.out_element)
            bits[rows] = quantized(wide, by, desc.out_element).view(np.uint8)
            if not desc.static_scale:
                scale[rows] = encoded(by[:, 0], ElementKind.F32).view(np.float32)

        threads.for_each(quantize, canonical.row_steps(desc.m, desc.k, True))

    def _prune_quantize(self, views: Views) -> None:
        desc = self.descriptor
        assert isinstance(desc, PruneQuantizeSparse24Descriptor)
        check_subnormals()
        if desc.sparse:
            self._checked(views, desc.dense_element, lambda codes_of: self._write_stored(views, codes_of))
        else:
            self._write_stored(views, ranker(views["dense"], views.get("scores")))

    def _write_stored(self, views: Views, codes_of: canonical.CodesOf) -> None:
        desc = self.descriptor
        assert isinstance(desc, PruneQuantizeSparse24Descriptor)
        dense, values, metadata, scales = (
            views[name].bits() for name in ("dense", "values", "metadata", "scales")
        )

        def fill(rows: slice) -> None:
            cells = dense[rows]
            codes = codes_of(cells, rows, self._code)
            kept = canonical.gather(cells, codes, by=self._code)
            found = stored_values(kept, desc.dense_element, desc.element, desc.quantization, desc.rule)
            for part, bits in zip(found, (values, scales), strict=True):
                bits[rows] = part.view(bits.dtype)
            metadata[rows] = canonical.to_metadata(codes, *cells.shape)

        threads.for_each(fill, canonical.row_steps(desc.m, desc.k, True))

    def _dequantize(self, views: Views) -> None:
        desc = self.descriptor
        assert isinstance(desc, DequantizeSparse24Descriptor)
        check_subnormals()
        out = views["dequantized"].bits()
        write_dequantized(views["values"], views["scales"], desc.quantization, desc.element, out)

    def _pack(self, views: Views) -> None:
        weight = Sparse24Weight(
            views["values"], views["metadata"], element=self.descriptor.element, validate=False
        )
        views["packed"].bits()[...] = packing.pack(weight).buffers[0].bits()

    def _unpack(self, views: Views) -> None:
        desc = self.descriptor
        layout, tiles = layout_of(desc.element), views["packed"]
        packed = PackedWeight(layout.layout_id, desc.m, desc.k, desc.element, HOST, (tiles,))
        values, metadata = packing.unpack_tiles(layout, tiles.bits(), packed)
        views["values"].bits()[...] = values
        views["metadata"].bits()[...] = metadata
        write_status(views["status"], desc.k, canonical.first_invalid(metadata))
