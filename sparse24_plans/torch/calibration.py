"""``calibrate`` prunes (and quantizes) a model's linear layers to 2:4 by their inputs, block after block.

A block is one of the model's layers, such as a decoder layer. While one is pruned, only its inputs, its own
weights and one moment X^T X are needed on the device. The inputs come from the pruned blocks before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoints.compressed_form import CompressedForm, compressed_form
from ..checkpoints.folder import DTYPES, ModelReader
from ..checkpoints.layers import Layer, read_weight, stored_tensors, write_weight
from ..checkpoints.safetensors_file import SafetensorsWriter, TensorInfo
from ..device.files import StrPath, path_of, storage_errors
from ..errors import InvalidProblemError, shown
from ..weights.calibrated import METHODS, output_error, pruned_together, quantized_together
from ..weights.quantized import Sparse24QuantizedWeight
from .conv1d import is_linear, linear_of
from .elements import element_of, host_bytes
from .swap import Choice, progress_bar

_RUN_KEY, _ERRORS_KEY = "sparse24_calibration", "output_errors"


@dataclass(frozen=True)
class CalibratedLayer:
    """One linear layer [M, K] that was pruned.

    ``output_error`` is ||X (W - W')^T|| / ||X W^T|| over all calibration tokens, where X are the layer's
    inputs in the pruned model. ``weight`` is the quantized weight that the layer's tensor stands for, in host
    memory, or None if it was not quantized.
    """

    name: str
    m: int
    k: int
    output_error: float
    weight: Sparse24QuantizedWeight | None = None


@dataclass(frozen=True)
class CalibrationReport:
    """The result of ``calibrate``: pruned ``layers``, and the linear layers ``left_dense`` with reasons."""

    method: str
    layers: tuple[CalibratedLayer, ...]
    left_dense: Mapping[str, str]

    def __str__(self) -> str:
        lines = [
            f"{one.name}: [{one.m}, {one.k}], output error {one.output_error:.2%}" for one in self.layers
        ]
        lines += [f"{name}: left dense, {reason}" for name, reason in self.left_dense.items()]
        worst = max((one.output_error for one in self.layers), default=0.0)
        lines.append(
            f"{len(self.layers)} layers pruned by {self.method}, output error at most {worst:.2%}; "
            f"{len(self.left_dense)} left dense"
        )
        return "\n".join(lines)


def calibrate(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    method: str = "sparsegpt",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    weights: Any = None,
    group: int | None = None,
    scale_rule: Any = None,
    device: Any = None,
    resume: StrPath | None = None,
    progress: bool | None = None,
) -> CalibrationReport:
    """Prune the linear layers of the model's blocks to 2:4 in place, by what their inputs are.

    The weights stay dense tensors with zeros: ``to_sparse24(model, recipe="compress")`` makes them sparse.
    Blocks are the elements of the nn.ModuleList or nn.Sequential that holds most weights.

    Parameters
    ----------
    model : torch.nn.Module
        A dense model, with nn.Linear or transformers' Conv1D in its blocks.
    batches : sequence
        Inputs of the model: tensors, tuples of arguments, or mappings of keyword arguments. Positions that a
        mapping's ``attention_mask`` [batch, tokens] excludes don't count. There should be more tokens than
        the widest layer has inputs; 128 sequences of 2048 are usual for large language models.
    method : str
        ``"sparsegpt"``, ``"wanda"`` or ``"magnitude"`` (:mod:`sparse24_plans.weights.calibrated`).
    include, exclude : sequences of str
        Patterns of layers' names, as in ``to_sparse24``, with its defaults.
    weights, group, scale_rule : optional
        The arguments of ``compress_checkpoint``. The model gets the dequantized weights, the report the
        quantized ones. SparseGPT's are rounded as in GPTQ, others to nearest.
    device : torch.device, optional
        The device that computes, to which one block at a time is moved. By default the model stays in place.
    resume : path, optional
        A folder for a file of each finished block. A run with the same model, batches and method goes on
        after the last one, and gives the same bytes on the same device.
    progress : bool, optional
        Whether to show a progress bar on stderr. The default is whether stderr is a terminal.

    Raises InvalidProblemError for a wrong argument, a model without such blocks, inputs or weights that
    aren't finite, or a folder of another run; FormatError or StorageError for files in ``resume``.
    """
    _check_arguments(model, batches, method)
    folder = None if resume is None else Path(path_of("resume", resume))
    form = compressed_form(None, weights, group, scale_rule)
    blocks, chosen, left = _chosen(model, include, exclude, 4 if weights is None else 8)
    layers: list[CalibratedLayer] = []
    with _evaluated(model), progress_bar(len(blocks), progress) as advance:
        calls = _recorded(model, blocks, batches, None if device is None else torch.device(device))
        seed = _digest(f"{method}{form}".encode(), *_tensors(batches))
        for index, (place, block) in enumerate(blocks.items()):
            own = {name: one for name, one in chosen.items() if f"{name}.".startswith(f"{place}.")}
            file = None if folder is None else folder / f"block-{index:04}.safetensors"
            layers += _Block(block, own, calls, index, form).prune(method, file, seed)
            advance()
    return CalibrationReport(method, tuple(layers), left)


def _check_arguments(model: object, batches: object, method: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidProblemError(f"model: expected a module, got {type(model).__name__}")
    if method not in METHODS:
        raise InvalidProblemError(f"method: expected one of {', '.join(METHODS)}, got {shown(method)}")
    if not isinstance(batches, (list, tuple)) or not batches:
        raise InvalidProblemError(f"batches: expected a list of inputs, got {shown(batches)}")


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """The model without gradients and in evaluation mode, until the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# What is pruned -----------------------------------------------------------------------------------


def _chosen(
    model: nn.Module, include: Sequence[str], exclude: Sequence[str], step: int
) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, str]]:
    """The model's blocks, the layers to prune, and why others stay dense. K is a multiple of ``step``."""
    home, most = None, 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            size = sum(linear_of(one).weight.numel() for one in filter(is_linear, module.modules()))
            if size > most:
                home, most = name, size
    if home is None:
        raise InvalidProblemError(
            "model: expected linear layers in an nn.ModuleList or nn.Sequential, got none"
        )
    prefix = f"{home}.".lstrip(".")
    children = model.get_submodule(home).named_children()
    blocks = {prefix + own: block for own, block in children}
    choice = Choice(model, include, exclude, "prune")
    chosen: dict[str, nn.Module] = {}
    for name in choice.experts:
        choice.skip(name, "stacked experts, which calibrate doesn't prune")
    left = dict(choice.skipped)
    for name in choice.chosen:
        weight = linear_of(model.get_submodule(name)).weight
        if not name.startswith(prefix):
            left[name] = f"it is outside of the blocks {prefix}*"
        elif weight.shape[1] % step:
            left[name] = f"K={weight.shape[1]} is not a multiple of {step}"
        elif weight.is_meta or not bool(torch.isfinite(weight).all()):
            raise InvalidProblemError(f"{name}: expected a finite weight in memory")
        else:
            chosen[name] = model.get_submodule(name)
    if not chosen:
        raise InvalidProblemError(f"model: expected a layer to prune, got none: {shown(left)}")
    return blocks, chosen, left


