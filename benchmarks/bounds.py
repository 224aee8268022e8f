"""The bounds that records are held against: on means, and on the worst cell.

``python -m benchmarks.check`` prints which of them a record misses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

from sparse24_plans.bench.record import Record

from .block_bounds import BLOCKSPARSE, RANDOM_BLOCKS
from .judging import (
    FEW,
    MANY,
    MIDDLE,
    Bound,
    Row,
    Values,
    cell_of,
    chosen,
    expert_ratios,
    figure,
    least_mean,
    ratios,
)

# Values -------------------------------------------------------------------------------------------


def _by_problem(record: Record, **fields: Any) -> dict[tuple[Any, ...], Row]:
    names = ("shape", "m", "k", "n")
    return {tuple(row.get(name) for name in names): row for row in chosen(record["gemm"], **fields)}


def beside_auto(element: str, backend: str) -> Callable[[Record], Values]:
    """Microseconds of a backend over those of what select chose."""

    def values(record: Record) -> Values:
        auto = _by_problem(record, element=element, backend="auto")
        rows = _by_problem(record, element=element, backend=backend)
        return [
            (cell_of(row), row["us"] / auto[problem]["us"])
            for problem, row in rows.items()
            if problem in auto
        ]

    return values


_C_ELEMENT_BYTES = 2
_BYTES_PER_US = {"H100": 3.0e6, "H200": 4.3e6}
"""The rate of a pass over memory, by a part of the GPU's name."""


def _beta_over_bytes(record: Record) -> Values:
    """Times of products with beta * C over the plain product's time plus the time to read C from memory."""
    rate = next((rate for name, rate in _BYTES_PER_US.items() if name in record.get("gpu", "")), None)
    if rate is None:
        return []
    return [
        (cell_of(row), row["us"] / (row["plain_us"] + row["m"] * row["n"] * _C_ELEMENT_BYTES / rate))
        for row in chosen(record["variants"], variant="beta")
    ]


_NOT_FORCED = {"auto", "invariant", "cusparselt", "wgmma_sp_invariant"}


def _forced(element: str, record: Record) -> Values:
    """Each of our forced backends over what select chose."""
    backends = sorted({row["backend"] for row in record["gemm"]} - _NOT_FORCED)
    return [one for backend in backends for one in beside_auto(element, backend)(record)]


def _over_bf16(record: Record) -> Values:
    """Microseconds of f16 over those of bf16, of what select chose."""
    f16, bf16 = (_by_problem(record, element=element, backend="auto") for element in ("f16", "bf16"))
    return [(cell_of(row), row["us"] / bf16[one]["us"]) for one, row in f16.items() if one in bf16]


def _peer_of_tiles(record: Record) -> Values:
    """PyTorch's time of pruning tiles over ours."""
    peers = {(row["m"], row["k"]): row for row in chosen(record["prepare_peers"], element="bf16")}
    rows = chosen(record["prepare"], op="tile_prune", element="bf16")
    return [
        (cell_of(row), peers[row["m"], row["k"]]["us"] / row["us"])
        for row in rows
        if (row["m"], row["k"]) in peers
    ]


def host(name: str, over: str | None = None) -> Callable[[Record], Values]:
    """A host figure of a record, or its ratio to another one."""

    def values(record: Record) -> Values:
        figures = record["host"]
        if figures.get(name) is None or (over and figures.get(over) is None):
            return []
        return [(name, figures[name] / (figures[over] if over else 1.0))]

    return values


def top(name: str, over: str | None = None) -> Callable[[Record], Values]:
    """A figure of a record itself, or its share of another one."""
    return lambda record: [(name, record[name] / (record[over] if over else 1))] if name in record else []


def _slower_share(element: str, record: Record) -> Values:
    """The share of the cells that are slower than dense."""
    found = ratios("gemm", "dense_us", element=element, backend="auto")(record)
    return [(f"{len(found)} cells", sum(value < 1 for _, value in found) / len(found))] if found else []


def _slower_than_more(element: str, record: Record) -> Values:
    """Microseconds of an n over those of a larger n with the same matrix."""
    by_matrix = defaultdict(list)
    for row in chosen(record["gemm"], element=element, backend="auto"):
        by_matrix[row["shape"], row["m"], row["k"]].append(row)
    return [
        (f"{cell_of(few)}, {many['n']}", few["us"] / many["us"])
        for rows in by_matrix.values()
        for few, many in combinations(sorted(rows, key=lambda row: row["n"]), 2)
    ]


