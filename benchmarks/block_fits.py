"""The fits of the models of block-sparse products: schedules of kept blocks, and packed operands."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from sparse24_plans import BlockSparseMatmulDescriptor, BlockSparseOp, BlockSparseShape
from sparse24_plans.bench.steady import SHORT_US
from sparse24_plans.blocksparse.panels import NARROW_PANEL_ROWS
from sparse24_plans.blocksparse.schedules import blocks_wgmma, predicted_times
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma import tiles_of_large_blocks
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import (
    Cut,
    cut_work,
    exchange_us,
)
from sparse24_plans.blocksparse.schedules.predicted_times import (
    BLOCKS,
    DENSE,
    FEW,
    SAMPLED,
    SAMPLED_DENSE,
    Way,
)
from sparse24_plans.blocksparse.shape import BLOCK_SIZES
from sparse24_plans.plan.schedule_choice import REFERENCE_SMS

from . import random_blocks
from .blocks import Cell
from .descent import (
    Array,
    Choices,
    Constants,
    Fit,
    best_limit,
    descend,
    file_of,
    files_of,
    given_models,
    limits_entry,
    lines_of,
    plain,
    summary,
)

CELL_FIELDS = ("op", "m", "k", "n", "block", "density", "pattern", "trans_a", "trans_b")
PACKED, UNEVEN = "packed-times", "uneven-times"
BLOCKS_MEASURED, LARGE_BLOCKS = "block-times", "large-block-times"
DENSE_TIMES, INFLATED = "dense-times", "inflated-times"
SHORT_SUMS = "sdd_mma"
TIMES_COUNT = 3.0
"""Weight of the errors of predicted times, by which ways are compared, relative to the losses of choices."""
WAY_STEPS = 6000
"""Steps of a descent to the constants of a way."""
ALIKE = 0.002
"""Mean loss within which shares count as equal for unknown layouts; the smallest share is taken then."""
MIN_PAIRS = 8
"""Problems of a kind from which a limit is fitted."""
SIZES = [f"{rows}x{tokens}" for rows, tokens in blocks_wgmma.SIZES]
PACKED_BOUNDS = {
    "step": (0.12, 1), "step_cells": (1e-6, 1e-4), "kept_cells": (2.5e-9, 6e-9), "l2_bytes": (1e-8, 1e-6),
    "memory_bytes": (1e-8, 2e-6), "wave": (0.01, 10), "weight_bytes": (1e-7, 1e-6),
    "token_bytes": (1e-8, 1e-6), "cells": (1e-10, 1e-8), "wave_cells": (1e-10, 1e-8),
    "launch": (1, 8), "exponent": (1.05, 8),
}  # fmt: skip
FEW_BOUNDS = {
    "memory_bytes": (4e-8, 6e-7), "l2_bytes": (4e-8, 6e-7), "x_loads": (1e-9, 1e-5),
    "wave": (0.8, 4), "rounds": (0.1, 4), "x_rounds": (0.01, 4),
    "written_cells": (0.1, 1), "exchanged": (0.25, 3), "copies": (0.5, 6), "copied_bytes": (3e-7, 1e-5),
    "launch": (0.1, 4), "exponent": (1, 1),
}  # fmt: skip
"""The parts of a kernel for few tokens follow one another, so their times are added up."""
SAMPLED_BOUNDS = {
    "step_rows": (1e-5, 3e-3), "rows": (1e-5, 3e-2), "memory_bytes": (1e-8, 2e-6), "l2_bytes": (1e-8, 1e-6),
    "value_bytes": (1e-8, 5e-6), "factor_bytes": (1e-8, 5e-6), "cells": (1e-10, 5e-9),
    "wave_cells": (1e-10, 5e-9), "product_bytes": (1e-8, 5e-6), "launch": (1, 12), "exponent": (1.05, 8),
}  # fmt: skip
SDD_BOUNDS = {"tile": (1, 500), "shared_rows": (0.3, 1), "few_stages": (1, 2)}
SMALL_MODELS = [f"blocks_wgmma_{op}_{block}" for op in ("dsd", "dds") for block in (16, 32)]
SDD_MODELS = [f"blocks_wgmma_sdd_{block}" for block in (16, 32, 64, 128)]
SAMPLED_BLOCKS = (16, 32)
"""Sizes of blocks with which ``sdd`` may be faster as a dense product."""
SAMPLED_MODELS = {
    **{f"{SAMPLED.name}_{kind}": SAMPLED for kind in ("16", "16_in_pieces", "32")},
    **{f"{SAMPLED_DENSE.name}_{block}": SAMPLED_DENSE for block in SAMPLED_BLOCKS},
}
PACKED_MODELS = {DENSE.name: DENSE} | {
    f"{way.name}_{kind}_last_{block}": way
    for way in (BLOCKS, FEW)
    for kind in ("k", "n")
    for block in BLOCK_SIZES
}
LARGE_MODELS = [
    model
    for model, way in PACKED_MODELS.items()
    if way is BLOCKS and int(model.rsplit("_", 1)[1]) >= NARROW_PANEL_ROWS
]
"""Models that also choose the tile, whose times they predict."""
WAY_OF = PACKED_MODELS | SAMPLED_MODELS


def described(row: Mapping[str, Any]) -> BlockSparseMatmulDescriptor:
    """The problem of a measured line."""
    return _described(tuple((name, row[name]) for name in (*CELL_FIELDS, "seed") if name in row))


@cache
def _described(fields: tuple[tuple[str, Any], ...]) -> BlockSparseMatmulDescriptor:
    given = dict(fields)
    cell = (random_blocks.Cell if "seed" in given else Cell)(**given)
    return cell.descriptor(cell.layout())


def block_lines(gpu: str) -> list[Mapping[str, Any]]:
    """Measured products of block-sparse matrices, without short sums, which have a kernel of their own."""
    return [row for row in lines_of(gpu, BLOCKS_MEASURED) if "mma_us" not in row]


def short_lines(gpu: str) -> list[Mapping[str, Any]]:
    """Measured ``sdd`` with short sums, also by the kernel that they have of their own."""
    return [row for row in lines_of(gpu, BLOCKS_MEASURED) if "mma_us" in row]


def block_problems(op: str, block: int, gpu: str) -> list[Any]:
    """Descriptors of measured products of block-sparse matrices, and times by a schedule's first sizes.

    No row panel of these problems is long, so ``longest_panel`` is set to 0.
    """
    rows = (row for row in block_lines(gpu) if (row["op"], row["block"]) == (op, block))
    return [(described(row).model_copy(update={"longest_panel": 0}), row["us"]) for row in rows]


def beside_inflated(gpu: str) -> list[tuple[BlockSparseMatmulDescriptor, float, float]]:
    """Measured problems, and their times by kept blocks, as they were chosen, and as an inflated product."""
    return [(described(row), row["us"], row["inflate_us"]) for row in lines_of(gpu, INFLATED)]


def best_share(
    given: float, ratio: Array, kept: Array, inflated: Array, alike: float = 0.0
) -> tuple[float, Array]:
    """The share of a dense product's predicted time up to which kept blocks lose least, and what is lost.

    It is the least share whose mean loss is at most ``alike`` above the least. Few problems leave the given
    one.
    """

    def lost(most: float) -> Array:
        return np.where(ratio > most, inflated, kept) / np.minimum(inflated, kept)

    tried = (np.arange(16, 33) / 20).tolist() if len(ratio) >= MIN_PAIRS else [given]
    losses = [float(np.log(lost(most)).mean()) for most in tried]
    best = next(most for most, loss in zip(tried, losses, strict=True) if loss <= min(losses) + alike)
    return best, lost(best)


def inflating_entry(gpu: str) -> Constants:
    """The time in which an operand is inflated, and up to which predicted times kept blocks are multiplied.

    What is chosen depends on all other models. ``unknown`` is the loss for the same problems if the lengths
    of their rows are not known.
    """
    lines = [one for one in beside_inflated(gpu) if one[0].op is not BlockSparseOp.SDD]
    problems, (kept, inflated) = [desc for desc, *_ in lines], np.array([us for _, *us in lines]).T
    product = np.array([DENSE.microseconds(desc) for desc in problems])
    work = np.array([(1.0, predicted_times.inflated_bytes(desc)) for desc in problems])
    launch, each = np.linalg.lstsq(work / inflated[:, None], (inflated - product) / inflated, rcond=None)[0]
    of_shapes = [desc.model_copy(update={"longest_panel": 0}) for desc in problems]
    known, unknown = (
        np.array([predicted_times.blocks_us(desc) for desc in some]) / (product + work @ (launch, each))
        for some in (problems, of_shapes)
    )
    near = np.array([predicted_times.nearness(desc) for desc in problems])
    given = given_models()[predicted_times.INFLATING]["constants"]["most_of_dense"]
    shares = {
        kind: best_share(given[kind], *(one[near == kind] for one in (known, kept, inflated)))
        for kind in ("random", "close")
    }
    shares["unknown"] = best_share(given["unknown"], unknown, kept, inflated, ALIKE)
    found = {
        "launch": plain(float(f"{launch:.4g}")),
        "bytes": plain(float(f"{each:.4g}")),
        "most_of_dense": {kind: most for kind, (most, _) in shares.items()},
    }
    losses = [*shares["random"][1].tolist(), *shares["close"][1].tolist()]
    entry = limits_entry(found, losses, file_of(gpu, INFLATED))
    entry["measured"]["unknown"] = {"loss": summary(shares["unknown"][1])}
    return entry


def sampled_choice_entry(gpu: str) -> Constants:
    """Up to which share of a dense product's predicted time ``sdd`` is multiplied by kept blocks."""
    lines = [one for one in beside_inflated(gpu) if one[0].op is BlockSparseOp.SDD]
    kept, inflated = np.array([us for _, *us in lines]).T
    ratio = np.divide(*np.array([predicted_times.both_us(desc) for desc, *_ in lines]).T)
    given = given_models()[predicted_times.SAMPLED_LIMIT]["constants"]["most_of_dense"]
    best, lost = best_share(given, ratio, kept, inflated)
    return limits_entry({"most_of_dense": best}, lost.tolist(), file_of(gpu, INFLATED))


