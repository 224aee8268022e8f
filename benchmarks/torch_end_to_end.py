"""End to end in PyTorch: host time a call, and a decoder of Llama-3.1-8B's shapes, dense and sparse.

The decoder is that of Llama in everything that costs time: RMS norms, grouped-query attention over a KV
cache, SwiGLU, residuals; random weights, no rotary embedding. Both contenders have the same values: the dense
one's weights are pruned, and rounded as the sparse one stores them: as bf16, or for decoding as s4 with a
scale for each 128 columns. In the dense one SwiGLU and residuals follow their products in kernels of their
own, which torch.compile fuses with norms; the sparse one has them in its epilogues. A step of ``n`` sequences
adds a token to each; a prefill is one sequence. Each contender is checked against the dense one, then timed
alone: eager, in a CUDA graph, and in a CUDA graph of layers that torch.compile made. The compiled dense
decoder is the faster one of two modes of torch.compile. On several GPUs (torch_ranks.py) each holds its heads
and its share of the feed-forward's features, and nothing is compiled.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache as cache_results
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from sparse24_plans.bench.peers import torch_ruler
from sparse24_plans.bench.record import Lists, Record, Step, sources_of
from sparse24_plans.bench.steady import BLOCK_US, MANY_TOKENS, Steady, Work, steady
from sparse24_plans.errors import UnsupportedError
from sparse24_plans.torch.linear import Sparse24Linear
from sparse24_plans.torch.swap import Sparse24Recipe, to_sparse24
from sparse24_plans.torch.weight_only_linear import Sparse24WeightOnlyLinear

F = nn.functional
LISTS: Lists = {"decoder": ("kind", "n", "tokens", "weights", "gpus")}
STEPS = (1, 8, 16, 32, 64, 128, 256)
PREFILLS = (2048, 8192)
HOST_CALLS, HOST_ROUNDS = 200, 15
_WORST_ERROR = 0.05
"""Relative error of a decoder's result above which it is not timed; bfloat16 rounds in every layer."""
_MODES = ("default", "max-autotune-no-cudagraphs")
_SHAPES_OF_A_LAYER = 64
"""Recompilations that torch.compile may make before it gives up."""


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
        """Heads of one rank: for queries, and for keys and values."""
        return self.heads // self.ranks, self.kv_heads // self.ranks


LLAMA_8B = DecoderShape()
Cache = list[tuple[Tensor, Tensor]] | None
"""Keys and values of each layer; a prefill has none."""
Models = dict[str, "Decoder"]
Calls = dict[str, Callable[[], object]]
Fields = dict[str, float | None]


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
        attended = attended.transpose(1, 2).reshape(sequences, tokens, heads * size)
        x = self.added(x, self.out, attended)
        return self.added(x, self.down, self.gated(F.rms_norm(x, (shape.hidden,))))

    def added(self, x: Tensor, layer: nn.Module, inner: Tensor) -> Tensor:
        """x + layer(inner); a sparse layer of one GPU adds x itself."""
        is_fused = self.shape.ranks == 1 and isinstance(layer, Sparse24Linear)
        y: Tensor = layer(inner, residual=x) if is_fused else x + layer(inner)
        return y

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up, which a sparse layer gives itself."""
        product: Tensor = self.gate_up(x)
        if isinstance(self.gate_up, Sparse24Linear):
            return product
        gate, up = product.chunk(2, dim=-1)
        return F.silu(gate) * up


class Decoder(nn.Module):
    """Layers with 2:4 weights held densely; ``sparse`` makes the contender.

    The layers are copies of one, each in memory of its own, so that a weight is pruned and rounded once.
    """

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.shape = shape
        layer = Layer(shape, dtype, device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.ops.sparse24.prune(parameter.normal_(std=1 / math.sqrt(shape.hidden))))
        self.layers = _copies(layer, shape.layers)
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return through(self.layers, x, cache)

    def sparse(self, stored: str | None = None, **require: bool) -> Decoder:
        """A copy of the decoder with sparse layers, which store their values as ``stored``."""
        other, layer = copy.deepcopy(self), copy.deepcopy(self.layers[0])
        recipe = Sparse24Recipe("compress", stored=stored, require=require or None)
        recipes = {"gate_up": replace(recipe, activation="swiglu"), "*": recipe}
        to_sparse24(layer, recipe=recipes, progress=False)
        other.layers = _copies(layer, self.shape.layers)
        return other

    def take_weights(self, sparse: Decoder) -> None:
        """Give the dense layers the weights that the sparse ones have, rounded."""
        for name, layer in sparse.named_modules():
            if isinstance(layer, Sparse24Linear):
                dense: Any = self.get_submodule(name)
                dense.weight.copy_(layer.dense_weight())


def _copies(layer: nn.Module, count: int) -> nn.ModuleList:
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(count))


def through(layers: Iterable[Callable[..., Tensor]], x: Tensor, cache: Cache) -> Tensor:
    """The result of applying the layers to x, one after another."""
    for index, layer in enumerate(layers):
        x = layer(x, *(cache[index] if cache else (None, None)))
    return x


def cache_of(
    shape: DecoderShape, sequences: int, dtype: torch.dtype, device: Any
) -> list[tuple[Tensor, Tensor]]:
    """A full KV cache, keys and values of each layer."""
    sizes = (sequences, shape.own_heads[1], shape.cache, shape.head_size)
    return [
        (torch.randn(sizes, dtype=dtype, device=device), torch.randn(sizes, dtype=dtype, device=device))
        for _ in range(shape.layers)
    ]


# Timing -------------------------------------------------------------------------------------------


class HostRuler:
    """Marks moments of a device that does its work at once."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def is_past(self, mark: float) -> bool:
        return True

    def us_between(self, begin: float, end: float) -> float:
        return 1e6 * (end - begin)


