"""A result lies apart from every other operand, or, where its definition allows it, exactly upon one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    GemmSparse24Descriptor,
    InvalidProblemError,
    MaskSparse24Descriptor,
    PackedBlocks,
    PackedWeight,
    PruneSparse24Descriptor,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TensorView,
)
from sparse24_plans.plan.operands import Role
from sparse24_plans.plan.overlap import StridedSpan, overlap

from ..support import Guarded
from .cases import PROBLEMS, PlanCase, case_of, changed, name_of, parts_of, random_inputs, rejected, select

every_problem = pytest.mark.parametrize("desc", PROBLEMS, ids=name_of)
F32 = ElementKind.F32


def unguarded(case: PlanCase) -> Iterator[tuple[str, TensorView]]:
    """Memory of a plan's run that isn't one of its tensors, with the argument that it belongs to."""
    if tables := getattr(case.args, "layout", None):
        yield "layout", tables.view
    for name in "ab":  # a packed operand has tables beside its values
        if isinstance(packed := getattr(case.args, name, None), PackedBlocks):
            yield from ((name, one) for one in packed.buffers)
    weight = getattr(case.args, "weight", None)
    if isinstance(weight, (Sparse24Weight, Sparse24QuantizedWeight)):
        weight = PackedWeight.canonical(weight)
    if weight is not None:
        yield from (("weight", one) for one in weight.buffers)
    if case.workspace:
        yield "workspace", case.workspace.view


def memory_of(case, argument: str, name: str) -> TensorView:
    """Return what the plan reads or writes: of a packed operand its values, or the dense copy of them."""
    given = getattr(case.args, argument)
    return given.buffers[0] if isinstance(given, PackedBlocks) else case.guarded[name].view


@every_problem
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_result_that_shares_a_few_bytes_with_another_operand(desc, end, device):
    case = case_of(desc, device)
    argument_of = {part.name: operand.argument for operand in desc.operands() for part in parts_of(operand)}
    for name in case.written:
        view = getattr(case.args, argument_of[name])
        for other in set(case.guarded) - {name}:
            there = memory_of(case, argument_of[other], other)
            # The result's first bytes on the last ones of the other, or its last bytes on the first ones.
            start = there.end - 16 if end == "last" else there.address - view.nbytes_spanned + 16
            if there.nbytes_spanned <= 16 or view.nbytes_spanned <= 16:
                continue
            moved = changed(view, address=start)
            args = replace(case.args, **{argument_of[name]: moved})
            message = str(rejected(case, args, InvalidProblemError, "expected memory apart from", "overlap"))
            others = {one: argument_of[one] for one in case.guarded if one != name}
            tensors = [(argument, memory_of(case, argument, one)) for one, argument in others.items()]
            hit = [  # wherever the allocator put them: it may be several
                argument
                for argument, one in (*tensors, *unguarded(case))
                if one.address < moved.end and moved.address < one.end
            ]
            assert any(argument in message for argument in hit)
            assert argument_of[name] in message


def test_a_result_upon_a_weight():
    case = case_of(GemmSparse24Descriptor(n=8, m=16, k=32, element="f32"), "host")
    for buffer in case.args.weight.buffers:
        args = replace(case.args, y=changed(case.args.y, address=buffer.end - 4))
        rejected(case, args, InvalidProblemError, "y: expected memory apart from weight")


def test_inputs_may_share_memory(device):
    desc = PruneSparse24Descriptor(m=16, k=32, element="f32", scores="f32")
    case = case_of(desc, device)
    assert case.plan.can_implement(replace(case.args, scores=case.args.dense))


def test_column_windows_of_one_buffer_do_not_overlap(device):
    n, m, k = 6, 16, 32
    plan = select(GemmSparse24Descriptor(n=n, m=m, k=k, element="f32"), device)
    case = PlanCase(plan, random_inputs(plan.descriptor))
    whole = Guarded((n, k + m), F32, device).view

    def window(start: int, width: int, pitch: int = k + m) -> TensorView:
        address = whole.address + start * F32.itemsize
        return TensorView(address, (n, width), F32, whole.device, strides=(pitch, 1), owner=whole)

    for x, y, fits in (
        (window(0, k), window(k, m), True),
        (window(m, k), window(0, m), True),
        (window(0, k), window(k - 4, m), False),
        (window(m - 4, k), window(0, m), False),
        (window(0, k), window(k + 4, m), False),  # runs over into the next row
        (window(0, k), window(k, m, k + m + 4), False),  # rows that don't keep step
    ):
        verdict = case.plan.can_implement(replace(case.args, x=x, y=y))
        assert bool(verdict) == fits
        assert fits or "y: expected memory apart from x" in str(verdict.error)


@pytest.mark.parametrize("sizes", [(16, 0), (0, 32)], ids=["x", "y"])
def test_an_operand_without_elements_overlaps_nothing(sizes, device):
    """The empty operand may be an empty window of the other's rows."""
    n, (m, k) = 6, sizes
    plan = select(GemmSparse24Descriptor(n=n, m=m, k=k, element="f32"), device)
    case = PlanCase(plan, random_inputs(plan.descriptor))
    whole = Guarded((n, 40), F32, device).view
    for start in (0, 4, 44):
        x, y = (
            TensorView(
                whole.address + (0 if width else start) * F32.itemsize,
                (n, width),
                F32,
                whole.device,
                strides=(40, 1),
                owner=whole,
            )
            for width in (k, m)
        )
        plan.run(replace(case.args, x=x, y=y), workspace=case.workspace and case.workspace.view)


