"""Runs one random problem and checks all that its plan promises. Refusals are typed, and write nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparse24_plans import (
    CompressSparse24Descriptor,
    DecompressSparse24Descriptor,
    DequantizeSparse24Descriptor,
    DgradSparse24Args,
    ElementKind,
    FormatError,
    GemmSparse24Args,
    GemmSparse24Plan,
    MaskSparse24Descriptor,
    MisalignedOperandError,
    PackSparse24Descriptor,
    PlanPreference,
    PruneQuantizeSparse24Descriptor,
    QuantizeSparse24Descriptor,
    Sparse24Error,
    Sparse24Weight,
    TilePruneSparse24Descriptor,
    UnsupportedError,
)
from sparse24_plans.arithmetic.epilogue import encoded
from sparse24_plans.plan.operands import Role
from sparse24_plans.weights.packing import pack

from ..float64 import reference
from ..gemm.grouped_cases import grouped_case
from ..plan.cases import equal, matrix, parts_of
from ..prepare.models import (
    bitmask,
    compressed,
    cover,
    dequantized,
    kept_cells,
    largest,
    model,
    numbers,
    quantized_parts,
    quantized_rows,
)
from ..prepare.prepare_cases import PrepareCase
from ..support import POISON, Case, Data, case_of, same_bits, weight_of
from .batches import BatchedProduct, check_batched
from .block_problems import BlockProblem
from .check_blocks import check_block_problem
from .problems import GroupedProduct, Preparation, Problem, Product


def check(problem: Problem, device: int | str) -> bool:
    """Whether the problem was served; False: refused. Raises AssertionError, or whatever went wrong."""
    if isinstance(problem, BlockProblem):
        return check_block_problem(problem, device)
    if isinstance(problem, Preparation):
        return _check_preparation(problem, device)
    if isinstance(problem, GroupedProduct):
        return _check_grouped(problem, device)
    if isinstance(problem, BatchedProduct):
        plan = _selected(problem, device)
        return plan is not None and check_batched(problem, plan, _check_numbers)
    return _check_product(problem, device)


_REPLAYED = 200
"""Most results of a product that are recomputed."""

# Products -----------------------------------------------------------------------------------------


def _selected(
    problem: Product | GroupedProduct | BatchedProduct, device: int | str
) -> GemmSparse24Plan | None:
    """The problem's plan; None if no kernel serves it. The host serves all that no preference forbids."""
    try:
        return GemmSparse24Plan.select(problem.desc, device=device, preference=problem.preference)
    except UnsupportedError:
        assert device != "host" or problem.preference != PlanPreference(), "the host serves every product"
        return None


def _check_product(problem: Product, device: int | str) -> bool:
    desc = problem.desc
    if (plan := _selected(problem, device)) is None:
        return False
    data = problem.data()
    case = case_of(plan, data, problem.pads, problem.offsets, in_place=problem.in_place)
    verdict = plan.can_implement(case.args)
    if not verdict:
        _check_refusal(problem, case, data.c if problem.in_place else None, verdict.error)
        return _check_product(replace(problem, pads=(0, 0, 0), offsets=(0, 0, 0)), device)
    got = case.run().copy()
    known = reference(plan, case.x, case.dense, case.bias, case.scale, case.c, case.scale_y)
    _check_numbers(plan, got, *known)
    if case.amax is not None:
        _check_largest(got, case.largest(), case.scale_y, desc.out_element)
    _check_inputs(case, data)
    if plan.guarantee.deterministic:
        _check_the_same_again(case, got, data.c if problem.in_place else None)
    if plan.guarantee.batch_invariant and problem.rows:
        _check_rows(problem, device, data, got, plan.sku.backend)
    if plan.guarantee.arithmetic is not None:
        _check_replay(plan, data, got)
    return True


