"""The names that other tools read, the models that carry them, and the error tree."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    BackendKind,
    BackendUnavailableError,
    BufferTooSmallError,
    DeviceProperties,
    DriverError,
    ElementKind,
    EpilogueKind,
    FormatError,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    InvalidProblemError,
    KernelSku,
    MisalignedOperandError,
    PlanPreference,
    PrecisionGuarantee,
    Sparse24Error,
    StorageError,
    Tier,
    UnsupportedError,
    WorkspaceTooSmallError,
    explain,
)
from sparse24_plans.plan.explanation import Explanation
from sparse24_plans.vocab import ArchSku, GemmOp, MathPrecision, MatrixOrder, Model, OpCategory, ScaleKind

# Enums --------------------------------------------------------------------------------------------

WORDS = {
    ElementKind: "f32 f16 bf16 s8 fp8_e4m3 fp8_e5m2 i32 u16 u8",
    MathPrecision: "f32 tf32 f16 bf16 int8 fp8_e4m3 fp8_e5m2",
    EpilogueKind: "identity bias bias_relu bias_gelu bias_silu bias_gelu_tanh",
    GemmOp: "forward dgrad",
    OpCategory: "gemm prune compress decompress pack",
    ArchSku: "any sm80 sm89 sm90a sm100 sm120",
    Tier: "host inflate sparse_tensor_core",
    BackendKind: "host inflate_strict inflate_cublas mma_sp wgmma_sp cusparselt prune decompress pack "
    "tile_prune",
}
every_enum = pytest.mark.parametrize("enum", WORDS, ids=lambda enum: enum.__name__)
every_word = pytest.mark.parametrize("word", [word for enum in WORDS for word in enum], ids=repr)


@every_enum
def test_names_and_values_are_exactly_these(enum):
    values = WORDS[enum].split()
    assert [member.value for member in enum] == values
    assert list(enum.__members__) == [value.upper() for value in values]


@every_word
def test_a_word_is_its_string(word):
    assert str(word) == f"{word}" == json.loads(json.dumps(word)) == word.value
    assert word == word.value
    assert {word.value: 1}[word] == 1
    assert type(word)(word.value) is word


BITS = {
    "f32": ("float32", 4),
    "f16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "s8": ("int8", 1),
    "fp8_e4m3": ("float8_e4m3fn", 1),
    "fp8_e5m2": ("float8_e5m2", 1),
    "i32": ("int32", 4),
    "u16": ("uint16", 2),
    "u8": ("uint8", 1),
}
SIGNIFICAND_BITS = {"f32": 24, "f16": 11, "bf16": 8, "fp8_e4m3": 4, "fp8_e5m2": 3}
SMALLEST = {"f32": -149, "f16": -24, "bf16": -133, "fp8_e4m3": -9, "fp8_e5m2": -16}


@pytest.mark.parametrize("kind", ElementKind)
def test_elements_describe_their_bits(kind):
    name, itemsize = BITS[kind]
    assert kind.dtype.name == name
    assert kind.itemsize == kind.dtype.itemsize == itemsize
    assert kind.bits_dtype == f"u{itemsize}"
    if kind in SIGNIFICAND_BITS:
        assert kind.unit_roundoff == 2.0 ** -SIGNIFICAND_BITS[kind]
        assert kind.smallest_subnormal == 2.0 ** SMALLEST[kind]
    else:
        assert kind.unit_roundoff == kind.smallest_subnormal == 0


def test_every_epilogue_but_identity_has_a_bias():
    assert [kind for kind in EpilogueKind if not kind.has_bias] == [EpilogueKind.IDENTITY]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_the_compilers_target_of_a_device(capability, arch):
    assert DeviceProperties(kind="cuda", compute_capability=capability).cuda_arch == arch


# Models -------------------------------------------------------------------------------------------

sizes = st.integers(0, 2**31)
alphas = st.floats(-(2.0**127), 2.0**127)


RESULTS = {"s8": ["i32", "s8", "f16", "bf16", "f32"], "fp8_e4m3": ["bf16", "f16", "f32"]}
"""Of the 8-bit elements; the default first."""


@st.composite
def descriptors(draw: st.DrawFn) -> GemmSparse24Descriptor:
    element = draw(st.sampled_from(ElementKind))
    op = draw(st.sampled_from(GemmOp))
    kinds = list(EpilogueKind) if op is GemmOp.FORWARD else [EpilogueKind.IDENTITY]
    out = draw(st.sampled_from(RESULTS.get(element, [element, ElementKind.F32])))
    bias = [element if element not in RESULTS else out, ElementKind.F32]
    if out in ("s8", "i32") and element == "s8":
        bias = [ElementKind.F32]
    choices = {"out_element": st.just(out)}
    if op is GemmOp.FORWARD:
        choices |= {"x_order": st.sampled_from(MatrixOrder), "scale_w": st.sampled_from(ScaleKind)}
    optional = draw(st.fixed_dictionaries({}, optional=choices))
    if "out_element" in optional:
        optional["bias_element"] = draw(st.sampled_from(bias))
    return GemmSparse24Descriptor(
        n=draw(sizes),
        m=draw(sizes),
        k=8 * draw(st.integers(0, 2**28)),
        element=element,
        op=op,
        epilogue=draw(st.sampled_from(kinds)),
        alpha=draw(alphas),
        **optional,
    )


requirements = st.builds(
    GuaranteeRequirement,
    deterministic=st.booleans(),
    bit_stable_on_same_hardware=st.booleans(),
    batch_invariant=st.booleans(),
    bit_stable_across_hardware=st.booleans(),
    subnormals=st.sampled_from([None, "preserved", "flushed"]),
    nonfinite=st.sampled_from([None, "skips_pruned", "propagates"]),
    math_precision=st.none() | st.sampled_from(MathPrecision),
    accumulator=st.none() | st.sampled_from(ElementKind),
    max_error_bound=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
)
preferences = st.builds(
    PlanPreference,
    max_workspace_bytes=st.none() | st.integers(0, 2**64),
    allow_sm90a=st.booleans(),
    prefer_backend=st.none() | st.sampled_from(BackendKind),
    tier=st.none() | st.sampled_from(Tier),
    require=requirements,
)
devices = st.builds(
    DeviceProperties,
    kind=st.sampled_from(["host", "cuda"]),
    ordinal=st.integers(0, 63),
    name=st.text(),
    compute_capability=st.tuples(st.integers(0, 20), st.integers(0, 9)),
    multiprocessors=st.integers(0, 500),
    cublaslt=st.none() | st.text(),
    cusparselt=st.none() | st.text(),
    driver=st.none() | st.text(),
)


def from_plans() -> list[Model]:
    """Models that only plans make, from real ones."""
    found: list[Model] = []
    for op, epilogue in (("forward", "bias_gelu"), ("dgrad", "identity")):
        desc = GemmSparse24Descriptor(n=3, m=16, k=24, element="bf16", op=op, epilogue=epilogue)
        for flag in (False, True):
            preference = PlanPreference(require={"batch_invariant": flag})
            plan = GemmSparse24Plan.select(desc, device="host", preference=preference)
            found += [plan.sku, plan.guarantee, plan.explain(), plan.device]
    absent = DeviceProperties(kind="cuda", compute_capability=(7, 5))
    return [*found, explain(desc, device=absent)]


def assert_survives_json(model: Model) -> None:
    again = type(model).model_validate_json(model.model_dump_json())
    assert again == model
    assert hash(again) == hash(model)
    assert again.model_dump_json() == model.model_dump_json()
    assert type(model).model_validate(json.loads(model.model_dump_json())) == model


@given(model=st.one_of(descriptors(), requirements, preferences, devices))
def test_json_round_trip(model):
    assert_survives_json(model)


def test_json_round_trip_of_what_plans_make():
    models = from_plans()
    assert {type(model) for model in models} == {KernelSku, PrecisionGuarantee, Explanation, DeviceProperties}
    for model in models:
        assert_survives_json(model)


def test_json_round_trip_of_an_infinite_limit():
    assert_survives_json(GuaranteeRequirement(max_error_bound=math.inf))


def one_of_each() -> list[Model]:
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    by_type = {type(model): model for model in from_plans()}
    return [desc, PlanPreference(), GuaranteeRequirement(), *by_type.values()]


every_model = pytest.mark.parametrize("model", one_of_each(), ids=lambda model: type(model).__name__)


@every_model
def test_models_are_frozen(model):
    for name in type(model).model_fields:
        before = getattr(model, name)
        with pytest.raises(ValueError, match="frozen"):
            setattr(model, name, before)
        with pytest.raises(ValueError, match="frozen"):
            delattr(model, name)
    with pytest.raises(ValueError, match="frozen"):
        model.typo = 1


@every_model
def test_models_refuse_unknown_fields(model):
    fields = {**model.model_dump(), "typo": 1}
    with pytest.raises(InvalidProblemError, match="typo"):
        type(model)(**fields)
    with pytest.raises(InvalidProblemError, match="typo"):
        type(model).model_validate(fields)
    with pytest.raises(InvalidProblemError, match="typo"):
        type(model).model_validate_json(json.dumps(fields))


@every_model
def test_equal_models_are_one_key(model):
    twin = type(model).model_validate(model.model_dump())
    assert twin is not model
    assert twin == model
    assert {model: 1}[twin] == 1


CHANGES = {
    "n": 2,
    "m": 16,
    "k": 16,
    "element": "bf16",
    "op": "dgrad",
    "epilogue": "bias",
    "alpha": 0.5,
    "out_element": "f32",
    "bias_element": "f32",
    "x_order": "column",
    "y_order": "column",
    "scale_x": "tensor",
    "scale_w": "row",
}


def test_any_changed_field_makes_another_problem():
    fields = {"n": 1, "m": 8, "k": 8, "element": "f16"}
    problems = [GemmSparse24Descriptor(**{**fields, name: value}) for name, value in CHANGES.items()]
    assert set(CHANGES) == set(GemmSparse24Descriptor.model_fields)
    assert len({GemmSparse24Descriptor(**fields), *problems}) == 1 + len(CHANGES)


@pytest.mark.parametrize(("element", "results"), RESULTS.items())
def test_results_and_biases_of_8_bit_elements(element, results):
    sizes = {"n": 1, "m": 8, "k": 8, "element": element}
    desc = GemmSparse24Descriptor(**sizes)
    assert desc.out_element == results[0]
    for out in ElementKind:
        if out not in results:
            with pytest.raises(InvalidProblemError, match="out_element: expected"):
                GemmSparse24Descriptor(**sizes, out_element=out)
            continue
        integer = out in ("s8", "i32")
        assert GemmSparse24Descriptor(**sizes, out_element=out).bias_element == ("f32" if integer else out)
        for bias in ElementKind:
            if bias in ("f32", *([] if integer else [out])):
                assert GemmSparse24Descriptor(**sizes, out_element=out, bias_element=bias)
            else:
                with pytest.raises(InvalidProblemError, match="bias_element: expected"):
                    GemmSparse24Descriptor(**sizes, out_element=out, bias_element=bias)


@every_model
def test_models_are_json_objects(model):
    """A model's JSON has one member a field, and nothing that a cache left behind."""
    hash(model)
    assert set(json.loads(model.model_dump_json())) == set(type(model).model_fields)


