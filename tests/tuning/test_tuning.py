"""Tuning: what a table holds and when it applies, and how the search chooses and survives. No GPU needed.

The workers that the search talks to are played by a script. That real ones find what is fastest and right is
what the shipped table shows, and tests/test_cusparselt.py.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from functools import partial
from unittest import mock

import pytest
from typer.testing import CliRunner

from sparse24_plans import (
    DeviceProperties,
    DriverError,
    FormatError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PlanPreference,
    StorageError,
    TuningTable,
    TuningWarning,
    UnsupportedError,
    explain,
    tune,
)
from sparse24_plans.cli import app as cli
from sparse24_plans.gemm import plan as gemm
from sparse24_plans.gemm import table
from sparse24_plans.gemm.backends import cusparselt, mma_sp, wgmma_sp
from sparse24_plans.gemm.tuned import EMPTY, TunedKernel, shipped
from sparse24_plans.tuning import search as tuning

H200 = DeviceProperties(
    kind="cuda",
    name="NVIDIA H200",
    compute_capability=(9, 0),
    multiprocessors=132,
    cublaslt="120900",
    cusparselt="0.8.0",
    driver="580.1",
)
DESC = GemmSparse24Descriptor(n=16, m=28672, k=4096, element="bf16")
MMA, CSLT = PlanPreference(prefer_backend="mma_sp"), PlanPreference(prefer_backend="cusparselt")
CUT = {"token_tiles": 2, "block_tiles": 2, "blocks_per_sm": 1}


def entry(kernel: str = "mma_sp", **change: object) -> TunedKernel:
    version = (mma_sp if kernel == "mma_sp" else cusparselt).tuning_version(H200)
    fields = {
        "kernel": kernel,
        "version": version,
        "problem": DESC,
        "configuration": CUT if kernel == "mma_sp" else {"algorithm": 3},
        "microseconds": 1.5,
        "default_microseconds": 2.5,
    }
    return TunedKernel(**{**fields, **change})


def table(*entries: TunedKernel, gpu: str = "NVIDIA H200", driver: str = "580.1") -> TuningTable:
    return TuningTable(gpu, driver, entries)


# Tables -------------------------------------------------------------------------------------------


def test_a_table_survives_its_file(tmp_path):
    first = table(entry(), entry("cusparselt", promises=("deterministic",)))
    path = tmp_path / "table.json"
    first.save(path)
    again = TuningTable.load(path)
    assert (again.gpu, again.driver, again.entries) == (first.gpu, first.driver, first.entries)
    document = json.loads(path.read_text())
    assert document["stamp"] == {"gpu": "NVIDIA H200", "driver": "580.1"}
    assert document["entries"][0]["version"] == mma_sp.tuning_version(H200)


def test_an_entry_is_for_exactly_one_problem():
    found = table(entry())
    assert set(found.find(DESC)) == {"mma_sp"}
    for change in ({"n": 17}, {"alpha": 0.5}, {"epilogue": "bias"}, {"out_element": "f32"}):
        assert not found.find(DESC.model_copy(update=change))


def test_two_entries_for_one_problem_are_refused():
    with pytest.raises(InvalidProblemError, match="entries: expected one for mma_sp"):
        table(entry(), entry(microseconds=1))


def test_merging_keeps_the_newer_and_sorts():
    other = entry(problem=DESC.model_copy(update={"n": 8}))
    old, new = entry("cusparselt"), entry("cusparselt", microseconds=1)
    both = table(entry(), old).merged(table(other, new))
    assert both.entries == (new, other, entry())
    assert (both.gpu, both.driver) == ("NVIDIA H200", "580.1")


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA H100"}, {"driver": "1.0"}])
def test_tables_of_two_machines_are_not_merged(change):
    with pytest.raises(InvalidProblemError, match="tables: expected one GPU and driver"):
        table(entry()).merged(table(**change))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "stamp": {"gpu": "a", "driver": "b"}, "entries": []}',
        '{"schema": 1, "entries": []}',
        '{"schema": 1, "stamp": {"gpu": "a", "driver": "b"}, "entries": [{"kernel": "mma_sp"}]}',
    ],
)
def test_what_is_no_table(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="tuning table"):
        TuningTable.load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StorageError) as caught:
        TuningTable.load(tmp_path / "none.json")
    assert caught.value.filename
    with pytest.raises(StorageError):
        EMPTY.save(tmp_path / "none" / "table.json")


# What select does with them -----------------------------------------------------------------------


@pytest.fixture
def on_h200(monkeypatch):
    """``select`` for an H200 that isn't here; kernels aren't loaded."""
    monkeypatch.setattr(gemm, "resolve", lambda device: H200)
    for backend in (mma_sp, wgmma_sp):
        monkeypatch.setattr(backend, "load", mock.Mock())
    return partial(GemmSparse24Plan.select, DESC, preference=MMA)


def details(plan: GemmSparse24Plan) -> str:
    return plan.explain().details


def test_a_configuration_that_fits_is_applied(on_h200):
    tuned, default = on_h200(tuning=table(entry())), on_h200(tuning=EMPTY)
    assert details(tuned) != details(default)
    assert mma_sp.cut_of(16, 28672, 132)[1:4] != tuple(CUT.values())
    assert tuned.guarantee == default.guarantee
    assert on_h200(tuning=EMPTY) is default


def test_selection_with_a_table_is_silent_and_pure(on_h200):
    made = table(entry())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_h200(tuning=made) is on_h200(tuning=made)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (table(entry(), gpu="NVIDIA H100"), "tuned for GPU NVIDIA H100, this is NVIDIA H200"),
        (table(entry(), driver="570.9"), r"tuned for driver 570\.9, this is 580\.1"),
        (table(entry(version="sources 0")), "tuned for mma_sp sources 0, this is sources"),
    ],
)
def test_a_stamp_that_does_not_match_is_a_warning_and_not_applied(on_h200, made, words):
    with pytest.warns(TuningWarning, match=words):
        plan = on_h200(tuning=made)
    assert details(plan) == details(on_h200(tuning=EMPTY))


def test_only_the_chosen_kernels_stamp_matters(on_h200):
    stale = entry("cusparselt", version="cuSPARSELt 0.7.0", promises=("deterministic",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_h200(tuning=table(entry(), stale))


def test_a_kernel_that_is_gone_is_ignored(on_h200):
    plan = on_h200(tuning=table(entry("mma_sp_of_old")))
    assert details(plan) == details(on_h200(tuning=EMPTY))


@pytest.mark.parametrize("thing", ["table.json", {}, 3])
def test_what_is_no_table_for_select(on_h200, thing):
    with pytest.raises(InvalidProblemError, match="tuning: expected a TuningTable"):
        on_h200(tuning=thing)


def chosen(made: TuningTable, **require: object) -> str | None:
    wanted = CSLT.model_copy(update={"require": require})
    return explain(DESC, preference=wanted, device=H200, tuning=made).chosen


def test_promises_come_from_the_self_test_alone():
    promising = entry("cusparselt", promises=("deterministic",))
    assert chosen(EMPTY) == "cusparselt"
    assert chosen(EMPTY, deterministic=True) is None
    assert chosen(table(entry("cusparselt")), deterministic=True) is None
    assert chosen(table(promising), deterministic=True) == "cusparselt"
    assert chosen(table(promising), bit_stable_on_same_hardware=True) is None
    assert chosen(table(promising), batch_invariant=True) is None


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA H100"}, {"driver": "1.0"}])
def test_a_promise_of_another_machine_is_none(change):
    made = table(entry("cusparselt", promises=("deterministic",)), **change)
    assert chosen(made, deterministic=True) is None


def test_a_promise_of_another_version_is_none():
    old = entry("cusparselt", version="cuSPARSELt 0.7.1", promises=("deterministic",))
    assert chosen(table(old), deterministic=True) is None


# The shipped tables -------------------------------------------------------------------------------

SHIPPED = shipped("NVIDIA H200")


def test_a_gpu_without_a_table_has_an_empty_one():
    assert len(shipped("NVIDIA Nothing")) == 0
    assert len(shipped("../../secret")) == 0


def test_the_shipped_table_is_stamped_and_full():
    assert SHIPPED.gpu == "NVIDIA H200"
    assert SHIPPED.driver
    assert {one.version for one in SHIPPED.entries if one.kernel.startswith("cusparselt")} == {
        "cuSPARSELt 0.8.0"
    }
    tuned = Counter((one.problem.element.value, one.problem.n) for one in SHIPPED.entries)
    tokens = {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}
    fewest = {"bf16": 8, "f16": 8, "s8": 16, "fp8_e4m3": 16}  # that the library takes, of the record's
    assert tuned == {(element, n): 8 for element, least in fewest.items() for n in tokens if n >= least}


def test_a_tuned_plan_is_never_slower_than_the_default():
    for one in SHIPPED.entries:
        gain = one.default_microseconds / one.microseconds
        assert gain > tuning.LEAST_GAIN if one.configuration else gain == 1


def test_the_shipped_configurations_are_for_rows_that_serve():
    for one in SHIPPED.entries:
        wanted = PlanPreference(prefer_backend=table.find(one.kernel).backend)
        assert explain(one.problem, preference=wanted, device=H200).chosen == one.kernel
        assert set(one.configuration) <= {"algorithm", "split_k", "split_k_mode", "split_k_buffers"}


# Candidates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8, 16, 33, 64, 128, 200])
@pytest.mark.parametrize("m", [256, 4096, 28672])
def test_candidates_of_mma_sp_keep_the_bits(n, m):
    """Slices of K alone fix them."""
    desc = DESC.model_copy(update={"n": n, "m": m})
    default = mma_sp.cut_of(n, m, 132)
    found = mma_sp.candidates(desc, H200)
    assert len({tuple(one.values()) for one in found}) == len(found)
    with mock.patch.object(mma_sp, "load") as load:
        spec = table.find("mma_sp")
        for configuration in found:
            mma_sp.Kernel(desc, H200, spec, PlanPreference(), configuration)
            asked = load.call_args.args[4]
            assert asked["SLICES"] == default.slices
            assert asked["STAGES"] >= 2
            assert asked["TOKEN_TILES"] == configuration["token_tiles"]
            assert tuple(configuration.values()) != default[1:4]


@pytest.mark.parametrize("n", [16, 64, 200, 2048])
@pytest.mark.parametrize("row", ["wgmma_sp", "wgmma_sp_invariant", "wgmma_sp_fp8_promoted"])
def test_a_row_of_wgmma_sp_refuses_cuts_that_break_its_promises(monkeypatch, n, row):
    monkeypatch.setattr(wgmma_sp, "load", lambda *args, **options: None)
    spec = table.find(row)
    element = "fp8_e4m3" if row.endswith("promoted") else "bf16"
    desc = GemmSparse24Descriptor(n=n, m=8192, k=4096, element=element)
    kept = []
    for configuration in wgmma_sp.candidates(desc, H200):
        try:
            wgmma_sp.Kernel(desc, H200, spec, PlanPreference(), configuration)
        except UnsupportedError:
            continue
        kept.append(wgmma_sp.Cut(**configuration))
    assert kept
    if spec.guarantee(desc).batch_invariant:
        assert {(cut.slices, cut.parts) for cut in kept} == {(1, 1 if element == "fp8_e4m3" else 4)}


def test_where_there_is_one_cut_there_are_no_candidates():
    assert mma_sp.candidates(DESC, H200.model_copy(update={"compute_capability": (8, 0)})) == []


def test_rows_that_can_be_tuned():
    names = [spec.name for spec in tuning.tunable(DESC, H200)]
    assert {"mma_sp", "cusparselt"} <= set(names)
    backends = [table.find(name).backend for name in names]
    assert len(set(backends)) == len(backends)
    ragged = tuning.tunable(DESC.model_copy(update={"n": 9}), H200)
    assert "cusparselt" not in [spec.name for spec in ragged]


# The search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ([], (None, 0.0, 0.0)),
        ([({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 9.0), ({}, 10.0)], ({"a": 1}, 9.0, 10.0)),
        ([({"a": 1}, 9.8), ({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 10.0 / 1.03), ({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 12.0), ({}, 10.0)], ({}, 10.0, 10.0)),
        ([({"a": 1}, 12.0), ({"a": 2}, 11.0)], ({"a": 2}, 11.0, 11.0)),
    ],
    ids=str,
)
def test_only_a_gain_above_3_percent_flips(times, want):
    assert tuning.choose(times) == want


PLAYED = """
import json, os, sys, time
state = sys.argv[1]
# Algorithm 0 is wrong, 2 ends the process, 4 hangs, 5 is the best; of n=32 the final timing dies too.
def say(**m): print(json.dumps(m), flush=True)
with open(state, "a") as log:
    log.write("started\\n")
