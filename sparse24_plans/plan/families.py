"""The families of plans and the names of their kernels. This package names none of them itself.

A family is a package beside this one with a folder ``backends`` and a module ``plan``. Its classes of plans
register themselves when that module is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from ..errors import InvalidProblemError, shown

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
    if kind not in _PLAN_OF and kind.__module__.startswith(f"{_ROOT}."):
        import_module(f"{kind.__module__.rpartition('.')[0]}.plan")
    if kind not in _PLAN_OF:
        raise InvalidProblemError(f"descriptor: expected the descriptor of a plan, got {kind.__name__}")
    return _PLAN_OF[kind]


def backends() -> tuple[str, ...]:
    """The names of all backends, in alphabetical order. Imports every family."""
    for folder in Path(__file__).parents[1].iterdir():
        if (folder / "backends").is_dir():
            import_module(f"{_ROOT}.{folder.name}.plan")
    return tuple(sorted(set(_BACKEND_OF.values())))


def _backend_or_kernel(name: object) -> object:
    if isinstance(name, str) and (name in _BACKEND_OF or name in _BACKEND_OF.values()):
        return name
    known = backends()
    if isinstance(name, str) and (name in known or name in _BACKEND_OF):
        return name
    raise ValueError(f"expected one of {', '.join(known)}, or the name of a kernel, got {shown(name)}")


BackendName = Annotated[str, BeforeValidator(_backend_or_kernel)]
"""The name of a backend, or of one kernel of it. Other names are refused with a list of the backends."""
