"""Checks what ``sparse24 demo`` says of its real model: ``sparse24 demo | python -m tests.cli.demo_output``.

Calibrating the model takes most of a minute, so CI checks the run of the README, and no test repeats it.
"""

from __future__ import annotations

import re
import sys

from sparse24_plans.weights.calibrated import METHODS

_ROWS = re.compile(r"(?m)^  (magnitude|wanda|sparsegpt(?:, s4)?) +([\d.]+) +([\d.]+) +[\d.]+%$")
_SAID = "This verified the arithmetic: products with the pruned weights. It says nothing about accuracy."


def check(text: str) -> None:
    """Calibration keeps most of the accuracy, and values of 4 bits cost at most 0.02 more."""
    assert "PASS: 37 layers on " in text, text
    assert _SAID in " ".join(text.split()), text
    rows = _ROWS.findall(text)
    assert [method for method, _, _ in rows] == [*METHODS, "sparsegpt, s4"], text
    means, worst = ([float(row[place]) for row in rows] for place in (1, 2))
    assert means[0] < means[1] < 0.85 <= means[2], text
    assert means[2] - 0.02 <= means[3], text
    assert worst[0] < worst[1] < worst[2], text
    assert all(one < mean for one, mean in zip(worst, means, strict=True)), text


if __name__ == "__main__":
    check(sys.stdin.read())