# The blocks' inputs -------------------------------------------------------------------------------


@dataclass
class _Calls:
    """The blocks' calls for every batch. ``hidden`` are the inputs of the next block."""

    hidden: list[Tensor]
    arguments: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]
    """By batch and block, all arguments but the first."""
    counted: list[Tensor | None]
    """By batch, the positions [batch, tokens] that count; None for all."""
    device: torch.device | None
    """The device of all of them, to which blocks are moved; None if nothing is moved."""


def _recorded(
    model: nn.Module, blocks: Mapping[str, nn.Module], batches: Sequence[Any], device: torch.device | None
) -> _Calls:
    """Run the model with blocks that only note their arguments; the first runs once, to show its result."""
    calls = _Calls([], [], [], device)
    order = {id(block): index for index, block in enumerate(blocks.values())}
    rests: list[tuple[Any, ...] | None] = []
    moved: dict[int, Any] = {}

    def note(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden, *others = args or (kwargs.pop("hidden_states", None),)
        seen = calls.arguments[-1]
        if order[id(block)] != len(seen) or not isinstance(hidden, Tensor):
            raise InvalidProblemError(
                "model: expected blocks that pass a tensor on, called once each, in order"
            )
        if not seen:
            calls.hidden.append(hidden.to(device, copy=True))
        if not rests:
            result = type(block).forward(block, hidden, *others, **kwargs)
            rests.append(result[1:] if isinstance(result, tuple) else None)
        seen.append(_moved((tuple(others), kwargs), device, moved))
        return hidden if rests[0] is None else (hidden, *rests[0])

    with ExitStack() as stack:
        for block in blocks.values():
            block.forward = partial(note, block)  # type: ignore[method-assign]
            stack.callback(block.__dict__.pop, "forward")
        for batch in batches:
            calls.arguments.append([])
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
            if len(calls.arguments[-1]) != len(blocks):
                raise InvalidProblemError("model: expected a model that calls each of its blocks")
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            flat = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
            calls.counted.append(_moved(flat, device, moved))
    return calls


def _moved(value: Any, device: torch.device | None, known: dict[int, Any]) -> Any:
    """The value with its tensors on the device. ``known`` keeps those that several calls share.

    A cache of keys and values becomes None, because it would grow with every call.
    """
    if hasattr(value, "get_seq_length"):
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(one, device, known) for one in value)
    if isinstance(value, dict):
        return {name: _moved(one, device, known) for name, one in value.items()}
    if not isinstance(value, Tensor) or device is None:
        return value
    _, result = known.setdefault(id(value), (value, value.to(device)))
    return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _digest(head: bytes, *tensors: Tensor) -> str:
    """A hash of bytes and of tensors with their shapes and dtypes."""
    found = hashlib.sha256(head)
    for tensor in tensors:
        found.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        found.update(host_bytes(tensor))
    return found.hexdigest()


