"""Rows of X that an index names, and results that are added up to rows of Y, for groups of tokens.

The reference is float64, and the bits are those of the steps that the descriptor names: rows gathered, one
product of groups, results multiplied by the router's weights and added in order.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    MisalignedOperandError,
    Sparse24Weight,
    UnsupportedError,
    WorkspaceTooSmallError,
)
from sparse24_plans.export.recording import record

from ..support import device_of_row, place_name, plan_of_row, same_bits
from .grouped_cases import GroupedCase, Routing, grouped_case, sorted_by
from .kernel_entries import gpu, marked, row_of
from .test_grouped import DGRAD, ON_A_GPU, PLAIN, ROWS, elements_of

INT32 = st.integers(-(2**31), 2**31 - 1)
routed_rows = pytest.mark.parametrize("row", [marked(name) for name in ROWS])


def out_of(element: str) -> dict[str, str]:
    """The type of results that can be added up."""
    return {} if element in ("f32", "f16", "bf16") else {"out_element": "bf16"}


def routed(rng: np.random.Generator, tokens: int, groups: int, top_k: int) -> tuple[np.ndarray, Routing]:
    """Offsets and routing of tokens that each go to ``top_k`` random groups."""
    experts = np.array([rng.permutation(groups)[:top_k] for _ in range(tokens)], np.int64).reshape(-1)
    order = np.argsort(experts, kind="stable")
    offsets = np.searchsorted(experts[order], np.arange(groups + 1)).astype(np.int32)
    places = np.empty(tokens * top_k, np.int32)
    places[order] = np.arange(tokens * top_k)
    weights = rng.uniform(-1, 1, (tokens, top_k)).astype(np.float32)
    return offsets, Routing((order // top_k).astype(np.int32), places.reshape(tokens, top_k), weights)


def make(row: str, tokens: Any, routing: Routing, seed: Any = 0, pad: int = 0, **problem: Any) -> GroupedCase:
    """A routed product that this kernel multiplies."""
    desc = GemmSparse24Descriptor(**{**PLAIN, "element": row_of(row).elements[-1], **problem})
    plan = plan_of_row(row).select(desc, device=device_of_row(row))
    assert plan.explain().chosen == row
    assert ("rows gathered" in plan.explain().details) == (desc.x_rows is not None)
    assert ("results added up" in plan.explain().details) == (desc.y_rows is not None)
    used = Routing(
        None if desc.x_rows is None else routing.x_index,
        None if desc.y_rows is None else routing.y_index,
        None if desc.y_rows is None else routing.y_weights,
    )
    return grouped_case(plan, tokens, seed, pad, used)


FORMS = {
    "gathered": {"x_rows": 9},
    "added up": {"y_rows": 9, "top_k": 3},
    "both": {"x_rows": 9, "y_rows": 9, "top_k": 3},
}


@routed_rows
@pytest.mark.parametrize(
    ("form", "weighted"),
    [("gathered", False), *itertools.product(("added up", "both"), (True, False))],
)
@pytest.mark.parametrize("epilogue", ["identity", "bias", "swiglu"])
def test_tokens_pass_their_groups_and_return(row, form, epilogue, weighted):
    for element in elements_of(row):
        offsets, routing = routed(np.random.default_rng(1), 9, 4, 3)
        routing = routing if weighted else replace(routing, y_weights=None)
        fields = {"n": 27, "groups": 4, "element": element, "epilogue": epilogue, **out_of(element)}
        case = make(row, offsets, routing, pad=16, **fields, **FORMS[form])
        case.check(case.run())


@routed_rows
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_routing(row, data):
    seed = data.draw(st.integers(0, 2**32), "seed")
    groups, tokens = data.draw(st.integers(1, 12), "groups"), data.draw(st.integers(1, 60), "tokens")
    top_k = data.draw(st.integers(1, groups), "top_k")
    offsets, routing = routed(np.random.default_rng(seed), tokens, groups, top_k)
    element = data.draw(st.sampled_from(elements_of(row)), "element")
    dgrad = row in DGRAD and data.draw(st.booleans(), "dgrad")
    rows = {"x_rows": tokens, "y_rows": tokens, "top_k": top_k}
    if not data.draw(st.booleans(), "gathers"):
        del rows["x_rows"]
    if row_of(row).scales and not dgrad:
        rows |= {"scale_x": data.draw(st.sampled_from(["row", "tensor", "none"]), "scale_x")}
    case = make(
        row,
        offsets,
        routing,
        seed,
        data.draw(st.sampled_from([0, 1, 8, 16]) if "x_rows" in rows else st.sampled_from([0, 16]), "pad"),
        n=tokens * top_k,
        groups=groups,
        m=64 * data.draw(st.integers(1, 3), "m / 64"),
        k=32 * data.draw(st.integers(1, 6), "k / 32"),
        element=element,
        **out_of(element),
        **({"op": "dgrad"} if dgrad else {}),
        **rows,
    )
    case.check(case.run())


@routed_rows
def test_counts_of_padded_places_are_routed(row):
    """Places beyond a group's count add nothing, whatever the workspace holds there."""
    index = np.array([[0, 5, 20], [12, 19, -1], [4, 11, 39], [1, 1, 1]], np.int32)
    routing = Routing(np.arange(40, dtype=np.int32) % 4, index, np.full((4, 3), 0.5, np.float32))
    fields = {"n": 40, "groups": 4, "group_tokens": "counts", **out_of(row_of(row).elements[-1])}
    case = make(row, [5, 2, 10, 0], routing, x_rows=4, y_rows=4, top_k=3, **fields)
    case.check(case.run())


