"""The families of plans and the names of their kernels. This package names none of them itself.

A family is a package beside this one with a folder ``backends`` and a module ``plan``. Its classes of plans
register themselves when that module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from ..errors import InvalidProblemError, shown
from .descriptor import Descriptor

_ROOT = __package__.rpartition(".")[0]
_PLAN_OF: dict[type, Any] = {}
_BACKEND_OF: dict[str, str] = {}
"""The backend of each kernel, by the kernel's name."""


def register(plan: Any, kernels: Iterable[tuple[str, str]]) -> None:
    """Add a class of plans with its kernels: pairs of a kernel's name and its backend's."""
    _PLAN_OF[plan.descriptor_type] = plan
    _BACKEND_OF.update(kernels)


def plan_of(descriptor: object) -> Any:
    """The class of plans for a descriptor. Raises InvalidProblemError for anything but a descriptor."""
    kind = type(descriptor)
    if kind not in _PLAN_OF and issubclass(kind, Descriptor) and kind.__module__.startswith(f"{_ROOT}."):
        import_module(f"{kind.__module__.rpartition('.')[0]}.plan")
    if kind not in _PLAN_OF:
        raise InvalidProblemError(f"descriptor: expected the descriptor of a plan, got {kind.__name__}")
    return _PLAN_OF[kind]


def backends() -> tuple[str, ...]:
    """The names of all backends, in alphabetical order. Imports every family."""
    _import_every_family()
    return tuple(sorted(set(_BACKEND_OF.values())))


@cache
def _import_every_family() -> None:
    for folder in Path(__file__).parents[1].iterdir():
        if (folder / "backends").is_dir():
            import_module(f"{_ROOT}.{folder.name}.plan")


def kernels() -> tuple[str, ...]:
    """The names of all kernels, in alphabetical order. Imports every family."""
    backends()
    return tuple(sorted(_BACKEND_OF))


def _one_of(names: Callable[[], Collection[str]], known: Callable[[], Sequence[str]]) -> BeforeValidator:
    """A validator of a name: ``names`` are those of the imported families, ``known`` are all."""

    def checked(name: object) -> object:
        if isinstance(name, str) and (name in names() or name in known()):
            return name
        raise ValueError(f"expected one of {', '.join(known())}, got {shown(name)}")

    return BeforeValidator(checked)


BackendName = Annotated[str, _one_of(_BACKEND_OF.values, backends)]
"""The name of a backend. Other names are refused with a list of the backends."""
KernelName = Annotated[str, _one_of(_BACKEND_OF.keys, kernels)]
"""The name of a kernel entry. Other names are refused with a list of the kernels."""
