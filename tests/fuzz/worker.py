"""A process that runs cases one after the other, and says so in JSON lines. It ends with its first failure.

It announces each case before running it, so that the parent knows which case killed it, or hangs.
"""

from __future__ import annotations

import json
import os
import traceback

from .check import check
from .hostile import Attack, check_attack
from .problems import draw


def outcome(seed: int, case: int, device: int | str) -> dict[str, object]:
    """``served`` or ``refused``, or an ``error`` with its ``trace``."""
    try:
        problem = draw(seed, case, device)
        if isinstance(problem, Attack):
            return {"served": check_attack(problem)}
        return {"served": check(problem, device)}
    except Exception as error:  # noqa: BLE001 - whatever is wrong is what is looked for
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def main(seed: int, first: int, step: int, device: int | str) -> None:
    case = first
    while True:
        print(json.dumps({"case": case}), flush=True)
        found = outcome(seed, case, device)
        print(json.dumps({"case": case, **found}), flush=True)
        if "error" in found:
            os._exit(1)  # a context that died would fail every later case too
        case += step