@routed_rows
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hostile_indices_and_offsets_write_nothing_outside_of_y(row, data):
    """Indices are clamped or add nothing; the guard bytes and the gaps between rows stay."""
    numbers = INT32 | st.integers(-3, 45)
    offsets = data.draw(st.lists(numbers, min_size=5, max_size=5), "offsets")
    x_index, y_index = (
        np.array(data.draw(st.lists(numbers, min_size=size, max_size=size), name), np.int32)
        for name, size in (("x_index", 40), ("y_index", 14))
    )
    routing = Routing(x_index, y_index.reshape(7, 2))
    fields = {"n": 40, "groups": 4, **out_of(row_of(row).elements[-1])}
    case = make(row, offsets, routing, pad=16, x_rows=5, y_rows=7, top_k=2, **fields)
    got = case.run()  # checks the guards
    if not case.has_shared_rows():
        case.check(got)


@pytest.mark.parametrize("row", [marked(name) for name in ROWS if name != "host_blas"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_bits_are_those_of_the_named_steps(row, weighted):
    rng = np.random.default_rng(3)
    offsets, routing = routed(rng, 11, 5, 4)
    routing = routing if weighted else replace(routing, y_weights=None)
    fields = {"n": 44, "groups": 5, "k": 256, **out_of(row_of(row).elements[-1])}
    case = make(row, offsets, routing, x_rows=11, y_rows=11, top_k=4, **fields)
    desc = case.plan.descriptor
    plan = plan_of_row(row).select(desc.placed, device=place_name(case.plan))
    placed = grouped_case(plan, offsets, 0)
    placed.inputs[0].fill(case.data[0].x)
    results = placed.run().astype(np.float32)
    wanted = np.zeros((11, desc.outputs), np.float32)
    for j in range(4):
        terms = results[routing.y_index[:, j]]
        wanted += terms if routing.y_weights is None else terms * routing.y_weights[:, j : j + 1]
    assert same_bits(case.run(), wanted.astype(desc.out_element.dtype))


@pytest.mark.parametrize("row", [marked(name) for name in ROWS if name != "host_blas"])
@pytest.mark.parametrize("form", FORMS)
def test_results_can_be_replayed(row, form):
    offsets, routing = routed(np.random.default_rng(5), 9, 4, 3)
    offsets[-1] -= 2  # the last two places are in no group
    fields = {"n": 27, "groups": 4, "k": 256, **out_of(row_of(row).elements[-1])}
    case = make(row, offsets, routing, **fields, **FORMS[form])
    got = np.ascontiguousarray(case.run())
    own = vars(case.routing)
    args = GemmSparse24Args(
        Sparse24Weight.compress(np.concatenate([one.dense for one in case.data])),
        case.inputs[0].numpy(),
        got,
        offsets=offsets,
        **own,
    )
    found = case.plan.replay(args)
    rows = 25 if form == "gathered" else 9
    assert (found.equal, found.compared) == (True, rows * case.plan.descriptor.outputs)
    got[5, 7] = -got[5, 7] if got[5, 7] != 0 else 1
    found = case.plan.replay(args)
    assert (found.differing, found.first.token, found.first.output) == (1, 5, 7)


@pytest.mark.parametrize("n", [0, 6])
def test_rows_without_places_are_zeros(n):
    desc = GemmSparse24Descriptor(n=n, groups=2, y_rows=3, top_k=2, x_rows=4, element="f32", **PLAIN)
    plan = GemmSparse24Plan.select(desc, device="host")
    routing = Routing(np.zeros(n, np.int32), np.full((3, 2), 6, np.int32))
    case = grouped_case(plan, [0, n, n], routing=routing)
    assert not case.run().any()


def test_scales_of_rows_without_columns_are_gathered():
    """The epilogue of an empty sum multiplies by them: 0 times what the workspace held may be NaN."""
    fields = {"n": 12, "m": 64, "k": 0, "groups": 4, "element": "fp8_e4m3", "x_rows": 3, "scale_x": "row"}
    recipe, _ = record(GemmSparse24Plan.select(GemmSparse24Descriptor(**fields), device="h200"))
    assert [launch.code.name for launch in recipe.launches] == ["gather_rows", "gemm_strict"]


@pytest.mark.parametrize("row", [marked(name) for name in ("host_strict", "inflate_strict_fp8")])
def test_empty_sums_of_gathered_rows_are_scaled(row):
    offsets, routing = routed(np.random.default_rng(1), 9, 4, 3)
    fields = {"n": 27, "k": 0, "groups": 4, "element": "fp8_e4m3", "epilogue": "bias", "scale_x": "row"}
    case = make(row, offsets, routing, **fields, **FORMS["both"])
    case.check(case.run())


# Experts ------------------------------------------------------------------------------------------


def check_experts(row: str, experts: np.ndarray, groups: int, seed: Any = 0, **fields: Any) -> None:
    """The results of ``experts`` have the bits of the product by offsets and indices."""
    tokens, top_k = experts.shape
    offsets, routing = sorted_by(experts, groups)
    routing.y_weights = np.random.default_rng(1).uniform(-1, 1, experts.shape).astype(np.float32)
    problem = {"n": experts.size, "groups": groups, **out_of(row_of(row).elements[-1]), **fields}
    both = {"x_rows": tokens, "y_rows": tokens, "top_k": top_k}
    for rows in ({}, {"x_rows": tokens}, {"y_rows": tokens, "top_k": top_k}, both):
        wanted = make(row, offsets, routing, seed, **problem, **rows).run()
        chosen = {"group_tokens": "experts", "top_k": top_k, **rows}
        case = make(row, experts, routing, seed, **problem, **chosen)
        assert "choices sorted" in case.plan.explain().details
        got = case.run()
        case.check(got)
        assert same_bits(got, wanted)


@routed_rows
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_experts_are_sorted_into_groups(row, data):
    if row == "host_blas":
        return  # BLAS promises no bits
    groups, top_k = data.draw(st.integers(1, 20), "groups"), data.draw(st.integers(1, 5), "top_k")
    numbers = INT32 | st.integers(-2, groups + 1)
    chosen = data.draw(st.lists(st.lists(numbers, min_size=top_k, max_size=top_k), max_size=40), "experts")
    check_experts(row, np.array(chosen, np.int32).reshape(-1, top_k), groups)


@gpu
@pytest.mark.parametrize("row", ON_A_GPU)
@pytest.mark.parametrize(
    ("tokens", "top_k", "groups"), [(1, 8, 128), (31, 1, 3), (33, 2, 700), (900, 6, 703), (4000, 8, 1024)]
)
def test_many_experts_are_sorted(row, tokens, top_k, groups):
    rng = np.random.default_rng()
    experts = rng.integers(-1, groups + 1, (tokens, top_k), np.int32)
    check_experts(row, experts, groups, int(rng.integers(2**32)))


@pytest.mark.parametrize("row", [marked(name) for name in ROWS if name != "host_blas"])
def test_products_by_experts_can_be_replayed(row):
    experts = np.random.default_rng(2).integers(-1, 5, (9, 3), np.int32)
    routing = sorted_by(experts, 4)[1]
    rows = {"x_rows": 9, "y_rows": 9, "top_k": 3, "group_tokens": "experts"}
    case = make(row, experts, routing, n=27, groups=4, **rows, **out_of(row_of(row).elements[-1]))
    args = GemmSparse24Args(
        Sparse24Weight.compress(np.concatenate([one.dense for one in case.data])),
        case.inputs[0].numpy(),
        np.ascontiguousarray(case.run()),
        experts=experts,
    )
    found = case.plan.replay(args)
    assert (found.equal, found.compared) == (True, 9 * case.plan.descriptor.outputs)


# What is refused ----------------------------------------------------------------------------------

GROUPED = {"n": 12, "groups": 4, "element": "bf16", **PLAIN}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"groups": 0, "x_rows": 3}, "x_rows: expected None without groups, got 3"),
        ({"groups": 0, "y_rows": 3, "top_k": 1}, "y_rows: expected None without groups, got 3"),
        ({"x_rows": 0}, "x_rows: expected at least 1 row for n = 12 places, got 0"),
        ({"x_rows": 2**31}, "x_rows: expected at most 2147483647 rows, got 2147483648"),
        ({"x_rows": 2**31 - 1, "k": 2**40}, "x_rows, y_rows: expected operands of fewer than 2.63 elements"),
        ({"y_rows": 2**31 - 1, "top_k": 1, "m": 2**40}, "expected operands of fewer than 2.63 elements"),
        ({"top_k": 2}, "top_k: expected 0 without y_rows, got 2"),
        ({"y_rows": 3}, "top_k: expected 1 to 1024 with y_rows, got 0"),
        ({"y_rows": 3, "top_k": 1025}, "top_k: expected 1 to 1024 with y_rows, got 1025"),
        ({"y_rows": 3, "top_k": 2, "beta": 0.5}, "beta: expected 0 with y_rows, got 0.5"),
        (
            {"group_tokens": "experts"},
            "top_k: expected 1 to 1024 with group_tokens experts, got 0",
        ),
        (
            {"group_tokens": "experts", "top_k": 5},
            "n: expected a multiple of top_k, 5, with group_tokens experts, got 12",
        ),
        (
            {"group_tokens": "experts", "top_k": 2, "x_rows": 5},
            "x_rows: expected None or n/top_k, 6, with group_tokens experts, got 5",
        ),
        (
            {"group_tokens": "experts", "top_k": 2, "groups": 1025},
            "groups: expected at most 1024 with group_tokens experts, got 1025",
        ),
        (
            {"y_rows": 3, "top_k": 2, "element": "s8"},
            "out_element: expected f32, f16, bf16 with y_rows, got i32",
        ),
        (
            {"y_rows": 3, "top_k": 2, "out_element": "fp8_e4m3"},
            "out_element: expected f32, f16, bf16 with y_rows, got fp8_e4m3",
        ),
    ],
)
def test_a_descriptor_of_routed_rows_is_checked(fields, words):
    with pytest.raises(InvalidProblemError, match=words):
        GemmSparse24Descriptor(**{**GROUPED, **fields})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_index": None}, r"x_index: expected a tensor i32\[27\], got NoneType"),
        ({"x_index": np.zeros(26, np.int32)}, r"x_index: expected shape \[27\], got \[26\]"),
        ({"x_index": np.zeros(27, np.int64)}, "x_index"),
        ({"y_index": np.zeros((9, 2), np.int32)}, r"y_index: expected shape \[9, 3\], got \[9, 2\]"),
        ({"y_weights": np.zeros((9, 3), np.float16)}, "y_weights: expected element f32, got f16"),
    ],
)
def test_wrong_operands_are_named_and_nothing_is_written(change, words):
    offsets, routing = routed(np.random.default_rng(1), 9, 4, 3)
    case = make("host_strict", offsets, routing, n=27, groups=4, element="f32", **FORMS["both"])
    with pytest.raises((InvalidProblemError, MisalignedOperandError), match=words):
        case.plan.run(replace(case.args, **change))
    assert case.result.untouched()


