"""What a user of PyTorch gets: host time a call, and a decoder of Llama-3.1-8B's shapes, dense and sparse.

The decoder is that of Llama in everything that costs time: RMS norms, grouped-query attention over a KV
cache, SwiGLU, residuals; random weights, no rotary embedding. Both contenders have the same values: the dense
one's weights are pruned. SwiGLU follows the dense product in two kernels, as F.silu(gate) * up is in PyTorch;
the sparse one has it in its epilogue. A step of ``n`` sequences adds a token to each; a prefill is one
sequence. Each is checked against the dense one before it is timed. Contenders are interleaved; figures are
medians. On several GPUs (torch_ranks.py) each holds its heads and its share of the feed-forward's features.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..torch.linear import Sparse24Linear
from ..torch.swap import Sparse24Recipe, to_sparse24
from .record import Record, sources_of

F = nn.functional
STEPS = (1, 8, 16, 32, 64, 128)
PREFILLS = (2048, 8192)
ROUNDS = 15
_ROUNDS_OF_STEPS = 3
"""Decode steps are short, and in eager mode the host's time, which scatters."""
HOST_CALLS = 200
_WORST_ERROR = 0.05
"""Of a decoder's result, relative to its norm, in bfloat16 over all layers."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder; ``cache`` is the tokens that a decode step attends to."""

    layers: int = 16
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    cache: int = 1024
    ranks: int = 1
    """GPUs that share heads and features evenly; the sizes above are those of the whole."""

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def own_heads(self) -> tuple[int, int]:
        """Of a rank: for queries, and for keys and values."""
        return self.heads // self.ranks, self.kv_heads // self.ranks


LLAMA_8B = DecoderShape()


# The decoder --------------------------------------------------------------------------------------


class SummedLinear(nn.Linear):
    """A dense row-parallel layer as runtimes have it: the ranks' products, all-reduced."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        dist.all_reduce(y)
        return y


class Layer(nn.Module):
    """Attention and feed-forward of one layer, Q, K and V in one product, gate and up in another.

    On several ranks ``qkv`` and ``gate_up`` are column-parallel, ``out`` and ``down`` row-parallel.
    """

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.shape = shape
        options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        q, kv = (heads * shape.head_size for heads in shape.own_heads)
        ffn = shape.ffn // shape.ranks
        rows = nn.Linear if shape.ranks == 1 else SummedLinear
        self.qkv = nn.Linear(shape.hidden, q + 2 * kv, **options)
        self.out = rows(q, shape.hidden, **options)
        self.gate_up = nn.Linear(shape.hidden, 2 * ffn, **options)
        self.down = rows(ffn, shape.hidden, **options)

    def forward(self, x: Tensor, keys: Tensor | None, values: Tensor | None) -> Tensor:
        """x [sequences, tokens, hidden]; keys and values [sequences, kv heads, cache, head size], or None.

        With a cache there is one token, which replaces the cache's last; without one attention is causal.
        """
        shape = self.shape
        sequences, tokens, _ = x.shape
        size, (heads, kv) = shape.head_size, shape.own_heads
        qkv = self.qkv(F.rms_norm(x, (shape.hidden,)))
        q, k, v = qkv.split((heads * size, kv * size, kv * size), dim=-1)
        q = q.view(sequences, tokens, heads, size).transpose(1, 2)
        k = k.view(sequences, tokens, kv, size).transpose(1, 2)
        v = v.view(sequences, tokens, kv, size).transpose(1, 2)
        if keys is not None and values is not None:
            keys[:, :, -1:] = k
            values[:, :, -1:] = v
            k, v = keys, values
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=keys is None, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(sequences, tokens, heads * size))
        mixed: Tensor = x + self.down(self.gated(F.rms_norm(x, (shape.hidden,))))
        return mixed

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up, which a sparse layer gives itself."""
        product: Tensor = self.gate_up(x)
        if isinstance(self.gate_up, Sparse24Linear):
            return product
        gate, up = product.chunk(2, dim=-1)
        return F.silu(gate) * up


class Decoder(nn.Module):
    """Layers with 2:4 weights held densely; ``sparse`` makes the contender."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape, dtype, device) for _ in range(shape.layers))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.ops.sparse24.prune(parameter.normal_(std=1 / math.sqrt(shape.hidden))))
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, *(cache[index] if cache else (None, None)))
        return x

    def sparse(self, **require: bool) -> Decoder:
        """The same decoder with sparse layers."""
        other = copy.deepcopy(self)
        recipes = {
            "*.gate_up": Sparse24Recipe("compress", activation="swiglu", require=require or None),
            "*": Sparse24Recipe("compress", require=require or None),
        }
        to_sparse24(other, recipe=recipes, progress=False)
        return other


def cache_of(
    shape: DecoderShape, sequences: int, dtype: torch.dtype, device: Any
) -> list[tuple[Tensor, Tensor]]:
    """A full KV cache, a pair a layer."""
    sizes = (sequences, shape.own_heads[1], shape.cache, shape.head_size)
    return [
        (torch.randn(sizes, dtype=dtype, device=device), torch.randn(sizes, dtype=dtype, device=device))
        for _ in range(shape.layers)
    ]


# Timing -------------------------------------------------------------------------------------------


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_ready(device: torch.device) -> None:
    """This rank, and all others where there are any."""
    _synchronize(device)
    if dist.is_initialized():
        dist.barrier()
        _synchronize(device)


def _interleaved_ms(
    calls: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Median milliseconds from the call to its end on the device, by name."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _all_ready(device)
            begin = time.perf_counter()
            call()
            _synchronize(device)
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: round(statistics.median(found), 4) for name, found in times.items()}


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of the call, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
        call()
    replay: Callable[[], object] = graph.replay
    return replay


def _checked(models: dict[str, Decoder], run: Callable[[Decoder], Tensor]) -> None:
    """Raise UnsupportedError where a contender's result is wrong. Selects and compiles everything, too."""
    wanted = run(models["dense"]).double()
    for name, model in models.items():
        error = ((run(model).double() - wanted).norm() / wanted.norm()).item()
        if not error <= _WORST_ERROR:
            raise UnsupportedError(
                f"decoder {name}: expected a relative error of {_WORST_ERROR}, got {error}"
            )


