"""The bounds of block-sparse products: of the grid, and of random problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any

from sparse24_plans.bench.record import Record

from .judging import ALL, Bound, Row, Values, cell_of, chosen, figure, least_mean, ratios

DENSITIES, BLOCKS = (0.5, 0.2, 0.1, 0.05), (128, 64, 32, 16)
_PRODUCTS = ("dsd", "dds")


# Grid ---------------------------------------------------------------------------------------------


def _bands(op: str, block: int, record: Record) -> Values:
    """TFLOP/s of banded layouts over those of random layouts, counted on the kept blocks."""
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


def _dense_or_faster(record: Record) -> Values:
    """1 for each cell with half of its blocks of 16 kept that runs densely, or no slower than dense.

    Banded layouts can be faster, because tiles of random layouts hold more zeros.
    """
    rows = chosen(record["products"], (4096, 4096), block=16, density=0.5)
    return [
        (cell_of(row), float(row["backend"] == "inflate_cublas" or row["us"] <= row["dense_us"]))
        for row in rows
    ]


def _over_dense_attention(direction: str, density: float, record: Record) -> Values:
    """TFLOP/s of the kept blocks over those of dense attention."""
    fields = {"tokens": 16384, "head_size": 128, "block": 128, "density": density, "direction": direction}
    rows = chosen(record["attention"], **fields)
    return [(cell_of(row), density * row["dense_us"] / row["us"]) for row in rows]


_ATTENTION_SPEED = {"forward": {0.5: 1.03, 0.1: 0.93}, "backward": {0.5: 0.83, 0.1: 0.78}}
"""TFLOP/s of kept blocks over those of dense attention: direction -> density -> at least."""
_BLOCK_SPEED = {
    128: {0.5: 1.4, 0.2: 3.4, 0.1: 6.3, 0.05: 9.5},
    64: {0.2: 2.0, 0.1: 4.0, 0.05: 7.0},
    32: {0.2: 1.0, 0.1: 2.0, 0.05: 3.8},
    16: {0.1: 1.0, 0.05: 2.0},
}
"""Over dense cuBLAS at n = 4096, of random blocks: block -> density -> at least."""
BLOCKSPARSE = [
    *(
        least_mean(
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
        least_mean(
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
        least_mean(
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
    Bound("16: 50% dense or faster, N 4096", _dense_or_faster, 1.0),
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
        Bound(
            f"attention {direction}, TFLOP/s over dense's at {density:.0%}",
            partial(_over_dense_attention, direction, density),
            least,
        )
        for direction, its in _ATTENTION_SPEED.items()
        for density, least in its.items()
    ),
    *(
        Bound(f"attention {direction} over dense", ratios("attention", "dense_us", direction=direction), 1.0)
        for direction in ("forward", "backward")
    ),
    Bound("attention forward over FlashInfer, each", ratios("attention", "flashinfer_us"), 1.0),
    Bound("tables of 128 from a bitmap, us", figure("tables", "us", block=128), most=50.0),
    Bound("tables of 64 from a bitmap, us", figure("tables", "us", block=64)),
]

# Random products ----------------------------------------------------------------------------------

_FEW_BLOCKS, _MANY_BLOCKS, _SPARSE = (1, 200), (201, 8192), (0.05, 0.25)
"""Ranges of tokens, and the densities whose means are bounded."""
_RANDOM_BLOCK_SPEED = {(128, 64): (2.8, 3.2), (32,): (1.8, 2.1), (16,): (1.3, 1.5)}
"""Least speed-ups over dense cuBLAS of even layouts: block sizes -> for few and for many tokens."""
_UNEVEN = 0.8
"""Fraction of ``_RANDOM_BLOCK_SPEED`` that layouts with uneven rows must reach."""


def _of_blocks(span: tuple[int, int] = ALL, /, **fields: Any) -> Callable[[Record], Values]:
    """Speed-ups of random products with these fields over dense; with a pattern, of sparse ones alone."""
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


_MEMORY_BYTES_PER_US, _L2_BYTES_PER_US, _LAUNCH_US = 4.3e6, 5.5e6, 2.0
"""Speeds of an H200's memory and L2 cache, and the time of an empty product."""
_OVER_BYTES = {(128, 64): 1.6, (32, 16): 2.2}
"""Blocks -> time of a product of few tokens over what its bytes take, at most."""


def _over_bytes(blocks: tuple[int, ...], record: Record) -> Values:
    """Time over that of the bytes of 16-bit elements: the weight, X and Y, or the gathered rows of X."""
    found = []
    for row in chosen(record["products"], (1, 256), op=_PRODUCTS, block=blocks):
        weight, sides = 2 * row["density"] * row["m"] * row["k"], 2 * row["n"] * (row["m"] + row["k"])
        gathered = weight * row["n"] / row["block"]
        bytes_us = max((weight + sides) / _MEMORY_BYTES_PER_US, gathered / _L2_BYTES_PER_US)
        found.append((cell_of(row), row["us"] / (_LAUNCH_US + bytes_us)))
    return found


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


def _uneven_over_random(block: int, record: Record) -> Values:
    """Time of each uneven layout of the pairs over that of the random one."""
    sides: dict[str, dict[tuple[Any, ...], Row]] = {"random": {}, "uneven": {}}
    for row in chosen(record["pairs"], block=block):
        problem = tuple(row[name] for name in ("op", "m", "k", "n", "density", "transposed", "packed"))
        sides[row["pattern"]][problem] = row
    return [
        (cell_of(row), row["us"] / sides["random"][problem]["us"])
        for problem, row in sides["uneven"].items()
        if problem in sides["random"]
    ]


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
RANDOM_BLOCKS = [
    Bound("packed over dense, each", _PACKED, 0.95),
    Bound("not packed over dense, each", _UNPACKED, 0.7),
    Bound("not packed: share under 0.97 of dense", _share_below(_UNPACKED, 0.97), most=0.08),
    Bound("sdd over dense, each", _SAMPLED, 0.75),
    Bound("sdd: share under 0.97 of dense", _share_below(_SAMPLED, 0.97), most=0.08),
    *(
        least_mean(
            f"{', '.join(map(str, blocks))} {pattern}, N {span[0]}-{span[1]}",
            _of_blocks(span, block=blocks, pattern=pattern),
            round(least * (_UNEVEN if pattern == "uneven" else 1.0), 2),
        )
        for blocks, limits in _RANDOM_BLOCK_SPEED.items()
        for span, least in zip((_FEW_BLOCKS, _MANY_BLOCKS), limits, strict=True)
        for pattern in ("random", "uneven")
    ),
    *(
        Bound(
            f"{', '.join(map(str, blocks))}: few tokens over their bytes, each",
            partial(_over_bytes, blocks),
            most=most,
        )
        for blocks, most in _OVER_BYTES.items()
    ),
    Bound("n over a larger n, each", _cliffs, most=1.08),
    *(
        Bound(f"{block}: uneven over random, each", partial(_uneven_over_random, block), most=1.25)
        for block in BLOCKS
    ),
    Bound("products", lambda record: [("all", float(len(record["products"])))], 400),
    Bound("sparse products of a class", _counts, 8),
    Bound("attention over the fastest dense, each", ratios("attention", "sdpa_us")),
]
