"""The fits of the models of block-sparse products: schedules of kept blocks, and packed operands."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseOp, BlockSparseShape
from sparse24_plans.blocksparse.limits import few_tokens_limits
from sparse24_plans.blocksparse.schedules import blocks_wgmma, dense_product
from sparse24_plans.blocksparse.schedules.blocks_wgmma import MULTIPROCESSORS as SMS
from sparse24_plans.blocksparse.shape import BLOCK_SIZES

from .blocks import Cell
from .descent import (
    Array,
    Choices,
    Constants,
    Fit,
    best_limit,
    descend,
    file_of,
    given_models,
    limits_entry,
    lines_of,
    plain,
    summary,
)

PACKED = "packed-times"
DENSITY = "blocks_density_limits"
FEW_TOKENS = "blocks_mma"
LEAST_PAIRS = 8
"""Problems of a kind from which a limit is fitted."""
SIZES = [f"{rows}x{tokens}" for rows, tokens in blocks_wgmma.SIZES]
PACKED_BOUNDS = {
    "step": (0.12, 1), "step_cells": (1e-6, 1e-4), "kept_cells": (2.5e-9, 6e-9), "l2_bytes": (1e-8, 1e-6),
    "memory_bytes": (1e-8, 2e-6), "wave": (0.01, 10), "weight_bytes": (1e-7, 1e-6),
    "token_bytes": (1e-8, 1e-6), "cells": (1e-9, 1e-8),
}  # fmt: skip
SDD_BOUNDS = {"tile": (1, 500), "shared_rows": (0.3, 1), "few_stages": (1, 2)}
SMALL_MODELS = [f"blocks_wgmma_{op}_{block}" for op in ("dsd", "dds") for block in (16, 32)]
SDD_MODELS = [f"blocks_wgmma_sdd_{block}" for block in (16, 32, 64, 128)]
PACKED_MODELS = [
    dense_product.DENSE,
    *(f"packed_blocks_{kind}_last_{block}" for kind in ("k", "n") for block in (16, 32, 64, 128)),
]


def described(row: Mapping[str, Any]) -> BlockSparseMatmulDescriptor:
    """The problem of a measured line."""
    op, about = BlockSparseOp(row["op"]), ("m", "k", "n", "block", "density", "pattern")
    kept = int(Cell(op, **{name: row[name] for name in about}).bitmap().sum())
    shape = BlockSparseShape(heads=1, rows=row["m"], cols=row["k"], block=row["block"], blocks=kept)
    return BlockSparseMatmulDescriptor(op=op, layout=shape, n=row["n"], element="bf16")


def block_lines(gpu: str) -> list[Mapping[str, Any]]:
    """Measured products of block-sparse matrices, without short sums, which have a kernel of their own."""
    return [row for row in lines_of(gpu, "block-times") if "mma_us" not in row]


def block_problems(op: str, block: int, gpu: str) -> list[Any]:
    """Descriptors of measured products of block-sparse matrices, and times by a schedule's first sizes."""
    rows = (row for row in block_lines(gpu) if (row["op"], row["block"]) == (op, block))
    return [(described(row), row["us"]) for row in rows]


def beside_inflated(gpu: str) -> list[Mapping[str, Any]]:
    """Lines whose inflated product was measured, too."""
    return [row for row in block_lines(gpu) if row.get("inflate_us") is not None]


def density_entry(gpu: str) -> Constants:
    """The densities beyond which an inflated ``sdd`` is faster, for each size of a block."""
    found: Constants = copy.deepcopy(given_models()[DENSITY]["constants"])
    measured = [(described(row), row) for row in beside_inflated(gpu) if row["op"] == BlockSparseOp.SDD]
    losses: list[float] = []
    for block in BLOCK_SIZES:
        pairs = [
            (desc.layout.density, np.log(row["inflate_us"] / chosen_us((desc, row["us"]))))
            for desc, row in measured
            if desc.layout.block == block
        ]
        if len(pairs) < LEAST_PAIRS:
            continue
        most, lost = best_limit(pairs, (np.arange(101) / 100).tolist())
        losses += lost
        found["sdd"].pop(str(block), None)
        if most < max(density for density, _ in pairs):
            found["sdd"][str(block)] = most
    return limits_entry(found, losses, file_of(gpu, "block-times"))


