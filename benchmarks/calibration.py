"""Seconds that ``calibrate`` takes on one GPU for a decoder of Llama-3.1-8B's shapes, with random weights.

The calibration set is 128 sequences of 2048 random vectors, the inputs of the first layer. Weights and
inputs are bf16, and all of them are on the GPU.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sparse24_plans.bench.record import Lists, Record, Step
from sparse24_plans.torch import calibrate

from .torch_end_to_end import LLAMA_8B, Decoder, DecoderShape

LISTS: Lists = {"calibration": ("layers", "hidden", "ffn", "method", "tokens")}
SHAPE = replace(LLAMA_8B, layers=32)
METHODS = ("sparsegpt", "wanda")
SEQUENCES, LENGTH, BATCH = 128, 2048, 4


def steps(
    shape: DecoderShape = SHAPE, device: str = "cuda", *, sequences: int = SEQUENCES, length: int = LENGTH
) -> list[Step]:
    """A run of each method."""
    about = {"layers": shape.layers, "hidden": shape.hidden, "ffn": shape.ffn, "tokens": sequences * length}
    found = []
    for method in METHODS:

        def measure(sources: set[str], method: str = method) -> Record:
            row = {**about, "method": method, **_calibrated(shape, device, method, sequences, length)}
            return {"calibration": [row]}

        found.append(Step("calibration", {**about, "method": method}, measure))
    return found


def dense_decoder(shape: DecoderShape, device: str) -> Decoder:
    """A decoder whose random weights aren't 2:4."""
    model = Decoder(shape, torch.bfloat16, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1 / math.sqrt(shape.hidden))
    return model


def _calibrated(
    shape: DecoderShape, device: str, method: str, sequences: int, length: int
) -> dict[str, float | None]:
    """The seconds of a run, and the most gigabytes of the GPU's memory that PyTorch held."""
    torch.manual_seed(0)
    model, on_gpu = dense_decoder(shape, device), torch.device(device).type == "cuda"
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    batches = [(torch.randn(BATCH, length, shape.hidden, **options), None) for _ in range(sequences // BATCH)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(
            _said_once(f"{method}: layer {index} of {shape.layers}", begin, len(batches))
        )
    calibrate(model, batches, method=method, progress=False)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = round(time.perf_counter() - begin, 2)
    return {"seconds": seconds, "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None}


def _said_once(text: str, begin: float, recorded: int) -> Callable[..., None]:
    """A hook that says on stderr when a layer's pruning begins, after its ``recorded`` calls for inputs."""
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == recorded + 1:
            print(f"{time.perf_counter() - begin:5.0f} s, {text}", file=sys.stderr, flush=True)

    return hook
