"""Plan-based 2:4 structured-sparse linear algebra on NVIDIA GPUs, with a NumPy host tier.

``Y[N,M] = epilogue(alpha * X[N,K] @ W[M,K]^T)`` with W 2:4 sparse: in every 4 consecutive cells of a row at
most 2 are non-zero. Importing this touches no CUDA.

Names are loaded when first used (PEP 562), so the import itself costs milliseconds.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from .weights import device_code as _device_code

# The kernels of prepare/ stand above weights/, so weights/ gets them from here.
_device_code.short_forms = lambda: _import_module(".prepare.short_forms", __name__)

_HOME = {
    "_version": "__version__",
    "blocksparse.args": "BlockSparseAttentionArgs BlockSparseAttentionBackwardArgs BlockSparseConv2dArgs "
    "BlockSparseConv2dDgradArgs BlockSparseConv2dWgradArgs BlockSparseMatmulArgs BlockSparseSoftmaxArgs "
    "BlockSparseSoftmaxBackwardArgs",
    "blocksparse.convolution": "BlockSparseConv2dDescriptor",
    "blocksparse.descriptor": "BlockSparseAttentionDescriptor BlockSparseMatmulDescriptor "
    "BlockSparseSoftmaxDescriptor",
    "blocksparse.layout": "BlockSparseLayout",
    "blocksparse.pattern24": "compress_blocks decompress_blocks prune_blocks",
    "blocksparse.plan": "BlockSparseAttentionPlan BlockSparseConv2dPlan BlockSparseMatmulPlan "
    "BlockSparseSoftmaxPlan",
    "blocksparse.shape": "BlockSparseShape",
    "blocksparse.lookup_tables": "BlockSparseTables",
    "checkpoints.compress": "compress_checkpoint",
    "checkpoints.conversion": "convert_checkpoint",
    "checkpoints.recorded_run": "RecordedRun load_run save_run",
    "checkpoints.verify": "verify_checkpoint",
    "checkpoints.weights_file": "iter_weights load_weight save_weights",
    "device.tensors": "Device TensorView Workspace",
    "errors": "BackendUnavailableError BufferTooSmallError DriverError FormatError InvalidProblemError "
    "MisalignedOperandError Sparse24Error StorageError UnsupportedError WorkspaceTooSmallError",
    "formats.convert": "from_foreign to_foreign",
    "formats.product": "from_product",
    "formats.registered": "register_format",
    "gemm.args": "DgradSparse24Args GemmSparse24Args",
    "gemm.descriptor": "GemmSparse24Descriptor",
    "gemm.plan": "GemmSparse24Plan",
    "gemm.replay": "Replay ReplayDifference",
    "gemm.tuned": "TuningTable TuningWarning",
    "plan.bound": "Bound",
    "plan.explanation": "Explanation KernelSku Verdict",
    "plan.guarantee": "GuaranteeRequirement PrecisionGuarantee",
    "plan.plan": "explain",
    "plan.preference": "PlanPreference",
    "prepare.args": "CompressSparse24Args DecompressSparse24Args MaskSparse24Args PackSparse24Args "
    "PruneCompressSparse24Args PruneSparse24Args TilePruneSparse24Args UnpackSparse24Args",
    "prepare.descriptor": "CompressSparse24Descriptor DecompressSparse24Descriptor MaskSparse24Descriptor "
    "PackSparse24Descriptor PruneCompressSparse24Descriptor PruneSparse24Descriptor "
    "TilePruneSparse24Descriptor",
    "prepare.plan": "CompressSparse24Plan DecompressSparse24Plan MaskSparse24Plan PackSparse24Plan "
    "PruneCompressSparse24Plan PruneSparse24Plan TilePruneSparse24Plan",
    "tuning.search": "tune",
    "vocab": "ArchSku AttentionMask BlockSparseConvOp BlockSparseOp BlockSparsePass "
    "DeviceProperties ElementKind EpilogueKind GemmOp InnerPattern MaskLayout MathPrecision MatrixOrder "
    "OpCategory PrepareOp ScaleKind Tier TileRule",
    "weights.cutting": "concat_weights slice_weight split_weight",
    "weights.gates": "gated_rows",
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
