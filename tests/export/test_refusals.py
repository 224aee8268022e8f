"""C refuses the operands that Python refuses, with a code of the same meaning, and launches nothing then."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from sparse24_plans import (
    BlockSparseAttentionDescriptor,
    BlockSparseMatmulDescriptor,
    BlockSparseShape,
    BlockSparseSoftmaxDescriptor,
    GemmSparse24Descriptor,
    PruneSparse24Descriptor,
)
from sparse24_plans.device.devices import absent_gpu
from sparse24_plans.errors import (
    InvalidProblemError,
    MisalignedOperandError,
    Sparse24Error,
    WorkspaceTooSmallError,
)
from sparse24_plans.export import export_plans
from sparse24_plans.plan.families import plan_of
from tests.export.arguments import args_of, views_of
from tests.export.c_library import RefusedError
from tests.export.test_launches import random_operands

H200 = absent_gpu("h200")
CODES = {InvalidProblemError: 1, MisalignedOperandError: 3, WorkspaceTooSmallError: 4}
SHAPE = BlockSparseShape(heads=2, rows=128, cols=128, block=64, blocks=5)
PROBLEMS = {
    "bf16": GemmSparse24Descriptor(n=40, m=128, k=256, element="bf16"),
    "gated": GemmSparse24Descriptor(n=40, m=128, k=256, element="f16", epilogue="bias_swiglu"),
    "with C": GemmSparse24Descriptor(n=40, m=128, k=256, element="bf16", beta=0.5),
    "columns": GemmSparse24Descriptor(n=40, m=128, k=256, element="bf16", x_order="column", y_order="column"),
    "f32": GemmSparse24Descriptor(n=7, m=64, k=512, element="f32", epilogue="bias"),
    "three narrow rows": GemmSparse24Descriptor(n=3, m=16, k=32, element="bf16"),
    "one token": GemmSparse24Descriptor(n=1, m=64, k=512, element="bf16"),
    "groups": GemmSparse24Descriptor(n=40, m=64, k=256, element="bf16", groups=3),
    "groups by counts": GemmSparse24Descriptor(
        n=40, m=64, k=256, element="f16", groups=4, group_tokens="counts", epilogue="bias"
    ),
    "batches": GemmSparse24Descriptor(n=9, m=64, k=128, element="bf16", batches=3, epilogue="bias"),
    "batches of C": GemmSparse24Descriptor(
        n=9, m=64, k=128, element="f16", batches=2, beta=1.0, y_order="column", shared_weight=True
    ),
    "backward": GemmSparse24Descriptor(n=9, m=64, k=128, element="bf16", op="dgrad"),
    "prune": PruneSparse24Descriptor(m=64, k=128, element="bf16"),
    "dsd": BlockSparseMatmulDescriptor(op="dsd", layout=SHAPE, n=40, element="bf16", epilogue="bias"),
    "packed dsd": BlockSparseMatmulDescriptor(op="dsd", layout=SHAPE, n=40, element="bf16", packed=True),
    "packed s8 at any address": BlockSparseMatmulDescriptor(
        op="dsd", layout=SHAPE, n=40, element="s8", packed=True, trans_a=True
    ),
    "softmax": BlockSparseSoftmaxDescriptor(layout=SHAPE, element="f16", rpe=True),
    "attention": BlockSparseAttentionDescriptor(layout=SHAPE, element="f16", head_size=64),
}


def python_refuses(plan: Any, given: list[tuple[int, int]], workspace: int, nbytes: int) -> int:
    """The code of what Python raises for these operands, or 0."""
    try:
        views = plan.parts.checks(args_of(plan, views_of(plan, given)))
        if plan.workspace_size() and (not workspace or nbytes < plan.workspace_size()):
            return CODES[WorkspaceTooSmallError]
        plan._launches.check_workspace(workspace, views)
    except Sparse24Error as error:
        return next(code for kind, code in CODES.items() if isinstance(error, kind))
    return 0


def spoiled(
    seed: random.Random, given: list[tuple[int, int]], workspace: int, nbytes: int, changes: int
) -> tuple[list[tuple[int, int]], int, int]:
    """The operands and the workspace after so many changes, any of which may be harmless."""
    given, where, size = list(given), workspace, nbytes
    for _ in range(changes):
        if seed.random() < 0.2:
            where = seed.choice((0, workspace + 1, workspace + 16, given[0][0]))
            continue
        if seed.random() < 0.1:
            size = seed.choice((nbytes + 1, max(0, nbytes - 1)))
            continue
        at = seed.randrange(len(given))
        address, stride = given[at]
        other = given[seed.randrange(len(given))][0]
        given[at] = seed.choice(
            [
                (0, stride),
                (address + seed.choice((1, 2, 4, 8)), stride),
                (address, stride + seed.choice((-64, -8, -1, 1, 4, 8))),
                (address, -stride),
                (address, 0),
                (other, stride),
                (other + 16 * seed.choice((-256, -1, 1, 4, 32)), stride),
                *[(other + 16 * seed.randrange(-2000, 2000), stride) for _ in range(8)],
                (workspace + seed.choice((-64, 0, 16)), stride),
            ]
        )
    return given, where, size


@pytest.mark.parametrize("name", PROBLEMS)
def test_c_and_python_refuse_the_same_operands(c, tmp_path, named_cubins, name):
    descriptor, seed = PROBLEMS[name], random.Random()
    export_plans({name: descriptor}, tmp_path, device="h200")
    n = getattr(descriptor, "n", 0)
    plan = plan_of(descriptor).select(descriptor, preference={"exportable": True}, device=H200)
    opened = c.open(tmp_path)
    found = c.find(opened, name, n)
    codes = set()
    for changes in (0, 1, 2, 3) * 100:
        _, given = random_operands(plan, seed)
        case = spoiled(seed, given, 1 << 61, plan.workspace_size(), changes)
        expected = python_refuses(plan, *case)
        try:
            code = 0 if c.run(found, *case) else -1
        except RefusedError as refused:
            code = refused.code
            assert ctypes.c_uint.in_dll(c.stub, "stub_count").value == 0
        assert (code == 0) == (expected == 0), case
        if changes == 1:  # of several faults either side may name any
            assert code == expected, case
        codes.add(code)
    assert {0, 1, 3} <= codes
    c.library.s24_close(opened)