for line in sys.stdin:
    r = json.loads(line)
    tried = [k["configuration"] for k in r.get("known", [])]
    with open(state, "a") as log:
        log.write(json.dumps([r["do"], r["problem"]["n"], tried]) + "\\n")
    if r["problem"]["n"] == 48:
        say(event="failed", error="ValueError: played")
        continue
    if r["do"] == "self_test":
        say(event="trying", configuration=r["configuration"])
        drift = r["problem"]["n"] == 64 and not r["repeat"]
        say(event="done", sound=r["problem"]["n"] != 24, digest=1 + drift)
        continue
    known = {json.dumps(k["configuration"]): k["us"] for k in r["known"]}
    for c in [{}] + [{"algorithm": i} for i in range(6)]:
        if json.dumps(c) in known:
            continue
        say(event="trying", configuration=c)
        if c.get("algorithm") == 2:
            os._exit(70)
        if c.get("algorithm") == 4:
            time.sleep(60)
        us = None if c.get("algorithm") == 0 else 9.0 - c.get("algorithm", 0)
        known[json.dumps(c)] = us
        say(event="tried", configuration=c, us=us)
    say(event="trying", configuration=None)
    if r["problem"]["n"] == 32:
        os._exit(70)
    say(event="done", times=[[json.loads(k), us] for k, us in known.items() if us is not None])
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """``tune`` with played workers, for an H200; the requests that they got."""
    script, log = tmp_path / "worker.py", tmp_path / "log"
    script.write_text(PLAYED)
    monkeypatch.setattr(tuning, "resolve", lambda device: H200)
    monkeypatch.setattr(tuning, "_SILENCE_S", 2.0)
    command = [sys.executable, str(script), str(log)]
    monkeypatch.setattr(tuning, "Worker", partial(tuning.Worker, command=command))

    def requests() -> list:
        return [line if line == "started" else json.loads(line) for line in log.read_text().splitlines()]

    return requests