def test_a_changed_copy_has_a_hash_of_its_own():
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    hash(desc)
    changed = desc.model_copy(update={"n": 2})
    same = GemmSparse24Descriptor(n=2, m=8, k=8, element="f32")
    assert changed == same
    assert hash(changed) == hash(same)


UNPICKLE = """
import pickle, sys
from sparse24_plans import GemmSparse24Descriptor
same = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
there = pickle.load(sys.stdin.buffer)
assert there == same and hash(there) == hash(same), "equal, but with another hash"
"""


def test_pickled_models_are_equal_keys_in_another_process():
    """String hashes differ between processes, so no hash may travel."""
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    hash(desc)
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLE],
        input=pickle.dumps(desc),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        (PlanPreference, '{"require": {"deterministic": "perhaps"}}', ("deterministic", "perhaps")),
        (PlanPreference, '{"require": {"typo": 1}}', ("require", "typo")),
        (PlanPreference, '{"require": 3}', ("require", "3")),
        (PlanPreference, '{"require": {"max_error_bound": 0}}', ("max_error_bound", "0")),
        (PlanPreference, '{"tier": "cpu"}', ("tier", "cpu")),
        (PlanPreference, '{"max_workspace_bytes": -1}', ("max_workspace_bytes", "-1")),
        (GuaranteeRequirement, '{"accumulator": "f64"}', ("accumulator", "f64")),
        (DeviceProperties, '{"kind": "tpu"}', ("kind", "tpu")),
        (DeviceProperties, '{"kind": "cuda", "compute_capability": [9]}', ("compute_capability",)),
        (DeviceProperties, '{"kind": "cuda", "compute_capability": ["x", 0]}', ("compute_capability", "x")),
        (GemmSparse24Descriptor, '{"n": 1, "m": 8, "k": 8.5, "element": "f32"}', ("k", "8.5")),
        (GemmSparse24Descriptor, '{"n": 1, "m": 8, "element": "f32"}', ("k", "required")),
        (GemmSparse24Descriptor, '{"n": 1, "m": 8, "k": 8}', ("element", "required")),
        (GemmSparse24Descriptor, '"text"', ("GemmSparse24Descriptor", "text")),
        (GemmSparse24Descriptor, '{"n": 1', ("GemmSparse24Descriptor", "JSON")),
    ],
)
def test_bad_json_is_an_invalid_problem_that_names_the_field(model, text, words):
    with pytest.raises(InvalidProblemError) as caught:
        model.model_validate_json(text)
    for word in words:
        assert word in str(caught.value)


