"""s8 and fp8_e4m3, scales, and operands in columns: the host tier against their definition.

The host is the oracle for kernels of these elements, so its integers are checked to the bit.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse24_plans import (
    DgradSparse24Args,
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    Sparse24Weight,
)

from ..support import EPILOGUES, make_case, random_values, same_bits

BLAS, STRICT = "host_blas", "host_strict"
modes = pytest.mark.parametrize("row", [BLAS, STRICT])
RESULTS = {"s8": ("i32", "s8", "f16", "bf16", "f32"), "fp8_e4m3": ("bf16", "f16", "f32")}
PAIRS = [(element, out) for element, results in RESULTS.items() for out in results]


@modes
@pytest.mark.parametrize(("element", "out"), PAIRS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_result_of_every_epilogue(row, element, out, epilogue):
    # f16 must not overflow, and s8 must both round and saturate.
    alpha = {"f16": 0.01, "s8": 1 / 256}.get(out, 1.0)
    desc = GemmSparse24Descriptor(
        n=9, m=40, k=64, element=element, out_element=out, epilogue=epilogue, alpha=alpha
    )
    case = make_case(desc, row=row)
    case.check(case.run())


@pytest.mark.parametrize(("element", "out"), [*PAIRS, ("bf16", "bf16"), ("f32", "f32")])
@modes
def test_the_tanh_gelu(row, element, out):
    alpha = 1 / 256 if element == "s8" else 1.0
    desc = GemmSparse24Descriptor(
        n=9, m=40, k=64, element=element, out_element=out, epilogue="bias_gelu_tanh", alpha=alpha
    )
    case = make_case(desc, row=row)
    case.check(case.run())


@modes
def test_s8_is_summed_exactly(row):
    """Beyond 2^24, where float32 has no odd numbers; into the bits below an int32's own limit."""
    k = 2**14
    x = np.full((2, k), 127, np.int8)
    dense = np.zeros((3, k), np.int8)
    dense[:, ::2] = 127
    dense[0, 0] = 126
    case = make_case(GemmSparse24Descriptor(n=2, m=3, k=k, element="s8"), row=row, x=x, dense=dense)
    want = x.astype(np.int64) @ dense.astype(np.int64).T
    assert want.min() > 2**26
    assert same_bits(case.run(), want.astype(np.int32))


@modes
def test_s8_rounds_halves_to_even_and_saturates(row):
    x = np.zeros((1, 8), np.int8)
    x[0, 0] = 1
    values = np.array([1, 2, 3, 5, -1, -3, 127, -128], np.int8)
    dense = np.zeros((8, 8), np.int8)
    dense[:, 0] = values
    for alpha, want in ((0.5, [0, 1, 2, 2, 0, -2, 64, -64]), (2.0, [2, 4, 6, 10, -2, -6, 127, -128])):
        desc = GemmSparse24Descriptor(n=1, m=8, k=8, element="s8", out_element="s8", alpha=alpha)
        assert make_case(desc, row=row, x=x, dense=dense).run().tolist() == [want]


def test_both_modes_give_the_same_integers():
    desc = GemmSparse24Descriptor(n=7, m=24, k=136, element="s8", out_element="s8", alpha=1 / 300)
    assert same_bits(make_case(desc, row=BLAS).run(), make_case(desc, row=STRICT).run())


@modes
@pytest.mark.parametrize("element", RESULTS)
def test_dgrad_of_8_bit_elements(row, element):
    desc = GemmSparse24Descriptor(n=5, m=24, k=32, element=element, op="dgrad")
    case = make_case(desc, row=row)
    case.check(case.run())


@modes
@pytest.mark.parametrize(("scale_x", "scale_w"), list(product(("none", "tensor", "row"), repeat=2)))
@pytest.mark.parametrize(("element", "out"), [("s8", "bf16"), ("fp8_e4m3", "f32"), ("bf16", "bf16")])
def test_scales(row, element, out, scale_x, scale_w):
    desc = GemmSparse24Descriptor(
        n=6,
        m=24,
        k=64,
        element=element,
        out_element=out,
        epilogue="bias_relu",
        alpha=0.5,
        scale_x=scale_x,
        scale_w=scale_w,
    )
    case = make_case(desc, row=row)
    case.check(case.run())


@modes
@pytest.mark.parametrize(("x_order", "y_order"), list(product(("row", "column"), repeat=2)))
@pytest.mark.parametrize("pad", [0, 24])
def test_orders(row, x_order, y_order, pad):
    problem = {"n": 12, "m": 24, "k": 32, "element": "f16", "epilogue": "bias"}
    rows = make_case(GemmSparse24Descriptor(**problem), row=row).run()
    desc = GemmSparse24Descriptor(**problem, x_order=x_order, y_order=y_order)
    case = make_case(desc, row=row, pad=pad)
    got = case.run()
    case.check(got)
    if row == STRICT:
        assert same_bits(np.ascontiguousarray(got), rows)