def short_sums_entry(gpu: str) -> Constants:
    """The longest sums of ``sdd`` for which the kernel of short ones is the fastest, by size of a block."""
    found: Constants = copy.deepcopy(given_models()[SHORT_SUMS]["constants"])
    measured = [(described(row), row) for row in short_lines(gpu)]
    losses: list[float] = []
    for block in BLOCK_SIZES:
        pairs = [
            (row["n"], np.log(min(row["inflate_us"], chosen_us((desc, row["us"]))) / row["mma_us"]))
            for desc, row in measured
            if desc.layout.block == block
        ]
        if len(pairs) < MIN_PAIRS:
            continue
        most, lost = best_limit(pairs, range(0, max(n for n, _ in pairs) + 8, 8))
        found["most_terms"][str(block)] = most
        losses += lost
    return limits_entry(found, losses, file_of(gpu, BLOCKS_MEASURED))


def measured_of(problem: Any) -> tuple[list[blocks_wgmma.BlocksWgmmaSchedule], list[float]]:
    desc, times = problem
    tried = blocks_wgmma.schedules_by_density(desc)
    return tried, [times[f"{one.rows},{one.tokens},{one.cluster_n}"] for one in tried]


def chosen_us(problem: Any) -> float:
    """The measured time of the schedule that the package chooses."""
    tried, times = measured_of(problem)
    return times[tried.index(Cut.of(problem[0], REFERENCE_SMS).schedule)]


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
                blocks_wgmma.small_time(some, one[0], REFERENCE_SMS, {**ones, "partial_wave": part})
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
        for each in zip(
            *(blocks_wgmma.sdd_loads(tried, one[0], REFERENCE_SMS) for one in problems), strict=True
        )
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


