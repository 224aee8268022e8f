"""The one cache of the plans that ops have selected, with all that was checked about their operands.

A *form* is everything about a call except its addresses: shapes, strides, dtypes, devices and options. The
first call of a form selects the plan and checks the operands. Later calls of this form look the result up,
allocate with PyTorch's allocator and launch on PyTorch's current stream.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch

from ..device.install import lock_across_forks
from ..plan.launches import Caller
from ..plan.preference import PlanPreference
from .elements import stream_getter

MAX_FORMS = 4096
"""Forms that a cache keeps: a server's numbers of tokens, times the shapes of its model's layers."""


_lock = lock_across_forks()


class PlanCache(dict[Any, Any]):
    """At most :data:`MAX_FORMS` entries by form; the oldest entry makes room for a new one.

    Threads may share a cache. Its ``get`` is that of ``dict``, so finding an entry takes no lock.
    """

    def keep(self, form: Any, entry: Any) -> Any:
        """Store the entry and return it."""
        with _lock:
            while len(self) >= MAX_FORMS:
                del self[next(iter(self))]
            self[form] = entry
        return entry


plans = PlanCache()
"""The cache of every op."""
find = plans.get
"""Gives the entry of a form, or None. It is bound once, because every call of an op looks for one."""


def about(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor but its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def form_of(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The form of a call of an op with these arguments."""
    return op, *[about(one) if isinstance(one, torch.Tensor) else one for one in args]


class CheckedCall:
    """The plan for operands of one form, which launches with any addresses, workspace and stream."""

    def __init__(self, plan: Any, caller: Caller, device: torch.device) -> None:
        self._caller, self._device = caller, device
        self._workspace = plan.workspace_size()
        self._stream = stream_getter(device.index if device.type == "cuda" else -1)

    def _launch(self, addresses: tuple[int, ...]) -> None:
        """``addresses`` are in the order of the caller's operands."""
        if self._workspace:
            scratch = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
            self._caller.launch(addresses, scratch.data_ptr(), self._stream())
        else:
            self._caller.launch(addresses, 0, self._stream())


class Refusal:
    """Stands in the cache for a form that no kernel serves."""

    def __init__(self, error: Exception) -> None:
        self._kind, self._message = type(error), str(error)

    def run(self, *_: object) -> NoReturn:
        """Raise the error that selection raised."""
        raise self._kind(self._message)


@lru_cache(maxsize=MAX_FORMS)
def descriptor(plan: Any, **fields: Any) -> Any:
    """The descriptor of the plan's class. A field that is None has its default.

    Raises InvalidProblemError naming the field.
    """
    return plan.descriptor_type(**{name: value for name, value in fields.items() if value is not None})


@lru_cache(maxsize=256)
def preference_of(text: str) -> PlanPreference | None:
    """The preference that the JSON ``text`` says; None for "". Raises InvalidProblemError."""
    return PlanPreference.model_validate_json(text) if text else None
