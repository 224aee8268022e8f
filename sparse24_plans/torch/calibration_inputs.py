"""Records what the blocks of a model are called with, for each batch of a calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, device, nn

from ..errors import InvalidProblemError


class Enough(BaseException):
    """Ends the call of a model or a block that needn't compute more.

    It is no Exception, because models may catch those.
    """


class Moment:
    """X^T X of the inputs of a weight [M, K], summed in float32."""

    def __init__(self, weight: Tensor) -> None:
        self._k = k = weight.shape[1]
        self._total = torch.zeros(k, k, dtype=torch.float32, device=weight.device)

    def add(self, x: Tensor) -> None:
        """Add inputs [..., K]."""
        rows = x.reshape(-1, self._k).float()
        self._total.addmm_(rows.T, rows)

    def finite(self, name: str) -> Tensor:
        """The sum [K, K]. Raises InvalidProblemError naming the weight for inputs that aren't finite."""
        if not bool(torch.isfinite(self._total).all()):
            raise InvalidProblemError(f"{name}: expected finite inputs, got a moment with NaN or Inf")
        return self._total


@dataclass
class Calls:
    """The blocks' calls for every batch. ``hidden`` are the inputs of the next block."""

    hidden: list[Tensor]
    arguments: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]
    """All arguments but the first, for each batch and block."""
    counted: list[Tensor | None]
    """The positions [batch, tokens] that count, for each batch; None for all."""
    device: device | None
    """The device of all of them, to which blocks are moved; None if nothing is moved."""


def recorded(
    model: nn.Module, blocks: Mapping[str, nn.Module], batches: Sequence[Any], device: device | None
) -> Calls:
    """Record the arguments of the model's blocks for every batch.

    Blocks record their arguments instead of computing. The first block computes once, which shows the type of
    its result. The first batch runs to the end of the model, which shows that no block is called twice. Later
    batches end with the last block.
    """
    calls = Calls([], [], [], device)
    order = {id(block): index for index, block in enumerate(blocks.values())}
    rests: list[tuple[Any, ...] | None] = []
    moved: dict[int, Any] = {}

    def note(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden, *others = args or (kwargs.pop("hidden_states", None),)
        seen = calls.arguments[-1]
        if order[id(block)] != len(seen) or not isinstance(hidden, Tensor):
            raise InvalidProblemError(
                "model: expected blocks that pass a tensor on, called once each, in order"
            )
        if not seen:
            calls.hidden.append(hidden.to(device, copy=True))
        if not rests:
            result = forward(hidden, *others, **kwargs)
            rests.append(result[1:] if isinstance(result, tuple) else None)
        seen.append(_moved((tuple(others), kwargs), device, moved))
        if len(seen) == len(blocks) and len(calls.arguments) > 1:
            raise Enough
        return hidden if rests[0] is None else (hidden, *rests[0])

    with ExitStack() as stack:
        for block in blocks.values():
            # A block may have a forward of its own, a compiled one for instance, which outlives this.
            own = {name: value for name, value in vars(block).items() if name == "forward"}
            stack.callback(vars(block).update, own)
            stack.callback(vars(block).pop, "forward")
            block.forward = partial(note, block, block.forward)  # type: ignore[method-assign]
        for batch in batches:
            calls.arguments.append([])
            with suppress(Enough):
                if isinstance(batch, Mapping):
                    model(**batch)
                else:
                    model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
            if len(calls.arguments[-1]) != len(blocks):
                raise InvalidProblemError("model: expected a model that calls each of its blocks")
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            flat = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
            calls.counted.append(_moved(flat, device, moved))
    if not any(hidden.numel() for hidden in calls.hidden):
        raise InvalidProblemError("batches: expected tokens, got none in any of them")
    return calls


def _moved(value: Any, device: device | None, known: dict[int, Any]) -> Any:
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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)
