"""Memory layouts of weights: their names, tiles and sizes. docs/formats.md has the canonical one."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..vocab import (
    CANONICAL_LAYOUT,
    CUSPARSELT_LAYOUT,
    DENSE_F32_LAYOUT,
    FP8,
    TILE64X64_LAYOUT,
    TILE64X64_PARTS_LAYOUT,
    TILE64X128_FP8_LAYOUT,
    TILE64X128_LAYOUT,
    TILE64X128_S4_LAYOUT,
    TILE64X128_S8_LAYOUT,
    TILE64X256_LAYOUT,
    ElementKind,
)

TILE_M = 64
"""Rows of a tile."""
VALUE_BYTES = 8192
"""Bytes of a tile's values; its metadata follows."""
ROW_BYTES = VALUE_BYTES // TILE_M


class Quantization(NamedTuple):
    """How a quantized weight stores its values: W = element(f32(stored) * f32(scale))."""

    element: ElementKind
    """Type of the stored values: ``s4``, ``s8`` or ``fp8_e4m3``."""
    group: int
    """Adjacent columns of a row of W that share a scale; 0: all of the row's."""
    scale_element: ElementKind
    """Type of the scales."""

    @property
    def problem(self) -> dict[str, Any]:
        """The fields of GemmSparse24Descriptor by their names."""
        return {
            "weight_element": self.element,
            "weight_group": self.group,
            "weight_scale_element": self.scale_element,
        }

    def scales_of_a_row(self, k: int) -> int:
        """Number of scales of a row of k columns."""
        return -(-k // self.group) if self.group else 1

    def value_bytes(self, m: int, k: int) -> int:
        """Bytes of the kept values [m, k/2]."""
        return m * k // 2 * (4 if self.element is ElementKind.S4 else 8) // 8

    def scale_bytes(self, m: int, k: int) -> int:
        """Bytes of the scales of a weight [m, k]."""
        return m * self.scales_of_a_row(k) * self.scale_element.itemsize

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of Sparse24QuantizedWeight by their names, as JSON holds them."""
        return {
            "stored": self.element.value,
            "group": self.group,
            "scale_element": self.scale_element.value,
        }

    def __str__(self) -> str:
        width = f"groups of {self.group}" if self.group else "rows"
        return f"{self.element} with {self.scale_element} scales of {width}"


def memory_element(stored: ElementKind) -> ElementKind:
    """The element of the memory that holds stored values: uint8 for two values of ``s4``."""
    return ElementKind.U8 if stored is ElementKind.S4 else stored


def stored_width(k: int, by: Quantization) -> int:
    """Cells of a row of stored values, for k columns."""
    return k // 4 if by.element is ElementKind.S4 else k // 2


def canonical_forms(
    m: int, k: int, element: ElementKind, quantization: Quantization | None
) -> tuple[tuple[ElementKind, tuple[int, int]], ...]:
    """Element and shape of each buffer of a canonical weight [m, k]."""
    metadata = ElementKind.U16, (m, k // 8)
    if quantization is None:
        return (element, (m, k // 2)), metadata
    values = memory_element(quantization.element), (m, stored_width(k, quantization))
    return values, metadata, (quantization.scale_element, (m, quantization.scales_of_a_row(k)))


class TileLayout(NamedTuple):
    """A layout of tiles."""

    layout_id: str
    itemsize: int
    elements: tuple[ElementKind, ...]
    swizzled: bool = True
    """Whether values are swizzled, for tensor cores that read shared memory, or in fragment order."""
    quantization: Quantization | None = None
    """How the weights store their values, if they are quantized."""

    @property
    def tile_k(self) -> int:
        """Dense columns of a tile."""
        return 2 * ROW_BYTES // self.itemsize

    @property
    def tile_bytes(self) -> int:
        if self.quantization is not None:
            return sum(quantized_parts(self.quantization))
        return VALUE_BYTES + TILE_M * self.tile_k // 8

    @property
    def shared_bytes(self) -> int:
        """Bytes between tiles in shared memory, where a swizzle's pattern begins at multiples of 1024."""
        return -(-self.tile_bytes // 1024) * 1024 if self.swizzled else self.tile_bytes

    def packed_shape(self, m: int, k: int) -> tuple[int, int, int]:
        """Shape [Mt, Kt, tile_bytes] of the buffer of a weight [m, k]."""
        return -(-m // TILE_M), -(-k // self.tile_k), self.tile_bytes


TILES_16BIT = TileLayout(TILE64X128_LAYOUT, 2, (ElementKind.F16, ElementKind.BF16))
TILES_8BIT = TileLayout(TILE64X256_LAYOUT, 1, (ElementKind.S8, *FP8))
TILES_32BIT = TileLayout(TILE64X64_LAYOUT, 4, (ElementKind.F32,), swizzled=False)
TILES_IN_PARTS = TileLayout(TILE64X64_PARTS_LAYOUT, 4, (ElementKind.F32,))
TILE_LAYOUTS = (TILES_16BIT, TILES_8BIT, TILES_32BIT, TILES_IN_PARTS)


QUANTIZED_LAYOUTS = {
    ElementKind.S4: TILE64X128_S4_LAYOUT,
    ElementKind.S8: TILE64X128_S8_LAYOUT,
    ElementKind.FP8_E4M3: TILE64X128_FP8_LAYOUT,
}
"""The layouts of quantized weights by what they store. Their tiles are those of 16-bit elements."""
_SCALED_COLUMNS = 128
"""Most columns of a row of a tile that share a scale: a tile holds the scales of its own columns."""


def quantized_parts(by: Quantization) -> tuple[int, int, int]:
    """Bytes of the values, the metadata and the scales in a tile of a quantized weight."""
    metadata = TILES_16BIT.tile_bytes - VALUE_BYTES
    return (
        by.value_bytes(TILE_M, TILES_16BIT.tile_k),
        metadata,
        TILE_M * scales_of_a_tile_row(by) * by.scale_element.itemsize,
    )


def quantized_tiles(by: Quantization) -> TileLayout:
    """The layout of a quantized weight: tiles as large as those of 16-bit elements."""
    return TILES_16BIT._replace(layout_id=QUANTIZED_LAYOUTS[by.element], swizzled=False, quantization=by)


def scales_of_a_tile_row(by: Quantization) -> int:
    """Number of scales of a row of a tile of a quantized weight."""
    return TILES_16BIT.tile_k // (by.group or _SCALED_COLUMNS)


def layout_of(element: ElementKind, argument: str = "weight") -> TileLayout:
    """The default layout of an element. Raises UnsupportedError for an element without a layout."""
    for layout in TILE_LAYOUTS:
        if element in layout.elements:
            return layout
    raise UnsupportedError(
        f"{argument}: no tile layout holds {element}, only f32, f16, bf16, s8, fp8_e4m3 and fp8_e5m2"
    )


def layout_called(layout_id: str, quantization: Quantization | None = None) -> TileLayout:
    """The tile layout of this name, for a quantized weight its own."""
    if quantization is not None:
        return quantized_tiles(quantization)
    return next(layout for layout in TILE_LAYOUTS if layout.layout_id == layout_id)


def buffer_bytes(
    layout_id: str, m: int, k: int, element: ElementKind, quantization: Quantization | None = None
) -> tuple[int, ...] | None:
    """Least bytes of each buffer of a weight [m, k]; None for a layout that isn't this package's."""
    if layout_id == CANONICAL_LAYOUT:
        forms = canonical_forms(m, k, element, quantization)
        return tuple(rows * width * kind.itemsize for kind, (rows, width) in forms)
    if layout_id == DENSE_F32_LAYOUT:
        return (4 * m * k,)
    if layout_id.startswith(CUSPARSELT_LAYOUT):  # the library may ask for more
        return (m * k // 2 * element.itemsize + m * k // 8,)
    if quantization is not None and layout_id == QUANTIZED_LAYOUTS[quantization.element]:
        down, across, nbytes = quantized_tiles(quantization).packed_shape(m, k)
        return (down * across * nbytes,)
    for layout in TILE_LAYOUTS:
        if layout_id == layout.layout_id:
            down, across, nbytes = layout.packed_shape(m, k)
            return (down * across * nbytes,)
    return None
