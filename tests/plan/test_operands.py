"""Operands of every family: what is wrong with one is said in one order, by name, and nothing is written."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from sparse24_plans import (
    Device,
    GemmSparse24Descriptor,
    InvalidProblemError,
    MisalignedOperandError,
    PackedWeight,
    PruneSparse24Descriptor,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TensorView,
)
from sparse24_plans.plan.operands import Operand, Role, reinterpretable
from sparse24_plans.vocab import IN_MEMORY

from ..support import Guarded
from .cases import PROBLEMS, PlanCase, case_of, changed, name_of, rejected

every_problem = pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
ELSEWHERE = Device("cuda", 7)


def tensors(desc: Any) -> list[Operand]:
    return [operand for operand in desc.operands() if operand.role in (Role.IN, Role.OUT)]


def weights(desc: Any) -> list[Operand]:
    return [operand for operand in desc.operands() if operand.role is Role.WEIGHT]


def other_element(operand: Operand) -> str:
    """One that the operand can't be read as."""
    return "i32" if operand.element != "i32" else "u16"


def names(case: PlanCase) -> list[str]:
    """The operands' fields, in the order of the class."""
    return [one.name for one in fields(case.args) if one.init]


def says(case: PlanCase, args: object, argument: str, *words: str) -> str:
    """The message, which names the argument, what was expected and what came."""
    text = str(rejected(case, args, InvalidProblemError, *words))
    assert text.startswith(f"{argument}: expected ")
    assert ", got " in text
    return text


@every_problem
def test_good_operands_are_accepted(desc, device):
    case = case_of(desc, device)
    verdict = case.plan.can_implement(case.args)
    assert verdict
    assert verdict.error is None
    assert case.untouched()
    case.run()


# One that is wrong --------------------------------------------------------------------------------


@every_problem
def test_a_wrong_tensor(desc, device):
    case = case_of(desc, device)
    for operand in tensors(desc):
        name = operand.argument
        view = getattr(case.args, name)
        first, *rest = view.shape
        larger, scattered = (first + 8, *rest), (2,) * len(view.shape)
        for wrong, words in (
            (changed(view, shape=larger), (f"expected shape {list(view.shape)}", f"got {list(larger)}")),
            (changed(view, shape=(*view.shape, 1)), ("expected shape",)),
            (changed(view, element=other_element(operand)), (str(operand.element), "got ")),
            (changed(view, device=ELSEWHERE), (f"expected memory on {view.device}", "got cuda:7")),
            (changed(view, strides=scattered), ("contiguous" if operand.lines is None else "unit stride",)),
        ):
            if wrong.shape == (1,) and wrong.strides == (2,):
                continue  # the distance to what isn't there
            says(case, replace(case.args, **{name: wrong}), name, *words)
        for thing in (3, "x", object(), [[1.0]]):
            says(case, replace(case.args, **{name: thing}), name, type(thing).__name__)


@every_problem
def test_a_wrong_weight(desc, device):
    case = case_of(desc, device)
    for operand in weights(desc):
        name = operand.argument
        weight = getattr(case.args, name)
        packed = isinstance(weight, PackedWeight)
        for wrong in (None, 3, weight.buffers[0] if packed else weight.views[0], ()):
            said = says(case, replace(case.args, **{name: wrong}), name, type(wrong).__name__)
            assert "plan.pack" not in said  # which takes weights alone


def other_weights(weight: Any) -> list[tuple[Any, str]]:
    """The weight with one thing about it changed, and what that is called."""
    if isinstance(weight, PackedWeight):
        there = tuple(changed(view, device=ELSEWHERE) for view in weight.buffers)
        size = weight.element.itemsize
        other = next(kind for kind in IN_MEMORY if kind.itemsize <= size and kind is not weight.element)
        return [
            (replace(weight, m=weight.m - 8), f"[{weight.m - 8}, {weight.k}]"),
            (replace(weight, element=other), f"got {other}"),
            (replace(weight, device=ELSEWHERE, buffers=there), "got cuda:7"),
            (replace(weight, layout_id="of_somebody_else"), "got 'of_somebody_else'; call plan.pack(weight)"),
        ]
    m, k = weight.m - 8, weight.k
    if isinstance(weight, Sparse24QuantizedWeight):
        return other_quantized_weights(weight)
    values, metadata = weight.views
    fewer = [changed(view, shape=(m, view.shape[1])) for view in (values, metadata)]
    typed = changed(values, element="i32" if values.element.itemsize == 4 else "u16")
    if values.element.itemsize == 1:
        typed = changed(values, element="s8" if values.element != "s8" else "u8")
    away = [changed(view, device=ELSEWHERE) for view in (values, metadata)]
    return [
        (Sparse24Weight(*fewer, validate=False), f"[{m}, {k}]"),
        (Sparse24Weight(typed, metadata, validate=False), f"got {typed.element}"),
        (Sparse24Weight(*away, validate=False), "got cuda:7"),
    ]