def _check_grouped(problem: GroupedProduct, device: int | str) -> bool:
    if (plan := _selected(problem, device)) is None:
        return False
    lies = {"pad": problem.pad, "in_place": problem.in_place}
    case = grouped_case(plan, problem.tokens, problem.data_seed, routing=problem.routing(), **lies)
    got = case.run().copy()
    if case.has_shared_rows():
        return True
    if problem.desc.y_rows is not None:
        exact, allowed = case.sums()
        covered = np.isfinite(allowed)
        _check_numbers(plan, got[covered], exact[covered], allowed[covered])
    else:
        case.check_the_rest(got)
        written = [np.zeros((0, got.shape[1]), got.dtype)]
        for data, (begin, end) in case.of_groups():
            known = reference(plan, data.x, data.dense, data.bias, data.scale(), data.c, data.scale_y)
            _check_numbers(plan, got[begin:end], *known)
            written.append(got[begin:end])
        if plan.descriptor.amax:
            scale_y = case.data[0].scale_y
            _check_largest(np.concatenate(written), case.largest(), scale_y, plan.descriptor.out_element)
    if plan.guarantee.deterministic:
        if problem.in_place:
            case.result.fill(case.data[0].c)
        assert same_bits(case.run(), got), "other bits in a second run"
    return True


def _check_refusal(problem: Product, case: Case, c: np.ndarray | None, error: Sparse24Error | None) -> None:
    """Check that misaligned operands are refused as announced, and that nothing is written, nor onto C."""
    assert isinstance(error, (UnsupportedError, MisalignedOperandError)), repr(error)
    assert any((*problem.pads, *problem.offsets)), f"refused although packed and aligned: {error}"
    with pytest.raises(type(error)):
        case.run()
    is_kept = case.result.untouched() if c is None else same_bits(case.result.numpy(), c)
    assert is_kept, f"refused, but written: {error}"


def _check_numbers(plan: GemmSparse24Plan, got: np.ndarray, exact: np.ndarray, tolerance: np.ndarray) -> None:
    """Results lie within the guarantee's bound, which may reach beyond the range of their type.

    A library that scales partial sums by alpha before it adds them may give NaN where alpha times the sum is
    beyond float32: docs/guarantees.md. A gate that is Inf, or its other factor, may give NaN too.
    """
    out, wide = plan.descriptor.out_element, got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        right = np.abs(wide - exact) <= tolerance
        if plan.descriptor.epilogue.is_gated:
            right |= np.isinf(tolerance)
        if not out.is_integer:
            most = ElementKind.F32.largest
            for sign in (1.0, -1.0):
                right |= (wide == sign * np.inf) & (sign * exact + tolerance >= out.largest)
            right |= (wide == exact) & np.isinf(wide)
            if plan.sku.backend == "inflate_cublas":
                right |= np.isnan(wide) & (np.abs(exact) >= most)
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise AssertionError(
            f"{(~right).sum()} of {right.size} results are wrong, the first at {at}: got {wide[at]!r}, "
            f"exact {exact[at]!r}, allowed {tolerance[at]!r}"
        )


def _check_largest(
    got: np.ndarray, largest: np.float32, scale_y: np.ndarray | None, out: ElementKind
) -> None:
    """The largest magnitude of all becomes the largest of the results, because rounding keeps their order."""
    scale = np.float32(1) if scale_y is None else scale_y[0]
    with np.errstate(over="ignore"):
        want = encoded(np.array([largest * scale]), out)[0]
    found = np.ascontiguousarray(got).view(np.uint8) & 0x7F
    assert found.max(initial=0) == want, f"amax is {largest!r}"


def _check_inputs(case: Case, data: Data) -> None:
    values = data.x, data.bias, data.scale_x, data.scale_w, data.scale_y, data.c
    given = [value for value in values if value is not None]
    inputs = [operand for operand in case.inputs if operand is not case.amax]
    for operand, value in zip(inputs, given[: len(inputs)], strict=True):  # c may be y
        assert same_bits(operand.numpy().copy(order="C"), np.ascontiguousarray(value)), "an input was written"


