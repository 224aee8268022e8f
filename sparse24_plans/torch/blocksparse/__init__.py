"""Block-sparse matrices in PyTorch: products, softmax, attention, convolution, and modules of these.

Import it by ``from sparse24_plans.torch import blocksparse``. The ops are
``torch.ops.sparse24.blocksparse_*``; docs/blocksparse.md is the guide.
"""

from . import attention_ops as attention_ops  # registers ops, as do the next two
from . import conv_ops as conv_ops
from . import matmul_ops as matmul_ops
from .functional import attention as attention
from .functional import conv2d as conv2d
from .functional import matmul as matmul
from .functional import softmax as softmax
from .layout_buffers import Layout as Layout
from .modules import Conv2d as Conv2d
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
