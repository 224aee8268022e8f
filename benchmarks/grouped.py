"""Times of grouped products (experts) beside dense ones: ``python -m benchmarks.measure grouped``.

Each cell is one layer of a mixture of experts with so many rows after routing, spread evenly or by Zipf's
law over the experts. Its launches cycle through different routings, whose weights together exceed twice the
L2 cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from sparse24_plans.bench import peers
from sparse24_plans.bench.gemm import Row, rounded
from sparse24_plans.bench.record import Lists, Record, Step, sources_of
from sparse24_plans.bench.steady import time_alone
from sparse24_plans.device.install import import_cupy
from sparse24_plans.errors import UnsupportedError
from sparse24_plans.gemm.args import GemmSparse24Args
from sparse24_plans.gemm.descriptor import GemmSparse24Descriptor
from sparse24_plans.gemm.plan import GemmSparse24Plan
from sparse24_plans.tuning.data import Array, free_memory, random_bits, typed, widened
from sparse24_plans.tuning.timing import Contender, copies_beyond_l2
from sparse24_plans.vocab import ElementKind
from sparse24_plans.weights.weight import PackedWeight, Sparse24Weight

LISTS: Lists = {"products": ("model", "groups", "m", "k", "tokens", "spread", "element")}
LAYERS: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    "Mixtral-8x7B": (8, ((28672, 4096), (4096, 14336))),
    "Qwen3-30B-A3B": (128, ((1536, 2048), (2048, 768))),
    "DeepSeek-V3": (256, ((4096, 7168), (7168, 2048))),
    "Llama-4-Scout": (16, ((16384, 5120), (5120, 8192))),
}
"""Number of experts; (M, K) of an expert's joined gate and up projection, and of its down projection."""
TOKENS = ((64, 4096), (1, 1024), (16, 16384), (4, 256))
"""Rows after routing, in passes over all layers, so that a part of a record has few and many of each."""
SPREADS = ("even", "zipf")
ELEMENTS = (ElementKind.BF16, ElementKind.FP8_E4M3)
_RANDOM = 24
"""Number of random cells of each element."""
_MAX_BYTES = 16 << 30
"""Bytes of a random layer's dense weights."""
_WORST_ERROR = {ElementKind.BF16: 5e-3, ElementKind.FP8_E4M3: 5e-3}
_SAMPLED = 64
"""Rows and columns of a result that are compared with float64."""


class Layer(NamedTuple):
    model: str
    groups: int
    m: int
    k: int
    element: ElementKind


def drawn(seed: int, element: ElementKind) -> Iterator[tuple[Layer, int, str]]:
    """Random layers with a random number of rows."""
    rng = random.Random(f"{seed} {element.value}")
    for _ in range(_RANDOM):
        while True:
            groups = int(2 ** rng.uniform(0, 9.01))
            m, k = 64 * int(2 ** rng.uniform(2, 8)), 64 * int(2 ** rng.uniform(2, 7))
            if groups * m * k * element.itemsize < _MAX_BYTES:
                break
        yield Layer("random", groups, m, k, element), int(2 ** rng.uniform(0, 14)), rng.choice(SPREADS)


def steps(seed: int, elements: tuple[ElementKind, ...] = ELEMENTS) -> list[Step]:
    """The measurements of a seed, in passes over the layers; random ones come last."""
    cells = [
        (Layer(model, groups, m, k, element), tokens, spread)
        for of_pass in TOKENS
        for element in elements
        for model, (groups, shapes) in LAYERS.items()
        for m, k in shapes
        for tokens in of_pass
        for spread in SPREADS
    ]
    cells += [cell for element in elements for cell in drawn(seed, element)]
    return [
        Step(
            "products",
            {**layer._asdict(), "element": layer.element.value, "tokens": tokens, "spread": spread},
            partial(_measured, layer, tokens, spread),
        )
        for layer, tokens, spread in cells
    ]