def of_n(*tokens: int) -> list[GemmSparse24Descriptor]:
    return [DESC.model_copy(update={"n": n}) for n in tokens]


def test_the_search_survives_dying_and_hanging_workers(played):
    trials: list = []
    found = tune(of_n(16, 128), kernels=["cusparselt"], on_trials=trials.append)
    assert [dict(one.configuration) for one in found.entries] == [{"algorithm": 5}] * 2
    assert {(one.microseconds, one.default_microseconds) for one in found.entries} == {(4.0, 9.0)}
    assert (found.gpu, found.driver) == ("NVIDIA H200", "580.1")
    assert {one.version for one in found.entries} == {"cuSPARSELt 0.8.0"}
    first, second = trials
    fatal = [{"algorithm": 2}, {"algorithm": 4}]
    assert (first.right, first.refused_or_wrong, first.fatal) == (4, 1, fatal)
    assert second.fatal == fatal
    # Three workers for the first problem, none more for the second: it leaves out what was fatal before.
    log = played()
    assert log.count("started") == 4, "the last one confirms"
    assert [request for request in log if request[0] == "search"][-1] == ["search", 128, fatal]


def test_what_was_tried_is_not_tried_again(played):
    tune(of_n(16), kernels=["cusparselt"])
    searches = [request for request in played() if request[0] == "search"]
    assert [len(known) for _, _, known in searches] == [0, 4, 6]


