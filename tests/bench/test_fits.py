"""The constants of the models that choose schedules: their script, their file, and what choices lose."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks import block_fits, descent, fit, measure_block_schedules, measure_schedules, random_blocks
from benchmarks.measure_block_schedules import large_block_cells, packed_cells
from sparse24_plans import (
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    GemmSparse24Descriptor,
)
from sparse24_plans.bench.steady import SHORT_US
from sparse24_plans.blocksparse.schedules import blocks_wgmma, predicted_times
from sparse24_plans.blocksparse.schedules.blocks_mma import BlocksMmaSchedule
from sparse24_plans.blocksparse.schedules.blocks_wgmma_cuts import Cut, cut_work
from sparse24_plans.blocksparse.schedules.predicted_times import Way
from sparse24_plans.device.jit import compiler
from sparse24_plans.gemm.schedules.f32_split_heuristics import F32Split
from sparse24_plans.gemm.schedules.wgmma_heuristics import WGMMA_SP
from sparse24_plans.gemm.schedules.wgmma_sp import schedules_for
from sparse24_plans.plan.schedule_choice import FOLDER, CostModel, constants, fastest, invariant_split

from ..sample_devices import H200

GPU = "nvidia_h200"
FILE = json.loads((FOLDER / f"{GPU}.json").read_text())["models"]
GIVEN = json.loads((descent.SCHEDULES / "given.json").read_text())


def test_every_model_is_fitted_or_says_why_not():
    assert set(FILE) == {*fit.FITTED, *GIVEN}
    for name, one in FILE.items():
        assert (one["measured"] is not None) == (name in fit.FITTED and fit.is_measured(name, GPU))
        if one["measured"] is None:
            assert (one["constants"], one["reason"]) == (GIVEN[name]["constants"], GIVEN[name]["reason"])


CHOOSE = cache(Cut.of)


@pytest.fixture(autouse=True)
def schedules_are_chosen_once(monkeypatch):
    """The models stay what they are in these tests, and many ask for schedules of the same problems."""
    monkeypatch.setattr(Cut, "of", CHOOSE)


@pytest.mark.parametrize("model", [fit.STREAM_K, *fit.BLOCK_LIMITS, list(block_fits.PACKED_MODELS)[1]])
def test_the_script_writes_what_is_committed(model):
    """``python -m benchmarks.fit --check`` does it for all models, in minutes."""
    assert fit.entry(model, GPU) == FILE[model]


@pytest.mark.parametrize("model", fit.GEMM_MODELS)
def test_choices_among_schedules_of_wgmma_sp_lose_what_file_says(model):
    lost = []
    for desc, times in fit.gemm_fit(model, GPU).problems:
        free = schedules_for(desc.n, desc.m, quantized=desc.quantization is not None)
        tried = [one for one in free if one in times]
        chosen = fastest(tried, lambda some, desc=desc: WGMMA_SP.predicted(some, desc))
        lost.append(times[chosen] / min(times[one] for one in tried))
    assert descent.summary(np.array(lost)) == FILE[model]["measured"]["loss"]


@pytest.mark.parametrize("model", [*block_fits.SMALL_MODELS, *block_fits.SDD_MODELS])
def test_choices_among_schedules_of_blocks_wgmma_lose_what_file_says(model):
    lost = []
    for problem in block_fits.block_fit(model, GPU).problems:
        lost.append(block_fits.chosen_us(problem) / min(block_fits.measured_of(problem)[1]))
    assert descent.summary(np.array(lost)) == FILE[model]["measured"]["loss"]


WORST = {
    "wgmma_sp_16bit_few": (0.0118, 0.170), "wgmma_sp_16bit_some": (0.0052, 0.101),
    "wgmma_sp_16bit_many": (0.0081, 0.108), "wgmma_sp_8bit_few": (0.0178, 0.197),
    "wgmma_sp_8bit_some": (0.0059, 0.097), "wgmma_sp_8bit_many": (0.0062, 0.088),
    "blocks_wgmma_dsd_16": (0.0173, 0.370), "blocks_wgmma_dsd_32": (0.0207, 0.225),
    "blocks_wgmma_dds_16": (0.0314, 0.336), "blocks_wgmma_dds_32": (0.0297, 0.384),
    "blocks_wgmma_sdd_16": (0.0168, 0.327), "blocks_wgmma_sdd_32": (0.0270, 0.451),
    "blocks_wgmma_sdd_64": (0.0234, 0.442), "blocks_wgmma_sdd_128": (0.0258, 0.310),
}  # fmt: skip
"""Mean and worst loss, over the measured problems, of what people had found before there was a script."""


@pytest.mark.parametrize("model", WORST)
def test_fitted_choices_lose_no_more_than_those_found_by_hand(model):
    loss = FILE[model]["measured"]["loss"]
    assert (loss["mean"], loss["worst"]) <= WORST[model]
    assert loss["worst"] <= WORST[model][1]


# The chooser ---------------------------------------------------------------------------------------


def test_the_fastest_is_the_first_of_the_quickest_that_fit():
    times = {"a": 3.0, "b": 1.0, "c": 1.0, "d": 2.0}

    def predict(names):
        return [times[one] for one in names]

    assert fastest("abcd", predict) == "b"
    assert fastest("abcd", predict, lambda one: 8 if one in "bc" else 4, 4) == "d"


def test_the_invariant_split_weighs_every_n_and_rewards_nothing_faster():
    times = {1: (1.0, [1.0, 1.2]), 100: (1.0, [1.3, 0.5])}
    for weight, wanted in ((0.1, 1), (1.0, 2)):
        assert invariant_split((1, 2), times.__getitem__, judged={"1": 1.0, "100": weight}, power=2) == wanted


def test_no_model_is_without_constants():
    for name in FILE:
        assert constants(name)
    assert Path(descent.SCHEDULES / descent.file_of(GPU, "times")).exists()


TRUE = {
    "us": (3.0, 2.0, (0.2, 2e-5, 3e-9, 5e-8, 3e-7, 1.0)),
    "mma_us": (2.0, 1.0, (2.5e-7, 1.2e-7, 4e-7, 1.5, 0.5, 0.2, 0.3, 0.9, 3.0, 1e-6)),
    "dense_us": (4.0, 4.0, (2.7e-7, 1e-7, 2.8e-9, 5e-10)),
}
"""Constants of the models that the made times follow, by their names in these tests."""


def made_times(seed: int) -> list[dict]:
    """Lines of measured packed operands whose times follow the models exactly."""
    lines = []
    for cell in itertools.islice(packed_cells(seed), 60):
        desc = replace(cell, packed=True).descriptor(cell.layout())
        us = made_us("us", predicted_times.BLOCKS, desc, predicted_times.BLOCKS.work(desc))
        few = {
            one.name: made_us("mma_us", predicted_times.FEW, desc, one.work(desc, 132))
            for one in BlocksMmaSchedule.candidates(desc)
        }
        about = {"blocks": desc.layout.blocks, "longest_panel": desc.longest_panel}
        lines.append(
            {**cell.fields, **about, "us": {Cut.of(desc, 132).narrowed(desc).name: us}, "mma_us": few}
        )
    return lines


def made_times_of_tiles(seed: int) -> list[dict]:
    """Lines of measured large blocks whose times follow the model exactly."""
    lines = []
    for cell in itertools.islice(large_block_cells(random.Random(seed)), 60):
        desc = cell.descriptor(cell.layout())
        us = {
            Cut(one).name: made_us("us", predicted_times.BLOCKS, desc, cut_work(desc, Cut(one)))
            for one in blocks_wgmma.tiles_of_large_blocks(desc)
        }
        lines.append({**asdict(cell), "us": us})
    return lines


def made_dense_times(seed: int) -> list[dict]:
    """Lines of measured dense products whose times follow the model exactly."""
    rng, lines = random.Random(seed), []
    for _ in range(60):
        m, k, n = (16 * rng.randint(8, 800) for _ in range(3))
        shape = BlockSparseShape(heads=1, rows=m, cols=k, block=16, blocks=0)
        desc = BlockSparseMatmulDescriptor(op="dsd", layout=shape, n=n, element="bf16", packed=True)
        us = made_us("dense_us", predicted_times.DENSE, desc, predicted_times.DENSE.work(desc))
        lines.append({"m": m, "k": k, "n": n, "element": "bf16", "us": us})
    return lines


def made_us(name: str, way: Way, desc: BlockSparseMatmulDescriptor, work: tuple[float, ...]) -> float:
    return CostModel(*TRUE[name]).microseconds(work) + way.copies_us(desc)


@pytest.fixture
def few_steps(monkeypatch):
    """A sixth of the steps finds constants that made times follow exactly."""
    monkeypatch.setattr(block_fits, "WAY_STEPS", block_fits.WAY_STEPS // 6)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compilations, which are listed and not made: test_compilation makes the covering ones."""
    found = []
    monkeypatch.setenv("SPARSE24_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_cubin", lambda *words: (found.append(words) or b"cubin", ""))
    return found