def packed_lines(
    gpu: str, family: str = PACKED
) -> Iterator[tuple[Mapping[str, Any], BlockSparseMatmulDescriptor]]:
    """Measured lines of packed operands, each with its problem."""
    for row in lines_of(gpu, family):
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


def way_families(model: str) -> list[str]:
    """The measured problems that a model is fitted to."""
    if model in SAMPLED_MODELS:
        return [BLOCKS_MEASURED, INFLATED]
    if PACKED_MODELS[model] is DENSE:
        return [DENSE_TIMES]
    if PACKED_MODELS[model] is FEW:
        return [PACKED, UNEVEN]
    return [LARGE_BLOCKS, PACKED] if model in LARGE_MODELS else [PACKED]


def packed_problems(model: str, gpu: str) -> list[Any]:
    """Descriptors of measured products of packed operands, each with the times that the model predicts.

    Each time comes with its work: one of a way that has one schedule, or of every schedule for few tokens.
    """
    way = PACKED_MODELS[model]
    if way is DENSE:
        return dense_problems(gpu)
    if way is FEW:
        both = itertools.chain(packed_lines(gpu), packed_lines(gpu, UNEVEN))
        timed, lines = timed_schedules, [(desc, row.get("mma_us", {})) for row, desc in both]
    elif model in LARGE_MODELS:
        timed, lines = timed_tiles, list(large_blocks(gpu))
    else:
        timed, lines = timed_tiles, [(desc, uncut(row)) for row, desc in packed_lines(gpu)]
    found = [(desc, timed(desc, us)) for desc, us in lines if way.model(desc) == model]
    return [problem for problem in found if problem[1]]


def large_blocks(gpu: str) -> Iterator[tuple[BlockSparseMatmulDescriptor, Mapping[str, float]]]:
    """Measured problems of large blocks: each with the times of the tiles that may be chosen, or of the tile
    and slices with which a packed operand was multiplied."""
    for row in lines_of(gpu, LARGE_BLOCKS):
        desc = described(row)
        names = [Cut(one).name for one in tiles_of_large_blocks(desc)]
        yield desc, {name: row["us"][name] for name in names if name in row["us"]}
    for packed, desc in packed_lines(gpu):
        if packed["block"] >= NARROW_PANEL_ROWS:
            yield desc, uncut(packed)


