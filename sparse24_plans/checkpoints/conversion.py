"""``convert_checkpoint`` writes a safetensors file or a folder of shards in another 2:4 format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .._vendor.compressed_tensors import CONFIG_KEYS
from ..device.files import StrPath
from ..errors import FormatError, InvalidProblemError, UnsupportedError, check_choice, shown
from ..formats.cutlass_sm90 import CutlassSm90
from ..formats.table import QUANTIZED_FORMATS
from ..weights.quantize import LARGEST
from .checkpoint_base import CheckpointFormat
from .checkpoint_format import (
    BITMASK,
    CHECKPOINT_FORMATS,
    DENSE,
    READ_FORMATS,
    checkpoint_format,
    checkpoint_formats,
)
from .folder import ModelReader, check_destination
from .layers import SPARSE24, Layer, located
from .quantization import config_entry, is_served
from .rewrite import Rewrite
from .safetensors_file import SafetensorsWriter
from .selection import Selection


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The report of :func:`convert_checkpoint` on one weight or other tensor.

    ``shape`` is that of the dense matrix or the copied tensor, and ``element`` the safetensors type in lower
    case. ``reason`` says why a tensor of a dense checkpoint was copied. Sizes are in bytes.
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

    Nothing is pruned. 2-D tensors of a dense checkpoint are converted if they are 2:4 and fit the format, and
    copied otherwise. One weight at a time is in memory. A failed run leaves nothing behind.

    Parameters
    ----------
    source : path
        A safetensors file, a folder with one, a folder of shards with their index, or that index.
    destination : path
        A file if the source is a file. Else a new or empty folder, which gets shards of the same names, the
        index, ``config.json`` with its sparsity entry brought up to date, and copies of other files and small
        subfolders. A warning names what is not copied.
    from_format, to_format : str
        ``dense``, ``sparse24``, or a foreign or registered format (docs/formats.md). Formats of quantized
        weights are read alone; the weights stay quantized in ``sparse24`` only.
    include, exclude : sequence of str
        The arguments of ``compress_checkpoint``, for dense sources. Tensors that ``include`` names must be
        2:4 and fit the format.
    tile_k : int, optional
        The tile K of ``cutlass_sm90`` to write for, or to read with if the file doesn't tell; 128 by default.
    overwrite : bool
        Whether an existing file is replaced. Otherwise it is an error.
    on_tensor : callable, optional
        A function that is called with each report when its tensor is done.

    Returns a ConversionReport for each weight and each copied tensor.

    Raises
    ------
    InvalidProblemError
        Wrong formats, patterns or destination; no weight in ``from_format``; a shape that ``to_format`` can't
        hold.
    UnsupportedError
        A weight has an element that ``to_format`` can't hold.
    FormatError
        The source breaks its format, or a weight can't be expressed in ``to_format``; with tensor, row and
        group.
    StorageError
        A file can't be read or written.
    """
    selection = Selection(include, exclude)
    _check_formats(from_format, to_format, selection, tile_k)
    check_destination(source, destination, overwrite=overwrite)
    old, new = (checkpoint_format(name, selection, tile_k) for name in (from_format, to_format))
    with ModelReader(source) as model:
        return _Conversion(model, old, new, on_tensor).run(destination)


class _Conversion(Rewrite[ConversionReport]):
    """Converts the weights of a model in the format ``source``, one at a time."""

    report_type, action = ConversionReport, "converted"

    def __init__(
        self,
        model: ModelReader,
        source: CheckpointFormat,
        target: CheckpointFormat,
        on_tensor: Callable[[ConversionReport], None] | None,
    ) -> None:
        layers, reasons = source.find(model, target)
        if not layers:
            raise InvalidProblemError(
                f"expected a weight in the format {source.name} in {model.path}, got none"
            )
        self._source = source
        super().__init__(model, target, layers, reasons, on_tensor)

    def _new_config(self, config: dict[str, Any]) -> dict[str, Any]:
        if self._source.name in QUANTIZED_FORMATS or self._takes_over(config):
            config = {name: value for name, value in config.items() if name not in CONFIG_KEYS}
        if self.target.name in (DENSE, BITMASK):  # values of 8 bits would lose their scales
            config = {**config_entry(self.model, self.layers.values()), **config}
        return super()._new_config(config)

    def _takes_over(self, config: Mapping[str, Any]) -> bool:
        """Whether our entry replaces that of compressed-tensors, whose loaders can't read our tensors.

        Its entry stays if it asks for more than our tensors say, so that our loaders can refuse it.
        """
        if (self._source.name, self.target.name) != (BITMASK, SPARSE24) or self.reasons:
            return False
        if not any(layer.element in LARGEST for layer in self.layers.values()):
            return False
        return all(is_served(config[key]) for key in CONFIG_KEYS if config.get(key) is not None)

    def write_layer(self, layer: Layer, writer: SafetensorsWriter) -> ConversionReport:
        try:
            read = self._source.read_stored if self.target.holds_quantized else self._source.read
            self.target.write(layer, read(self.model, layer), writer)
        except (FormatError, InvalidProblemError, UnsupportedError) as error:
            raise located(self.model, layer, error) from error
        return self.report_layer(layer)


def _check_formats(from_format: str, to_format: str, selection: Selection, tile_k: int | None) -> None:
    for argument, name, own in (
        ("from_format", from_format, READ_FORMATS),
        ("to_format", to_format, CHECKPOINT_FORMATS),
    ):
        if isinstance(name, str) and name in own:
            continue  # looking for formats of installed packages takes longer than a small file's conversion
        check_choice(argument, name, checkpoint_formats(read=argument == "from_format"))
    if from_format == to_format:
        raise InvalidProblemError(f"to_format: expected another format than {from_format}, got the same")
    if selection and from_format != DENSE:
        raise InvalidProblemError(
            f"include, exclude: expected no patterns for {from_format}, only dense checkpoints take them"
        )
    if tile_k is not None and CutlassSm90.name not in (from_format, to_format):
        raise InvalidProblemError(
            f"tile_k: expected None unless a format is {CutlassSm90.name}, which alone takes one, got "
            f"{shown(tile_k)}"
        )
