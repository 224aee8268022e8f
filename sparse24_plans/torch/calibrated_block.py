"""Prunes the layers of one block of a model by what their inputs are."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoints.compressed_form import CompressedForm
from ..checkpoints.folder import DTYPES, ModelReader
from ..checkpoints.layers import CALIBRATED, Layer, read_weight, stored_tensors, write_weight
from ..checkpoints.safetensors_file import SafetensorsWriter, TensorInfo
from ..device.files import storage_errors
from ..errors import InvalidProblemError
from ..weights.calibrated import output_error, pruned_together, quantized_together
from ..weights.cutting import concat_weights
from ..weights.quantized_weight import Sparse24QuantizedWeight
from .calibrated_experts import Routed, prune_experts
from .calibration_inputs import Calls, Enough, Moment
from .conv1d import is_linear, linear_of
from .elements import element_of, host_bytes
from .experts import STACKS
from .origin import note_origin

_RUN_KEY, _ERRORS_KEY, _IDLE_KEY = "sparse24_calibration", "output_errors", "experts_without_tokens"


@dataclass(frozen=True)
class CalibratedLayer:
    """One linear layer [M, K] that was pruned, or one stack of experts [E, M/E, K].

    ``output_error`` is ||X (W - W')^T|| / ||X W^T|| over all calibration tokens, where X are the layer's
    inputs in the pruned model; in a stack those of each expert are multiplied by its own matrix. ``weight``
    is the quantized weight that the layer's tensor stands for, in host memory, or None if it was not
    quantized. ``experts_without_tokens`` are those of a stack that no token was sent to, which were pruned by
    magnitude.
    """

    name: str
    m: int
    k: int
    output_error: float
    weight: Sparse24QuantizedWeight | None = None
    experts_without_tokens: tuple[int, ...] = ()

    def __str__(self) -> str:
        idle = len(self.experts_without_tokens)
        words = f"; {idle} experts had no tokens and are pruned by magnitude" if idle else ""
        return f"{self.name}: [{self.m}, {self.k}], output error {self.output_error:.2%}{words}"


def digest(head: bytes, *tensors: Tensor) -> str:
    """A hash of bytes and of tensors with their shapes and dtypes."""
    found = hashlib.sha256(head)
    for tensor in tensors:
        found.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        found.update(host_bytes(tensor))
    return found.hexdigest()


class Block:
    """Prunes one block's ``layers``, linear or experts, and replaces ``calls.hidden`` by its outputs."""

    def __init__(
        self,
        block: nn.Module,
        layers: Mapping[str, nn.Module],
        calls: Calls,
        index: int,
        form: CompressedForm,
    ) -> None:
        self._block, self._layers, self._calls, self._index = block, layers, calls, index
        self._form = form
        self._experts: dict[str, Any] = {name: one for name, one in layers.items() if not is_linear(one)}
        self._names = [name for name in layers if name not in self._experts]
        """The names of the weights; stacks come last."""
        self._names += [f"{name}.{own}" for name in self._experts for own in STACKS]
        self._quantized: dict[str, Sparse24QuantizedWeight] = {}
        self._idle: dict[str, tuple[int, ...]] = {}
        """The experts without tokens, for each stack."""
        self._times: Counter[str] = Counter()
        """How often the first batch calls each layer, after which other calls of the block are left."""

    def prune(self, method: str, file: Path | None, seed: str) -> list[CalibratedLayer]:
        """Prune the block's layers, or read them from the file of an earlier run."""
        sizes = {name: self._weight(name).shape for name in self._names}
        run = digest(json.dumps([seed, sizes]).encode(), *map(self._weight, self._names))
        with self._on_device():
            if file is not None and file.exists():
                errors = self._restore(file, run)
                self._calls.hidden = self._outputs()
            else:
                errors = self._pruned(method)
                if file is not None:
                    self._save(file, run, errors)
        for layer in self._layers.values():
            note_origin(layer, {CALIBRATED: method})
        return [
            CalibratedLayer(name, m, k, errors[name], self._quantized.get(name), self._idle.get(name, ()))
            for name, (m, k) in sizes.items()
        ]

    def _weight(self, name: str) -> Tensor:
        """A layer's weight [M, K], in its memory; a stack as [E*M, K], which may be a copy."""
        if name in self._layers:
            return linear_of(self._layers[name]).weight.detach()
        return self._stack(name).flatten(0, 1)

    def _stack(self, name: str) -> Tensor:
        home, _, own = name.rpartition(".")
        stack: Tensor = getattr(self._experts[home], own)
        return stack.detach()

    def _put(self, name: str, weight: Tensor) -> None:
        """Give a layer or a stack the weight [M, K]."""
        if name in self._layers:
            self._weight(name).copy_(weight)
        else:
            self._stack(name).copy_(weight.reshape(self._stack(name).shape))

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

    def _pruned(self, method: str) -> dict[str, float]:
        """Prune all layers, and return their output errors by name. The block's outputs become the inputs."""
        dense = {name: self._weight(name).to("cpu", copy=True) for name in self._names}
        groups = self._groups()
        while True:
            errors: dict[str, float] = {}
            for names in groups:
                is_stacked = names[0] in self._experts
                errors |= (
                    self._prune_experts(names[0], method) if is_stacked else self._prune_group(names, method)
                )
            outputs, times = self._outputs_and_times()
            if all(times[name] <= most for name, most in self._times.items()):
                self._calls.hidden = outputs
                return errors
            # A batch calls a layer more often than the first does, so calls were left too early.
            self._times.clear()
            for name, weight in dense.items():
                self._put(name, weight)

    def _output(self, batch: int) -> Tensor:
        args, kwargs = self._calls.arguments[batch][self._index]
        hidden = self._calls.hidden[batch].clone()  # a block may change its input in place
        result = self._block(hidden, *args, **kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    def _outputs(self) -> list[Tensor]:
        return [self._output(batch) for batch in range(len(self._calls.hidden))]

    def _outputs_and_times(self) -> tuple[list[Tensor], Counter[str]]:
        """The outputs of all batches, and how often the batch that calls a layer most calls it."""
        outputs, most = [], Counter[str]()
        for batch in range(len(self._calls.hidden)):
            times = Counter[str]()
            with self._seen(self._layers, lambda name, *_, times=times: times.update([name])):  # type: ignore[misc]
                outputs.append(self._output(batch))
            most |= times
        return outputs, most

    @contextmanager
    def _seen(self, names: Iterable[str], see: Callable[..., None]) -> Iterator[None]:
        """Call ``see`` with a layer's name and its arguments, by position, whenever one of them is called."""

        def note(layer: nn.Module, args: Any, named: Any, name: str, form: Signature) -> None:
            see(name, *form.bind(layer, *args, **named).args[1:])

        with ExitStack() as stack:
            for name in names:
                layer = self._layers[name]
                called = partial(note, name=name, form=signature(type(layer).forward))
                hook = layer.register_forward_pre_hook(called, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def _groups(self) -> list[list[str]]:
        """Names of layers with the same input, in the order of their calls; those never called come last.

        Experts are a group by themselves.
        """
        inputs: list[Tensor] = []  # keeps their memory, so that no two have one address
        groups: dict[Any, list[str]] = {}

        def see(name: str, x: Tensor, *_: Any) -> None:
            inputs.append(x)
            self._times[name] += 1
            groups.setdefault(name if name in self._experts else (x.data_ptr(), x.shape), []).append(name)

        with self._seen(self._layers, see):
            self._output(0)
        groups |= {name: [name] for name in self._layers}
        placed: set[str] = set()
        result = []
        for group in groups.values():
            result.append([name for name in dict.fromkeys(group) if name not in placed])
            placed.update(group)
        return [group for group in result if group]

    def _take_inputs(self, name: str, take: Callable[..., None]) -> None:
        """Call ``take`` with the positions that count and the layer's arguments whenever a batch calls it."""
        counted: Tensor | None = None
        times = 0

        def see(_: str, *args: Any) -> None:
            nonlocal times
            take(counted, *args)
            times += 1
            if times == self._times[name]:
                raise Enough

        with self._seen([name], see):
            for batch, counted in enumerate(self._calls.counted):  # noqa: B007 - see() reads it
                times = 0
                with suppress(Enough):
                    self._output(batch)

    def _prune_group(self, names: list[str], method: str) -> dict[str, float]:
        """Prune layers with one input, and return their output errors by name."""
        weights = [self._weight(name) for name in names]
        moment = self._moment(names[0], weights[0])
        dense = [weight.to(torch.float32, copy=True) for weight in weights]
        found = self._prune(weights, dense, moment, method)
        self._quantized |= zip(names, found, strict=False)
        return {
            name: output_error(before, weight.float(), moment)
            for name, before, weight in zip(names, dense, weights, strict=True)
        }

    def _prune_experts(self, name: str, method: str) -> dict[str, float]:
        """Prune stacked experts, and return the output errors of their stacks by name."""
        seen: list[Routed] = []
        self._take_inputs(name, lambda counted, x, experts, *_: seen.append(Routed.of(x, experts, counted)))

        def prune(weight: Tensor, moment: Tensor, how: str) -> Sparse24QuantizedWeight | None:
            return next(iter(self._prune([weight], [weight.float()], moment, how)), None)

        found = prune_experts(name, self._experts[name], seen, method, prune)
        self._idle |= {own: one.without_tokens for own, one in found.items()}
        self._quantized |= {own: concat_weights(one.parts) for own, one in found.items() if one.parts}
        return {own: one.output_error for own, one in found.items()}

    def _prune(
        self, weights: list[Tensor], dense: list[Tensor], moment: Tensor, method: str
    ) -> list[Sparse24QuantizedWeight]:
        """Replace weights that multiply the same inputs by pruned ones.

        ``dense`` are the weights in float32. The result are the quantized weights, or none.
        """
        if (to := self._form.rounding(element_of(weights[0].dtype, "weight"))) is None:
            for weight, part in zip(weights, pruned_together(dense, moment, method), strict=True):
                weight.copy_(part)
            return []
        found = quantized_together(dense, moment, method, to)
        for weight, one in zip(weights, found, strict=True):
            weight.copy_(_dequantized(one))
        return found

    def _moment(self, name: str, weight: Tensor) -> Tensor:
        """X^T X of a layer's inputs, float32 [K, K], over all batches."""
        moment = Moment(weight)

        def take(counted: Tensor | None, x: Tensor) -> None:
            masked = counted is not None and x.shape[:-1] == counted.shape
            moment.add(x[counted] if masked else x)

        self._take_inputs(name, take)
        return moment.finite(name)

    # Files of finished blocks ---------------------------------------------------------------------

    def _stored(self) -> dict[str, Layer]:
        """The entries of the weights in a file: dense, or compressed if they are quantized."""
        layers = {}
        for name in self._names:
            weight = self._weight(name)
            m, k = weight.shape
            stack = 0 if name in self._layers else len(self._stack(name))
            dense = Layer(name, m, k, element_of(weight.dtype, name), (), stack=stack)
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
        metadata = {_RUN_KEY: run, _ERRORS_KEY: json.dumps(errors), _IDLE_KEY: json.dumps(self._idle)}
        with SafetensorsWriter(file, self._infos(), metadata) as writer:
            for name in self._names:
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
                    quantized: Any = read_weight(model, layer)
                    self._quantized[name] = quantized
                    self._put(name, _dequantized(quantized))
                    continue
                weight = self._weight(name)
                stored = torch.from_numpy(reader.read(name)).view(weight.dtype)
                self._put(name, stored.reshape(weight.shape))
            errors: dict[str, float] = json.loads(reader.metadata[_ERRORS_KEY])
            idle = json.loads(reader.metadata.get(_IDLE_KEY, "{}"))
            self._idle = {name: tuple(experts) for name, experts in idle.items()}
            return errors


def _dequantized(weight: Any) -> Tensor:
    """A quantized weight as a dense matrix [M, K] in float32."""
    return torch.from_numpy(weight.decompress().astype(np.float32))
