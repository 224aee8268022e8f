"""The bounds that records are held against: on means, and on the worst cell.

``python -m benchmarks.check`` prints which of them a record misses. A value is a ratio of microseconds, a
share, or a figure of a record by itself; means are geometric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from statistics import geometric_mean
from typing import Any

from sparse24_plans.bench.record import Record

Row = Mapping[str, Any]
Values = list[tuple[str, float]]
"""Cells by a short name, each with its value."""
FEW, MIDDLE, MANY, ALL = (1, 64), (65, 512), (513, 8192), (1, 8192)
"""Ranges of tokens."""
DENSITIES, BLOCKS = (0.5, 0.2, 0.1, 0.05), (128, 64, 32, 16)
_PRODUCTS = ("dsd", "dds")


@dataclass(frozen=True)
class Bound:
    """A bound on a kind of record. A bound without a limit is only shown."""

    about: str
    values: Callable[[Record], Values]
    least: float | None = None
    most: float | None = None
    on_the_mean: bool = False
    """Whether the mean is bounded, or each cell."""


@dataclass(frozen=True)
class Verdict:
    """How a record stands to a bound. All is None where the record has no such cell."""

    bound: Bound
    mean: float | None = None
    worst: float | None = None
    at: str | None = None

    @property
    def figure(self) -> float | None:
        """The one that is bounded."""
        return self.mean if self.bound.on_the_mean else self.worst

    @property
    def is_missed(self) -> bool:
        bound, figure = self.bound, self.figure
        if figure is None:
            return False
        below = bound.least is not None and figure < bound.least
        return below or (bound.most is not None and figure > bound.most)


def judged(bound: Bound, record: Record) -> Verdict:
    """The mean and the worst cell of the bound's values."""
    values = bound.values(record)
    if not values:
        return Verdict(bound)
    worst = max if bound.most is not None else min
    at, value = worst(values, key=lambda one: one[1])
    found = [each for _, each in values]
    return Verdict(bound, geometric_mean(found) if min(found) > 0 else None, value, at)


# Values -------------------------------------------------------------------------------------------


def cell_of(row: Row) -> str:
    """A row's short name."""
    names: list[str] = [row[key] for key in ("op", "direction", "epilogue", "kind") if key in row]
    if "m" in row:
        names.append(f"{row['m']}x{row['k']}")
    if "n" in row:
        names.append(f"N {row['n'] * row.get('tokens', 1)}")
    if "density" in row:
        names.append(f"{row['block']}: {row['density']:.0%}")
    return " ".join(names)


def chosen(rows: Iterable[Row], span: tuple[int, int] = ALL, /, **fields: Any) -> Iterator[Row]:
    """The rows with these fields, or one of them where a tuple is given, and n in the span."""
    for row in rows:
        given = ((row.get(name), wanted) for name, wanted in fields.items())
        has_all = all(has in one if isinstance(one, tuple) else has == one for has, one in given)
        if has_all and span[0] <= row.get("n", 1) <= span[1]:
            yield row


def ratios(
    part: str, over: str, under: str = "us", *, span: tuple[int, int] = ALL, **fields: Any
) -> Callable[[Record], Values]:
    """``over / under`` of each row of a list that has both."""

    def values(record: Record) -> Values:
        rows = chosen(record[part], span, **fields)
        return [(cell_of(row), row[over] / row[under]) for row in rows if row.get(over) and row.get(under)]

    return values


def figure(part: str, name: str, **fields: Any) -> Callable[[Record], Values]:
    """A figure of each row of a list by itself."""
    return lambda record: [(cell_of(row), row[name]) for row in chosen(record[part], **fields)]


def _by_problem(record: Record, **fields: Any) -> dict[tuple[Any, ...], Row]:
    names = ("shape", "m", "k", "n")
    return {tuple(row.get(name) for name in names): row for row in chosen(record["gemm"], **fields)}


