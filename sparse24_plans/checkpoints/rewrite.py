"""Rewrites a model with its weights in another form, and copies everything else unchanged."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ..device.files import StrPath, new_folder, storage_errors
from ..errors import InvalidProblemError
from .checkpoint_base import CheckpointFormat
from .checkpoint_format import without_sparsity
from .folder import (
    CONFIG_NAME,
    ModelReader,
    Shard,
    copy_file,
    copy_tensor,
    write_index,
    write_json,
)
from .layers import FORMAT_KEY, LAYER_KEY_PREFIX, Layer
from .safetensors_file import SafetensorsWriter, TensorInfo, shown
from .selection import check_callback

Report = TypeVar("Report")


class Rewrite(ABC, Generic[Report]):
    """One run over a model: its ``layers`` go to the format ``target``, all other tensors are copied.

    ``reasons`` says why tensors are copied. There is one report for each layer and each copied tensor, in the
    order of the model's data. ``on_tensor`` gets a report as soon as its tensor is written.
    """

    report_type: ClassVar[Any]
    action: ClassVar[str]
    """The reports' word for a layer that was written."""

    def __init__(
        self,
        model: ModelReader,
        target: CheckpointFormat,
        layers: Iterable[Layer],
        reasons: Mapping[str, str],
        on_tensor: Callable[[Report], None] | None,
    ) -> None:
        check_callback("on_tensor", on_tensor)
        self.model, self.target = model, target
        self.layers = {layer.sources[0]: layer for layer in layers}
        self._parts = {name for layer in self.layers.values() for name in layer.sources}
        self.reasons, self._on_tensor = reasons, on_tensor
        self.reports: list[Report] = []

    @abstractmethod
    def write_layer(self, layer: Layer, writer: SafetensorsWriter) -> Report:
        """Write a weight's new tensors and return its report."""

    def report_layer(self, layer: Layer, **more: Any) -> Report:
        """The report on a weight. ``more`` are further fields."""
        report: Report = self.report_type(
            name=layer.name,
            shape=layer.dense_shape,
            element=layer.element.value,
            action=self.action,
            bytes_before=sum(self.model.tensors[name].nbytes for name in layer.sources),
            bytes_after=sum(info.nbytes for info in self.target.stored(layer)),
            **{"reason": None, **more},
        )
        return report

    def report_copy(self, info: TensorInfo) -> Report:
        """The report on a tensor that is copied."""
        about = {"name": info.name, "shape": info.shape, "element": info.dtype.lower()}
        reason, size = self.reasons.get(info.name), info.nbytes
        report: Report = self.report_type(
            **about, action="copied", reason=reason, bytes_before=size, bytes_after=size
        )
        return report

    def _new_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The new model's ``config.json``, made from the old one without its entries for sparsity."""
        return self.target.configure(config, list(self.layers.values()), self._sparsity())

    def _sparsity(self) -> float:
        """The share of the model's elements that compression leaves out."""
        cells = sum(layer.m * layer.k for layer in self.layers.values())
        others = (info for name, info in self.model.tensors.items() if name in self.reasons)
        total = cells + sum(math.prod(info.shape) for info in others)
        return round(cells / 2 / total, 4) if total else 0.0

    def run(self, destination: StrPath) -> list[Report]:
        """Write the model: a file if it is one, else a folder with the same shards and other files.

        A failed run leaves nothing behind. A warning names what of a folder is not copied, because it is
        large, hidden or a link, or holds other weights. Raises InvalidProblemError if two tensors would have
        one name, or the folder is neither new nor empty; StorageError if a file can't be read or written.
        """
        self.check_names()
        model = self.model
        if model.folder is None:
            self._write_shard(model.shards[0], destination)
        else:
            old = model.config()
            new = None if old is None else self._new_config(without_sparsity(old))
            others, left = model.side_files()
            with new_folder(destination) as folder:
                self._write_folder(folder, None if new == old else new, others)
            if left:
                warnings.warn(
                    f"{model.folder}: not copied: {', '.join(left)}; copy by hand what you need of "
                    "other weights, links, hidden and large folders",
                    stacklevel=3,
                )
        return self.reports

    def _write_folder(self, folder: Path, config: dict[str, Any] | None, others: Mapping[str, Path]) -> None:
        """Write the shards, their index, the configuration if it changes, and copies of other files."""
        model = self.model
        for shard in model.shards:
            self._write_shard(shard, folder / shard.name)
        if model.index_name is not None:
            files = {shard.name: self._outputs(shard) for shard in model.shards}
            write_index(folder / model.index_name, files)
        if config is not None:
            write_json(folder / CONFIG_NAME, config)
        for name, path in others.items():
            if config is None or name != CONFIG_NAME:
                with storage_errors(folder / name):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                copy_file(path, folder / name)

    def _write_shard(self, shard: Shard, path: StrPath) -> None:
        with SafetensorsWriter(path, self._outputs(shard), self._metadata(shard)) as writer:
            for name, info in shard.reader.tensors.items():
                if name in self.layers:
                    self.report(self.write_layer(self.layers[name], writer))
                elif name not in self._parts:
                    copy_tensor(self.model, info, writer)
                    self.report(self.report_copy(info))

    def report(self, report: Report) -> None:
        """Store the report on a tensor and pass it on."""
        self.reports.append(report)
        if self._on_tensor is not None:
            self._on_tensor(report)

    def _outputs(self, shard: Shard) -> list[TensorInfo]:
        """The tensors of the new shard."""
        infos: list[TensorInfo] = []
        for name, info in shard.reader.tensors.items():
            if name in self.layers:
                infos += self.target.stored(self.layers[name])
            elif name not in self._parts:
                infos.append(info)
        return infos

    def _metadata(self, shard: Shard) -> dict[str, str]:
        """The shard's metadata, with the notes of the new format."""
        metadata = {
            key: value
            for key, value in shard.reader.metadata.items()
            if key != FORMAT_KEY and not key.startswith(LAYER_KEY_PREFIX)
        }
        self.target.stamp(metadata)
        for name in shard.reader.tensors:
            if name in self.layers:
                self.target.note(metadata, self.layers[name])
        return metadata

    def check_names(self) -> None:
        """Raise InvalidProblemError if two tensors would have one name."""
        seen: set[str] = set()
        for info in (info for shard in self.model.shards for info in self._outputs(shard)):
            if info.name in seen:
                raise InvalidProblemError(f"{shown(info.name)}: expected names that occur once")
            seen.add(info.name)
