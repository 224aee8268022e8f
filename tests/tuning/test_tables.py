"""Tuning tables: what one holds, when select applies it and what it may promise, and the shipped one."""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from sparse24_plans import (
    FormatError,
    GemmSparse24Plan,
    InvalidProblemError,
    MaskSparse24Descriptor,
    PlanPreference,
    StorageError,
    TuningTable,
    TuningWarning,
    UnsupportedError,
    explain,
)
from sparse24_plans.gemm.backends import mma_sp
from sparse24_plans.gemm.kernel_table import find
from sparse24_plans.gemm.schedules import mma_sp as schedules
from sparse24_plans.gemm.tuned import EMPTY, shipped
from sparse24_plans.tuning.search import MIN_GAIN

from .cases import CSLT, DESC, H200, MMA, SCHEDULE, entry, table

# Entries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["\ud800", 2, None, [1]])
def test_another_schema_is_named_in_text_that_can_be_printed(tmp_path, schema):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"schema": schema, "stamp": {"gpu": "", "driver": ""}, "entries": []}))
    with pytest.raises(FormatError, match="expected schema 1, got ") as caught:
        TuningTable.load(path)
    str(caught.value).encode()


def test_a_table_survives_its_file(tmp_path):
    first = table(entry(), entry("cusparselt", promises=("deterministic",)))
    path = tmp_path / "table.json"
    first.save(path)
    again = TuningTable.load(path)
    assert (again.gpu, again.driver, again.entries) == (first.gpu, first.driver, first.entries)
    document = json.loads(path.read_text())
    assert document["stamp"] == {"gpu": "NVIDIA H200", "driver": "580.1"}
    assert document["entries"][0]["version"] == mma_sp.Kernel.tuning_version(H200)


def test_an_entry_is_for_exactly_one_problem():
    found = table(entry())
    assert set(found.find(DESC)) == {"mma_sp"}
    for change in (
        {"n": 17},
        {"alpha": 0.5},
        {"epilogue": "bias"},
        {"out_element": "f32", "c_element": "f32"},
    ):
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


# Selection by a table ------------------------------------------------------------------------------


@pytest.fixture
def on_h200():
    """``select`` for an H200 that isn't here."""
    return partial(GemmSparse24Plan.select, DESC, preference=MMA, device=H200)


def details(made: GemmSparse24Plan) -> str:
    return made.explain().details


def test_a_configuration_that_fits_is_applied(on_h200):
    tuned, default = on_h200(tuning=table(entry())), on_h200(tuning=EMPTY)
    assert details(tuned) != details(default)
    assert schedules.MmaSpSchedule.in_clusters(16, 28672, 132)[1:4] != tuple(SCHEDULE.values())
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
def test_other_stamps_are_a_warning_and_not_applied(on_h200, made, words):
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


@pytest.mark.parametrize(
    ("kernel", "configuration", "words"),
    [
        ("wgmma_sp", {"warps": 4}, "wgmma_sp can't keep its promises with {'warps': 4}"),
        ("wgmma_sp", {"tokens": 16}, "wgmma_sp can't keep its promises with {'tokens': 16}"),
        ("cusparselt", {"algo": 3}, "cusparselt has no algo 3"),
        ("cusparselt", {"algorithm": 2**32 + 3}, "cusparselt has no algorithm 4294967299"),
        ("cusparselt", {"split_k": -1}, "cusparselt has no split_k -1"),
        ("mma_sp", {"tokens": 16}, "mma_sp has no schedule {'tokens': 16}"),
    ],
)
def test_a_configuration_that_a_kernel_has_not_is_refused(kernel, configuration, words):
    version = find(kernel).kernel.tuning_version(H200)
    made = table(entry(kernel, version=version, configuration=configuration))
    wanted = {"prefer_kernel": kernel, "max_workspace_bytes": 1 << 26}
    with pytest.raises(UnsupportedError, match=f"^configuration: {re.escape(words)}"):
        GemmSparse24Plan.select(DESC, preference=wanted, device=H200, tuning=made)


