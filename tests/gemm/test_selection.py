"""Selection is one table: pure, explained, and the same answer every time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BackendKind,
    BackendUnavailableError,
    DeviceProperties,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    InvalidProblemError,
    PlanPreference,
    Sparse24Weight,
    Tier,
    UnsupportedError,
    explain,
)
from sparse24_plans.gemm import table
from sparse24_plans.plan import table as plan_table
from sparse24_plans.vocab import ArchSku, GemmOp, MathPrecision, OpCategory

from ..test_vocab import requirements

HOST = DeviceProperties(kind="host")


def gpu_of(major: int, minor: int, *, cublaslt: bool = True) -> DeviceProperties:
    """A GPU that needn't be here."""
    return DeviceProperties(
        kind="cuda",
        name=f"invented sm_{major}{minor}",
        compute_capability=(major, minor),
        multiprocessors=100,
        cublaslt="120900" if cublaslt else None,
        cusparselt="0.8.0" if cublaslt else None,
    )


TURING, AMPERE, HOPPER = gpu_of(7, 5), gpu_of(8, 0), gpu_of(9, 0)
HOPPER_BARE = gpu_of(9, 0, cublaslt=False)
PLACES = (HOST, TURING, AMPERE, gpu_of(8, 0, cublaslt=False), HOPPER, HOPPER_BARE, gpu_of(12, 0))

STRICT = PlanPreference(require={"deterministic": True})

# float32 has no sparse-tensor-core kernel, so what follows is about the host and the inflate tier alone.
PROBLEM = GemmSparse24Descriptor(n=16, m=256, k=512, element="f32")
WEIGHT_BYTES = 256 * 512 * 4
STRICT_BOUND = 256 * 2.0**-24 / (1 - 256 * 2.0**-24)


def chosen(
    device: DeviceProperties, desc: GemmSparse24Descriptor = PROBLEM, **preference: object
) -> str | None:
    return explain(desc, preference=PlanPreference(**preference), device=device).chosen


def choose(device: DeviceProperties, **preference: object) -> table.GemmRow:
    """What ``select`` does before it compiles."""
    wanted = PlanPreference(**preference)
    return plan_table.choose(plan_table.consider(table.ROWS, PROBLEM, wanted, device))


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
        (HOPPER, {}, "inflate_cublas"),
        (HOPPER_BARE, {}, "inflate_strict"),
        (HOPPER, {"tier": "inflate"}, "inflate_cublas"),
        (HOPPER, {"tier": "host"}, None),
        (HOPPER, {"tier": "sparse_tensor_core"}, None),
        (HOPPER, {"prefer_backend": "inflate_strict"}, "inflate_strict"),
        (HOPPER, {"prefer_backend": "inflate_strict", "tier": "host"}, None),
        (HOPPER, {"prefer_backend": "host"}, None),
        (HOPPER, {"prefer_backend": "cusparselt"}, None),
        (HOPPER, {"max_workspace_bytes": WEIGHT_BYTES}, "inflate_cublas"),
        (HOPPER, {"max_workspace_bytes": WEIGHT_BYTES - 1}, "inflate_strict"),
        (HOPPER, {"max_workspace_bytes": 0}, "inflate_strict"),
        (HOPPER, {"max_workspace_bytes": 0, "prefer_backend": "inflate_cublas"}, None),
        (HOPPER, {"require": {"deterministic": True}}, "inflate_cublas"),
        (HOPPER, {"require": {"batch_invariant": True}}, "inflate_strict"),
        (HOPPER, {"require": {"bit_stable_across_hardware": True}}, "inflate_strict"),
        (HOPPER, {"require": {"nonfinite": "propagates"}}, "inflate_cublas"),
        (HOPPER, {"require": {"nonfinite": "skips_pruned"}}, "inflate_strict"),
        (HOPPER, {"require": {"nonfinite": "propagates", "batch_invariant": True}}, None),
        (HOPPER, {"require": {"subnormals": "flushed"}}, None),
        (HOPPER, {"require": {"math_precision": "tf32"}}, None),
        (HOPPER, {"require": {"accumulator": "f16"}}, None),
        (HOPPER, {"require": {"max_error_bound": STRICT_BOUND}}, "inflate_strict"),
        (HOPPER, {"require": {"max_error_bound": STRICT_BOUND * 0.999}}, None),
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