def test_models_of_packed_operands_are_fitted_to_measured_times(monkeypatch, few_steps):
    made = made_times(3)
    lines = {
        block_fits.PACKED: made[::2],
        block_fits.UNEVEN: made[1::2],
        block_fits.LARGE_BLOCKS: made_times_of_tiles(4),
        block_fits.DENSE_TIMES: made_dense_times(5),
    }
    monkeypatch.setattr(block_fits, "lines_of", lambda gpu, family: lines[family])
    for name in (one for one in block_fits.PACKED_MODELS if "_128" in one or "dense" in one):
        assert len(block_fits.packed_problems(name, GPU)) > 2
        found = block_fits.way_entry(name, GPU)
        assert set(found["constants"]) == {"launch", "exponent", *block_fits.WAY_OF[name].terms}
        files = {
            "dense": "h200-dense-times.jsonl",
            "blocks": "h200-large-block-times.jsonl, h200-packed-times.jsonl",
            "mma": "h200-packed-times.jsonl, h200-uneven-times.jsonl",
        }
        assert found["measured"]["file"] == files[name.split("_")[1]]
        assert found["measured"]["error"]["mean"] < 0.03


def test_models_of_float32_are_fitted_to_measured_times(monkeypatch):
    true = {**GIVEN["f32_split_split_k_3_few"]["constants"], "tile": 0.3, "token": 0.002, "launch": 3.0}
    rng, lines = random.Random(5), []
    for _ in range(40):
        n, m, k = rng.randint(1, 64), 8 * rng.randint(16, 2048), 64 * rng.randint(8, 128)
        desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
        family = F32Split(3)
        tried = family.candidates(desc)
        us = family.microseconds(family.inputs([(one, desc) for one in tried]), true)
        times = {",".join(map(str, one)): t for one, t in zip(tried, us.tolist(), strict=True)}
        lines.append({"terms": 3, "n": n, "m": m, "k": k, "element": "f32", "us": times})
    monkeypatch.setattr(fit, "lines_of", lambda gpu, family: lines)
    found = fit.entry("f32_split_3_few", GPU)
    assert found["measured"]["file"] == "h200-f32-times.jsonl"
    assert found["measured"]["problems"] == 40
    assert found["measured"]["loss"]["mean"] < 0.01


