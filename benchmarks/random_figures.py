"""Summaries of the records of random problems: of 2:4 weights, and of block-sparse matrices."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean
from typing import Any

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseShape
from sparse24_plans.bench.record import Record
from sparse24_plans.blocksparse.kernel_problem import KernelProblem

TOKENS = ((1, 64), (65, 512), (513, 8192))
BLOCK_TOKENS = ((1, 200), (201, 8192))
Cell = tuple[str, int, int, int, str]


def cells(record: Record, backend: str = "auto") -> dict[Cell, dict[str, Any]]:
    """The rows of a backend, by the shape's name, m, k, n and element."""
    names = ("shape", "m", "k", "n", "element")
    return {tuple(row[name] for name in names): row for row in record["gemm"] if row["backend"] == backend}


def ratios(record: Record, over: str, element: str, tokens: tuple[int, int] = (1, 8192)) -> dict[Cell, float]:
    """``over`` / microseconds of what select chose, where the record has both."""
    return {
        cell: row[over] / row["us"]
        for cell, row in cells(record).items()
        if row["element"] == element and tokens[0] <= row["n"] <= tokens[1] and row[over]
    }


def invariant_costs(record: Record, element: str, tokens: tuple[int, int] = (1, 8192)) -> dict[Cell, float]:
    """Microseconds with batch invariance required over those without."""
    auto = cells(record)
    return {
        cell: row["us"] / auto[cell]["us"]
        for cell, row in cells(record, "invariant").items()
        if row["element"] == element and tokens[0] <= row["n"] <= tokens[1]
    }


def mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None without values."""
    found = list(values)
    return geometric_mean(found) if found else None


def with_worst(row: dict[str, Any], name: str) -> str:
    """A mean of the summary, and the worst of it in brackets."""
    return "-" if row[name] is None else f"{row[name]:.2f} ({row[name + '_worst']:.2f})"


def random_summary(record: Record) -> list[dict[str, Any]]:
    """A row an element and range of n: cells with a dense peer; of each ratio the mean and the worst."""
    found = []
    for element in dict.fromkeys(row["element"] for row in record["gemm"]):
        for tokens in TOKENS:
            dense = ratios(record, "dense_us", element, tokens)
            worst = min(dense, key=dense.__getitem__, default=None)
            invariant = invariant_costs(record, element, tokens).values()
            lost = [1 / one for one in ratios(record, "best_us", element, tokens).values()]
            found.append(
                {
                    "element": element,
                    "tokens": f"{tokens[0]}-{tokens[1]}",
                    "cells": len(dense),
                    "mean": mean(dense.values()),
                    "worst": dense[worst] if worst else None,
                    "at": f"{worst[1]}x{worst[2]}, {worst[3]}" if worst else None,
                    "invariant": mean(invariant),
                    "invariant_worst": max(invariant, default=None),
                    "best": mean(lost),
                    "best_worst": max(lost, default=None),
                }
            )
    return found


def is_aligned(row: dict[str, Any]) -> bool:
    """Whether cuBLAS is fast for the rows of a product's dense matrices as they are."""
    desc = BlockSparseMatmulDescriptor(
        op=row["op"],
        layout=BlockSparseShape(heads=1, rows=row["m"], cols=row["k"], block=row["block"], blocks=0),
        n=row["n"],
        element=row["element"],
        trans_a="a" in row["transposed"],
        trans_b="b" in row["transposed"],
    )
    problem = KernelProblem(desc)
    return not problem.aligned_operands and problem.product_tokens == desc.n


def block_summary(record: Record) -> list[dict[str, Any]]:
    """A row for each block size, range of n and pattern: cells, the mean over dense, and the worst of them.

    ``aligned`` is the mean of the cells for which cuBLAS is fast.
    """
    found = []
    for block in sorted({row["block"] for row in record["products"]}, reverse=True):
        for first, last in BLOCK_TOKENS:
            for pattern in ("random", "uneven"):
                cells = [
                    (row["dense_us"] / row["us"], row)
                    for row in record["products"]
                    if row["block"] == block and row["pattern"] == pattern and first <= row["n"] <= last
                ]
                worst, at = min(cells, key=lambda one: one[0])
                found.append(
                    {
                        "block": block,
                        "tokens": f"{first}-{last}",
                        "pattern": pattern,
                        "cells": len(cells),
                        "mean": mean(over for over, _ in cells),
                        "aligned": mean(over for over, row in cells if is_aligned(row)),
                        "worst": worst,
                        "at": f"{at['op']} {at['m']}x{at['k']}, N {at['n']}, {at['density']:.0%} kept",
                    }
                )
    return found
