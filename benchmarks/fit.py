"""Fits the cost models that choose schedules to measured problems, and writes their constants.

``python -m benchmarks.fit [--gpu NAME] [--only MODEL ...] [--check]`` reads ``benchmarks/schedules/`` and
writes ``sparse24_plans/tuning/models/<gpu>.json``: for each model its constants, the measured problems, and
how much longer the schedule that it chooses takes than the best measured one. ``--check`` writes nothing and
fails where the file differs. All models take about five minutes on two quiet cores.
Models whose problems have not been measured on a GPU keep the constants of the H200, of which all are.

The loss of a fit is what its choices lose, softened: every candidate is chosen a little, the less the longer
it is predicted to take. Predicted times far from the measured ones count too, by less. A random descent makes
it small: there are no slopes to follow where two terms of a model change places. wgmma_sp's models start at
given constants and stay near them, the others start in the middle of each constant's bounds.

``held_out`` is the loss for a quarter of the matrices by constants fitted to the others; ``fresh`` is the
loss for problems that no fit sees: random ones, of which two schedules were measured, or all of them with the
newest kernels, and large matrices with 24 to 256 tokens, whose schedules were each measured alone in a steady
state.

``schedules/given.json`` holds what no measurement decides. The constants that fix split-K are given, since a
fit must not change bits; limits are given that stay where few problems were measured; others say why they
are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from sparse24_plans import GemmSparse24Descriptor
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import EVEN_SLICES
from sparse24_plans.blocksparse.schedules.predicted_times import INFLATING, SAMPLED_LIMIT
from sparse24_plans.gemm.schedules.f32_split_heuristics import F32Split
from sparse24_plans.gemm.schedules.schedule_family import ScheduleFamily
from sparse24_plans.gemm.schedules.wgmma_cost_model import CLASSES, CostConstants
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.gemm.schedules.wgmma_sp import WgmmaSpSchedule, schedules_for, schedules_in
from sparse24_plans.plan import schedule_choice
from sparse24_plans.plan.schedule_choice import FOLDER

from .block_fits import (
    BLOCKS_MEASURED,
    INFLATED,
    SDD_MODELS,
    SHORT_SUMS,
    SMALL_MODELS,
    WAY_OF,
    beside_inflated,
    block_fit,
    inflating_entry,
    sampled_choice_entry,
    short_lines,
    short_sums_entry,
    small_constants,
    way_entry,
    way_families,
)
from .descent import (
    SCHEDULES,
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
from .even_slices import EVEN_FAMILIES, even_slices_entry, even_times

Times = Mapping[WgmmaSpSchedule, float]
FRESH, QUANTIZED, F32 = "fresh-times", "quantized-times", "f32-times"
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
KEPT = {"wgmma_sp_8bit_some"}
"""Models that keep their start: descents from it lose 15% on one fp8_e4m3 problem, the start loses 12."""
NAMES = [field.name for field in fields(CostConstants)]
PROBLEM = ("n", "m", "k", "element", "weight_element", "weight_group")
"""Fields of a measured product that its descriptor has."""
F32_BOUNDS = {
    "tile": (0.05, 3), "token": (0.0003, 0.03), "launch": (1, 4), "cluster_launch": (0.01, 1.5),
    "output": (1e-6, 1e-3), "multicast": (0.8, 1.5), "pipeline_refill": (0.01, 6), "fixup_wait": (0.1, 15),
    "dram_bandwidth": (2e6, 7e6), "sm_bandwidth": (1e4, 2e5),
}  # fmt: skip


# The models ----------------------------------------------------------------------------------------


def measured_products(gpu: str, family: str) -> Iterator[tuple[Mapping[str, Any], Any, Times]]:
    """Lines of a family, each with its descriptor and its times by schedule."""
    for row in lines_of(gpu, family):
        desc = GemmSparse24Descriptor(**{name: row[name] for name in PROBLEM if name in row})
        yield row, desc, {WgmmaSpSchedule(*map(int, name.split(","))): us for name, us in row["us"].items()}


@cache
def gemm_problems(gpu: str, family: str = "times") -> list[Any]:
    return [(desc, times) for _, desc, times in measured_products(gpu, family)]


def gemm_family(model: str) -> str:
    """The measured problems of a model of wgmma_sp."""
    return QUANTIZED if "quantized" in model else "times"


def gemm_fit(model: str, gpu: str) -> Fit:
    found = [one for one in gemm_problems(gpu, gemm_family(model)) if WGMMA_SP.model_of(one[0]) == model]
    min_idle = stream_k_entry(gpu)["constants"]["min_idle"]
    choices = partial(gemm_choices, min_idle=min_idle)
    given = model.replace("wgmma_sp", "wgmma_sp_split_k").replace("quantized", "16bit")
    near = given_models()[given]["constants"]
    start = np.array([max(near[name], 1e-9) for name in BOUNDS])
    return Fit(
        found, lambda one: (one[0].m, one[0].k), choices, BOUNDS, 0 if model in KEPT else 4000, 1, start
    )


def f32_fit(model: str, gpu: str) -> Fit:
    """The fit of a model of f32_split, near the given constants where nothing measured decides."""
    found = [
        (desc, row["terms"], times)
        for row, desc, times in measured_products(gpu, F32)
        if F32Split(row["terms"]).model_of(desc) == model
    ]
    given = given_models()[model.replace("f32_split", "f32_split_split_k")]["constants"]
    start = np.array([given[name] for name in F32_BOUNDS])
    return Fit(found, lambda one: (one[0].m, one[0].k), f32_choices, F32_BOUNDS, 4000, 1, start)


def choices_among(
    sets: Iterable[tuple[Any, Sequence[WgmmaSpSchedule], Times, float]],
    family: ScheduleFamily,
    constants_of: Callable[[Array], Any],
) -> Choices:
    """The choice of each set: a problem, candidates that were measured, their times, and how much it counts.

    ``constants_of`` names the constants of a descent as the family's model takes them.
    """
    pairs: list[Any] = []
    taken, begins, best, weights = [], [], [], []
    for desc, candidates, times, weight in sets:
        begins.append(len(pairs))
        pairs += [(one, desc) for one in candidates]
        taken += [times[one] for one in candidates]
        best.append(min(times[one] for one in candidates))
        weights.append(weight)
    arrays = np.array(taken), np.array(begins), np.array(best), np.array(weights)
    work = family.inputs(pairs)

    def predict(constants: Array) -> Array:
        return family.microseconds(work, constants_of(constants))

    return Choices(predict, *arrays, in_microseconds=True)


def f32_choices(problems: Sequence[Any]) -> Choices:
    """Each problem's choice among the schedules that are tried."""
    sets = (
        (desc, [one for one in F32Split(terms).candidates(desc) if one in times], times, 1.0)
        for desc, terms, times in problems
    )
    terms = problems[0][1]  # a model serves one number of terms
    return choices_among(
        sets, F32Split(terms), lambda constants: dict(zip(F32_BOUNDS, constants.tolist(), strict=True))
    )