def _not_ragged(element: str, record: Record) -> Values:
    """Speed over dense for rows of Y of whole 16 bytes, with which dense products are fastest."""
    rows = chosen(record["gemm"], element=element, backend="auto")
    return [
        (cell_of(row), row["dense_us"] / row["us"]) for row in rows if row["m"] % 8 == 0 and row["dense_us"]
    ]


def _shares_of_bounds(record: Record) -> Values:
    """The largest error that tests saw for each kernel, as a share of what the kernel allows."""
    return list(record.get("bounds", {}).items())


# Bounds -------------------------------------------------------------------------------------------


def _over(
    peer: str, about: str, element: str, limits: Mapping[tuple[int, int], float], ours: str = "auto"
) -> list[Bound]:
    return [
        least_mean(
            f"{about}, N {tokens[0]}-{tokens[1]}",
            ratios("gemm", peer, span=tokens, element=element, backend=ours),
            least=least,
        )
        for tokens, least in limits.items()
    ]


_OF_STORED: dict[str, dict[tuple[int, int], float]] = {
    "s4": {(1, 16): 3.3, (32, 32): 2.8, (64, 64): 2.1, (128, 128): 1.5},
    "s8": {(1, 16): 2.4, (32, 32): 2.2, (64, 64): 1.9},
    "fp8_e4m3": {(1, 16): 2.4, (32, 32): 2.2, (64, 64): 1.9},
}
"""Means over dense of weights that store such values, by tokens."""


def _quantized_bounds() -> list[Bound]:
    found = []
    for stored, limits in _OF_STORED.items():
        rows = {"weight_element": stored, "backend": "auto"}
        for span, least in limits.items():
            about = f"{stored} weights over dense, N {span[0]}{f'-{span[1]}' * (span[0] < span[1])}"
            found.append(least_mean(about, ratios("gemm", "dense_us", span=span, **rows), least))
        every = ratios("gemm", "dense_us", span=FEW, **rows)
        found.append(Bound(f"{stored} weights over dense, N 1-64, each", every, 1.5))
        drawn = ratios("random", "dense_us", span=FEW, **rows)
        found.append(Bound(f"{stored} weights, random, over dense, N 1-64, each", drawn, 1.1))
        for part in ("gemm", "random"):
            errors = figure(part, "rel_error", **rows)
            found.append(Bound(f"{stored} weights, {part}: relative error", errors, most=3e-3))
    large = least_mean("s4 weights of 16 MB, random, over dense, N 1-16", _large_random, 2.8)
    int4 = ratios("gemm", "int4_us", span=(1, 16), weight_element="s4", backend="auto")
    return [*found, large, least_mean("s4 weights over PyTorch's int4, N 1-16", int4, 1.25)]


def _large_random(record: Record) -> Values:
    """Dense over ours for random weights of s4 whose dense elements have at least 16 MB."""
    rows = chosen(record["random"], (1, 16), weight_element="s4", backend="auto")
    return [(cell_of(row), row["dense_us"] / row["us"]) for row in rows if row["m"] * row["k"] >= 8e6]


def _worst_error(element: str, most: float) -> Bound:
    return Bound(f"{element}: relative error", figure("gemm", "rel_error", element=element), most=most)