def beside_auto(element: str, backend: str, span: tuple[int, int] = ALL) -> Callable[[Record], Values]:
    """Microseconds of a backend over those of what select chose."""

    def values(record: Record) -> Values:
        auto = _by_problem(record, element=element, backend="auto")
        rows = _by_problem(record, element=element, backend=backend)
        return [
            (cell_of(row), row["us"] / auto[problem]["us"])
            for problem, row in rows.items()
            if problem in auto and span[0] <= row["n"] <= span[1]
        ]

    return values


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
    """A host figure of a record, or how often another one goes into it."""

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
    """Over dense, where rows of Y are whole 16 bytes, at which dense products are at their best."""
    rows = chosen(record["gemm"], element=element, backend="auto")
    return [
        (cell_of(row), row["dense_us"] / row["us"]) for row in rows if row["m"] % 8 == 0 and row["dense_us"]
    ]


def _bands(op: str, block: int, record: Record) -> Values:
    """Speed of bands over that of random blocks, for the blocks that each keeps."""
    from .blocks import Cell

    found = []
    for density in DENSITIES:
        means = []
        for pattern in ("banded", "random"):
            fields = {"op": op, "block": block, "density": density, "pattern": pattern}
            rows = list(chosen(record["products"], (4096, 4096), **fields))
            kept = (Cell(row["op"], row["m"], row["k"], 4096, block, density, pattern) for row in rows)  # type: ignore[arg-type]
            pairs = zip(rows, kept, strict=True)
            speeds = [row["dense_us"] / row["us"] * one.bitmap().mean() for row, one in pairs]
            means.append(geometric_mean(speeds) if speeds else None)
        if means[0] and means[1]:
            found.append((f"{density:.0%}", means[0] / means[1]))
    return found


def _sdd_over_dsd(density: float, block: int, record: Record) -> Values:
    """Microseconds of sdd over those of dsd, all shapes together."""
    fields = {"density": density, "block": block, "pattern": "random"}
    sdd, dsd = (
        [row["us"] for row in chosen(record["products"], (4096, 4096), op=op, **fields)]
        for op in ("sdd", "dsd")
    )
    return [(f"{len(sdd)} shapes", sum(sdd) / sum(dsd))] if sdd and len(sdd) == len(dsd) else []


def _inflated_share(record: Record) -> Values:
    """Whether a dense product runs, cell by cell, where it is the faster one."""
    rows = chosen(record["products"], (4096, 4096), block=16, density=0.5)
    return [(cell_of(row), float(row["backend"] == "inflate_cublas")) for row in rows]


def _shares_of_bounds(record: Record) -> Values:
    """The largest error that tests saw for each kernel, as a share of what the kernel allows."""
    return list(record.get("bounds", {}).items())


# Bounds -------------------------------------------------------------------------------------------

_least_mean = partial(Bound, on_the_mean=True)


def _over(
    peer: str, about: str, element: str, limits: Mapping[tuple[int, int], float], ours: str = "auto"
) -> list[Bound]:
    return [
        _least_mean(
            f"{about}, N {tokens[0]}-{tokens[1]}",
            ratios("gemm", peer, span=tokens, element=element, backend=ours),
            least=least,
        )
        for tokens, least in limits.items()
    ]


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
    *_over("dense_us", "f32_split6 over dense", "f32", {FEW: 1.5, MANY: 4.2}, "f32_split6"),
    *_over("dense_us", "f32_split3 over dense", "f32", {FEW: 2.5, MANY: 8.0}, "f32_split3"),
    *(
        _least_mean(f"{element}: invariant / auto", beside_auto(element, "invariant"), most=most)
        for element, most in _INVARIANT.items()
    ),
    *(Bound(f"{element}: forced / auto, each", partial(_forced, element), 0.97) for element in _ELEMENTS),
    _least_mean("f16 / bf16", _over_bf16, most=1.03),
    *_ERRORS,
    _least_mean("epilogues / plain", ratios("epilogues", "us", "identity_us"), most=None),
    *(
        Bound(f"{op}, share of a copy's speed", ratios("prepare", "copy_us", op=op, element="bf16"), least)
        for op, least in _SHARES_OF_A_COPY.items()
    ),
    Bound("tile_prune over PyTorch's", _peer_of_tiles, 2.9),
    *(Bound(name, host(name), most=most) for name, most in _HOST.items()),
]