def test_a_promise_needs_the_self_test_and_another_process(played):
    found = tune(of_n(16, 24, 64), kernels=["cusparselt"])
    promises = {one.problem.n: one.promises for one in found.entries}
    assert promises == {16: ("deterministic", "bit_stable_on_same_hardware"), 24: (), 64: ()}


@pytest.mark.parametrize(("n", "words"), [(32, "not of a configuration"), (48, "ValueError: played")])
def test_a_worker_that_fails_by_itself_is_an_error(played, n, words):
    with pytest.raises(DriverError, match=words):
        tune(of_n(n), kernels=["cusparselt"])


def test_problems_of_one_weight_follow_each_other(played):
    small, large = {"m": 256, "k": 256}, {"m": 4096, "k": 4096}
    problems = [DESC.model_copy(update={"n": n, **size}) for n in (16, 8) for size in (large, small)]
    trials: list = []
    tune([*problems, problems[0]], kernels=["cusparselt"], on_trials=trials.append)
    assert [(one.problem.m, one.problem.n) for one in trials] == [(256, 16), (256, 8), (4096, 16), (4096, 8)]


@pytest.mark.parametrize("name", ["inflate_cublas", "typo"])
def test_a_kernel_that_cannot_be_tuned(played, name):
    with pytest.raises(InvalidProblemError, match="kernels: expected rows that can be tuned"):
        tune(of_n(16), kernels=[name])


