"""Groups of tokens, each multiplied by a weight of its own, with the bits of single products.

The reference is float64, group by group. Rows in no group, the gaps between rows, and all guard bytes stay
as they were, whatever the offsets say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    GemmOp,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    Sparse24Weight,
    UnsupportedError,
)
from sparse24_plans.gemm.backends import wgmma_sp_grouped
from sparse24_plans.gemm.kernel_table import ENTRIES
from sparse24_plans.gemm.schedules.grouped import GROUPED, schedules_for, split_schedules
from sparse24_plans.plan import plan as plans

from ..sample_devices import gpu_of
from ..support import device_of_row, make_case, plan_of_row, same_bits
from .grouped_cases import GroupedCase, grouped_case
from .kernel_entries import gpu, marked, on_host, row_of

ROWS = tuple(row.name for row in ENTRIES if row.groups and not row.on_request)
KERNELS = tuple(name for name in ROWS if row_of(name).only_groups)
ON_A_GPU = tuple(name for name in ROWS if not on_host(name))
DGRAD = tuple(name for name in ROWS if GemmOp.DGRAD in row_of(name).ops)
ADD_C = tuple(name for name in ROWS if row_of(name).adds_c)
grouped_rows = pytest.mark.parametrize("row", [marked(name) for name in ROWS])
PLAIN = {"m": 64, "k": 128}
"""Sizes that every kernel takes: rows of W in whole tiles, and columns of X in multiples of 16 bytes."""


def make(
    row: str, tokens: Any, seed: int = 0, pad: int = 0, *, in_place: bool = False, **problem: Any
) -> GroupedCase:
    """A grouped product that this kernel runs. ``tokens`` are its offsets or counts."""
    desc = GemmSparse24Descriptor(**{**PLAIN, "element": row_of(row).elements[-1], **problem})
    plan = plan_of_row(row).select(desc, device=device_of_row(row))
    assert plan.explain().chosen == row
    return grouped_case(plan, tokens, seed, pad, in_place=in_place)


def run_and_check(row: str, tokens: Any, **problem: Any) -> np.ndarray:
    case = make(row, tokens, **problem)
    got = case.run()
    case.check(got)
    return got


def elements_of(row: str) -> list[str]:
    return [element for element in row_of(row).elements if row_of(row).scales or element.itemsize > 1]


SPREADS = {
    "even": [0, 8, 16, 24, 32],
    "uneven": [0, 1, 1, 29, 40],
    "one group has all": [0, 0, 0, 40, 40],
    "no tokens": [0, 0, 0, 0, 0],
    "rows before and behind": [3, 9, 17, 17, 31],
}


@grouped_rows
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("epilogue", ["identity", "bias", "swiglu"])
def test_each_group_has_the_product_with_its_own_weight(row, spread, epilogue):
    for element in elements_of(row):
        out = {"out_element": "bf16"} if element == "s8" and epilogue == "swiglu" else {}
        run_and_check(row, SPREADS[spread], n=40, groups=4, element=element, epilogue=epilogue, **out)


@grouped_rows
def test_groups_may_be_given_by_counts_of_padded_places(row):
    run_and_check(row, [5, 0, 10, 1], n=40, groups=4, group_tokens="counts", epilogue="bias")


@pytest.mark.parametrize("row", [marked(name) for name in ADD_C])
@pytest.mark.parametrize("epilogue", ["identity", "bias_relu", "gelu"])
def test_each_group_adds_its_rows_of_c(row, epilogue):
    """C has a stride of its own, or is Y, of which rows in no group keep what they hold."""
    fields = {"n": 40, "groups": 4, "epilogue": epilogue, "alpha": 0.75, "beta": -0.5, "bias_element": "f32"}
    tokens = SPREADS["rows before and behind"], [5, 0, 10, 1]
    for element in elements_of(row):
        forms = {"offsets": {}, "counts": {"group_tokens": "counts"}, "f32": {"c_element": "f32"}}
        for form, more in forms.items():
            given = tokens[form == "counts"]
            found = run_and_check(row, given, pad=16, element=element, **fields, **more)
            if form != "f32":
                case = make(row, given, pad=16, in_place=True, element=element, **fields, **more)
                got = case.run()
                case.check(got)
                ranges = case.ranges()
                assert all(same_bits(got[a:b].copy(), found[a:b].copy()) for a, b in ranges) or (
                    row == "host_blas"
                )


@pytest.mark.parametrize("row", KERNELS)
def test_kernels_of_tensor_cores_refuse_c_of_groups_by_name(row):
    desc = problem_of(row).model_copy(update={"beta": 0.5})
    with pytest.raises(UnsupportedError, match=rf"{row}: adds no C, got beta 0\.5"):
        plan_of_row(row).select(desc, device="h200")


@grouped_rows
def test_scales_are_those_of_tokens_and_of_each_groups_rows(row):
    if not row_of(row).scales:
        with pytest.raises(UnsupportedError, match="takes no scale_x or scale_w"):
            make(row, SPREADS["uneven"], n=40, groups=4, scale_x="row", scale_w="row")
        return
    for kinds in (("row", "row"), ("tensor", "tensor"), ("none", "row")):
        scales = dict(zip(("scale_x", "scale_w"), kinds, strict=True))
        for element in ("s8", "fp8_e4m3"):
            if element in row_of(row).elements:
                run_and_check(
                    row, SPREADS["uneven"], n=40, groups=4, element=element, out_element="bf16", **scales
                )


@grouped_rows
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_groups(row, data):
    groups = data.draw(st.integers(1, 40), "groups")
    n = data.draw(st.integers(1, 60 if row_of(row).on_host else 300), "n")
    ends = sorted(data.draw(st.lists(st.integers(0, n), min_size=groups + 1, max_size=groups + 1), "offsets"))
    element = data.draw(st.sampled_from(elements_of(row)), "element")
    if row in DGRAD and data.draw(st.booleans(), "dgrad"):
        problem = {"op": "dgrad", "epilogue": "identity"}
    else:
        problem = {"epilogue": data.draw(st.sampled_from(["identity", "bias_silu", "geglu"]), "epilogue")}
    run_and_check(
        row,
        ends,
        element=element,
        **({"out_element": "bf16"} if element == "s8" else {}),
        n=n,
        groups=groups,
        m=64 * data.draw(st.integers(1, 4), "m / 64"),
        k=32 * data.draw(st.integers(1, 9), "k / 32"),
        seed=data.draw(st.integers(0, 2**32), "seed"),
        pad=data.draw(st.sampled_from([0, 16]), "pad"),
        **problem,
    )


@pytest.mark.parametrize("row", [marked(name) for name in DGRAD])
@pytest.mark.parametrize("spread", SPREADS)
def test_each_group_has_the_gradient_of_its_own_product(row, spread):
    for element in elements_of(row):
        out = {"out_element": "bf16"} if element == "s8" else {}
        fields = {"op": "dgrad", "element": element, "m": 72, "k": 136, "alpha": 0.5, **out}
        run_and_check(row, SPREADS[spread], n=40, groups=4, pad=8, **fields)
    run_and_check(row, [5, 0, 10, 1], n=40, groups=4, group_tokens="counts", op="dgrad", m=40)


@pytest.mark.parametrize("row", [marked(name) for name in DGRAD if name != "host_blas"])
@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_strict_groups_have_the_same_bits_everywhere(row, op):
    """Groups have the bits of the host, and of one product after the other."""
    n, k, groups = (90, 136, 13) if row_of(row).on_host else (400, 264, 37)
    offsets = np.sort(np.random.default_rng().integers(0, n, groups + 1))
    for element in elements_of(row):
        out = {"out_element": "f32"} if element == "s8" else {}
        problem = {"n": n, "groups": groups, "m": 40, "k": k, "op": op, "element": element, **out}
        found, host = (make(one, offsets, **problem).run().copy() for one in (row, "host_strict"))
        assert same_bits(found, host)
        case = make(row, offsets, **problem)
        for data, (begin, end) in case.of_groups():
            desc = case.plan.descriptor.model_copy(update={"n": end - begin, "groups": 0})
            single = make_case(desc, row=row, dense=data.dense, x=data.x).run()
            assert same_bits(single, found[begin:end].copy())


@pytest.mark.parametrize("row", KERNELS)
def test_kernels_of_tensor_cores_refuse_dgrad(row):
    desc = problem_of(row).model_copy(update={"op": GemmOp.DGRAD})
    assert row_of(row).refusal(desc) == "does not serve op dgrad"


@grouped_rows
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(offsets=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-5, 45), min_size=5, max_size=5))
def test_hostile_offsets_write_nothing_outside_of_y(row, offsets):
    """Decreasing, negative, beyond the rows: the guard bytes and the gaps between rows stay."""
    case = make(row, offsets, n=40, groups=4, pad=16)
    got = case.run()  # checks the guards
    if not case.has_shared_rows():
        case.check(got)
    else:
        written = np.zeros(40, bool)
        for begin, end in case.ranges():
            written[begin:end] = True
        assert (got[~written].view(np.uint8) == 0xFF).all()


@grouped_rows
@pytest.mark.parametrize("counts", [[-1, 11, 2**31 - 1, -(2**31)]])
def test_hostile_counts_are_clamped_to_the_places(row, counts):
    run_and_check(row, counts, n=40, groups=4, group_tokens="counts", pad=16)


@grouped_rows
def test_rows_bits_depend_on_neither_its_group_nor_its_neighbours(row):
    """One plan multiplies a row by the same weight alone, among other rows, and in another group."""
    if row == "host_blas":
        pytest.skip("BLAS promises no bits")
    case = make(row, [0, 37, 37, 40], n=40, groups=3, k=512)
    whole = case.run().copy()
    for offsets in ([0, 1, 1, 1], [0, 37, 38, 40]):
        other = make(row, offsets, n=40, groups=3, k=512)
        got = other.run()
        assert same_bits(got[: offsets[1]], whole[: offsets[1]])
        assert same_bits(got[39:], whole[39:]) or offsets[3] < 40


@grouped_rows
def test_the_bits_are_those_of_single_products(row):
    """A single product of the arithmetic that the grouped plan names gives the same bits."""
    case = make(row, SPREADS["uneven"], n=40, groups=4, k=512)
    got, name = case.run(), case.plan.guarantee.arithmetic
    if name is None:
        assert not on_host(row) or row == "host_blas"
        return
    for data, (begin, end) in zip(case.data, case.ranges(), strict=True):
        if begin == end:
            continue
        desc = case.plan.descriptor.model_copy(update={"n": end - begin, "groups": 0})
        plan = GemmSparse24Plan.select(desc, preference={"require": {"arithmetic": name}}, device="host")
        y = np.empty((end - begin, desc.outputs), desc.out_element.dtype)
        weight = plan.pack(Sparse24Weight.compress(data.dense))
        plan.run(GemmSparse24Args(weight, data.x[begin:end], y))
        assert same_bits(y, np.ascontiguousarray(got[begin:end]))


@pytest.mark.parametrize("row", [marked(name) for name in ROWS if name != "host_blas"])
def test_results_can_be_replayed(row):
    case = make(row, SPREADS["rows before and behind"], n=40, groups=4, k=256)
    got = np.ascontiguousarray(case.run())
    args = GemmSparse24Args(
        Sparse24Weight.compress(np.concatenate([one.dense for one in case.data])),
        case.data[0].x,
        got,
        offsets=np.array(SPREADS["rows before and behind"], np.int32),
    )
    found = case.plan.replay(args)
    assert found.equal
    assert found.compared == 28 * case.plan.descriptor.outputs
    got[5, 7] = -got[5, 7] if got[5, 7] != 0 else 1
    found = case.plan.replay(args)
    assert (found.differing, found.first.token, found.first.output) == (1, 5, 7)
    got[0] = 0  # row 0 is in no group
    assert case.plan.replay(args).differing == 1


@pytest.mark.parametrize(
    "row", [marked(name) for name in ROWS if row_of(name).adds_c and name != "host_blas"]
)
def test_a_replay_adds_each_groups_c(row):
    out = {"out_element": "bf16"} if row_of(row).elements[-1].itemsize == 1 else {}
    case = make(row, SPREADS["uneven"], n=40, groups=4, beta=-0.5, epilogue="relu", **out)
    got = np.ascontiguousarray(case.run())
    weight = Sparse24Weight.compress(np.concatenate([one.dense for one in case.data]))
    operands = {"c": case.data[0].c, "offsets": np.array(SPREADS["uneven"], np.int32)}
    assert case.plan.replay(GemmSparse24Args(weight, case.data[0].x, got, **operands)).equal
    operands["c"] = np.roll(operands["c"], 1, axis=0)
    assert not case.plan.replay(GemmSparse24Args(weight, case.data[0].x, got, **operands)).equal


def problem_of(row: str) -> GemmSparse24Descriptor:
    return GemmSparse24Descriptor(n=8, groups=2, element=row_of(row).elements[-1], **PLAIN)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"x_order": "column"}, "x_order: expected row with groups, got column"),
        ({"y_order": "column"}, "y_order: expected row with groups, got column"),
        ({"n": 2**31}, "n: expected at most 2147483647 rows with groups"),
        (
            {"n": 41, "group_tokens": "counts"},
            "n: expected a multiple of groups, 4, with group_tokens counts",
        ),
        (
            {"groups": 0, "group_tokens": "counts"},
            "group_tokens: expected offsets without groups, got counts",
        ),
        ({"groups": -1}, "groups: Input should be greater than or equal to 0, got -1"),
    ],
)
def test_a_descriptor_of_groups_is_checked(fields, words):
    with pytest.raises(InvalidProblemError, match=words):
        GemmSparse24Descriptor(**{"n": 40, "groups": 4, "element": "bf16", **PLAIN, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"m": 72}, "needs m a multiple of 64 with groups, got 72"),
        ({"groups": 1025}, "serves at most 1024 groups, got 1025"),
        ({"element": "f32"}, ".*: serves elements f16, bf16, not f32"),
    ],
)
def test_kernels_say_which_groups_they_do_not_serve(fields, words):
    desc = GemmSparse24Descriptor(**{"n": 40, "groups": 4, "element": "bf16", **PLAIN, **fields})
    with pytest.raises(UnsupportedError, match=f"wgmma_sp_grouped.*{words}"):
        GemmSparse24Plan.select(desc, preference={"prefer_backend": "wgmma_sp"}, device="h200")
    assert GemmSparse24Plan.explain_choice(desc, device="h200").chosen == "inflate_strict"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_the_strict_kernel_serves_groups_on_other_gpus(capability, op):
    desc, gpu_there = problem_of("inflate_strict").model_copy(update={"op": op}), gpu_of(*capability)
    with pytest.raises(UnsupportedError, match=r"mma_sp.*: (serves no groups|does not serve op dgrad)"):
        GemmSparse24Plan.select(desc, preference={"prefer_backend": "mma_sp"}, device=gpu_there)
    assert GemmSparse24Plan.explain_choice(desc, device=gpu_there).chosen == "inflate_strict"


@pytest.mark.parametrize("row", KERNELS)
@pytest.mark.parametrize("group_tokens", ["offsets", "counts"])
@pytest.mark.parametrize("n", [8, 16, 24, 200, 16384])
def test_a_schedule_is_chosen_for_every_form_of_groups(row, group_tokens, n):
    desc = problem_of(row).model_copy(update={"n": n, "groups": 8, "group_tokens": group_tokens})
    plan = plan_of_row(row).select(desc, device="h200")
    assert plan.explain().chosen == row
    assert plan.explain().details.startswith("up to ")


def test_kernels_of_groups_leave_single_products_to_others():
    desc = problem_of("wgmma_sp_grouped").model_copy(update={"groups": 0})
    rows = {name: reason for name, _, reason in GemmSparse24Plan.explain_choice(desc, device="h200").rows}
    assert {rows[name] for name in KERNELS if "bf16" in row_of(name).elements} == {"serves groups only"}


@settings(max_examples=30)
@given(
    row=st.sampled_from(KERNELS),
    n=st.integers(1, 200),
    groups=st.integers(1, 300),
    m=st.integers(1, 90),
    k=st.integers(1, 250),
)
def test_k_is_split_only_if_all_tiles_run_at_once(row, n, groups, m, k):
    """Kernels that are batch-invariant never split it, whatever n is."""
    element = row_of(row).elements[0]
    desc = GemmSparse24Descriptor(n=n, m=64 * m, k=64 * k, element=element, groups=groups)
    schedule = GROUPED.best(desc, row_of(row))
    if schedule.split_k > 1:
        assert not row.endswith("_invariant")
        assert schedule.most_work_tiles(desc) * schedule.cluster <= 132 * schedule.ctas_per_sm
    elif row.endswith("_invariant"):
        assert split_schedules(desc, row_of(row)) == ()


def test_one_small_expert_has_many_sms():
    """The 4 row tiles of one token's expert alone would leave 128 SMs idle."""
    desc = GemmSparse24Descriptor(n=1, m=256, k=7040, element="bf16", groups=21)
    details = {
        batch_invariant: GemmSparse24Plan.select(
            desc, preference={"require": {"batch_invariant": batch_invariant}}, device="h200"
        )
        .explain()
        .details
        for batch_invariant in (False, True)
    }
    assert "on 32 CTAs, K in 8 slices" in details[False]
    assert "on 4 CTAs, K in 1 slices" in details[True]