def inflating_entry(gpu: str) -> Constants:
    """The time in which an operand is inflated, and for which densities and predicted times it is chosen.

    What is chosen depends on all other models.
    """
    lines = [row for row in beside_inflated(gpu) if row["op"] != BlockSparseOp.SDD]
    problems = [described(row) for row in lines]
    inflated = np.array([row["inflate_us"] for row in lines])
    kept = np.array([chosen_us((desc, row["us"])) for desc, row in zip(problems, lines, strict=True)])
    packed = [desc.model_copy(update={"packed": True}) for desc in problems]  # nothing to inflate
    blocks, product = np.array([dense_product.times_of(desc) for desc in packed]).T
    work = np.array([(1.0, dense_product.inflated_bytes(desc)) for desc in problems])
    launch, each = np.linalg.lstsq(work / inflated[:, None], (inflated - product) / inflated, rcond=None)[0]
    ratio = blocks / (product + work @ (launch, each))
    density = np.array([desc.layout.density for desc in problems])

    def lost(limits: tuple[float, float]) -> Array:
        inflates = (density > limits[0]) & (ratio > limits[1])
        return np.where(inflates, inflated, kept) / np.minimum(inflated, kept)

    tried = itertools.product((np.arange(11) / 20).tolist(), (np.arange(8, 21) / 10).tolist())
    best = min(tried, key=lambda limits: np.log(lost(limits)).mean())
    found = {"launch": plain(float(f"{launch:.4g}")), "bytes": plain(float(f"{each:.4g}"))}
    found |= dict(zip(("least_density", "most_of_dense"), best, strict=True))
    return limits_entry(found, lost(best).tolist(), file_of(gpu, "block-times"))


def few_tokens_entry(gpu: str) -> Constants:
    """The n up to which the kernels of few tokens are the fastest, by kind of product and size of a block."""
    found: Constants = copy.deepcopy(given_models()[FEW_TOKENS]["constants"])
    measured = [
        (desc, np.log(min(row["us"], row.get("dense_us", np.inf)) / row["mma_us"]))
        for row, desc in packed_lines(gpu)
        if "mma_us" in row
    ]
    for row in lines_of(gpu, "block-times"):
        if "mma_us" in row:
            desc = described(row)
            others = min(row["inflate_us"], chosen_us((desc, row["us"])))
            measured.append((desc, np.log(others / row["mma_us"])))
    losses: list[float] = []
    for limits, block in itertools.product((found["sdd"], found["k_last"], found["n_last"]), BLOCK_SIZES):
        pairs = [
            (desc.n, gain)
            for desc, gain in measured
            if few_tokens_limits(found, desc) is limits and desc.layout.block == block
        ]
        if len(pairs) < LEAST_PAIRS:
            continue
        limits[str(block)], lost = best_limit(pairs, range(0, max(n for n, _ in pairs) + 8, 8))
        losses += lost
    files = ", ".join(file_of(gpu, family) for family in (PACKED, "block-times"))
    return limits_entry(found, losses, files)


def measured_of(problem: Any) -> tuple[list[blocks_wgmma.BlocksWgmmaSchedule], list[float]]:
    desc, times = problem
    tried = blocks_wgmma.schedules_by_density(desc)
    return tried, [times[f"{one.rows},{one.tokens},{one.cluster_n}"] for one in tried]


def chosen_us(problem: Any) -> float:
    """The measured time of the schedule that the package chooses."""
    tried, times = measured_of(problem)
    return times[tried.index(blocks_wgmma.best_schedule(problem[0], SMS))]


def block_choices(problems: Sequence[Any], predict: Callable[[Array], Array]) -> Choices:
    times = [measured_of(one)[1] for one in problems]
    begins = np.cumsum([0, *map(len, times)])[:-1]
    best, taken = np.array([min(one) for one in times]), np.concatenate(times)
    return Choices(predict, taken, begins, best, np.ones(len(times)), False)


def small_choices(problems: Sequence[Any]) -> Choices:
    """dsd and dds: a problem's time with full tiles of step 1 is linear in the part of a begun wave."""
    tried = [measured_of(one)[0] for one in problems]
    ones = {"step": dict.fromkeys(SIZES, 1.0)}
    whole, begun = (
        np.concatenate(
            [
                blocks_wgmma.small_time(some, one[0], SMS, {**ones, "partial_wave": part})
                for some, one in zip(tried, problems, strict=True)
            ]
        )
        for part in (0.0, 1.0)
    )

    def predict(constants: Array) -> Array:
        steps = np.tile(list(small_constants(constants)["step"].values()), len(problems))
        return (whole + constants[0] * (begun - whole)) * steps

    return block_choices(problems, predict)