def test_models_without_measured_problems_keep_those_of_the_reference(monkeypatch, capsys):
    monkeypatch.setattr(fit, "is_measured", lambda model, gpu: model not in fit.F32_MODELS)
    monkeypatch.setattr(fit, "entry", lambda model, gpu: {"constants": {}, "measured": {"file": model}})
    monkeypatch.setattr(fit, "choose_by", lambda models: None)
    monkeypatch.setattr(fit, "ProcessPoolExecutor", ThreadPoolExecutor)
    models = json.loads(fit.file_text(GPU, ()))["models"]
    assert models["f32_split_2_few"] == FILE["f32_split_2_few"]
    assert models[fit.STREAM_K]["measured"] == {"file": fit.STREAM_K}
    with pytest.raises(SystemExit):
        fit.main(["--only", "f32_split_2_few"])
    assert "f32_split_2_few: h200-f32-times.jsonl is missing" in capsys.readouterr().err


def test_models_of_choices_are_fitted_to_the_new_choices(monkeypatch):
    """One run of the script therefore gives the same file, whatever it held before."""
    chosen_by = []
    first, late = block_fits.SMALL_MODELS[0], block_fits.SHORT_SUMS
    monkeypatch.setattr(
        fit, "entry", lambda model, gpu: {"constants": {}, "measured": dict(chosen_by[-1].get(first) or {})}
    )
    monkeypatch.setattr(fit, "choose_by", lambda models: chosen_by.append(dict(models)))
    monkeypatch.setattr(fit, "ProcessPoolExecutor", ThreadPoolExecutor)
    models = json.loads(fit.file_text(GPU, (first, late)))["models"]
    assert first not in chosen_by[0]
    assert models[late]["measured"] == models[first]
    assert models[block_fits.SMALL_MODELS[1]] == FILE[block_fits.SMALL_MODELS[1]]


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_more_blocks_never_make_kept_blocks_the_choice_again(op, block):
    every = (4096 // block) ** 2
    for n in (1, 64, 504, 4096):
        wins = [
            predicted_times.dense_wins(
                BlockSparseMatmulDescriptor(
                    op=op,
                    layout=BlockSparseShape(
                        heads=1, rows=4096, cols=4096, block=block, blocks=every * part // 40
                    ),
                    n=n,
                    element="bf16",
                    packed=True,
                )
            )
            is not None
            for part in range(1, 41)
        ]
        assert wins == sorted(wins), n
        assert wins[-1] or block == 128
        assert not wins[0]


@pytest.mark.parametrize(("family", "element"), [("f32", "f32"), ("gemm", "s8"), ("gemm", "bf16")])
def test_every_schedule_that_is_timed_can_be_compiled_ahead(family, element, compiled, tmp_path):
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element=element)
    for entry in measure_schedules.entries_of(family, desc.element):
        some = measure_schedules.schedules_of(desc, entry)
        assert len(set(some)) == len(some) > 3
        measure_schedules.compile_kernel(H200, entry.name, desc, some[-1])
    assert len(list(tmp_path.rglob("*.cubin"))) == len(compiled)
    assert len(compiled) >= len(measure_schedules.entries_of(family, desc.element))


