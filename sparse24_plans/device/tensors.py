"""Operands: zero-copy views of any framework's tensors, workspaces and streams.

No framework is imported here. A tensor is read through the first of these that it has: NumPy or CuPy
array, ``data_ptr()`` (PyTorch), ``__cuda_array_interface__``, ``__dlpack__``, ``__array_interface__``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import BackendUnavailableError, InvalidProblemError
from ..vocab import ElementKind, element_kind


class Device(NamedTuple):
    """Where memory lives: ``("host", 0)`` or ``("cuda", ordinal)``."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return self.kind if self.kind == "host" else f"cuda:{self.ordinal}"


HOST = Device("host", 0)
_CUDA = [Device("cuda", i) for i in range(64)]


def import_cupy() -> Any:
    """CuPy, imported when first needed: that alone takes half a second."""
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            "CuPy is not installed: pip install 'sparse24_plans[cuda12]' (or [cuda13])"
        ) from error
    return cupy


class TensorView:
    """A strided tensor in somebody else's memory.

    ``address`` in bytes; ``strides`` in elements; ``owner`` keeps the memory alive. Make one with
    :meth:`of`; the constructor is for runtimes that have nothing but an address.
    """

    __slots__ = ("_end", "address", "device", "element", "owner", "readonly", "shape", "strides")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        element: ElementKind | str,
        device: Device,
        *,
        strides: tuple[int, ...] | None = None,
        readonly: bool = False,
        owner: object = None,
    ) -> None:
        self.address = address
        self.shape = shape
        self.strides = contiguous_strides(shape) if strides is None else strides
        self.element = element if type(element) is ElementKind else element_kind(element)
        self.device = device
        self.readonly = readonly
        self.owner = owner
        self._end = -1

    @classmethod
    def of(
        cls, obj: Any, *, element: ElementKind | str | None = None, argument: str = "tensor"
    ) -> TensorView:
        """View ``obj`` without a copy.

        ``element`` reinterprets integers or opaque bytes of the same size: the way to pass bfloat16 or
        float8 from a framework that has no such type. Raises InvalidProblemError naming ``argument``.
        """
        kind = type(obj)
        if kind is cls:
            view: TensorView = obj
            return view if element is None or element is view.element else view._as(element, argument)
        if element is not None and type(element) is not ElementKind:
            element = element_kind(element)
        adapt = _ADAPTER_OF_TYPE.get(kind)
        if adapt is not None:
            return adapt(obj, element, argument)
        for applies, adapt, lasting in _ADAPTERS:
            if applies(obj):
                if lasting:
                    _ADAPTER_OF_TYPE[kind] = adapt
                return adapt(obj, element, argument)
        raise InvalidProblemError(
            f"{argument}: expected a tensor (NumPy, CuPy, data_ptr(), __cuda_array_interface__, "
            f"__dlpack__ or __array_interface__), got {type(obj).__name__}"
        )

    def _as(self, element: ElementKind | str, argument: str) -> TensorView:
        """The same memory as another element, under the rule of ``of``."""
        kind = _element(self.element.dtype, element_kind(element), argument)
        return TensorView(
            self.address,
            self.shape,
            kind,
            self.device,
            strides=self.strides,
            readonly=self.readonly,
            owner=self,
        )

    @property
    def end(self) -> int:
        """Address behind the last element; ``address`` for an empty tensor."""
        if self._end < 0:
            last = 0
            for size, stride in zip(self.shape, self.strides):  # noqa: B905 - on the path of every run
                if size == 0:
                    self._end = self.address
                    break
                last += (size - 1) * abs(stride)
            else:
                self._end = self.address + (last + 1) * self.element.itemsize
        return self._end

    @property
    def nbytes_spanned(self) -> int:
        """Bytes from the first to the last element, both included; 0 for an empty tensor."""
        return self.end - self.address

    @property
    def is_contiguous(self) -> bool:
        return 0 in self.shape or all(
            size <= 1 or stride == dense
            for size, stride, dense in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    def bits(self) -> Any:
        """The same memory as an array of unsigned integers: NumPy on the host, CuPy on a GPU."""
        dtype = self.element.bits_dtype
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        if self.device.kind == "host":
            return np.asarray(_HostMemory(self, dtype, strides))
        cupy = import_cupy()
        memory = cupy.cuda.UnownedMemory(
            self.address, max(self.nbytes_spanned, 1), self.owner, self.device.ordinal
        )
        return cupy.ndarray(self.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)

    def array(self) -> Any:
        """The same memory as a NumPy or CuPy array of the element's type (where CuPy lacks it: its bits)."""
        bits = self.bits()
        try:
            return bits.view(self.element.dtype)
        except (TypeError, ValueError):
            return bits

    def __repr__(self) -> str:
        return f"TensorView({self.element}{list(self.shape)}, strides={list(self.strides)}, {self.device})"


class _HostMemory:
    """Hands NumPy an address, and keeps the owner alive for as long as the array lives."""

    def __init__(self, view: TensorView, dtype: np.dtype[Any], strides: tuple[int, ...]) -> None:
        self.owner = view.owner
        # NumPy refuses a null address even for an empty array.
        address = view.address or _EMPTY.ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "typestr": dtype.str,
            "data": (address, view.readonly),
            "strides": strides,
        }


