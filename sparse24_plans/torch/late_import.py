"""Imports an integration after its host, in whichever order programs import the two."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ..device.log import COMPILE

_PACKAGE = __name__.partition(".")[0]


def after_import(host: str, integration: str) -> None:
    """Import ``integration``, a module of this package, as soon as ``host`` is imported, or now if it is.

    A host whose version lacks what the integration needs is logged, and works without it.
    """
    if host in sys.modules:
        _integrate(integration)
    else:
        sys.meta_path.insert(0, _Finder(host, integration))


def _integrate(integration: str) -> None:
    try:
        importlib.import_module(integration, _PACKAGE)
    except ImportError as error:
        COMPILE.warning("%s is not available: %s", integration, error)


class _Finder(MetaPathFinder):
    """Finds ``host`` by the other finders, and adds the integration to what runs when it is loaded."""

    def __init__(self, host: str, integration: str) -> None:
        self._host, self._integration = host, integration

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._host:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _integrate(self._integration)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
