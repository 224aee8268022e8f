"""The kernels that make weights on a GPU. The package's root provides them.

They belong to plans above this package, so it imports none of them. Importing this module is cheap, because
every import of the package does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..device.tensors import TensorView


class ShortForms(Protocol):
    """Each form works on CuPy's current stream, and gives None where no kernel serves."""

    def compress(self, dense: TensorView) -> tuple[TensorView, TensorView] | None: ...
    def prune_compress(
        self, dense: TensorView, scores: TensorView | None
    ) -> tuple[TensorView, TensorView] | None: ...
    def decompress(self, weight: Any) -> TensorView | None: ...
    def pack(self, weight: Any) -> Any: ...


short_forms: Callable[[], ShortForms]
"""Loads the kernels' forms of what weight.py and packing.py do in array code, with the same bits."""
