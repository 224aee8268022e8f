"""``sparse-24-bitmask``, the format of compressed-tensors (llm-compressor) for 2:4 checkpoints.

A linear layer ``PREFIX.weight`` [M, K] is stored as three tensors:

- ``PREFIX.compressed`` [M, K/2], the kept values of a row in the order of their columns;
- ``PREFIX.bitmask`` uint8 [M, K/8], a bit for each dense column, the lowest first; two are set in each group
  of four;
- ``PREFIX.shape`` int64 [2, 1], M and K.

A model's ``config.json`` says so in ``quantization_config.sparsity_config`` (once ``compression_config``).
"""

from __future__ import annotations

from typing import Any

FORMAT = "sparse-24-bitmask"
WEIGHT_SUFFIX = ".weight"
CONFIG_KEYS = ("quantization_config", "compression_config")
"""Keys under which ``config.json`` may hold the configuration: the present name, and the first one."""
METHOD = "compressed-tensors"

_FLAGS = {0x4: 0b0011, 0x8: 0b0101, 0x9: 0b0110, 0xC: 0b1001, 0xD: 0b1010, 0xE: 0b1100}
FLAGS_OF_NIBBLE = bytes(_FLAGS.get(nibble, 0) for nibble in range(16))
"""Nibble of two positions -> four flags, the lowest for the first column; 0 for what isn't increasing."""
NIBBLE_OF_FLAGS = bytes(
    next((nibble for nibble, known in _FLAGS.items() if known == flags), 0) for flags in range(16)
)
"""The inverse; 0, which is no valid nibble, where not exactly two flags are set."""


def prefix_of(name: str) -> str:
    """The name of a weight without its ``.weight``, to which the parts' names are added."""
    return name.removesuffix(WEIGHT_SUFFIX)


def sparsity_config(modules: list[str], global_sparsity: float) -> dict[str, Any]:
    """The entry of ``config.json`` for a model with these layers compressed."""
    return {
        "format": FORMAT,
        "global_sparsity": global_sparsity,
        "ignore": [],
        "registry_requires_subclass": False,
        "sparsity_structure": "2:4",
        "targets": modules,
    }
