"""Short forms on a GPU: on the caller's stream, and with the kernels of the plans that prepare weights.

Those plans stand above this package, so what calls them (prepare/short_forms.py) is loaded by name, when it
is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from ..device.streams import stream_handle
from ..device.tensors import HOST, Device, TensorView, import_cupy


class ShortForms(Protocol):
    """prepare/short_forms.py. Each works on CuPy's current stream, and gives None where no kernel serves."""

    def compress(self, dense: TensorView) -> tuple[TensorView, TensorView] | None: ...
    def prune_compress(
        self, dense: TensorView, scores: TensorView | None
    ) -> tuple[TensorView, TensorView] | None: ...
    def decompress(self, weight: Any) -> TensorView | None: ...
    def pack(self, weight: Any) -> Any: ...


def short_forms() -> ShortForms:
    """The kernels' forms of what weight.py and packing.py do in array code, with the same bits."""
    found: ShortForms = import_module("..prepare.short_forms", __package__)  # type: ignore[assignment]
    return found


@contextmanager
def on_stream(device: Device, stream: Any) -> Iterator[None]:
    """Make ``stream`` CuPy's current one on ``device``, so that all work is queued and memory taken there.

    The host has no streams: None alone. Raises what :func:`stream_handle` raises.
    """
    handle = stream_handle(stream, device)
    if device == HOST:
        yield
        return
    cuda = import_cupy().cuda
    with cuda.Device(device.ordinal), cuda.ExternalStream(handle, device.ordinal):
        yield
