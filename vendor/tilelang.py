"""The metadata of TileLang's ``gemm_sp_v2``: nibbles in row-major order, the least significant first.

Words are int8, int16 or int32, so of 8, 16 or 32 dense columns: ``E`` is [M, K/8], [M, K/16] or [M, K/32].
Nothing is interleaved: as bytes all three are the same, and rows can be concatenated.
"""

from __future__ import annotations

WORD_BYTES = (1, 2, 4)


def dense_columns(word_bytes: int) -> int:
    """Dense columns of a word: four for each of its nibbles."""
    return 8 * word_bytes