def test_entries_of_kernels_without_configurations_are_a_warning():
    made = table(entry("inflate_strict"))
    wanted = {"prefer_kernel": "inflate_strict"}
    with pytest.warns(TuningWarning, match="inflate_strict .* takes no configuration"):
        GemmSparse24Plan.select(DESC, preference=wanted, device=H200, tuning=made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GemmSparse24Plan.select(DESC, preference=MMA, device=H200, tuning=made)


@pytest.mark.parametrize("thing", ["table.json", {}, 3])
def test_what_is_no_table_for_select(on_h200, thing):
    with pytest.raises(InvalidProblemError, match="tuning: expected a TuningTable"):
        on_h200(tuning=thing)


@pytest.mark.parametrize("thing", [table(entry("inflate_strict")), 3, 0])
def test_families_without_tuning_refuse_tables(thing):
    desc = MaskSparse24Descriptor(m=64, k=64, element="bf16")
    with pytest.raises(InvalidProblemError, match=r"tuning: expected None for MaskSparse24Plan, .*, got "):
        explain(desc, device=H200, tuning=thing)


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


@pytest.mark.parametrize("flag", ["batch_invariant", "bit_stable_across_hardware", "accumulator", "typo"])
def test_a_table_promises_only_what_a_self_test_can_confirm(tmp_path, flag):
    with pytest.raises(InvalidProblemError, match="promises"):
        entry("cusparselt", promises=("deterministic", flag))
    path = tmp_path / "table.json"
    table(entry("cusparselt", promises=("deterministic",))).save(path)
    path.write_text(path.read_text().replace('["deterministic"]', f'["deterministic", "{flag}"]'))
    with pytest.raises(FormatError, match="promises"):
        TuningTable.load(path)


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA H100"}, {"driver": "1.0"}])
def test_a_promise_of_another_machine_is_none(change):
    made = table(entry("cusparselt", promises=("deterministic",)), **change)
    assert chosen(made, deterministic=True) is None


def test_a_promise_of_another_version_is_none():
    old = entry("cusparselt", version="cuSPARSELt 0.7.1", promises=("deterministic",))
    assert chosen(table(old), deterministic=True) is None


@pytest.mark.parametrize(
    "ask",
    [GemmSparse24Plan.select, GemmSparse24Plan.explain_choice, explain],
    ids=lambda one: one.__qualname__,
)
def test_a_warning_names_the_callers_line(ask):
    with pytest.warns(TuningWarning) as caught:
        ask(DESC, preference=MMA, device=H200, tuning=table(entry(), driver="570.9"))
    assert [one.filename for one in caught] == [__file__]


# The shipped tables --------------------------------------------------------------------------------

SHIPPED = shipped("NVIDIA H200")


def test_a_gpu_without_a_table_has_an_empty_one():
    assert len(shipped("NVIDIA Nothing")) == 0
    assert len(shipped("../../secret")) == 0


def test_threads_that_first_need_a_table_get_one():
    """Plans tell a table that a caller gave from the package's own, which their pickles leave out."""
    start = threading.Barrier(8, timeout=60)

    def ask(_: int) -> TuningTable:
        start.wait()
        return shipped("nvidia H200")  # no test asks by this name

    with ThreadPoolExecutor(8) as pool:
        assert len({id(found) for found in list(pool.map(ask, range(8)))}) == 1


def test_the_shipped_table_is_stamped_and_full():
    assert SHIPPED.gpu == "NVIDIA H200"
    assert SHIPPED.driver
    assert {one.version for one in SHIPPED.entries if one.kernel.startswith("cusparselt")} == {
        "cuSPARSELt 0.10.0"
    }
    tuned = Counter((one.problem.element.value, one.problem.n) for one in SHIPPED.entries)
    tokens = {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}
    fewest = {"bf16": 8, "f16": 8, "s8": 16, "fp8_e4m3": 16}  # that the library takes, of the record's
    assert tuned == {(element, n): 8 for element, least in fewest.items() for n in tokens if n >= least}


def test_a_tuned_plan_is_never_slower_than_the_default():
    for one in SHIPPED.entries:
        gain = one.default_microseconds / one.microseconds
        assert gain > MIN_GAIN if one.configuration else gain == 1


@pytest.mark.filterwarnings("ignore::sparse24_plans.TuningWarning")  # the sample device has another driver
def test_the_shipped_configurations_are_for_rows_that_serve():
    for one in SHIPPED.entries:
        wanted = PlanPreference(prefer_backend=find(one.kernel).backend)
        assert explain(one.problem, preference=wanted, device=H200).chosen == one.kernel
        assert set(one.configuration) <= {"algorithm", "split_k", "split_k_mode", "split_k_buffers"}