_ERRORS = [_worst_error(*one) for one in (("bf16", 3e-3), ("f16", 4e-4), ("fp8_e4m3", 5e-3), ("s8", 0.0))]
_ELEMENTS = ("bf16", "f16", "s8", "fp8_e4m3")
_OVER_DENSE: dict[str, dict[tuple[int, int], float]] = {
    "bf16": {FEW: 1.78, MIDDLE: 1.45, MANY: 1.54},
    "f16": {FEW: 1.7, MIDDLE: 1.38, MANY: 1.54},
    "fp8_e4m3": {(16, 64): 1.45, MIDDLE: 1.26, MANY: 1.49},
    "s8": {MIDDLE: 2.3, MANY: 2.5},
}
_OVER_CUSPARSELT: dict[str, dict[tuple[int, int], float]] = {
    "bf16": {FEW: 2.5, MIDDLE: 1.3, MANY: 1.05},
    "f16": {FEW: 1.1, MIDDLE: 1.08, MANY: 1.03},
    "fp8_e4m3": {(16, 64): 1.13, MIDDLE: 1.1, MANY: 1.04},
    "s8": {(16, 64): 1.15, MIDDLE: 1.09, MANY: 1.04},
}
_FULL = 4096
"""Tokens from which cuSPARSELt is at its best in 8 bits."""
_INVARIANT = {"bf16": 1.2, "f16": 1.2, "fp8_e4m3": 1.6, "s8": 1.01}
_SHARES_OF_A_COPY = {
    "prune": 0.9,
    "compress": 0.85,
    "prune_compress": 0.88,
    "decompress": 0.9,
    "pack": 0.77,
    "tile_prune": 0.8,
}
_HOST = {
    "launch_us": 6,
    "cusparselt_launch_us": 6,
    "run_us": 10,
    "run_new_args_us": 40,
    "select_cached_us": 20,
    "import_s": 0.01,
    "import_all_s": 1.0,
}

_GRID = [
    *(
        one
        for element, its in _OVER_DENSE.items()
        for one in _over("dense_us", f"{element} over dense", element, its)
    ),
    *(
        Bound(f"{element} over dense, each", ratios("gemm", "dense_us", element=element, backend="auto"), 1.0)
        for element in _ELEMENTS
    ),
    *(
        Bound(
            f"bf16 over dense, N {first}-{last}, each",
            ratios("gemm", "dense_us", span=(first, last), element="bf16", backend="auto"),
            1.33,
        )
        for first, last in (FEW, MANY)
    ),
    *(
        one
        for element, its in _OVER_CUSPARSELT.items()
        for one in _over("cusparselt_us", f"{element} over cuSPARSELt", element, its)
    ),
    *(
        Bound(
            f"{element} over cuSPARSELt, each",
            ratios("gemm", "cusparselt_us", element=element, backend="auto"),
            0.91,
        )
        for element in _ELEMENTS
    ),
    *_over("dense_us", "bf16 over dense", "bf16", {(128, 128): 1.55}),
    *(
        Bound(
            f"{element} over cuSPARSELt, N from {_FULL}, each",
            ratios("gemm", "cusparselt_us", span=(_FULL, 16384), element=element, backend="auto"),
            1.02,
        )
        for element in ("s8", "fp8_e4m3")
    ),
    *_over("dense_us", "f32_split6 over dense", "f32", {FEW: 1.5, MANY: 4.2}, "f32_split6"),
    *_over("dense_us", "f32_split3 over dense", "f32", {FEW: 2.5, MANY: 8.0}, "f32_split3"),
    *(
        least_mean(f"{element}: invariant / auto", beside_auto(element, "invariant"), most=most)
        for element, most in _INVARIANT.items()
    ),
    *(Bound(f"{element}: forced / auto, each", partial(_forced, element), 0.97) for element in _ELEMENTS),
    least_mean("f16 / bf16", _over_bf16, most=1.03),
    *_ERRORS,
    Bound(
        "an epilogue / plain, N 256, each",
        ratios("epilogues", "us", "identity_us", span=(256, 256)),
        most=1.04,
    ),
    Bound(
        "an epilogue / plain, N >= 1024, each",
        ratios("epilogues", "us", "identity_us", span=(1024, 8192)),
        most=1.02,
    ),
    Bound("beta / plain and the bytes of C, each", _beta_over_bytes, most=1.0),
    Bound("one batch / plain, each", ratios("variants", "us", "plain_us", variant="batch"), most=1.03),
    *(
        Bound(f"{op}, share of a copy's speed", ratios("prepare", "copy_us", op=op, element="bf16"), least)
        for op, least in _SHARES_OF_A_COPY.items()
    ),
    Bound("tile_prune over PyTorch's", _peer_of_tiles, 2.9),
    *(Bound(name, host(name), most=most) for name, most in _HOST.items()),
]

