"""Fits the cost models that choose schedules to measured problems, and writes their constants.

``python -m benchmarks.fit [--gpu NAME] [--only MODEL ...] [--check]``. Reads ``benchmarks/schedules/`` and
writes ``sparse24_plans/tuning/models/<gpu>.json``: for each model its constants, the measured problems, and
how much longer the schedule that it chooses takes than the best measured one. ``--check`` writes nothing and
fails where the file differs. All models take about a minute on two quiet cores.

The loss of a fit is what its choices lose, softened: every candidate is chosen a little, the less the longer
it is predicted to take. Predicted times far from the measured ones count too, by less. A random descent makes
it small: there are no slopes to follow where two terms of a model change places. wgmma_sp's models start at
given constants and stay near them, the others start in the middle of each constant's bounds.

``held_out`` is the loss for a quarter of the matrices by constants fitted to the others; ``fresh`` is the
loss for problems that no fit sees: random ones, of which two schedules were measured, and large matrices with
24 to 256 tokens, whose schedules were each measured alone in a steady state.

``schedules/given.json`` holds what no measurement decides. The constants that fix split-K are given, since a
fit must not change bits; others are given until their problems are measured, and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparse24_plans import (
    BlockSparseMatmulDescriptor,
    BlockSparseOp,
    BlockSparseShape,
    GemmSparse24Descriptor,
)
from sparse24_plans.blocksparse.schedules import blocks_wgmma, packed
from sparse24_plans.gemm.schedules.wgmma_cost_model import (
    CLASSES,
    CostConstants,
    CostInputs,
    microseconds,
    model_of,
)
from sparse24_plans.gemm.schedules.wgmma_heuristics import invariant_split_k
from sparse24_plans.gemm.schedules.wgmma_sp import WgmmaSpSchedule, schedules_for, schedules_in
from sparse24_plans.plan.schedule_choice import FOLDER

from .blocks import Cell

Array = Any
Constants = dict[str, Any]
SCHEDULES = Path(__file__).parent / "schedules"
SMS = 132
FRESH, PACKED, QUANTIZED = "fresh-times", "packed-times", "quantized-times"
FOLDS = 4
NEAR, FAR, OFF, WORST = 0.01, 0.05, 0.1, 0.2
"""Relative times told apart in a softened choice; relative errors of a predicted time that count in full; the
weight of these errors; and that of the choices that lose most."""
BOUNDS = {
    "launch": (1, 4), "cluster_launch": (0.001, 1.5), "cluster_sync": (0.001, 1), "stall": (1, 150),
    "step": (0.1, 50), "step_token": (0.01, 2), "cta_slowdown": (0.001, 1), "cta_slowdown_token": (1e-5, 0.1),
    "multicast": (1, 1.5), "multicast_stream_k": (1, 1.5), "multicast_widest": (0.001, 1),
    "three_warpgroups_stream_k": (1, 1.5), "bw_third_busy": (5e4, 2e5), "bw_half_busy": (3e4, 1.2e5),
    "bw_all_busy": (2e4, 8e4), "dram_bandwidth": (3e6, 7e6), "l2_bandwidth": (5e6, 4e7),
    "sm_l2_bandwidth": (5e4, 5e5), "unaligned_x": (0.001, 2), "cluster_reduce": (1e-6, 0.01),
    "add_chunk": (1e-6, 0.001), "add_saved": (1e-6, 0.001), "store_bandwidth": (1e3, 1e6),
    "ragged_store_rate": (500, 1e5), "crowded_store": (1, 4), "fixup_wait": (0.01, 10),
    "fixup_store": (1e-7, 1e-3), "stream_k_slowdown": (1e-4, 0.2), "next_tile": (0.05, 5),
    "pipeline_refill": (0.1, 6), "overlap_exponent": (1.5, 12), "bottleneck_exponent": (1.5, 8),
}  # fmt: skip
"""The least and the most of each constant of wgmma_sp's model."""
HELD_NEAR = 0.05
"""The weight of the mean squared distance from the start, in logarithms. wgmma_sp's models start at the given
constants of invariant split-K: fitted freely, they lost 1.5% on 242 fresh problems where choices differed."""
KEPT = {"wgmma_sp_8bit_some"}
"""Models that keep their start: descents from it lose 15% on one fp8_e4m3 problem, the start loses 12."""
NAMES = [field.name for field in fields(CostConstants)]
PROBLEM = ("n", "m", "k", "element", "weight_element", "weight_group")
"""Fields of a measured product that its descriptor has."""
SIZES = [f"{rows}x{tokens}" for rows, tokens in blocks_wgmma.SIZES]
PACKED_BOUNDS = {
    "step": (0.12, 1), "step_cells": (1e-6, 1e-4), "kept_cells": (2.5e-9, 6e-9), "l2_bytes": (1e-8, 1e-6),
    "memory_bytes": (1e-8, 2e-6), "wave": (0.01, 10), "weight_bytes": (1e-7, 1e-6),
    "token_bytes": (1e-8, 1e-6), "cells": (1e-9, 1e-8),
}  # fmt: skip
SDD_BOUNDS = {"tile": (1, 500), "shared_rows": (0.3, 1), "few_stages": (1, 2)}