# One block ----------------------------------------------------------------------------------------


class _Block:
    """Prunes one block's ``layers`` and replaces ``calls.hidden`` by its outputs."""

    def __init__(
        self,
        block: nn.Module,
        layers: Mapping[str, nn.Module],
        calls: _Calls,
        index: int,
        form: CompressedForm,
    ) -> None:
        self._block, self._layers, self._calls, self._index = block, layers, calls, index
        self._form = form
        self._quantized: dict[str, Sparse24QuantizedWeight] = {}

    def prune(self, method: str, file: Path | None, seed: str) -> list[CalibratedLayer]:
        """Prune the block's layers, or read them from the file of an earlier run."""
        sizes = {name: linear_of(module).weight.shape for name, module in self._layers.items()}
        run = _digest(json.dumps([seed, sizes]).encode(), *map(self._weight, self._layers))
        with self._on_device():
            if file is not None and file.exists():
                errors = self._restore(file, run)
            else:
                errors = {}
                for group in self._groups():
                    errors |= self._prune_group(group, method)
                if file is not None:
                    self._save(file, run, errors)
            self._calls.hidden = [self._output(batch) for batch in range(len(self._calls.hidden))]
        return [
            CalibratedLayer(name, m, k, errors[name], self._quantized.get(name))
            for name, (m, k) in sizes.items()
        ]

    def _weight(self, name: str) -> Tensor:
        """A layer's weight [M, K], in its memory."""
        return linear_of(self._layers[name]).weight.detach()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        homes = [parameter.device for parameter in self._block.parameters()]
        if self._calls.device is not None:
            self._block.to(self._calls.device)
        try:
            yield
        finally:
            if self._calls.device is not None and homes:
                self._block.to(homes[0])

    def _output(self, batch: int) -> Tensor:
        args, kwargs = self._calls.arguments[batch][self._index]
        hidden = self._calls.hidden[batch].clone()  # a block may change its input in place
        result = self._block(hidden, *args, **kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    @contextmanager
    def _seen(self, names: Iterable[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call ``see`` with a layer's name and its input whenever one of them is called."""
        with ExitStack() as stack:
            for name in names:
                hook = self._layers[name].register_forward_pre_hook(
                    lambda _, args, name=name: see(name, args[0])
                )
                stack.callback(hook.remove)
            yield

    def _groups(self) -> list[list[str]]:
        """Names of layers with the same input, in the order of their calls; those never called come last."""
        inputs: list[Tensor] = []  # keeps their memory, so that no two have one address
        groups: dict[Any, list[str]] = {}

        def see(name: str, x: Tensor) -> None:
            inputs.append(x)
            groups.setdefault((x.data_ptr(), x.shape), []).append(name)

        with self._seen(self._layers, see):
            self._output(0)
        groups |= {name: [name] for name in self._layers}
        placed: set[str] = set()
        result = []
        for group in groups.values():
            result.append([name for name in dict.fromkeys(group) if name not in placed])
            placed.update(group)
        return [group for group in result if group]

    def _prune_group(self, names: list[str], method: str) -> dict[str, float]:
        """Prune layers with one input, and return their output errors by name."""
        weights = [self._weight(name) for name in names]
        moment = self._moment(names[0], weights[0])
        if not bool(torch.isfinite(moment).all()):
            raise InvalidProblemError(f"{names[0]}: expected finite inputs, got a moment with NaN or Inf")
        dense = [weight.to(torch.float32, copy=True) for weight in weights]
        if (to := self._form.rounding(element_of(weights[0].dtype, names[0]))) is None:
            for weight, part in zip(weights, pruned_together(dense, moment, method), strict=True):
                weight.copy_(part)
        else:
            for name, one in zip(names, quantized_together(dense, moment, method, to), strict=True):
                self._hold(name, one)
        return {
            name: output_error(before, weight.float(), moment)
            for name, before, weight in zip(names, dense, weights, strict=True)
        }

    def _hold(self, name: str, quantized: Any) -> None:
        """Give a layer its Sparse24QuantizedWeight, dequantized."""
        self._quantized[name] = quantized
        self._weight(name).copy_(torch.from_numpy(quantized.decompress().astype(np.float32)))

    def _moment(self, name: str, weight: Tensor) -> Tensor:
        """X^T X of a layer's inputs, float32 [K, K], over all batches."""
        k = weight.shape[1]
        total = torch.zeros(k, k, dtype=torch.float32, device=weight.device)
        counted: Tensor | None = None

        def see(_: str, x: Tensor) -> None:
            masked = counted is not None and x.shape[:-1] == counted.shape
            rows = (x[counted] if masked else x).reshape(-1, k).float()
            total.addmm_(rows.T, rows)

        with self._seen([name], see):
            for batch, counted in enumerate(self._calls.counted):  # noqa: B007 - see() reads it
                self._output(batch)
        return total

    # Files of finished blocks ---------------------------------------------------------------------

    def _stored(self) -> dict[str, Layer]:
        """The entries of the layers in a file: dense, or compressed if they are quantized."""
        layers = {}
        for name in self._layers:
            weight = self._weight(name)
            m, k = weight.shape
            dense = Layer(name, m, k, element_of(weight.dtype, name), ())
            layers[name] = self._form.as_written(dense)
        return layers

    def _infos(self) -> list[TensorInfo]:
        infos: list[TensorInfo] = []
        for name, layer in self._stored().items():
            if layer.quantization is not None:
                infos += stored_tensors(layer)
            else:
                nbytes = layer.m * layer.k * layer.element.itemsize
                infos.append(TensorInfo(name, DTYPES[layer.element], layer.dense_shape, nbytes))
        return infos

    def _save(self, file: Path, run: str, errors: dict[str, float]) -> None:
        with storage_errors(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {_RUN_KEY: run, _ERRORS_KEY: json.dumps(errors)}
        with SafetensorsWriter(file, self._infos(), metadata) as writer:
            for name in self._layers:
                if name in self._quantized:
                    write_weight(writer, name, self._quantized[name])
                else:
                    writer.write(name, host_bytes(self._weight(name)))

    def _restore(self, file: Path, run: str) -> dict[str, float]:
        """Read the pruned weights. Returns the output errors."""
        with ModelReader(file) as model:
            reader = model.shards[0].reader
            wanted = {info.name: info for info in self._infos()}
            if reader.metadata.get(_RUN_KEY) != run or reader.tensors != wanted:
                raise InvalidProblemError(
                    f"resume: expected blocks of this model, batches and method, got others in {file}"
                )
            for name, layer in self._stored().items():
                if layer.quantization is not None:
                    self._hold(name, read_weight(model, layer))
                    continue
                weight = self._weight(name)
                stored = torch.from_numpy(reader.read(name)).view(weight.dtype)
                weight.copy_(stored.reshape(weight.shape))
            errors: dict[str, float] = json.loads(reader.metadata[_ERRORS_KEY])
            return errors
