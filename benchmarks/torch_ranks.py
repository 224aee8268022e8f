"""The decoder of torch_end_to_end.py on several GPUs of one host: a process each, collectives between them.

Dense layers are all-reduced as runtimes do it. Sparse ones are those of ``parallelize_module``, cut from the
ranks' dense parts, so both contenders hold the same values.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from sparse24_plans.bench.record import Record, Step
from sparse24_plans.torch.parallel import ColwiseSparse24, RowwiseSparse24
from sparse24_plans.torch.swap import Sparse24Recipe

from .torch_end_to_end import LLAMA_8B, PREFILLS, STEPS, Decoder, DecoderShape, contenders, decoder_row

_LIMIT = timedelta(minutes=5)
_POLL_S = 0.2


class RankedDecoder(Decoder):
    """One rank's part of a decoder."""

    def sparse(self, stored: str | None = None, **require: bool) -> RankedDecoder:
        """A copy of the decoder with sparse layers."""
        ranks = self.shape.ranks
        mesh = init_device_mesh(next(self.parameters()).device.type, (ranks,))
        other = copy.deepcopy(self)
        styles: dict[str, Any] = {
            "qkv": ColwiseSparse24(),
            "out": RowwiseSparse24(parts=ranks),
            "gate_up": ColwiseSparse24(),
            "down": RowwiseSparse24(parts=ranks),
        }
        for layer in other.layers:
            for name, style in styles.items():
                columns = isinstance(style, ColwiseSparse24)
                weight = _whole(getattr(layer, name).weight.detach(), ranks, dim=0 if columns else 1)
                recipe = Sparse24Recipe("compress", stored=stored, require=require or None)
                if name == "gate_up":  # each rank's gate and up: the whole gate comes first
                    weight = weight.view(ranks, 2, -1, weight.shape[1]).transpose(0, 1).flatten(0, 2)
                    recipe = replace(recipe, activation="swiglu")
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
                linear.weight = nn.Parameter(weight, requires_grad=False)
                sparse = recipe.layer(name, linear)
                setattr(layer, name, parallelize_module(sparse, mesh, style, src_data_rank=None))
        return other


def _whole(part: Tensor, ranks: int, dim: int) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def steps(
    ranks: int,
    shape: DecoderShape = LLAMA_8B,
    device: str = "cuda",
    counts: Mapping[str, Sequence[int]] = MappingProxyType({"decode": STEPS, "prefill": PREFILLS}),
    **options: Any,
) -> list[Step]:
    """One measurement of all rows, since the processes take long to start. ``options`` are decoder_row's."""

    def measure(sources: set[str]) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            processes: Any = multiprocessing
            found = processes.get_context("spawn").SimpleQueue()
            arguments = (
                replace(shape, ranks=ranks),
                device,
                str(Path(folder, "store")),
                dict(counts),
                options,
            )
            children = processes.spawn(_rank, (*arguments, found), nprocs=ranks, join=False)
            rows = []
            while not children.join(timeout=_POLL_S) or not found.empty():
                while not found.empty():
                    row, used = found.get()
                    sources.update(used)
                    rows.append(row)
        return {"decoder": rows}

    return [Step("decoder", {"gpus": ranks}, measure)]


def _rank(
    rank: int,
    shape: DecoderShape,
    kind: str,
    store: str,
    counts: Mapping[str, Sequence[int]],
    options: dict[str, Any],
    found: Any,
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    group: Any = dist
    group.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=group.FileStore(store, shape.ranks),
        rank=rank,
        world_size=shape.ranks,
        timeout=_LIMIT,
    )
    try:
        models = contenders(shape, torch.bfloat16, device, RankedDecoder)
        for name, each in counts.items():
            for count in each:
                used: set[str] = set()
                row = decoder_row(models, name, count, used, **options)
                if rank == 0:
                    found.put((row, sorted(used)))
    finally:
        dist.destroy_process_group()