_RANDOM = [
    *(
        _least_mean(
            f"{element} over dense", ratios("gemm", "dense_us", element=element, backend="auto"), least
        )
        for element, least in (("bf16", 1.45), ("f16", 1.45), ("s8", 2.0), ("fp8_e4m3", 1.3))
    ),
    *(_over("dense_us", f"{element} over dense", element, {FEW: 1.6})[0] for element in ("bf16", "f16")),
    *(
        _least_mean(f"{element} over dense, M % 8 == 0", partial(_not_ragged, element), 1.4)
        for element in ("bf16", "f16")
    ),
    *(
        bound
        for element in _ELEMENTS
        for bound in (
            Bound(
                f"{element} over dense, each",
                ratios("gemm", "dense_us", element=element, backend="auto"),
                0.95,
            ),
            Bound(f"{element}: share below dense", partial(_slower_share, element), most=0.01),
            Bound(f"{element}: time over that of a larger N", partial(_slower_than_more, element), most=1.05),
            _least_mean(f"{element}: invariant / auto", beside_auto(element, "invariant"), most=1.08),
            Bound(f"{element}: invariant / auto, each", beside_auto(element, "invariant"), most=1.25),
        )
    ),
    _least_mean(
        "bf16: auto / best", ratios("gemm", "us", "best_us", element="bf16", backend="auto"), most=1.03
    ),
    Bound(
        "bf16: auto / best, each", ratios("gemm", "us", "best_us", element="bf16", backend="auto"), most=1.12
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
    for row in chosen(record["products"], element=element):
        size = row["active_experts"] * row["m"] * row["k"] * (1 if element == "fp8_e4m3" else 2)
        tokens = row["tokens"] / row["active_experts"]
        if row["dense_us"] and large == (size >= _LARGE_EXPERTS) and first <= tokens <= last:
            name = f"{row['model']} {cell_of(row)} of {row['groups']} {row['tokens']} {row['spread']}"
            found.append((name, row["dense_us"] / row["us"]))
    return found


_GROUPED = [
    *(
        _least_mean(f"bf16 over dense, {words}", partial(_grouped, "bf16", True, first, last), least)
        for words, (first, last, least) in _TOKENS_OF_EXPERT.items()
    ),
    Bound("bf16 over dense, each", partial(_grouped, "bf16", True, 0, 1 << 20), 1.0),
    _least_mean("fp8_e4m3 over dense", partial(_grouped, "fp8_e4m3", True, 0, 1 << 20), 1.3),
    Bound("fp8_e4m3 over dense, each", partial(_grouped, "fp8_e4m3", True, 0, 1 << 20), 1.0),
    *(
        Bound(
            f"{element}, small experts over dense, each", partial(_grouped, element, False, 0, 1 << 20), 0.85
        )
        for element in ("bf16", "fp8_e4m3")
    ),
    Bound("worst error, bf16", figure("products", "rel_error", element="bf16"), most=5e-3),
]

_BLOCK_SPEED = {
    128: {0.5: 1.4, 0.2: 3.4, 0.1: 6.3, 0.05: 9.5},
    64: {0.2: 2.0, 0.1: 4.0, 0.05: 7.0},
    32: {0.2: 1.0, 0.1: 2.0, 0.05: 3.8},
    16: {0.1: 1.0, 0.05: 2.0},
}
"""Over dense cuBLAS at n = 4096, of random blocks: block -> density -> at least."""
_BLOCKSPARSE = [
    *(
        _least_mean(
            f"{op} {block}: {density:.0%} over dense",
            ratios(
                "products",
                "dense_us",
                span=(4096, 4096),
                op=op,
                block=block,
                density=density,
                pattern="random",
            ),
            least,
        )
        for block, its in _BLOCK_SPEED.items()
        for density, least in its.items()
        for op in _PRODUCTS
    ),
    *(
        _least_mean(
            f"{op} 2:4 128: {density:.0%} over whole",
            ratios("sparse24", "blocks_us", op=op, block=128, density=density),
            1.3,
        )
        for op, density in product(_PRODUCTS, DENSITIES)
    ),
    *(
        Bound(f"2:4 {block} over whole, each", ratios("sparse24", "blocks_us", block=block), 0.97)
        for block in (128, 64)
    ),
    *(
        Bound(f"{op} {block}: bands over random", partial(_bands, op, block), 0.97)
        for op, block in product(_PRODUCTS, BLOCKS)
    ),
    *(
        _least_mean(
            f"dsd {block}: 20% over dense, N 256",
            ratios(
                "products",
                "dense_us",
                span=(256, 256),
                op="dsd",
                block=block,
                density=0.2,
                pattern="random",
            ),
            2.0,
        )
        for block in (128, 64)
    ),
    Bound("over PyTorch's BSR, each", ratios("products", "torch_bsr_us"), 1.0),
    Bound("over dense, each", ratios("products", "dense_us"), 0.97),
    Bound("128, 64 over dense, each", ratios("products", "dense_us", block=(128, 64)), 0.97),
    Bound("over dense, N 4096, each", ratios("products", "dense_us", span=(4096, 4096)), 0.9),
    Bound("16: 50% runs dense, N 4096", _inflated_share, 1.0),
    *(
        Bound(f"sdd / dsd, {block}: {density:.0%}", partial(_sdd_over_dsd, density, block), most=1.3)
        for density, block in product(DENSITIES, BLOCKS)
    ),
    *(
        Bound(
            f"attention {direction}, TFLOP/s at 10%",
            figure(
                "attention",
                "tflops",
                tokens=16384,
                head_size=128,
                block=128,
                density=0.1,
                direction=direction,
            ),
            least,
        )
        for direction, least in (("forward", 480.0), ("backward", 288.0))
    ),
    *(
        Bound(f"attention {direction} over dense", ratios("attention", "dense_us", direction=direction), 1.0)
        for direction in ("forward", "backward")
    ),
]


def _step(about: str, mode: str, kind: str, tokens: int, least: float) -> Bound:
    """Dense over sparse of one row of the decoder on one GPU."""

    def values(record: Record) -> Values:
        fields = {"kind": kind, "gpus": 1, "n" if kind == "decode" else "tokens": tokens}
        rows = chosen(record["decoder"], **fields)
        return [(cell_of(row), row[f"{mode}_dense_ms"] / row[f"{mode}_sparse_ms"]) for row in rows]

    return Bound(f"{about}, {tokens}", values, least)


_DECODE = {1: 1.40, 8: 1.38, 16: 1.36, 32: 1.33, 64: 1.28, 128: 1.2}
_TORCH = [
    *(_step("decode in a graph", "graph", "decode", *one) for one in _DECODE.items()),
    *(_step("prefill in a graph", "graph", "prefill", tokens, 1.35) for tokens in (2048, 8192)),
    Bound("compiled over compiled", ratios("decoder", "compiled_dense_ms", "compiled_sparse_ms")),
    Bound("invariant in a graph", ratios("decoder", "graph_dense_ms", "graph_invariant_ms", gpus=1), 1.1),
    Bound(
        "eager decode", ratios("decoder", "eager_dense_ms", "eager_sparse_ms", kind="decode", gpus=1), 0.97
    ),
    Bound(
        "eager prefill", ratios("decoder", "eager_dense_ms", "eager_sparse_ms", kind="prefill", gpus=1), 1.3
    ),
    _step("eager decode", "eager", "decode", 128, 1.0),
    Bound("two GPUs in a graph", ratios("decoder", "graph_dense_ms", "graph_sparse_ms", gpus=2), 1.0),
    Bound("layer / F.linear, host", host("sparse_linear_us", "f_linear_us"), most=1.3),
    Bound("PyTorch's sparse / layer, host", host("torch_sparse_us", "sparse_linear_us"), 10.0),
    Bound("compiled layer / dense, host", host("compiled_sparse_us", "compiled_dense_us"), most=1.1),
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


_EXPORT = [
    Bound("bytes of a folder", figure("folders", "nbytes"), most=12e6),
    Bound("s24_open, ms", _opened, most=100),
    Bound("s24_run of known operands, us", figure("calls", "run_us"), most=3.0),
    Bound("s24_run of new addresses, us", figure("calls", "run_new_args_us"), most=6.0),
]

# Random block-sparse products ---------------------------------------------------------------------

_FEW_BLOCKS, _MANY_BLOCKS, _SPARSE = (1, 200), (201, 8192), (0.05, 0.25)
"""Ranges of tokens, and the densities whose means are bounded."""
_RANDOM_BLOCK_SPEED = {(128, 64): (2.8, 3.2), (32,): (1.8, 2.1), (16,): (1.3, 1.5)}
"""Over dense cuBLAS, of rows that are alike: blocks -> at least for few and for many tokens."""
_UNEVEN = 0.8
"""What uneven rows must reach of that."""


def _of_blocks(span: tuple[int, int] = ALL, /, **fields: Any) -> Callable[[Record], Values]:
    """Over dense, of random products with these fields; of sparse ones alone if a pattern is given."""
    over = ratios("products", "dense_us", span=span, **fields)
    if "pattern" not in fields:
        return over

    def values(record: Record) -> Values:
        rows = [row for row in record["products"] if _SPARSE[0] <= row["density"] <= _SPARSE[1]]
        return over({**record, "products": rows})

    return values


def _share_below(values: Callable[[Record], Values], least: float) -> Callable[[Record], Values]:
    def share(record: Record) -> Values:
        found = values(record)
        return [("share", sum(one < least for _, one in found) / len(found))] if found else []

    return share


def _cliffs(record: Record) -> Values:
    """Time of each n of a sweep over the least time of a larger n."""
    sweeps: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    names = ("op", "m", "k", "block", "density", "pattern", "transposed", "packed")
    for row in record["sweep"]:
        sweeps[tuple(row[name] for name in names)].append(row)
    found = []
    for rows in sweeps.values():
        least = float("inf")
        for row in sorted(rows, key=lambda one: -one["n"]):
            if least < float("inf"):
                found.append((cell_of(row), row["us"] / least))
            least = min(least, row["us"])
    return found


def _counts(record: Record) -> Values:
    """The number of sparse cells of each class."""
    return [
        (f"{blocks} {pattern} N {span[0]}-{span[1]}", float(len(values(record))))
        for blocks, pattern, span in product(
            _RANDOM_BLOCK_SPEED, ("random", "uneven"), (_FEW_BLOCKS, _MANY_BLOCKS)
        )
        for values in [_of_blocks(span, block=blocks, pattern=pattern)]
    ]


_PACKED = _of_blocks(op=_PRODUCTS, packed=True)
_UNPACKED = _of_blocks(op=_PRODUCTS, packed=False)
_SAMPLED = _of_blocks(op="sdd")
_RANDOM_BLOCKS = [
    Bound("packed over dense, each", _PACKED, 0.95),
    Bound("not packed over dense, each", _UNPACKED, 0.7),
    Bound("not packed: share under 0.97 of dense", _share_below(_UNPACKED, 0.97), most=0.08),
    Bound("sdd over dense, each", _SAMPLED, 0.75),
    Bound("sdd: share under 0.97 of dense", _share_below(_SAMPLED, 0.97), most=0.08),
    *(
        _least_mean(
            f"{', '.join(map(str, blocks))} {pattern}, N {span[0]}-{span[1]}",
            _of_blocks(span, block=blocks, pattern=pattern),
            round(least * (_UNEVEN if pattern == "uneven" else 1.0), 2),
        )
        for blocks, limits in _RANDOM_BLOCK_SPEED.items()
        for span, least in zip((_FEW_BLOCKS, _MANY_BLOCKS), limits, strict=True)
        for pattern in ("random", "uneven")
    ),
    Bound("n over a larger n, each", _cliffs, most=1.08),
    Bound("products", lambda record: [("all", float(len(record["products"])))], 400),
    Bound("sparse products of a class", _counts, 8),
    Bound("attention over the fastest dense, each", ratios("attention", "sdpa_us")),
]

BOUNDS = {
    "grid": _GRID,
    "random": _RANDOM,
    "grouped": _GROUPED,
    "blocksparse": _BLOCKSPARSE,
    "blocksparse-random": _RANDOM_BLOCKS,
    "torch": _TORCH,
    "tests": _TESTS,
    "export": _EXPORT,
}
"""Kind of record -> what it is asked for."""