class Fit(NamedTuple):
    """How one model is fitted: its problems, and the descent."""

    problems: Sequence[Any]
    matrix: Callable[[Any], tuple[int, int]]
    """M and K of a problem, which is held out with all others of its matrix."""
    choices: Callable[[Sequence[Any]], Choices]
    bounds: Mapping[str, tuple[float, float]]
    steps: int
    descents: int
    start: Array | None = None
    """Constants that a descent starts at and is held near; None: the middle of the bounds."""


class Choices(NamedTuple):
    """Measured candidates of all choices, one after the other."""

    predict: Callable[[Array], Array]
    """Predicted times of all candidates by constants, in the order of the bounds."""
    taken: Array
    """Measured times."""
    begins: Array
    """The place where each choice's candidates begin."""
    best: Array
    """The least measured time of each choice's problem."""
    weights: Array
    """How much each choice counts."""
    in_microseconds: bool
    """Whether predicted times are microseconds; else they compare a problem's schedules alone."""

    def lost(self, constants: Array) -> Array:
        """The time of each chosen candidate over that of its problem's best."""
        guessed, ends = self.predict(constants), [*self.begins[1:], len(self.taken)]
        chosen = [
            begin + int(np.argmin(guessed[begin:end])) for begin, end in zip(self.begins, ends, strict=True)
        ]
        return self.taken[chosen] / self.best

    def free(self, constants: Array) -> Array:
        """The losses of the choices that count in full."""
        return self.lost(constants)[self.weights == 1]

    def loss(self) -> Callable[[Array], float]:
        """The function that a descent makes small."""
        counts = np.diff([*self.begins, len(self.taken)])
        choice = np.repeat(np.arange(len(counts)), counts)
        taken = np.log(self.taken)
        gap = taken - np.log(self.best)[choice]
        near = np.where(gap < np.log(1.1), 1.0, np.where(gap < np.log(2), 0.5, 0.25))
        total = self.weights.sum()

        def loss(constants: Array) -> float:
            guessed = np.log(self.predict(constants))
            share = np.exp((np.minimum.reduceat(guessed, self.begins)[choice] - guessed) / NEAR)
            each = np.add.reduceat(share * gap, self.begins) / np.add.reduceat(share, self.begins)
            error = guessed - taken
            if not self.in_microseconds:
                error -= (np.add.reduceat(error, self.begins) / counts)[choice]
            off = near * error / FAR
            wrong = 2 * FAR**2 * (np.sqrt(1 + off**2) - 1).mean()
            worst = ((self.weights * each**8).sum() / total) ** 0.125
            return float((self.weights * each).sum() / total + WORST * worst + OFF * wrong)

        return loss


def descend(fit: Fit, problems: Sequence[Any]) -> Array:
    """Constants of little loss: of several random descents, those whose choices lose least."""
    choices = fit.choices(problems)

    def hard_loss(constants: Array) -> float:
        lost = np.log(choices.lost(constants))
        return float(np.average(lost, weights=choices.weights) + WORST * lost.max())

    found = [descent(choices.loss(), fit, seed) for seed in range(fit.descents)]
    return min(found, key=hard_loss)


