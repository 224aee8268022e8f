"""Hostile values by name: wrong types, protocols that lie, files that hang or can't be read.

Every lie can be detected. Nobody can tell a false address from a true one, so no lie names memory beyond its
own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from sparse24_plans import Device, DeviceProperties, ElementKind, Sparse24Weight, TensorView, Workspace

from ..device.tensor_likes import OnlyArrayInterface, OnlyDlpack, Torchlike, jax_like

HUGE = 10**5000
"""Python refuses to print it."""
Make = Callable[[Path], Any]


class Broken:
    """Raises whatever it is asked."""

    def _fail(self, *_: object, **__: object) -> Any:
        raise ZeroDivisionError("broken")

    __repr__ = __str__ = __eq__ = __len__ = __iter__ = __index__ = __float__ = __bool__ = __call__ = _fail
    __fspath__ = __array__ = __dlpack__ = __dlpack_device__ = __getitem__ = __contains__ = _fail
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def _array(dtype: Any = np.float32, shape: tuple[int, ...] = (4, 32)) -> np.ndarray:
    return np.zeros(shape, dtype)


def _readonly() -> np.ndarray:
    found = _array()
    found.flags.writeable = False
    return found


def _used_capsule() -> Any:
    tensor = OnlyDlpack(_array())
    capsule = _array().__dlpack__()
    np.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0)))
    tensor.__dlpack__ = lambda **_: capsule  # type: ignore[method-assign]
    return tensor


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


PLAIN: dict[str, Make] = {
    "none": lambda _: None,
    "true": lambda _: True,
    "zero": lambda _: 0,
    "one": lambda _: 1,
    "minus": lambda _: -1,
    "int64": lambda _: 1 << 63,
    "huge": lambda _: HUGE,
    "minus huge": lambda _: -HUGE,
    "float": lambda _: 8.0,
    "nan": lambda _: float("nan"),
    "inf": lambda _: float("inf"),
    "complex": lambda _: 1j,
    "numpy int": lambda _: np.int64(8),
    "numpy float": lambda _: np.float32(8),
    "numpy bool": lambda _: np.bool_(True),
    "empty text": lambda _: "",
    "text": lambda _: "text",
    "number": lambda _: "8",
    "NUL": lambda _: "a\0b",
    "surrogate": lambda _: "\ud800",
    "escape": lambda _: "\x1b[31mred\n",
    "long text": lambda _: "x" * 100_000,
    "element": lambda _: "bf16",
    "cuda": lambda _: "cuda:99999999999",
    "json": lambda _: '{"n": 1}',
    "deep json": lambda _: "[" * 100_000,
    "bytes": lambda _: b"\xff\0",
    "bytearray": lambda _: bytearray(8),
    "list": lambda _: [1, None, "x", HUGE],
    "deep list": lambda _: _deep(),
    "tuple": lambda _: (4, 32),
    "bad tuple": lambda _: (None, HUGE),
    "set": lambda _: {1, "x"},
    "dict": lambda _: {"deterministic": "yes", 1: 2},
    "odd dict": lambda _: {HUGE: HUGE, None: Broken()},
    "object": lambda _: object(),
    "broken": lambda _: Broken(),
    "mock": lambda _: mock.MagicMock(),
    "mock of an array": lambda _: mock.Mock(spec=np.ndarray),
    "type": lambda _: int,
    "function": lambda _: lambda *given, **more: None,
    "generator": lambda _: iter(()),
    "endless": lambda _: itertools.count(),
    "exception": lambda _: ValueError("x"),
    "dtype": lambda _: np.dtype("f4,f4"),
    "float64": lambda _: np.float64,
    "bfloat16": lambda _: ml_dtypes.bfloat16,
    "ElementKind": lambda _: ElementKind.I32,
    "Device": lambda _: Device("tpu", HUGE),  # type: ignore[arg-type]
    "DeviceProperties": lambda _: DeviceProperties(
        kind="cuda", name="x" * 300, cusparselt="abc", compute_capability=(9, 0), multiprocessors=1
    ),
}
TENSORS: dict[str, Make] = {
    "float64 array": lambda _: _array(np.float64),
    "object array": lambda _: _array(object),
    "record array": lambda _: _array([("a", "f4")]),
    "dates": lambda _: _array("M8[s]"),
    "text array": lambda _: _array("U4"),
    "swapped": lambda _: _array(">f4"),
    "scalar array": lambda _: np.float32(1).reshape(()),
    "empty": lambda _: _array(shape=(0, 32)),
    "many axes": lambda _: _array(shape=(1,) * 60),
    "other shape": lambda _: _array(shape=(3, 7)),
    "transposed": lambda _: _array(shape=(32, 4)).T,
    "reversed": lambda _: _array()[::-1, ::-1],
    "broadcast": lambda _: np.broadcast_to(np.float32(0), (4, 32)),
    "misaligned": lambda _: np.zeros(4 * 32 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 32),
    "read-only": lambda _: _readonly(),
    "masked": lambda _: np.ma.masked_array(_array(), mask=True),
    "matrix": lambda _: np.asmatrix(_array()),
    "s8": lambda _: _array(np.int8),
    "bf16 bits": lambda _: _array(np.uint16),
    "jax": lambda _: jax_like(_array()),
    "dlpack of float64": lambda _: OnlyDlpack(_array(np.float64)),
    "used capsule": lambda _: _used_capsule(),
    "weight": lambda _: Sparse24Weight.compress(_array(shape=(16, 32))),
    "weight of s8": lambda _: Sparse24Weight.compress(_array(np.int8, (16, 32))),
    "view": lambda _: TensorView.of(_array(np.int32)),
    "no workspace": lambda _: Workspace(0, 0, Device("host", 0)),
    "workspace elsewhere": lambda _: Workspace(4096, 8, Device("cuda", 0)),
}
_SHAPES = (
    None,
    (None, 32),
    (4.0, 32),
    (-1, 32),
    (HUGE, 1),
    (True, 8),
    "ab",
    5,
    {4: 2},
    (2, 8),
    itertools.count(),
)
_LIES: dict[str, tuple[Any, ...]] = {
    "shape": _SHAPES,
    "typestr": (None, "", "<f8", "O", "zz", 3, ">f4", "|V4", "<M8[s]", b"<f4", "<f2"),
    "data": (None, 5, (None, False), (0, False), (-1, False), (1 << 64, False), ("x", 0), (HUGE, 0), (4.0,)),
    "strides": ("ab", (4.0, 4), (HUGE, 4), (1,), 5, (0, 4), (None, None)),
    "mask": (True, object()),
}
TENSORS |= {
    f"{key} {at}": lambda _, key=key, lie=lie: OnlyArrayInterface(_array(), **{key: lie})
    for key, lies in _LIES.items()
    for at, lie in enumerate(lies)
}
_TORCHLIKE = {
    "dtype": (None, "torch.float64", 3, HUGE),
    "shape": _SHAPES,
    "device": (None, "cpu", SimpleNamespace(type="cuda", index=99), SimpleNamespace(type=3, index=None)),
    "data_ptr": (lambda: None, lambda: 0, lambda: -1, lambda: HUGE, lambda: 1 / 0, 4096),
    "stride": (lambda: None, lambda: (1,), lambda: ("x", 1), 3),
}


def _torchlike(name: str, lie: Any) -> Torchlike:
    found = Torchlike(_array(), "torch.float32")
    setattr(found, name, lie)
    return found


TENSORS |= {
    f"torch {key} {at}": lambda _, key=key, lie=lie: _torchlike(key, lie)
    for key, lies in _TORCHLIKE.items()
    for at, lie in enumerate(lies)
}


# Files --------------------------------------------------------------------------------------------


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def _loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def _file(content: bytes, name: str = "file.safetensors") -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def _folder(**files: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / "model").mkdir()
        for name, content in files.items():
            (folder / "model" / name.replace("__", ".")).write_bytes(content)
        return folder / "model"

    return make


def _fifo_in_a_folder(folder: Path) -> Path:
    (folder / "piped").mkdir()
    os.mkfifo(folder / "piped" / "model.safetensors.index.json")
    return folder / "piped"


def _header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


_INDEX = "model__safetensors__index__json"
PATHS: dict[str, Make] = {
    "fifo": _fifo,
    "fifo as index": _fifo_in_a_folder,
    "endless device": lambda _: Path("/dev/zero"),
    "full device": lambda _: "/dev/full",
    "loop": _loop,
    "folder": lambda folder: folder,
    "missing": lambda folder: folder / "missing" / "file",
    "below a file": lambda folder: _file(b"")(folder) / "file",
    "long name": lambda folder: folder / ("x" * 300),
    "long path": lambda folder: folder.joinpath(*["x" * 200] * 30),
    "NUL in a path": lambda folder: f"{folder}/a\0b",
    "surrogate in a path": lambda folder: f"{folder}/\ud800",
    "bytes path": lambda folder: os.fsencode(folder / "file"),
    "empty file": _file(b""),
    "binary": _file(bytes(range(256)) * 40),
    "deep": _file(b"[" * 200_000, "deep.json"),
    "long header": _file(_header(b"{}", 1 << 62)),
    "short header": _file(_header(b"{", 100)),
    "deep header": _file(_header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000)),
    "odd header": _file(_header(b'{"a": {"dtype": 3, "shape": [-1, "x"], "data_offsets": [1e400]}}')),
    "huge numbers": _file(
        _header(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}')
    ),
    "NaN in JSON": _file(b'{"schema": NaN, "entries": [Infinity]}', "nan.json"),
    "empty folder": _folder(),
    "odd index": _folder(**{_INDEX: b'{"weight_map": {"a": "\\ud800", "b": 3, "c": "../x"}}'}),
    "deep index": _folder(**{_INDEX: b'{"weight_map":' + b"[" * 100_000}),
    "odd config": _folder(config__json=b'{"quantization_config": 3}', model__safetensors=_header(b"{}")),
}
VALUES: dict[str, Make] = {**PLAIN, **TENSORS, **PATHS}
