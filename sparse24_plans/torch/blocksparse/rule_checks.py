"""Checks of the arguments of rules and modules; each raises InvalidProblemError naming the argument."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...blocksparse.shape import BLOCK_SIZES
from ...errors import InvalidProblemError, shown
from ...vocab import checked_flag, integer
from ...vocab.fields import INT32_MAX, checked_integer


def checked_ranges(starts: object, ends: object) -> tuple[list[int], list[int] | None]:
    """``global_block_indices`` and their ends as lists. Raises InvalidProblemError naming the argument."""
    first = counts("global_block_indices", starts)
    if ends is None:
        return first, None
    last = counts("global_block_end_indices", ends)
    if len(first) != len(last):
        raise InvalidProblemError(
            f"global_block_end_indices: expected {len(first)}, as global_block_indices, got {len(last)}"
        )
    if any(start >= end for start, end in zip(first, last, strict=True)):
        raise InvalidProblemError(
            f"global_block_end_indices: expected ends beyond the starts {first}, got {last}"
        )
    return first, last


def counted(name: str, given: object, least: int = 0) -> int:
    """``given`` as an int. Raises InvalidProblemError unless a layout can have so many, from ``least`` on."""
    return checked_integer(name, given, least, INT32_MAX)


def counts(name: str, given: object, least: int = 0) -> list[int]:
    """``given`` as a list of ints. Raises InvalidProblemError for anything but a sequence of them."""
    array = isinstance(given, (np.ndarray, Tensor)) and given.ndim == 1
    if not array and (isinstance(given, (str, bytes)) or not isinstance(given, Sequence)):
        raise InvalidProblemError(f"{name}: expected a sequence of integers, got {shown(given)}")
    return [counted(name, one, least) for one in given]  # type: ignore[attr-defined]


def check_fits(name: str, count: int, side: int) -> None:
    if count > side:
        raise InvalidProblemError(f"{name}: expected at most {side}, the blocks of a row, got {count}")


def check_word(name: str, given: object, known: Sequence[str]) -> None:
    if not isinstance(given, str) or given not in known:
        raise InvalidProblemError(f"{name}: expected {' or '.join(known)}, got {shown(given)}")


def check_mask_modes(key_padding_mask_mode: str, attn_mask_mode: str) -> None:
    modes = {"key_padding_mask_mode": key_padding_mask_mode, "attn_mask_mode": attn_mask_mode}
    for name, mode in modes.items():
        check_word(name, mode, ("add", "mul"))


def check_attention(attention: str, horizontal: bool = False) -> None:
    check_word("attention", attention, ("unidirectional", "bidirectional"))
    if checked_flag("horizontal_global_attention", horizontal) and attention == "unidirectional":
        raise InvalidProblemError("horizontal_global_attention: expected False for unidirectional, got True")


def checked_block(block: object) -> int:
    found = integer(block)
    if found not in BLOCK_SIZES:
        raise InvalidProblemError(f"block: expected 16, 32, 64 or 128, got {shown(block)}")
    return found


def blocks_of(tokens: int, unit: int, block: int) -> int:
    """Blocks of ``tokens``. Raises InvalidProblemError if they aren't a multiple of ``unit``."""
    tokens = counted("tokens", tokens)
    if tokens % unit:
        raise InvalidProblemError(f"tokens: expected a multiple of {unit}, got {tokens}")
    return tokens // block
