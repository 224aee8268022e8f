"""Plan-based 2:4 structured-sparse linear algebra on NVIDIA GPUs, with a NumPy host tier.

``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse: in every 4 consecutive cells of a row at
most 2 are non-zero. Importing this touches no CUDA.

Names are loaded when first used (PEP 562), so the import itself costs milliseconds.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_HOME = {
    "_version": "__version__",
    "formats.convert": "from_foreign to_foreign",
    "errors": "BackendUnavailableError BufferTooSmallError DriverError FormatError InvalidProblemError "
    "MisalignedOperandError Sparse24Error StorageError UnsupportedError WorkspaceTooSmallError",
    "gemm.descriptor": "GemmSparse24Descriptor",
    "gemm.plan": "BoundGemm DgradSparse24Args GemmSparse24Args GemmSparse24Plan explain",
    "prepare.plan": "BoundPrepare CompressSparse24Args CompressSparse24Plan DecompressSparse24Args "
    "DecompressSparse24Plan MaskSparse24Args MaskSparse24Plan PackSparse24Args PackSparse24Plan "
    "PruneCompressSparse24Args PruneCompressSparse24Plan PruneSparse24Args PruneSparse24Plan "
    "TilePruneSparse24Args TilePruneSparse24Plan UnpackSparse24Args",
    "prepare.descriptor": "CompressSparse24Descriptor DecompressSparse24Descriptor MaskSparse24Descriptor "
    "PackSparse24Descriptor PruneCompressSparse24Descriptor PruneSparse24Descriptor "
    "TilePruneSparse24Descriptor",
    "device.tensors": "Device TensorView Workspace",
    "tuning.search": "tune",
    "gemm.tuned": "TuningTable TuningWarning",
    "vocab": "BackendKind DeviceProperties ElementKind EpilogueKind GuaranteeRequirement KernelSku "
    "MaskLayout PlanPreference PrecisionGuarantee Tier TileRule",
    "weights.weight": "PackedWeight Sparse24Weight prune",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
