"""A result is written, so memory that must not change is refused: by a typed error, with nothing written."""

from __future__ import annotations

import numpy as np
import pytest

from sparse24_plans import (
    GemmSparse24Args,
    GemmSparse24Descriptor,
    GemmSparse24Plan,
    InvalidProblemError,
    Sparse24Weight,
    TensorView,
)

from ..device.tensor_likes import OnlyArrayInterface, OnlyDlpack, jax_like


def flagged(array: np.ndarray) -> np.ndarray:
    found = array.view()
    found.flags.writeable = False
    return found


KINDS = {
    "numpy": flagged,
    "broadcast": lambda array: np.broadcast_to(array, array.shape),
    "array interface": lambda array: OnlyArrayInterface(flagged(array)),
    "dlpack": lambda array: OnlyDlpack(flagged(array)),
    "jax, stand-in": jax_like,
}


def product() -> tuple[GemmSparse24Plan, GemmSparse24Args]:
    plan = GemmSparse24Plan.select(GemmSparse24Descriptor(n=4, m=8, k=16, element="f32"), device="host")
    weight = plan.pack(Sparse24Weight.prune_compress(np.ones((8, 16), np.float32)))
    return plan, GemmSparse24Args(weight, np.ones((4, 16), np.float32), np.full((4, 8), 7, np.float32))


def assert_refused(plan: GemmSparse24Plan, args: GemmSparse24Args) -> None:
    for run in (plan.run, plan.bind):
        with pytest.raises(
            InvalidProblemError, match=r"^y: expected writable memory, got a read-only tensor"
        ):
            run(args)
    assert not plan.can_implement(args)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_must_not_change_is_no_result(kind):
    plan, args = product()
    y = args.y
    assert_refused(plan, GemmSparse24Args(args.weight, args.x, KINDS[kind](y)))
    assert (y == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_must_not_change_is_read(kind):
    plan, args = product()
    plan.run(GemmSparse24Args(args.weight, KINDS[kind](args.x), args.y))
    assert (args.y == 8).all()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_must_not_change_is_no_workspace(kind):
    plan, args = product()
    with pytest.raises(InvalidProblemError, match="workspace: expected writable contiguous memory"):
        plan.run(args, workspace=KINDS[kind](np.zeros(8, np.float32)))


def test_immutable_jax_results_are_refused():
    jnp = pytest.importorskip("jax.numpy")
    plan, args = product()
    y = jnp.full((4, 8), 7, jnp.float32)
    assert TensorView.of(y).readonly
    assert_refused(plan, GemmSparse24Args(args.weight, args.x, y))
    assert (np.asarray(y) == 7).all()
    plan.run(GemmSparse24Args(args.weight, jnp.ones((4, 16), jnp.float32), args.y))
    assert (args.y == 8).all()
    problem = GemmSparse24Descriptor(n=4, m=8, k=16, element=jnp.bfloat16)
    assert problem.element == "bf16"
