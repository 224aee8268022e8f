"""The facade of the plans that prepare weights: descriptors, selection, identity, operands, bad input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import (
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    Device,
    DeviceProperties,
    ElementKind,
    GemmSparse24Descriptor,
    InvalidProblemError,
    MaskSparse24Descriptor,
    MisalignedOperandError,
    PackSparse24Descriptor,
    PlanPreference,
    PruneCompressSparse24Descriptor,
    PruneSparse24Descriptor,
    Sparse24Error,
    TensorView,
    TilePruneSparse24Descriptor,
    UnsupportedError,
)
from sparse24_plans.plan.operands import Role, fields_of
from sparse24_plans.plan.table import choose, consider
from sparse24_plans.prepare import table
from sparse24_plans.vocab import PrepareOp

from .prepare_cases import ELEMENTS, PLANS, PrepareCase, equal, parts_of

M, K = 16, 32
H200 = DeviceProperties(kind="cuda", name="NVIDIA H200", compute_capability=(9, 0), multiprocessors=132)
DESCRIPTORS = (
    PruneSparse24Descriptor(m=M, k=K, element="bf16"),
    PruneSparse24Descriptor(m=M, k=K, element="s8", scores="f32"),
    CompressSparse24Descriptor(m=M, k=K, element="f32"),
    PruneCompressSparse24Descriptor(m=M, k=K, element="fp8_e4m3"),
    DecompressSparse24Descriptor(m=M, k=K, element="u8"),
    PackSparse24Descriptor(m=M, k=K, element="f16"),
    PackSparse24Descriptor(m=M, k=K, element="bf16", direction="unpack"),
    TilePruneSparse24Descriptor(m=M, k=K, element="bf16", rule="optimal"),
    MaskSparse24Descriptor(m=M, k=K, element="f16"),
    MaskSparse24Descriptor(m=M, k=K, element="f32", layout="tiles"),
)
every_descriptor = pytest.mark.parametrize("desc", DESCRIPTORS, ids=lambda d: f"{d.op}-{d.element}")


def case_of(desc, device) -> PrepareCase:
    inputs = {
        part.name: np.zeros(part.shape, part.element.bits_dtype)
        for operand in desc.operands()
        for part in parts_of(operand)
    }
    if "metadata" in inputs:
        inputs["metadata"][...] = 0x0404
    return PrepareCase(desc, device, inputs)


# Descriptors --------------------------------------------------------------------------------------


@every_descriptor
def test_a_descriptor_survives_json_and_is_hashable(desc):
    again = type(desc).model_validate_json(desc.model_dump_json())
    assert again == desc
    assert hash(again) == hash(desc)


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"m": -8}, "m"),
        ({"m": 8.0}, "m"),
        ({"k": 12}, "k"),
        ({"k": -8}, "k"),
        ({"k": True}, "k"),
        ({"element": "i32"}, "element"),
        ({"element": "u16"}, "element"),
        ({"element": "f64"}, "element"),
        ({"m": 1 << 40, "k": 1 << 40}, "m, k"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_field_is_named(kind, change, field):
    with pytest.raises(InvalidProblemError, match=field):
        kind(**{"m": M, "k": K, "element": "bf16", **change})


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        (PruneSparse24Descriptor, {"scores": "s8"}, "scores"),
        (PruneCompressSparse24Descriptor, {"scores": "fp8_e4m3"}, "scores"),
        (PackSparse24Descriptor, {"direction": "sideways"}, "direction"),
        (TilePruneSparse24Descriptor, {"rule": "best"}, "rule"),
        (TilePruneSparse24Descriptor, {"m": 12}, "m"),
        (MaskSparse24Descriptor, {"layout": "columns"}, "layout"),
        (MaskSparse24Descriptor, {"layout": "tiles", "m": 12}, "m"),
    ],
)
def test_a_wrong_field_of_one_kind_is_named(kind, change, field):
    with pytest.raises(InvalidProblemError, match=field):
        kind(**{"m": M, "k": K, "element": "bf16", **change})


# Selection ----------------------------------------------------------------------------------------


@every_descriptor
def test_a_plan_says_what_it_is(desc, device):
    plan = PLANS[type(desc)][0].select(desc, device=device)
    assert plan is PLANS[type(desc)][0].select(desc, device=device)
    assert plan.sku.op == f"{desc.op}_sparse24"
    assert (
        plan.sku.category
        == {
            "prune": "prune",
            "mask": "prune",
            "tile_prune": "prune",
            "compress": "compress",
            "prune_compress": "compress",
            "decompress": "decompress",
            "pack": "pack",
            "unpack": "pack",
        }[desc.op]
    )
    assert plan.sku.backend == ("host" if device == "host" else "prepare")
    assert plan.sku.element == desc.element
    about = plan.explain()
    assert about.chosen is not None
    assert [name for name, _, reason in about.rows if reason is None] == [about.chosen]
    assert plan.workspace_size() == 0


@every_descriptor
def test_every_promise_is_made(desc):
    promised = table.guarantee(desc)
    assert promised.deterministic
    assert promised.bit_stable_on_same_hardware
    assert promised.bit_stable_across_hardware
    assert promised.error_bound(desc.k) == 0


@every_descriptor
def test_one_row_serves_each_place(desc):
    for place in (H200, DeviceProperties(kind="host")):
        rows = consider(table.ROWS, desc, PlanPreference(), place)
        assert [row.row.on_host for row in rows if row.reason is None] == [place.kind == "host"]


@pytest.mark.parametrize("op", PrepareOp)
def test_every_op_is_served_on_the_host_and_on_a_gpu(op):
    for on_host in (True, False):
        assert any(op in spec.ops for spec in table.ROWS if spec.on_host == on_host)


@pytest.mark.parametrize(
    ("preference", "device", "reason"),
    [
        ({"prefer_backend": "mma_sp"}, H200, "prefer_backend is mma_sp"),
        ({"tier": "sparse_tensor_core"}, H200, "tier is sparse_tensor_core"),
        ({}, H200.model_copy(update={"compute_capability": (7, 5)}), "needs compute capability"),
    ],
)
def test_why_nothing_serves(preference, device, reason):
    rows = consider(table.ROWS, DESCRIPTORS[0], PlanPreference(**preference), device)
    with pytest.raises(UnsupportedError, match=reason):
        choose(rows)


@pytest.mark.parametrize("element", [e for e in ELEMENTS if e not in table.PACKED_ELEMENTS])
def test_only_elements_with_a_layout_are_packed(element):
    desc = PackSparse24Descriptor(m=M, k=K, element=element)
    with pytest.raises(UnsupportedError, match=f"serves elements f16, bf16, s8, fp8_e4m3, not {element}"):
        PLANS[type(desc)][0].select(desc, device="host")


@pytest.mark.parametrize(
    ("kind", "m", "k"),
    [(PruneSparse24Descriptor, 1 << 29, 1 << 29), (TilePruneSparse24Descriptor, 1 << 25, 1 << 25)],
)
def test_what_overflows_the_grid_is_unsupported(kind, m, k):
    rows = consider(table.ROWS, kind(m=m, k=k, element="f32"), PlanPreference(), H200)
    assert any("exceed the grid limit" in (row.reason or "") for row in rows)
    with pytest.raises(UnsupportedError):
        choose(rows)


def test_wrong_descriptors_and_preferences():
    plan = PLANS[PruneSparse24Descriptor][0]
    for wrong in (CompressSparse24Descriptor(m=M, k=K, element="f32"), None, {"m": M}):
        with pytest.raises(InvalidProblemError, match="descriptor: expected PruneSparse24Descriptor"):
            plan.select(wrong, device="host")
    with pytest.raises(InvalidProblemError, match="preference"):
        plan.select(DESCRIPTORS[0], device="host", preference=3)
    assert plan.select(DESCRIPTORS[0], device="host", preference={"tier": "host"})


# Operands -----------------------------------------------------------------------------------------


@every_descriptor
def test_good_operands_are_accepted_and_bind_gives_the_same_bits(desc, device):
    case = case_of(desc, device)
    assert case.plan.can_implement(case.args)
    want = case.run()
    case.poison()
    bound = case.plan.bind(case.args, workspace=np.empty(0, np.uint8) if device == "host" else None)
    bound.launch()
    assert equal(case.fetch(), want)


def rejected(case: PrepareCase, args: object, kind: type[Sparse24Error], *words: str) -> str:
    """``run``, ``bind`` and ``can_implement`` refuse alike, and nothing is written. Returns the message."""
    for call in (case.plan.run, case.plan.bind):
        with pytest.raises(kind) as caught:
            call(args)
        for word in words:
            assert word in str(caught.value)
    verdict = case.plan.can_implement(args)
    assert not verdict
    assert type(verdict.error) is type(caught.value)
    assert case.untouched()
    return str(caught.value)


def tensors(desc) -> list[str]:
    """Fields of the arguments that hold one tensor."""
    return [operand.argument for operand in desc.operands() if operand.role is not Role.WEIGHT]


@every_descriptor
def test_operands_that_are_wrong(desc, device):
    case = case_of(desc, device)
    for name in tensors(desc):
        view = getattr(case.args, name)
        first, *rest = view.shape
        wrong = {
            "shape": TensorView(view.address, (first + 8, *rest), view.element, view.device),
            "element": TensorView(view.address, view.shape, "i32", view.device),
            "device": TensorView(view.address, view.shape, view.element, Device("cuda", 7)),
            "contiguous": TensorView(
                view.address, view.shape, view.element, view.device, strides=(2,) * len(view.shape)
            ),
        }
        words = {
            "shape": "expected shape",
            "element": "got i",
            "device": "cuda:7",
            "contiguous": "contiguous",
        }
        for what, operand in wrong.items():
            rejected(case, replace(case.args, **{name: operand}), InvalidProblemError, name, words[what])
        for thing in (3, "x", object()):
            rejected(case, replace(case.args, **{name: thing}), InvalidProblemError, name)


@every_descriptor
def test_results_are_writable_and_apart_from_everything_else(desc, device):
    case = case_of(desc, device)
    given = {part.name: operand for operand in desc.operands() for part in parts_of(operand)}
    for name in case.written:
        view = getattr(case.args, name)
        locked = TensorView(view.address, view.shape, view.element, view.device, readonly=True)
        rejected(case, replace(case.args, **{name: locked}), InvalidProblemError, name, "read-only")
        for other in case.guarded:
            if other == name:
                continue
            size = view.element.itemsize
            address = case.guarded[other].view.address + 16 * size
            moved = TensorView(address, view.shape, view.element, view.device)
            if case.guarded[other].view.nbytes_spanned <= 16 * size:
                continue
            message = rejected(case, replace(case.args, **{name: moved}), InvalidProblemError, "overlap")
            hit = [  # wherever the allocator put them: it may be several
                given[one].argument
                for one, memory in case.guarded.items()
                if one != name and memory.view.address < moved.end and moved.address < memory.view.end
            ]
            assert any(argument in message for argument in hit)


@pytest.mark.gpu
@every_descriptor
def test_addresses_on_a_gpu_are_multiples_of_16_bytes(desc):
    case = case_of(desc, 0)
    for name in tensors(desc):
        view = getattr(case.args, name)
        moved = TensorView(view.address + view.element.itemsize, view.shape, view.element, view.device)
        rejected(case, replace(case.args, **{name: moved}), MisalignedOperandError, name)


@every_descriptor
def test_wrong_arguments_objects(desc, device):
    case = case_of(desc, device)
    for wrong in (None, {}, GemmSparse24Descriptor(n=1, m=M, k=K, element="f32")):
        rejected(case, wrong, InvalidProblemError, "args", type(wrong).__name__)
    for name in fields_of(type(case.args)):
        optional = desc.op is PrepareOp.PRUNE and name in ("pruned", "mask")
        missing = name == "scores" and getattr(desc, "scores", None) is None
        if not (optional or missing):
            rejected(case, replace(case.args, **{name: None}), InvalidProblemError, name)


def test_a_weight_must_be_the_plans(device):
    case = case_of(DecompressSparse24Descriptor(m=M, k=K, element="f32"), device)
    others = (
        case_of(DecompressSparse24Descriptor(m=M, k=K + 8, element="f32"), device).args.weight,
        case_of(DecompressSparse24Descriptor(m=M, k=K, element="f16"), device).args.weight,
        case.args.dense,
    )
    for other in others:
        rejected(case, replace(case.args, weight=other), InvalidProblemError, "weight")


def test_a_packed_weight_must_be_of_the_layout(device):
    case = case_of(PackSparse24Descriptor(m=M, k=K, element="f16", direction="unpack"), device)
    packed = case.args.packed
    for change in ({"layout_id": "of_somebody_else"}, {"m": 8}, {"element": ElementKind.BF16}):
        rejected(case, replace(case.args, packed=replace(packed, **change)), InvalidProblemError, "packed")


def test_scores_come_exactly_when_the_descriptor_has_them(device):
    plain = case_of(PruneSparse24Descriptor(m=M, k=K, element="f32"), device)
    scores = plain.args.dense
    rejected(plain, replace(plain.args, scores=scores), InvalidProblemError, "scores", "expected None")
    scored = case_of(PruneSparse24Descriptor(m=M, k=K, element="f32", scores="f32"), device)
    rejected(scored, replace(scored.args, scores=None), InvalidProblemError, "scores")


def test_pruning_asks_for_at_least_one_result(device):
    case = case_of(PruneSparse24Descriptor(m=M, k=K, element="f32"), device)
    empty = replace(case.args, pruned=None, mask=None)
    rejected(case, empty, InvalidProblemError, "pruned or mask: expected at least one result")


@pytest.mark.parametrize("out", ["pruned", "masked"])
def test_in_place(out, device):
    kind = PruneSparse24Descriptor if out == "pruned" else MaskSparse24Descriptor
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 2**16, (M, K)).astype(np.uint16)
    inputs = {"dense": dense, "mask": rng.integers(0, 256, (M, K // 8)).astype(np.uint8)}
    case = PrepareCase(kind(m=M, k=K, element="f16"), device, inputs)
    want = case.run()[out]
    case.plan.run(replace(case.args, **{out: case.args.dense}))
    case.fetch()
    assert np.array_equal(case.guarded["dense"].numpy().view(np.uint16).reshape(M, K), want)


def test_a_host_plan_takes_no_stream():
    case = case_of(DESCRIPTORS[0], "host")
    with pytest.raises(InvalidProblemError, match="stream"):
        case.plan.run(case.args, stream=7)
    with pytest.raises(InvalidProblemError, match="workspace"):
        case.plan.run(case.args, workspace=7)
    assert case.untouched()