_EMPTY = np.zeros(64, np.uint8)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


# Adapters -----------------------------------------------------------------------------------------

Adapter = Callable[[Any, "ElementKind | None", str], TensorView]

_BY_DTYPE = {kind.dtype: kind for kind in ElementKind}
_BY_NAME = {kind.dtype.name: kind for kind in ElementKind}
_BY_FOREIGN_DTYPE: dict[Any, ElementKind] = {}


def _element(dtype: np.dtype[Any], wanted: ElementKind | None, argument: str) -> ElementKind:
    found = _BY_DTYPE.get(dtype) if dtype.isnative else None
    if wanted is None or found is wanted:
        if found is None:
            raise InvalidProblemError(
                f"{argument}: expected one of {', '.join(_BY_NAME)}, got {dtype}; "
                "pass element=... to reinterpret opaque bytes"
            )
        return found
    if dtype.kind not in "iuV" or dtype.itemsize != wanted.itemsize or not dtype.isnative:
        raise InvalidProblemError(f"{argument}: expected {wanted}, got {dtype}")
    return wanted


def _element_strides(
    shape: tuple[int, ...], byte_strides: tuple[int, ...] | None, itemsize: int, argument: str
) -> tuple[int, ...]:
    if byte_strides is None:
        return contiguous_strides(shape)
    strides = tuple([stride // itemsize for stride in byte_strides])
    for size, stride, nbytes in zip(shape, strides, byte_strides):  # noqa: B905 - on the path of every run
        if stride * itemsize != nbytes and size > 1:
            raise InvalidProblemError(
                f"{argument}: expected strides that are multiples of {itemsize} bytes, got {byte_strides}"
            )
    return strides


def _from_numpy(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    kind = _element(obj.dtype, element, argument)
    strides = _element_strides(obj.shape, obj.strides, kind.itemsize, argument)
    address, readonly = obj.__array_interface__["data"]
    return TensorView(address, obj.shape, kind, HOST, strides=strides, readonly=readonly, owner=obj)


def _from_cupy(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    kind = _element(obj.dtype, element, argument)
    strides = _element_strides(obj.shape, obj.strides, kind.itemsize, argument)
    memory = obj.data
    return TensorView(memory.ptr, obj.shape, kind, _CUDA[memory.device_id], strides=strides, owner=obj)


def _from_data_ptr(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    kind = _BY_FOREIGN_DTYPE.get(obj.dtype)
    if kind is None or element is not None:
        name = str(obj.dtype).rpartition(".")[2]
        try:
            dtype = _BY_NAME[name].dtype if name in _BY_NAME else np.dtype(name)
        except TypeError:
            raise InvalidProblemError(
                f"{argument}: expected one of {', '.join(_BY_NAME)}, got {obj.dtype}"
            ) from None
        kind = _element(dtype, element, argument)
        if element is None:
            _BY_FOREIGN_DTYPE[obj.dtype] = kind
    if hasattr(obj, "is_neg") and obj.is_neg():
        raise InvalidProblemError(f"{argument}: expected materialised values, got PyTorch's lazy negative")
    home = obj.device
    if home.type not in ("cpu", "cuda"):
        raise InvalidProblemError(f"{argument}: expected a tensor in cpu or cuda memory, got {home.type}")
    device = HOST if home.type == "cpu" else _CUDA[home.index or 0]
    try:
        address = obj.data_ptr()
    except RuntimeError as error:
        raise InvalidProblemError(f"{argument}: expected a tensor with storage: {error}") from error
    return TensorView(address, tuple(obj.shape), kind, device, strides=tuple(obj.stride()), owner=obj)


_CUDA_MEMORY_DEVICE, _CUDA_MEMORY_MANAGED = 2, 3  # cudaMemoryType


def _cuda_ordinal_of(address: int, argument: str) -> int:
    cupy = import_cupy()
    if address == 0:
        return int(cupy.cuda.runtime.getDevice())
    try:
        about = cupy.cuda.runtime.pointerGetAttributes(address)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidProblemError(
            f"{argument}: expected device memory, got {address:#x} ({error})"
        ) from error
    if about.type not in (_CUDA_MEMORY_DEVICE, _CUDA_MEMORY_MANAGED):
        raise InvalidProblemError(f"{argument}: expected device memory, got host memory {address:#x}")
    return int(about.device)


def _from_cuda_array_interface(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    view = _from_protocol(obj.__cuda_array_interface__, element, argument, obj)
    view.device = _CUDA[_cuda_ordinal_of(view.address, argument)]
    return view


def _from_array_interface(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    return _from_protocol(obj.__array_interface__, element, argument, obj)


def _from_protocol(about: Any, element: ElementKind | None, argument: str, owner: object) -> TensorView:
    """A view, on the host for now, from the dictionary that both array interfaces give."""
    try:
        dtype, shape = np.dtype(about["typestr"]), tuple(about["shape"])
        address, readonly = about["data"]
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidProblemError(
            f"{argument}: expected an array interface with typestr, shape and address: {error}"
        ) from error
    kind = _element(dtype, element, argument)
    strides = _element_strides(shape, about.get("strides"), kind.itemsize, argument)
    return TensorView(address, shape, kind, HOST, strides=strides, readonly=readonly, owner=owner)


class _DLTensor(ctypes.Structure):
    """DLPack 1.0, dlpack.h: DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    """DLPack 1.0, dlpack.h: DLManagedTensorVersioned. Flag bit 0 marks read-only memory."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    ]


# DLDataTypeCode, bits -> element. kDLInt 0, kDLUInt 1, kDLFloat 2, kDLBfloat 4,
# kDLFloat8_e4m3fn 10, kDLFloat8_e5m2 12.
_DL_ELEMENTS = {
    (0, 8): ElementKind.S8,
    (0, 32): ElementKind.I32,
    (1, 8): ElementKind.U8,
    (1, 16): ElementKind.U16,
    (2, 16): ElementKind.F16,
    (2, 32): ElementKind.F32,
    (4, 16): ElementKind.BF16,
    (10, 8): ElementKind.FP8_E4M3,
    (12, 8): ElementKind.FP8_E5M2,
}
_DL_HOST, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13


def _capsule_pointer(capsule: Any, name: bytes) -> int | None:
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    return api.PyCapsule_GetPointer(capsule, name) if api.PyCapsule_IsValid(capsule, name) else None


def _from_dlpack(obj: Any, element: ElementKind | None, argument: str) -> TensorView:
    # -1 asks a CUDA producer not to synchronise: ordering is the caller's, through `stream`.
    order = {} if obj.__dlpack_device__()[0] in (_DL_HOST, _DL_CUDA_HOST) else {"stream": -1}
    try:
        try:
            capsule = obj.__dlpack__(max_version=(1, 1), **order)
        except TypeError:  # a producer of before DLPack 1
            capsule = obj.__dlpack__(**order)
    except (BufferError, RuntimeError) as error:
        raise InvalidProblemError(f"{argument}: the producer refused DLPack export: {error}") from error
    readonly = False
    if (pointer := _capsule_pointer(capsule, b"dltensor_versioned")) is not None:
        managed = _DLManagedTensorVersioned.from_address(pointer)
        if managed.major != 1:
            raise InvalidProblemError(f"{argument}: expected DLPack 1, got version {managed.major}")
        tensor, readonly = managed.dl_tensor, bool(managed.flags & 1)
    elif (pointer := _capsule_pointer(capsule, b"dltensor")) is not None:
        tensor = _DLTensor.from_address(pointer)
    else:
        raise InvalidProblemError(f"{argument}: __dlpack__ returned no unused DLPack capsule")
    if tensor.device_type not in (_DL_HOST, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED):
        raise InvalidProblemError(
            f"{argument}: expected cpu or cuda memory, got DLPack device type {tensor.device_type}"
        )
    on_host = tensor.device_type in (_DL_HOST, _DL_CUDA_HOST)
    kind = _DL_ELEMENTS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if element is not None and kind is not element:
        if tensor.code > 1 or tensor.lanes != 1 or tensor.bits != 8 * element.itemsize:
            raise InvalidProblemError(f"{argument}: expected {element}, got DLPack type code {tensor.code}")
        kind = element
    if kind is None:
        raise InvalidProblemError(
            f"{argument}: expected one of {', '.join(_BY_NAME)}, got DLPack type "
            f"(code {tensor.code}, bits {tensor.bits}, lanes {tensor.lanes})"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    return TensorView(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        kind,
        HOST if on_host else _CUDA[tensor.device_id],
        strides=strides,
        readonly=readonly,
        # The capsule stays unconsumed: when it is collected, the producer's own destructor frees it.
        owner=(obj, capsule),
    )


def _is_cupy(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] == "cupy" and hasattr(obj, "__cuda_array_interface__")


# (applies, adapter, whether every object of the type takes it: a JAX array's protocol hangs on its device)
_ADAPTERS: tuple[tuple[Callable[[Any], bool], Adapter, bool], ...] = (
    (lambda obj: isinstance(obj, np.ndarray), _from_numpy, True),
    (_is_cupy, _from_cupy, True),
    (lambda obj: hasattr(obj, "data_ptr"), _from_data_ptr, True),
    (lambda obj: hasattr(obj, "__cuda_array_interface__"), _from_cuda_array_interface, False),
    (lambda obj: hasattr(obj, "__dlpack__"), _from_dlpack, False),
    (lambda obj: hasattr(obj, "__array_interface__"), _from_array_interface, False),
)
_ADAPTER_OF_TYPE: dict[type, Adapter] = {}


# Workspaces ---------------------------------------------------------------------------------------


class Workspace:
    """``nbytes`` of scratch memory at ``address``, the caller's own. Kernels never write outside it."""

    __slots__ = ("address", "device", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, device: Device, owner: object = None) -> None:
        if address < 0 or nbytes < 0:
            raise InvalidProblemError(
                f"workspace: expected a non-negative address and size, got {address}, {nbytes}"
            )
        self.address, self.nbytes, self.device, self.owner = address, nbytes, device, owner

    @classmethod
    def of(cls, obj: Any, device: Device) -> Workspace:
        """Accepts a Workspace, any contiguous tensor, or an object with ``ptr`` and ``size`` (or ``nbytes``).

        An object that doesn't say where it lives (``device_id``) is taken to live on ``device``.
        """
        if type(obj) is cls:
            return obj
        address = getattr(obj, "ptr", None)
        if type(address) is int:
            size = obj.mem.size - (address - obj.mem.ptr) if hasattr(obj, "mem") else None
            for name in ("nbytes", "size"):
                size = getattr(obj, name, None) if size is None else size
            if type(size) is int:
                ordinal = getattr(obj, "device_id", device.ordinal)
                return cls(address, size, Device(device.kind, ordinal), obj)
        if isinstance(obj, (int, float, str, bytes)):
            raise InvalidProblemError(
                f"workspace: expected an object with an address and a size, got {type(obj).__name__}"
            )
        view = TensorView.of(obj, argument="workspace")
        if not view.is_contiguous or view.readonly:
            raise InvalidProblemError(f"workspace: expected writable contiguous memory, got {view!r}")
        return cls(view.address, view.nbytes_spanned, view.device, obj)


# Places -------------------------------------------------------------------------------------------

_PLACE_OF_TYPE: dict[type, Callable[[Any], object]] = {
    type(None): lambda none: None,
    TensorView: lambda view: (view.address, view.shape, view.strides, view.device),
    Workspace: lambda space: (space.address, space.nbytes, space.device),
}
_PLACE_OF_ADAPTER: dict[Adapter | None, Callable[[Any], object]] = {
    _from_cupy: lambda array: (array.data.ptr, array.shape, array.strides),
    _from_data_ptr: lambda tensor: (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype),
}


def places_of(tensors: tuple[Any, ...]) -> list[object] | None:
    """Where the tensors lie, to be compared with where they lay. None where one doesn't say it cheaply."""
    places: list[object] = []
    for tensor in tensors:
        kind = type(tensor)
        place = _PLACE_OF_TYPE.get(kind) or _PLACE_OF_ADAPTER.get(_ADAPTER_OF_TYPE.get(kind))
        if place is None:
            return None
        places.append(place(tensor))
    return places


# Streams ------------------------------------------------------------------------------------------


def stream_handle(stream: Any, device: Device) -> int:
    """The ``cudaStream_t`` of ``stream`` as an integer.

    None is CuPy's current stream on the device. Otherwise an integer handle, or an object with ``ptr``
    (CuPy), ``cuda_stream`` (PyTorch) or ``__cuda_stream__`` (cuda.core). Host plans take only None.
    """
    if device.kind == "host":
        if stream is not None:
            raise InvalidProblemError(
                f"stream: expected None for a host plan, which runs synchronously, got {stream!r}"
            )
        return 0
    if stream is None:
        return int(import_cupy().cuda.get_current_stream(device.ordinal).ptr)
    if type(stream) is int:
        handle, home = stream, None
    else:
        handle, home = _stream_of_object(stream)
    if type(handle) is not int or handle < 0:
        raise InvalidProblemError(
            f"stream: expected an open CUDA stream, got {type(stream).__name__} with handle {handle!r}"
        )
    if home is not None and home not in (-1, device.ordinal):
        raise InvalidProblemError(f"stream: expected a stream of {device}, got one of cuda:{home}")
    return handle


def _stream_of_object(stream: Any) -> tuple[Any, int | None]:
    home = getattr(stream, "device_id", None)
    if hasattr(stream, "ptr"):
        return stream.ptr, home if type(home) is int else None
    if hasattr(stream, "cuda_stream"):
        return stream.cuda_stream, getattr(getattr(stream, "device", None), "index", None)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        answer = protocol() if callable(protocol) else protocol
        try:
            version, handle = answer
            handle = None if handle is None else int(handle)
        except (TypeError, ValueError) as error:
            raise InvalidProblemError(
                f"stream: expected (version, handle) from __cuda_stream__, got {answer!r}"
            ) from error
        if version != 0:
            raise InvalidProblemError(f"stream: expected __cuda_stream__ protocol 0, got {version!r}")
        return handle, None
    raise InvalidProblemError(
        "stream: expected None, an integer handle, or an object with ptr, cuda_stream or "
        f"__cuda_stream__, got {type(stream).__name__}"
    )
