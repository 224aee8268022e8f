"""Streams: every form that is accepted, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sparse24_plans import Device, InvalidProblemError
from sparse24_plans.device.jit.launcher import recording
from sparse24_plans.device.pad_rows import PadRows
from sparse24_plans.device.streams import stream_handle
from sparse24_plans.device.tensors import HOST
from sparse24_plans.device.transpose import Matrices, Transpose

from ..sample_devices import A100, H200
from .tensor_likes import CUDA

gpu = pytest.mark.gpu


def protocol(answer: object) -> SimpleNamespace:
    return SimpleNamespace(__cuda_stream__=lambda: answer)


def torchlike_stream(handle: object, index: int | None) -> SimpleNamespace:
    return SimpleNamespace(cuda_stream=handle, device=SimpleNamespace(type="cuda", index=index))


@pytest.mark.parametrize("stream", [0, 1, SimpleNamespace(ptr=0), protocol((0, 1)), False, "s"])
def test_a_host_plan_takes_no_stream(stream):
    assert stream_handle(None, HOST) == 0
    with pytest.raises(InvalidProblemError, match="stream: expected None for a host plan"):
        stream_handle(stream, HOST)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1, 1),
        (0x7F0012345678, 0x7F0012345678),
        (SimpleNamespace(ptr=0), 0),
        (SimpleNamespace(ptr=123), 123),
        (SimpleNamespace(ptr=123, device_id=0), 123),
        (SimpleNamespace(ptr=123, device_id=-1), 123),
        (torchlike_stream(77, 0), 77),
        (torchlike_stream(77, None), 77),
        (SimpleNamespace(cuda_stream=77), 77),
        (protocol((0, 55)), 55),
        (SimpleNamespace(__cuda_stream__=(0, 55)), 55),
        (protocol((0, np.int64(55))), 55),
    ],
)
def test_every_form_of_stream(stream, handle):
    got = stream_handle(stream, CUDA)
    assert got == handle
    assert type(got) is int


@pytest.mark.parametrize(
    ("stream", "word"),
    [
        (True, "bool"),
        (-1, "-1"),
        (1.0, "float"),
        ("1", "str"),
        (object(), "object"),
        (SimpleNamespace(handle=1), "SimpleNamespace"),
        (SimpleNamespace(ptr=None), "None"),
        (SimpleNamespace(ptr=-5), "-5"),
        (SimpleNamespace(ptr=True), "True"),
        (torchlike_stream(None, 0), "None"),
        (torchlike_stream(77, 1), "cuda:1"),
        (SimpleNamespace(ptr=123, device_id=1), "cuda:1"),
        (protocol((0, None)), "None"),
        (protocol((1, 55)), "1"),
        (protocol((0, -1)), "-1"),
    ],
)
def test_what_is_no_stream_of_the_device(stream, word):
    with pytest.raises(InvalidProblemError, match="stream") as caught:
        stream_handle(stream, CUDA)
    assert word in str(caught.value)


@pytest.mark.parametrize("answer", [(0,), 5, (0, "x"), None, (0, 1, 2)])
def test_a_cuda_stream_protocol_that_is_malformed(answer):
    class Stream:
        def __cuda_stream__(self) -> object:
            return answer

    with pytest.raises(InvalidProblemError, match="stream"):
        stream_handle(Stream(), Device("cuda", 0))


@gpu
def test_streams_of_cupy():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    assert stream_handle(stream, CUDA) == stream.ptr
    with stream:
        assert stream_handle(None, CUDA) == stream.ptr


@pytest.mark.parametrize(("device", "overlaps"), [(A100, False), (H200, True)], ids=str)
def test_pre_passes_overlap_predecessors_only_on_capable_devices(device, overlaps):
    with recording():
        copies = (
            PadRows(2, device).bind(4, 9, 16, 1 << 40, 1 << 41),
            Transpose(2, device).bind(Matrices(8, 16, 2), 1 << 40, 1 << 41),
        )
    assert [copy.overlapping for copy in copies] == [overlaps, overlaps]