def counts_of(groups: int, tokens: int, spread: str, rng: np.random.Generator) -> np.ndarray:
    """Rows of each group, int64 [G], whose order is random."""
    weights = np.ones(groups) if spread == "even" else 1 / np.arange(1.0, groups + 1)
    exact = tokens * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    left = tokens - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:left]] += 1  # the largest remainders
    return rng.permutation(counts)


class Weights:
    """The experts of one layer: dense bits [G, M, K], and packed as one operand."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        cupy = import_cupy()
        shape = (layer.m, layer.k)
        bits = cupy.empty((layer.groups, *shape), f"u{layer.element.itemsize}")
        for group in range(layer.groups):
            bits[group] = random_bits(shape, layer.element, seed=group)
        stacked = typed(bits.reshape(-1, layer.k), layer.element)
        self.weight = Sparse24Weight.prune_compress(stacked)
        self.dense = typed(self.weight.decompress(), layer.element).bits().reshape(bits.shape)
        self._packed: PackedWeight | None = None

    def packed(self, plan: GemmSparse24Plan) -> PackedWeight:
        self._packed = self._packed or plan.pack(self.weight)
        return self._packed


@lru_cache(maxsize=1)
def weights_of(layer: Layer) -> Weights:
    free_memory()
    return Weights(layer)


def _measured(layer: Layer, tokens: int, spread: str, sources: set[str]) -> Record:
    cell = GroupedCell(layer, tokens, spread)
    sources.update(sources_of(cell.plan))
    contenders = [cell.ours(), *cell.dense()]
    times = time_alone(contenders)
    row: Row = {
        **layer._asdict(),
        "element": layer.element.value,
        "active_experts": int((cell.counts[0] > 0).sum()),
        "tokens": tokens,
        "spread": spread,
        "us": rounded(times["ours"].us),
        "dense_us": rounded(min((times[one.name].us for one in contenders[1:]), default=None)),
        "dense": min(contenders[1:], key=lambda one: times[one.name].us).name if contenders[1:] else None,
        "rel_error": float(f"{cell.error:.3g}"),
    }
    return {"products": [row]}


class GroupedCell:
    """The operands of one cell, with as many routings as their weights exceed twice the L2 cache."""

    def __init__(self, layer: Layer, tokens: int, spread: str) -> None:
        free_memory()
        cupy, self.layer = import_cupy(), layer
        scale = "row" if layer.element is ElementKind.FP8_E4M3 else "none"
        self.plan = GemmSparse24Plan.select(
            GemmSparse24Descriptor(
                n=tokens,
                m=layer.m,
                k=layer.k,
                element=layer.element,
                groups=layer.groups,
                scale_x=scale,
                scale_w=scale,
            ),
            device=0,
        )
        self.weights = weights_of(layer)
        rng = np.random.default_rng(tokens)
        first = counts_of(layer.groups, tokens, spread, rng)
        bytes_read = int((first > 0).sum()) * layer.m * layer.k * layer.element.itemsize // 2
        routings = copies_beyond_l2(bytes_read)
        self.counts = [first, *(rng.permutation(first) for _ in range(routings - 1))]
        self.offsets = [
            cupy.asarray(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)) for counts in self.counts
        ]
        self.x = random_bits((tokens, layer.k), layer.element, seed=~tokens)
        out = self.plan.descriptor.out_element
        self.y = cupy.empty((tokens, layer.m), f"u{out.itemsize}")
        self.scales: dict[str, Array] = {}
        if scale == "row":
            rows = layer.groups * layer.m
            self.scales = {
                "scale_x": cupy.linspace(0.5, 2, tokens, dtype=np.float32),
                "scale_w": cupy.linspace(0.5, 2, rows, dtype=np.float32),
            }
        self.error = 0.0

    def ours(self) -> Contender:
        packed, desc = self.weights.packed(self.plan), self.plan.descriptor
        launches = []
        for offsets in self.offsets:
            args = GemmSparse24Args(
                packed,
                typed(self.x, desc.element),
                typed(self.y, desc.out_element),
                **self.scales,
                offsets=offsets,
            )
            launches.append(self.plan.bind(args).launch)
        self.error = self._rel_error(launches[0])
        if not self.error <= _WORST_ERROR[self.layer.element]:
            raise UnsupportedError(f"{self.layer}: relative error {self.error:.3g}, not recorded")
        return Contender("ours", launches)

    def _rel_error(self, launch: Callable[[int], None]) -> float:
        """||y - exact|| / ||exact|| against float64, on sampled results."""
        cupy, layer, rng = import_cupy(), self.layer, np.random.default_rng(0)
        self.y[...] = 0xFF
        launch(cupy.cuda.Stream.null.ptr)
        cupy.cuda.Device().synchronize()
        tokens = np.sort(rng.choice(len(self.x), min(len(self.x), _SAMPLED), replace=False))
        columns = np.sort(rng.choice(layer.m, _SAMPLED, replace=False))
        groups = np.searchsorted(np.cumsum(self.counts[0]), tokens, side="right")
        got = widened(self.y[tokens][:, columns], self.plan.descriptor.out_element)
        x = widened(self.x[tokens], layer.element)
        exact = cupy.empty_like(got)
        for at, group in enumerate(groups.tolist()):
            exact[at] = widened(self.weights.dense[group][columns], layer.element) @ x[at]
            if self.scales:
                own = self.scales["scale_w"][group * layer.m + columns]
                exact[at] *= own.astype(np.float64) * float(self.scales["scale_x"][int(tokens[at])])
        return float(cupy.linalg.norm(got - exact) / cupy.linalg.norm(exact))

    def dense(self) -> list[Contender]:
        """PyTorch's grouped product, and a loop over cuBLAS whose host knows the routing."""
        if peers.torch is None:
            return []
        tried = {"grouped": self._grouped_calls, "loop": self._loop_calls}
        found = []
        for name, make in tried.items():
            try:
                calls = make()
                calls[0]()
            except (RuntimeError, AttributeError, ValueError):
                continue
            found.append(Contender(name, [peers.on_torch_stream(call) for call in calls]))
        return found

    def _grouped_calls(self) -> list[Callable[[], object]]:
        torch, layer = peers.torch, self.layer
        x = peers.torch_tensor(self.x, layer.element)
        w = peers.torch_tensor(self.weights.dense, layer.element).transpose(1, 2)
        ends = [torch.from_dlpack(offsets[1:].copy()) for offsets in self.offsets]
        if layer.element is ElementKind.BF16:
            return [partial(torch._grouped_mm, x, w, offs=one) for one in ends]
        scale_x = torch.from_dlpack(self.scales["scale_x"])
        scale_w = torch.from_dlpack(self.scales["scale_w"]).reshape(layer.groups, layer.m)
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return [
            partial(torch._scaled_grouped_mm, x, w, scale_x, scale_w, offs=one, **options) for one in ends
        ]

    def _loop_calls(self) -> list[Callable[[], object]]:
        torch, layer = peers.torch, self.layer
        x = peers.torch_tensor(self.x, layer.element)
        y = peers.torch_tensor(self.y, self.plan.descriptor.out_element)
        w = peers.torch_tensor(self.weights.dense, layer.element)
        scales = {name: torch.from_dlpack(values) for name, values in self.scales.items()}
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}

        def run(ranges: list[tuple[int, int, int]]) -> None:
            for group, begin, end in ranges:
                if not scales:
                    torch.mm(x[begin:end], w[group].t(), out=y[begin:end])
                    continue
                of_rows = scales["scale_w"][None, group * layer.m : (group + 1) * layer.m]
                of_tokens = scales["scale_x"][begin:end, None]
                torch._scaled_mm(x[begin:end], w[group].t(), of_tokens, of_rows, **options)

        found: list[Callable[[], object]] = []
        for counts in self.counts:
            ends = np.cumsum(counts).tolist()
            ranges = [
                (g, end - int(c), end) for g, (c, end) in enumerate(zip(counts, ends, strict=True)) if c
            ]
            found.append(partial(run, ranges))
        return found
