"""The table of foreign formats: one line for each, in the order in which they are listed to users."""

from __future__ import annotations

from importlib.metadata import entry_points

from ..errors import InvalidProblemError
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
"""Every foreign format by name: those that come with the package, and those that ``register_format`` adds."""
BUILT_IN = tuple(FORMATS)
NO_FORMATS = ("dense", "sparse24")
"""Names that checkpoints have for what is no foreign format."""
_GROUP = "sparse24_plans.formats"
"""Installed packages name their formats in entry points of this group: functions that register them."""


def format_names() -> tuple[str, ...]:
    """Every name that :func:`find_format` finds."""
    return tuple(dict.fromkeys((*FORMATS, *(point.name for point in entry_points(group=_GROUP)))))


def find_format(name: str) -> ForeignFormat | None:
    """The format of this name; one of an installed package is registered by it first.

    Raises InvalidProblemError where that package can't be loaded or registers no such format.
    """
    if name not in FORMATS:
        for point in entry_points(group=_GROUP, name=name):
            try:
                point.load()()
            except Exception as error:
                raise InvalidProblemError(
                    f"name: {name!r} can't be had from {point.value} ({type(error).__name__}: {error})"
                ) from error
            if name not in FORMATS:
                raise InvalidProblemError(f"name: {point.value} registers no format {name!r}")
    return FORMATS.get(name)