def test_every_cut_that_is_timed_can_be_compiled_ahead(compiled, tmp_path):
    cell = random_blocks.Cell(op="dsd", m=2560, k=8192, n=40, block=64, density=0.1, pattern="uneven", seed=1)
    cuts = measure_block_schedules.cuts_of(cell.descriptor(cell.layout()))
    assert list(cuts) == ["64,1,0", "64,1,3", "64,1,1"]
    for name in cuts:
        measure_block_schedules.compile_cut(H200, cell, name)
    assert len(list(tmp_path.rglob("*.cubin"))) == len(compiled) == 3
    wide = measure_block_schedules.cuts_of(replace(cell, n=1000).descriptor(cell.layout()))
    assert len(wide) == 3 * len({one.schedule.tokens for one in wide.values()}) == 9


def test_models_of_sdd_are_fitted_to_measured_times(monkeypatch, few_steps):
    true = {
        block_fits.SAMPLED: (3.0, 1.5, (5e-4, 2e-3, 3e-7, 1e-7)),
        block_fits.SAMPLED_DENSE: (6.0, 1.5, (2e-9, 7e-10, 3e-7, 1e-7, 6e-7)),
    }
    lines = []
    for row in descent.lines_of(GPU, "inflated-times"):
        if row["op"] == "sdd":
            desc = block_fits.described(row)
            us, inflated = (
                CostModel(*one).microseconds(way.work(desc)) + way.copies_us(desc)
                for way, one in true.items()
            )
            lines.append({**row, "us": us, "inflate_us": inflated})
    given = {block_fits.INFLATED: lines, block_fits.BLOCKS_MEASURED: []}
    monkeypatch.setattr(block_fits, "lines_of", lambda gpu, family: given[family])
    for name, way in block_fits.SAMPLED_MODELS.items():
        found = block_fits.way_entry(name, GPU)
        assert set(found["constants"]) == {"launch", "exponent", *way.terms}
        assert found["measured"]["file"] == "h200-block-times.jsonl, h200-inflated-times.jsonl"
        assert found["measured"]["problems"] > 20
        assert found["measured"]["error"]["mean"] < 0.03


