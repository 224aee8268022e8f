"""Runs one random problem with a block-sparse matrix, and checks all that its plan promises."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparse24_plans import PlanPreference, UnsupportedError

from ..blocksparse.problems import case_of, random_operands, reference
from ..plan.cases import PLANS, PlanCase, equal
from .block_problems import BlockProblem


def check_block_problem(problem: BlockProblem, device: int | str) -> bool:
    """Whether the problem was served; False: refused. Raises AssertionError, or whatever went wrong."""
    desc, preference = problem.desc, problem.preference
    try:
        plan = PLANS[type(desc)].select(desc, device=device, preference=preference)
    except UnsupportedError:
        assert preference != PlanPreference(), "some row serves every such problem"
        return False
    operands = random_operands(desc, problem.layout, np.random.default_rng(problem.data_seed))
    case = case_of(plan, operands)
    given = {name: case.guarded[name].numpy().copy() for name in case.guarded if name not in case.written}
    found = {name: bits.copy() for name, bits in case.run().items()}
    for name, (exact, allowed) in reference(plan, operands).items():
        operand = next(one for one in desc.operands() if one.name == name)
        _check_numbers(found[name].view(operand.element.dtype), exact, allowed, operand.element)
    for name, values in given.items():
        assert np.array_equal(case.guarded[name].numpy().view(np.uint8), values.view(np.uint8)), (
            f"{name}, an input, was written"
        )
    if plan.guarantee.deterministic:
        case.poison()
        assert equal(case.run(), found), "other bits in a second run"
    if plan.guarantee.batch_invariant and desc.batch > 1:
        _check_a_batch_alone(plan, case, operands, found)
    return True


def _check_numbers(got: np.ndarray, exact: np.ndarray, allowed: np.ndarray, element: Any) -> None:
    """Inside the allowed error; where that reaches beyond the type, so may the result."""
    wide = got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        right = np.abs(wide - exact) <= allowed
        right |= (wide == exact) & np.isinf(wide)  # of a row without cells, its logsumexp
        if not element.is_integer:
            most = min(float(np.finfo(np.float32).max), _largest(element))
            for sign in (1.0, -1.0):
                right |= (wide == sign * np.inf) & (sign * exact + allowed >= most)
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise AssertionError(
            f"{(~right).sum()} of {right.size} results are wrong, the first at {at}: got {wide[at]!r}, "
            f"exact {exact[at]!r}, allowed {allowed[at]!r}"
        )


def _largest(element: Any) -> float:
    return {"f16": 65504.0, "bf16": 3.3895e38, "f32": 3.4028e38}[element]


def _check_a_batch_alone(plan: Any, case: PlanCase, operands: Any, found: dict[str, np.ndarray]) -> None:
    desc = plan.descriptor.model_copy(update={"batch": 1})
    device = "host" if plan.device.kind == "host" else plan.device.ordinal
    alone = type(plan).select(desc, device=device, preference=plan.preference)
    last = case_of(alone, operands.batch(desc)).run()
    assert all(np.array_equal(last[name][0], found[name][-1]) for name in found), (
        "other bits of a batch alone"
    )