def other_quantized_weights(weight: Sparse24QuantizedWeight) -> list[tuple[Any, str]]:
    def made(views: list[TensorView], group: int = weight.quantization.group) -> Any:
        stored, _, scales = weight.quantization
        fields = {"element": weight.element, "stored": stored, "group": group, "scale_element": scales}
        return Sparse24QuantizedWeight(*views, validate=False, **fields)

    m = weight.m - 8
    fewer = [changed(view, shape=(m, view.shape[1])) for view in weight.views]
    away = [changed(view, device=ELSEWHERE) for view in weight.views]
    return [
        (made(fewer), f"[{m}, {weight.k}]"),
        (made(away), "got cuda:7"),
        (made(list(weight.views), group=64), "of groups of 64"),
        (weight.dequantize(), "got values that are not quantized"),
    ]


@every_problem
def test_a_weight_of_another_problem(desc, device):
    case = case_of(desc, device)
    for operand in weights(desc):
        for wrong, words in other_weights(getattr(case.args, operand.argument)):
            says(case, replace(case.args, **{operand.argument: wrong}), operand.argument, words)


@every_problem
def test_a_missing_operand_and_one_that_was_not_asked_for(desc, device):
    case = case_of(desc, device)
    known = {operand.argument: operand for operand in desc.operands()}
    some = next(getattr(case.args, name) for name in known if known[name].role in (Role.IN, Role.OUT))
    for name in names(case):
        if name not in known:
            says(
                case,
                replace(case.args, **{name: some}),
                name,
                "expected None for this descriptor",
            )
        elif not known[name].optional:
            says(case, replace(case.args, **{name: None}), name, "NoneType")


@every_problem
def test_a_read_only_result(desc, device):
    case = case_of(desc, device)
    for operand in tensors(desc):
        view = getattr(case.args, operand.argument)
        locked = replace(case.args, **{operand.argument: changed(view, strides=view.strides, readonly=True)})
        if operand.role is Role.OUT:
            says(case, locked, operand.argument, "expected writable memory, got a read-only tensor")
        else:
            assert case.plan.can_implement(locked)


