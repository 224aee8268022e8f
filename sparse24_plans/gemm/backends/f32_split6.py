"""float32 as three parts of bf16, six of whose products are added: the kernel of f32_split.py."""

from __future__ import annotations

from .f32_split import Kernel as Kernel
