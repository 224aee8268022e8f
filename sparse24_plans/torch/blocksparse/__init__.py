"""Block-sparse matrices in PyTorch: products, softmax, attention, and modules of Torch-Blocksparse's names.

``from sparse24_plans.torch import blocksparse``. The ops are ``torch.ops.sparse24.blocksparse_*``;
docs/blocksparse.md is the guide.
"""

from . import ops as ops  # registers them
from .functional import attention as attention
from .functional import matmul as matmul
from .functional import softmax as softmax
from .layouts import Layout as Layout
from .modules import Linear as Linear
from .modules import MatMul as MatMul
from .modules import Softmax as Softmax
from .multihead import MultiheadAttention as MultiheadAttention
from .multihead import SparsityInfo as SparsityInfo

SparseMatMul = MatMul
"""The name of early releases of Torch-Blocksparse."""
SparseSoftmax = Softmax
"""The name of early releases of Torch-Blocksparse."""

__all__ = [
    "Layout",
    "Linear",
    "MatMul",
    "MultiheadAttention",
    "Softmax",
    "SparseMatMul",
    "SparseSoftmax",
    "SparsityInfo",
    "attention",
    "matmul",
    "softmax",
]