@every_problem
def test_an_element_that_isnt_aligned_to_its_size(desc, device):
    case = case_of(desc, device)
    for operand in tensors(desc):
        size = max(operand.element.itemsize, operand.alignment)
        if size == 1:
            continue
        view = getattr(case.args, operand.argument)
        moved = changed(view, address=view.address + size // 2)
        error = rejected(case, replace(case.args, **{operand.argument: moved}), MisalignedOperandError)
        assert error.argument == operand.argument
        assert error.needed % size == 0
        assert error.address == moved.address


@pytest.mark.gpu
@every_problem
def test_prepare_kernels_take_operands_at_multiples_of_16_bytes(desc):
    if isinstance(desc, GemmSparse24Descriptor):
        pytest.skip("products: tests/gemm/test_operands.py")
    case = case_of(desc, 0)
    if case.plan.explain().chosen.startswith(("blocks_strict", "quantize")):
        pytest.skip("takes elements wherever they are")
    for operand in tensors(desc):
        view = getattr(case.args, operand.argument)
        moved = changed(view, address=view.address + view.element.itemsize)
        args = replace(case.args, **{operand.argument: moved})
        rejected(case, args, MisalignedOperandError, operand.argument)


@every_problem
def test_another_familys_arguments(desc, device):
    case = case_of(desc, device)
    other = case_of(PROBLEMS[-1 if isinstance(desc, GemmSparse24Descriptor) else 0], "host").args
    for wrong in (None, {}, object(), desc, other):
        says(case, wrong, "args", type(case.args).__name__, type(wrong).__name__)


def test_of_optional_results_at_least_one(device):
    case = case_of(PruneSparse24Descriptor(m=16, k=32, element="f32"), device)
    empty = replace(case.args, pruned=None, mask=None)
    says(case, empty, "pruned or mask", "expected at least one result, got None")
    for name in ("pruned", "mask"):
        assert case.plan.can_implement(replace(case.args, **{name: None}))


# The order ----------------------------------------------------------------------------------------


@every_problem
def test_operands_are_checked_in_the_order_of_the_descriptor(desc):
    """First the class, then what wasn't asked for, then operand by operand."""
    case = case_of(desc, "host")
    args = replace(case.args, **dict.fromkeys(names(case), object()))
    known = [operand.argument for operand in desc.operands()]
    for name in [*(name for name in names(case) if name not in known), *known]:
        says(case, args, name)
        args = replace(args, **{name: getattr(case.args, name)})
    assert case.plan.can_implement(args)


@every_problem
def test_tensor_errors_are_reported_in_a_fixed_order(desc):
    """Shape, element, device, read-only, strides, alignment: each only where those before are right."""
    case = case_of(desc, "host")
    for operand in tensors(desc):
        view = getattr(case.args, operand.argument)
        size = view.element.itemsize
        reached = [
            ("shape", {"shape": (99,)}, "expected shape"),
            ("element", {"element": other_element(operand)}, f"got {other_element(operand)}"),
            ("device", {"device": ELSEWHERE}, "got cuda:7"),
            ("readonly", {"readonly": True}, "read-only"),
            ("strides", {"strides": (2,) * len(view.shape)}, "stride" if operand.lines else "contiguous"),
            ("address", {"address": view.address + size // 2}, "expected a multiple of"),
        ]
        if operand.role is not Role.OUT:
            reached = [one for one in reached if one[0] != "readonly"]
        unasked = {"address"} if size == 1 else set()
        if reinterpretable(operand.element):
            unasked.add("element")  # what can't be read as the element is no tensor at all
        if view.shape == (1,):
            unasked.add("strides")
        reached = [one for one in reached if one[0] not in unasked]
        while reached:
            _, _, words = reached[0]
            wrong = {key: value for _, change, _ in reached for key, value in change.items()}
            if "shape" in wrong:
                wrong.pop("strides", None)
            args = replace(case.args, **{operand.argument: changed(view, **wrong)})
            kind = MisalignedOperandError if reached[0][0] == "address" else InvalidProblemError
            rejected(case, args, kind, words)
            reached.pop(0)


def test_misalignment_is_said_before_an_overlap():
    case = case_of(PruneSparse24Descriptor(m=16, k=32, element="f32"), "host")
    dense = case.args.dense
    both = replace(case.args, pruned=changed(dense, address=dense.address + 2))
    rejected(case, both, MisalignedOperandError, "pruned")
    rejected(
        case,
        replace(case.args, pruned=changed(dense, address=dense.address + 4)),
        InvalidProblemError,
        "apart",
    )


# Empty operands -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "desc",
    [
        GemmSparse24Descriptor(n=0, m=16, k=32, element="f32"),
        GemmSparse24Descriptor(n=4, m=0, k=32, element="f32"),
        PruneSparse24Descriptor(m=0, k=32, element="f32"),
    ],
    ids=["n", "m", "rows"],
)
def test_an_empty_tensor_may_lie_anywhere(desc):
    """The address of an empty tensor is never read: it may be null or odd, and have any stride."""
    case = case_of(desc, "host")
    for operand in tensors(desc):
        if 0 not in operand.shape:
            continue
        for strides in (None, (1,) * len(operand.shape)):
            anywhere = TensorView(0, operand.shape, operand.element, Device("host", 0), strides=strides)
            case.plan.run(replace(case.args, **{operand.argument: anywhere}))
        wrong = replace(case.args, **{operand.argument: changed(anywhere, element="i32")})
        assert not case.plan.can_implement(wrong)


def test_guards_are_seen():
    """The tests' own memory: a byte beyond an operand is noticed."""
    memory = Guarded((4,), PROBLEMS[0].element, "host")
    memory._memory[0] ^= 1
    with pytest.raises(AssertionError, match="guard bytes"):
        memory.numpy()