def uncut(row: Mapping[str, Any]) -> dict[str, float]:
    """The times of a line's cuts in which not every panel is cut."""
    return {name: us for name, us in row.get("us", {}).items() if "/" not in name}


def timed_tiles(
    desc: BlockSparseMatmulDescriptor, us: Mapping[str, float]
) -> list[tuple[tuple[float, ...], float]]:
    """The work of each tile, by the name of its ``Cut``, and its time without the exchange of sums."""
    cuts = {name: Cut.named(name) for name in us}
    return [(cut_work(desc, cut), us[name] - exchange_us(desc, cut)) for name, cut in cuts.items()]


def dense_problems(gpu: str) -> list[Any]:
    """Descriptors of dense products, each with the model's work and the measured time."""
    found = []
    for row in lines_of(gpu, DENSE_TIMES):
        shape = BlockSparseShape(heads=1, rows=row["k"], cols=row["m"], block=BLOCK_SIZES[0], blocks=0)
        desc = BlockSparseMatmulDescriptor(
            op=BlockSparseOp.DDS, layout=shape, n=row["n"], element=row["element"], packed=True
        )  # of any n its rows are aligned, and nothing is copied
        found.append((desc, [(DENSE.work(desc), row["us"])]))
    return found


def timed_schedules(
    desc: BlockSparseMatmulDescriptor, us: Mapping[str, float]
) -> list[tuple[tuple[float, ...], float]]:
    """The work and the time of each schedule for few tokens that was measured."""
    tried = BlocksMmaSchedule.candidates(desc)
    return [(one.work(desc, REFERENCE_SMS), us[one.name]) for one in tried if one.name in us]


def sampled_problems(model: str, gpu: str) -> list[Any]:
    """Descriptors of measured ``sdd``, each with its work and the time that the model predicts.

    Longer products of ``blocks`` are left out: their contenders alternated, and shared a power-limited clock.
    """
    way, lines = SAMPLED_MODELS[model], beside_inflated(gpu)
    for row in block_lines(gpu):
        if row.get("inflate_us", SHORT_US) < SHORT_US:
            desc = described(row)
            lines.append((desc, chosen_us((desc, row["us"])), row["inflate_us"]))
    return [
        (desc, [(way.work(desc), kept if way is SAMPLED else inflated)])
        for desc, kept, inflated in lines
        if desc.op is BlockSparseOp.SDD and way.model(desc) == model
    ]


def way_choices(problems: Sequence[Any], way: Way) -> Choices:
    """The choices that a way is fitted to: predicted times, and for few tokens the choice of a schedule."""
    work = np.array([one for _, timed in problems for one, _ in timed])
    before = np.array([way.copies_us(desc) for desc, timed in problems for _ in timed])
    taken = np.array([us for _, timed in problems for _, us in timed])
    counts = [len(timed) for _, timed in problems]
    begins = np.cumsum([0, *counts])[:-1]

    def predict(constants: Array) -> Array:
        launch, exponent, *costs = constants
        norm = ((np.array(costs) * work) ** exponent).sum(axis=1)
        return launch + norm ** (1 / exponent) + before

    best, weights = np.minimum.reduceat(taken, begins), np.ones(len(counts))
    return Choices(predict, taken, begins, best, weights, True, off=TIMES_COUNT)


def way_entry(model: str, gpu: str) -> Constants:
    """The entry of a model of a way to multiply, with its errors in place of losses."""
    way, sampled = WAY_OF[model], model in SAMPLED_MODELS
    problems = (sampled_problems if sampled else packed_problems)(model, gpu)
    limits = FEW_BOUNDS if way is FEW else SAMPLED_BOUNDS if sampled else PACKED_BOUNDS
    bounds = {name: limits[name] for name in ("launch", "exponent", *way.terms)}
    fit = Fit(
        problems,
        lambda one: (one[0].layout.rows, one[0].layout.cols),
        partial(way_choices, way=way),
        bounds,
        steps=WAY_STEPS,
        descents=1,
    )
    inside, outside = fit.parts()
    found, elsewhere = descend(fit, problems), descend(fit, inside)

    def errors(constants: Array, some: Sequence[Any]) -> dict[str, float]:
        choices = fit.choices(some)
        return summary(np.exp(np.abs(np.log(choices.predict(constants) / choices.taken))))

    measured = {
        "file": files_of(gpu, way_families(model)),
        "problems": len(problems),
        "error": errors(found, problems),
        "held_out": {"problems": len(outside), "error": errors(elsewhere, outside)},
    }
    return {"constants": dict(zip(bounds, map(plain, found.tolist()), strict=True)), "measured": measured}
