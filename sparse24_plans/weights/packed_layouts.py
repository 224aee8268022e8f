"""Memory layouts of weights: their names, tiles and sizes. docs/formats.md has the canonical one."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UnsupportedError
from ..vocab import (
    CANONICAL_LAYOUT,
    CUSPARSELT_LAYOUT,
    DENSE_F32_LAYOUT,
    TILE64X64_LAYOUT,
    TILE64X64_PARTS_LAYOUT,
    TILE64X128_LAYOUT,
    TILE64X256_LAYOUT,
    ElementKind,
)

TILE_M = 64
"""Rows of a tile."""
VALUE_BYTES = 8192
"""Bytes of a tile's values; its metadata follows."""
ROW_BYTES = VALUE_BYTES // TILE_M


class TileLayout(NamedTuple):
    """A layout of tiles."""

    layout_id: str
    itemsize: int
    elements: tuple[ElementKind, ...]
    swizzled: bool = True
    """Whether values are swizzled, for tensor cores that read shared memory, or else in fragment order."""

    @property
    def tile_k(self) -> int:
        """Dense columns of a tile."""
        return 2 * ROW_BYTES // self.itemsize

    @property
    def tile_bytes(self) -> int:
        return VALUE_BYTES + TILE_M * self.tile_k // 8

    @property
    def shared_bytes(self) -> int:
        """Bytes between tiles in shared memory, where a swizzle's pattern begins at multiples of 1024."""
        return -(-self.tile_bytes // 1024) * 1024 if self.swizzled else self.tile_bytes

    def packed_shape(self, m: int, k: int) -> tuple[int, int, int]:
        """Shape [Mt, Kt, tile_bytes] of the buffer of a weight [m, k]."""
        return -(-m // TILE_M), -(-k // self.tile_k), self.tile_bytes


TILES_16BIT = TileLayout(TILE64X128_LAYOUT, 2, (ElementKind.F16, ElementKind.BF16))
TILES_8BIT = TileLayout(TILE64X256_LAYOUT, 1, (ElementKind.S8, ElementKind.FP8_E4M3))
TILES_32BIT = TileLayout(TILE64X64_LAYOUT, 4, (ElementKind.F32,), swizzled=False)
TILES_IN_PARTS = TileLayout(TILE64X64_PARTS_LAYOUT, 4, (ElementKind.F32,))
TILE_LAYOUTS = (TILES_16BIT, TILES_8BIT, TILES_32BIT, TILES_IN_PARTS)


def layout_of(element: ElementKind, argument: str = "weight") -> TileLayout:
    """The default layout of an element. Raises UnsupportedError for an element without a layout."""
    for layout in TILE_LAYOUTS:
        if element in layout.elements:
            return layout
    raise UnsupportedError(
        f"{argument}: no tile layout holds {element}, only f32, f16, bf16, s8 and fp8_e4m3"
    )


def layout_called(layout_id: str) -> TileLayout:
    """The tile layout of this name."""
    return next(layout for layout in TILE_LAYOUTS if layout.layout_id == layout_id)


def buffer_bytes(layout_id: str, m: int, k: int, element: ElementKind) -> tuple[int, ...] | None:
    """Least bytes of each buffer of a weight [m, k]; None for a layout that isn't this package's."""
    kept = m * k // 2 * element.itemsize
    if layout_id == CANONICAL_LAYOUT:
        return kept, m * k // 4
    if layout_id == DENSE_F32_LAYOUT:
        return (4 * m * k,)
    if layout_id == CUSPARSELT_LAYOUT:  # the library may ask for more
        return (kept + m * k // 8,)
    for layout in TILE_LAYOUTS:
        if layout_id == layout.layout_id:
            down, across, nbytes = layout.packed_shape(m, k)
            return (down * across * nbytes,)
    return None