def _agreed(device: torch.device) -> Callable[[int], int]:
    """The largest of all ranks' numbers: ranks run a step together, so as often."""

    def largest(number: int) -> int:
        if not dist.is_initialized():
            return int(number)
        every = torch.tensor(int(number), device=device)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return int(every)

    return largest


def alone(works: Mapping[str, Work], device: torch.device, **options: Any) -> dict[str, Steady]:
    """Time of each work alone, on a GPU or a CPU. ``options`` are those of ``steady``."""
    if device.type != "cuda":
        return steady(works, HostRuler(), _agreed(device), **options)
    with torch_ruler() as ruler:
        return steady(works, ruler, _agreed(device), **options)


def _alone(calls: Calls, device: torch.device, block_us: float) -> dict[str, Steady]:
    return alone({name: Work(call) for name, call in calls.items()}, device, block_us=block_us)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of the call, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
        call()
    replay: Callable[[], object] = graph.replay
    return replay


def _compiled(model: Decoder, mode: str, x: Tensor, cache: Cache) -> Callable[[], Tensor]:
    """The decoder with each layer compiled. The layers share the compiled code."""
    layers = [torch.compile(layer, mode=mode, dynamic=False) for layer in model.layers]
    return lambda: through(layers, x, cache)


def _checked(name: str, result: Tensor, wanted: Tensor) -> None:
    """Raise UnsupportedError where a contender's result is wrong."""
    error = ((result.double() - wanted).norm() / wanted.norm()).item()
    if not error <= _WORST_ERROR:
        raise UnsupportedError(f"decoder {name}: expected a relative error of {_WORST_ERROR}, got {error}")


def _compiled_ms(models: Models, x: Tensor, cache: Cache, wanted: Tensor, block_us: float) -> Fields:
    """Milliseconds of the compiled contenders; of the dense one the faster mode."""
    torch._dynamo.reset()
    limits = torch._dynamo.config
    limit = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"
    calls = {f"dense {mode}": _compiled(models["dense"], mode, x, cache) for mode in _MODES}
    calls["sparse"] = _compiled(models["sparse"], "default", x, cache)
    with torch.no_grad(), limits.patch({limit: _SHAPES_OF_A_LAYER}):
        for name, call in calls.items():
            _checked(f"compiled {name}", call(), wanted)
            call()
        times = _alone({name: captured(call) for name, call in calls.items()}, x.device, block_us)
    dense = min((times[f"dense {mode}"] for mode in _MODES), key=lambda one: one.us)
    return _fields("compiled_dense_ms", dense, x) | _fields("compiled_sparse_ms", times["sparse"], x)


def _fields(name: str, time: Steady | None, x: Tensor) -> Fields:
    """The milliseconds, and clock and power where there are many tokens."""
    found: Fields = {name: round(time.us / 1e3, 4) if time else None}
    if x.shape[0] * x.shape[1] >= MANY_TOKENS and time:
        found |= time.fields(name.removesuffix("ms") + "us")
    return found


