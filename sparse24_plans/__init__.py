"""Plan-based 2:4 structured-sparse linear algebra on NVIDIA GPUs, with a NumPy host tier.

``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse: in every 4 consecutive cells of a row at
most 2 are non-zero. Importing this touches no CUDA.

__init__.pyi lists the public names with their modules. A name is loaded when first used (PEP 562), so the
import itself costs milliseconds.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from .weights import device_code as _device_code

# The kernels of prepare/ stand above weights/, so weights/ gets them from here.
_device_code.short_forms = lambda: _import_module(".prepare.short_forms", __name__)

with open(__file__.rpartition(".")[0] + ".pyi") as _stub:  # its lines: from .module import name as name
    _MODULE_OF = {line.split()[3]: line.split()[1] for line in _stub if line.startswith("from ")}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
