"""Memory that plans read and write: devices, strided views, workspaces. See adapters.py for frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .._vendor import dlpack_abi
from ..errors import BackendUnavailableError, InvalidProblemError, Sparse24Error, shown
from ..vocab import IN_MEMORY, ElementKind, ElementLike, element_kind
from .dlpack import capsule_of
from .install import import_cupy


class Device(NamedTuple):
    """A place of memory: ``("host", 0)`` or ``("cuda", ordinal)``."""

    kind: str
    """``host`` or ``cuda``."""
    ordinal: int
    """CUDA's number of the device; 0 for the host."""

    def __str__(self) -> str:
        return self.kind if self.kind == "host" else f"cuda:{self.ordinal}"


HOST = Device("host", 0)


_BEYOND_INT64, MAX_ADDRESS = 1 << 63, 1 << 64
MAX_DIMENSIONS = _MAX_DEVICES = 64


def wrong(argument: str, expected: str, got: object) -> InvalidProblemError:
    """The error for an argument. ``got`` may be anything, even an object that can't be printed."""
    return InvalidProblemError(f"{argument}: expected {expected}, got {shown(got)}")


def _no_copy(kind: str, remedy: str) -> InvalidProblemError:
    return InvalidProblemError(
        f"{kind}: expected no deep copy and no pickle of memory it doesn't own; {remedy}"
    )


def _integers(argument: str, what: str, found: Any, least: int) -> tuple[int, ...]:
    """A tuple of plain integers from ``least`` to 2^63 - 1; NumPy's become Python's."""
    if not isinstance(found, (tuple, list)) or len(found) > MAX_DIMENSIONS:
        raise wrong(argument, f"{what} of at most {MAX_DIMENSIONS} integers", found)
    for one in found:
        if type(one) is not int or not least <= one < _BEYOND_INT64:
            break
    else:
        return tuple(found)
    integers = tuple([int(one) if isinstance(one, np.integer) else one for one in found])
    if any(type(one) is not int or not least <= one < _BEYOND_INT64 for one in integers):
        raise wrong(argument, f"{what} of integers from {'-2^63' if least else 0} to 2^63", found)
    return integers


def _check_memory(argument: str, address: Any, used: bool) -> int:
    """The ``address``, which must not be null if the memory is ``used``."""
    if type(address) is int and 0 < address < MAX_ADDRESS:
        return address
    if isinstance(address, np.integer):
        address = int(address)
    if type(address) is not int or not 0 <= address < MAX_ADDRESS:
        raise wrong(argument, "an address", address)
    if used and address == 0:
        raise InvalidProblemError(f"{argument}: expected memory, got a null address: was it freed?")
    return address


def check_device(argument: str, device: Any) -> Device:
    """``device``. Raises InvalidProblemError for anything but a valid Device."""
    if type(device) is not Device or device[0] not in ("host", "cuda"):
        raise wrong(argument, "a Device of kind host or cuda", device)
    if type(device[1]) is not int or not 0 <= device[1] < _MAX_DEVICES:
        raise wrong(argument, f"a device ordinal from 0 to {_MAX_DEVICES - 1}", device[1])
    return device


