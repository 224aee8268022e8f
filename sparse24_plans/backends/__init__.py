"""Launch code, one module per kernel family. Each has a ``Kernel`` class (gemm.Kernel is its protocol)."""
