"""Plans for any number of tokens: each is what select gives, and one workspace is enough for all."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BackendUnavailableError,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    Sparse24Weight,
    UnsupportedError,
)
from sparse24_plans.device.jit import launcher

from ..sample_devices import A100, H200, gpu_of
from ..support import check_each
from ..tuning.cases import table

BARE = gpu_of(9, 0, libraries=False, multiprocessors=200)


def problem(m: int = 4096, k: int = 4096, element: str = "bf16", **more: object) -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(**{"n": 1, "m": m, "k": k, "element": element, **more})


def selected(desc: GemmSparse24Descriptor, n: int, **options: object) -> GemmSparse24Plan:
    rows = {name: n // desc.top_k for name in ("x_rows", "y_rows") if getattr(desc, name) is not None}
    return GemmSparse24Plan.select(desc.model_copy(update={"n": n, **rows}), **options)


def experts(top_k: int, **more: object) -> GemmSparse24Descriptor:
    """A problem of rows that each choose so many of 8 groups."""
    about = {"groups": 8, "group_tokens": "experts", "top_k": top_k, "n": top_k}
    return problem(1024, 512, **{**about, **more})


# The bound of the workspace -----------------------------------------------------------------------

INVARIANT = {"require": {"batch_invariant": True}}
CASES = {
    "bf16": (problem(), H200, {}),
    "few outputs": (problem(1280, 5120), H200, {}),
    "K in chunks": (problem(4096, 14336), H200, INVARIANT),
    "K in split terms": (problem(1024, 8192, "f32"), H200, {}),
    "split terms, invariant": (problem(4096, 4096, "f32"), BARE, INVARIANT),
    "three products": (problem(2048, 2048, "f32"), H200, {"require": {"max_error_bound": 1e-3}}),
    "s8": (problem(4096, 4096, "s8"), H200, {}),
    "fp8, promoted": (problem(4096, 4096, "fp8_e4m3"), H200, {"prefer_kernel": "wgmma_sp_fp8_promoted"}),
    "columns": (problem(2048, 2048, "f16", x_order="column", epilogue="bias"), H200, {}),
    "columns, some space": (problem(2048, 256, x_order="column"), H200, {"max_workspace_bytes": 1_000_000}),
    "little space": (problem(), H200, {"max_workspace_bytes": 70_000}),
    "a part of a weight": (problem(1024, 8192), H200, {**INVARIANT, "whole_m": 8192}),
    "Ampere": (problem(512, 512, epilogue="bias"), A100, {}),
    "Ampere, invariant": (problem(512, 512), A100, INVARIANT),
    "cuBLAS": (problem(512, 512, "f32", epilogue="bias"), H200, {"prefer_backend": "inflate_cublas"}),
    "an arithmetic": (problem(), H200, {"require": {"arithmetic": "hopper_tc/slices=8"}}),
    "groups": (problem(1024, 512, groups=8), H200, {}),
    "counts": (problem(1024, 512, groups=8, group_tokens="counts", n=8), H200, {}),
    "experts, gathered": (experts(2, x_rows=1), H200, {}),
    "experts, added up": (experts(6, y_rows=1), H200, {}),
    "experts on the host": (experts(1, x_rows=1, y_rows=1, element="f32"), "host", {}),
}


NUMBERS = sorted({*range(1, 18), *range(80, 1104, 64), *range(81, 1104, 97)})
NUMBERS = sorted({*NUMBERS, *(n + by for n in range(24, 81, 8) for by in (-1, 0, 1))})
"""Small numbers of tokens round every tile of 8, larger ones that fill tiles, and some of every remainder."""


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_bound_equal_those_of_checking_every_n(name):
    desc, device, preference = CASES[name]
    options = {"preference": preference, "device": device}
    most = 300 if name == "an arithmetic" else NUMBERS[-1]  # for which every number up to it is looked at
    numbers = [n for n in NUMBERS if n % desc.step == 0 and n <= most]
    plans = GemmSparse24Plan.for_tokens(desc, numbers[-1], **options)
    found = [selected(desc, n, **options) for n in numbers]
    assert sorted(plans.kernels) == sorted({plan.kernel for plan in found})
    assert sorted(plans.layouts) == sorted({plan.sku.layout for plan in found})
    assert max(plan.workspace_size() for plan in found) <= plans.workspace_size()
    assert all(plan.workspace_alignment <= plans.workspace_alignment for plan in found)


@pytest.mark.parametrize("name", CASES)
def test_the_fewest_tokens_have_the_kernel_of_one_plan(name):
    desc, device, preference = CASES[name]
    plans = GemmSparse24Plan.for_tokens(desc, desc.step, preference=preference, device=device)
    assert plans.kernels == (plans[desc.step].kernel,)
    assert plans.layouts == (plans[desc.step].sku.layout,)
    assert plans.workspace_size() >= plans[desc.step].workspace_size()


@pytest.mark.parametrize("most", [140, 190, 224, 300])
def test_a_kernel_of_some_numbers_between_others_is_found(most):
    """The workspace leaves inflate_cublas 129 to 183 tokens. Fewer are mma_sp's, more are mma_sp_many's."""
    desc, wish = problem(512, 512, epilogue="bias"), {"max_workspace_bytes": 900_000}
    plans = GemmSparse24Plan.for_tokens(desc, most, preference=wish, device=A100)
    served = ("mma_sp", "inflate_cublas", "mma_sp_many")[: 2 + (most > 183)]
    assert sorted(plans.kernels) == sorted(served)
    assert {selected(desc, n, preference=wish, device=A100).kernel for n in (1, 128)} == {"mma_sp"}
    assert {selected(desc, n, preference=wish, device=A100).kernel for n in (129, 140)} == {"inflate_cublas"}


@settings(max_examples=15)
@given(
    m=st.integers(1, 40_000),
    k=st.integers(1, 4000).map(lambda eights: 8 * eights),
    n=st.integers(1, 20_000),
    most=st.integers(1, 20_000),
    element=st.sampled_from(["f32", "f16", "bf16"]),
    x_order=st.sampled_from(["row", "column"]),
    preference=st.sampled_from([{}, INVARIANT, {"max_workspace_bytes": 5_000_000}]),
    device=st.sampled_from([H200, A100, BARE]),
)
def test_no_plan_needs_more_than_the_bound(m, k, n, most, element, x_order, preference, device):
    desc = problem(m, k, element, x_order=x_order)
    try:
        plans = GemmSparse24Plan.for_tokens(desc, most, preference=preference, device=device)
    except (UnsupportedError, BackendUnavailableError):
        return  # for some number of tokens there is no kernel
    n = min(n, most)
    assert plans[n].kernel in plans.kernels
    assert plans[n].workspace_size() <= plans.workspace_size()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("preference", [{}, INVARIANT, {"max_workspace_bytes": 0}], ids=str)
@pytest.mark.parametrize("element", ["f32", "bf16", "s8", "fp8_e4m3"])
def test_no_outputs_have_a_bound_too(element, preference):
    plans = GemmSparse24Plan.for_tokens(problem(0, 128, element), 8, preference=preference, device=H200)
    assert plans.workspace_size() >= plans[8].workspace_size() == 0


@pytest.mark.parametrize(("m", "k"), [(4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192)])
@pytest.mark.parametrize(("preference", "slack"), [({}, 1.05), (INVARIANT, 3.01)])
def test_the_bound_is_not_far_above_what_is_needed(m, k, preference, slack):
    options = {"preference": preference, "device": "h200"}
    plans = GemmSparse24Plan.for_tokens(problem(m, k), 8192, **options)
    largest = max(plans[n].workspace_size() for n in range(64, 8193, 64))
    assert plans.workspace_size() <= slack * largest


def test_the_bound_of_many_tokens_takes_no_time():
    start = time.process_time()
    plans = GemmSparse24Plan.for_tokens(problem(28672), 1 << 20, device="h200")
    assert plans.workspace_size() < 18 << 20
    assert time.process_time() - start < 2


# The plans ----------------------------------------------------------------------------------------


def test_each_plan_is_the_one_that_select_gives():
    desc = problem(64, 128, "f32", epilogue="bias")
    plans = GemmSparse24Plan.for_tokens(desc, 33, device="host")
    assert plans.descriptor.n == plans.most_n == 33
    for n in (0, 1, 7, 33, np.int64(5)):
        assert plans[n] is selected(desc, int(n), device="host")
    assert "host_blas" in repr(plans)


def test_iteration_gives_the_plans_of_all_numbers_of_tokens():
    plans = GemmSparse24Plan.for_tokens(problem(64, 128), 5, device="h200")
    found = list(plans)
    assert [plan.descriptor.n for plan in found] == [0, 1, 2, 3, 4, 5]
    assert all(plan is plans[n] for n, plan in enumerate(found))


@pytest.mark.parametrize("rows", [{}, {"x_rows": 7}, {"x_rows": 7, "y_rows": 7}], ids=str)
def test_rows_of_experts_follow_the_number_of_places(rows):
    plans = GemmSparse24Plan.for_tokens(experts(3, n=21, **rows), 9, device="h200")
    found = [plan.descriptor for plan in plans]
    assert [one.n for one in found] == [0, 3, 6, 9]
    for one in found:
        assert {name: getattr(one, name) for name in rows} == dict.fromkeys(rows, one.n // 3)
    for n in (4, 12, -3):
        with pytest.raises(InvalidProblemError, match=f"n: expected a multiple of 3 from 0 to 9, got {n}"):
            plans[n]
    with pytest.raises(InvalidProblemError, match=r"most_n: expected a multiple of 3 from 3 to .*, got 10"):
        GemmSparse24Plan.for_tokens(experts(3, **dict.fromkeys(rows, 1)), 10, device="h200")


@pytest.mark.parametrize("rows", [{"x_rows": 5}, {"y_rows": 5, "top_k": 2}], ids=str)
@pytest.mark.parametrize("group_tokens", ["offsets", "counts"])
def test_rows_that_do_not_follow_number_of_tokens_are_refused(rows, group_tokens):
    desc = problem(64, 128, groups=4, group_tokens=group_tokens, n=8, **rows)
    with pytest.raises(
        InvalidProblemError, match="descriptor: expected no x_rows and y_rows .*, got " + group_tokens
    ):
        GemmSparse24Plan.for_tokens(desc, 8, device="h200")


@pytest.mark.parametrize("own", [False, True], ids=["shipped table", "own table"])
@pytest.mark.parametrize("device", ["host", "h200", BARE], ids=str)
def test_a_pickle_of_plans_selects_them_again(device, own):
    options = {"tuning": table()} if own else {}
    plans = GemmSparse24Plan.for_tokens(problem(64, 128), 33, preference=INVARIANT, device=device, **options)
    for again in (pickle.loads(pickle.dumps(plans)), copy.deepcopy(plans)):
        assert repr(again) == repr(plans)
        assert (again.descriptor, again.most_n) == (plans.descriptor, 33)
        assert own or again[7] is plans[7]
    assert len(pickle.dumps(plans)) < (20_000 if own else 2000)


SERVED = {
    "single": {},
    "groups": {"groups": 4},
    "batches": {"batches": 3},
    "gates in columns": {"epilogue": "swiglu", "y_order": "column"},
    "columns": {"x_order": "column", "y_order": "column"},
    "quantized": {"weight_element": "s4", "weight_group": 128},
    "C": {"beta": 1.0},
}
"""Problems of 64-row weights."""


DEVICES = H200, A100, BARE, *(gpu_of(*one) for one in ((8, 9), (12, 0)))
PREFERENCES = {}, INVARIANT, {"max_workspace_bytes": 0}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device", range(len(DEVICES)), ids=lambda at: str(DEVICES[at]))
@pytest.mark.parametrize("kind", SERVED)
def test_empty_result_is_served_as_others_are_and_writes_nothing(device, kind):
    elements = ("f32", "f16", "bf16", "s8", "fp8_e4m3", "fp8_e5m2")
    check_each(partial(check_empty, device, kind), ({"element": element} for element in elements))


def check_empty(device: int, kind: str, element: str) -> None:
    """Each problem on each device has one of the preferences, which meet every pair of the others."""
    at = device + list(SERVED).index(kind) + list(ElementKind).index(ElementKind(element))
    more, preference, place = SERVED[kind], PREFERENCES[at % len(PREFERENCES)], DEVICES[device]
    out = {"out_element": "bf16"} if element == "s8" and "epilogue" in more else {}
    options = {"preference": preference, "device": place}
    try:
        full = problem(64, 128, element, **more, **out, n=8)
        layout = GemmSparse24Plan.select(full, **options).sku.layout
    except (InvalidProblemError, UnsupportedError, BackendUnavailableError):
        return  # no problem, or one of sizes that the device's kernels don't serve
    for change in ({"n": 0}, {"m": 0}, {"n": 0, "m": 0}, *([{"batches": 0}] if full.batches else [])):
        plan = GemmSparse24Plan.select(full.model_copy(update=change), **options)
        assert (plan.sku.layout, plan.workspace_size()) == (layout, 0)
        assert str(plan.explain())
        if plan.sku.backend not in ("inflate_cublas", "inflate_strict"):
            assert type(plan).compile(plan.descriptor, **options) == ()


def test_serving_loop_runs_any_token_count_with_one_workspace():
    rng = np.random.default_rng(7)
    plans = GemmSparse24Plan.for_tokens(problem(64, 128, "f32"), 40, device="host")
    dense = Sparse24Weight.prune_compress(rng.standard_normal((64, 128), np.float32))
    (layout,) = plans.layouts
    packed, space = plans[1].pack(dense), np.empty(plans.workspace_size(), np.uint8)
    assert packed.layout_id == layout
    for n in rng.integers(0, 41, 9):
        x, y = rng.standard_normal((n, 128), np.float32), np.full((n, 64), np.nan, np.float32)
        args = GemmSparse24Args(packed, x, y)
        plans[n].run(args, workspace=space)
        np.testing.assert_allclose(y, x @ dense.decompress().T, atol=1e-4)
        plans[n].bind(args, workspace=space).launch()


def test_threads_get_the_same_plan():
    plans = GemmSparse24Plan.for_tokens(problem(64, 128), 200, device="h200")
    found: list[list[int]] = []
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        found.append([id(plans[n]) for n in range(1, 201)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 4
    assert found.count(found[0]) == 4


@pytest.mark.parametrize("n", [-1, 34, True, 1.0, "3", None, [4]], ids=repr)
def test_a_number_of_tokens_beyond_the_range_is_refused(n):
    plans = GemmSparse24Plan.for_tokens(problem(64, 128), 33, device="host")
    with pytest.raises(InvalidProblemError, match="n: expected a number of tokens from 0 to 33"):
        plans[n]
    with pytest.raises(InvalidProblemError, match="n: expected a number of tokens from 0 to 33"):
        plans.compile([n])


@pytest.mark.parametrize("ns", [7, int, "8", ["a"], [1, 34]], ids=repr)
def test_numbers_of_tokens_that_are_none_are_refused(ns):
    plans = GemmSparse24Plan.for_tokens(problem(64, 128), 33, device="host")
    with pytest.raises(InvalidProblemError, match=r"^ns?: expected"):
        plans.compile(ns)


@pytest.mark.parametrize("most", [0, -5, 2.0, "8", None, 2**63], ids=repr)
def test_a_wrong_range_is_refused(most):
    with pytest.raises(InvalidProblemError, match=r"^most_n: expected a number of tokens from 1"):
        GemmSparse24Plan.for_tokens(problem(), most, device="host")


def test_a_number_that_no_kernel_serves_is_named_at_once():
    desc = problem(64, 128, "f32")  # its terms lie in the workspace, token for token
    wish = {"prefer_backend": "f32_split6"}
    of_eight = desc.model_copy(update={"n": 8})
    most = GemmSparse24Plan.select(of_eight, preference=wish, device="h200").workspace_size()
    wish["max_workspace_bytes"] = most
    found = GemmSparse24Plan.for_tokens(desc, 8, preference=wish, device="h200")
    assert found.kernels == ("f32_split6",)
    with pytest.raises(UnsupportedError, match=r"^\d+ tokens: no kernel can serve") as caught:
        GemmSparse24Plan.for_tokens(desc, 64, preference=wish, device="h200")
    assert 8 < int(str(caught.value).partition(" ")[0]) <= 64


# Compiled ahead -----------------------------------------------------------------------------------


def test_kernels_are_compiled_once_for_all_numbers_that_share_them(monkeypatch):
    class Compiled:
        def __init__(self, source: str, arch: str, defines: dict) -> None:
            self.path = (source, arch, *sorted(defines.items()))

    monkeypatch.setattr(launcher, "compiled", Compiled)
    plans = GemmSparse24Plan.for_tokens(problem(), 64, device="h200")
    every = plans.compile()
    assert len({one.path for one in every}) == len(every) > 1
    some = plans.compile([1, 2, 8, 64])
    assert {one.path for one in some} < {one.path for one in every}
    assert len(some) == 2  # 1, 2 and 8 tokens are one tile of 8
