"""Plan-based 2:4 structured-sparse linear algebra on NVIDIA GPUs, with a NumPy host tier.

``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse: in every 4 consecutive cells of a row at
most 2 are non-zero. Importing this touches no CUDA.
"""

from ._version import __version__
from .errors import (
    BackendUnavailableError,
    BufferTooSmallError,
    DriverError,
    FormatError,
    InvalidProblemError,
    MisalignedOperandError,
    Sparse24Error,
    StorageError,
    UnsupportedError,
    WorkspaceTooSmallError,
)
from .gemm import (
    BoundGemm,
    DgradSparse24Args,
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    explain,
)
from .tensors import Device, TensorView, Workspace
from .vocab import (
    BackendKind,
    DeviceProperties,
    ElementKind,
    EpilogueKind,
    GuaranteeRequirement,
    KernelSku,
    PlanPreference,
    PrecisionGuarantee,
    Tier,
)
from .weights import PackedWeight, Sparse24Weight, prune

__all__ = [
    "BackendKind",
    "BackendUnavailableError",
    "BoundGemm",
    "BufferTooSmallError",
    "Device",
    "DeviceProperties",
    "DgradSparse24Args",
    "DriverError",
    "ElementKind",
    "EpilogueKind",
    "FormatError",
    "GemmSparse24Args",
    "GemmSparse24Descriptor",
    "GemmSparse24Plan",
    "GuaranteeRequirement",
    "InvalidProblemError",
    "KernelSku",
    "MisalignedOperandError",
    "PackedWeight",
    "PlanPreference",
    "PrecisionGuarantee",
    "Sparse24Error",
    "Sparse24Weight",
    "StorageError",
    "TensorView",
    "Tier",
    "UnsupportedError",
    "Workspace",
    "WorkspaceTooSmallError",
    "__version__",
    "explain",
    "prune",
]