@cache
def stream_k_entry(gpu: str) -> Constants:
    """The idle fraction of a last wave beyond which stream-K wins, from pairs with and without it."""
    pairs = []
    for desc, times in gemm_problems(gpu):
        for one, us in times.items():
            whole = times.get(one._replace(stream_k=0))
            if one.stream_k and one.k_chunks == 1 and whole is not None:
                idle = -one.work_tiles(desc.n, desc.m) % one.stream_k / one.stream_k
                pairs.append((idle, np.log(us / whole)))
    best, lost = best_limit(pairs, [step / 20 for step in range(20)])
    return limits_entry({"min_idle": best}, lost, file_of(gpu, "times"))


def gemm_choices(problems: Sequence[Any], min_idle: float) -> Choices:
    """The choice among all schedules, those with an invariant kernel's split-K, and stream-K or not."""
    sets = []
    for desc, times in problems:
        split = WGMMA_SP.split_k(desc.m, desc.k, desc.element)
        quantized = desc.quantization is not None
        free = schedules_for(desc.n, desc.m, min_idle, quantized)
        pairs_of = [(one, one._replace(stream_k=0)) for one in free if one.stream_k]
        split_free = schedules_in(split, desc.n, desc.m, min_idle, quantized)
        for tried, weight in ((free, 1.0), (split_free, 0.9), *((pair, 0.2) for pair in pairs_of)):
            candidates = [one for one in tried if one in times]
            if len(candidates) > (weight == 0.2):
                sets.append((desc, candidates, times, weight))

    return choices_among(
        sets,
        WGMMA_SP,
        lambda constants: CostConstants(**dict(zip(NAMES, constants.tolist(), strict=True))),
    )


# The data file -------------------------------------------------------------------------------------

GEMM_MODELS = [f"wgmma_sp_{kind}_{size}" for kind in ("16bit", "8bit", "quantized") for size in CLASSES]
F32_MODELS = [f"f32_split_{terms}_{size}" for terms in (2, 3) for size in ("few", "many")]
STREAM_K = "wgmma_sp_stream_k"


class Limit(NamedTuple):
    """How limits and costs of block-sparse products are fitted that no cost model has."""

    entry: Callable[[str], Constants]
    """Makes the data file's entry for a GPU."""
    families: Sequence[str] = (INFLATED,)
    problems: Callable[[str], Sequence[Any]] = beside_inflated
    """Gives the measured problems of the families that are needed."""


