"""Dropout of attention: which cells a seed and an offset drop, on every device.

The generator is Philox4x32-10 of J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, Parallel Random
Numbers: As Easy as 1, 2, 3 (SC 2011). It maps a key of two 32-bit words and a counter of four to four random
words.

- Seed and offset have 64 bits each. The first two words of philox(key=(seed low, seed high), counter=(offset
  low, offset high, 0, 0)) are the key of the cells.
- Cell (matrix, query, key), with matrix = batch * heads + head, has 16 of the 128 bits of philox(counter=(key
  with bits 0 and 3 cleared, query with bit 3 cleared, matrix low, matrix high)): of word 2 * (bit 3 of query)
  + (bit 3 of key) the low half if bit 0 of key is 0, else the high half.
- A cell is dropped if its 16 bits, as an integer, are below ``drop_bound(p)``.

So a cell's fate depends on seed, offset, p, matrix, query and key alone. The functions serve NumPy's int64
arrays and PyTorch's int64 tensors.
"""

from __future__ import annotations

from typing import Any

_WORD = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_STEPS = 1 << 16
"""Number of values of a cell's bits."""
MAX_DROPOUT = 1 - 1 / _STEPS
"""Largest probability whose bound has 16 bits."""


def drop_bound(p: float) -> int:
    """The bound of dropped cells' bits: ``p`` as a multiple of 2^-16, to nearest even."""
    return round(p * _STEPS)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four random words of int64 arrays that broadcast. Words are from 0 to 2^32 - 1."""
    a, b, c, d = counter
    for number in range(_ROUNDS):
        keys = tuple((one + number * step) & _WORD for one, step in zip(key, _WEYL, strict=True))
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # modulo 2^64
        a, b = (right >> 32 & _WORD) ^ b ^ keys[0], right & _WORD
        c, d = (left >> 32 & _WORD) ^ d ^ keys[1], left & _WORD
    return a, b, c, d


def dropped(seed_offset: Any, p: float, matrices: Any, queries: Any, keys: Any) -> Any:
    """Whether cells are dropped, for int64 arrays of their coordinates that broadcast.

    ``seed_offset`` are four int64 of 32 bits, the words of the seed and the offset.
    """
    words = [seed_offset[at : at + 1] & _WORD for at in range(4)]
    zero = 0 * words[0]
    of_cells = philox((words[2], words[3], zero, zero), (words[0], words[1]))[:2]
    zero = 0 * (matrices + queries + keys)
    counter = (keys & ~9) + zero, (queries & ~8) + zero, (matrices & _WORD) + zero, (matrices >> 32) + zero
    found = philox(counter, of_cells)
    which = (queries >> 3 & 1) * 2 + (keys >> 3 & 1)
    bits = sum((which == at) * word for at, word in enumerate(found)) >> (keys & 1) * 16 & (_STEPS - 1)
    return bits < drop_bound(p)