@settings(max_examples=15)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 9).map(lambda units: 8 * units)),
    pair=st.sampled_from(PAIRS),
    orders=st.tuples(*[st.sampled_from(["row", "column"])] * 2),
    scales=st.tuples(*[st.sampled_from(["none", "tensor", "row"])] * 2),
    strict=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_problem(shape, pair, orders, scales, strict, seed):
    n, m, k = shape
    desc = GemmSparse24Descriptor(
        n=n,
        m=m,
        k=k,
        element=pair[0],
        out_element=pair[1],
        alpha=2.0**-6,
        x_order=orders[0],
        y_order=orders[1],
        scale_x=scales[0],
        scale_w=scales[1],
    )
    case = make_case(desc, row=STRICT if strict else BLAS, seed=seed)
    case.check(case.run())


# Refusals -----------------------------------------------------------------------------------------


def arguments(**change):
    rng = np.random.default_rng(0)
    weight = Sparse24Weight.prune_compress(random_values(rng, (8, 16), ElementKind.S8))
    given = {
        "weight": weight,
        "x": np.zeros((4, 16), np.int8),
        "y": np.zeros((4, 8), np.float32),
        "scale_x": np.ones(4, np.float32),
        "scale_w": np.ones(1, np.float32),
    }
    return GemmSparse24Args(**{**given, **change})


@pytest.fixture
def plan():
    desc = GemmSparse24Descriptor(
        n=4, m=8, k=16, element="s8", out_element="f32", scale_x="row", scale_w="tensor"
    )
    return GemmSparse24Plan.select(desc, device="host")


def test_what_the_plan_takes(plan):
    assert plan.can_implement(arguments())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale_x": None}, ("scale_x", "[4]", "NoneType")),
        ({"scale_x": np.ones(1, np.float32)}, ("scale_x", "[4]", "[1]")),
        ({"scale_w": np.ones(8, np.float32)}, ("scale_w", "[1]", "[8]")),
        ({"scale_w": np.ones(1, np.float16)}, ("scale_w", "f32", "f16")),
        ({"scale_x": np.ones(8, np.float32)[::2]}, ("scale_x", "contiguous")),
        ({"x": np.zeros((4, 16), np.uint8)}, ("x", "s8", "u8")),
        ({"y": np.zeros((4, 8), np.int32)}, ("y", "f32", "i32")),
    ],
)
def test_bad_operands(plan, change, words):
    verdict = plan.can_implement(arguments(**change))
    assert isinstance(verdict.error, InvalidProblemError)
    for word in words:
        assert word in str(verdict.error)


def test_a_scale_that_was_not_asked_for():
    plan = GemmSparse24Plan.select(GemmSparse24Descriptor(n=4, m=8, k=16, element="s8"), device="host")
    args = arguments(y=np.zeros((4, 8), np.int32), scale_x=None)
    with pytest.raises(InvalidProblemError, match="scale_w: expected None"):
        plan.run(args)


def test_a_result_that_overlaps_a_scale(plan):
    memory = np.ones((4, 8), np.float32)
    with pytest.raises(InvalidProblemError, match="y: expected memory apart from scale_x"):
        plan.run(arguments(y=memory, scale_x=memory[0, :4]))


@pytest.mark.parametrize(("name", "order"), [("x", "row"), ("x", "column"), ("y", "row"), ("y", "column")])
def test_an_operand_in_the_other_order(name, order):
    desc = GemmSparse24Descriptor(n=4, m=8, k=16, element="s8", **{f"{name}_order": order})
    plan = GemmSparse24Plan.select(desc, device="host")
    shapes = {"x": (4, 16), "y": (4, 8)}
    dtypes = {"x": np.int8, "y": np.int32}
    made = {key: np.zeros(shapes[key], dtypes[key]) for key in shapes}
    made[name] = np.zeros(shapes[name], dtypes[name], order="F" if order == "row" else "C")
    args = arguments(**made, scale_x=None, scale_w=None)
    with pytest.raises(InvalidProblemError, match=f"{name}: expected unit stride along its {order}s"):
        plan.run(args)


def test_dgrad_takes_its_own_arguments():
    desc = GemmSparse24Descriptor(n=4, m=8, k=16, element="s8", op="dgrad")
    plan = GemmSparse24Plan.select(desc, device="host")
    weight = arguments().weight
    plan.run(DgradSparse24Args(weight, np.ones((4, 8), np.int8), np.empty((4, 16), np.int32)))
    with pytest.raises(InvalidProblemError, match="args: expected DgradSparse24Args"):
        plan.run(arguments())
