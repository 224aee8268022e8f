"""Plans that prepare weights on the host, by the array code of weights/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...device.streams import Launch
from ...device.tensors import HOST, TensorView
from ...plan.kernel import Choice
from ...plan.kernel import Kernel as BaseKernel
from ...plan.operands import Views
from ...vocab import ElementKind, MaskLayout, PrepareOp
from ...weights import canonical, groups, host_code, packing, threads, tiles
from ...weights.packed_layouts import layout_of
from ...weights.weight import PackedWeight, Sparse24Weight
from ..descriptor import NOTHING_FOUND, MaskSparse24Descriptor, PrepareDescriptor, TilePruneSparse24Descriptor

Array = np.ndarray[Any, Any]


def write_status(status: TensorView, k: int, found: tuple[int, int, int] | None) -> None:
    """Write what a kernel reports: row, group and detail of the first bad group, or nothing."""
    row, group, detail = found or (0, 0, 0)
    word = (row * (k // 4) + group) << 8 | detail if found else NOTHING_FOUND
    status.bits()[...] = np.array([word], np.uint64).view(np.uint8)


_CHOOSES = {
    PrepareOp.PRUNE: "largest",
    PrepareOp.PRUNE_COMPRESS: "largest",
    PrepareOp.COMPRESS: "covering",
}
_MOVES = {
    PrepareOp.PRUNE: "keep",
    PrepareOp.PRUNE_COMPRESS: "gather",
    PrepareOp.COMPRESS: "gather",
    PrepareOp.DECOMPRESS: "scatter",
}
"""Functions of host_code.HostCode that an op calls, on keys and on cells. Other ops use NumPy."""


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
        }[self.descriptor.op]

    def _compiled_code(self) -> host_code.HostCode:
        """The compiled host code, ready before ``run``."""
        desc = self.descriptor
        if desc.op not in _MOVES:
            return groups
        code = host_code.best(desc.m * desc.k)
        code.ready(desc.element.itemsize, _MOVES[desc.op])
        if desc.op in _CHOOSES:
            ranked: ElementKind = getattr(desc, "scores", None) or desc.element
            code.ready(ranked.itemsize, _CHOOSES[desc.op])
        return code

    def launcher(self, views: Views, workspace: int) -> Launch:
        return lambda stream: self._act(views)

    def _on_rows(self, work: Callable[[slice], None]) -> None:
        """Run ``work`` on blocks of rows, on all cores. Different blocks write different memory."""
        threads.for_each(work, canonical.row_steps(self.descriptor.m, self.descriptor.k, True))

    def _codes(self, bits: Array, views: Views, rows: slice) -> Array:
        """Return the codes [groups] of the kept cells."""
        if "scores" in views:
            scores = views["scores"]
            codes: Array = canonical.rank_codes(
                canonical.value_keys(scores.bits()[rows], scores.element), self._code
            )
        else:
            codes = canonical.magnitude_codes(bits, self.descriptor.element, self._code)
        return codes

    def _prune(self, views: Views) -> None:
        dense = views["dense"].bits()

        def prune(rows: slice) -> None:
            codes = self._codes(dense[rows], views, rows)
            if "mask" in views:
                mask = views["mask"].bits()[rows]
                mask[...] = groups.mask_bytes(codes).reshape(mask.shape)
            if "pruned" in views:
                self._code.keep(dense[rows], codes, out=views["pruned"].bits()[rows])

        self._on_rows(prune)

    def _prune_compress(self, views: Views) -> None:
        dense = views["dense"].bits()
        self._on_rows(
            lambda rows: self._write(views, rows, dense[rows], self._codes(dense[rows], views, rows))
        )

    def _compress(self, views: Views) -> None:
        desc, dense = self.descriptor, views["dense"].bits()
        crowded: list[tuple[int, int, int]] = []

        def compress(rows: slice) -> None:
            codes, found = canonical.covering_codes(dense[rows], desc.element, self._code)
            if found is not None:
                crowded.append((rows.start + found[0], *found[1:]))
            self._write(views, rows, dense[rows], codes)

        self._on_rows(compress)
        write_status(views["status"], desc.k, min(crowded, default=None))

    def _write(self, views: Views, rows: slice, bits: Array, codes: Array) -> None:
        self._code.gather(bits, codes, out=views["values"].bits()[rows])
        views["metadata"].bits()[rows] = canonical.to_metadata(codes, bits.shape[0], self.descriptor.k)

    def _decompress(self, views: Views) -> None:
        values, metadata = views["values"].bits(), views["metadata"].bits()

        def decompress(rows: slice) -> None:
            codes = canonical.from_metadata(metadata[rows])
            self._code.scatter(values[rows], codes, out=views["dense"].bits()[rows])

        self._on_rows(decompress)

    def _tile_prune(self, views: Views) -> None:
        desc, bits = self.descriptor, views["dense"].bits()
        assert isinstance(desc, TilePruneSparse24Descriptor)
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
