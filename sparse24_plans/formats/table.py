"""The table of foreign formats, in the order of lists for users."""

from __future__ import annotations

from importlib.metadata import entry_points

from ..errors import InvalidProblemError
from .baracuda import Baracuda
from .base import ForeignFormat
from .compressed_tensors import CompressedTensors
from .cusparselt import CusparseltSm80, CusparseltSm90
from .cutlass_sm90 import CutlassSm90
from .gptq import Awq, Gptq
from .marlin_24 import Marlin24
from .pack_quantized import PackQuantized
from .quantized import QuantizedFormat
from .tilelang import TileLang
from .torch_cutlass import TorchCutlass
from .torch_tile import TorchTile

_BUILT_IN: tuple[ForeignFormat, ...] = (
    Baracuda(),
    TorchCutlass(),
    CutlassSm90(),
    TileLang(),
    TorchTile(),
    CusparseltSm80(),
    CusparseltSm90(),
    CompressedTensors(),
)

FORMATS: dict[str, ForeignFormat] = {one.name: one for one in _BUILT_IN}
"""The foreign formats of other weights by name: the package's own and those that ``register_format`` adds."""
BUILT_IN = tuple(FORMATS)
QUANTIZED_FORMATS: dict[str, QuantizedFormat] = {
    one.name: one for one in (Marlin24(), PackQuantized(), Gptq(), Awq())
}
"""The foreign formats of quantized weights by name."""
TAKEN_NAMES = (*BUILT_IN, *QUANTIZED_FORMATS, "dense", "sparse24")
"""Names that ``register_format`` refuses, those of checkpoints that are in no foreign format among them."""
_GROUP = "sparse24_plans.formats"
"""Entry points of this group, in installed packages, are functions that register formats."""


def format_names() -> tuple[str, ...]:
    """Every name that :func:`find_format` finds."""
    return tuple(dict.fromkeys((*FORMATS, *(point.name for point in entry_points(group=_GROUP)))))


def find_format(name: str) -> ForeignFormat | None:
    """The format of this name. An installed package registers its format first.

    Raises InvalidProblemError if that package can't be loaded or registers no such format.
    """
    if name not in FORMATS:
        for point in entry_points(group=_GROUP, name=name):
            try:
                point.load()()
            except Exception as error:
                raise InvalidProblemError(
                    f"name: {name!r} can't be loaded from {point.value} ({type(error).__name__}: {error})"
                ) from error
            if name not in FORMATS:
                raise InvalidProblemError(f"name: {point.value} registers no format {name!r}")
    return FORMATS.get(name)