def test_models_of_sdd_are_fitted_to_short_products():
    """Others had one clock, which is neither contender's alone."""
    steady = sum(desc.op == "sdd" for desc, *_ in block_fits.beside_inflated(GPU))
    rows = [
        row
        for row in block_fits.block_lines(GPU)
        if row["op"] == "sdd" and row["block"] in block_fits.SAMPLED_BLOCKS
    ]
    short = sum(row.get("inflate_us", SHORT_US) < SHORT_US for row in rows)
    assert 0 < short < len(rows)
    for way in (block_fits.SAMPLED, block_fits.SAMPLED_DENSE):
        models = [one for one in block_fits.SAMPLED_MODELS if block_fits.WAY_OF[one] is way]
        assert sum(len(block_fits.sampled_problems(one, GPU)) for one in models) == steady + short


def test_limits_of_short_sums_lie_where_other_kernels_become_faster(monkeypatch):
    lines = []
    for row in descent.lines_of(GPU, "block-times"):
        if "mma_us" in row and row["block"] == 32:
            us = min(row["inflate_us"], block_fits.chosen_us((block_fits.described(row), row["us"])))
            lines.append({**row, "mma_us": us * (0.8 if row["n"] <= 24 else 1.25)})
    monkeypatch.setattr(block_fits, "lines_of", lambda gpu, family: lines)
    found = block_fits.short_sums_entry(GPU)
    limits, given = found["constants"]["most_terms"], GIVEN[block_fits.SHORT_SUMS]["constants"]["most_terms"]
    assert limits == {**given, "32": 24}
    assert found["measured"] == {
        "file": "h200-block-times.jsonl",
        "problems": len(lines),
        "loss": {"mean": 0.0, "worst": 0.0},
    }


def test_inflating_is_fitted_to_the_time_beside_the_dense_product(monkeypatch):
    """If the inflated product is always slower than kept blocks, it is never chosen."""
    lines = []
    for row in descent.lines_of(GPU, "inflated-times"):
        if row["op"] != "sdd":
            desc = block_fits.described(row)
            dense = predicted_times.DENSE.microseconds(desc)
            inflated = dense + 6 + 1e-6 * predicted_times.inflated_bytes(desc)
            lines.append({**row, "inflate_us": inflated, "us": predicted_times.blocks_us(desc)})
    monkeypatch.setattr(block_fits, "lines_of", lambda gpu, family: lines)
    found = block_fits.inflating_entry(GPU)
    assert found["constants"]["launch"] == pytest.approx(6, rel=0.01)
    assert found["constants"]["bytes"] == pytest.approx(1e-6, rel=0.01)
    assert found["measured"]["loss"] == {"mean": 0.0, "worst": 0.0}
    slow = [{**row, "inflate_us": 1e9} for row in lines]
    monkeypatch.setattr(block_fits, "lines_of", lambda gpu, family: slow)
    assert block_fits.inflating_entry(GPU)["measured"]["loss"]["worst"] == 0
