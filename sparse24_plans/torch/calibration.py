"""``calibrate`` prunes (and quantizes) a model's layers to 2:4 by their inputs, block after block.

A block is one of the model's layers, such as a decoder layer. While one is pruned, only its inputs, its own
weights, the rows of its experts and one moment X^T X are needed on the device. The inputs come from the
pruned blocks before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.compressed_form import compressed_form
from ..device.files import StrPath, path_of
from ..errors import InvalidProblemError, check_choice, check_type, shown
from ..weights.calibrated import METHODS
from .calibrated_block import Block, CalibratedLayer, digest
from .calibration_inputs import recorded, tensors_in
from .conv1d import is_linear, linear_of
from .elements import device_of
from .experts import STACKS, holds_stacks
from .swap import Choice, progress_bar


@dataclass(frozen=True)
class CalibrationReport:
    """The result of ``calibrate``: pruned ``layers``, and those ``left_dense`` with reasons."""

    method: str
    layers: tuple[CalibratedLayer, ...]
    left_dense: Mapping[str, str]

    def __str__(self) -> str:
        lines = [str(one) for one in self.layers]
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
    """Prune the linear layers and stacked experts of the model's blocks to 2:4 in place, by their inputs.

    The weights stay dense tensors with zeros: ``to_sparse24(model, recipe="compress")`` makes them sparse,
    and the saved model says that calibration made them. Blocks are the elements of the nn.ModuleList or
    nn.Sequential that holds most weights. An expert is pruned for its tokens, or without any by magnitude.

    Parameters
    ----------
    model : torch.nn.Module
        A dense model, whose blocks have nn.Linear, Conv1D or stacked experts, as ``to_sparse24`` takes them.
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
        calls = recorded(model, blocks, batches, None if device is None else device_of(device))
        seed = digest(f"{method}{form}".encode(), *tensors_in(batches))
        for index, (place, block) in enumerate(blocks.items()):
            own = {name: one for name, one in chosen.items() if f"{name}.".startswith(f"{place}.")}
            file = None if folder is None else folder / f"block-{index:04}.safetensors"
            layers += Block(block, own, calls, index, form).prune(method, file, seed)
            advance()
    return CalibrationReport(method, tuple(layers), left)


def _check_arguments(model: object, batches: object, method: object) -> None:
    check_type("model", model, nn.Module, "a module")
    check_choice("method", method, METHODS)
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


# Choice of layers -----------------------------------------------------------------------------------


def _chosen(
    model: nn.Module, include: Sequence[str], exclude: Sequence[str], step: int
) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, str]]:
    """The model's blocks, the layers to prune, and why others stay dense. K is a multiple of ``step``."""
    home, most = None, 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            size = sum(weight.numel() for one in module.modules() for weight in _weights_of(one))
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
    for name in (*choice.chosen, *choice.experts):
        module = model.get_submodule(name)
        weights = _weights_of(module)
        unfit = [k for k in (weight.shape[-1] for weight in weights) if k % step]
        if not name.startswith(prefix):
            choice.skip(name, f"it is outside of the blocks {prefix}*")
        elif unfit:
            choice.skip(name, f"K={unfit[0]} is not a multiple of {step}")
        elif not all(not weight.is_meta and bool(torch.isfinite(weight).all()) for weight in weights):
            raise InvalidProblemError(f"{name}: expected a finite weight in memory")
        else:
            chosen[name] = module
    left = choice.skipped
    if not chosen:
        raise InvalidProblemError(f"model: expected a layer to prune, got none: {shown(left)}")
    return blocks, chosen, left


def _weights_of(module: nn.Module) -> list[Tensor]:
    """The weight of a linear layer, both stacks of experts; nothing of other modules."""
    if is_linear(module):
        return [linear_of(module).weight.detach()]
    return [getattr(module, own).detach() for own in STACKS] if holds_stacks(module) else []