def descent(loss: Callable[[Array], float], fit: Fit, seed: int) -> Array:
    """One random descent in the constants' logarithms."""
    rng = random.Random(seed)
    low, high = np.log(np.array(list(fit.bounds.values()), dtype=np.float64)).T
    free = [place for place in range(len(low)) if low[place] < high[place]]
    start = (low + high) / 2 if fit.start is None else np.clip(np.log(fit.start), low, high)
    weight = 0.0 if fit.start is None else HELD_NEAR

    def total(at: Array) -> float:
        return loss(np.exp(at)) + weight * float(((at - start) ** 2).mean())

    at, least = start, total(start)
    for _ in range(fit.steps):
        trial, size = at.copy(), rng.choice((0.05, 0.12, 0.25, 0.5, 1.2))
        for place in rng.sample(free, rng.randint(1, min(3, len(free)))):
            trial[place] = min(max(at[place] + size * rng.uniform(-1, 1), low[place]), high[place])
        if (found := total(trial)) < least:
            at, least = trial, found
    return np.array([float(f"{value:.4g}") for value in np.exp(at)])


# The models ----------------------------------------------------------------------------------------


def lines_of(gpu: str, family: str) -> list[dict[str, Any]]:
    """The measured problems of a family, as ``benchmarks.measure_schedules`` writes them."""
    path = SCHEDULES / file_of(gpu, family)
    return [json.loads(line) for line in path.read_text().splitlines()]


def file_of(gpu: str, family: str) -> str:
    return f"{gpu.removeprefix('nvidia_')}-{family}.jsonl"


def given_models() -> dict[str, Constants]:
    """The constants that no measurement decides, with the reasons."""
    found: dict[str, Constants] = json.loads((SCHEDULES / "given.json").read_text())
    return found


def gemm_problems(gpu: str, family: str = "times") -> list[Any]:
    found = []
    for row in lines_of(gpu, family):
        desc = GemmSparse24Descriptor(**{name: row[name] for name in PROBLEM if name in row})
        times = {WgmmaSpSchedule(*map(int, name.split(","))): us for name, us in row["us"].items()}
        found.append((desc, times))
    return found


def gemm_family(model: str) -> str:
    """The measured problems of a model of wgmma_sp."""
    return QUANTIZED if "quantized" in model else "times"


def gemm_fit(model: str, gpu: str) -> Fit:
    found = [one for one in gemm_problems(gpu, gemm_family(model)) if model_of(one[0]) == model]
    min_idle = stream_k_entry(gpu)["constants"]["min_idle"]
    choices = partial(gemm_choices, min_idle=min_idle)
    given = model.replace("wgmma_sp", "wgmma_sp_split_k").replace("quantized", "16bit")
    near = given_models()[given]["constants"]
    start = np.array([max(near[name], 1e-9) for name in BOUNDS])
    return Fit(
        found, lambda one: (one[0].m, one[0].k), choices, BOUNDS, 0 if model in KEPT else 4000, 1, start
    )


def stream_k_entry(gpu: str) -> Constants:
    """The idle fraction of a last wave beyond which stream-K wins, from pairs with and without it."""
    pairs = []
    for desc, times in gemm_problems(gpu):
        for one, us in times.items():
            whole = times.get(one._replace(stream_k=0))
            if one.stream_k and one.k_chunks == 1 and whole is not None:
                idle = -one.work_tiles(desc.n, desc.m) % one.stream_k / one.stream_k
                pairs.append((idle, np.log(whole / us)))
    idle, gain = np.array(pairs).T
    lost = {
        step / 20: np.where(idle > step / 20, np.maximum(0, -gain), np.maximum(0, gain)) for step in range(20)
    }
    best = min(lost, key=lambda least: lost[least].mean())
    measured = {"file": file_of(gpu, "times"), "problems": len(pairs), "loss": summary(np.exp(lost[best]))}
    return {"constants": {"min_idle": best}, "measured": measured}


def gemm_choices(problems: Sequence[Any], min_idle: float) -> Choices:
    """The choice among all schedules, those with an invariant kernel's split-K, and stream-K or not."""
    pairs: list[Any] = []
    taken, begins, best, weights = [], [], [], []
    for desc, times in problems:
        split = invariant_split_k(desc.m, desc.k, desc.element)
        quantized = desc.quantization is not None
        free = schedules_for(desc.n, desc.m, min_idle, quantized)
        pairs_of = [(one, one._replace(stream_k=0)) for one in free if one.stream_k]
        split_free = schedules_in(split, desc.n, desc.m, min_idle, quantized)
        for tried, weight in ((free, 1.0), (split_free, 0.9), *((pair, 0.2) for pair in pairs_of)):
            candidates = [one for one in tried if one in times]
            if len(candidates) > (weight == 0.2):
                begins.append(len(pairs))
                pairs += [(one, desc) for one in candidates]
                taken += [times[one] for one in candidates]
                best.append(min(times[one] for one in candidates))
                weights.append(weight)
    work = CostInputs(pairs)

    def predict(constants: Array) -> Array:
        return microseconds(work, CostConstants(**dict(zip(NAMES, constants.tolist(), strict=True))))

    arrays = np.array(taken), np.array(begins), np.array(best), np.array(weights)
    return Choices(predict, *arrays, in_microseconds=True)