def _row(
    models: dict[str, Decoder], run: Callable[[Decoder], Tensor], device: torch.device, rounds: int
) -> dict[str, float | None]:
    with torch.inference_mode():
        _checked(models, run)
        eager = _interleaved_ms({name: lambda m=m: run(m) for name, m in models.items()}, device, rounds)  # type: ignore[misc]
        row: dict[str, float | None] = {f"eager_{name}_ms": eager[name] for name in ("dense", "sparse")}
        graphs: dict[str, float] = {}
        if device.type == "cuda":
            replays = {name: _captured(lambda m=m: run(m)) for name, m in models.items()}  # type: ignore[misc]
            graphs = _interleaved_ms(replays, device, rounds)
        return {**{f"graph_{name}_ms": graphs.get(name) for name in models}, **row}


# The record ---------------------------------------------------------------------------------------


Keep = Callable[[Record], None]


def contenders(
    shape: DecoderShape, dtype: torch.dtype, device: torch.device, kind: type[Decoder] = Decoder
) -> dict[str, Decoder]:
    """The dense decoder, the sparse one, and that of batch-invariant kernels."""
    torch.manual_seed(0)
    dense = kind(shape, dtype, device)
    return {"dense": dense, "sparse": dense.sparse(), "invariant": dense.sparse(batch_invariant=True)}


def decoder_rows(
    models: dict[str, Decoder],
    device: torch.device,
    keep: Keep,
    *,
    steps: Iterable[int] = STEPS,
    prefills: Iterable[int] = PREFILLS,
    rounds: int = ROUNDS,
    sources: set[str] | None = None,
) -> None:
    """Hand the rows of ``decoder`` to ``keep``, each when it is measured; graphs are None without a GPU.

    Adds to ``sources`` what was launched, before. Raises UnsupportedError for a wrong result.
    """
    dense = models["dense"]
    shape, dtype = dense.shape, next(dense.parameters()).dtype
    for kind, counts in (("decode", steps), ("prefill", prefills)):
        for count in counts:
            decodes = kind == "decode"
            n, tokens = (count, 1) if decodes else (1, count)
            x = torch.randn(n, tokens, shape.hidden, dtype=dtype, device=device)
            cache = cache_of(shape, n, dtype, device) if decodes else None

            def run(model: Decoder, x: Tensor = x, cache: Any = cache) -> Tensor:
                result: Tensor = model(x, cache)
                return result

            times = _row(models, run, device, _ROUNDS_OF_STEPS * rounds if decodes else rounds)
            if sources is not None:
                sources.update(launched(models.values(), n * tokens))
            about = {"kind": kind, "n": n, "tokens": tokens, "weights": "bf16", "gpus": shape.ranks}
            keep({**about, **times})


def launched(models: Iterable[nn.Module], n: int) -> set[str]:
    """The kernel sources behind the models' sparse layers at ``n`` tokens."""
    layers = (layer for model in models for layer in model.modules() if isinstance(layer, Sparse24Linear))
    return {source for layer in layers for source in sources_of(layer.plan(n))}


def host_us(
    device: torch.device, dtype: torch.dtype, *, calls: int = HOST_CALLS, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Host microseconds a call of a small layer [256, 256] on 16 tokens, interleaved.

    ``torch_sparse_us`` is None where PyTorch's own sparse tensor isn't served.
    """
    dense = nn.Linear(256, 256, bias=False, device=device, dtype=dtype).requires_grad_(False)
    dense.weight.copy_(torch.ops.sparse24.prune(dense.weight))
    layer = Sparse24Linear.from_linear(dense, method="compress")
    x = torch.randn(16, 256, device=device, dtype=dtype)
    compiled_dense, compiled_sparse = torch.compile(dense), torch.compile(layer)
    contenders: dict[str, Callable[[], object]] = {
        "f_linear_us": lambda: F.linear(x, dense.weight),
        "sparse_linear_us": lambda: layer(x),
        "torch_sparse_us": _of_torch_sparse(dense.weight, x),
        "compiled_dense_us": lambda: compiled_dense(x),
        "compiled_sparse_us": lambda: compiled_sparse(x),
    }
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for name, call in contenders.items():
            try:
                call()
            except (RuntimeError, NotImplementedError):
                if name != "torch_sparse_us":
                    raise
                found[name] = None
        times: dict[str, list[float]] = {name: [] for name in contenders if name not in found}
        for _ in range(rounds):
            for name in times:
                times[name].append(_host_us(contenders[name], calls, device))
    found |= {name: round(statistics.median(each), 2) for name, each in times.items()}
    return {name: found[name] for name in contenders}


def _of_torch_sparse(weight: Tensor, x: Tensor) -> Callable[[], object]:
    """F.linear with PyTorch's own semi-structured tensor; the call raises where it can't be made."""
    try:
        sparse = torch.sparse.to_sparse_semi_structured(weight)
    except RuntimeError as error:
        refusal = error

        def refuse() -> object:
            raise refusal

        return refuse
    return lambda: F.linear(x, sparse)


def _host_us(call: Callable[[], object], calls: int, device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6