@pytest.mark.parametrize("given", ["offsets", "counts"])
def test_the_operand_that_the_descriptor_does_not_name_is_refused(given):
    case = make("host_strict", SPREADS["even"], n=40, groups=4)
    args = replace(case.args, **{"offsets": None, "counts": None, given: np.zeros(4, np.int32)})
    words = {"offsets": r"offsets: expected shape \[5\], got \[4\]", "counts": "counts: expected None"}[given]
    with pytest.raises(InvalidProblemError, match=words):
        case.plan.run(args)


# On a GPU -----------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("row", [marked(name) for name in ON_A_GPU])
@pytest.mark.parametrize(
    ("groups", "n", "m", "k"), [(8, 1000, 256, 512), (300, 1500, 128, 192), (1024, 4096, 64, 64)]
)
def test_many_groups_and_large_tiles(row, groups, n, m, k):
    rng = np.random.default_rng()
    ends = np.sort(rng.integers(0, n + 1, groups + 1))
    run_and_check(row, ends, n=n, m=m, k=k, groups=groups, seed=int(rng.integers(2**32)), pad=16)


@gpu
@pytest.mark.parametrize("row", [marked(name) for name in ON_A_GPU])
def test_a_plan_of_many_groups_outlives_the_selection_of_fewer(row):
    """Both launch the same kernel, and the table of many groups takes more shared memory."""
    many = make(row, [0] + [40] * 300, n=40, groups=300)
    few = make(row, [0] + [40] * 50, n=40, groups=50)
    assert few.plan._kernel._function._function.ptr == many.plan._kernel._function._function.ptr
    for case in (many, few):
        case.check(case.run())


