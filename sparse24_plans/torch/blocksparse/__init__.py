"""Block-sparse matrices in PyTorch: products, softmax, attention, convolution, and modules of these.

Import it by ``from sparse24_plans.torch import blocksparse``. The ops are
``torch.ops.sparse24.blocksparse_*``; docs/blocksparse.md is the guide.
"""

from . import attention_ops as attention_ops  # registers ops, as do the next two
from . import conv_ops as conv_ops
from . import matmul_ops as matmul_ops
from .deepspeed import DeepSpeedSparseSelfAttention, replace_mha
from .functional import attention, conv2d, matmul, softmax
from .layout_buffers import Layout
from .memory_order import BatchNorm2d, Permute, ReLU
from .memory_order import PermuteFunction as _permute  # noqa: F401, N813 - Torch-Blocksparse's name
from .modules import Conv2d, Linear, MatMul, Softmax
from .multihead import MultiheadAttention
from .sparsity import BigBirdSparsityConfig as BigBirdSparsityConfig
from .sparsity import BSLongformerSparsityConfig as BSLongformerSparsityConfig
from .sparsity import DenseSparsityConfig as DenseSparsityConfig
from .sparsity import FixedSparsityConfig as FixedSparsityConfig
from .sparsity import LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig
from .sparsity import SparsityConfig as SparsityConfig
from .sparsity import SparsityInfo as SparsityInfo
from .sparsity import VariableSparsityConfig as VariableSparsityConfig

SparseMatMul = MatMul
"""The name of early releases of Torch-Blocksparse."""
SparseSoftmax = Softmax
"""The name of early releases of Torch-Blocksparse."""

__all__ = [
    "BSLongformerSparsityConfig",
    "BatchNorm2d",
    "BigBirdSparsityConfig",
    "Conv2d",
    "DeepSpeedSparseSelfAttention",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "Layout",
    "Linear",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "MultiheadAttention",
    "Permute",
    "ReLU",
    "Softmax",
    "SparseMatMul",
    "SparseSoftmax",
    "SparsityConfig",
    "SparsityInfo",
    "VariableSparsityConfig",
    "attention",
    "conv2d",
    "matmul",
    "replace_mha",
    "softmax",
]
