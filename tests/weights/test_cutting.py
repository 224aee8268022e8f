"""Weights cut and joined: as dense matrices would be, as views where the layout allows them, or refused."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    ElementKind,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    PackedWeight,
    Sparse24Weight,
    TensorView,
    UnsupportedError,
    concat_weights,
    slice_weight,
    split_weight,
)
from sparse24_plans.vocab import IN_MEMORY
from sparse24_plans.weights import dense as dense_layout
from sparse24_plans.weights.packing import pack, unpack

from ..support import HAS_GPU, same_bits

PLACES = ["host", 0] if HAS_GPU else ["host"]
AXES = (0, 1)
every_axis = pytest.mark.parametrize("axis", AXES, ids=["M", "K"])
TILED = {"f16": 128, "bf16": 128, "s8": 256, "fp8_e4m3": 256}
"""Elements that have tiles, and the columns of one."""


def weight_of(m: int, k: int, element: str, device: int | str = "host", seed: int = 0) -> Sparse24Weight:
    """Return a weight of random bits, which are moved and never computed with."""
    kind = ElementKind(element)
    bits = np.random.default_rng(seed).integers(0, 2 ** (8 * kind.itemsize), (m, k), np.uint64)
    return Sparse24Weight.prune_compress(bits.astype(kind.bits_dtype), element=kind).to(device)


def dense_of(weight: Sparse24Weight) -> np.ndarray:
    dense = weight.to("host").decompress()
    return dense.view(f"u{dense.dtype.itemsize}")


def cut(dense: np.ndarray, start: int, stop: int, axis: int) -> np.ndarray:
    return np.ascontiguousarray(dense[start:stop] if axis == 0 else dense[:, start:stop])


def bytes_of(weight: PackedWeight) -> list[bytes]:
    return [
        np.asarray(one.bits().get() if hasattr(one.bits(), "get") else one.bits()).tobytes()
        for one in weight.buffers
    ]


def refused(words: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    with pytest.raises(InvalidProblemError, match=re.escape(words)):
        call(*given, **named)


# Canonical weights ----------------------------------------------------------------------------------


@given(data=st.data(), element=st.sampled_from(IN_MEMORY), place=st.sampled_from(PLACES))
def test_a_slice_is_the_dense_slice(data, element, place):
    m, k = data.draw(st.integers(0, 9)), 8 * data.draw(st.integers(0, 6))
    weight = weight_of(m, k, element, place, seed=data.draw(st.integers(0, 99)))
    axis = data.draw(st.sampled_from(AXES))
    if axis == 0:
        start, stop = sorted(data.draw(st.lists(st.integers(0, m), min_size=2, max_size=2)))
    else:
        start = 4 * data.draw(st.integers(0, k // 4))
        stop = start + 8 * data.draw(st.integers(0, (k - start) // 8))
    copy = data.draw(st.sampled_from([None, True]))
    part = slice_weight(weight, start, stop, axis=axis, copy=copy)
    want = cut(dense_of(weight), start, stop, axis)
    assert ((part.m, part.k), part.element, part.device) == (want.shape, weight.element, weight.device)
    assert same_bits(dense_of(part), want)
    part.validate()


@given(data=st.data(), element=st.sampled_from(IN_MEMORY), place=st.sampled_from(PLACES))
def test_parts_joined_are_the_whole(data, element, place):
    axis = data.draw(st.sampled_from(AXES))
    unit, across = (1, 16) if axis == 0 else (8, 3)
    sizes = [unit * size for size in data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))]
    m, k = (sum(sizes), across) if axis == 0 else (across, sum(sizes))
    weight = weight_of(m, k, element, place)
    parts = split_weight(weight, sizes, axis=axis)
    assert [(part.m, part.k)[axis] for part in parts] == sizes
    assert same_bits(np.concatenate([dense_of(part) for part in parts], axis=axis), dense_of(weight))
    joined = concat_weights(parts, axis=axis)
    assert same_bits(dense_of(joined), dense_of(weight))
    assert same_bits(joined.to("host").metadata, weight.to("host").metadata)


def test_merged_projections_multiply_as_one():
    """q, k and v of one input: rows below one another."""
    q, k, v = (weight_of(rows, 32, "s8", seed=rows) for rows in (24, 8, 8))
    merged = concat_weights([q, k, v])
    x = np.random.default_rng(0).integers(-9, 9, (3, 32)).astype(np.int8)

    def product(weight: Sparse24Weight) -> np.ndarray:
        desc = GemmSparse24Descriptor(n=3, m=weight.m, k=32, element="s8")
        plan = GemmSparse24Plan.select(desc, device="host")
        y = np.empty((3, weight.m), np.int32)
        plan.run(GemmSparse24Args(plan.pack(weight), x, y))
        return y

    assert np.array_equal(product(merged), np.concatenate([product(one) for one in (q, k, v)], axis=1))


# Views ----------------------------------------------------------------------------------------------


def test_rows_are_a_view_that_keeps_the_memory_alive():
    weight = weight_of(12, 64, "bf16")
    want = dense_of(weight)[5:9].copy()
    before = weight.values_view.address, weight.metadata_view.address
    part = slice_weight(weight, 5, 9, copy=False)
    assert (part.values_view.address, part.metadata_view.address) == (
        before[0] + 5 * 32 * 2,
        before[1] + 5 * 8 * 2,
    )
    inner = slice_weight(part, 1, 3)
    del weight, part
    gc.collect()
    others = [np.full(1000, 255, np.uint8) for _ in range(200)]  # what would take freed memory
    assert same_bits(dense_of(inner), want[1:3])
    assert others


def test_a_read_only_weight_has_read_only_parts():
    values, metadata = np.zeros((4, 8), np.float32), np.full((4, 2), 0x0404, np.uint16)
    values.setflags(write=False)
    part = slice_weight(Sparse24Weight(values, metadata), 1, 3)
    assert part.values_view.readonly
    assert not part.metadata_view.readonly
    assert not slice_weight(Sparse24Weight(values, metadata), 1, 3, copy=True).values_view.readonly


def test_columns_of_several_rows_are_a_copy():
    weight = weight_of(6, 64, "f16")
    part = slice_weight(weight, 16, 48, axis=1)
    kept = dense_of(part)
    weight.values[...] = 0
    assert same_bits(dense_of(part), kept)
    refused(
        "copy: expected None or True, because columns 16 to 48 of 6 rows are not contiguous, got False",
        slice_weight, weight, 16, 48, axis=1, copy=False,
    )  # fmt: skip
    for start, stop in ((0, 64), (8, 8)):
        slice_weight(weight, start, stop, axis=1, copy=False)
    row = slice_weight(weight, 2, 3)
    assert slice_weight(row, 16, 48, axis=1, copy=False).values_view.address == row.values_view.address + 16


def test_memory_without_an_owner_is_cut_as_well():
    """The views have bare addresses, as in a runtime without tensors."""
    values, metadata = np.arange(64, dtype=np.float32).reshape(8, 8), np.full((8, 2), 0x0404, np.uint16)
    views = [
        TensorView(array.ctypes.data, array.shape, element, TensorView.of(array).device)
        for array, element in ((values, "f32"), (metadata, "u16"))
    ]
    part = slice_weight(Sparse24Weight(*views), 2, 4)
    assert same_bits(part.values, values[2:4])


# Packed weights --------------------------------------------------------------------------------------


@given(data=st.data(), element=st.sampled_from(list(TILED)), place=st.sampled_from(PLACES))
def test_cut_and_joined_tiles_are_those_of_such_a_weight(data, element, place):
    """Byte for byte, padding too."""
    units = 64, TILED[element]
    axis = data.draw(st.sampled_from(AXES))
    sizes = [units[axis] * size for size in data.draw(st.lists(st.integers(0, 2), max_size=2))]
    sizes.append(8 * data.draw(st.integers(0, 40)))
    across = 8 * data.draw(st.integers(1, 20))
    m, k = (sum(sizes), across) if axis == 0 else (across, sum(sizes))
    weight = weight_of(m, k, element, place)
    parts = split_weight(weight, sizes, axis=axis)
    packed = split_weight(pack(weight), sizes, axis=axis)
    for part, tiles in zip(parts, packed, strict=True):
        assert (tiles.m, tiles.k, tiles.layout_id) == (part.m, part.k, pack(part).layout_id)
        assert bytes_of(tiles) == bytes_of(pack(part))
        assert same_bits(dense_of(unpack(tiles)), dense_of(part))
    assert bytes_of(concat_weights(packed, axis=axis)) == bytes_of(pack(weight))


def test_rows_of_tiles_are_a_view():
    packed = pack(weight_of(200, 256, "f16"))
    part = slice_weight(packed, 128, 200, copy=False)
    assert part.buffers[0].address == packed.buffers[0].address + 2 * 2 * 9216
    assert part.buffers[0].shape == (2, 2, 9216)
    one_row = slice_weight(packed, 64, 128)
    slice_weight(one_row, 128, 256, axis=1, copy=False)
    refused("columns 128 to 256 of 200 rows", slice_weight, packed, 128, 256, axis=1, copy=False)
    copied = slice_weight(packed, 128, 256, axis=1)
    assert not np.shares_memory(copied.buffers[0].bits(), packed.buffers[0].bits())


@every_axis
@pytest.mark.parametrize("element", TILED)
def test_a_cut_through_a_tile_is_refused_by_its_size(element, axis):
    unit = (64, TILED[element])[axis]
    packed = pack(weight_of(200, 520, element))
    size = (200, 520)[axis]
    cuts = (
        f"cuts along {'MK'[axis]} at multiples of {unit}, the size of a tile of layout '{packed.layout_id}'"
    )
    advice = "do it with canonical weights, and pack the results"
    for start, stop, name, at in ((8, size, "start", 8), (0, unit + 8, "stop", unit + 8)):
        refused(f"{name}: expected {cuts}, or at the end {size}, got {at}; or {advice}", slice_weight, packed, start, stop, axis=axis)  # fmt: skip  # noqa: E501
    refused(f"sizes: expected {cuts}", split_weight, packed, [8, size - 8], axis=axis)
    first = pack(weight_of(*((72, 64) if axis == 0 else (64, 72)), element))
    refused(
        f"weights[0]: expected {'MK'[axis]} a multiple of {unit} where another weight follows, the size of a "
        f"tile of layout '{first.layout_id}', got 72; or {advice}",
        concat_weights, [first, first], axis=axis,
    )  # fmt: skip
    assert concat_weights([first], axis=axis).m == first.m


@every_axis
def test_the_hosts_dense_layout_is_cut_at_groups(axis):
    weight = weight_of(12, 40, "s8")
    packed = dense_layout.pack(weight)
    parts = split_weight(packed, [4, 8] if axis == 0 else [16, 24], axis=axis)
    for part, want in zip(
        parts, split_weight(weight, [4, 8] if axis == 0 else [16, 24], axis=axis), strict=True
    ):
        assert part.layout_id == "dense_f32"
        assert same_bits(part.buffers[0].array(), want.decompress().astype(np.float32))
    assert bytes_of(concat_weights(parts, axis=axis)) == bytes_of(packed)


def test_a_canonical_weight_in_its_packed_form():
    weight = weight_of(8, 16, "f32")
    part = slice_weight(PackedWeight.canonical(weight), 2, 6)
    assert type(part) is PackedWeight
    assert [view.shape for view in part.buffers] == [(4, 8), (4, 2)]
    assert bytes_of(part) == bytes_of(PackedWeight.canonical(slice_weight(weight, 2, 6)))


def test_a_librarys_blob_is_not_taken_apart():
    blob = TensorView.of(np.zeros(4096, np.uint8))
    weight = PackedWeight("cusparselt_blob", 32, 32, ElementKind.F16, blob.device, (blob,))
    for call in (
        lambda: slice_weight(weight, 0, 32),
        lambda: split_weight(weight, 1),
        lambda: concat_weights([weight]),
    ):
        with pytest.raises(UnsupportedError, match="layout 'cusparselt_blob' can be neither cut nor joined"):
            call()


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["bf16", "s8"])
@every_axis
def test_kernels_run_on_parts_of_packed_weights(element, axis):
    """Column-parallel shards give columns of Y; row-parallel ones give addends of it."""
    import cupy

    m = k = 1024
    dense = np.random.default_rng(0).integers(-3, 4, (m, k)).astype(np.float32)
    weight = Sparse24Weight.prune_compress(dense.astype(ElementKind(element).dtype)).to(0)
    x = np.random.default_rng(1).integers(-3, 4, (16, k)).astype(np.float32)
    x = x.astype(ElementKind(element).dtype)

    def product(weight: Any, x: np.ndarray) -> np.ndarray:
        out = "i32" if element == "s8" else "f32"
        desc = GemmSparse24Descriptor(n=16, m=weight.m, k=weight.k, element=element, out_element=out)
        plan = GemmSparse24Plan.select(desc, device=0)
        packed = plan.pack(weight) if isinstance(weight, Sparse24Weight) else weight
        y = cupy.empty((16, weight.m), np.int32 if element == "s8" else np.float32)
        space = cupy.empty(max(plan.workspace_size(), 1), np.uint8)
        operand = TensorView.of(
            cupy.asarray(np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")), element=element
        )
        plan.run(GemmSparse24Args(packed, operand, y), workspace=space)
        return y.get()

    whole = product(weight, x)
    packed = GemmSparse24Plan.select(GemmSparse24Descriptor(n=16, m=m, k=k, element=element), device=0).pack(
        weight
    )
    parts = split_weight(packed, 4, axis=axis)
    if axis == 0:
        got = np.concatenate([product(part, x) for part in parts], axis=1)
    else:
        got = sum(product(part, x[:, 256 * at : 256 * (at + 1)]) for at, part in enumerate(parts))
    assert np.array_equal(got, whole)  # small integers: every sum is exact
    assert np.array_equal(product(concat_weights(parts, axis=axis), x), whole)


@pytest.mark.gpu
def test_slices_on_gpu_are_views_or_copies_on_stream():
    import cupy

    packed = pack(weight_of(256, 512, "f16", 0))
    part = slice_weight(packed, 64, 192, copy=False)
    assert part.buffers[0].address == packed.buffers[0].address + 4 * 9216
    stream = cupy.cuda.Stream(non_blocking=True)
    copied = slice_weight(packed, 128, 384, axis=1, stream=stream)
    joined = concat_weights([copied, copied], axis=1, stream=stream)
    stream.synchronize()
    assert joined.device == packed.device
    assert bytes_of(slice_weight(joined, 256, 512, axis=1)) == bytes_of(copied)


# Arguments that can't be meant --------------------------------------------------------------------


WEIGHT = weight_of(8, 16, "f32")


def test_what_isnt_a_weight():
    words = "expected a Sparse24Weight, a Sparse24QuantizedWeight or a PackedWeight, got"
    for wrong in (None, 3, np.zeros((8, 16)), "weight", [WEIGHT]):
        refused(f"weight: {words}", slice_weight, wrong, 0, 8)
        refused(f"weight: {words}", split_weight, wrong, 2)
    refused(f"weights[1]: {words} 3", concat_weights, [WEIGHT, 3])
    for wrong in (None, 3, WEIGHT):
        refused("weights: expected a sequence of weights, got", concat_weights, wrong)
    refused("weights: expected at least one weight, got none", concat_weights, [])


@pytest.mark.parametrize("axis", [2, -1, None, "M", True, 0.0])
def test_wrong_axes_are_refused(axis):
    for call, usual in (
        (slice_weight, (WEIGHT, 0, 8)),
        (split_weight, (WEIGHT, 2)),
        (concat_weights, ([WEIGHT],)),
    ):
        refused("axis: expected 0 (M, out features) or 1 (K, in features), got", call, *usual, axis=axis)


def test_wrong_sizes_are_refused():
    for start, stop, words in (
        (5, 4, "start, stop: expected 0 <= start <= stop <= M = 8, got 5, 4"),
        (0, 9, "start, stop: expected 0 <= start <= stop <= M = 8, got 0, 9"),
        (-1, 4, "start: expected an integer from 0, got -1"),
        (0, 4.0, "stop: expected an integer from 0, got 4.0"),
        (None, 4, "start: expected an integer from 0, got None"),
        (True, 4, "start: expected an integer from 0, got True"),
    ):
        refused(words, slice_weight, WEIGHT, start, stop)
    refused(
        "start: expected cuts along K at multiples of 4, the size of a group",
        slice_weight,
        WEIGHT,
        2,
        10,
        axis=1,
    )
    refused("stop: expected a K that is a multiple of 8, got 12", slice_weight, WEIGHT, 4, 16, axis=1)
    refused("sizes: expected a sum of M = 8, got 7", split_weight, WEIGHT, [3, 4])
    refused("sizes: expected a number of parts that divides M = 8, got 3", split_weight, WEIGHT, 3)
    refused("sizes: expected a number of parts that divides M = 8, got 0", split_weight, WEIGHT, 0)
    refused("sizes: expected an integer from 0, got 'a'", split_weight, WEIGHT, ["a", 8])
    refused("sizes: expected an integer from 0, got '44'", split_weight, WEIGHT, "44")
    refused("sizes: expected a K that is a multiple of 8, got 4", split_weight, WEIGHT, [4, 12], axis=1)
    assert [part.m for part in split_weight(WEIGHT, np.int64(4))] == [2, 2, 2, 2]


def test_copies_and_streams():
    for wrong in (0, 1, "yes", np.True_):
        refused("copy: expected None, True or False, got", slice_weight, WEIGHT, 0, 4, copy=wrong)
    for call, usual in (
        (slice_weight, (WEIGHT, 0, 8)),
        (split_weight, (WEIGHT, 2)),
        (concat_weights, ([WEIGHT],)),
    ):
        refused("stream: expected None", call, *usual, stream=7)


def test_weights_that_dont_fit_together():
    for other, words in (
        (weight_of(8, 16, "s8"), "weights[1]: expected element f32, like weights[0], got s8"),
        (weight_of(8, 24, "f32"), "weights[1]: expected K 16, like weights[0], got 24"),
        (
            dense_layout.pack(WEIGHT),
            "weights[1]: expected layout canonical, like weights[0], got dense_f32",
        ),
        (PackedWeight.canonical(WEIGHT), "weights[1]: expected weights of one type"),
    ):
        refused(words, concat_weights, [WEIGHT, other])
    refused("weights[1]: expected M 8, like weights[0], got 9", concat_weights, [WEIGHT, weight_of(9, 16, "f32")], axis=1)  # fmt: skip  # noqa: E501
