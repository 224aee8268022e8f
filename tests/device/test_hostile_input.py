"""Objects that lie, break or never end: a typed error that names the argument, or a view that makes sense."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse24_plans import (
    BackendUnavailableError,
    Device,
    ElementKind,
    InvalidProblemError,
    TensorView,
    Workspace,
)
from sparse24_plans.device.devices import resolve
from sparse24_plans.device.streams import stream_handle
from sparse24_plans.device.tensors import HOST, LOCATION_OF_TYPE
from sparse24_plans.plan.launches import LaunchCache

from .tensor_likes import BF16, CUDA, F32, OnlyArrayInterface, OnlyDlpack, Torchlike, numbers

ARRAY = numbers((4, 8), F32)
HUGE = 10**5000  # Python refuses to print it

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([HUGE, -HUGE, 1 << 63, 1 << 64, -(1 << 63)]),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.one_of(st.none(), st.integers(-3, 9), st.floats(), st.just(HUGE)), max_size=4),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.builds(object),
    st.builds(mock.Mock),
    st.builds(np.int64, st.integers(-9, 9)),
    st.sampled_from([(None, 4), (4, None), [4, 8], np.arange(3), {4: 8}, "<f4", "<u2", "|V4", "<i8", "O"]),
)


def refused(read: Callable[[], object], argument: str) -> object | None:
    """Return what ``read`` gives, or None if it raises an error that names the argument."""
    try:
        return read()
    except InvalidProblemError as error:
        message = str(error)
    except BackendUnavailableError:  # no CUDA to ask
        return None
    assert message.startswith(f"{argument}: ")
    return None


def view_or_refusal(thing: object, element: ElementKind | None = None) -> None:
    """Check that every tensor gives a view of plain integers, or an error that names the argument."""
    view = refused(lambda: TensorView.of(thing, element=element, argument="operand"), "operand")
    if view is None:
        return
    assert type(view.address) is int
    assert view.address > 0 or 0 in view.shape
    assert all(type(size) is int and size >= 0 for size in view.shape)
    assert all(type(stride) is int for stride in view.strides)
    assert len(view.shape) == len(view.strides)
    assert type(view.element) is ElementKind
    assert type(view.device) is Device
    assert type(view.readonly) is bool
    repr(view)
    assert view.nbytes_spanned >= 0


# Tensors ------------------------------------------------------------------------------------------

INTERFACE_KEYS = ["shape", "typestr", "data", "strides", "mask", "version"]
elements = st.sampled_from([None, F32, BF16])


@given(st.dictionaries(st.sampled_from(INTERFACE_KEYS), anything, max_size=3), elements)
def test_an_array_interface_of_anything(change, element):
    view_or_refusal(OnlyArrayInterface(ARRAY, **change), element)


@given(address=anything, readonly=anything)
def test_an_array_interface_with_any_address(address, readonly):
    view_or_refusal(OnlyArrayInterface(ARRAY, data=(address, readonly)))


@given(st.sampled_from(["__array_interface__", "__cuda_array_interface__", "__dlpack__"]), anything)
def test_a_protocol_that_is_anything(name, value):
    view_or_refusal(SimpleNamespace(**{name: value}))


@given(st.sets(st.sampled_from(INTERFACE_KEYS)))
def test_an_array_interface_with_parts_missing(missing):
    about = {key: value for key, value in ARRAY.__array_interface__.items() if key not in missing}
    view_or_refusal(SimpleNamespace(__array_interface__=about))


@given(
    change=st.dictionaries(
        st.sampled_from(["dtype", "shape", "device", "data_ptr", "stride"]), anything, max_size=3
    ),
    element=elements,
)
def test_a_data_ptr_of_anything(change, element):
    tensor = Torchlike(ARRAY, "torch.float32")
    for name, value in change.items():
        setattr(tensor, name, (lambda found=value: found) if name in ("data_ptr", "stride") else value)
    view_or_refusal(tensor, element)


@pytest.mark.parametrize("ordinal", [99, -1, 64, HUGE, "0", 1.5], ids=lambda bad: type(bad).__name__)
def test_a_device_that_no_machine_has(ordinal):
    view_or_refusal(Torchlike(ARRAY, "torch.float32", "cuda", ordinal))
    with pytest.raises(InvalidProblemError, match=r"x: .*ordinal from 0 to 63"):
        TensorView.of(Torchlike(ARRAY, "torch.float32", "cuda", ordinal), argument="x")


FAILURES = [
    KeyError("k"),
    AttributeError("a"),
    OSError(5, "io"),
    ZeroDivisionError(),
    RecursionError(),
    Exception(),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize(
    "name", ["data_ptr", "__cuda_array_interface__", "__dlpack__", "__dlpack_device__", "__array_interface__"]
)
def test_a_protocol_that_raises_anything(name, failure):
    def fail(self: object, *_: object, **__: object) -> object:
        raise failure

    for member in (fail, property(fail)):
        tensor = type("Broken", (OnlyDlpack,) if "dlpack" in name else (), {name: member})
        view_or_refusal(tensor(ARRAY) if "dlpack" in name else tensor())
        with pytest.raises(InvalidProblemError, match="operand: "):
            TensorView.of(tensor(ARRAY) if "dlpack" in name else tensor(), argument="operand")


def test_what_has_every_attribute_is_no_tensor():
    for thing in (mock.Mock(), mock.MagicMock(), mock.Mock(spec=np.ndarray)):
        view_or_refusal(thing)
        view_or_refusal(thing, BF16)


def test_a_shape_without_an_end_is_not_counted():
    view_or_refusal(OnlyArrayInterface(ARRAY, shape=itertools.count()))


def test_a_memory_error_is_no_statement_about_the_argument():
    class Full:
        @property
        def __array_interface__(self) -> object:
            raise MemoryError

    with pytest.raises(MemoryError):
        TensorView.of(Full())


# Masks --------------------------------------------------------------------------------------------


def test_masked_arrays_are_refused():
    masked = np.ma.masked_array(ARRAY, mask=np.zeros((4, 8), bool))
    for thing in (masked, OnlyArrayInterface(ARRAY, mask=np.zeros((4, 8), bool))):
        for _ in range(2):  # the second time from the cache of types
            with pytest.raises(InvalidProblemError, match="x: expected a tensor without a mask"):
                TensorView.of(thing, argument="x")
    TensorView.of(ARRAY)


# Freed storage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(None), slice(2, 3)], ids=["whole", "at an offset"])
def test_a_torch_tensor_whose_storage_was_freed(rows):
    """FSDP frees storage in this way. A tensor at an offset then shows the offset for an address."""
    torch = pytest.importorskip("torch")
    whole = torch.zeros(4, 8)
    part = whole[rows]
    TensorView.of(part)
    before = location_of(part)
    whole.untyped_storage().resize_(0)
    with pytest.raises(InvalidProblemError, match="x: expected memory, got a null address"):
        TensorView.of(part, argument="x")
    assert location_of(part) != before
    whole.untyped_storage().resize_(128)
    TensorView.of(part)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (4, 0)])
def test_an_empty_torch_tensor_needs_no_storage(shape):
    torch = pytest.importorskip("torch")
    tensor = torch.empty(shape)
    assert TensorView.of(tensor).address == tensor.data_ptr() == 0


def test_null_memory_of_other_protocols():
    def null(shape: tuple[int, ...]) -> list[object]:
        tensor = Torchlike(np.zeros(shape, np.float32), "torch.float32")
        tensor.data_ptr = lambda: 0
        return [tensor, OnlyArrayInterface(ARRAY, shape=shape, strides=None, data=(0, False))]

    for tensor in null((4, 8)):
        with pytest.raises(InvalidProblemError, match="x: expected memory, got a null address"):
            TensorView.of(tensor, argument="x")
    for tensor in null((0, 8)):
        assert TensorView.of(tensor).nbytes_spanned == 0


# Addresses and strides ----------------------------------------------------------------------------


def test_operands_without_addresses_are_left_to_the_checks():
    tensor = Torchlike(ARRAY, "torch.float32")
    TensorView.of(tensor)
    cache = LaunchCache(None, {})
    key, launch = cache.find_located((tensor, None))
    assert key is not None
    assert launch is None
    assert cache.find_located((tensor, None)) == (key, None)
    tensor.data_ptr = lambda: 1 / 0
    assert cache.find_located((tensor,)) == (None, None)
    assert cache.find_located((object(),)) == (None, None)
    tensor.data_ptr = list  # which can't be hashed
    assert cache.find_located((tensor,)) == (None, None)


def location_of(tensor: object) -> object:
    return LOCATION_OF_TYPE[type(tensor)](tensor)


# Workspaces, streams, devices ---------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(["ptr", "size", "nbytes", "mem", "device_id"]), anything))
def test_a_workspace_of_anything(fields):
    space = refused(lambda: Workspace.of(SimpleNamespace(**fields), CUDA), "workspace")
    if space is None:
        return
    assert type(space.address) is int
    assert type(space.nbytes) is int
    assert space.nbytes >= 0
    assert space.address > 0 or space.nbytes == 0


@given(address=anything, nbytes=anything, device=st.one_of(st.sampled_from([HOST, CUDA]), anything))
def test_a_workspace_by_hand_of_anything(address, nbytes, device):
    space = refused(lambda: Workspace(address, nbytes, device), "workspace")
    assert space is None or space.address > 0 or space.nbytes == 0


@given(
    st.one_of(
        anything,
        st.dictionaries(
            st.sampled_from(["ptr", "cuda_stream", "device", "device_id", "__cuda_stream__"]), anything
        ).map(lambda fields: SimpleNamespace(**fields)),
    )
)
def test_a_stream_of_anything(stream):
    handle = refused(lambda: stream_handle(stream, CUDA), "stream")
    assert handle is None or (type(handle) is int and 0 <= handle < 1 << 64)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("name", ["ptr", "cuda_stream", "__cuda_stream__", "mem", "nbytes", "device_id"])
def test_streams_and_workspaces_that_raise(name, failure):
    def fail(self: object) -> object:
        raise failure

    thing = type("Broken", (), {"ptr": 4096, "size": 8, name: property(fail)})()
    refused(lambda: stream_handle(thing, CUDA), "stream")
    refused(lambda: Workspace.of(thing, CUDA), "workspace")


@given(anything.filter(lambda device: device is not None))
def test_a_device_of_anything(device):
    properties = refused(lambda: resolve(device), "device")
    assert properties is None or (type(device) in (int, np.int64) and properties.ordinal == device)
