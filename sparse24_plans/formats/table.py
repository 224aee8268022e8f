"""The table of foreign formats: one line for each, in the order in which they are listed to users."""

from __future__ import annotations

from .baracuda import Baracuda
from .base import ForeignFormat
from .compressed_tensors import CompressedTensors
from .cusparselt import CusparseltSm80, CusparseltSm90
from .cutlass_sm90 import CutlassSm90
from .tilelang import TileLang
from .torch_cutlass import TorchCutlass
from .torch_tile import TorchTile

_ROWS: tuple[ForeignFormat, ...] = (
    Baracuda(),
    TorchCutlass(),
    CutlassSm90(),
    TileLang(),
    TorchTile(),
    CusparseltSm80(),
    CusparseltSm90(),
    CompressedTensors(),
)

FORMATS: dict[str, ForeignFormat] = {row.name: row for row in _ROWS}
"""Every foreign format by name."""