@pytest.mark.parametrize("element", ["fp8_e5m2", "i32", "u16", "u8"])
@pytest.mark.parametrize("device", PLACES, ids=str)
def test_elements_that_no_row_serves(device, element):
    desc = GemmSparse24Descriptor(n=16, m=256, k=512, element=element)
    assert chosen(device, desc) is None


@pytest.mark.parametrize(
    ("m", "n", "require", "row"),
    [
        (30000, 16, {}, "wgmma_sp"),  # 4.7 waves of 64-row blocks
        (24000, 16, {}, "mma_sp"),  # 3.75 waves
        (24000, 17, {}, "wgmma_sp"),
        (4096, 16, {}, "wgmma_sp"),  # less than a wave
        (7000, 16, {}, "wgmma_sp"),  # 1.1 waves
        (57344, 16, {}, "wgmma_sp"),  # 9 waves
        (57344, 16, {"batch_invariant": True}, "mma_sp_few"),
        (57344, 17, {"batch_invariant": True}, "wgmma_sp_invariant"),
    ],
)
def test_which_tensor_core_kernel_takes_few_tokens(m, n, require, row):
    desc = GemmSparse24Descriptor(n=n, m=m, k=4096, element="bf16")
    assert chosen(HOPPER, desc, require=require) == row
    assert chosen(AMPERE, desc, require=require) == ("mma_sp" if n <= 16 else "mma_sp_batch")


