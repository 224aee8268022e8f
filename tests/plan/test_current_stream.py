"""``stream=None``: the current stream of the operands' own framework. The frameworks are fakes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from sparse24_plans import Device, ElementKind, InvalidProblemError, TensorView, Workspace
from sparse24_plans.device import streams
from sparse24_plans.plan import bound, plan
from sparse24_plans.plan.kernel import Choice
from sparse24_plans.plan.preference import PlanPreference

from ..sample_devices import H200
from .toy import ALIGNMENT, BYTES, N, ToyArgs, ToyDescriptor, ToyPlan

CUDA = Device("cuda", 0)
SPACE = Workspace(64 * ALIGNMENT, BYTES, CUDA)


class TorchDevice(NamedTuple):
    type: str
    index: int


class Tensor:
    """A tensor of PyTorch's interface."""

    def __init__(self, address: int) -> None:
        self.address, self.shape, self.dtype = address, (N,), "torch.float32"
        self.device = TorchDevice("cuda", 0)

    def data_ptr(self) -> int:
        return self.address

    def storage_offset(self) -> int:
        return 0

    def is_neg(self) -> bool:
        return False

    def stride(self) -> tuple[int, ...]:
        return (1,)


class Array:
    """An array of CuPy's interface."""

    __cuda_array_interface__ = None

    def __init__(self, address: int) -> None:
        self.shape, self.strides, self.dtype = (N,), (4,), ElementKind.F32.dtype
        self.data = SimpleNamespace(ptr=address, device_id=0)


def torch_tensor(address: int) -> object:
    return type("Tensor", (Tensor,), {"__module__": "torch"})(address)


def cupy_array(address: int) -> object:
    return type("ndarray", (Array,), {"__module__": "cupy"})(address)


def bare(address: int) -> TensorView:
    return TensorView(address, (N,), ElementKind.F32, CUDA)


@pytest.fixture
def current(monkeypatch) -> dict[str, int]:
    """The frameworks' current streams, which a test may change."""
    handles = {"torch": 77, "cupy": 55}
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: handles["torch"]))
    cuda = SimpleNamespace(
        get_current_stream=lambda ordinal: SimpleNamespace(ptr=handles["cupy"]),
        runtime=SimpleNamespace(CUDARuntimeError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(streams, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    return handles


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """The streams of all launches, which touch no device."""
    found: list[int] = []
    for module in (plan, bound):
        monkeypatch.setattr(module, "launch_on", lambda device, launch, stream: found.append(stream))
    return found


def a_plan() -> ToyPlan:
    """A plan on a GPU that isn't there."""
    desc, preference = ToyDescriptor(), PlanPreference()
    choice = Choice(desc, H200, ToyPlan.table[0], preference, {})
    return ToyPlan(choice)


@pytest.mark.parametrize(
    ("x", "out", "stream"),
    [
        (torch_tensor, torch_tensor, 77),
        (cupy_array, cupy_array, 55),
        (torch_tensor, bare, 77),
        (bare, torch_tensor, 77),
        (bare, cupy_array, 55),
        (bare, bare, 55),
    ],
)
def test_it_is_the_operands_frameworks(x, out, stream, current, launched):
    args, one = ToyArgs(x(4096), out(8192)), a_plan()
    for _ in range(2):  # checked, then known
        one.run(args, workspace=SPACE)
    bound = one.bind(args, workspace=SPACE)
    bound.launch()
    assert launched == [stream] * 3
    current.update(torch=78, cupy=56)  # it is asked at each call
    one.run(args, workspace=SPACE)
    bound.launch()
    assert launched[3:] == [stream + 1] * 2


def test_a_stream_that_is_given_is_taken(current, launched):
    one, args = a_plan(), ToyArgs(torch_tensor(4096), cupy_array(8192))
    one.run(args, workspace=SPACE, stream=3)
    one.run(args, workspace=SPACE, stream=SimpleNamespace(cuda_stream=4))
    one.bind(args, workspace=SPACE).launch(5)
    assert launched == [3, 4, 5]


@pytest.mark.parametrize(("x", "out"), [(torch_tensor, cupy_array), (cupy_array, torch_tensor)])
def test_operands_of_two_frameworks_need_one_stream(x, out, current, launched):
    args, one = ToyArgs(x(4096), out(8192)), a_plan()
    bound = one.bind(args, workspace=SPACE)
    for attempt in (lambda: one.run(args, workspace=SPACE), bound.launch):
        with pytest.raises(InvalidProblemError, match=r"stream: expected a stream, because .* differ"):
            attempt()
    assert launched == []
    current.update(torch=0, cupy=0)  # both are the default stream
    one.run(args, workspace=SPACE)
    bound.launch()
    assert launched == [0, 0]


def test_pytorch_without_cheap_getter_is_asked_for_its_stream_object(current, monkeypatch):
    stream = SimpleNamespace(cuda_stream=99)
    cuda = SimpleNamespace(current_stream=lambda ordinal: stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(), cuda=cuda))
    assert streams.stream_of_torch(0) == 99
