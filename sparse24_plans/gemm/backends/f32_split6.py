"""float32 as three parts of bf16, six of whose products are added: the kernel of gemm/split.py."""

from __future__ import annotations

from ..f32_split import Kernel as Kernel
