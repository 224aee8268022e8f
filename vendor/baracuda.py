"""The 2:4 weight of baracuda, a Rust facade over CUDA: W_compressed [M, K/2], W_metadata u16 [M, K/8].

A byte for a group of four, the lower byte of a word first: bits 1:0 the position of the first value, 3:2 of
the second. Its kernels ignore bits 7:4 and check nothing, so both may hold anything.
"""

from __future__ import annotations

from typing import Any


def nibbles_of(metadata: Any) -> Any:
    """Bytes uint8, in the order of the groups -> the nibbles that its kernels read."""
    return metadata & 15
