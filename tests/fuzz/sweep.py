"""Every public call with every hostile value of every argument, once: ``python -m tests.fuzz.sweep``.

The fuzzer draws among these attacks, and among pairs of them; this takes minutes. Exit code 1: there were
failures. Each is printed with its traceback.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

from .hostile import Attack, check_attack
from .hostile_calls import CALLS
from .hostile_values import VALUES


def failures(call: str, argument: str) -> list[str]:
    """Return what is wrong with the call for hostile values of the argument."""
    found = []
    for value in VALUES:
        try:
            check_attack(Attack(call, ((argument, value),)))
        except AssertionError as error:
            found.append(str(error))
    return found


def main() -> int:
    pairs = [(call, argument) for call in CALLS for argument in CALLS[call].arguments]
    count = 0
    with ProcessPoolExecutor() as processes:
        for done, found in enumerate(processes.map(failures, *zip(*pairs, strict=True)), 1):
            for text in found:
                print(f"FAILED {text}", flush=True)
            count += len(found)
            if done % 100 == 0 or done == len(pairs):
                print(f"{done} of {len(pairs)} arguments, {count} failures", file=sys.stderr, flush=True)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