def test_bad_json_inside_a_kernel_sku():
    plan = GemmSparse24Plan.select(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"), device="host")
    fields = json.loads(plan.sku.model_dump_json())
    fields["precision_guarantee"]["subnormals"] = "sometimes"
    with pytest.raises(InvalidProblemError, match=r"subnormals.*sometimes"):
        KernelSku.model_validate_json(json.dumps(fields))


@settings(max_examples=50)
@given(bound=st.floats(1e-9, 1.0), k=st.integers(0, 2**20))
def test_a_requirement_is_met_exactly_by_bounds_up_to_it(bound, k):
    guarantee = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"), device="host"
    ).guarantee
    unmet = GuaranteeRequirement(max_error_bound=bound).unmet(guarantee, k)
    assert (unmet is None) == (guarantee.error_bound(k) <= bound)


def test_tolerance_covers_rounding_where_the_bound_is_zero():
    """K = 0: nothing accumulates, and rounding the exact result to the output type stays inside."""
    guarantee = GemmSparse24Plan.select(
        GemmSparse24Descriptor(n=1, m=8, k=0, element="f32"), device="host"
    ).guarantee
    exact = np.array([0.0, 1.0, -3.14159, 65000.0])
    allowed = guarantee.tolerance(0, exact, np.zeros(4), ElementKind.F16)
    assert (np.abs(exact.astype(np.float16) - exact) <= allowed).all()
    assert (allowed <= np.abs(exact) * 2.0**-10 + 1e-7).all()


