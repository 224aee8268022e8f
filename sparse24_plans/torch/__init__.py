"""2:4 sparse weights in PyTorch: ops, a linear layer, a tensor, and whole models. Needs torch 2.6 or later.

Importing this registers the ops ``torch.ops.sparse24.*``. CPU tensors go through the host tier, CUDA tensors
through the plan that ``select`` chooses. docs/pytorch.md is the guide.
"""

from . import ops as ops  # registers them

__all__: list[str] = []
