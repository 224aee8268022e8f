"""Parts of random problems that every family draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparse24_plans import PlanPreference, Tier
from sparse24_plans.plan.families import backends

RESULTS = {
    "f32": ("f32",),
    "f16": ("f16", "f32"),
    "bf16": ("bf16", "f32"),
    "s8": ("i32", "s8", "f16", "bf16", "f32"),
    "fp8_e4m3": ("bf16", "f16", "f32"),
}
"""Results of block-sparse products."""
FP8 = ("fp8_e4m3", "fp8_e5m2")
ARITHMETICS = (
    *("fma32_in_order", "exact_sum", "hopper_tc/slices=1", "hopper_tc/slices=3"),
    *("hopper_tc_fp8/slices=2", "hopper_tc_fp8/promoted=128"),
)
PROMISES = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "bit_stable_across_hardware")


def pick(rng: np.random.Generator, options: Any) -> Any:
    found = list(options)
    return found[rng.integers(len(found))]


def size_of(rng: np.random.Generator, most: int, unit: int = 1) -> int:
    """Log-uniform, often ragged, sometimes one of the edges of tiles; rarely 0."""
    most = max(most, unit)
    kind = rng.random()
    if kind < 0.02:
        return 0
    size = int(math.exp(rng.uniform(0, math.log(most + 0.5))))
    if kind < 0.25:
        size = 2 ** round(math.log2(max(size, 1))) + int(rng.integers(-1, 2)) * unit
    return int(np.clip(-(-size // unit) * unit, unit, most // unit * unit))


def alpha_of(rng: np.random.Generator) -> float:
    kind = rng.random()
    if kind < 0.5:
        return 1.0
    if kind < 0.7:
        return float(pick(rng, (0.0, -1.0, 0.5, 2.0, 1 / 3)))
    if kind < 0.9:
        return float(rng.standard_normal())
    return float(rng.choice([-1, 1]) * 10 ** rng.uniform(-45, 38))


def default_bias(fields: dict[str, Any]) -> str:
    if fields["out_element"] in FP8:
        return "bf16"
    if fields["element"] in ("s8", *FP8):
        return "f32" if fields["out_element"] in ("s8", "i32") else str(fields["out_element"])
    return str(fields["element"])


def preference_of(rng: np.random.Generator, *, host: bool) -> PlanPreference:
    wanted: dict[str, Any] = {"require": {name: True for name in PROMISES if rng.random() < 0.12}}
    if host and rng.random() < 0.15:
        wanted["require"]["arithmetic"] = str(pick(rng, ARITHMETICS))
    names = [name for name in backends() if host or not name.startswith("host")]
    if rng.random() < 0.3:
        wanted["prefer_backend"] = pick(rng, names)
    if rng.random() < 0.1:
        wanted["tier"] = pick(rng, Tier)
    if rng.random() < 0.1:
        wanted["max_workspace_bytes"] = int(2 ** rng.uniform(0, 30)) - 1
    if rng.random() < 0.1:
        wanted["allow_sm90a"] = False
    return PlanPreference.of(wanted)