# Reasons ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "preference", "row", "words"),
    [
        (TURING, {}, "inflate_strict", ("compute capability", "(8, 0)", "(7, 5)")),
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
    assert len(answer.rows) == len(table.ROWS)
    for name, _, reason in answer.rows:
        assert f"{name}: {reason}" in str(caught.value)


def test_select_raises_what_choose_raises():
    preference = PlanPreference(prefer_backend="inflate_strict")
    with pytest.raises(UnsupportedError, match="inflate_strict: runs on a CUDA device, the plan is for host"):
        GemmSparse24Plan.select(PROBLEM, preference=preference, device="host")


def test_what_can_be_installed_is_unavailable_and_not_unsupported():
    with pytest.raises(BackendUnavailableError, match="pip install") as caught:
        choose(HOPPER_BARE, prefer_backend="inflate_cublas")
    assert "inflate_strict: prefer_backend is inflate_cublas" in str(caught.value)


def test_what_can_be_installed_does_not_matter_where_another_row_serves():
    assert choose(HOPPER_BARE).name == "inflate_strict"


# Properties of every answer -----------------------------------------------------------------------

problems = st.builds(
    GemmSparse24Descriptor,
    n=st.sampled_from([0, 1, 16, 129, 2**20, 2**31]),
    m=st.sampled_from([0, 8, 4096, 2**31]),
    k=st.sampled_from([0, 8, 4096, 2**31]),
    element=st.sampled_from(ElementKind),
    op=st.sampled_from(GemmOp),
)
preferences = st.builds(
    PlanPreference,
    max_workspace_bytes=st.none() | st.integers(0, 2**40),
    allow_sm90a=st.booleans(),
    prefer_backend=st.none() | st.sampled_from(BackendKind),
    tier=st.none() | st.sampled_from(Tier),
    require=st.just(GuaranteeRequirement()) | requirements,
)
places = st.sampled_from(PLACES)


@given(desc=problems, preference=preferences, device=places)
def test_every_row_can_serve_or_says_why_not_and_the_first_that_can_is_chosen(desc, preference, device):
    answer = explain(desc, preference=preference, device=device)
    assert [(name, backend) for name, backend, _ in answer.rows] == [
        (spec.name, spec.backend) for spec in table.ROWS
    ]
    assert all(reason is None or reason.strip() for _, _, reason in answer.rows)
    assert answer.chosen == next((name for name, _, reason in answer.rows if reason is None), None)
    assert explain(desc, preference=preference, device=device) == answer


@settings(max_examples=200)
@given(desc=problems, preference=preferences, device=places)
def test_a_row_that_can_serve_is_all_that_was_asked_for(desc, preference, device):
    able = {
        name for name, _, reason in explain(desc, preference=preference, device=device).rows if reason is None
    }
    for spec in table.ROWS:
        if spec.name not in able:
            continue
        guarantee, require = spec.guarantee(desc), preference.require
        assert preference.prefer_backend in (None, spec.backend)
        assert preference.tier in (None, spec.tier)
        assert (spec.tier == "host") == (device.kind == "host")
        assert device.compute_capability >= spec.min_compute_capability
        assert desc.element in spec.elements
        assert desc.op in spec.ops
        assert preference.allow_sm90a or spec.arch is not ArchSku.SM90A
        if preference.max_workspace_bytes is not None:
            assert spec.min_workspace(desc) <= preference.max_workspace_bytes
        for name in type(require).model_fields:
            wanted = getattr(require, name)
            if name == "max_error_bound":
                assert wanted is None or guarantee.error_bound(desc.reduction) <= wanted
            elif wanted not in (None, False):
                assert getattr(guarantee, name) == wanted


@given(desc=problems, preference=preferences, device=places)
def test_allow_sm90a_touches_only_rows_that_need_it(desc, preference, device):
    answers = [
        explain(desc, preference=preference.model_copy(update={"allow_sm90a": flag}), device=device).rows
        for flag in (True, False)
    ]
    for spec, with_it, without in zip(table.ROWS, *answers, strict=True):
        if spec.arch is not ArchSku.SM90A:
            assert with_it == without


@given(desc=problems, device=places)
def test_a_filter_never_adds_a_row(desc, device):
    free = {name for name, _, reason in explain(desc, device=device).rows if reason is None}
    for preference in (
        PlanPreference(tier="inflate"),
        PlanPreference(max_workspace_bytes=0),
        PlanPreference(require={"deterministic": True}),
        PlanPreference(allow_sm90a=False),
    ):
        rows = explain(desc, preference=preference, device=device).rows
        assert {name for name, _, reason in rows if reason is None} <= free


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


# Plans --------------------------------------------------------------------------------------------


def test_equal_arguments_are_one_plan():
    again = GemmSparse24Descriptor.model_validate_json(PROBLEM.model_dump_json())
    preference = PlanPreference.model_validate_json(PlanPreference().model_dump_json())
    plan = GemmSparse24Plan.select(PROBLEM, device="host")
    assert GemmSparse24Plan.select(again, device="host") is plan
    assert GemmSparse24Plan.select(again, device="cpu", preference=preference) is plan
    other = GemmSparse24Plan.select(GemmSparse24Descriptor(n=17, m=256, k=512, element="f32"), device="host")
    assert other is not plan
    assert other.descriptor.n == 17


def test_a_plan_is_the_first_row_that_can_serve():
    for preference in (PlanPreference(), PlanPreference(require={"batch_invariant": True})):
        plan = GemmSparse24Plan.select(PROBLEM, device="host", preference=preference)
        answer = explain(PROBLEM, preference=preference, device="host")
        assert plan.explain().chosen == answer.chosen
        assert plan.explain().rows == answer.rows


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


@pytest.mark.parametrize("op", GemmOp)
@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_a_sku_says_what_the_kernel_is(op, element):
    epilogue = "bias_silu" if op is GemmOp.FORWARD else "identity"
    desc = GemmSparse24Descriptor(
        n=2, m=8, k=16, element=element, op=op, epilogue=epilogue, out_element="f32"
    )
    plan = GemmSparse24Plan.select(desc, device="host", preference=STRICT)
    sku = plan.sku
    assert sku.category is OpCategory.GEMM
    assert sku.op == f"gemm_sparse24_{op}"
    assert (sku.element, sku.aux_element, sku.epilogue) == (element, "f32", epilogue)
    assert (sku.layout, sku.arch, sku.backend) == ("canonical", ArchSku.ANY, BackendKind.HOST)
    assert sku.precision_guarantee == plan.guarantee
    assert plan.guarantee.math_precision is MathPrecision.F32
    assert plan.tier is Tier.HOST
    assert plan.sku is sku


@pytest.mark.parametrize("require", [{}, {"batch_invariant": True}])
def test_the_workspace_size_is_constant_for_the_plans_life(require):
    desc = GemmSparse24Descriptor(n=2, m=8, k=16, element="f32")
    plan = GemmSparse24Plan.select(desc, device="host", preference=PlanPreference(require=require))
    sizes = {plan.workspace_size()}
    weight = Sparse24Weight.prune_compress(np.ones((8, 16), np.float32))
    for stride in (8, 24):
        y = np.zeros((2, stride), np.float32)[:, :8]
        plan.run(GemmSparse24Args(plan.pack(weight), np.ones((2, 16), np.float32), y))
        sizes.add(plan.workspace_size())
    assert sizes == {0}
    assert plan.explain().workspace_size == 0


# Explanations -------------------------------------------------------------------------------------


def test_an_explanation_reads_as_one_line_a_row():
    lines = str(explain(PROBLEM, device=HOPPER)).splitlines()
    assert lines[0] == "device: cuda:0 (invented sm_90)"
    assert lines[1] == "chosen: inflate_cublas"
    assert len(lines) == 2 + len(table.ROWS)
    by_row = {line.split()[0]: line for line in lines[2:]}
    assert by_row["inflate_cublas"] == "  inflate_cublas (inflate_cublas): chosen"
    assert (
        by_row["inflate_strict"]
        == "  inflate_strict (inflate_strict): can serve; a row above it was preferred"
    )
    assert by_row["host_blas"].startswith("  host_blas (host): runs on the host")


def test_an_explanation_says_when_nothing_serves():
    answer = explain(PROBLEM, device=TURING)
    assert (answer.chosen, answer.workspace_size) == (None, None)
    assert "chosen: none" in str(answer).splitlines()


def test_a_plan_explains_its_kernel_too():
    plan = GemmSparse24Plan.select(PROBLEM, device="host")
    lines = str(plan.explain()).splitlines()
    assert lines[0] == "device: host"
    assert lines[1].startswith("chosen: host_blas  NumPy")


def test_an_explanation_is_plain_json():
    answer = json.loads(explain(PROBLEM, device=HOPPER_BARE).model_dump_json())
    assert answer["chosen"] == "inflate_strict"
    assert answer["device"] == "cuda:0 (invented sm_90)"
    rows = {name: (backend, reason) for name, backend, reason in answer["rows"]}
    assert rows["inflate_strict"] == ("inflate_strict", None)
    assert "pip install" in rows["inflate_cublas"][1]


@pytest.mark.parametrize("descriptor", [None, "f32", {"n": 1, "m": 8, "k": 8, "element": "f32"}])
def test_what_is_no_descriptor(descriptor):
    for ask in (explain, GemmSparse24Plan.select):
        with pytest.raises(InvalidProblemError, match="descriptor: expected"):
            ask(descriptor, device="host")


def test_a_preference_may_be_a_mapping():
    mapped = GemmSparse24Plan.select(PROBLEM, preference={"require": {"deterministic": True}}, device="host")
    typed = PlanPreference(require=GuaranteeRequirement(deterministic=True))
    assert mapped is GemmSparse24Plan.select(PROBLEM, preference=typed, device="host")


@pytest.mark.parametrize("preference", ["fast", 3, GuaranteeRequirement()])
def test_what_is_no_preference(preference):
    for ask in (explain, GemmSparse24Plan.select):
        with pytest.raises(InvalidProblemError, match="preference: expected PlanPreference"):
            ask(PROBLEM, preference=preference, device="host")


@pytest.mark.parametrize("device", ["gpu", -1, 1.5, True, object()])
def test_what_is_no_device(device):
    with pytest.raises(InvalidProblemError, match="device"):
        explain(PROBLEM, device=device)


# Rows ---------------------------------------------------------------------------------------------


def test_every_row_has_a_name_of_its_own_and_a_backend_module():
    folder = Path(table.__file__).parent / "backends"
    names = [spec.name for spec in table.ROWS]
    assert len(set(names)) == len(names)
    for spec in table.ROWS:
        assert (folder / f"{spec.backend}.py").is_file()


@pytest.mark.parametrize("spec", table.ROWS, ids=lambda spec: spec.name)
def test_a_row_serves_somewhere_and_guarantees_for_all_it_serves(spec):
    device = HOST if spec.tier == "host" else gpu_of(*spec.min_compute_capability)
    for element in spec.elements:
        for op in spec.ops:
            desc = GemmSparse24Descriptor(n=16, m=256, k=512, element=element, op=op)
            rows = explain(desc, device=device).rows
            assert (spec.name, spec.backend, None) in rows
            assert spec.guarantee(desc).error_bound(desc.reduction) < 1