_RANDOM = [
    *(
        least_mean(
            f"{element} over dense", ratios("gemm", "dense_us", element=element, backend="auto"), least
        )
        for element, least in (("bf16", 1.45), ("f16", 1.45), ("s8", 2.0), ("fp8_e4m3", 1.3), ("f32", 1.0))
    ),
    *(_over("dense_us", f"{element} over dense", element, {FEW: 1.6})[0] for element in ("bf16", "f16")),
    *(
        least_mean(f"{element} over dense, M % 8 == 0", partial(_not_ragged, element), 1.4)
        for element in ("bf16", "f16")
    ),
    *(
        bound
        for element in (*_ELEMENTS, "f32")
        for bound in (
            Bound(
                f"{element} over dense, each",
                ratios("gemm", "dense_us", element=element, backend="auto"),
                1.0 if element == "f32" else 0.95,
            ),
            Bound(f"{element}: share below dense", partial(_slower_share, element), most=0.01),
            Bound(f"{element}: time over that of a larger N", partial(_slower_than_more, element), most=1.05),
            least_mean(f"{element}: invariant / auto", beside_auto(element, "invariant"), most=1.08),
            Bound(f"{element}: invariant / auto, each", beside_auto(element, "invariant"), most=1.25),
        )
    ),
    least_mean(
        "bf16: auto / best", ratios("gemm", "us", "best_us", element="bf16", backend="auto"), most=1.02
    ),
    Bound(
        "bf16: auto / best, each", ratios("gemm", "us", "best_us", element="bf16", backend="auto"), most=1.10
    ),
    *_ERRORS,
]

_LARGE_EXPERTS = 64 << 20
"""Bytes of the active experts' dense weights from which they, and not launches, take the time."""
_TOKENS_OF_EXPERT: dict[str, tuple[float, float, float]] = {
    "up to 4 tokens": (0, 4, 1.6),
    "16 to 64": (16, 64, 1.45),
    "from 256": (256, 1 << 20, 1.45),
}


def _grouped(element: str, large: bool, first: float, last: float, record: Record) -> Values:
    """Over the fastest dense product, by an active expert's mean tokens and by the size of these experts."""
    found = []
    for row, tokens, ratio in expert_ratios(record["products"], element):
        size = row["active_experts"] * row["m"] * row["k"] * (1 if element == "fp8_e4m3" else 2)
        if large == (size >= _LARGE_EXPERTS) and first <= tokens <= last:
            name = f"{row['model']} {cell_of(row)} of {row['groups']} {row['tokens']} {row['spread']}"
            found.append((name, ratio))
    return found


_GROUPED = [
    *(
        least_mean(f"bf16 over dense, {words}", partial(_grouped, "bf16", True, first, last), least)
        for words, (first, last, least) in _TOKENS_OF_EXPERT.items()
    ),
    Bound("bf16 over dense, each", partial(_grouped, "bf16", True, 0, 1 << 20), 1.0),
    least_mean("fp8_e4m3 over dense", partial(_grouped, "fp8_e4m3", True, 0, 1 << 20), 1.3),
    Bound("fp8_e4m3 over dense, each", partial(_grouped, "fp8_e4m3", True, 0, 1 << 20), 1.0),
    *(
        Bound(
            f"{element}, small experts over dense, each", partial(_grouped, element, False, 0, 1 << 20), 0.85
        )
        for element in ("bf16", "fp8_e4m3")
    ),
    Bound("worst error, bf16", figure("products", "rel_error", element="bf16"), most=5e-3),
]


def _step(mode: str, kind: str, tokens: int, least: float, weights: str = "bf16") -> Bound:
    """Dense over sparse of one row of the decoder on one GPU."""
    fields: dict[str, Any] = {
        "kind": kind,
        "gpus": 1,
        "weights": weights,
        "n" if kind == "decode" else "tokens": tokens,
    }
    values = ratios("decoder", f"{mode}_dense_ms", f"{mode}_sparse_ms", **fields)
    return Bound(f"{kind}, {mode}, {weights}, {tokens}", values, least)


