"""The models that travel as JSON: frozen, hashable, closed, and the same again when they come back."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BlockSparseConv2dDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    DeviceProperties,
    ElementKind,
    Explanation,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    GuaranteeRequirement,
    InvalidProblemError,
    KernelSku,
    PlanPreference,
    PrecisionGuarantee,
    PruneSparse24Descriptor,
    explain,
)
from sparse24_plans.vocab import Model

from .strategies import (
    block_attentions,
    block_convolutions,
    block_products,
    block_softmaxes,
    devices,
    gemm_descriptors,
    preferences,
    prepare_descriptors,
    requirements,
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
    absent = DeviceProperties(kind="cuda", compute_capability=(7, 5), multiprocessors=40)
    return [*found, explain(desc, device=absent)]


def assert_survives_json(model: Model) -> None:
    again = type(model).model_validate_json(model.model_dump_json())
    assert again == model
    assert hash(again) == hash(model)
    assert again.model_dump_json() == model.model_dump_json()
    assert type(model).model_validate(json.loads(model.model_dump_json())) == model


MODELS = (
    *(
        gemm_descriptors(),
        prepare_descriptors(),
        block_products(),
        block_softmaxes(),
        block_attentions,
        block_convolutions(),
    ),
    *(requirements, preferences, devices),
)


@given(model=st.one_of(*MODELS))
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
    prune = PruneSparse24Descriptor(m=8, k=8, element="f32")
    return [desc, prune, PlanPreference(), GuaranteeRequirement(), *by_type.values()]


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


def test_a_changed_copy_is_validated():
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    assert desc.model_copy(update={"n": 5}).n == 5
    for wrong in ({"alpha": math.nan}, {"k": 12}, {"typo": 1}):
        with pytest.raises(InvalidProblemError):
            desc.model_copy(update=wrong)


def test_words_are_shown_as_they_are_written():
    desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="f32")
    assert "element='f32'" in repr(desc)
    assert repr([ElementKind.S4]) == "['s4']"
    with pytest.raises(InvalidProblemError, match=r"subnormals: .*, got 's4'$"):
        GuaranteeRequirement(subnormals=ElementKind.S4)


def test_fields_by_position_are_refused_with_their_names():
    with pytest.raises(InvalidProblemError, match=r"expected fields by name \(element, n, m, k, .*got 4 by"):
        GemmSparse24Descriptor(1, 16, 8, "bf16")


_SHAPE = BlockSparseShape(heads=1, rows=16, cols=16, block=16, blocks=1)
_FILTER = BlockSparseShape(heads=1, rows=16, cols=144, block=16, blocks=9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: GemmSparse24Descriptor(n=1, m=2**40, k=2**40, element="f32"),
            f"n, m, k: .* 2\\^63 elements, got 1, {2**40}, {2**40}$",
        ),
        (
            lambda: PruneSparse24Descriptor(m=2**40, k=2**40, element="f32"),
            f"m, k: .* 2\\^59 elements, got {2**40}, {2**40}$",
        ),
        (
            lambda: BlockSparseShape(heads=2**30, rows=32, cols=32, block=16, blocks=1),
            f"heads: .* in all heads, got {2**30} heads of 2 x 2$",
        ),
        (
            lambda: BlockSparseMatmulDescriptor(op="dsd", layout=_SHAPE, batch=2**30, n=2**30, element="f32"),
            f"layout, batch: .* elements, got BlockSparseShape.*, {2**30}$",
        ),
        (
            lambda: BlockSparseConv2dDescriptor(
                layout=_FILTER, batch=2**30, height=2**15, width=2**15, kernel=3, element="f32"
            ),
            f"layout, batch: .* elements, got BlockSparseShape.*, {2**30}$",
        ),
    ],
    ids=["product", "prepare", "layout", "blocks", "convolution"],
)
def test_sizes_that_are_too_large_are_shown(make, words):
    with pytest.raises(InvalidProblemError, match=words):
        make()


@pytest.mark.parametrize(
    "more",
    [{"multiprocessors": 1 << 31}, {"compute_capability": (1 << 31, 0)}],
    ids=lambda one: next(iter(one)),
)
def test_a_gpu_of_numbers_that_no_driver_gives_is_refused(more):
    """An exported folder has no room for them."""
    known = {"kind": "cuda", "compute_capability": (9, 0), "multiprocessors": (1 << 31) - 1}
    DeviceProperties(**known)
    with pytest.raises(InvalidProblemError, match=f"{next(iter(more))}.*less than or equal to 2147483647"):
        DeviceProperties(**{**known, **more})


def test_a_gpu_without_multiprocessors_is_refused():
    """Plans would be for no CTAs, and compute nothing."""
    with pytest.raises(InvalidProblemError, match="multiprocessors: expected at least 1"):
        DeviceProperties(kind="cuda", compute_capability=(9, 0))
    assert DeviceProperties(kind="host").multiprocessors == 0


@pytest.mark.parametrize("field", ["name", "cublaslt", "cusparselt", "driver"])
def test_a_devices_text_that_json_cannot_hold_is_refused(field):
    with pytest.raises(InvalidProblemError, match=f"{field}: expected text that UTF-8 can encode"):
        DeviceProperties(kind="host", **{field: "\ud800"})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kernel": "\ud800"}, "kernel"),
        ({"backend": "a\udfff"}, "backend"),
        ({"layout": "\ud800"}, "layout"),
        ({"op": "\ud800"}, "op"),
    ],
)
def test_a_skus_text_that_json_cannot_hold_is_refused(change, field):
    plan = GemmSparse24Plan.select(GemmSparse24Descriptor(n=1, m=8, k=8, element="f32"), device="host")
    with pytest.raises(InvalidProblemError, match=f"{field}: expected text that UTF-8 can encode"):
        plan.sku.model_copy(update=change)
    with pytest.raises(InvalidProblemError, match="expected text that UTF-8 can encode"):
        explain(plan.descriptor, device="host").model_copy(update={"details": "\ud800"})
