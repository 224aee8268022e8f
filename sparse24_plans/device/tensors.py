"""Memory that plans read and write: where it lives, strided views of it, workspaces.

How frameworks' tensors become views is in adapters.py.
"""

from __future__ import annotations

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
        read = READ_OF_TYPE.get(kind)
        if read is not None:
            return read(obj, element, argument)
        for adapter in _adapters:
            if adapter.applies(obj):
                if adapter.lasting:
                    READ_OF_TYPE[kind] = adapter.read
                return adapter.read(obj, element, argument)
        raise InvalidProblemError(
            f"{argument}: expected a tensor (NumPy, CuPy, data_ptr(), __cuda_array_interface__, "
            f"__dlpack__ or __array_interface__), got {type(obj).__name__}"
        )

    def _as(self, element: ElementKind | str, argument: str) -> TensorView:
        """The same memory as another element, under the rule of ``of``."""
        kind = element_of(self.element.dtype, element_kind(element), argument)
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


class Adapter(NamedTuple):
    """How the tensors of some framework or protocol are read."""

    applies: Callable[[Any], bool]
    read: Read
    lasting: bool
    """Whether every object of the type takes it. Not so for a JAX array: its protocol hangs on its device."""


Read = Callable[[Any, "ElementKind | None", str], TensorView]
"""(tensor, element to reinterpret as, name of the argument) -> view."""
READ_OF_TYPE: dict[type, Read] = {}
"""What ``TensorView.of`` has found out about types."""
_adapters: list[Adapter] = []


def register(adapters: tuple[Adapter, ...]) -> None:
    """Let ``TensorView.of`` try these, in order, behind those that it has."""
    _adapters.extend(adapters)


_BY_DTYPE = {kind.dtype: kind for kind in ElementKind}
ELEMENT_NAMES = ", ".join(kind.dtype.name for kind in ElementKind)


def element_of(dtype: np.dtype[Any], wanted: ElementKind | None, argument: str) -> ElementKind:
    """The element that data of ``dtype`` is taken for: its own, or the ``wanted`` one of the same size.

    Raises InvalidProblemError naming ``argument``.
    """
    found = _BY_DTYPE.get(dtype) if dtype.isnative else None
    if wanted is None or found is wanted:
        if found is None:
            raise InvalidProblemError(
                f"{argument}: expected one of {ELEMENT_NAMES}, got {dtype}; "
                "pass element=... to reinterpret opaque bytes"
            )
        return found
    if dtype.kind not in "iuV" or dtype.itemsize != wanted.itemsize or not dtype.isnative:
        raise InvalidProblemError(f"{argument}: expected {wanted}, got {dtype}")
    return wanted


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
