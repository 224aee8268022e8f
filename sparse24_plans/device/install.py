"""Slow imports, and advice on installing missing libraries, from the installed package's metadata.

The advice names the libraries, not this package with an extra: an index may lack the package, or have another
one of its name.
"""

from __future__ import annotations

import logging  # noqa: F401 - a fork takes locks in reverse order: ours, whose holder may log, before logging's
import os
import re
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import metadata
from threading import RLock
from typing import Any

from ..errors import BackendUnavailableError

_DISTRIBUTION = "sparse24_plans"
_EXTRA = re.compile(r"""^(?P<what>[^;]+);.*\bextra\s*==\s*["'](?P<extra>\w+)["']""")


def install_advice(libraries: str) -> str:
    """The commands for ``libraries`` ("cuda", "cusparselt"), which come as extras for CUDA 12 and 13."""
    commands = (f"for CUDA {major}: {_command(f'{libraries}{major}')}" for major in (13, 12))
    return "; ".join(commands)


@cache
def _command(extra: str) -> str:
    try:
        lines = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a source tree that isn't installed
        lines = []
    found = [match["what"].strip() for match in map(_EXTRA.match, lines) if match and match["extra"] == extra]
    if not found:
        return f"pip install '.[{extra}]' in the package's source folder"
    return shlex.join(["pip", "install", *found])


def lock_across_forks() -> Any:
    """A lock for a module. A fork waits until no other thread holds it, so that a child finds it free."""
    lock = RLock()
    if hasattr(os, "register_at_fork"):  # not every system forks
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


_importing = lock_across_forks()
_import_failures: list[str] = []


def importing(name: str) -> AbstractContextManager[Any]:
    """The context to import a large library in. A fork waits: in a child, half an import would never end."""
    return nullcontext() if name in sys.modules else _importing


def import_cupy() -> Any:
    """CuPy, imported when first needed, because its import takes half a second.

    An import that failed isn't tried again: each try would search the disk under Python's import lock.
    """
    if _import_failures and "cupy" not in sys.modules:
        raise BackendUnavailableError(_import_failures[0])
    try:
        with importing("cupy"):
            import cupy
    except Exception as error:  # whatever a broken installation raises
        absent = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        state = "is not installed" if absent else f"can't be imported ({error})"
        message = f"CuPy {state}; {install_advice('cuda')}"
        if "cupy" not in sys.modules:
            _import_failures.append(message)
        raise BackendUnavailableError(message) from error
    return cupy