def block_problems(op: str, block: int, gpu: str) -> list[Any]:
    """Descriptors of measured products of block-sparse matrices, and times by a schedule's first sizes."""
    found = []
    for row in lines_of(gpu, "block-times"):
        if (row["op"], row["block"]) == (op, block):
            about = {name: row[name] for name in ("m", "k", "n", "block", "density", "pattern")}
            kept = int(Cell(BlockSparseOp(op), **about).bitmap().sum())
            shape = BlockSparseShape(heads=1, rows=row["m"], cols=row["k"], block=block, blocks=kept)
            desc = BlockSparseMatmulDescriptor(op=op, layout=shape, n=row["n"], element="bf16")
            found.append((desc, row["us"]))
    return found


def measured_of(problem: Any) -> tuple[list[blocks_wgmma.BlocksWgmmaSchedule], list[float]]:
    desc, times = problem
    tried = blocks_wgmma.schedules_by_density(desc)
    return tried, [times[f"{one.rows},{one.tokens},{one.cluster_n}"] for one in tried]


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


def packed_problems(model: str, gpu: str) -> list[Any]:
    """Descriptors of measured products of packed operands, each with the time that the model predicts."""
    found = []
    for row in lines_of(gpu, PACKED):
        about = {"heads": 1, "rows": row["m"], "cols": row["k"], "block": row["block"]}
        desc = BlockSparseMatmulDescriptor(
            op=row["op"],
            layout=BlockSparseShape(**about, blocks=row["blocks"]),
            n=row["n"],
            element=row["element"],
            trans_a="a" in row["transposed"],
            trans_b="b" in row["transposed"],
            packed=True,
            longest_panel=row["longest_panel"],
        )
        if model == packed.DENSE:
            found.append((desc, row["dense_us"]))
        elif model == packed.model_of(desc):
            found.append((desc, row["us"]))
    return found


def packed_choices(problems: Sequence[Any], dense: bool) -> Choices:
    """Each problem has one candidate: what is fitted are times, which two models are compared by."""
    count = packed.dense_work if dense else packed.blocks_work
    factor = np.array([packed.unaligned_factor(desc) if dense else 1.0 for desc, _ in problems])
    work = np.array([count(desc) for desc, _ in problems])
    before = np.array([0.0 if dense else packed.pre_pass_us(desc) for desc, _ in problems])
    taken = np.array([us for _, us in problems])

    def predict(constants: Array) -> Array:
        launch, exponent, *costs = constants
        norm = ((np.array(costs) * work) ** exponent).sum(axis=1)
        return (launch + norm ** (1 / exponent)) * factor + before

    return Choices(predict, taken, np.arange(len(taken)), taken, np.ones(len(taken)), True)


def packed_entry(model: str, gpu: str) -> Constants:
    """The entry of a model of packed operands, with its errors in place of losses."""
    dense, problems = model == packed.DENSE, packed_problems(model, gpu)
    terms = packed.DENSE_TERMS if dense else packed.TERMS
    bounds = {"launch": (1, 8), "exponent": (1.05, 8), **{term: PACKED_BOUNDS[term] for term in terms}}
    fit = Fit(
        problems,
        lambda one: (one[0].layout.rows, one[0].layout.cols),
        partial(packed_choices, dense=dense),
        bounds,
        steps=6000,
        descents=1,
    )
    order = {one: place for place, one in enumerate(dict.fromkeys(map(fit.matrix, problems)))}
    parts = [
        [one for one in problems if (order[fit.matrix(one)] % FOLDS > 0) is held] for held in (True, False)
    ]
    found, elsewhere = descend(fit, problems), descend(fit, parts[0])

    def errors(constants: Array, some: Sequence[Any]) -> dict[str, float]:
        choices = fit.choices(some)
        return summary(np.exp(np.abs(np.log(choices.predict(constants) / choices.taken))))

    measured = {
        "file": file_of(gpu, PACKED),
        "problems": len(problems),
        "error": errors(found, problems),
        "held_out": {"problems": len(parts[1]), "error": errors(elsewhere, parts[1])},
    }
    return {"constants": dict(zip(bounds, map(plain, found.tolist()), strict=True)), "measured": measured}


