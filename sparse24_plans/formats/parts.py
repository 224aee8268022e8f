"""Until ``checkpoints/convert.py`` calls ``FORMATS[name].shape_of(m, k, element, **options)``."""

from __future__ import annotations

from ..vocab import ElementKind
from .base import VALUES as VALUES
from .base import WeightShape as WeightShape
from .table import FORMATS


class _Shape(WeightShape):
    @property
    def tile_k(self) -> int:
        return int(self.options["tile_k"])

    @property
    def word_bytes(self) -> int:
        return int(self.options["word_bytes"])


def weight_shape(
    m: int, k: int, element: ElementKind, tile_k: int | None, word_bytes: int | None
) -> WeightShape:
    tile = FORMATS["cutlass_sm90"].settle({"tile_k": tile_k})
    word = FORMATS["tilelang"].settle({"word_bytes": word_bytes})
    return _Shape(m, k, element, {**tile, **word})