def test_operands_in_the_gaps_between_rows_do_not_overlap(device):
    """A bias, and a workspace of what a kernel needs, between rows of y."""
    n, m, k, pitch = 6, 16, 32, 64
    plan = select(GemmSparse24Descriptor(n=n, m=m, k=k, element="f32", epilogue="bias"), device)
    case = PlanCase(plan, random_inputs(plan.descriptor))
    whole = Guarded((n, pitch), F32, device).view

    def part(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
        address = whole.address + start * F32.itemsize
        return TensorView(address, shape, F32, whole.device, strides=strides, owner=whole)

    y = part(0, (n, m), (pitch, 1))
    for start, fits in ((m, True), (2 * pitch + m, True), (3 * pitch - m, True), (m - 4, False), (52, False)):
        verdict = case.plan.can_implement(replace(case.args, y=y, bias=part(start, (m,), (1,))))
        assert bool(verdict) == fits
        assert fits or "y: expected memory apart from bias" in str(verdict.error)


pieces = st.builds(
    lambda address, lines, width, gap: StridedSpan(address, lines, width + gap, width),
    st.integers(0, 60),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 12),
)


@given(one=pieces, other=pieces)
def test_lines_overlap_where_they_share_a_byte(one, other):
    def cells(piece: StridedSpan) -> set[int]:
        starts = [piece.address + at * piece.pitch for at in range(piece.lines)]
        return {start + byte for start in starts for byte in range(piece.width)}

    assert overlap(one, other) == overlap(other, one) == bool(cells(one) & cells(other))


@given(one=pieces, other=pieces, scale=st.integers(1, 1 << 40))
def test_lines_of_any_size_are_compared_at_once(one, other, scale):
    large = [StridedSpan(p.address * scale, p.lines, p.pitch * scale, p.width * scale) for p in (one, other)]
    assert overlap(*large) == overlap(one, other)


def test_columns_of_one_buffer_give_the_right_product():
    n, m, k = 6, 16, 32
    desc = GemmSparse24Descriptor(n=n, m=m, k=k, element="f32")
    case = case_of(desc, "host")
    want = case.run()["result"]
    whole = np.zeros((n, k + m), np.float32)
    whole[:, :k] = TensorView.of(case.args.x).array()
    case.plan.run(replace(case.args, x=whole[:, :k], y=whole[:, k:]))
    np.testing.assert_allclose(whole[:, k:], want.view(np.float32), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(whole[:, :k], TensorView.of(case.args.x).array())


@every_problem
def test_only_operands_that_may_be_another_are_accepted_upon_it(desc, device):
    case = case_of(desc, device)
    operands = {operand.name: operand for operand in desc.operands() if operand.role is not Role.WEIGHT}
    for out in operands.values():
        for other in operands.values():
            same = (out.shape, out.element) == (other.shape, other.element)
            if out.role is not Role.OUT or other is out or not same:
                continue
            args = replace(case.args, **{out.argument: getattr(case.args, other.argument)})
            assert bool(case.plan.can_implement(args)) == (out.may_be == other.name)


@pytest.mark.parametrize("kind", [PruneSparse24Descriptor, MaskSparse24Descriptor])
@pytest.mark.parametrize("element", ["f16", "f32"])
def test_in_place(kind, element, device):
    desc = kind(m=16, k=32, element=element)
    case = case_of(desc, device)
    out = "pruned" if kind is PruneSparse24Descriptor else "masked"
    want = case.run()[out]
    case.plan.run(replace(case.args, **{out: case.args.dense}))
    case.fetch()
    got = case.guarded["dense"].numpy()
    assert np.array_equal(got.view(want.dtype).reshape(want.shape), want)