def test_plans_of_any_number_of_tokens_take_no_routed_rows():
    desc = GemmSparse24Descriptor(**GROUPED, x_rows=3)
    with pytest.raises(InvalidProblemError, match="descriptor: expected no x_rows and y_rows"):
        GemmSparse24Plan.for_tokens(desc, 100, device="h200")


# The workspace ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_places_rows_are_counted_as_workspace(form):
    desc = GemmSparse24Descriptor(**{**GROUPED, "n": 27, **FORMS[form]})
    plan = GemmSparse24Plan.select(desc, device="h200")
    rows = {"gathered": 27 * 128 * 2, "added up": 27 * 64 * 2}
    rows["both"] = sum(-(-one // 256) * 256 for one in rows.values())
    needed = plan.workspace_size()
    assert needed >= rows[form]
    assert needed == plan.explain().workspace_size
    limit = {"max_workspace_bytes": needed}
    assert GemmSparse24Plan.select(desc, device="h200", preference=limit).workspace_size() == needed
    with pytest.raises(UnsupportedError, match="max_workspace_bytes"):
        GemmSparse24Plan.select(desc, device="h200", preference={"max_workspace_bytes": rows[form] // 2})


@pytest.mark.parametrize("groups", [4, 2**28])
def test_workspaces_too_small_for_padded_places_are_refused(groups):
    sizes = {"n": 3 * groups, "groups": groups}
    desc = GemmSparse24Descriptor(**{**GROUPED, **sizes}, group_tokens="counts", y_rows=9, top_k=2)
    with pytest.raises(UnsupportedError, match=r"needs a workspace of .* bytes, max_workspace_bytes is 16"):
        GemmSparse24Plan.select(desc, device="h200", preference={"max_workspace_bytes": 16})


@pytest.mark.parametrize(
    ("sizes", "details"),
    [
        ({"n": 0, "x_rows": 3}, "rows gathered"),
        ({"n": 0, "x_rows": 3, "y_rows": 2, "top_k": 1}, "rows gathered, results added up"),
        ({"m": 0, "y_rows": 2, "top_k": 1}, "results added up"),
    ],
)
def test_details_of_an_empty_product_name_the_other_launches(sizes, details):
    desc = GemmSparse24Descriptor(**{**GROUPED, **sizes})
    assert GemmSparse24Plan.select(desc, device="h200").explain().details == details


def test_the_same_kernel_serves_the_places():
    desc = GemmSparse24Descriptor(**{**GROUPED, "n": 27, **FORMS["both"]})
    plan, placed = (GemmSparse24Plan.select(one, device="h200") for one in (desc, desc.placed))
    assert plan.kernel == placed.kernel == "wgmma_sp_grouped"
    assert plan.guarantee == placed.guarantee


# On a GPU -----------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("row", ON_A_GPU)
@pytest.mark.parametrize("pad", [0, 3])
def test_large_routed_products(row, pad):
    rng = np.random.default_rng()
    tokens, groups, top_k = 700, 60, 6
    offsets, routing = routed(rng, tokens, groups, top_k)
    fields = {"n": tokens * top_k, "m": 128, "k": 192, "groups": groups, **out_of(row_of(row).elements[-1])}
    fields |= {"x_rows": tokens, "y_rows": tokens, "top_k": top_k}
    case = make(row, offsets, routing, int(rng.integers(2**32)), pad, **fields)
    first = case.run().copy()
    case.check(first)
    assert same_bits(first, case.run())


@gpu
@pytest.mark.parametrize("row", [name for name in ON_A_GPU if name in DGRAD])
def test_strict_sums_have_the_bits_of_the_host(row):
    rng = np.random.default_rng()
    offsets, routing = routed(rng, 90, 7, 3)
    seed = int(rng.integers(2**32))
    for element in elements_of(row):
        fields = {"n": 270, "groups": 7, "element": element, "x_rows": 90, "y_rows": 90, "top_k": 3}
        fields |= out_of(element)
        device, host = (
            make(one, offsets, routing, seed, **fields).run().copy() for one in (row, "host_strict")
        )
        assert same_bits(device, host)


@gpu
@pytest.mark.parametrize("row", ON_A_GPU)
def test_a_workspace_that_is_too_small_is_refused(row):
    offsets, routing = routed(np.random.default_rng(1), 9, 4, 3)
    fields = {"n": 27, "groups": 4, **out_of(row_of(row).elements[-1]), **FORMS["both"]}
    case = make(row, offsets, routing, **fields)
    with pytest.raises(WorkspaceTooSmallError):
        case.plan.run(case.args)
    assert case.result.untouched()


@gpu
@pytest.mark.parametrize("row", ON_A_GPU)
def test_a_captured_launch_follows_new_routing(row):
    import cupy

    offsets, routing = routed(np.random.default_rng(1), 9, 4, 3)
    fields = {"n": 27, "groups": 4, **out_of(row_of(row).elements[-1]), **FORMS["both"]}
    case = make(row, offsets, routing, **fields)
    bound = case.plan.bind(case.args, workspace=case.workspace.view)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        bound.launch(stream=stream)
        graph = stream.end_capture()
    for seed in (2, 3):
        offsets, routing = routed(np.random.default_rng(seed), 9, 4, 3)
        other = make(row, offsets, routing, **fields)
        for own, new in zip(case.inputs[1:], other.inputs[1:], strict=True):
            own.fill(new.numpy())
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        other.check(case.result.numpy())


def test_sums_that_overflow_their_type_raise_no_floating_point_error():
    """Two results near the largest f16 add up to Inf, which is a result and no accident."""
    desc = GemmSparse24Descriptor(n=2, m=8, k=8, element="f16", groups=1, y_rows=1, top_k=2)
    plan = GemmSparse24Plan.select(desc, device="host")
    weight = Sparse24Weight.prune_compress(np.full((8, 8), 100, np.float16))
    y = np.empty((1, 8), np.float16)
    operands = {"offsets": np.array([0, 2], np.int32), "y_index": np.array([[0, 1]], np.int32)}
    with np.errstate(all="raise"):
        plan.run(GemmSparse24Args(weight, np.full((2, 8), 100, np.float16), y, **operands))
    assert np.isinf(y).all()