def test_problems_that_no_kernel_serves(played):
    with pytest.raises(UnsupportedError, match="serves any of the problems"):
        tune(of_n(9), kernels=["cusparselt"])


def test_the_host_has_nothing_to_tune():
    host = mock.patch.object(tuning, "resolve", return_value=DeviceProperties(kind="host"))
    with host, pytest.raises(UnsupportedError, match="device"):
        tune(of_n(16))


# The command --------------------------------------------------------------------------------------


def test_the_command_writes_the_table(played, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "resolve", lambda device: H200)
    out = tmp_path / "table.json"
    words = ["tune", "-o", str(out), "--n", "16,64", "--shape", "4096x4096", "--kernel", "cusparselt"]
    result = CliRunner().invoke(cli.app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["chosen"]["configuration"] for row in document["results"]] == [{"algorithm": 5}] * 2
    assert [one.problem.n for one in TuningTable.load(out).entries] == [16, 64]
    words[words.index("16,64")] = "128"
    shown = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert [one.problem.n for one in TuningTable.load(out).entries] == [16, 64, 128], "it adds"
    assert "algorithm 5" in shown.stdout
    assert "left out, it ended the CUDA context: cusparselt bf16 {'algorithm': 2}" in shown.stdout


@pytest.mark.parametrize("shape", ["4096", "4096x", "4096x4095", "axb"])
def test_the_command_refuses_what_is_no_shape(shape, tmp_path):
    words = ["tune", "-o", str(tmp_path / "t.json"), "--n", "16", "--shape", shape]
    assert CliRunner().invoke(cli.app, words).exit_code == 2


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_real_search():
    from sparse24_plans import BackendUnavailableError

    problem = GemmSparse24Descriptor(n=16, m=512, k=512, element="bf16")
    trials: list = []
    try:
        found = tune([problem], on_trials=trials.append)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert len(found) == len(trials) >= 1
    for one in found.entries:
        assert one.microseconds <= one.default_microseconds
        assert "deterministic" in one.promises
    backends = [table.find(one.kernel).backend for one in found.entries]
    for backend in backends:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = GemmSparse24Plan.select(
                problem, device=0, preference=PlanPreference(prefer_backend=backend), tuning=found
            )
        assert plan.guarantee.deterministic
