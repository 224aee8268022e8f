"""Which row of the table serves which product where, what stands in the way of the others, and what it is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from sparse24_plans import (
    ArchSku,
    BackendUnavailableError,
    DeviceProperties,
    GemmOp,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    MathPrecision,
    MatrixOrder,
    OpCategory,
    PlanPreference,
    Sparse24Weight,
    Tier,
    UnsupportedError,
    explain,
)
from sparse24_plans.gemm import kernel_table
from sparse24_plans.plan import kernel_table as plan_table
from sparse24_plans.plan.arithmetic import Arithmetic
from sparse24_plans.plan.kernel import Choice

from ..sample_devices import AMPERE, HOPPER, HOST, PLACES, TURING, gpu_of
from .kernel_entries import MOST_TOKENS

HOPPER_BARE = gpu_of(9, 0, libraries=False)
STRICT = PlanPreference(require={"deterministic": True})

PROBLEM = GemmSparse24Descriptor(n=28, m=256, k=512, element="f32")
WEIGHT_BYTES = 256 * 512 * 4
PARTS_BYTES = 3 * 28 * 512 * 2
SIX_BOUND = (2 + 32 + 8) * 2.0**-24 / (1 - 42 * 2.0**-24)
STRICT_BOUND = 256 * 2.0**-24 / (1 - 256 * 2.0**-24)


def chosen(
    device: DeviceProperties, desc: GemmSparse24Descriptor = PROBLEM, **preference: object
) -> str | None:
    return explain(desc, preference=PlanPreference(**preference), device=device).chosen


def choose(device: DeviceProperties, **preference: object) -> kernel_table.GemmEntry:
    """Return the kernel that ``select`` chooses before it compiles."""
    wanted = PlanPreference(**preference)
    return plan_table.choose(plan_table.consider(kernel_table.ENTRIES, PROBLEM, wanted, device))


# The order of the table ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "preference", "kernel"),
    [
        (HOST, {}, "host_blas"),
        (HOST, {"require": {"batch_invariant": True}}, "host_strict"),
        (HOST, {"prefer_backend": "host"}, "host_blas"),
        (HOST, {"tier": "host"}, "host_blas"),
        (HOST, {"tier": "inflate"}, None),
        (HOST, {"prefer_backend": "inflate_strict"}, None),
        (HOST, {"max_workspace_bytes": 0}, "host_blas"),
        (TURING, {}, None),
        (AMPERE, {}, "inflate_cublas"),
        (HOPPER, {}, "f32_split6"),
        (HOPPER_BARE, {}, "f32_split6"),
        (HOPPER, {"tier": "inflate"}, "inflate_cublas"),
        (HOPPER, {"tier": "host"}, None),
        (HOPPER, {"tier": "sparse_tensor_core"}, "f32_split6"),
        (HOPPER, {"prefer_backend": "f32_split3"}, "f32_split3"),
        (
            HOPPER,
            {"prefer_backend": "f32_split6", "require": {"batch_invariant": True}},
            "f32_split6_invariant",
        ),
        (HOPPER, {"require": {"max_error_bound": 1e-4}}, "f32_split3"),
        (HOPPER, {"require": {"max_error_bound": 1e-4, "batch_invariant": True}}, "f32_split3_invariant"),
        (HOPPER, {"require": {"max_error_bound": 1e-5}}, "f32_split6"),
        (HOPPER, {"require": {"max_error_bound": SIX_BOUND}}, "f32_split6"),
        (HOPPER, {"require": {"math_precision": "bf16"}}, "f32_split6"),
        (HOPPER, {"require": {"math_precision": "f32"}}, "inflate_cublas"),
        (HOPPER, {"prefer_backend": "inflate_strict"}, "inflate_strict"),
        (HOPPER, {"prefer_backend": "inflate_strict", "tier": "host"}, None),
        (HOPPER, {"prefer_backend": "host"}, None),
        (HOPPER, {"prefer_backend": "cusparselt"}, None),
        (HOPPER, {"max_workspace_bytes": PARTS_BYTES}, "f32_split6"),
        (HOPPER, {"max_workspace_bytes": PARTS_BYTES - 1}, "inflate_strict"),
        (AMPERE, {"max_workspace_bytes": WEIGHT_BYTES}, "inflate_cublas"),
        (AMPERE, {"max_workspace_bytes": WEIGHT_BYTES - 1}, "inflate_strict"),
        (HOPPER, {"max_workspace_bytes": 0}, "inflate_strict"),
        (HOPPER, {"max_workspace_bytes": 0, "prefer_backend": "inflate_cublas"}, None),
        # 24 tokens need no workspace, so another kernel's bits would depend on n.
        (HOPPER, {"max_workspace_bytes": 0, "require": {"batch_invariant": True}}, None),
        (HOPPER, {"max_workspace_bytes": PARTS_BYTES - 1, "require": {"batch_invariant": True}}, None),
        (HOPPER, {"require": {"deterministic": True}}, "f32_split6"),
        (HOPPER, {"require": {"batch_invariant": True}}, "f32_split6_invariant"),
        (HOPPER, {"require": {"bit_stable_across_hardware": True}}, "inflate_strict"),
        (HOPPER, {"require": {"nonfinite": "propagates"}}, "inflate_cublas"),
        (HOPPER, {"require": {"nonfinite": "skips_pruned"}}, "f32_split6"),
        (HOPPER, {"require": {"nonfinite": "propagates", "batch_invariant": True}}, None),
        (HOPPER, {"require": {"subnormals": "flushed"}}, None),
        (HOPPER, {"require": {"math_precision": "tf32"}}, None),
        (HOPPER, {"require": {"accumulator": "f16"}}, None),
        (AMPERE, {"require": {"max_error_bound": STRICT_BOUND}}, "inflate_strict"),
        (AMPERE, {"require": {"max_error_bound": STRICT_BOUND * 0.999}}, None),
        (HOPPER, {"require": {"max_error_bound": SIX_BOUND * 0.999}}, None),
        (HOPPER, {"allow_sm90a": False}, "inflate_cublas"),
    ],
)
def test_what_is_chosen_for_float32(device, preference, kernel):
    assert chosen(device, **preference) == kernel


def test_the_error_bound_that_is_required_is_that_of_the_reduction():
    """K for ``forward``, M for ``dgrad``."""
    need = {"require": {"max_error_bound": 1000 * 2.0**-24}}
    wide = GemmSparse24Descriptor(n=1, m=8, k=4096, element="f32")
    tall = GemmSparse24Descriptor(n=1, m=4096, k=8, element="f32")
    backward = {"element": "f32", "op": "dgrad", "n": 1}
    assert chosen(HOST, wide, **need) is None
    assert chosen(HOST, tall, **need) == "host_blas"
    assert chosen(HOST, GemmSparse24Descriptor(m=8, k=4096, **backward), **need) == "host_blas"
    assert chosen(HOST, GemmSparse24Descriptor(m=4096, k=8, **backward), **need) is None


def test_the_workspace_that_is_allowed_counts_the_accumulators_of_an_epilogue():
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element="f32", epilogue="bias")
    needed = WEIGHT_BYTES + 16 * 256 * 4
    forced = {"prefer_backend": "inflate_cublas"}
    assert chosen(HOPPER, desc, max_workspace_bytes=needed, **forced) == "inflate_cublas"
    assert chosen(HOPPER, desc, max_workspace_bytes=needed - 1, **forced) is None


@pytest.mark.parametrize("allowed", [0, 5_000, 100_000, 10_000_000, None])
@pytest.mark.parametrize("order", list(MatrixOrder))
@pytest.mark.parametrize("element", ["f32", "bf16"])
@pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=str)
def test_no_batch_has_other_bits_for_want_of_workspace(device, element, order, allowed):
    """With batch invariance required, too little workspace may leave an n without a kernel."""
    wanted = PlanPreference(max_workspace_bytes=allowed, require={"batch_invariant": True})
    found = set()
    for n in (1, 2, 7, 16, 100, 1913, 4250):
        desc = GemmSparse24Descriptor(n=n, m=36, k=1024, element=element, x_order=order)
        explained = explain(desc, preference=wanted, device=device)
        if explained.chosen is not None:
            row = kernel_table.find(explained.chosen)
            found.add(row.promises(Choice(desc, device, row, wanted, {})).arithmetic or row.backend)
    assert len(found) <= 1


def test_select_says_which_kernel_it_has_too_little_workspace_for():
    wanted = {"max_workspace_bytes": PARTS_BYTES - 1, "require": {"batch_invariant": True}}
    with pytest.raises(
        UnsupportedError, match="inflate_strict: has other bits than f32_split6_invariant, to"
    ):
        choose(HOPPER, **wanted)


@pytest.mark.parametrize(
    ("alpha", "serves"),
    [(0.0, True), (-1.0, True), (2.0**20, True), (2.0**-20, True)]
    + [(alpha, False) for alpha in (2.34e37, -1e7, 1e-40, 9e-7)],
)
@pytest.mark.parametrize("op", list(GemmOp))
def test_cublas_gets_no_alpha_that_scales_operands_out_of_range(alpha, serves, op):
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element="bf16", op=op, alpha=alpha)
    assert (chosen(HOPPER, desc, prefer_backend="inflate_cublas") is not None) == serves
    assert chosen(HOPPER, desc) is not None


@pytest.mark.parametrize("element", ["i32", "u16", "u8"])
@pytest.mark.parametrize("device", PLACES, ids=str)
def test_elements_that_no_row_serves(device, element):
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element=element)
    assert chosen(device, desc) is None


@pytest.mark.parametrize(
    ("m", "n", "require", "row"),
    [
        (4096, 1, {}, "wgmma_sp"),
        (24000, 16, {}, "wgmma_sp"),
        (57344, 128, {}, "wgmma_sp"),
        (57344, 1, {"batch_invariant": True}, "wgmma_sp_invariant"),
        (57344, 17, {"batch_invariant": True}, "wgmma_sp_invariant"),
    ],
)
def test_which_tensor_core_kernel_takes_few_tokens(m, n, require, row):
    desc = GemmSparse24Descriptor(n=n, m=m, k=4096, element="bf16")
    assert chosen(HOPPER, desc, require=require) == row
    assert chosen(HOPPER, desc, require=require, allow_sm90a=False) == "mma_sp"
    assert chosen(AMPERE, desc, require=require) == "mma_sp"


@pytest.mark.parametrize(
    ("device", "element", "row"),
    [
        (HOPPER, "bf16", "wgmma_sp_invariant"),
        (AMPERE, "bf16", "mma_sp"),
        (HOPPER, "s8", "wgmma_sp_s8"),
        (HOPPER, "fp8_e4m3", "wgmma_sp_fp8_invariant"),
        (HOPPER, "f32", "f32_split6_invariant"),
        (AMPERE, "f32", "inflate_strict"),
        (HOST, "bf16", "host_strict"),
    ],
    ids=str,
)
def test_a_slice_of_a_weight_keeps_its_batch_invariant_kernel(device, element, row):
    part = GemmSparse24Descriptor(n=16, m=512, k=4096, element=element)
    whole = part.model_copy(update={"m": 4096})
    assert chosen(device, part, whole_m=4096) == row
    assert chosen(device, whole, require={"batch_invariant": True}) == row


# Reasons ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "preference", "row", "words"),
    [
        (TURING, {}, "inflate_strict", ("compute capability 8.0", "7.5")),
        (HOPPER, {}, "host_blas", ("host", "invented sm_90")),
        (HOST, {}, "inflate_cublas", ("CUDA device",)),
        (HOPPER_BARE, {}, "inflate_cublas", ("cuBLASLt", "pip install", "cuda12")),
        (HOPPER, {"prefer_backend": "host"}, "inflate_cublas", ("prefer_backend is host",)),
        (HOPPER, {"tier": "host"}, "inflate_cublas", ("tier is host",)),
        (
            HOPPER,
            {"max_workspace_bytes": 5},
            "inflate_cublas",
            (str(WEIGHT_BYTES), "max_workspace_bytes is 5"),
        ),
        (HOPPER, {"require": {"batch_invariant": True}}, "inflate_cublas", ("batch_invariant",)),
        (
            HOPPER,
            {"require": {"math_precision": "bf16"}},
            "inflate_strict",
            ("math_precision is f32", "bf16"),
        ),
        (HOPPER, {"require": {"max_error_bound": 1e-9}}, "inflate_strict", ("error_bound(512)", "1e-09")),
        (HOPPER, {"whole_m": 4096}, "inflate_cublas", ("not batch invariant", "whole_m")),
        (HOPPER, {"whole_m": 8}, "inflate_strict", ("m = 256 exceeds whole_m = 8",)),
    ],
)
def test_a_reason_names_what_stood_in_the_way(device, preference, row, words):
    answer = explain(PROBLEM, preference=PlanPreference(**preference), device=device)
    reason = {name: reason for name, _, reason in answer.rows}[row]
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    ("device", "preference"),
    [
        (TURING, {}),
        (HOST, {"tier": "inflate"}),
        (HOPPER, {"prefer_backend": "host"}),
        (HOPPER, {"require": {"subnormals": "flushed"}}),
        (HOPPER_BARE, {"prefer_backend": "cusparselt"}),
        (TURING.model_copy(update={"cublaslt": None}), {"prefer_backend": "inflate_cublas"}),
    ],
)
def test_unsupported_lists_the_reason_of_every_row(device, preference):
    answer = explain(PROBLEM, preference=PlanPreference(**preference), device=device)
    with pytest.raises(UnsupportedError) as caught:
        choose(device, **preference)
    assert len(answer.rows) == len(kernel_table.ENTRIES)
    for name, _, reason in answer.rows:
        assert says(caught.value, name, reason)
        assert str(caught.value).count(f": {reason};") <= 1


def says(error: BaseException, kernel: str, reason: str) -> bool:
    """Whether the error gives the reason for the kernel, alone or with others."""
    return re.search(rf"\b{kernel}(, \w+)*: {re.escape(reason)}", str(error)) is not None


def test_the_reasons_of_kernels_of_the_device_and_element_come_first():
    problem = GemmSparse24Descriptor(n=2, m=8, k=24, element="s8")
    first = r"problem\. wgmma_sp_s8: .*rows of X.*; cusparselt: needs n "
    with pytest.raises(UnsupportedError, match=first):
        GemmSparse24Plan.select(problem, device="h200")


def test_the_reason_of_the_forced_kernels_comes_before_that_of_all_others():
    with pytest.raises(UnsupportedError, match=r"^no kernel can serve this problem\. wgmma_sp, wgmma_sp_inv"):
        choose(HOST, prefer_backend="wgmma_sp")


@pytest.mark.parametrize("arithmetic", ["hopper_tc_f32x6/slices=8", "fma32_in_order"])
def test_an_arithmetic_and_too_little_workspace_are_refused_by_name(arithmetic):
    wanted = {"require": {"arithmetic": arithmetic}, "max_workspace_bytes": 0, "prefer_kernel": "f32_split6"}
    said = "needs a workspace of" if "x6" in arithmetic else "required fma32_in_order"
    with pytest.raises(UnsupportedError, match=f"f32_split6: .*{said}"):
        choose(HOPPER, **wanted)


def test_select_raises_what_choose_raises():
    preference = PlanPreference(prefer_backend="inflate_strict")
    with pytest.raises(
        UnsupportedError, match=r"inflate_strict.*: runs on a CUDA device, the plan is for host"
    ):
        GemmSparse24Plan.select(PROBLEM, preference=preference, device="host")


def test_what_can_be_installed_is_unavailable_and_not_unsupported():
    with pytest.raises(BackendUnavailableError, match="pip install") as caught:
        choose(HOPPER_BARE, prefer_backend="inflate_cublas")
    assert says(caught.value, "inflate_strict", "prefer_backend is inflate_cublas")


def test_libraries_that_would_not_help_are_not_named():
    with pytest.raises(UnsupportedError, match="max_workspace_bytes is 5") as caught:
        choose(HOPPER_BARE, prefer_backend="inflate_cublas", max_workspace_bytes=5)
    assert type(caught.value) is UnsupportedError


def test_what_can_be_installed_does_not_matter_where_another_row_serves():
    assert choose(gpu_of(8, 0, libraries=False)).name == "inflate_strict"
    assert choose(HOPPER_BARE).name == "f32_split6"


@pytest.mark.parametrize("backend", ["mma_sp", "wgmma_sp", "cusparselt"])
def test_a_forced_backend_that_cannot_serve(device, backend):
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    with pytest.raises(UnsupportedError) as caught:
        GemmSparse24Plan.select(desc, device=device, preference=PlanPreference(prefer_backend=backend))
    for row in ("inflate_cublas", "inflate_strict", "host_blas", "host_strict"):
        assert says(caught.value, row, f"prefer_backend is {backend}")


@pytest.mark.parametrize("element", ["u8", "i32"])
def test_an_element_that_no_row_serves(device, element):
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element=element, out_element=element)
    with pytest.raises(UnsupportedError, match=f"serves elements .*, not {element}"):
        GemmSparse24Plan.select(desc, device=device)


@pytest.mark.parametrize(("row", "most"), MOST_TOKENS.items())
def test_rows_for_few_tokens_leave_more_to_others(row, most):
    for n in (most, most + 1):
        desc = GemmSparse24Descriptor(n=n, m=4096, k=4096, element="bf16")
        reasons = {name: reason for name, _, reason in explain(desc, device=AMPERE).rows}
        assert reasons[row] == (f"is preferred for n <= {most}, not {n}" if n > most else None)


@pytest.mark.parametrize(
    ("backend", "change", "words"),
    [
        *(
            ("inflate_strict", {name: "column"}, "serves x_order and y_order row")
            for name in ("x_order", "y_order")
        ),
        *(
            (backend, change, "takes no scale_x or scale_w")
            for backend in ("inflate_cublas", "inflate_strict", "mma_sp")
            for change in ({"scale_x": "tensor"}, {"scale_w": "row"})
        ),
    ],
)
def test_kernels_that_serve_rows_alone_or_no_scales_say_so(backend, change, words):
    desc = GemmSparse24Descriptor(n=8, m=64, k=64, element="bf16", **change)
    answer = explain(desc, preference=PlanPreference(prefer_backend=backend), device=HOPPER)
    assert answer.chosen is None
    reasons = [reason for name, kind, reason in answer.rows if kind == backend and not name.endswith("fp8")]
    assert reasons == [words] * len(
        [row for row in kernel_table.ENTRIES if row.backend == backend and "bf16" in row.elements]
    )


# Limits of grids and libraries --------------------------------------------------------------------

MOST_TILES = 2**31 - 1


@pytest.mark.parametrize(
    ("problem", "serves"),
    [
        ({"n": 16, "m": 32 * MOST_TILES, "k": 8}, True),
        ({"n": 17, "m": 32 * MOST_TILES, "k": 8}, False),
        ({"n": 16, "m": 32 * MOST_TILES + 1, "k": 8}, False),
        ({"n": 2**19, "m": 2**20, "k": 2**40}, True),
        ({"n": 2**19, "m": 2**20, "k": 2**40, "op": "dgrad"}, False),
        ({"n": 2**40, "m": 0, "k": 2**20}, True),
        ({"n": 0, "m": 2**40, "k": 2**20}, True),
    ],
)
def test_a_strict_problem_with_more_tiles_than_a_grid_holds_is_unsupported(problem, serves):
    desc = GemmSparse24Descriptor(element="f32", **problem)
    kernel = chosen(HOPPER, desc, prefer_backend="inflate_strict")
    assert kernel == ("inflate_strict" if serves else None)


@pytest.mark.parametrize("name", ["n", "m", "k"])
def test_a_dimension_beyond_cublas_is_unsupported(name):
    sizes = {"n": 8, "m": 8, "k": 8}
    most = 2**31 - 8 if name == "k" else 2**31 - 1
    forced = {"prefer_backend": "inflate_cublas"}
    within = GemmSparse24Descriptor(element="bf16", **{**sizes, name: most})
    beyond = GemmSparse24Descriptor(element="bf16", **{**sizes, name: 2**31})
    assert chosen(HOPPER, within, **forced) == "inflate_cublas"
    answer = explain(beyond, preference=PlanPreference(**forced), device=HOPPER)
    assert answer.chosen is None
    assert f"{2**31}" in str(answer)


@pytest.mark.parametrize(("k", "serves"), [(4096, True), (4104, False)])
def test_a_weight_that_overflows_the_grid_of_the_inflate_kernel_is_unsupported(k, serves):
    """A block of it makes 16384 bytes: here a row of 4096 float32."""
    desc = GemmSparse24Descriptor(n=8, m=MOST_TILES, k=k, element="f32")
    assert (chosen(HOPPER, desc, prefer_backend="inflate_cublas") is not None) == serves


@pytest.mark.gpu
class TestWorkspaceLimits:
    def test_limit_at_selection(self):
        desc = GemmSparse24Descriptor(n=600, m=16, k=4096, element="f32")
        none = PlanPreference(max_workspace_bytes=0)
        assert GemmSparse24Plan.select(desc, device=0, preference=none).sku.backend == "inflate_strict"
        forced = none.model_copy(update={"prefer_backend": "inflate_cublas"})
        with pytest.raises(UnsupportedError, match="max_workspace_bytes"):
            GemmSparse24Plan.select(desc, device=0, preference=forced)

    def test_limit_is_kept(self):
        desc = GemmSparse24Descriptor(n=6, m=16, k=32, element="f16", epilogue="bias")
        forced = PlanPreference(prefer_backend="inflate_cublas")
        free = GemmSparse24Plan.select(desc, device=0, preference=forced).workspace_size()
        for limit in (free, 1 << 20, 5000):
            preference = forced.model_copy(update={"max_workspace_bytes": limit})
            assert GemmSparse24Plan.select(desc, device=0, preference=preference).workspace_size() <= limit


# Plans --------------------------------------------------------------------------------------------


def test_a_plan_is_the_first_row_that_can_serve():
    for preference, row in ((PlanPreference(), "host_blas"), (STRICT, "host_strict")):
        plan = GemmSparse24Plan.select(PROBLEM, device="host", preference=preference)
        about = plan.explain()
        assert about.chosen == row
        assert (
            about.details
            == {
                "host_blas": "NumPy, BLAS",
                "host_strict": "NumPy, emulated float32 fma",
            }[row]
        )
        able = [name for name, _, reason in about.rows if reason is None]
        assert able == {"host_blas": ["host_blas", "host_strict"], "host_strict": ["host_strict"]}[row]


@pytest.mark.parametrize(("n", "alphas"), [(2, (0.0, -0.0)), (3, (-0.0, 0.0))])
def test_no_plan_depends_on_what_was_selected_before(n, alphas):
    """The two zeros are equal as numbers, but products with them differ in a bit."""
    weight = Sparse24Weight.prune_compress(np.ones((8, 8), np.float32))
    for alpha in alphas:
        desc = GemmSparse24Descriptor(n=n, m=8, k=8, element="f32", alpha=alpha)
        plan = GemmSparse24Plan.select(desc, device="host", preference=STRICT)
        y = np.full((n, 8), np.nan, np.float32)
        plan.run(GemmSparse24Args(weight, np.ones((n, 8), np.float32), y))
        assert (np.signbit(y) == np.signbit(desc.alpha)).all()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("op", GemmOp)
@pytest.mark.parametrize("element", ["f32", "bf16", "s8"])
def test_a_sku_says_what_the_kernel_is(op, element, strict):
    epilogue = "bias_silu" if op is GemmOp.FORWARD else "identity"
    desc = GemmSparse24Descriptor(
        n=2, m=8, k=16, element=element, op=op, epilogue=epilogue, out_element="f32"
    )
    plan = GemmSparse24Plan.select(desc, device="host", preference=STRICT if strict else None)
    sku = plan.sku
    assert plan.explain().chosen == ("host_strict" if strict else "host_blas")
    assert (sku.category, sku.op) == (OpCategory.GEMM, f"gemm_sparse24_{op}")
    assert (sku.element, sku.aux_element, sku.epilogue) == (element, "f32", epilogue)
    layout = "canonical" if strict else "dense_f32"
    assert (sku.layout, sku.arch, sku.backend) == (layout, ArchSku.ANY, "host")
    assert plan.tier is Tier.HOST
    integer = element == "s8"
    promised = {
        "math_precision": MathPrecision.INT8 if integer else MathPrecision.F32,
        "accumulator": "i32" if integer else "f32",
        "subnormals": "preserved",
        "nonfinite": "skips_pruned" if strict else "propagates",
        "unit_roundoff": 0 if integer else 2.0**-24,
        "terms_per_k": 0.5 if strict and op is GemmOp.FORWARD else 1,
        "promoted_every": None,
        "product_roundoff": 0,
        "tanh_error": 0,
        "arithmetic": ("exact_sum" if integer else "fma32_in_order") if strict else None,
        **dict.fromkeys(
            (
                "deterministic",
                "bit_stable_on_same_hardware",
                "batch_invariant",
                "bit_stable_across_hardware",
            ),
            strict,
        ),
    }
    for said in (sku.precision_guarantee, plan.guarantee):
        assert said.model_dump() == promised


@pytest.mark.parametrize(
    ("row", "element", "layout", "arch"),
    [
        ("mma_sp", "bf16", "tile64x128_16bit_v1", "sm80"),
        ("mma_sp_many", "f16", "tile64x128_16bit_v1", "sm80"),
        ("wgmma_sp", "bf16", "tile64x128_16bit_v1", "sm90a"),
        ("wgmma_sp_invariant", "f16", "tile64x128_16bit_v1", "sm90a"),
        ("wgmma_sp_s8", "s8", "tile64x256_8bit_v1", "sm90a"),
        ("wgmma_sp_fp8", "fp8_e4m3", "tile64x256_8bit_v1", "sm90a"),
        ("wgmma_sp_fp8_invariant", "fp8_e4m3", "tile64x256_8bit_v1", "sm90a"),
        ("wgmma_sp_fp8_promoted", "fp8_e4m3", "tile64x256_8bit_v1", "sm90a"),
        ("cusparselt", "s8", "cusparselt_blob", "sm80"),
        ("inflate_cublas", "f32", "canonical", "any"),
        ("inflate_strict", "f32", "canonical", "any"),
    ],
)
def test_kernels_of_one_element_and_architecture_share_a_layout(row, element, layout, arch):
    spec = kernel_table.find(row)
    assert element in spec.elements
    assert (spec.layout, spec.arch) == (layout, arch)


# Explanations -------------------------------------------------------------------------------------


def test_an_explanation_reads_as_one_line_a_row():
    lines = str(explain(PROBLEM, device=HOPPER)).splitlines()
    assert lines[0] == "device: cuda:0 (invented sm_90)"
    assert lines[1].startswith("chosen: f32_split6  X in 3 bf16 terms, ")
    assert len(lines) == 2 + len(kernel_table.ENTRIES)
    by_row = {line.split()[0]: line for line in lines[2:]}
    assert by_row["f32_split6"] == "  f32_split6 (f32_split6): chosen"
    assert "max_error_bound" in by_row["f32_split3"]
    assert (
        by_row["inflate_strict"]
        == "  inflate_strict (inflate_strict): can serve; a kernel above it was preferred"
    )
    assert by_row["host_blas"].startswith("  host_blas (host): runs on the host")
    assert by_row["mma_sp"] == "  mma_sp (mma_sp): serves elements f16, bf16, not f32"


def test_an_explanation_of_what_can_be_installed():
    answer = explain(PROBLEM, device=HOPPER_BARE)
    rows = {name: (backend, reason) for name, backend, reason in answer.rows}
    assert answer.chosen == "f32_split6"
    assert rows["inflate_strict"] == ("inflate_strict", None)
    assert "pip install" in rows["inflate_cublas"][1]


# Rows ---------------------------------------------------------------------------------------------


def test_every_row_has_a_name_of_its_own_and_a_backend_module():
    folder = Path(kernel_table.__file__).parent / "backends"
    names = [spec.name for spec in kernel_table.ENTRIES]
    assert len(set(names)) == len(names)
    for spec in kernel_table.ENTRIES:
        assert (folder / f"{spec.module}.py").is_file()


@pytest.mark.parametrize("spec", kernel_table.ENTRIES, ids=lambda spec: spec.name)
def test_a_row_serves_somewhere_and_guarantees_for_all_it_serves(spec):
    device = HOST if spec.tier == "host" else gpu_of(*spec.min_compute_capability)
    for element in spec.elements:
        for op in spec.ops:
            sizes = {"n": 16, "m": 256, "k": 512, "groups": spec.least_groups}
            desc = GemmSparse24Descriptor(**sizes, element=element, op=op)
            require = {"arithmetic": str(Arithmetic.hopper(element, 2))} if spec.on_request else {}
            if spec.for_a_bound:
                require = {"max_error_bound": 1e-3}
            rows = explain(desc, preference={"require": require}, device=device).rows
            assert (spec.name, spec.backend, None) in rows
            assert spec.guarantee(desc).error_bound(desc.reduction) < 1