def small_bounds(block: int) -> Mapping[str, tuple[float, float]]:
    """Bounds of the steps, of which the first is given as 50, and the last is relative to SIZES[1].

    Few large products of few blocks were measured. Where 5% are kept, the largest tile must win there.
    """
    kept = [1 - 0.95 ** (rows // block) for rows in (64, 128)]
    steps = {
        SIZES[0]: (50, 50),
        **dict.fromkeys(SIZES[1:-1], (20, 200)),
        SIZES[-1]: (0.8, 1.98 * kept[0] / kept[1]),
    }
    return {"partial_wave": (0.05, 1), **steps}


def small_constants(constants: Array) -> Constants:
    part, *steps = constants.tolist()
    steps[-1] = float(f"{steps[-1] * steps[1]:.4g}")
    return {"partial_wave": part, "step": dict(zip(SIZES, steps, strict=True))}


def sdd_choices(problems: Sequence[Any]) -> Choices:
    """sdd: all problems of one block have the same candidates."""
    tried = measured_of(problems[0])[0]
    loads = [
        np.stack(each, axis=1)
        for each in zip(*(blocks_wgmma.sdd_loads(tried, one[0], SMS) for one in problems), strict=True)
    ]

    def predict(constants: Array) -> Array:
        fit = dict(zip(SDD_BOUNDS, constants.tolist(), strict=True))
        busiest = [blocks_wgmma.busiest(one, load, fit) for one, load in zip(tried, loads, strict=True)]
        return np.sum(busiest, axis=-1).T.ravel()

    return block_choices(problems, predict)


def block_fit(model: str, gpu: str) -> Fit:
    _, _, op, block = model.split("_")
    found = block_problems(op, int(block), gpu)
    fit = Fit(found, lambda one: (one[0].layout.rows, one[0].layout.cols), sdd_choices, SDD_BOUNDS, 300, 24)
    if op == "sdd":
        return fit
    return fit._replace(choices=small_choices, bounds=small_bounds(int(block)), steps=3000, descents=8)


def packed_lines(gpu: str) -> Iterator[tuple[Mapping[str, Any], BlockSparseMatmulDescriptor]]:
    """Measured lines of packed operands, each with its problem."""
    for row in lines_of(gpu, PACKED):
        about = {"heads": 1, "rows": row["m"], "cols": row["k"], "block": row["block"]}
        yield (
            row,
            BlockSparseMatmulDescriptor(
                op=row["op"],
                layout=BlockSparseShape(**about, blocks=row["blocks"]),
                n=row["n"],
                element=row["element"],
                trans_a="a" in row["transposed"],
                trans_b="b" in row["transposed"],
                packed=True,
                longest_panel=row["longest_panel"],
            ),
        )


def packed_problems(model: str, gpu: str) -> list[Any]:
    """Descriptors of measured products of packed operands, each with the time that the model predicts.

    Lines from before cuBLAS was given aligned rows have no ``dense_us`` if theirs were not aligned.
    """
    if model == dense_product.DENSE:
        return [(desc, row["dense_us"]) for row, desc in packed_lines(gpu) if "dense_us" in row]
    return [(desc, row["us"]) for row, desc in packed_lines(gpu) if model == dense_product.model_of(desc)]


def packed_choices(problems: Sequence[Any], dense: bool) -> Choices:
    """Each problem has one candidate: what is fitted are times, which two models are compared by."""
    count = dense_product.dense_work if dense else dense_product.blocks_work
    work = np.array([count(desc) for desc, _ in problems])
    copies = dense_product.dense_copies_us if dense else dense_product.pre_pass_us
    before = np.array([copies(desc) for desc, _ in problems])
    taken = np.array([us for _, us in problems])

    def predict(constants: Array) -> Array:
        launch, exponent, *costs = constants
        norm = ((np.array(costs) * work) ** exponent).sum(axis=1)
        return launch + norm ** (1 / exponent) + before

    return Choices(predict, taken, np.arange(len(taken)), taken, np.ones(len(taken)), True)


def packed_entry(model: str, gpu: str) -> Constants:
    """The entry of a model of packed operands, with its errors in place of losses."""
    dense, problems = model == dense_product.DENSE, packed_problems(model, gpu)
    terms = dense_product.DENSE_TERMS if dense else dense_product.TERMS
    bounds = {"launch": (1, 8), "exponent": (1.05, 8), **{term: PACKED_BOUNDS[term] for term in terms}}
    fit = Fit(
        problems,
        lambda one: (one[0].layout.rows, one[0].layout.cols),
        partial(packed_choices, dense=dense),
        bounds,
        steps=6000,
        descents=1,
    )
    inside, outside = fit.parts()
    found, elsewhere = descend(fit, problems), descend(fit, inside)

    def errors(constants: Array, some: Sequence[Any]) -> dict[str, float]:
        choices = fit.choices(some)
        return summary(np.exp(np.abs(np.log(choices.predict(constants) / choices.taken))))

    measured = {
        "file": file_of(gpu, PACKED),
        "problems": len(problems),
        "error": errors(found, problems),
        "held_out": {"problems": len(outside), "error": errors(elsewhere, outside)},
    }
    return {"constants": dict(zip(bounds, map(plain, found.tolist()), strict=True)), "measured": measured}
