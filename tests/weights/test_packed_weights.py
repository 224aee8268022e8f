"""Packed weights as objects: what packing takes, what buffers they have, copies and pickles of their own."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparse24_plans import (
    BufferTooSmallError,
    Device,
    FormatError,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PackedWeight,
    Sparse24QuantizedWeight,
    Sparse24Weight,
    TensorView,
    UnsupportedError,
)
from sparse24_plans.vocab import IN_MEMORY
from sparse24_plans.weights.packing import pack, unpack

from .instructions import (
    integer_weight,
    nibble_place,
)

gpu = pytest.mark.gpu


TILED = ("f32", "f16", "bf16", "s8", "fp8_e4m3", "fp8_e5m2")


@pytest.mark.parametrize("element", [kind for kind in IN_MEMORY if kind not in TILED])
def test_other_elements_are_unsupported(element):
    weight = Sparse24Weight.compress(np.zeros((8, 16), element.dtype))
    with pytest.raises(UnsupportedError, match=f"no tile layout holds {element}"):
        pack(weight)
    with pytest.raises(UnsupportedError, match=f"no tile layout holds {element}"):
        unpack(replace(pack(integer_weight(8, 16, "f16")), element=element))


@pytest.mark.parametrize("wrong", [None, 3, "weight", np.zeros((8, 16), np.float16)])
def test_wrong_types(wrong):
    with pytest.raises(InvalidProblemError, match="weight: expected Sparse24Weight, got"):
        pack(wrong)
    with pytest.raises(InvalidProblemError, match="packed: expected PackedWeight, got"):
        unpack(wrong)


def test_packed_and_canonical_are_not_confused():
    weight = integer_weight(8, 16, "f16")
    with pytest.raises(InvalidProblemError, match="got PackedWeight"):
        pack(pack(weight))
    with pytest.raises(InvalidProblemError, match="got Sparse24Weight"):
        unpack(weight)
    with pytest.raises(InvalidProblemError, match="got 'canonical'"):
        unpack(PackedWeight.canonical(weight))


def test_unpack_refuses_other_buffers():
    packed = pack(integer_weight(70, 136, "f16"))
    tiles = packed.buffers[0].array()
    for wrong in (tiles.reshape(-1), tiles.view(np.int8)):
        with pytest.raises(InvalidProblemError, match="contiguous buffer u8"):
            unpack(replace(packed, buffers=(TensorView.of(wrong),)))


def test_a_packed_weight_has_the_buffers_of_its_layout():
    packed = pack(integer_weight(70, 136, "f16"))
    tiles = packed.buffers[0].array()
    for wrong in (tiles[..., :8192], tiles[:, ::-1]):
        with pytest.raises(InvalidProblemError, match="buffers: expected contiguous memory on host"):
            replace(packed, buffers=(TensorView.of(wrong),))
    for buffers in ((), packed.buffers * 2):
        with pytest.raises(InvalidProblemError, match="buffers: expected 1 for layout"):
            replace(packed, buffers=buffers)
    for change, name in (({"m": -1}, "m"), ({"k": -8}, "k"), ({"k": 132}, "packed"), ({"m": 70.0}, "m")):
        with pytest.raises(InvalidProblemError, match=f"^{name}: expected"):
            replace(packed, **change)
    for change in ({"buffers": (TensorView.of(tiles[:1]),)}, {"k": 264}):
        with pytest.raises(BufferTooSmallError, match="buffers: expected at least") as caught:
            replace(packed, **change)
        assert caught.value.got < caught.value.needed
    with pytest.raises(InvalidProblemError, match="on cuda:7"):
        replace(packed, device=Device("cuda", 7))


@pytest.mark.parametrize("element", ["f16", "s8"])
def test_copies_and_pickles_own_their_memory(element):
    weight = integer_weight(70, 256, element)
    for original in (weight, pack(weight), PackedWeight.canonical(weight)):
        for made in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            for ours, theirs in zip(buffers_of(made), buffers_of(original), strict=True):
                assert ours.address != theirs.address
                np.testing.assert_array_equal(ours.bits(), theirs.bits())


@pytest.mark.parametrize("element", ["f16", "s8"])
def test_a_shallow_copy_is_the_weight_itself(element):
    weight = integer_weight(70, 256, element)
    for original in (weight, pack(weight), PackedWeight.canonical(weight)):
        assert copy.copy(original) is original


def bytes_of(view: TensorView) -> TensorView:
    """The memory's bytes in one row, with more behind them."""
    found = np.frombuffer(view.bits().tobytes() + bytes(64), np.uint8)
    return TensorView.of(found)


def as_one_row(view: TensorView) -> TensorView:
    return TensorView.of(view.bits().reshape(1, -1), element=view.element)


@pytest.mark.parametrize("form", [bytes_of, as_one_row])
@pytest.mark.parametrize("kernel", ["host_blas", "host_strict"])
@pytest.mark.parametrize("quantization", [{}, {"weight_element": "s4", "weight_group": 32}])
def test_canonical_buffers_of_any_shape_give_the_same_results(form, kernel, quantization):
    weight: Any = integer_weight(24, 72, "f16")
    if quantization:
        weight = Sparse24QuantizedWeight.quantize(weight, stored="s4", group=32)
    desc = GemmSparse24Descriptor(n=3, m=24, k=72, element="f16", **quantization)
    plan = GemmSparse24Plan.select(desc, preference={"prefer_kernel": kernel}, device="host")
    x = np.random.default_rng(0).integers(-4, 5, (3, 72)).astype(np.float16)
    packed = PackedWeight.canonical(weight)
    found = [np.full((3, 24), np.nan, np.float16) for _ in range(2)]
    shapeless = replace(packed, buffers=tuple(form(view) for view in packed.buffers))
    for y, given in zip(found, (packed, shapeless), strict=True):
        plan.run(GemmSparse24Args(given, x, y))
    np.testing.assert_array_equal(*found)


def buffers_of(weight: Sparse24Weight | PackedWeight) -> tuple[TensorView, ...]:
    if isinstance(weight, PackedWeight):
        return weight.buffers
    return weight.values_view, weight.metadata_view


def test_unpack_finds_damaged_metadata():
    packed = pack(integer_weight(70, 136, "f16"))
    at, shift = nibble_place(69 - 64, 33 - 32)
    packed.buffers[0].array()[1, 1, at] &= 0xFF ^ 0xF << shift
    with pytest.raises(FormatError) as caught:
        unpack(packed)
    assert (caught.value.row, caught.value.group) == (69, 33)
