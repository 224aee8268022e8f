"""Views: their extent, how long their memory lives, what makes one, and what a copy of one is."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    InvalidProblemError,
    TensorView,
    Workspace,
)
from sparse24_plans.device.tensors import HOST
from sparse24_plans.vocab import IN_MEMORY

from .tensor_likes import BF16, CUDA, F32, OnlyArrayInterface, OnlyDlpack, Torchlike, numbers

gpu = pytest.mark.gpu


# Extent -------------------------------------------------------------------------------------------


def layouts(smallest_stride: int) -> st.SearchStrategy:
    """(shape, strides) of up to four dimensions."""
    pairs = st.lists(st.tuples(st.integers(0, 5), st.integers(smallest_stride, 40)), max_size=4)
    return pairs.map(lambda found: tuple(zip(*found, strict=True)) or ((), ()))


def offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The offset of every element, one after the other."""
    return [sum(i * step for i, step in zip(at, strides, strict=True)) for at in np.ndindex(*shape)]


@given(layout=layouts(0), element=st.sampled_from(IN_MEMORY))
def test_extent_is_that_of_the_elements_one_by_one(layout, element):
    shape, strides = layout
    found = offsets(shape, strides)
    view = TensorView(4096, shape, element, HOST, strides=strides)
    span = (max(found) - min(found) + 1) * element.itemsize if found else 0
    assert view.nbytes_spanned == span
    assert view.end == 4096 + span


@given(layout=layouts(-40), element=st.sampled_from(IN_MEMORY))
def test_span_is_never_negative(layout, element):
    shape, strides = layout
    found = offsets(shape, strides)
    span = (max(found) - min(found) + 1) * element.itemsize if found else 0
    assert TensorView(4096, shape, element, HOST, strides=strides).nbytes_spanned == span


@given(layout=layouts(-40))
def test_contiguous_means_one_element_after_the_other(layout):
    shape, strides = layout
    found = offsets(shape, strides)
    view = TensorView(4096, shape, F32, HOST, strides=strides)
    assert view.is_contiguous == (found == list(range(len(found))))


@given(shape=st.lists(st.integers(0, 6), max_size=4).map(tuple), element=st.sampled_from(IN_MEMORY))
def test_no_strides_means_contiguous(shape, element):
    view = TensorView(4096, shape, element, HOST)
    assert view.is_contiguous
    assert view.nbytes_spanned == math.prod(shape) * element.itemsize


def test_a_view_made_by_hand_takes_the_elements_name():
    assert TensorView(0, (0,), "bf16", HOST).element is BF16
    with pytest.raises(InvalidProblemError, match="f64"):
        TensorView(0, (0,), "f64", HOST)


def test_repr_shows_what_an_error_message_needs():
    text = repr(TensorView.of(numbers((4, 8), BF16)[:, ::2]))
    for part in ("bf16", "[4, 4]", "[8, 2]", "host"):
        assert part in text


# Lifetime -----------------------------------------------------------------------------------------

WRAPPERS = {
    "numpy": lambda array: array,
    "data_ptr": lambda array: Torchlike(array, "torch.float32"),
    "array_interface": OnlyArrayInterface,
    "dlpack": OnlyDlpack,
    "old_dlpack": lambda array: OnlyDlpack(array, old=True),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_memory_lives_as_long_as_any_view_of_it(wrap):
    array = numbers((64, 64), F32)
    want, alive = array.tobytes(), weakref.ref(array)
    view = TensorView.of(WRAPPERS[wrap](array))
    del array
    gc.collect(1)
    bits = view.bits()
    del view
    gc.collect(1)
    assert alive() is not None
    assert bits.tobytes() == want
    typed = bits[::2]
    del bits
    gc.collect(1)
    assert alive() is not None
    del typed
    gc.collect(1)
    assert alive() is None, "the memory is never given back"


# By hand ------------------------------------------------------------------------------------------


NO_INTEGER = (None, "8", 8.0, True, b"8", object(), 1 << 63, 10**5000)


def view(**change: object) -> TensorView:
    return TensorView(**{"address": 4096, "shape": (4, 8), "element": "f32", "device": HOST, **change})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        *[({"address": bad}, "address") for bad in (None, "4096", 4096.0, True, -1, 1 << 64, 10**5000)],
        *[({"shape": bad}, "shape") for bad in (None, 4, "48", {4, 8}, iter((4, 8)), np.zeros(2, int))],
        *[({"shape": (4, bad)}, "shape") for bad in (*NO_INTEGER, -1)],
        ({"shape": (1,) * 65}, "64"),
        ({"shape": (1 << 31, 1 << 30)}, "bytes"),
        *[({"strides": bad}, "strides") for bad in (8, "81", (8,), (8, 1, 1), [], iter((8, 1)))],
        *[({"strides": (8, bad)}, "strides") for bad in NO_INTEGER],
        *[({"element": bad}, "fp8_e4m3") for bad in (None, 4, np.float64, float, [], 10**5000)],
        ({"element": "f64"}, "f64"),
        *[({"device": bad}, "Device") for bad in (None, "cuda:0", ("cuda", 0), 0, Device("tpu", 0))],
        *[({"device": Device("cuda", bad)}, "ordinal") for bad in (-1, 64, 1.0, True, None)],
        *[({"readonly": bad}, "readonly") for bad in (None, 0, 1, "yes")],
    ],
)
def test_what_cannot_be_a_view(change, word):
    with pytest.raises(InvalidProblemError, match=rf"TensorView: .*{word}"):
        view(**change)


