"""Workspaces: every form that is accepted, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sparse24_plans import Device, ElementKind, InvalidProblemError, TensorView, Workspace
from sparse24_plans.device.tensors import HOST

from .tensor_likes import CUDA, F32, numbers

gpu = pytest.mark.gpu


@pytest.mark.parametrize("element", [ElementKind.U8, F32])
def test_workspace_of_an_array(element):
    array = numbers((4, 8), element)
    space = Workspace.of(array, HOST)
    assert (space.address, space.nbytes, space.device) == (array.ctypes.data, array.nbytes, HOST)
    assert space.owner is array


def test_workspace_of_a_view_and_of_a_workspace():
    view = TensorView.of(numbers((4, 8), F32))
    space = Workspace.of(view, HOST)
    assert (space.address, space.nbytes) == (view.address, 128)
    assert Workspace.of(space, CUDA) is space


@pytest.mark.parametrize("fields", [{"size": 512}, {"nbytes": 512}, {"nbytes": 512, "size": 128}], ids=str)
def test_workspace_of_an_address_and_a_size(fields):
    """``nbytes`` before ``size``, which may count elements; without ``device_id``, on the plan's device."""
    space = Workspace.of(SimpleNamespace(ptr=4096, **fields), Device("cuda", 2))
    assert (space.address, space.nbytes, space.device) == (4096, 512, Device("cuda", 2))


def test_workspace_that_says_where_it_lives():
    space = Workspace.of(SimpleNamespace(ptr=4096, size=512, device_id=3), CUDA)
    assert space.device == Device("cuda", 3)


def test_workspace_of_a_pointer_into_a_block():
    """CuPy's MemoryPointer: what is left behind the pointer, not the whole block."""
    block = SimpleNamespace(ptr=4096, size=1000)
    space = Workspace.of(SimpleNamespace(ptr=4096 + 256, mem=block, device_id=0), CUDA)
    assert (space.address, space.nbytes) == (4352, 744)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("thing", "word"),
    [
        (np.zeros((4, 8))[:, ::2].astype("f4")[:, ::2], "contiguous"),
        (read_only(np.zeros(8, "u1")), "writable"),
        (np.zeros(8, "f8"), "float64"),
        (4096, "int"),
        (1.5, "float"),
        ("w", "str"),
        (b"w", "bytes"),
        (None, "NoneType"),
        (object(), "object"),
        (SimpleNamespace(ptr=4096), "SimpleNamespace"),
        (SimpleNamespace(ptr=4096, size=-1), "-1"),
        (SimpleNamespace(ptr="4096", size=8), "SimpleNamespace"),
    ],
)
def test_what_is_no_workspace(thing, word):
    with pytest.raises(InvalidProblemError, match="workspace") as caught:
        Workspace.of(thing, HOST)
    assert word in str(caught.value)


@pytest.mark.parametrize(("address", "nbytes"), [(-1, 8), (8, -1)])
def test_workspace_by_hand(address, nbytes):
    with pytest.raises(InvalidProblemError, match="workspace"):
        Workspace(address, nbytes, HOST)


@gpu
def test_workspace_of_gpu_memory():
    import cupy

    array = cupy.empty(1000, cupy.uint8)
    pointer = array.data + 256
    space = Workspace.of(pointer, CUDA)
    assert (space.address, space.device) == (array.data.ptr + 256, CUDA)
    assert 744 <= space.nbytes <= array.data.mem.size - 256
    assert Workspace.of(array, CUDA).nbytes == 1000
    assert Workspace.of(array.data.mem, CUDA).address == array.data.mem.ptr
