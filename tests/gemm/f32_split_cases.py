"""The rows of float32 in bf16 terms, the arithmetics that they name, and the least workspace of each."""

from __future__ import annotations

import pytest

from sparse24_plans import PlanPreference
from sparse24_plans.plan.kernel import Choice

from ..sample_devices import HOPPER

ROWS = ("f32_split3", "f32_split3_invariant", "f32_split6", "f32_split6_invariant")
every_row = pytest.mark.parametrize("row", ROWS)
NAMES = {2: "hopper_tc_f32x3", 3: "hopper_tc_f32x6"}


def least_workspace(row, desc, device=HOPPER):
    return row.needed_workspace(Choice(desc, device, row, PlanPreference(), {}))