@gpu
def test_every_schedule_gives_the_same_bits():
    offsets, found = [0, 3, 50, 50, 120, 200], set()
    for schedule in schedules_for(200):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wgmma_sp_grouped.GROUPED, "best", lambda *_, one=schedule: one)
            plans._select.cache_clear()  # plans of the other schedules
            case = make("wgmma_sp_grouped", offsets, n=200, groups=5, m=320, k=448, epilogue="bias")
        assert f"{schedule.rows} rows x {schedule.tokens} tokens" in case.plan.explain().details
        got = case.run()
        case.check(got)
        found.add(got.tobytes())
    plans._select.cache_clear()
    assert len(found) == 1


@gpu
@pytest.mark.parametrize("row", [name for name in KERNELS if not name.endswith("_invariant")])
@pytest.mark.parametrize("epilogue", ["bias", "swiglu"])
@pytest.mark.parametrize(("n", "offsets"), [(2, [0, 1, 1, 2]), (11, [2, 2, 11, 11]), (64, [0, 7, 40, 63])])
def test_every_split_of_k_serves_groups_with_and_without_tokens(row, epilogue, n, offsets):
    """A cluster without a work tile ends, and the others store their own group's rows alone."""
    fields = {"n": n, "groups": 3, "m": 192, "k": 1568, "epilogue": epilogue, "pad": 16}
    fields |= {"out_element": "bf16"} if row.endswith("_s8") else {}
    tried = split_schedules(make(row, offsets, **fields).plan.descriptor, row_of(row))
    assert {one.split_k for one in tried} >= {2, 3, 4}
    for schedule in tried:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wgmma_sp_grouped.GROUPED, "best", lambda *_, one=schedule: one)
            plans._select.cache_clear()  # plans of the other schedules
            case = make(row, offsets, **fields)
        assert f"K in {schedule.split_k} slices" in case.plan.explain().details
        for spread in (offsets, [0, 0, 0, 0], [0, n, n, n], [0, 0, 0, n]):
            case.result.fill(
                np.full(case.result.view.shape, -1, f"i{case.plan.descriptor.out_element.itemsize}")
            )
            case.inputs[-1].fill(np.array(spread, np.int32))
            case.check(case.run())
    plans._select.cache_clear()


@gpu
@pytest.mark.parametrize("row", [marked(name) for name in ON_A_GPU])
def test_a_captured_launch_follows_new_offsets(row):
    import cupy

    case = make(row, SPREADS["even"], n=40, groups=4)
    bound, desc = case.plan.bind(case.args), case.plan.descriptor
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        bound.launch(stream=stream)
        graph = stream.end_capture()
    for spread in SPREADS.values():
        case.result.fill(np.full(case.result.view.shape, -1, f"i{desc.out_element.itemsize}"))
        case.inputs[-1].fill(np.array(spread, np.int32))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        case.check(case.result.numpy())
