"""Whether the processor keeps subnormal numbers: a mode of the thread, which some libraries turn off."""

from __future__ import annotations

from ..errors import UnsupportedError

_MIN_NORMAL, _HALF = 2.0**-1022, 0.5
_SUBNORMAL, _ONE = 2.0**-1074, 1.0


def check_subnormals() -> None:
    """Raise UnsupportedError if this thread flushes subnormal inputs or results to zero.

    On x86 these are the bits FTZ and DAZ of the register MXCSR. A library that was linked with
    ``-ffast-math`` sets them for the thread that loads it, and threads begin with what their parent has.
    """
    if _MIN_NORMAL * _HALF == 0 or _SUBNORMAL * _ONE == 0:
        raise UnsupportedError(
            "subnormals: expected a thread that keeps them, for right results; this one flushes them to "
            "zero (a library linked with -ffast-math sets that mode when it is loaded)"
        )