class TensorView:
    """A strided tensor in somebody else's memory.

    ``address`` in bytes; ``shape``; ``strides`` in elements; ``element`` and ``device`` of its cells;
    ``readonly``: no kernel may write there; ``owner`` keeps the memory alive. Make one with :meth:`of`; the
    constructor is for runtimes that have nothing but an address.

    ``copy.copy`` gives another view of the same memory, which keeps its owner alive. Deep copies and pickles
    would be views of memory that nobody keeps, so they raise InvalidProblemError: see :meth:`owned_copy`.
    """

    __slots__ = ("_end", "address", "device", "element", "owner", "readonly", "shape", "strides")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        element: ElementLike,
        device: Device,
        *,
        strides: tuple[int, ...] | None = None,
        readonly: bool = False,
        owner: object = None,
    ) -> None:
        """Raises InvalidProblemError for a null address or a negative size."""
        self._check_and_set("TensorView", address, shape, element, device, strides, readonly, owner)

    def _check_and_set(
        self,
        argument: str,
        address: Any,
        shape: Any,
        element: Any,
        device: Any,
        strides: Any,
        readonly: Any,
        owner: object,
    ) -> None:
        if type(element) is not ElementKind:
            element = element_kind(element, argument)
        if element not in IN_MEMORY:
            raise wrong(argument, f"one of {', '.join(IN_MEMORY)}", element)
        self.shape = _integers(argument, "a shape", shape, least=0)
        if strides is None:
            self.strides = contiguous_strides(self.shape)
        else:
            self.strides = _integers(argument, "strides", strides, least=-_BEYOND_INT64)
            if len(self.strides) != len(self.shape):
                raise wrong(argument, f"{len(self.shape)} strides", strides)
        if math.prod(self.shape) * element.itemsize >= _BEYOND_INT64:
            raise wrong(argument, "a shape of fewer than 2^63 bytes", shape)
        if type(readonly) is not bool:
            raise wrong(argument, "True or False for readonly", readonly)
        self.address = _check_memory(argument, address, 0 not in self.shape)
        self.element: ElementKind = element
        self.readonly: bool = readonly
        self.owner = owner
        self.device = check_device(argument, device)
        self._end = -1

    @classmethod
    def of(cls, obj: Any, *, element: ElementLike | None = None, argument: str = "tensor") -> TensorView:
        """View ``obj`` without a copy.

        ``element`` reinterprets integers or opaque bytes of the same size: the way to pass bfloat16 or
        float8 from a framework that has no such type. Raises InvalidProblemError naming ``argument``.
        """
        kind = type(obj)
        if kind is TensorView:
            view: TensorView = obj
            return view if element is None or element is view.element else view._as(element, argument)
        if element is not None and type(element) is not ElementKind:
            element = element_kind(element)
        try:
            return (READ_OF_TYPE.get(kind) or _find(obj, argument))(obj, element, argument)
        except (Sparse24Error, MemoryError):
            raise
        except Exception as error:  # whatever a broken protocol raises
            raise InvalidProblemError(
                f"{argument}: expected a tensor, got {kind.__name__} that can't be read "
                f"({type(error).__name__}: {error})"
            ) from error

    def _as(self, element: ElementLike, argument: str) -> TensorView:
        """A view of the memory as another element, under the rule of ``of``."""
        kind = element_of(self.element.dtype, element_kind(element), argument)
        return honest_view(
            self.address, self.shape, kind, self.device, self.strides, self.readonly, self, argument
        )

    def owned_copy(self) -> TensorView:
        """A contiguous copy on the same device, in memory of its own; on a GPU, on CuPy's current stream.

        Raises BackendUnavailableError where CuPy or the device is missing, or its memory is full.
        """
        bits = self.bits()
        if self.device.kind == "host":
            return TensorView.of(np.array(bits, order="C"), element=self.element)
        cupy = import_cupy()
        cuda = cupy.cuda
        try:
            with cuda.Device(self.device.ordinal):
                return TensorView.of(cupy.array(bits, order="C"), element=self.element)
        except (cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError) as error:
            raise BackendUnavailableError(f"no copy on {self.device}: {error}") from error

    def __copy__(self) -> TensorView:
        return view_at(self, self.address, self.owner)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _no_copy("TensorView", "copy the tensor that it views, or call view.owned_copy()")

    def __reduce__(self) -> NoReturn:
        raise _no_copy("TensorView", "send view.array().copy()")

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
        """Whether the elements lie in row-major order without gaps."""
        return 0 in self.shape or all(
            size <= 1 or stride == dense
            for size, stride, dense in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    def bits(self) -> Any:
        """The memory as an array of unsigned integers, of NumPy on the host, of CuPy on a GPU."""
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
        """The memory as a NumPy or CuPy array of the element's type; as bits if CuPy lacks the type."""
        bits = self.bits()
        try:
            return bits.view(self.element.dtype)
        except (TypeError, ValueError):
            return bits

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """NumPy's protocol: the memory itself, of the element's type. InvalidProblemError on a GPU."""
        if self.device.kind != "host":
            raise InvalidProblemError(f"TensorView: expected host memory, got {self.device}; call array()")
        return np.array(self.array(), dtype=dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack_abi.CPU if self.device.kind == "host" else dlpack_abi.CUDA, self.device.ordinal

    def __dlpack__(self, **options: Any) -> Any:
        """DLPack's protocol, for every element: ``torch.from_dlpack(view)`` shares the memory.

        Raises InvalidProblemError where the other side asks for what can't be, as for read-only memory.
        """
        return capsule_of(self.bits(), self.element, options)

    def __repr__(self) -> str:
        return f"TensorView({self.element}{list(self.shape)}, strides={list(self.strides)}, {self.device})"


class _HostMemory:
    """Hands NumPy an address, and keeps the owner alive as long as the array."""

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


def honest_view(
    address: int,
    shape: tuple[int, ...],
    element: ElementKind,
    device: Device,
    strides: tuple[int, ...],
    readonly: bool,
    owner: object,
    argument: str,
) -> TensorView:
    """A view from a framework's own fields, which are trusted: only null addresses are refused.

    Every run calls this. Raises InvalidProblemError naming ``argument``.
    """
    if not address and 0 not in shape:
        _check_memory(argument, address, True)
    view = _new(TensorView)
    view.address = address
    view.shape = shape
    view.strides = strides
    view.element = element
    view.device = device
    view.readonly = readonly
    view.owner = owner
    view._end = -1
    return view


def checked_view(
    address: Any,
    shape: Any,
    element: ElementKind,
    device: Any,
    strides: Any,
    readonly: Any,
    owner: object,
    argument: str,
) -> TensorView:
    """A view from any object's fields, all checked. Raises InvalidProblemError naming ``argument``."""
    view = _new(TensorView)
    view._check_and_set(argument, address, shape, element, device, strides, readonly, owner)
    return view


_new = object.__new__

Read = Callable[[Any, "ElementKind | None", str], TensorView]
"""(tensor, element to reinterpret as, name of the argument) -> view."""
Location = Callable[[Any], object]
"""Gives an operand's address and all else that checks look at, as a hashable value that holds no memory."""


def view_at(like: TensorView, address: int, owner: object) -> TensorView:
    """A view of other memory with the shape, strides, element and device of ``like``."""
    view = _new(TensorView)
    view.address, view.owner, view._end = address, owner, -1
    view.shape, view.strides, view.element = like.shape, like.strides, like.element
    view.device, view.readonly = like.device, like.readonly
    return view


class Adapter(NamedTuple):
    """A reader of the tensors of one framework or protocol."""

    applies: Callable[[Any], bool]
    read: Read
    lasting: bool
    """Whether it reads every object of a type. A JAX array's protocol depends on the array's device."""
    location: Location | None = None
    """Says cheaply where such a tensor lies; only for adapters that are lasting."""


READ_OF_TYPE: dict[type, Read] = {}
"""Readers by type, as ``TensorView.of`` found them."""
LOCATION_OF_TYPE: dict[type, Location] = {type(None): lambda none: None}
"""Says where an operand of a type lies, for types that can say it cheaply."""
_adapters: list[Adapter] = []


def register(adapters: tuple[Adapter, ...]) -> None:
    """Let ``TensorView.of`` try these adapters, in order, after the registered ones."""
    _adapters.extend(adapters)


def _find(obj: Any, argument: str) -> Read:
    for adapter in _adapters:
        if adapter.applies(obj):
            if adapter.lasting:
                READ_OF_TYPE[type(obj)] = adapter.read
                if adapter.location is not None:
                    LOCATION_OF_TYPE[type(obj)] = adapter.location
            return adapter.read
    raise InvalidProblemError(
        f"{argument}: expected a tensor (NumPy, CuPy, data_ptr(), __cuda_array_interface__, "
        f"__dlpack__ or __array_interface__), got {type(obj).__name__}"
    )


_BY_DTYPE = {kind.dtype: kind for kind in IN_MEMORY}
ELEMENT_NAMES = ", ".join(kind.dtype.name for kind in IN_MEMORY)


def element_of(dtype: np.dtype[Any], wanted: ElementKind | None, argument: str) -> ElementKind:
    """The element of data of ``dtype``: its own, or the ``wanted`` one if the sizes agree.

    Raises InvalidProblemError naming ``argument``.
    """
    found = _BY_DTYPE.get(dtype) if dtype.isnative else None
    if wanted is None or found is wanted:
        if found is None:
            raw = "TensorView.of(..., element=...) takes raw bits for an element's"
            advice = raw if _is_raw(dtype) else "convert it"
            raise InvalidProblemError(f"{argument}: expected one of {ELEMENT_NAMES}, got {dtype}; {advice}")
        return found
    if not _is_raw(dtype) or dtype.itemsize != wanted.itemsize or wanted not in IN_MEMORY:
        raise InvalidProblemError(f"{argument}: expected {wanted}, got {dtype}")
    return wanted


def _is_raw(dtype: np.dtype[Any]) -> bool:
    """Whether the type holds integers or opaque bytes. Other float types have NumPy's kind V, too."""
    is_opaque = dtype.type is np.void and dtype.names is None
    return dtype.isnative and (dtype.kind in "iu" or is_opaque)


class Workspace:
    """The caller's scratch memory: ``nbytes`` bytes at ``address`` on ``device``.

    Kernels never write outside it. The Workspace keeps ``owner`` alive. Like a TensorView it can be copied,
    but not deeply, and not pickled.
    """

    __slots__ = ("address", "device", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, device: Device, owner: object = None) -> None:
        """Raises InvalidProblemError for a null address or a negative size."""
        if type(nbytes) is not int or not 0 <= nbytes < _BEYOND_INT64:
            raise wrong("workspace", "a size in bytes", nbytes)
        self.address = _check_memory("workspace", address, nbytes > 0)
        self.nbytes = nbytes
        self.device = check_device("workspace", device)
        self.owner = owner

    @classmethod
    def of(cls, obj: Any, device: Device) -> Workspace:
        """Accepts a Workspace, any contiguous tensor, or an object with ``ptr`` and ``size`` (or ``nbytes``).

        An object that doesn't say where it lives (``device_id``) is taken to live on ``device``. Raises
        InvalidProblemError.
        """
        if type(obj) is cls:
            return obj
        try:
            return cls(*_extent(obj, device), obj)
        except Sparse24Error:
            raise
        except Exception as error:  # whatever a broken protocol raises
            raise InvalidProblemError(
                f"workspace: expected an object with an address and a size, got {type(obj).__name__} "
                f"that can't be read ({type(error).__name__}: {error})"
            ) from error

    def __copy__(self) -> Workspace:
        return Workspace(self.address, self.nbytes, self.device, self.owner)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _no_copy("Workspace", "allocate another")

    def __reduce__(self) -> NoReturn:
        raise _no_copy("Workspace", "allocate another where it is needed")


def _extent(obj: Any, device: Device) -> tuple[int, int, Device]:
    """Address, bytes and device of an object that is used as a workspace."""
    address = None if type(obj) in READ_OF_TYPE else getattr(obj, "ptr", None)
    if type(address) is int:
        memory = getattr(obj, "mem", None)
        size = None if memory is None else memory.size - (address - memory.ptr)
        if size is None:
            size = getattr(obj, "nbytes", None)
        if size is None:
            size = getattr(obj, "size", None)
        if type(size) is int:
            ordinal = getattr(obj, "device_id", None)
            if ordinal is None or ordinal == device.ordinal:
                return address, size, device
            return address, size, Device(device.kind, ordinal)
    if isinstance(obj, (int, float, str, bytes)):
        raise InvalidProblemError(
            f"workspace: expected an object with an address and a size, got {type(obj).__name__}"
        )
    view = TensorView.of(obj, argument="workspace")
    if not view.is_contiguous or view.readonly:
        raise InvalidProblemError(f"workspace: expected writable contiguous memory, got {view!r}")
    return view.address, view.nbytes_spanned, view.device


LOCATION_OF_TYPE[TensorView] = attrgetter("address", "shape", "strides", "element", "device", "readonly")
LOCATION_OF_TYPE[Workspace] = attrgetter("address", "nbytes", "device")