# The data file -------------------------------------------------------------------------------------

GEMM_MODELS = [f"wgmma_sp_{kind}_{size}" for kind in ("16bit", "8bit", "quantized") for size in CLASSES]
SMALL_MODELS = [f"blocks_wgmma_{op}_{block}" for op in ("dsd", "dds") for block in (16, 32)]
SDD_MODELS = [f"blocks_wgmma_sdd_{block}" for block in (16, 32, 64, 128)]
PACKED_MODELS = [
    packed.DENSE,
    *(f"packed_blocks_{kind}_last_{block}" for kind in ("k", "n") for block in (16, 32, 64, 128)),
]
STREAM_K = "wgmma_sp_stream_k"
FITTED = [STREAM_K, *GEMM_MODELS, *SMALL_MODELS, *SDD_MODELS, *PACKED_MODELS]


def entry(model: str, gpu: str) -> Constants:
    """The data file's entry of a fitted model."""
    if model == STREAM_K:
        return stream_k_entry(gpu)
    if model in PACKED_MODELS:
        return packed_entry(model, gpu)
    gemm = model in GEMM_MODELS
    fit = gemm_fit(model, gpu) if gemm else block_fit(model, gpu)
    order = {one: place for place, one in enumerate(dict.fromkeys(map(fit.matrix, fit.problems)))}
    inside = [one for one in fit.problems if order[fit.matrix(one)] % FOLDS]
    outside = [one for one in fit.problems if order[fit.matrix(one)] % FOLDS == 0]
    found, elsewhere = descend(fit, fit.problems), descend(fit._replace(descents=1), inside)
    every, held_out = fit.choices(fit.problems), fit.choices(outside)
    measured = {
        "file": file_of(gpu, gemm_family(model) if gemm else "block-times"),
        "problems": len(fit.problems),
        "loss": summary(every.free(found)),
        "held_out": {"problems": len(outside), "loss": summary(held_out.free(elsewhere))},
    }
    if gemm and "quantized" not in model and (SCHEDULES / file_of(gpu, FRESH)).is_file():
        fresh = [one for one in gemm_problems(gpu, FRESH) if model_of(one[0]) == model]
        measured["fresh"] = {"problems": len(fresh), "loss": summary(fit.choices(fresh).free(found))}
    values: Constants = dict(zip(fit.bounds, map(plain, found.tolist()), strict=True))
    values = small_constants(found) if model in SMALL_MODELS else values
    return {"constants": values, "measured": measured}


def summary(ratios: Array) -> dict[str, float]:
    """Loss of the choices: the geometric mean and the worst, as fractions of the best measured time."""
    return {
        "mean": round(float(np.exp(np.log(ratios).mean()) - 1), 4),
        "worst": round(float(ratios.max() - 1), 3),
    }


def plain(value: float) -> float:
    return int(value) if value == int(value) else value


def file_text(gpu: str, only: Sequence[str]) -> str:
    """The data file of a GPU, with the models of ``only`` fitted anew, or all where it is empty."""
    path = FOLDER / f"{gpu}.json"
    given = given_models()
    models = {name: {**one, "measured": None} for name, one in given.items()}
    wanted = [one for one in FITTED if not only or one in only]
    if len(wanted) < len(FITTED):
        models |= {one: json.loads(path.read_text())["models"][one] for one in FITTED if one not in wanted}
    with ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1) or 1) as pool:
        models |= dict(zip(wanted, pool.map(entry, wanted, [gpu] * len(wanted)), strict=True))
    ordered = {name: models[name] for name in (*FITTED, *given)}
    return json.dumps({"gpu": gpu, "models": ordered}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fits the cost models that choose schedules.")
    parser.add_argument("--gpu", default="nvidia_h200", help="whose measurements, as its data file is named")
    parser.add_argument(
        "--only", nargs="*", default=[], choices=FITTED, metavar="MODEL", help=", ".join(FITTED)
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file differs")
    wish = parser.parse_args(arguments)
    path = FOLDER / f"{wish.gpu}.json"
    text = file_text(wish.gpu, wish.only)
    if wish.check:
        same = path.read_text() == text
        print(f"{path.name}: {'reproduced' if same else 'differs from what the measured problems give'}")
        return 0 if same else 1
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
