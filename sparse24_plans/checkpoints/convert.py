"""Checkpoints from one 2:4 format to another: a safetensors file, or a folder of shards with its index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..device.files import StrPath
from ..errors import FormatError, InvalidProblemError, UnsupportedError, shown
from .checkpoint_format import DENSE, CheckpointFormat, checkpoint_format, checkpoint_formats
from .folder import ModelReader, check_destination
from .layers import Layer, located
from .model_config import without_sparsity
from .rewrite import Rewrite
from .safetensors_file import SafetensorsWriter, TensorInfo
from .selection import Selection


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What :func:`convert_checkpoint` did with one weight or other tensor.

    ``shape`` and ``element`` are those of the dense matrix, or of the tensor that was copied (the element is
    the safetensors type in lower case). ``reason`` says why a tensor of a dense checkpoint was copied. Sizes
    are in bytes.
    """

    name: str
    shape: tuple[int, ...]
    element: str
    action: Literal["converted", "copied"]
    reason: str | None
    bytes_before: int
    bytes_after: int


def convert_checkpoint(
    source: StrPath,
    destination: StrPath,
    *,
    from_format: str,
    to_format: str,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    tile_k: int | None = None,
    overwrite: bool = True,
    on_tensor: Callable[[ConversionReport], None] | None = None,
) -> list[ConversionReport]:
    """Write the 2:4 weights of a checkpoint in another format; copy everything else unchanged.

    Nothing is pruned: of a dense checkpoint, 2-D tensors that are 2:4 and fit the format are converted,
    others copied with the reason. One weight at a time is in memory. A failed run leaves nothing behind.

    Parameters
    ----------
    source : path
        A safetensors file, a folder with one, a folder of shards with their index, or that index.
    destination : path
        A file where the source is a file. Else a folder, new or empty: it gets shards of the same names,
        the index, ``config.json`` (whose sparsity configuration is brought up to date) and copies of the
        folder's other files.
    from_format, to_format : str
        ``dense``, ``sparse24``, or a foreign format's (docs/formats.md), ``register_format``'s among them.
    include, exclude : sequence of str
        For dense sources, as in ``compress_checkpoint``. What ``include`` names must be 2:4 and fit.
    tile_k : int, optional
        ``cutlass_sm90``: the tile K to write for, or to read where the file doesn't say; 128 by default.
    overwrite : bool
        Whether a file that exists is replaced, or refused.
    on_tensor : callable, optional
        Called with each report when its tensor is done.

    Returns
    -------
    list of ConversionReport
        One for each weight and each copied tensor.

    Raises
    ------
    InvalidProblemError
        Formats, patterns or a destination that can't be meant; no weight of ``from_format`` in the source; a
        weight whose shape ``to_format`` can't hold.
    UnsupportedError
        A weight whose element ``to_format`` can't hold.
    FormatError
        The source breaks its format, or a weight can't be expressed in ``to_format``; with tensor, row and
        group.
    StorageError
        A file can't be read or written.
    """
    selection = Selection(include, exclude)
    _check_formats(from_format, to_format, selection)
    check_destination(source, destination, overwrite=overwrite)
    old, new = (checkpoint_format(name, selection, tile_k) for name in (from_format, to_format))
    with ModelReader(source) as model:
        return _Conversion(model, old, new, on_tensor).run(destination)


class _Conversion(Rewrite[ConversionReport]):
    """The weights of a model in the format ``source``, one at a time."""

    def __init__(
        self,
        model: ModelReader,
        source: CheckpointFormat,
        target: CheckpointFormat,
        on_tensor: Callable[[ConversionReport], None] | None,
    ) -> None:
        layers, self._reasons = source.find(model, target)
        if not layers:
            raise InvalidProblemError(f"source: {model.path} holds no weight in the format {source.name}")
        self._source = source
        super().__init__(model, target, layers, on_tensor)

    def write_layer(self, layer: Layer, writer: SafetensorsWriter) -> ConversionReport:
        try:
            self.target.write(layer, self._source.read(self.model, layer), writer)
        except (FormatError, InvalidProblemError, UnsupportedError) as error:
            raise located(self.model, layer, error) from error
        return ConversionReport(
            name=layer.name,
            shape=(layer.m, layer.k),
            element=layer.element.value,
            action="converted",
            reason=None,
            bytes_before=sum(self.model.tensors[name].nbytes for name in layer.sources),
            bytes_after=sum(info.nbytes for info in self.target.stored(layer)),
        )

    def report_copy(self, info: TensorInfo) -> ConversionReport:
        return ConversionReport(
            name=info.name,
            shape=info.shape,
            element=info.dtype.lower(),
            action="copied",
            reason=self._reasons.get(info.name),
            bytes_before=info.nbytes,
            bytes_after=info.nbytes,
        )

    def new_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.target.configure(without_sparsity(config), list(self.layers.values()), self._sparsity())

    def _sparsity(self) -> float:
        """The share of the model's elements that compression leaves out."""
        cells = sum(layer.m * layer.k for layer in self.layers.values())
        others = (info for name, info in self.model.tensors.items() if name in self._reasons)
        total = cells + sum(math.prod(info.shape) for info in others)
        return round(cells / 2 / total, 4) if total else 0.0


def _check_formats(from_format: str, to_format: str, selection: Selection) -> None:
    for argument, name in (("from_format", from_format), ("to_format", to_format)):
        known = checkpoint_formats()
        if not isinstance(name, str) or name not in known:
            raise InvalidProblemError(f"{argument}: expected one of {', '.join(known)}, got {shown(name)}")
    if from_format == to_format:
        raise InvalidProblemError(f"to_format: expected another format than {from_format}")
    if selection and from_format != DENSE:
        raise InvalidProblemError(f"include, exclude: apply to dense checkpoints, not to {from_format}")
