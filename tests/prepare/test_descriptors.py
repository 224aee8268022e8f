"""Descriptors of weights to prepare: fields that are wrong are named."""

from __future__ import annotations

import pytest
from hypothesis import given

from sparse24_plans import (
    ElementKind,
    InvalidProblemError,
    MaskSparse24Descriptor,
    PackSparse24Descriptor,
    PruneCompressSparse24Descriptor,
    PruneQuantizeSparse24Descriptor,
    PruneSparse24Descriptor,
    QuantizeSparse24Descriptor,
    TilePruneSparse24Descriptor,
)
from sparse24_plans.plan.operands import Role

from ..strategies import prepare_descriptors
from .prepare_cases import ON_HOST_ALONE, PLANS

M, K = 16, 32


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"m": -8}, "m"),
        ({"m": 8.0}, "m"),
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


@pytest.mark.parametrize("kind", [kind for kind in PLANS if kind is not QuantizeSparse24Descriptor])
def test_weights_have_columns_in_eights(kind):
    with pytest.raises(InvalidProblemError, match="k"):
        kind(m=M, k=12, element="bf16")


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
        *(
            (kind, change, field)
            for kind in ON_HOST_ALONE
            for change, field in (
                ({"element": "f32"}, "element: expected f16 or bf16"),
                ({"stored": "bf16"}, "stored: expected s4 or s8 or fp8_e4m3"),
                ({"group": 16}, "group: expected 0 or 32 or 64 or 128"),
                ({"scale_element": "f16"}, "scale_element: expected bf16 or f32"),
            )
        ),
        (PruneQuantizeSparse24Descriptor, {"dense_element": "s8"}, "dense_element: expected f32 or f16"),
        (PruneQuantizeSparse24Descriptor, {"rule": "smallest"}, "rule"),
        (PruneQuantizeSparse24Descriptor, {"sparse": True, "scores": "f32"}, "scores: expected None"),
        (PruneQuantizeSparse24Descriptor, {"sparse": 1}, "sparse"),
    ],
)
def test_a_wrong_field_of_one_kind_is_named(kind, change, field):
    with pytest.raises(InvalidProblemError, match=field):
        kind(**{"m": M, "k": K, "element": "bf16", **change})


@given(desc=prepare_descriptors())
def test_every_operand_has_the_shape_that_its_documentation_says(desc):
    """docs/preparing.md and the arguments' docstrings."""
    m, k = desc.m, desc.k
    if "pack" in desc.op and desc.element not in ("f16", "bf16", "s8", "fp8_e4m3"):
        return  # no layout to be of
    element, u8, u16 = desc.element, ElementKind.U8, ElementKind.U16
    tiles = desc.op == "tile_prune" or getattr(desc, "layout", None) == "tiles"
    shapes = {
        **dict.fromkeys(("dense", "pruned", "masked"), ((m, k), element)),
        "scores": ((m, k), getattr(desc, "scores", None)),
        "values": ((m, k // 2), element),
        "metadata": ((m, k // 8), u16),
        "values_t": ((k, m // 2), element),
        "metadata_t": ((k, m // 8), u16),
        "mask": ((m // 8, k // 8, 8) if tiles else (m, k // 8), u8),
        "status": ((8,), u8),
        "weight": ((m, k), element),
        "x": ((m, k), element),
        "quantized": ((m, k), getattr(desc, "out_element", None)),
        "scale": ((1,) if getattr(desc, "static_scale", False) else (m,), ElementKind.F32),
    }
    if desc.op == "pack":
        depth, nbytes = (128, 9216) if element.itemsize == 2 else (256, 10240)
        shapes["packed"] = ((-(-m // 64), -(-k // depth), nbytes), u8)
    if desc.op == "unpack":
        shapes["packed"] = ((m, k), element)
    if isinstance(desc, ON_HOST_ALONE):
        width, held = (k // 4, u8) if desc.stored == "s4" else (k // 2, desc.stored)
        shapes |= {
            "dense": ((m, k), getattr(desc, "dense_element", None)),
            "values": ((m, width), held),
            "scales": ((m, -(-k // desc.group) if desc.group else 1), desc.scale_element),
            "dequantized": ((m, k // 2), element),
        }
    for operand in desc.operands():
        assert (operand.shape, operand.element) == shapes[operand.name], operand.name
    roles = {operand.name: operand.role for operand in desc.operands()}
    assert Role.OUT in roles.values()
    assert set(roles.values()) & {Role.IN, Role.WEIGHT}


def test_elements_without_a_layout_have_no_operands_to_pack():
    desc = PackSparse24Descriptor(m=M, k=K, element="u8")
    assert PLANS[type(desc)].explain_choice(desc, device="host").chosen is None
