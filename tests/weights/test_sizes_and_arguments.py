"""Weights of any size, stride and memory; arguments that are none; the way to a GPU and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    ElementKind,
    FormatError,
    InvalidProblemError,
    Sparse24Weight,
    TensorView,
    prune,
)

from ..support import ELEMENTS, same_bits
from .canonical_model import (
    BF16,
    F32,
    S8,
    assert_is,
    every_element,
    every_group,
    metadata_bytes,
    model_compress,
    model_prune,
)

# Sizes and layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 0), (0, 8), (0, 24), (1, 0), (5, 0)])
@every_element
def test_empty_matrices(element, shape):
    dense = np.zeros(shape, element.dtype)
    for make in (Sparse24Weight.compress, Sparse24Weight.prune_compress):
        weight = make(dense)
        assert_is(weight, model_compress(dense), element, shape)
        weight.validate()
    assert same_bits(prune(dense), dense)
    assert same_bits(prune(dense, scores=np.zeros(shape, np.float32)), dense)


LARGE = [(33, 1 << 15), (2, (1 << 20) + 8)]  # both larger than one internal step; one has a row that is
large = pytest.mark.parametrize("shape", LARGE, ids=str)


@large
@pytest.mark.parametrize("by_scores", [False, True])
def test_large_matrices_are_done_in_steps_that_do_not_show(shape, by_scores):
    rng = np.random.default_rng(0)
    dense = rng.integers(-128, 128, shape, dtype=np.int8)
    scores = rng.integers(-128, 128, shape, dtype=np.int8) if by_scores else None
    weight = Sparse24Weight.prune_compress(dense, scores=scores)
    weight.validate()
    for row in (0, shape[0] - 1):
        columns = slice(shape[1] - 256, None)
        part = np.ascontiguousarray(dense[row : row + 1, columns])
        model = model_prune(part, None if scores is None else scores[row : row + 1, columns])
        assert weight.values.view(np.uint8)[row : row + 1, -128:].tolist() == model.values
        assert metadata_bytes(weight)[row][-64:] == model.metadata[0]
    pruned = weight.decompress()
    assert ((pruned == dense) | (pruned == 0)).all()
    assert same_bits(Sparse24Weight.compress(pruned).decompress(), pruned)


@large
@pytest.mark.parametrize("row", [0, -1])
def test_a_crowded_group_of_a_large_matrix_is_named(shape, row):
    row %= shape[0]
    group = shape[1] // 4 - 3
    dense = np.zeros(shape, np.int8)
    dense[row, 4 * group : 4 * group + 3] = 1
    dense[-1, -4:] = 1
    with pytest.raises(FormatError, match="got 3") as caught:
        Sparse24Weight.compress(dense)
    assert (caught.value.row, caught.value.group) == (row, group)


@large
def test_bad_metadata_of_a_large_matrix_is_named(shape):
    m, k = shape
    codes = np.full((m, k // 4), 0x4, np.uint8)
    codes[m - 1, k // 4 - 2] = 0x5
    with pytest.raises(FormatError, match="increasing") as caught:
        Sparse24Weight(np.zeros((m, k // 2), np.int8), codes.view("<u2"))
    assert (caught.value.row, caught.value.group) == (m - 1, k // 4 - 2)


@pytest.mark.parametrize(
    "index",
    [np.s_[:, 8:40], np.s_[::2, :32], np.s_[::-1, :32], np.s_[:, ::2], np.s_[:, ::-1], np.s_[3:4, 16:24]],
    ids=str,
)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("element", [F32, BF16, S8])
def test_any_strides(element, order, index):
    rng = np.random.default_rng(0)
    whole = np.asarray(rng.integers(-99, 99, (12, 64)).astype(element.dtype), order=order)
    scores = np.asarray(rng.standard_normal((12, 64)).astype(np.float32), order=order)
    dense, by = whole[index], scores[index]
    plain, plain_by = np.ascontiguousarray(dense), np.ascontiguousarray(by)
    for got, want in (
        (Sparse24Weight.prune_compress(dense), Sparse24Weight.prune_compress(plain)),
        (
            Sparse24Weight.prune_compress(dense, scores=by),
            Sparse24Weight.prune_compress(plain, scores=plain_by),
        ),
    ):
        assert same_bits(got.values, want.values)
        assert same_bits(got.metadata, want.metadata)
    assert same_bits(prune(dense), prune(plain))


def test_the_result_shares_no_memory_with_the_input():
    dense = np.ones((4, 8), np.float32)
    weight = Sparse24Weight.prune_compress(dense)
    pruned = prune(dense)
    dense[:] = 7
    assert weight.values.max() == pruned.max() == 1


def test_values_and_metadata_are_the_callers_own_memory():
    values, metadata = np.ones((4, 8), np.float32), np.full((4, 2), 0x4444 & 0x0F0F, np.uint16)
    weight = Sparse24Weight(values, metadata)
    assert np.shares_memory(weight.values, values)
    assert np.shares_memory(weight.metadata, metadata)


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Sparse24Weight.compress, Sparse24Weight.prune_compress, prune])
class TestArguments:
    @pytest.mark.parametrize("shape", [(4, 12), (4, 4), (8,), (), (2, 4, 8)])
    def test_shape(self, make, shape):
        with pytest.raises(InvalidProblemError, match=r"dense: expected shape .*multiple of 8") as caught:
            make(np.zeros(shape, np.float32))
        assert str(list(shape)) in str(caught.value)

    @pytest.mark.parametrize("dtype", ["f8", "i8", "c8", "?", ">f4"])
    def test_type(self, make, dtype):
        with pytest.raises(InvalidProblemError, match="dense"):
            make(np.zeros((4, 8), dtype))

    @pytest.mark.parametrize("element", ["f64", "", "F32", 3])
    def test_element_that_is_none(self, make, element):
        with pytest.raises(InvalidProblemError, match="element"):
            make(np.zeros((4, 8), np.float32), element=element)

    def test_bits_with_an_element(self, make):
        dense = np.array([[1, 0, 0, -2, 0, 3, 0, 0]], ml_dtypes.bfloat16)
        typed, raw = make(dense), make(dense.view(np.uint16), element="bf16")
        if isinstance(typed, Sparse24Weight):
            assert raw.element is BF16
            typed, raw = typed.values, raw.values
        assert same_bits(typed, raw)


@pytest.mark.parametrize(
    "scores",
    [
        np.zeros((4, 8), np.float32),
        np.zeros((8, 4), np.float32),
        np.zeros(64, np.float32),
        np.zeros((4, 16), np.complex64),
        TensorView(4096, (4, 16), F32, Device("cuda", 0)),
        "magnitude",
    ],
)
def test_scores_that_do_not_fit(scores):
    for function in (Sparse24Weight.prune_compress, prune):
        with pytest.raises(InvalidProblemError, match="scores"):
            function(np.zeros((4, 16), np.float32), scores=scores)


@pytest.mark.parametrize("element", ["f64", "", 3])
def test_a_weights_element_that_is_none(element):
    with pytest.raises(InvalidProblemError, match="element"):
        Sparse24Weight(np.zeros((1, 4), np.uint16), np.full((1, 1), 0x0404, np.uint16), element=element)


def test_16_bit_values_of_unknown_type_need_an_element():
    bits, metadata = np.full((1, 4), 0x3C00, np.uint16), np.full((1, 1), 0x0404, np.uint16)
    with pytest.raises(InvalidProblemError, match=r"element: expected one .*uint16, .*element='bf16'"):
        Sparse24Weight(bits, metadata)
    for element in ("f16", "bf16", "u16"):
        assert Sparse24Weight(bits, metadata, element=element).element == element


def test_a_weight_moves_only_where_it_is_not():
    weight = Sparse24Weight.prune_compress(np.ones((4, 8), np.float32))
    assert weight.to("host") is weight
    assert weight.to("cpu") is weight
    for device in ("gpu", -1, 1.5, True, None):
        with pytest.raises(InvalidProblemError, match="device"):
            weight.to(device)


def test_weight_cannot_move_to_device_that_is_not_there():
    weight = Sparse24Weight.prune_compress(np.ones((4, 8), np.float32))
    with pytest.raises(BackendUnavailableError):
        weight.to(63)


def test_repr_says_what_it_is():
    weight = Sparse24Weight.prune_compress(np.ones((4, 8), ml_dtypes.bfloat16))
    assert repr(weight) == "Sparse24Weight(bf16[4, 8], host)"


# On a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_element
def test_a_weight_survives_the_way_to_a_gpu_and_back(element):
    dense = every_group(element)
    weight = Sparse24Weight.prune_compress(dense)
    moved = weight.to(0)
    assert str(moved.device) == "cuda:0"
    moved.validate()
    back = moved.to("host")
    assert same_bits(back.values, weight.values)
    assert same_bits(back.metadata, weight.metadata)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ELEMENTS)
def test_cupy_format_functions_equal_the_hosts(element):
    import cupy

    kind = ElementKind(element)
    dense = np.random.default_rng(0).standard_normal((130, 264)).astype(np.float32).astype(kind.dtype)
    dense[::7] = 0
    on_device = cupy.asarray(dense.view(kind.bits_dtype))
    host = Sparse24Weight.prune_compress(dense)
    if element != "bf16":
        on_device = on_device.view(dense.dtype)
    gpu = Sparse24Weight.prune_compress(on_device, element=element)
    assert gpu.device.kind == "cuda"
    assert same_bits(gpu.to("host").values, host.values)
    assert same_bits(gpu.to("host").metadata, host.metadata)
    bits = kind.bits_dtype
    assert same_bits(cupy.asnumpy(gpu.decompress().view(bits)), host.decompress().view(bits))