BLOCK_LIMITS = {
    SHORT_SUMS: Limit(short_sums_entry, (BLOCKS_MEASURED,), short_lines),
    EVEN_SLICES: Limit(even_slices_entry, EVEN_FAMILIES, even_times),
    INFLATING: Limit(inflating_entry),
    SAMPLED_LIMIT: Limit(sampled_choice_entry),
}
STAGES = (
    (STREAM_K, *GEMM_MODELS, *F32_MODELS, *SMALL_MODELS, *SDD_MODELS),
    (SHORT_SUMS, *WAY_OF),
    (EVEN_SLICES,),
    (INFLATING, SAMPLED_LIMIT),
)
"""The models, each behind those whose choices it is fitted to."""
FITTED = [model for stage in STAGES for model in stage]


def choose_by(models: Mapping[str, Constants]) -> None:
    """Let this process choose schedules by these models alone, not by the data file that they will be in."""
    found = schedule_choice.models(schedule_choice.REFERENCE_GPU)
    found.clear()
    found.update(models)


def families_of(model: str) -> list[str]:
    """The measured problems that a model is fitted to."""
    if model in WAY_OF:
        return way_families(model)
    if model in F32_MODELS:
        return [F32]
    if model in BLOCK_LIMITS:
        return list(BLOCK_LIMITS[model].families)
    return [BLOCKS_MEASURED if model in (*SMALL_MODELS, *SDD_MODELS) else gemm_family(model)]


def is_measured(model: str, gpu: str) -> bool:
    """Whether problems of the model have been measured on the GPU. Else it keeps the H200's constants."""
    exist = all((SCHEDULES / file_of(gpu, family)).is_file() for family in families_of(model))
    return exist and (model not in BLOCK_LIMITS or bool(BLOCK_LIMITS[model].problems(gpu)))


def entry(model: str, gpu: str) -> Constants:
    """The data file's entry of a fitted model."""
    if model == STREAM_K:
        return stream_k_entry(gpu)
    if model in BLOCK_LIMITS:
        return BLOCK_LIMITS[model].entry(gpu)
    if model in WAY_OF:
        return way_entry(model, gpu)
    gemm = model in GEMM_MODELS
    fit_of = gemm_fit if gemm else f32_fit if model in F32_MODELS else block_fit
    fit = fit_of(model, gpu)
    inside, outside = fit.parts()
    found, elsewhere = descend(fit, fit.problems), descend(fit._replace(descents=1), inside)
    every, held_out = fit.choices(fit.problems), fit.choices(outside)
    measured = {
        "file": files_of(gpu, families_of(model)),
        "problems": len(fit.problems),
        "loss": summary(every.free(found)),
        "held_out": {"problems": len(outside), "loss": summary(held_out.free(elsewhere))},
    }
    if gemm and "quantized" not in model and (SCHEDULES / file_of(gpu, FRESH)).is_file():
        fresh = [one for one in gemm_problems(gpu, FRESH) if WGMMA_SP.model_of(one[0]) == model]
        measured["fresh"] = {"problems": len(fresh), "loss": summary(fit.choices(fresh).free(found))}
    values: Constants = dict(zip(fit.bounds, map(plain, found.tolist()), strict=True))
    values = small_constants(found) if model in SMALL_MODELS else values
    return {"constants": values, "measured": measured}


@cache
def written(gpu: str) -> dict[str, Constants]:
    """The models of a GPU's data file as it is."""
    found: dict[str, Constants] = json.loads((FOLDER / f"{gpu}.json").read_text())["models"]
    return found


def file_text(gpu: str, only: Sequence[str]) -> str:
    """The data file of a GPU, with the models of ``only`` fitted again, or all models if it is empty."""
    given = given_models()
    models = {name: {**one, "measured": None} for name, one in given.items()}
    measured = [one for one in FITTED if is_measured(one, gpu)]
    wanted = [one for one in measured if not only or one in only]
    for one in FITTED:
        if one not in wanted:
            models[one] = written(gpu if one in measured else schedule_choice.REFERENCE_GPU)[one]
    for stage in ([one for one in wanted if one in stage] for stage in STAGES):
        processes = min(len(stage), os.cpu_count() or 1) or 1
        with ProcessPoolExecutor(processes, initializer=choose_by, initargs=(models,)) as pool:
            models |= dict(zip(stage, pool.map(entry, stage, [gpu] * len(stage)), strict=True))
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
    unmeasured = [one for one in FITTED if not is_measured(one, wish.gpu)]
    for model in unmeasured:
        if model in wish.only or wish.gpu == schedule_choice.REFERENCE_GPU or len(unmeasured) == len(FITTED):
            files = files_of(wish.gpu, families_of(model))
            parser.error(f"{model}: {files} is missing; benchmarks.measure_schedules writes it")
    for files in sorted({files_of(wish.gpu, families_of(model)) for model in unmeasured}):
        print(f"{files} is missing: its models keep the H200's constants", file=sys.stderr)
    text = file_text(wish.gpu, wish.only)
    if wish.check:
        same = path.read_text() == text
        print(f"{path.name}: {'reproduced' if same else 'differs from what the measured problems give'}")
        return 0 if same else 1
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
