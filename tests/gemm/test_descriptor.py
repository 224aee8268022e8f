"""The descriptor of a product: which fields go together, and what is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given

from sparse24_plans import ElementKind, GemmSparse24Descriptor, InvalidProblemError

from ..strategies import FP8, RESULTS, gemm_descriptors

CHANGES = {
    "n": 2,
    "m": 16,
    "k": 16,
    "element": "bf16",
    "weight_element": "s4",
    "weight_group": 128,
    "weight_scale_element": "f32",
    "op": "dgrad",
    "epilogue": "bias",
    "alpha": 0.5,
    "out_element": "f32",
    "bias_element": "f32",
    "x_order": "column",
    "y_order": "column",
    "scale_x": "tensor",
    "scale_w": "row",
    "groups": 1,
    "group_tokens": "counts",
    "x_rows": 3,
    "y_rows": 3,
    "top_k": 2,
    "beta": 0.5,
    "c_element": "f32",
    "relu_threshold": 0.5,
    "relu_upper_bound": 6.0,
    "batches": 2,
    "shared_weight": True,
    "x_element": "fp8_e5m2",
    "scale_y": "tensor",
    "amax": True,
}
BESIDE = {
    "x_element": {"element": "fp8_e4m3"},
    **{name: {"out_element": "fp8_e4m3"} for name in ("scale_y", "amax")},
    **{name: {"epilogue": "relu"} for name in ("relu_threshold", "relu_upper_bound")},
    **{name: {"groups": 1} for name in ("group_tokens", "x_rows")},
    "y_rows": {"groups": 1, "top_k": 1},
    "top_k": {"groups": 1, "y_rows": 1},
    "shared_weight": {"batches": 1},
    **{name: {"weight_element": "s8"} for name in ("weight_group", "weight_scale_element")},
}
"""Further fields of the problems, which the changed one needs."""


def test_any_changed_field_makes_another_problem():
    fields = {"n": 1, "m": 8, "k": 8, "element": "f16"}
    problems = [
        GemmSparse24Descriptor(**{**fields, **BESIDE.get(name, {}), name: value})
        for name, value in CHANGES.items()
        if name not in fields
    ]
    problems += [
        GemmSparse24Descriptor(**{**fields, name: value}) for name, value in CHANGES.items() if name in fields
    ]
    assert set(CHANGES) == set(GemmSparse24Descriptor.model_fields)
    assert len({GemmSparse24Descriptor(**fields), *problems}) == 1 + len(CHANGES)


@pytest.mark.parametrize(("element", "results"), RESULTS.items())
def test_results_and_biases_of_8_bit_elements(element, results):
    sizes = {"n": 1, "m": 8, "k": 8, "element": element}
    desc = GemmSparse24Descriptor(**sizes)
    assert desc.out_element == results[0]
    for out in ElementKind:
        if out in FP8 and element in FP8:
            continue  # test_fp8_results.py
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


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": 12}, "k"),
        ({"k": -8}, "k"),
        ({"n": -1}, "n"),
        ({"m": 1.5}, "m"),
        ({"m": 2**63}, "m"),
        ({"n": 2**40, "k": 2**40}, "2^63"),
        ({"element": "f64"}, "element"),
        ({"epilogue": "bias_tanh"}, "epilogue"),
        ({"op": "wgrad"}, "op"),
        ({"op": "dgrad", "epilogue": "bias"}, "epilogue"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 1e39}, "alpha"),
        ({"out_element": "f16"}, "out_element"),
        ({"bias_element": "bf16"}, "bias_element"),
        ({"typo": 1}, "typo"),
        ({"x_order": "diagonal"}, "x_order"),
        ({"scale_w": "block"}, "scale_w"),
        ({"op": "dgrad", "y_order": "column"}, "y_order"),
        ({"op": "dgrad", "scale_x": "tensor"}, "scale_x"),
    ],
)
def test_descriptor(change, word):
    good = {"n": 1, "m": 8, "k": 8, "element": "f32"}
    with pytest.raises(InvalidProblemError, match=word.replace("^", r"\^")):
        GemmSparse24Descriptor(**{**good, **change})


def test_json_that_is_not_a_descriptor():
    for text in ("", "[]", "{", '{"n":1}'):
        with pytest.raises(InvalidProblemError):
            GemmSparse24Descriptor.model_validate_json(text)


@given(desc=gemm_descriptors())
def test_what_is_derived_of_a_descriptor(desc):
    """Reduction and outputs by op; one operand for each part of the definition, of its shape and element."""
    forward = desc.op == "forward"
    assert desc.op_name == f"gemm_sparse24_{desc.op.value}"
    assert (desc.reduction, desc.sums) == ((desc.k, desc.m) if forward else (desc.m, desc.k))
    assert desc.outputs == (desc.m // 2 if "glu" in desc.epilogue else desc.sums)
    operands = {one.argument: (one.shape, one.element) for one in desc.operands()}
    want = {"weight": ((desc.m, desc.k), desc.element)}
    want["x" if forward else "dy"] = ((desc.n, desc.reduction), desc.x_element)
    want["y" if forward else "dx"] = ((desc.n, desc.outputs), desc.out_element)
    if "bias" in desc.epilogue:
        want["bias"] = ((desc.m,), desc.bias_element)
    for name, kind, rows in (("scale_x", desc.scale_x, desc.n), ("scale_w", desc.scale_w, desc.m)):
        if kind != "none":
            want[name] = ((1 if kind == "tensor" else rows,), ElementKind.F32)
    if desc.beta:
        want["c"] = ((desc.n, desc.m), desc.c_element)
    for name, asked in (("scale_y", desc.scale_y == "tensor"), ("amax", desc.amax)):
        if asked:
            want[name] = ((1,), ElementKind.F32)
    assert operands == want


def test_only_elements_of_weights_are_offered():
    """The names of NumPy and PyTorch are taken; an accumulator's type is offered to nobody."""
    assert GemmSparse24Descriptor(n=1, m=8, k=8, element="float16").element is ElementKind.F16
    offered = "expected one of f32, f16, bf16, s8, fp8_e4m3, fp8_e5m2, got 'float12'"
    with pytest.raises(InvalidProblemError, match=f"element: {offered}"):
        GemmSparse24Descriptor(n=1, m=8, k=8, element="float12")


def test_both_zeros_of_alpha_are_one_problem():
    one, other = (GemmSparse24Descriptor(n=1, m=8, k=8, element="f32", alpha=a) for a in (0.0, -0.0))
    assert one == other
    assert str(other.alpha) == "0.0"
