"""Which row of the table serves which product where, what stands in the way of the others, and what it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparse24_plans import (
    ArchSku,
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


def test_the_required_error_bound_is_that_of_the_reduction():
    """K for ``forward``, M for ``dgrad``."""
    need = {"require": {"max_error_bound": 1000 * 2.0**-24}}
    wide = GemmSparse24Descriptor(n=1, m=8, k=4096, element="f32")
    tall = GemmSparse24Descriptor(n=1, m=4096, k=8, element="f32")
    backward = {"element": "f32", "op": "dgrad", "n": 1}
    assert chosen(HOST, wide, **need) is None
    assert chosen(HOST, tall, **need) == "host_blas"
    assert chosen(HOST, GemmSparse24Descriptor(m=8, k=4096, **backward), **need) == "host_blas"
    assert chosen(HOST, GemmSparse24Descriptor(m=4096, k=8, **backward), **need) is None


@pytest.mark.parametrize(("n", "m"), [(2, 0), (0, 8)])
def test_an_empty_result_needs_no_workspace_to_transpose_x(n, m):
    desc = GemmSparse24Descriptor(n=n, m=m, k=512, element="bf16", x_order="column")
    assert chosen(HOPPER, desc, max_workspace_bytes=0) == chosen(HOPPER, desc) == "wgmma_sp"


def test_allowed_workspace_counts_accumulators_of_an_epilogue():
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


INVARIANT = {"require": {"batch_invariant": True}}


@pytest.mark.parametrize(
    ("m", "whole_m", "more", "of_whole", "of_part"),
    [
        (352, 2816, {"groups": 64}, "wgmma_sp_grouped_invariant", None),
        (64, 96, {"groups": 64}, "inflate_strict", "inflate_strict"),
        (704, 2816, {"groups": 64}, "wgmma_sp_grouped_invariant", "wgmma_sp_grouped_invariant"),
        (96, 192, {"batches": 4}, "wgmma_sp_invariant", None),
        (64, 96, {"batches": 4}, "inflate_strict", "inflate_strict"),
        (96, 192, {"batches": 4, "element": "fp8_e4m3"}, "wgmma_sp_fp8_invariant", None),
        (64, 96, {"batches": 4, "element": "fp8_e4m3"}, "inflate_strict_fp8", "inflate_strict_fp8"),
    ],
)
def test_slice_of_a_weight_has_kernel_with_bits_of_whole(m, whole_m, more, of_whole, of_part):
    whole = GemmSparse24Descriptor(**{"n": 16, "m": whole_m, "k": 256, "element": "bf16", **more})
    part = whole.model_copy(update={"m": m})
    assert chosen(HOPPER, whole, **INVARIANT) == of_whole
    assert chosen(HOPPER, part, **INVARIANT, whole_m=whole_m) == of_part
    if of_part is None:
        wanted = PlanPreference(**INVARIANT, whole_m=whole_m)
        with pytest.raises(UnsupportedError, match=f"other bits than {of_whole}, which serves the whole"):
            GemmSparse24Plan.select(part, preference=wanted, device=HOPPER)


@pytest.mark.parametrize("allowed", [0, 20_000, 200_000, 2_000_000, None])
@pytest.mark.parametrize("n", [1, 16, 100])
def test_workspace_for_a_slice_alone_does_not_change_its_bits(n, allowed):
    wanted = {**INVARIANT, "max_workspace_bytes": allowed}
    whole = GemmSparse24Descriptor(n=n, m=8192, k=4096, element="f32")
    found = chosen(HOPPER, whole, **wanted)
    part = chosen(HOPPER, whole.model_copy(update={"m": 1024}), **wanted, whole_m=8192)
    assert part == found or found is None


@pytest.mark.parametrize("device", [AMPERE, HOPPER], ids=str)
def test_kernels_for_few_and_many_tokens_give_slices_equal_bits(device):
    whole = GemmSparse24Descriptor(n=200, m=16384, k=4096, element="bf16")
    part, wanted = whole.model_copy(update={"m": 1024}), {**INVARIANT, "allow_sm90a": False}
    assert chosen(device, whole, **wanted) == "mma_sp"
    assert chosen(device, part, **wanted, whole_m=16384) == "mma_sp_many"


@pytest.mark.parametrize(("whole_m", "epilogue"), [(100, "swiglu"), (2**60, "identity")])
def test_a_whole_weight_that_cannot_be_is_refused_by_name(whole_m, epilogue):
    part = GemmSparse24Descriptor(n=16, m=64, k=256, element="bf16", epilogue=epilogue)
    with pytest.raises(UnsupportedError, match=f"no weight of such a problem has whole_m = {whole_m} rows"):
        GemmSparse24Plan.select(part, preference={**INVARIANT, "whole_m": whole_m}, device=HOPPER)


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


def test_every_row_has_name_of_its_own_and_backend_module():
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
