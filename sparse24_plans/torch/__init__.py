"""2:4 sparse weights in PyTorch: ops, a linear layer, a tensor, and whole models.

The import needs PyTorch 2.6 or later, and registers the ops ``torch.ops.sparse24.*``. CPU tensors go through
the host tier, CUDA tensors through the plan that ``select`` chooses. docs/pytorch.md is the guide.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

try:
    import torch as _torch
except ImportError as error:
    raise ImportError("sparse24_plans.torch needs PyTorch 2.6 or later: pip install 'torch>=2.6'") from error
if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"sparse24_plans.torch needs PyTorch 2.6 or later, got {_torch.__version__}")

from . import batched_ops as batched_ops  # registers ops
from . import blocksparse as blocksparse
from . import fp8_ops as fp8_ops  # registers ops
from . import gemm_ops as gemm_ops  # registers ops
from . import grouped_ops as grouped_ops  # registers ops
from . import prepare_ops as prepare_ops  # registers ops
from . import tensor_ops as tensor_ops  # fills the dispatch table of Sparse24Tensor
from .calibrated_block import CalibratedLayer
from .calibration import CalibrationReport, calibrate
from .experts import Sparse24Experts
from .gated import GatedBlock as GatedBlock
from .gated import Sparse24GatedMLP, fuse_gated
from .late_import import after_import as _after_import
from .linear import Sparse24Linear
from .lora import lora_config
from .models import LoadReport, from_pretrained, load_sparse24, save_sparse24
from .quantized_linear import Sparse24QuantizedLinear
from .semi_structured import from_semi_structured, to_semi_structured, use_as_default
from .swap import Sparse24Recipe, to_sparse24
from .swap_report import DenseMatrix, SwappedLayer, SwapReport
from .tensor import SemiStructuredError, Sparse24Tensor
from .weight_only_linear import Sparse24WeightOnlyLinear

_after_import("transformers.modeling_utils", ".integrations.transformers")

if _TYPE_CHECKING:
    from .parallel import ColwiseSparse24 as ColwiseSparse24
    from .parallel import RowwiseSparse24 as RowwiseSparse24

__all__ = [
    "CalibratedLayer",
    "CalibrationReport",
    "ColwiseSparse24",
    "DenseMatrix",
    "LoadReport",
    "RowwiseSparse24",
    "SemiStructuredError",
    "Sparse24Experts",
    "Sparse24GatedMLP",
    "Sparse24Linear",
    "Sparse24QuantizedLinear",
    "Sparse24Recipe",
    "Sparse24Tensor",
    "Sparse24WeightOnlyLinear",
    "SwapReport",
    "SwappedLayer",
    "blocksparse",
    "calibrate",
    "from_pretrained",
    "from_semi_structured",
    "fuse_gated",
    "load_sparse24",
    "lora_config",
    "save_sparse24",
    "to_semi_structured",
    "to_sparse24",
    "use_as_default",
]


def __getattr__(name: str) -> _Any:
    """The styles are imported when they are first asked for: not every PyTorch has torch.distributed."""
    if name not in ("ColwiseSparse24", "RowwiseSparse24"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import parallel

    return getattr(parallel, name)