def _check_the_same_again(case: Case, got: np.ndarray, c: np.ndarray | None) -> None:
    """Through a bound plan, onto poison, or onto C."""
    bits = case.result.view.bits()
    if c is not None:
        case.result.fill(c)
    else:
        bits[...] = bits.dtype.type(POISON * (2 ** (8 * bits.itemsize) - 1) // 0xFF)
    case.plan.bind(case.args, workspace=case.workspace and case.workspace.view).launch()
    again = case.fetch()
    assert same_bits(np.ascontiguousarray(again), np.ascontiguousarray(got)), "other bits in a second run"


def _check_replay(plan: GemmSparse24Plan, data: Data, got: np.ndarray) -> None:
    """Some results have the bits that the plan's arithmetic gives on the host."""
    desc = plan.descriptor
    x, result, c = (
        np.asfortranarray(values) if order == "column" else np.ascontiguousarray(values)
        for values, order in ((data.x, desc.x_order), (got, desc.y_order), (data.c, desc.y_order))
    )
    weight = weight_of(data.dense, desc)
    if desc.op == "forward":
        found = plan.replay(
            GemmSparse24Args(
                weight,
                x,
                result,
                data.bias,
                data.scale_x,
                data.scale_w,
                None if data.c is None else c,
                scale_y=data.scale_y,
                amax=data.amax,
            ),
            _REPLAYED,
        )
    else:
        found = plan.replay(DgradSparse24Args(weight, x, result), _REPLAYED)
    assert found.equal, f"{found.differing} of {found.compared} aren't {found.arithmetic}'s: {found.first}"


def _check_rows(problem: Product, device: int | str, data: Data, got: np.ndarray, backend: str) -> None:
    """Some rows alone, in another order, give the bits that they gave among the others.

    Any plan must do so if batch invariance was required, else a plan of the same kernel: a workspace that is
    too small for all rows may suffice for some, and for another kernel.
    """
    rows = list(problem.rows)
    scale_x = data.scale_x
    if problem.desc.scale_x == "row":
        scale_x = data.scale_x[rows]
    c = None if data.c is None else np.ascontiguousarray(data.c[rows])
    desc = problem.desc.model_copy(update={"n": len(rows)})
    require = problem.preference.require
    wanted = problem.preference.model_copy(
        update={"require": require.model_copy(update={"batch_invariant": True})}
    )
    if not require.batch_invariant:
        wanted = wanted.model_copy(update={"prefer_backend": backend})
    try:
        plan = GemmSparse24Plan.select(desc, device=device, preference=wanted)
    except UnsupportedError:
        return  # a backend that was asked for may not serve this n
    part = case_of(plan, replace(data, x=np.ascontiguousarray(data.x[rows]), scale_x=scale_x, c=c))
    try:
        found = part.run()
    except MisalignedOperandError:
        return
    assert same_bits(np.ascontiguousarray(found), np.ascontiguousarray(got[rows])), "rows depend on others"


# Preparations -------------------------------------------------------------------------------------


def _check_preparation(problem: Preparation, device: int | str) -> bool:
    inputs = _inputs(problem)
    case = PrepareCase(problem.desc, device, inputs, problem.without)
    found = {name: bits.copy() for name, bits in case.run().items()}
    if device == "host":
        want, wrong = _model(problem, inputs)
        want = {name: bits for name, bits in want.items() if name in found}
    else:
        host = PrepareCase(problem.desc, "host", inputs, problem.without)
        want, wrong = host.run(), None
    for name, bits in want.items():
        assert np.array_equal(found[name], bits), f"{name} is not what was expected"
    if wrong is not None:
        _check_report(case, wrong)
    if isinstance(problem.desc, PackSparse24Descriptor) and problem.desc.direction == "pack":
        back = problem.desc.model_copy(update={"direction": "unpack"})
        unpacked = PrepareCase(back, device, found).run()
        assert all(np.array_equal(unpacked[name], bits) for name, bits in inputs.items()), (
            "not packed's inverse"
        )
    case.poison()
    assert equal(case.run(), found), "other bits in a second run"
    return True


def _check_report(case: PrepareCase, wrong: np.ndarray) -> None:
    """The status names the first bad (row, group), or none."""
    if not len(wrong):
        case.plan.check(case.args)
        return
    with pytest.raises(FormatError) as caught:
        case.plan.check(case.args)
    assert (caught.value.row, caught.value.group) == tuple(wrong[0])


def _inputs(problem: Preparation) -> dict[str, np.ndarray]:
    """Bits of what is read: of a compressed weight sound ones, of all else any."""
    rng, desc = np.random.default_rng(problem.data_seed), problem.desc
    if isinstance(desc, QuantizeSparse24Descriptor):
        read = [one for one in desc.operands() if one.role is not Role.OUT]
        return {one.name: matrix(rng, one.shape, one.element, problem.mood) for one in read}
    element = getattr(desc, "dense_element", desc.element)
    dense = matrix(rng, (desc.m, desc.k), element, problem.mood)
    weight = Sparse24Weight.prune_compress(dense, element=element)
    is_sparse = isinstance(desc, CompressSparse24Descriptor) or getattr(desc, "sparse", False)
    if is_sparse and rng.random() < 0.7:
        dense = weight.decompress().view(element.bits_dtype)
    known = {"dense": dense, "metadata": weight.metadata}
    if not isinstance(desc, DequantizeSparse24Descriptor):
        known["values"] = weight.values.view(element.bits_dtype)
    if isinstance(desc, PackSparse24Descriptor) and rng.random() < 0.7:
        known["packed"] = pack(weight).buffers[0].bits()
    read = [operand for operand in desc.operands() if operand.role is not Role.OUT]
    parts = [part for operand in read for part in parts_of(operand)]
    for part in parts:
        if part.name not in known:
            known[part.name] = matrix(rng, part.shape, part.element, "any_bits")
    return {part.name: known[part.name] for part in parts}


def _model(
    problem: Preparation, inputs: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return the expected results, and the bad (row, group)s that the status must name, if it names any."""
    desc = problem.desc
    if isinstance(desc, DecompressSparse24Descriptor):
        weight = Sparse24Weight(inputs["values"], inputs["metadata"], element=desc.element)
        return {"dense": weight.decompress().view(desc.element.bits_dtype)}, None
    if isinstance(desc, PackSparse24Descriptor):
        return {}, None  # packing: tests/weights; both ways: _check_preparation
    if isinstance(desc, QuantizeSparse24Descriptor):
        given = float(inputs["scale"].view(np.float32)[0]) if desc.static_scale else None
        codes, scales = quantized_rows(inputs["x"].view(desc.element.dtype), desc.out_element, given)
        return {"quantized": codes, "scale": scales.view(np.uint32)}, None
    if isinstance(desc, DequantizeSparse24Descriptor):
        return {"dequantized": dequantized(desc, inputs)}, None
    dense = inputs["dense"]
    if isinstance(desc, MaskSparse24Descriptor):
        keep = np.unpackbits(inputs["mask"], axis=-1, bitorder="little").astype(bool)
        if desc.layout == "tiles":
            keep = _of_tiles(keep, desc.m, desc.k)
        return {"masked": np.where(keep, dense, 0)}, None
    if isinstance(desc, TilePruneSparse24Descriptor):
        keep = kept_cells(dense, desc.element, desc.rule)
        (values, metadata), (values_t, metadata_t) = compressed(dense, keep), compressed(dense.T, keep.T)
        results = {"values": values, "metadata": metadata, "values_t": values_t, "metadata_t": metadata_t}
        return {**results, "mask": bitmask(keep)}, None
    cells, wrong = numbers(dense, getattr(desc, "dense_element", desc.element)), None
    if isinstance(desc, CompressSparse24Descriptor) or getattr(desc, "sparse", False):
        wrong = np.argwhere((cells != 0).reshape(desc.m, desc.k // 4, 4).sum(axis=2) > 2)
        found = model(dense, lambda row, group: cover(cells[row, 4 * group : 4 * group + 4]))
    else:
        keys = numbers(inputs["scores"], desc.scores) if desc.scores else np.abs(cells)
        found = model(dense, lambda row, group: largest(list(keys[row, 4 * group : 4 * group + 4])))
    if isinstance(desc, PruneQuantizeSparse24Descriptor):
        found |= quantized_parts(desc, found["values"], found["metadata"])
    return found, wrong


def _of_tiles(keep: np.ndarray, m: int, k: int) -> np.ndarray:
    """Bits [M/8, K/8, 64] of squares, by 4x4 tile in row-major order, as a matrix."""
    tiles = keep.reshape(m // 8, k // 8, 2, 2, 4, 4)
    return tiles.transpose(0, 2, 4, 1, 3, 5).reshape(m, k)