def _row(models: Models, x: Tensor, cache: Cache, block_us: float) -> Fields:
    """The times of a step, or of a prefill."""
    calls: Calls = {name: lambda model=model: model(x, cache) for name, model in models.items()}  # type: ignore[misc]
    on_gpu, compiles = x.device.type == "cuda", models["dense"].shape.ranks == 1
    with torch.inference_mode():
        wanted = models["dense"](x, cache).double()
        for name, model in models.items():
            _checked(name, model(x, cache), wanted)
        eager = _alone({name: calls[name] for name in ("dense", "sparse")}, x.device, block_us)
        row: Fields = {f"eager_{name}_ms": round(one.us / 1e3, 4) for name, one in eager.items()}
        replays = {name: captured(call) for name, call in calls.items()} if on_gpu else {}
        graphs = _alone(replays, x.device, block_us)
    for name in models:
        row |= _fields(f"graph_{name}_ms", graphs.get(name), x)
    nothing: Fields = {"compiled_dense_ms": None, "compiled_sparse_ms": None}
    if not (on_gpu and compiles):
        return row | nothing
    try:
        return row | _compiled_ms(models, x, cache, wanted, block_us)
    except RuntimeError as error:  # torch.compile gave up; the other times are still good
        print(f"not compiled: {error}", file=sys.stderr)
        return row | nothing


# The record ---------------------------------------------------------------------------------------


def contenders(
    shape: DecoderShape,
    dtype: torch.dtype,
    device: torch.device,
    kind: type[Decoder] = Decoder,
    stored: str | None = None,
) -> Models:
    """The dense decoder, the sparse one, and that of batch-invariant kernels."""
    torch.manual_seed(0)
    dense = kind(shape, dtype, device)
    models = {"dense": dense, "sparse": dense.sparse(stored)}
    models["invariant"] = dense.sparse(stored, batch_invariant=True)
    if stored is not None:
        dense.take_weights(models["sparse"])
        for layer in (*models["sparse"].modules(), *models["invariant"].modules()):
            if isinstance(layer, Sparse24WeightOnlyLinear):
                layer.hold_packed()
    return models


def decoder_row(
    models: Models,
    kind: str,
    count: int,
    sources: set[str],
    *,
    weights: str = "bf16",
    block_us: float = BLOCK_US,
) -> Record:
    """The row of a decode step of ``count`` sequences, or of a prefill of ``count`` tokens.

    Times in graphs are None without a GPU. Adds to ``sources`` what was launched. Raises UnsupportedError for
    a wrong result.
    """
    parameter = next(models["dense"].parameters())
    shape, dtype, device = models["dense"].shape, parameter.dtype, parameter.device
    n, tokens = (count, 1) if kind == "decode" else (1, count)
    x = torch.randn(n, tokens, shape.hidden, dtype=dtype, device=device)
    cache = cache_of(shape, n, dtype, device) if kind == "decode" else None
    times = _row(models, x, cache, block_us)
    sources.update(launched(models.values(), count))
    about = {"kind": kind, "n": n, "tokens": tokens, "weights": weights, "gpus": shape.ranks}
    return {**about, **times}


def steps(shape: DecoderShape = LLAMA_8B, device: str = "cuda", **options: Any) -> list[Step]:
    """The measurements of one GPU: the host's times, and the decoder's rows."""
    place = torch.device(device)

    @cache_results
    def models(weights: str) -> Models:
        stored = None if weights == "bf16" else weights
        return contenders(shape, torch.bfloat16, place, stored=stored)

    def host(sources: set[str]) -> Record:
        return {"host": host_us(place, torch.bfloat16)}

    found = [Step("host", {}, host)]
    for kind, weights, counts in (
        ("decode", "bf16", STEPS),
        ("prefill", "bf16", PREFILLS),
        ("decode", "s4", STEPS),
    ):
        for count in counts:
            n, tokens = (count, 1) if kind == "decode" else (1, count)

            def measure(
                sources: set[str], kind: str = kind, count: int = count, weights: str = weights
            ) -> Record:
                row = decoder_row(models(weights), kind, count, sources, weights=weights, **options)
                return {"decoder": [row]}

            fields = {"kind": kind, "n": n, "tokens": tokens, "weights": weights, "gpus": 1}
            found.append(Step("decoder", fields, measure))
    return found


def launched(models: Iterable[nn.Module], n: int) -> set[str]:
    """The kernel sources behind the models' sparse layers at ``n`` tokens."""
    layers = (layer for model in models for layer in model.modules() if isinstance(layer, Sparse24Linear))
    return {source for layer in layers for source in sources_of(layer.plan(n))}


def host_us(
    device: torch.device, dtype: torch.dtype, *, calls: int = HOST_CALLS, rounds: int = HOST_ROUNDS
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6
