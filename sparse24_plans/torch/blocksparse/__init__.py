"""Block-sparse matrices in PyTorch: products, softmax, attention, convolution, modules of known names.

``from sparse24_plans.torch import blocksparse``. The ops are ``torch.ops.sparse24.blocksparse_*``;
docs/blocksparse.md is the guide.
"""

from . import ops as ops  # registers them
from .conv_modules import Conv2d as Conv2d
from .conv_modules import conv2d as conv2d
from .functional import attention as attention
from .functional import matmul as matmul
from .functional import softmax as softmax
from .layout_buffers import Layout as Layout
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
    "Conv2d",
    "Layout",
    "Linear",
    "MatMul",
    "MultiheadAttention",
    "Softmax",
    "SparseMatMul",
    "SparseSoftmax",
    "SparsityInfo",
    "attention",
    "conv2d",
    "matmul",
    "softmax",
]