def test_numpys_integers_become_plain():
    made = view(address=np.uint64(4096), shape=[np.int32(4), 8], strides=[np.int64(-8), 1])
    for integer in (made.address, *made.shape, *made.strides):
        assert type(integer) is int
    assert (made.address, made.shape, made.strides) == (4096, (4, 8), (-8, 1))


@given(shape=st.lists(st.integers(0, 3), max_size=4).map(tuple), device=st.sampled_from([HOST, CUDA]))
def test_nothing_lies_at_address_zero(shape, device):
    if 0 in shape:
        assert view(address=0, shape=shape, device=device).nbytes_spanned == 0
        return
    with pytest.raises(InvalidProblemError, match="null address: was it freed"):
        view(address=0, shape=shape, device=device)


def test_no_copy_on_a_device_that_is_not_there():
    pytest.importorskip("cupy")
    with pytest.raises(BackendUnavailableError, match="cuda:63"):
        view(device=Device("cuda", 63)).owned_copy()


# Copies -------------------------------------------------------------------------------------------


def test_a_copy_is_another_view_that_keeps_the_memory_alive():
    array = numbers((4, 8), F32)
    alive, want = weakref.ref(array), array.tobytes()
    first = TensorView.of(array)
    second = copy.copy(first)
    assert second is not first
    assert repr(second) == repr(first)
    assert (second.address, second.readonly) == (first.address, first.readonly)
    del first, array
    gc.collect(1)
    assert alive() is not None
    assert second.bits().tobytes() == want


@pytest.mark.parametrize("wrap", [lambda made: made, lambda made: [made], lambda made: {"x": made}])
@pytest.mark.parametrize("made", [view(), Workspace(4096, 8, HOST)], ids=["view", "workspace"])
@pytest.mark.parametrize(
    "take",
    [copy.deepcopy, pickle.dumps, lambda made: pickle.dumps(made, protocol=0)],
    ids=["deepcopy", "pickle", "pickle0"],
)
def test_no_copy_outlives_what_it_views(take, made, wrap):
    """A copy would hold an address in memory that nobody keeps, or in another process."""
    with pytest.raises(InvalidProblemError, match=f"{type(made).__name__}: expected no deep copy"):
        take(wrap(made))


@given(layout=layouts(0), element=st.sampled_from(IN_MEMORY), data=st.data())
def test_an_owned_copy_is_contiguous_and_stands_alone(layout, element, data):
    shape, strides = layout
    found = offsets(shape, strides)
    buffer = numbers((max(found, default=0) + 1,), element)
    made = TensorView(buffer.ctypes.data, shape, element, HOST, strides=strides, readonly=True, owner=buffer)
    want = made.bits().copy()
    own = made.owned_copy()
    assert (own.shape, own.element, own.device, own.readonly) == (shape, element, HOST, False)
    assert own.is_contiguous
    buffer.view("u1")[:] = 0xEE
    np.testing.assert_array_equal(own.bits(), want)
    del made, buffer
    np.testing.assert_array_equal(own.bits(), want)


@gpu
def test_an_owned_copy_on_a_gpu():
    import cupy

    array = cupy.arange(64, dtype=cupy.uint16).reshape(8, 8)
    own = TensorView.of(array[:, ::2], element=BF16).owned_copy()
    array[...] = 0
    assert (own.element, own.shape, own.strides) == (BF16, (8, 4), (4, 1))
    assert own.device == TensorView.of(array).device
    np.testing.assert_array_equal(cupy.asnumpy(own.bits()), np.arange(64).reshape(8, 8)[:, ::2])
