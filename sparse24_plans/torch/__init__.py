"""2:4 sparse weights in PyTorch: ops, a linear layer, a tensor, and whole models. Needs torch 2.6 or later.

Importing this registers the ops ``torch.ops.sparse24.*``. CPU tensors go through the host tier, CUDA tensors
through the plan that ``select`` chooses. docs/pytorch.md is the guide.
"""

from . import ops as ops  # registers them
from .linear import Sparse24Linear as Sparse24Linear
from .swap import Sparse24Recipe as Sparse24Recipe
from .swap import SwappedLayer as SwappedLayer
from .swap import SwapReport as SwapReport
from .swap import to_sparse24 as to_sparse24

__all__ = ["Sparse24Linear", "Sparse24Recipe", "SwapReport", "SwappedLayer", "to_sparse24"]