# Errors -------------------------------------------------------------------------------------------

ERRORS = {
    InvalidProblemError("x: wrong"): ValueError,
    UnsupportedError("no kernel"): NotImplementedError,
    MisalignedOperandError("x", 16, 0x1004): ValueError,
    WorkspaceTooSmallError(10, 7): ValueError,
    BufferTooSmallError("out", 10, 7): ValueError,
    BackendUnavailableError("pip install it"): RuntimeError,
    FormatError("metadata: wrong", row=3, group=5): ValueError,
    StorageError(28, "no space left", "/some/file"): OSError,
    DriverError("cuLaunchKernel", 700, "the log"): RuntimeError,
}
every_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


def test_every_error_is_listed_here():
    from sparse24_plans import errors

    public = {
        kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Sparse24Error) and not name.startswith("_")
    }
    assert {type(error) for error in ERRORS} == public - {Sparse24Error}


@every_error
def test_errors_are_ours_and_of_the_builtin_kind(error):
    assert isinstance(error, Sparse24Error)
    assert isinstance(error, ERRORS[error])


def test_errors_carry_what_a_program_acts_on():
    by_type = {type(error): error for error in ERRORS}
    workspace, buffer = by_type[WorkspaceTooSmallError], by_type[BufferTooSmallError]
    assert (workspace.argument, workspace.needed, workspace.got) == ("workspace", 10, 7)
    assert (buffer.argument, buffer.needed, buffer.got) == ("out", 10, 7)
    misaligned = by_type[MisalignedOperandError]
    assert (misaligned.argument, misaligned.needed, misaligned.address) == ("x", 16, 0x1004)
    assert (by_type[FormatError].row, by_type[FormatError].group) == (3, 5)
    assert (by_type[DriverError].call, by_type[DriverError].code) == ("cuLaunchKernel", 700)
    assert (by_type[StorageError].errno, by_type[StorageError].filename) == (28, "/some/file")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (WorkspaceTooSmallError(10, 7), ("workspace", "10", "7")),
        (BufferTooSmallError("out", 10, 7), ("out", "10", "7")),
        (MisalignedOperandError("x", 16, 0x1004), ("x", "16", "0x1004", "remainder 4")),
        (FormatError("metadata: wrong", row=3, group=5), ("metadata: wrong", "row 3", "group 5")),
        (DriverError("cuLaunchKernel", 700, "the log"), ("cuLaunchKernel", "700", "the log")),
        (StorageError(28, "no space left", "/some/file"), ("no space left", "/some/file")),
    ],
)
def test_messages_say_what_was_needed_and_what_came(error, words):
    for word in words:
        assert word in str(error)


def test_a_format_error_needs_no_place():
    error = FormatError("not a safetensors file")
    assert (error.row, error.group, str(error)) == (None, None, "not a safetensors file")


@every_error
def test_errors_travel_between_processes(error):
    """Worker processes hand their errors back pickled."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_changed_copy_is_validated():
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    assert desc.model_copy(update={"n": 5}).n == 5
    for wrong in ({"alpha": math.nan}, {"k": 12}, {"typo": 1}):
        with pytest.raises(InvalidProblemError):
            desc.model_copy(update=wrong)
