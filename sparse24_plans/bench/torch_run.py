"""Measures the record of PyTorch's door, or a part of it: ``sparse24 bench --torch -o h200-torch.json``.

``host``: microseconds of host time a call, of one GPU alone. ``decoder``: milliseconds of a decode step or a
prefill, dense, sparse and batch-invariant, eager and in a CUDA graph; ``gpus`` that share the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import BackendUnavailableError
from . import record, torch_door, torch_ranks
from .record import TORCH_KEYS, Record

STEPS = len(torch_door.STEPS) + len(torch_door.PREFILLS)


def check_gpus(gpus: int) -> None:
    """Raises BackendUnavailableError where PyTorch sees fewer."""
    found = torch.cuda.device_count()
    if found < gpus:
        raise BackendUnavailableError(
            f"PyTorch {torch.__version__} sees {found} CUDA devices, {gpus} are needed"
        )


def measure(
    gpus: int,
    on_step: Callable[[], None] = lambda: None,
    keep: Callable[[Record], None] = lambda _: None,
    *,
    shape: torch_door.DecoderShape = torch_door.LLAMA_8B,
    device: str = "cuda",
    **options: Any,
) -> Record:
    """A record of the decoder on so many GPUs, and of the host's times where that is one.

    ``keep`` gets what there is after every row: an interrupted run leaves that. ``options`` are those of
    ``decoder_rows``. Raises BackendUnavailableError without the GPUs, UnsupportedError for a wrong result.
    """
    found, sources = record.empty(record.machine(), TORCH_KEYS), set[str]()

    def add(row: Record) -> None:
        found["decoder"].append(row)
        found.update(record.stamp(record.files_of(sources)))
        keep(found)
        on_step()

    if gpus > 1:
        torch_ranks.measure_on(replace(shape, ranks=gpus), add, sources, device, **options)
        return found
    place = torch.device(device)
    found["host"] = torch_door.host_us(place, torch.bfloat16)
    models = torch_door.contenders(shape, torch.bfloat16, place)
    torch_door.decoder_rows(models, place, add, sources=sources, **options)
    return found