_DECODE = {1: 1.40, 8: 1.38, 16: 1.36, 32: 1.33, 64: 1.28, 128: 1.2}
_COMPILED = {1: 1.45, 8: 1.50, 32: 1.45, 64: 1.36, 128: 1.21, 256: 1.14}
_TORCH = [
    *(_step("compiled", "decode", *one) for one in _COMPILED.items()),
    *(_step("compiled", "prefill", *one) for one in ((2048, 1.38), (8192, 1.42))),
    _step("compiled", "decode", 1, 2.1, "s4"),
    *(_step("graph", "decode", *one) for one in _DECODE.items()),
    *(_step("graph", "prefill", tokens, 1.35) for tokens in (2048, 8192)),
    Bound("invariant in a graph", ratios("decoder", "graph_dense_ms", "graph_invariant_ms", gpus=1), 1.1),
    Bound(
        "eager decode", ratios("decoder", "eager_dense_ms", "eager_sparse_ms", kind="decode", gpus=1), 0.97
    ),
    Bound(
        "eager prefill", ratios("decoder", "eager_dense_ms", "eager_sparse_ms", kind="prefill", gpus=1), 1.3
    ),
    _step("eager", "decode", 128, 1.0),
    Bound("two GPUs in a graph", ratios("decoder", "graph_dense_ms", "graph_sparse_ms", gpus=2), 1.0),
    Bound("layer / F.linear, host", host("sparse_linear_us", "f_linear_us"), most=1.3),
    Bound("PyTorch's sparse / layer, host", host("torch_sparse_us", "sparse_linear_us"), 10.0),
    Bound("compiled layer / dense, host", host("compiled_sparse_us", "compiled_dense_us"), most=1.1),
]

_TORCHAO = {4096: 7.15, 11008: 13.3}
"""Microseconds of torchao's CUTLASS product of fp8 and 2:4 for 64 tokens on an H100, by M, with K = 4096."""
_LAYERS = [
    *(
        Bound(
            f"fp8 product of 64 tokens, M {m}, us",
            figure("layers", "linear_us", m=m, n=64, dtype="fp8"),
            most=most,
        )
        for m, most in _TORCHAO.items()
    ),
    *(
        Bound(f"{name}, {dtype} over bf16", ratios("layers", "dense_us", field, dtype=dtype))
        for name, field in (("product", "linear_us"), ("layer", "layer_us"))
        for dtype in ("fp8", "int8")
    ),
]

_EXPERTS = [
    Bound("over dense", ratios("layers", "dense_us", "us"), 1.3, on_the_mean=True),
    Bound("over dense, each", ratios("layers", "dense_us", "us"), 0.97),
]

_TESTS = [
    *(Bound(name, top(name), most=0) for name in ("failed", "fuzz_failures", "replay_mismatches")),
    Bound("passed", top("passed"), 2001),
    Bound("skipped / passed", top("skipped", "passed"), most=0.01),
    Bound("fuzz_cases", top("fuzz_cases"), 20_000),
    Bound("replayed", top("replayed"), 10_000_000),
    Bound("largest share of an error bound", _shares_of_bounds, least=0.05),
    Bound("largest share of an error bound", _shares_of_bounds, most=1.0),
]


def _opened(record: Record) -> Values:
    return [(cell_of(row), row["open_ms"]) for row in record["folders"] if row["open_ms"]]


def _beyond_the_driver(record: Record) -> Values:
    return [(cell_of(row), row["run_us"] - row["launch_us"]) for row in record["calls"]]


_EXPORT = [
    Bound("bytes of a folder", figure("folders", "nbytes"), most=12e6),
    Bound("s24_open, ms", _opened, most=100),
    Bound("s24_run of known operands, us", figure("calls", "run_us"), most=3.0),
    Bound("s24_run of new addresses, us", figure("calls", "run_new_args_us"), most=6.0),
    Bound("s24_run beyond the driver's launch, us", _beyond_the_driver, most=0.5),
]

_CALIBRATION = [Bound("seconds", figure("calibration", "seconds"), most=900)]

BOUNDS = {
    "grid": _GRID,
    "random": _RANDOM,
    "grouped": _GROUPED,
    "quantized": _quantized_bounds(),
    "blocksparse": BLOCKSPARSE,
    "blocksparse-random": RANDOM_BLOCKS,
    "torch": _TORCH,
    "layers": _LAYERS,
    "experts": _EXPERTS,
    "tests": _TESTS,
    "export": _EXPORT,
    "calibration": _CALIBRATION,
}
"""The bounds that records must meet, by the kind of record."""
